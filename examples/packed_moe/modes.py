"""The modes: how one step is executed. The step itself is the same function in all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from packed_moe.checks import Check
from packed_moe.training import Trainer
from thdops import graphs

MODES = ("eager", "compile", "cudagraph")


def missing_for(mode: str, device: str) -> str:
    """Why this machine cannot run a mode, or ""."""
    if mode == "cudagraph" and device != "cuda":
        return "no GPU" if not torch.cuda.is_available() else f"--device is {device}"
    return ""


@dataclass
class Runner:
    """A mode at work: `run` executes one step on what the trainer has loaded, `checks` says afterwards whether the mode held."""

    label: str
    run: Callable[[], None]
    checks: Callable[[int], list[Check]]
    """From the number of steps that were run."""


def make_runner(mode: str, trainer: Trainer) -> Runner:
    """The runner of a mode, nothing executed yet."""
    return {"eager": _eager, "compile": _compiled, "cudagraph": _graphed}[mode](trainer)


def _eager(trainer: Trainer) -> Runner:
    return Runner("eager", trainer.step, lambda steps: [])


def _compiled(trainer: Trainer) -> Runner:
    """Forward and backward compiled without a graph break. The capacity is fixed, so one compilation serves all lengths."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = "inductor" if trainer.config.device == "cuda" or _cpp_compiler() else "aot_eager"
    # Inductor keeps intermediates of fused bf16 arithmetic in fp32 where eager mode rounds them: ask for eager's roundings.
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if backend == "inductor" else None
    trainer.forward = torch.compile(trainer.model, fullgraph=True, dynamic=False, backend=backend, options=options)

    def checks(steps: int) -> list[Check]:
        compiled, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        detail = f"{compiled} compilation{'s' * (compiled != 1)}, {breaks} graph breaks, {steps} steps"
        return [Check("compile", "compiled once, never again", compiled == 1 and not breaks, detail)]

    label = "compile" if backend == "inductor" else "compile (aot_eager: no C++ compiler found)"
    return Runner(label, trainer.step, checks)


def _cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler for its CPU kernels."""
    return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl") if name)


def _graphed(trainer: Trainer) -> Runner:
    """The whole step (gradients zeroed, forward, backward, clip, update) captured once, replayed for every step."""
    captured: graphs.Captured | None = None
    addresses = tuple(tensor.data_ptr() for tensor in trainer.packed.tensors())

    def run() -> None:
        nonlocal captured
        if captured is None:  # now that a batch is loaded
            captured = graphs.capture(lambda pack: trainer.step(), trainer.packed, state=trainer.state().values())
        captured()

    def checks(steps: int) -> list[Check]:
        report = None if captured is None else captured.report
        captures, replays = (report.captures, report.replays) if report else (0, 0)
        moved = addresses != tuple(tensor.data_ptr() for tensor in trainer.packed.tensors())
        detail = f"{captures} capture, {replays} replays, {steps} steps" + ", buffers moved" * moved
        return [Check("cudagraph", "one graph served every step", captures == 1 and replays == steps and not moved, detail)]

    return Runner("cudagraph", run, checks)
