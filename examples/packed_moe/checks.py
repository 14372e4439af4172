"""What a run proves: padding is exactly zero whatever stands in it, the modes agree, the batches really changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import thdops
from packed_moe import parallel
from packed_moe.model import Batch
from packed_moe.training import METRICS, Trainer, poisoned_memory

if TYPE_CHECKING:
    from packed_moe.loop import Result

STEP_TOLERANCE = {False: (1e-5, 1e-4), True: (1e-3, 5e-2)}
"""How far a compiled step may be from the eager one that starts from the same weights, relative, by whether bf16 autocast is on:
its loss, and each parameter's gradient (by norm). Fused arithmetic sums in another order, and a token whose two best experts are
equal but for that may choose the other one."""
RUN_TOLERANCE = {False: (1e-4, 1e-4, 1e-3), True: (5e-3, 5e-2, 1e-1)}
"""How far a compiled run's losses may be from an eager run's: in the first five steps, in the first ten, and in the mean of the
last ones. Steps in between say little, since training carries each difference on and magnifies it: in bf16 on an H200 from 1e-5 in
the first step to 4e-4 in the fifth and up to 2e-2 in the tenth."""
_EARLY_STEPS = (5, 10)


class Check(NamedTuple):
    """One statement about a run. `mode` says which run it is about; `detail` what was seen."""

    mode: str
    name: str
    passed: bool
    detail: str


class _Watch:
    """A tap that keeps what passes, and puts NaN on the padding rows of q, k and v first, if asked to."""

    def __init__(self, padding: Tensor, poison: bool) -> None:
        self.padding, self.poison = padding, poison
        self.seen: list[tuple[str, Tensor]] = []

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.poison and name in ("q", "k", "v"):
            tensor = torch.where(self.padding.view(-1, 1, 1), torch.nan, tensor)
        self.seen.append((name, tensor))
        return tensor


def check_padding(trainer: Trainer, mode: str, when: str) -> list[Check]:
    """Two eager passes over the loaded batch with the present weights, the second with NaN on the padding rows of q, k and v.

    Attention's output and its gradients for q, k and v must be +0.0 on padding rows in both, the residual stream and its gradient
    zero; the NaN must not change the loss nor any parameter's gradient by a bit. Fresh memory is filled with NaN meanwhile, so
    that a row that nobody writes shows. Leaves the trainer as it was.
    """
    batch = trainer.batch
    padding = thdops.padding_mask(*batch.own, len(trainer.probe))
    leaks: list[str] = []
    results: list[list[Tensor]] = []
    with poisoned_memory(True):
        for poison in (False, True):
            watch = _Watch(padding, poison)
            loss = trainer.model(batch, trainer.probe, watch).total
            seen = [tensor for _, tensor in watch.seen]
            gradients = torch.autograd.grad(loss, [*seen, *trainer.parameters])
            for (name, tensor), gradient in zip(watch.seen, gradients, strict=False):
                situation = f"{name}{' with NaN in padding' * poison}"
                if name in ("attention", "block") and not _zero(tensor[padding], exact=name == "attention"):
                    leaks.append(situation)
                if not _zero(gradient[padding], exact=name in ("q", "k", "v")):
                    leaks.append(f"gradient of {situation}")
            results.append([loss, *gradients[len(seen) :]])
    unchanged = all(torch.equal(plain, poisoned) for plain, poisoned in zip(*results, strict=True))
    rows = int(padding.sum())
    found = "nonzero: " + ", ".join(dict.fromkeys(leaks)) if leaks else f"{rows} padding rows, {when}"
    touched = "loss and every gradient unchanged" if unchanged else "the loss or a gradient changed"
    return [
        Check(mode, "padding rows exactly zero", not leaks, found),
        Check(mode, "NaN in padding changes nothing", unchanged, f"{touched}, {when}"),
    ]


def _zero(rows: Tensor, exact: bool) -> bool:
    """All zero; `exact` refuses -0.0 too."""
    return not bool((rows != 0).any() or (exact and rows.signbit().any()))


def check_compiled(trainer: Trainer, when: str) -> list[Check]:
    """The compiled forward and backward against the eager ones, from the present weights on the loaded batch."""
    allowed_loss, allowed_gradient = STEP_TOLERANCE[trainer.config.autocast]
    results = []
    for forward in (trainer.model, trainer.forward):
        loss = forward(trainer.batch, trainer.probe).total
        results.append([loss.detach(), *torch.autograd.grad(loss, trainer.parameters)])
    loss, *gradients = (_distance(compiled, eager) for eager, compiled in zip(*results, strict=True))
    seen = f"loss {loss:.1e} off, gradients up to {max(gradients):.1e}, {when}"
    held = loss <= allowed_loss and max(gradients) <= allowed_gradient
    return [Check("compile", "a step equals eager's up to rounding", held, seen)]


def check_ranks(trainer: Trainer, mode: str, when: str) -> list[Check]:
    """The ranks' losses and gradients against those of one process that has all rows, from the present weights on the loaded batch.

    Every rank does both, and sees whether they agree.
    """
    if trainer.group is None:
        return []
    config, device = trainer.config, trainer.probe.device
    with parallel.alone():
        model: Any = trainer.build(config).to(device)
    model.load_state_dict(trainer.model.state_dict())
    probe = torch.zeros(config.max_tokens, config.dim, device=device, requires_grad=True)
    alone = model(Batch.of(trainer.packed), probe)
    expected = torch.autograd.grad(alone.total, list(model.parameters()))
    losses = trainer.model(trainer.batch, trainer.probe)
    gradients = parallel.added_up(*torch.autograd.grad(losses.total, trainer.parameters))
    loss = max(_distance(ours, theirs) for ours, theirs in zip(losses[:4], alone[:4], strict=True))
    gradient = max(map(_distance, gradients, expected))
    allowed_loss, allowed_gradient = STEP_TOLERANCE[config.autocast]
    seen = f"losses up to {loss:.1e} off, gradients up to {gradient:.1e}, {when}"
    held = loss <= allowed_loss and gradient <= allowed_gradient
    return [Check(mode, f"{config.cp} ranks equal one up to rounding", held, seen)]


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    return float((found - expected).detach().norm() / expected.detach().norm().clamp(min=1e-30))


def check_history(history: Tensor, mode: str) -> list[Check]:
    """What the steps reported of themselves, a replayed graph's included. `history` is fp32 [steps, metrics]."""
    columns = dict(zip(METRICS, history.unbind(1), strict=True))
    leak = torch.stack((columns["padding_activation"], columns["padding_gradient"]))
    dirty = int((leak != 0).any(0).sum())
    finite = bool(history.isfinite().all())
    leaked = f"{dirty} of {len(history)} steps leaked" if dirty else f"{len(history)} steps"
    checks = [
        Check(mode, "padding zero inside every step", not dirty, leaked),
        Check(mode, "losses finite", finite, "all" if finite else "a loss or a gradient norm is NaN or infinite"),
    ]
    if len(history) >= 20:
        tenth = len(history) // 10
        first, last = float(columns["cross_entropy"][:tenth].mean()), float(columns["cross_entropy"][-tenth:].mean())
        checks.append(Check(mode, "the model learns", last < first, f"cross-entropy {first:.3f} -> {last:.3f}"))
    return checks


def check_variety(lengths: list[list[int]]) -> Check:
    """The batches differ: `lengths` holds the document lengths of each step."""
    layouts, counts = {tuple(step) for step in lengths}, {sum(step) for step in lengths}
    documents = [len(step) for step in lengths]
    longest = max(max(step) for step in lengths)
    detail = (
        f"{len(layouts)} layouts, {len(counts)} token counts ({min(counts)}..{max(counts)}) in {len(lengths)} steps;"
        f" {min(documents)}..{max(documents)} documents a step, the longest {longest}"
    )
    return Check("all", "lengths and token counts change", len(lengths) == 1 or len(counts) > 1, detail)


def compare(eager: Result, other: Result, autocast: bool) -> Check:
    """A mode against eager: bitwise for a CUDA graph, which runs the same kernels, within a tolerance when compiled."""
    if other.mode == "cudagraph":
        differing = int((eager.history != other.history).any(1).sum())
        weights = [name for name, weight in eager.weights.items() if not torch.equal(weight, other.weights[name])]
        steps = len(other.history)
        seen = f"every loss and gradient norm of {steps} steps, and the final weights"
        if differing or weights:
            seen = f"{differing} of {steps} steps differ, {len(weights)} of {len(eager.weights)} weight and optimizer tensors"
        return Check(other.mode, "bitwise equal to eager", not differing and not weights, seen)
    *allowed_early, allowed_late = RUN_TOLERANCE[autocast]
    loss, expected = other.history[:, 0], eager.history[:, 0]
    off = (loss - expected).abs() / expected.abs()
    early = [float(off[:steps].max()) for steps in _EARLY_STEPS]
    tenth = max(len(loss) // 10, 1)
    late = float((loss[-tenth:].mean() - expected[-tenth:].mean()).abs() / expected[-tenth:].mean().abs())
    firsts = ", ".join(f"{x:.1e} in the first {min(len(loss), steps)}" for x, steps in zip(early, _EARLY_STEPS, strict=True))
    passed = all(x <= allowed for x, allowed in zip(early, allowed_early, strict=True)) and late <= allowed_late
    return Check(
        other.mode, "losses follow eager's", passed, f"off at most {firsts} steps, {late:.1e} in the mean of the last {tenth}"
    )
