"""One run: a mode over all steps, with progress, checkpoints and checks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packed_moe import checkpoint, parallel
from packed_moe.checks import Check, check_compiled, check_history, check_padding, check_ranks
from packed_moe.config import Config
from packed_moe.data import Documents, draw
from packed_moe.model import PackedMoE
from packed_moe.modes import make_runner
from packed_moe.report import Progress
from packed_moe.training import METRICS, Trainer, poisoned_memory


@dataclass(frozen=True)
class Schedule:
    """Where a run writes, whether it goes on from a checkpoint, and every how many steps it saves and checks (0: at the end)."""

    folder: Path
    resume: bool = False
    checkpoint_every: int = 0
    check_every: int = 0

    def checkpoint(self, mode: str) -> Path:
        """A mode's checkpoint file."""
        return self.folder / f"checkpoint-{mode}.pt"


@dataclass
class Result:
    """What a run leaves. `history` is fp32 [steps, metrics] on the CPU; speed covers the timed steps only (not the first one)."""

    mode: str
    label: str
    history: Tensor
    weights: dict[str, Tensor]
    checks: list[Check]
    lengths: list[list[int]] = field(repr=False)
    resumed_at: int
    seconds: float
    timed_steps: int
    timed_tokens: int
    capacity: int

    @property
    def tokens_per_second(self) -> float | None:
        """Valid tokens per second; None where no step was timed."""
        return self.timed_tokens / self.seconds if self.seconds else None

    @property
    def padding_share(self) -> float:
        """The share of the buffer's rows that held no token."""
        return 1 - sum(map(sum, self.lengths)) / (len(self.lengths) * self.capacity)


class Job(NamedTuple):
    """What is trained: a model, the checks that it adds (from a trainer, the mode and when), its own default sizes on a CPU,
    whether it can share out rows among ranks, and where its results go if nobody says."""

    build: Callable[[Config], nn.Module] = PackedMoE
    checks: Callable[[Trainer, str, str], list[Check]] = lambda trainer, mode, when: []
    cpu_sizes: Mapping[str, int | float] = MappingProxyType({})
    context_parallel: bool = True
    folder: str = "runs"


def run_mode(
    mode: str, config: Config, documents: Documents, schedule: Schedule, progress: Progress, job: Job | None = None
) -> Result:
    """Train in one mode from the seed (or its checkpoint) to the last step."""
    identity = {**dataclasses.asdict(config), "documents": documents.digest, "mode": mode, "torch": str(torch.__version__)}
    path = schedule.checkpoint(mode)
    job = job or Job()
    with deterministic():
        trainer = Trainer(config, job.build)
        history = torch.zeros(config.steps, len(METRICS), device=config.device)
        start = 0
        if schedule.resume and path.exists():
            start = _resume(path, identity, trainer, history)
        runner = make_runner(mode, trainer)
        clock = _Clock(config.device)
        checks: list[Check] = []
        batches = [draw(documents, config, step) for step in range(config.steps)]
        lengths = [[len(document) for document in batch] for batch in batches]
        report_every = max(1, config.steps // 20)
        progress.start(runner.label, config.steps, start)
        for step in range(start, config.steps):
            trainer.load(batches[step], step)
            with no_sync(config.device, step > start):
                runner.run()
                history[step].copy_(trainer.metrics)
            done = step + 1
            save_now = done == config.steps or _due(done, schedule.checkpoint_every)
            check_now = done == config.steps or _due(done, schedule.check_every)
            if step == start:
                clock.start()  # what comes once (compilation, capture, lazy initialisation) is not speed
            else:
                clock.count(sum(lengths[step]))
            if save_now or check_now or done % report_every == 0:
                clock.stop()
                progress.update(done, float(history[step, 0]))
                if check_now:
                    checks += check_padding(trainer, mode, f"after step {done}")
                    checks += check_ranks(trainer, mode, f"after step {done}")
                    checks += check_compiled(trainer, f"after step {done}") if mode == "compile" else []
                if save_now and parallel.is_first():
                    saved = {"run": identity, "step": done, "state": trainer.state(), "history": history[:done]}
                    checkpoint.save(path, saved)
                clock.start()
        progress.finish()
        if start == config.steps:
            trainer.load(batches[-1], config.steps - 1)
            checks += check_padding(trainer, mode, f"after step {config.steps}")
        else:
            checks = runner.checks(config.steps - start) + checks
        checks += job.checks(trainer, mode, f"after step {config.steps}")
        final = history.cpu()
        weights = {name: tensor.cpu() for name, tensor in trainer.snapshot().items()}
        checks += check_history(final, mode)
    return Result(
        mode=mode,
        label=runner.label,
        history=final,
        weights=weights,
        checks=checks,
        lengths=lengths,
        resumed_at=start,
        seconds=clock.seconds,
        timed_steps=clock.steps,
        timed_tokens=clock.tokens,
        capacity=config.max_tokens,
    )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _resume(path: Path, identity: dict[str, Any], trainer: Trainer, history: Tensor) -> int:
    saved = checkpoint.load(path, identity)
    trainer.restore(saved["state"])
    history[: saved["step"]].copy_(saved["history"])
    return saved["step"]


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that repeat bitwise. Fresh memory is not poisoned in the timed steps, only in the padding check."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with poisoned_memory(False):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def no_sync(device: str, enabled: bool) -> Iterator[None]:
    """Make a host sync inside the step an error: it would stall an eager run and cannot be captured."""
    if device != "cuda" or not enabled:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Clock:
    """Seconds, steps and tokens of the timed stretches. The device is waited for at both ends of a stretch, never within."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = 0.0
        self.steps = self.tokens = 0
        self._since: float | None = None

    def start(self) -> None:
        self._wait()
        self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    def stop(self) -> None:
        self._wait()
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
