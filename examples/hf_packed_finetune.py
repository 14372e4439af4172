"""Train a Hugging Face Qwen3-MoE on packed real documents: attention, routers and experts on thdops, the model the library's.

    python examples/hf_packed_finetune.py                   # every mode that this machine can run; needs thdops[transformers]
    python examples/hf_packed_finetune.py --data ~/books --steps 500 --mode cudagraph

A small model with random weights is built in code; nothing is downloaded. Documents, batches, modes, checks and options are those
of `train_packed_moe.py`. One check comes on top: logits, losses and all gradients of the trained model equal those of the library's
own eager attention, routers and experts on the same documents, unpacked.

Files and exit codes: as `train_packed_moe.py`.
"""

# pyright: reportMissingImports=false
# transformers is an extra, and the type checker does without it.

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import train_packed_moe
from packed_moe.checks import Check
from packed_moe.config import Config
from packed_moe.loop import Job
from packed_moe.model import VOCABULARY, Batch, Losses, Tap, largest_on_padding
from packed_moe.training import Trainer
from torch import Tensor, nn

import thdops
from thdops.integrations.transformers import patch_router, register
from thdops.packing import IGNORE_INDEX

_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""How far fp32 results may be from the library's, relative, by norm. Queries' gradients nearly vanish in the first steps; a GPU's
matrix products may round their inputs to tf32."""
_CHECKED_ROWS = 400
_CPU_SIZES = {"steps": 40, "max_tokens": 512, "max_seqs": 12, "lr": 3e-3}


def _qwen(config: Config, **implementations: str) -> Any:
    """The library's model, T rows of D = config.dim."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    configuration: Any = Qwen3MoeConfig  # whose own type knows only some of its settings
    settings = configuration(
        vocab_size=VOCABULARY,
        hidden_size=config.dim,
        moe_intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        num_experts=config.experts,
        num_experts_per_tok=config.topk,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=config.aux_coeff,
        max_position_embeddings=config.max_tokens,
    )
    return Qwen3MoeForCausalLM._from_config(settings, **implementations)


class PackedQwen(nn.Module):
    """The library's model behind the face of `PackedMoE`: bytes in, losses out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        register()
        self.qwen = _qwen(config, attn_implementation="thdops")
        patch_router(self.qwen)
        self.autocast = config.autocast

    def forward(self, batch: Batch, probe: Tensor, tap: Tap | None = None) -> Losses:
        """The losses of a batch; `probe` and `tap` as in `PackedMoE`."""
        with torch.autocast(probe.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            if tap is None:
                return self._losses(self.run(batch, probe), batch)
            with _tapped(self.qwen, tap):
                return self._losses(self.run(batch, probe), batch)

    def run(self, batch: Batch, probe: Tensor) -> Any:
        """What the library's model returns for a packed batch."""
        metadata = (batch.cu_seqlens, batch.cu_seqlens_padded)
        embedded = thdops.zero_fill(self.qwen.get_input_embeddings()(batch.tokens), *metadata) + probe
        padding = thdops.padding_mask(*metadata, batch.tokens.shape[0])
        return self.qwen(
            inputs_embeds=embedded[None],
            position_ids=thdops.positions(*metadata, batch.tokens.shape[0])[None],
            attention_mask=~padding[None],  # without it the library reads the positions on the host
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
            cu_seqlens_padded=batch.cu_seqlens_padded,
            labels=batch.labels[None],
            shift_labels=batch.labels[None],  # a pack's labels are the next tokens already
            num_items_in_batch=(batch.labels != IGNORE_INDEX).sum().clamp(min=1),
            use_cache=False,
        )

    def _losses(self, output: Any, batch: Batch) -> Losses:
        aux = self.qwen.router_aux_loss_coef * output.aux_loss
        padding = thdops.padding_mask(batch.cu_seqlens, batch.cu_seqlens_padded, batch.tokens.shape[0])
        # Of rows of zeros norm and head make zeros, so what leaked into the last layer's padding shows in the logits.
        leaked = largest_on_padding(output.logits[0].detach(), padding)
        return Losses(output.loss, output.loss - aux, aux, torch.zeros_like(aux), leaked)


@contextmanager
def _tapped(qwen: Any, tap: Tap) -> Iterator[None]:
    """Let `tap` see, and replace, the rows of q, k and v, attention's out and each layer's out, `[T, ...]` each."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from thdops.integrations.transformers.attention import attention_forward
    from thdops.integrations.transformers.rows import sequences_of_mask

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **batch: Any) -> tuple[Tensor, None]:
        q, k, v = (tap(name, x[0].transpose(0, 1)).transpose(0, 1)[None] for name, x in (("q", q), ("k", k), ("v", v)))
        out, _ = attention_forward(module, q, k, v, mask, **batch)
        return tap("attention", out[0])[None], None

    AttentionInterface.register("thdops-tapped", attention)
    AttentionMaskInterface.register("thdops-tapped", sequences_of_mask)
    qwen.set_attn_implementation("thdops-tapped")
    hooks = [layer.register_forward_hook(lambda module, args, out: tap("block", out[0])[None]) for layer in qwen.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        qwen.set_attn_implementation("thdops")


def check_library(trainer: Trainer, mode: str, when: str) -> list[Check]:
    """Text of the loaded batch as four documents, one of a single token: packed through thdops, unpacked through the library alone.

    Both in fp32."""
    rows = min(_CHECKED_ROWS, trainer.config.max_tokens // 2)
    text = torch.cat(trainer.packed.unpack(trainer.batch.tokens))[:rows]
    n = len(text)
    texts = [part for part in text.tensor_split((n // 2, n // 2 + 1, 3 * n // 4)) if len(part)][: trainer.config.max_seqs]
    model = trainer.model
    library = _qwen(trainer.config, attn_implementation="eager", experts_implementation="eager").to(trainer.probe.device)
    library.load_state_dict(model.qwen.state_dict())
    trainer.packed.load_([text.cpu() for text in texts])
    packed = model.run(trainer.batch, trainer.probe)
    unpacked = library(**_right_padded(texts), use_cache=False)
    ours = trainer.packed.unpack(packed.logits[0])
    theirs = [logits[: len(document)] for logits, document in zip(unpacked.logits, ours, strict=True)]
    gradients = [torch.autograd.grad(out.loss, list(of.parameters())) for out, of in ((packed, model.qwen), (unpacked, library))]
    off = {
        "logits": _distance(torch.cat(ours), torch.cat(theirs)),
        "loss": _distance(packed.loss, unpacked.loss),
        "aux loss": _distance(packed.aux_loss, unpacked.aux_loss),
        "gradients": max(map(_distance, *gradients)),
    }
    seen = ", ".join(f"{name} {value:.1e}" for name, value in off.items()) + f" off, {len(texts)} documents, {when}"
    return [Check(mode, "equals the library's eager model", max(off.values()) <= _TOLERANCE[trainer.config.device], seen)]


def _right_padded(texts: list[Tensor]) -> dict[str, Tensor]:
    """The documents as the library takes them by itself: a row each, a mask, labels that it shifts."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts], device=tokens.device)
    mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, IGNORE_INDEX)}


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, by norm."""
    return float((ours - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-30))


JOB = Job(PackedQwen, check_library, _CPU_SIZES, context_parallel=False, folder="runs/hf")

if __name__ == "__main__":
    if not find_spec("transformers"):
        sys.exit("error: transformers is not installed; pip install 'thdops[transformers]'")
    sys.exit(train_packed_moe.main(job=JOB, description=__doc__ or ""))
