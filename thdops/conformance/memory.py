"""Checks of memory: inputs untouched, nothing aliased, versions bumped, every element written, and nothing outside touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, as_tuple, copied, describe, is_metadata, naming
from thdops.conformance.declared import faked
from thdops.conformance.gradients import differentiable, grad_slots, gradients, upstream_for, with_grad
from thdops.conformance.interpreter import implementations, once, whole_storage
from thdops.conformance.tensors import bits, close, error_of, place, same_bits

_MARGIN = 64  # elements of canary before and behind a tensor
_CANARY = 0x5A


def check_inputs_untouched(case: OpUnderTest) -> None:
    """What an op does not declare to mutate keeps its bits, whole storages included; in its backward as well."""
    for label, function, fit in implementations(case):
        for sample in case.samples():
            with naming(sample.name):
                args = fit(sample.args)
                if args is None:
                    continue
                before = copied(args)
                after = once(case, function, args).args
                for slot, old in zip(case.slots(after), case.slots(before), strict=True):
                    if slot.argument not in case.spec.mutates:
                        what = f"{label}input {slot.label} after the call"
                        same_bits(what, whole_storage(slot.tensor), whole_storage(old.tensor))
    for sample in case.compile_samples() if differentiable(case) else []:
        with naming(sample.name):
            _untouched_by_backward(case, sample.args)


def _untouched_by_backward(case: OpUnderTest, args: Arguments) -> None:
    upstream = upstream_for(case, args)
    old = {i: g.clone() for i, g in upstream.items()}
    work, slots = with_grad(case, args)
    outputs = as_tuple(case.op(*work))
    if not slots:
        return
    torch.autograd.grad([outputs[i] for i in upstream], [s.tensor for s in slots], list(upstream.values()), allow_unused=True)
    for i, g in upstream.items():
        same_bits(f"incoming gradient of {case.output_label(i)} after the backward", g, old[i])
    for slot, before in zip(case.slots(work), case.slots(args), strict=True):
        same_bits(f"input {slot.label} after the backward", slot.tensor, before.tensor)


def check_no_alias(case: OpUnderTest) -> None:
    """No output shares memory with an input or with another output."""
    for sample in case.samples():
        with naming(sample.name):
            args = copied(sample.args)
            seen = {s.tensor.untyped_storage().data_ptr(): f"input {s.label}" for s in case.slots(args) if s.tensor.numel()}
            for i, output in enumerate(as_tuple(case.op(*args))):
                if output.numel() == 0:
                    continue
                address = output.untyped_storage().data_ptr()
                if address in seen:
                    raise CheckFailed(f"{case.output_label(i)} shares memory with {seen[address]}")
                seen[address] = case.output_label(i)


def check_mutation(case: OpUnderTest) -> None:
    """What is written gets a new version, nothing else does; tensors that require grad are refused, fake ones too."""
    for sample in case.samples():
        with naming(sample.name):
            args = copied(sample.args)
            versions = [s.tensor._version for s in case.slots(args)]
            case.op(*args)
            for slot, before in zip(case.slots(args), versions, strict=True):
                bumped = slot.tensor._version != before
                if bumped != (slot.argument in case.spec.mutates):
                    raise CheckFailed(
                        f"{slot.label}: {'not written, but' if bumped else 'written, but'} its version says otherwise"
                    )
            _check_grad_refused(case, sample.args)


def _check_grad_refused(case: OpUnderTest, args: Arguments) -> None:
    floats = [s for s in case.slots(args) if s.argument in case.spec.mutates and s.tensor.is_floating_point()]
    for slot in floats[:1]:
        args = slot.replaced(copied(args), slot.tensor.clone().requires_grad_())
        texts = []
        for mode in ("eager", "fake"):
            try:
                if mode == "fake":
                    with FakeTensorMode() as fake:
                        case.op(*faked(fake, args))
                else:
                    case.op(*args)
            except (ValueError, RuntimeError) as error:
                texts.append(describe(error))
            else:
                raise CheckFailed(f"{slot.label} requires grad and is written all the same ({mode})")
        if texts[0] != texts[1]:
            raise CheckFailed(f"{slot.label} requires grad: eager says {texts[0]!r}, fake says {texts[1]!r}")
        with torch.no_grad():
            case.op(*args)


@contextmanager
def poisoned_allocations(fill: bool = True) -> Iterator[None]:
    """`torch.empty` holds NaN, the largest integer, True: what nobody writes is seen."""
    mode, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(fill, warn_only=True)
        settings.fill_uninitialized_memory = fill
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warn)
            settings.fill_uninitialized_memory = filled


def check_every_element_written(case: OpUnderTest) -> None:
    """With allocations full of NaN, forward and backward give what they should."""
    for label, function, fit in implementations(case):
        for sample in case.samples():
            with naming(sample.name):
                args = fit(sample.args)
                if args is None:
                    continue
                truth = case.truth(args)
                plain = once(case, function, args).results
                with poisoned_allocations():
                    results = case.call(function, args)
                for i, (actual, before, expected) in enumerate(zip(results, plain, truth, strict=True)):
                    error = error_of(before, expected)
                    close(f"{label}{case.output_label(i)} in poisoned memory", actual, expected, error, case.spec.roundings)
    for sample in case.compile_samples() if differentiable(case) else []:
        if not grad_slots(case, sample.args):
            continue
        with naming(sample.name):
            upstream = upstream_for(case, sample.args)
            plain = gradients(case, case.op, sample.args, upstream)
            with poisoned_allocations():
                again = gradients(case, case.op, sample.args, upstream)
            for slot, actual in again.items():
                close(f"gradient of {slot} in poisoned memory", actual, plain[slot], 0.0, case.spec.roundings)


# --- malformed metadata ----------------------------------------------------------------------------------------------------------


def check_malformed_metadata(case: OpUnderTest) -> None:
    """Decreasing, negative, beyond T and huge cu_seqlens: no exception, nothing outside is touched, every element is written."""
    for label, function, fit in implementations(case):
        for sample in case.compile_samples():
            args = fit(sample.args)
            if args is None:
                continue
            for name, malformed in _malformed(case, args):
                with naming(f"{label}{sample.name}, {name}"):
                    _stays_inside(case, function, malformed)


def _malformed(case: OpUnderTest, args: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Small excursions come first: they hit a canary, where the wild ones might end the process."""
    rows = max((n for s in case.slots(args) for n in s.tensor.shape), default=1)
    rows = max([rows, *(a for a in args if isinstance(a, int))])
    metadata = [s for s in case.slots(args) if is_metadata(s.argument) and s.tensor.numel() > 1]
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "a little beyond T": lambda t: t + (rows - t[-1] + 3),
        "a little below 0": lambda t: t - (t[0] + 3),
        "decreasing": lambda t: t.flip(0).contiguous(),
        "zigzag": lambda t: torch.where(torch.arange(len(t), device=t.device) % 2 == 0, t, rows - t).to(t.dtype),
        "scaled beyond T": lambda t: t * 3 + rows,
        "huge": lambda t: torch.full_like(t, torch.iinfo(t.dtype).max - 7).index_fill_(0, torch.tensor([0], device=t.device), 0),
        "hugely negative": lambda t: torch.full_like(t, torch.iinfo(t.dtype).min + 7),
    }
    for name, change in kinds.items():
        everything = args
        for slot in metadata:
            changed = change(slot.tensor)
            everything = slot.replaced(everything, changed)
            yield f"{slot.label} {name}", slot.replaced(args, changed)
        if len(metadata) > 1:
            yield f"all cu_seqlens {name}", everything


def _stays_inside(case: OpUnderTest, function: Callable[..., Any], args: Arguments) -> None:
    buffers: list[tuple[str, Tensor, Tensor]] = []
    for slot in case.slots(args):
        buffer, view = _between_canaries(slot.tensor)
        buffers.append((slot.label, buffer, view))
        args = slot.replaced(args, view)
    before = [buffer.clone() for _, buffer, _ in buffers]
    with poisoned_allocations():
        results = as_tuple(function(*args))
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
    for (label, buffer, view), old in zip(buffers, before, strict=True):
        written = label.split("[")[0] in case.spec.mutates
        same_bits(f"memory around {label}", buffer, old, ignore=_covered(buffer, view) if written else None)
    _all_written(case, function, args, results)


def _between_canaries(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes of a buffer with margins, the tensor's values in its middle, with its strides)."""
    if 0 in tensor.stride():
        tensor = tensor.contiguous()
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    buffer = torch.full(((extent + 2 * _MARGIN) * size,), _CANARY, dtype=torch.uint8, device=tensor.device)
    view = buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), _MARGIN)
    bits(view).copy_(bits(tensor))
    return buffer, view


def _covered(buffer: Tensor, view: Tensor) -> Tensor:
    """True on the bytes of `buffer` that belong to `view`."""
    covered = torch.zeros_like(buffer)
    size = view.element_size()
    covered.view(-1, size).as_strided((*view.shape, size), (*(s * size for s in view.stride()), 1), _MARGIN * size).fill_(1)
    return covered.bool()


def _all_written(case: OpUnderTest, function: Callable[..., Any], args: Arguments, results: tuple[Tensor, ...]) -> None:
    """No output holds what poisoned memory holds, unless the op computed just that."""
    poison = [r.isnan() if r.is_floating_point() else _largest(r) for r in results]
    if not any(p.any() for p in poison):
        return
    with poisoned_allocations(fill=False):
        again = as_tuple(function(*args))
    for i, (mask, r) in enumerate(zip(poison, again, strict=True)):
        unwritten = mask & ~(r.isnan() if r.is_floating_point() else _largest(r))
        if unwritten.any():
            raise CheckFailed(f"{case.output_label(i)} is not written at {place(unwritten)}")


def _largest(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return torch.zeros_like(tensor)
    return tensor == torch.iinfo(tensor.dtype).max
