"""What a run is made of: sizes, seed and schedule. Everything here decides the losses, so a checkpoint records all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass


class UserError(Exception):
    """Something the user can put right. `main` prints the text and leaves with exit code 2."""


@dataclass(frozen=True)
class Config:
    """One run. T = max_tokens rows and B = max_seqs sequences are the capacity of the batch: fixed, whatever fills it."""

    device: str
    steps: int
    seed: int
    max_tokens: int
    max_seqs: int
    pad_multiple: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int
    ffn: int
    lr: float
    autocast: bool
    """bf16 autocast over fp32 parameters: what a GPU is good at, and what its attention and grouped product kernels take."""
    aux_coeff: float = 1e-2
    z_coeff: float = 1e-3
    weight_decay: float = 0.01
    clip: float = 1.0
    cp: int = 1
    """How many ranks share out the rows of a batch, and by which `comm` of `thdops.context_parallel.attention`."""
    cp_comm: str = "p2p"

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


CPU_SIZES = {
    "steps": 60,
    "max_tokens": 1024,
    "max_seqs": 24,
    "pad_multiple": 8,
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "experts": 4,
    "topk": 2,
    "ffn": 96,
    "lr": 1e-2,
    "autocast": False,
}

GPU_SIZES = {
    "steps": 100,
    "max_tokens": 8192,
    "max_seqs": 96,
    "pad_multiple": 8,
    "dim": 512,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "experts": 8,
    "topk": 2,
    "ffn": 256,
    "lr": 2e-3,
    "autocast": True,
}


def make_config(device: str, seed: int, **given: int | float | str | None) -> Config:
    """The device's default sizes with what the user gave put over them. Raises `UserError` for sizes that cannot work."""
    sizes = dict(GPU_SIZES if device == "cuda" else CPU_SIZES)
    sizes.update({name: value for name, value in given.items() if value is not None})
    config = Config(device=device, seed=seed, **sizes)
    _validate(config)
    return config


def _validate(config: Config) -> None:
    def refuse(flag: str, rule: str, got: object, fix: str) -> UserError:
        return UserError(f"{flag} must {rule}, got {got}; {fix}")

    for name in ("steps", "max_tokens", "max_seqs", "pad_multiple", "dim", "layers", "heads", "kv_heads", "experts", "topk", "ffn"):
        value = getattr(config, name)
        if value < 1:
            raise refuse(f"--{name.replace('_', '-')}", "be at least 1", value, "pass a positive number")
    if config.max_tokens % config.pad_multiple:
        raise refuse(
            "--max-tokens",
            f"be a multiple of --pad-multiple ({config.pad_multiple})",
            config.max_tokens,
            f"{config.max_tokens // config.pad_multiple * config.pad_multiple or config.pad_multiple} would do",
        )
    if config.max_tokens < 2 * config.pad_multiple:
        raise refuse("--max-tokens", f"hold two padded documents ({2 * config.pad_multiple} rows)", config.max_tokens, "raise it")
    if config.pad_multiple % (2 * config.cp):
        fix = "each rank has two pieces of every document; pass the same to the run that it is compared with"
        raise refuse("--pad-multiple", f"be a multiple of 2 * --cp ({2 * config.cp})", config.pad_multiple, fix)
    if config.cp_comm == "a2a" and config.kv_heads % config.cp:
        fix = "each rank has as many heads; use another --cp-comm"
        raise refuse("--kv-heads", f"be a multiple of --cp ({config.cp}) with --cp-comm a2a", config.kv_heads, fix)
    if config.heads % config.kv_heads:
        raise refuse("--heads", f"be a multiple of --kv-heads ({config.kv_heads})", config.heads, "change one of them")
    if config.head_dim % 8 or not 16 <= config.head_dim <= 256:
        raise refuse("--head-dim", "be a multiple of 8 from 16 to 256", config.head_dim, "attention takes no other")
    for name in ("dim", "ffn"):
        if config.device == "cuda" and getattr(config, name) % 8:
            fix = "the experts' grouped product wants bf16 rows of whole 16 bytes"
            raise refuse(f"--{name}", "be a multiple of 8 on a GPU", getattr(config, name), fix)
    if not (math.isfinite(config.lr) and config.lr > 0):
        raise refuse("--lr", "be a finite number above 0", config.lr, "try 0.001")
    if not 0 <= config.seed < 2**63:
        raise refuse("--seed", "be from 0 to 2**63 - 1", config.seed, "pass another")
    if config.topk > config.experts:
        raise refuse("--topk", f"be at most --experts ({config.experts})", config.topk, "lower it")
