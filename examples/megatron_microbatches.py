"""Micro-batches in flight under CUDA graphs, in the style of Megatron: eager, a graph per layer, one graph of the whole iteration.

    python examples/megatron_microbatches.py                # 200 iterations a way on a GPU; on a CPU a few, eagerly

The model is that of `train_packed_moe.py` as a pipeline stage: attention is called as Megatron calls it, router losses are attached
with a scale that is set between forward and backward, and of each iteration's five micro-batches four are in flight at most (1F1B),
one is full, one empty, and one has a single token. From the same seed every way must give the same bits: losses, gradients and
final weights.

Exit code: 0 all checks passed, 1 one failed, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

# cuBLAS repeats bitwise only with a fixed workspace, and reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from packed_moe import microbatches, report
from packed_moe.checks import Check
from packed_moe.config import Config, UserError, make_config
from packed_moe.data import Documents, load_documents
from packed_moe.loop import deterministic
from packed_moe.microbatches import IN_FLIGHT, METRICS, MICROBATCHES, Pipeline, Way, draw_microbatches
from torch import Tensor

_SIZES = {
    "cpu": {"max_tokens": 256, "max_seqs": 12, "dim": 32, "ffn": 48},
    "cuda": {"max_tokens": 2048, "max_seqs": 32, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128},
}
_OPTIONS = ("max_tokens", "max_seqs", "dim", "layers", "ffn")
_TOLERANCE = {False: 1e-5, True: 2e-2}
"""How far a gradient may be from that of a plain sum of the losses, relative, by norm, by whether bf16 autocast is on: the same
terms are added in another order."""


class Found(NamedTuple):
    """What a way leaves: by iteration and micro-batch its numbers, by iteration the bits of every gradient, the final state."""

    metrics: Tensor
    bits: Tensor
    weights: dict[str, Tensor]
    milliseconds: float
    checks: list[Check]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit code is described above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--replays", type=int, metavar="N", help="iterations of each way (default: 200 on a GPU, 8 on a CPU)")
    parser.add_argument("--data", metavar="DIR", help="a folder of text (default: the Python standard library's sources)")
    parser.add_argument("--seed", type=int, default=0)
    for size in _OPTIONS:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N", help="default: by device")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # what the host computes is tiny: threads only cost
    sizes = _SIZES[device] | {size: value for size in _OPTIONS if (value := getattr(options, size)) is not None}
    iterations = options.replays if options.replays is not None else (200 if device == "cuda" else 8)
    try:
        if iterations < 1:
            raise UserError(f"--replays must be at least 1, got {iterations}; pass a positive number")
        config = make_config(device, options.seed, steps=iterations, **sizes)
        documents = load_documents(options.data, config.max_tokens // 2)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with deterministic():
        return _run(config, documents)


def _run(config: Config, documents: Documents) -> int:
    ways = {"eager": _eager, "whole iteration": _whole} | ({"graph per layer": _layers} if config.device == "cuda" else {})
    found: dict[str, Found] = {}
    for name, way in ways.items():
        found[name] = way(config, documents)
        print(
            f"{name}: {config.steps} iterations of {MICROBATCHES} micro-batches, {found[name].milliseconds:.2f} ms each", flush=True
        )
    checks = [check._replace(mode=name) for name, one in found.items() for check in (*one.checks, *_check_numbers(one))]
    checks += [_compare(name, found["eager"], one) for name, one in found.items() if name != "eager"]
    checks += [_check_order(config, documents), _check_scale(config, documents)]
    report.table(("way", "check", "", "seen"), [(c.mode, c.name, "pass" if c.passed else "FAIL", c.detail) for c in checks])
    if config.device == "cpu":
        print("\nnot shown, for want of a GPU: CUDA graphs, whole or per layer, and times that say anything")
    failed = [f"{check.mode}: {check.name}" for check in checks if not check.passed]
    print("FAILED: " + "; ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


# --- the ways --------------------------------------------------------------------------------------------------------------------


def _eager(config: Config, documents: Documents) -> Found:
    pipeline = Pipeline(config)
    return _iterate(pipeline, microbatches.eager(pipeline), documents)


def _layers(config: Config, documents: Documents) -> Found:
    pipeline = Pipeline(config)
    way = microbatches.graphed_layers(pipeline, draw_microbatches(documents, config, 0))
    return _iterate(pipeline, way, documents)


def _whole(config: Config, documents: Documents) -> Found:
    pipeline = Pipeline(config, slots=MICROBATCHES)
    way, report_of = microbatches.whole_iteration(pipeline)
    found = _iterate(pipeline, way, documents)
    if config.device == "cpu":
        return found
    seen = report_of()
    one = seen is not None and (seen.captures, seen.replays) == (1, config.steps)
    return found._replace(checks=[Check("", "one graph served every iteration", one, str(seen))])


def _iterate(pipeline: Pipeline, way: Way, documents: Documents) -> Found:
    config = pipeline.config
    metrics = torch.zeros(config.steps, MICROBATCHES, len(METRICS), device=config.device)
    bits = torch.zeros(config.steps, len(pipeline.bits), dtype=torch.int64, device=config.device)
    start = 0.0
    for iteration in range(config.steps):
        drawn = draw_microbatches(documents, config, iteration)
        pipeline.prepare(iteration)
        way(drawn, iteration > 0)
        metrics[iteration].copy_(pipeline.metrics)
        bits[iteration].copy_(pipeline.bits)
        if iteration == 0:  # what comes once (compilation, capture) is not speed
            _wait(config)
            start = time.perf_counter()
    _wait(config)
    each = (time.perf_counter() - start) * 1e3 / max(1, config.steps - 1)
    weights = {name: tensor.cpu() for name, tensor in pipeline.trainer.snapshot().items()}
    return Found(metrics.cpu(), bits.cpu(), weights, each, [])


def _wait(config: Config) -> None:
    if config.device == "cuda":
        torch.cuda.synchronize()


# --- the checks ------------------------------------------------------------------------------------------------------------------


def _check_numbers(found: Found) -> list[Check]:
    padding = found.metrics[:, :, METRICS.index("padding_activation")]
    losses = found.metrics[:, :, : METRICS.index("padding_activation")]
    count = found.metrics.shape[0] * MICROBATCHES
    finite = bool(losses.isfinite().all()) and all(bool(w.isfinite().all()) for w in found.weights.values())
    first, last = (float(losses[i, :, 0].sum() / (losses[i, :, 0] > 0).sum().clamp(min=1)) for i in (0, -1))
    return [
        Check("", "padding rows exactly zero", bool((padding == 0).all()), f"in each of {count} micro-batches"),
        Check("", "losses and weights finite", finite, f"cross-entropy {first:.3f} at first, {last:.3f} at last"),
    ]


def _compare(name: str, expected: Found, found: Found) -> Check:
    """The same bits in every iteration: losses, gradients; and in all weights and optimizer tensors at the end."""
    losses = int((found.metrics != expected.metrics).flatten(1).any(1).sum())
    gradients = int((found.bits != expected.bits).any(1).sum())
    weights = sum(not torch.equal(weight, expected.weights[key]) for key, weight in found.weights.items())
    if losses or gradients or weights:
        seen = (
            f"of {len(found.bits)} iterations, losses differ in {losses}, gradients in {gradients}; {weights} final tensors differ"
        )
    else:
        seen = f"losses and {found.bits.shape[1]} gradients in {len(found.bits)} iterations, {len(found.weights)} final tensors"
    return Check(name, "bitwise equal to eager", not (losses or gradients or weights), seen)


def _check_order(config: Config, documents: Documents) -> Check:
    """Micro-batches in flight know nothing of each other: the same gradients as one after the other, bit by bit."""
    results = []
    for in_flight in (IN_FLIGHT, 1):
        pipeline = Pipeline(config)
        pipeline.prepare(0)
        pipeline.zero()
        pipeline.accumulate(draw_microbatches(documents, config, 0), in_flight)
        results.append([*pipeline.trainer.gradients, pipeline.metrics])
    same = all(map(torch.equal, *results))
    return Check("eager", "in flight as one at a time", same, f"{IN_FLIGHT} in flight against 1, bitwise")


def _check_scale(config: Config, documents: Documents) -> Check:
    """Attached losses give the gradients of a sum of all losses, times the scale that is set behind the forward."""
    pipeline = Pipeline(config)
    drawn = draw_microbatches(documents, config, 0)
    pack = pipeline.slots.load_(max(drawn, key=len), 0)
    stage, parameters = pipeline.stage, pipeline.trainer.parameters
    layers: list[Any] = list(stage.blocks)
    scale = torch.full_like(stage.scale, 512.0)
    stage.scale.fill_(torch.nan)
    loss, _, _ = stage.losses(pack, layers)
    stage.scale.copy_(scale)
    attached = torch.autograd.grad(loss, parameters, scale)
    loss, router, _ = stage.losses(pack, [layer.unattached for layer in layers])
    added = torch.autograd.grad(loss + router, parameters, scale)
    off = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(attached, added, strict=True))
    seen = f"gradients up to {off:.1e} off those of a sum of the losses"
    return Check("eager", "the scale of the backward counts", off <= _TOLERANCE[config.autocast], seen)


if __name__ == "__main__":
    sys.exit(main())
