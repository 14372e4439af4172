"""Checks of gradients: all of them, from every output, in any strides; and no derivative that would be silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from thdops.conformance.case import (
    Arguments,
    CheckFailed,
    OpUnderTest,
    Slot,
    as_tuple,
    copied,
    describe,
    in_fp64,
    map_tensors,
    naming,
)
from thdops.conformance.tensors import as_good_as, close, restrided

_GRAD_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SAME_VALUES_ROUNDINGS = 8.0  # other strides may make eager code sum in another order


def differentiable(case: OpUnderTest) -> bool:
    """Whether the op has a backward formula."""
    return case.spec.backward is not None


def grad_slots(case: OpUnderTest, args: Arguments) -> list[Slot]:
    """The tensors that must get a gradient: floating point, and not declared to have none."""
    return [s for s in case.slots(args) if s.tensor.dtype in _GRAD_DTYPES and s.argument not in case.spec.no_gradient]


def with_grad(case: OpUnderTest, args: Arguments) -> tuple[Arguments, list[Slot]]:
    """Copies of `args` in which every such tensor is a leaf that requires grad, and these tensors."""
    args = copied(args)
    for slot in grad_slots(case, args):
        slot.tensor.requires_grad_()
    return args, grad_slots(case, args)


def upstream_for(case: OpUnderTest, args: Arguments) -> dict[int, Tensor]:
    """A random incoming gradient for every output that has one, padding rows included."""
    outputs = as_tuple(case.op(*with_grad(case, args)[0]))
    upstream = {}
    for i, output in enumerate(outputs):
        if not output.is_floating_point() or output.numel() == 0 or case.schema.returns[i].name in case.spec.no_gradient:
            continue
        if not output.requires_grad:
            raise CheckFailed(f"{case.output_label(i)} is detached from the inputs; name it in no_gradient if it should be")
        upstream[i] = torch.randn(output.shape, dtype=torch.float32).to(output)
    return upstream


def gradients(case: OpUnderTest, function: Callable[..., Any], args: Arguments, upstream: dict[int, Tensor]) -> dict[str, Tensor]:
    """The gradient of every such tensor, by its label; zeros where autograd gives none."""
    args, slots = with_grad(case, args)
    outputs = as_tuple(function(*args))
    grads = torch.autograd.grad(
        [outputs[i] for i in upstream], [s.tensor for s in slots], list(upstream.values()), allow_unused=True
    )
    found = {}
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None and (grad.shape, grad.dtype) != (slot.tensor.shape, slot.tensor.dtype):
            raise CheckFailed(f"gradient of {slot.label} is {grad.dtype} {list(grad.shape)}, the tensor is not")
        found[slot.label] = torch.zeros_like(slot.tensor).detach() if grad is None else grad
    return found


def true_gradients(case: OpUnderTest, args: Arguments, upstream: dict[int, Tensor]) -> dict[str, Tensor]:
    """Autograd through the reference in fp64 on CPU."""
    return gradients(case, case.spec.reference, in_fp64(args), {i: g.detach().cpu().double() for i, g in upstream.items()})


def _subsets(upstream: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Each output alone, so that one that is dropped is named, then all together."""
    if len(upstream) > 1:
        for i, g in upstream.items():
            yield {i: g}
    yield upstream


def check_gradients(case: OpUnderTest) -> None:
    """Every gradient against autograd through the reference in fp64, for every output alone and for all together."""
    ran = 0
    for sample in case.samples():
        with naming(sample.name):
            if not grad_slots(case, sample.args):
                continue
            for upstream in _subsets(upstream_for(case, sample.args)):
                ran += 1
                source = " and ".join(case.output_label(i) for i in upstream)
                actual = gradients(case, case.op, sample.args, upstream)
                eager = gradients(case, case.eager, sample.args, upstream)
                for slot, truth in true_gradients(case, sample.args, upstream).items():
                    error, dtype = as_good_as(eager[slot], truth), case.rounded_to(slot, actual[slot].dtype, sample.args)
                    what = f"gradient of {slot} from {source}"
                    close(what, actual[slot], truth, error, case.spec.roundings, across_rows=True, dtype=dtype)
    if ran == 0:
        raise CheckFailed("the op has a backward formula but no sample has a floating-point input")


def check_gradient_strides(case: OpUnderTest) -> None:
    """Incoming gradients that are expanded, transposed, sliced or stride-padded give what contiguous ones of the same values do."""
    for sample in case.compile_samples():
        if not grad_slots(case, sample.args):
            continue
        with naming(sample.name):
            upstream = upstream_for(case, sample.args)
            for i, g in upstream.items():
                for name, values, strided in _grad_variants(g):
                    plain = gradients(case, case.op, sample.args, {**upstream, i: values})
                    for slot, actual in gradients(case, case.op, sample.args, {**upstream, i: strided}).items():
                        what = f"gradient of {slot}, the gradient of {case.output_label(i)} being {name}"
                        close(what, actual, plain[slot], 0.0, _SAME_VALUES_ROUNDINGS)


def _grad_variants(grad: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, contiguous, the same values in other strides)."""
    if grad.dim() > 0:
        scalar = grad.flatten()[0]
        yield "expanded", scalar.expand(grad.shape).contiguous(), scalar.expand(grad.shape)
        row = grad[:1]
        yield "row-expanded", row.expand(grad.shape).contiguous(), row.expand(grad.shape)
    for name, strided in restrided(grad):
        yield name, grad, strided


def check_checkpoint(case: OpUnderTest) -> None:
    """Under activation checkpointing the gradients are those without it, bit for bit: what is saved is unpacked once."""
    for sample in case.compile_samples():
        if not grad_slots(case, sample.args):
            continue
        with naming(sample.name):
            upstream = upstream_for(case, sample.args)
            plain = gradients(case, case.op, sample.args, upstream)
            try:
                again = gradients(case, _checkpointed(case.op), sample.args, upstream)
            except RuntimeError as error:  # CheckpointError is one
                raise CheckFailed(f"cannot be checkpointed: {describe(error)}") from error
            for slot, actual in again.items():
                close(f"gradient of {slot} under checkpointing", actual, plain[slot], 0.0, 0.0 if case.spec.deterministic else 1.0)


def _checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


def check_double_backward(case: OpUnderTest) -> None:
    """A second derivative is refused, or it is right; it is never silently zero."""
    samples = [s for s in case.compile_samples() if grad_slots(case, s.args)]
    for sample in samples:
        with naming(sample.name):
            if differentiable(case):
                _refused_or_right(case, sample.args)
            else:
                _gradient_refused(case, sample.args)


def _gradient_refused(case: OpUnderTest, args: Arguments) -> None:
    """An op without a formula raises when a gradient reaches it."""
    args, slots = with_grad(case, args)
    outputs = [o for o in as_tuple(case.op(*args)) if o.is_floating_point()]
    if not outputs:
        return
    if not any(o.requires_grad for o in outputs):
        raise CheckFailed("the op has no gradient, but its outputs do not require grad either, so nobody would notice")
    try:
        torch.autograd.grad([o.sum() for o in outputs], [s.tensor for s in slots], allow_unused=True)
    except RuntimeError:
        return
    raise CheckFailed("the op has no backward formula, yet a gradient went through it")


def _second(case: OpUnderTest, function: Callable[..., Any], args: Arguments, upstream: dict[int, Tensor]) -> list[Tensor | None]:
    args, slots = with_grad(case, args)
    ups = {i: g.detach().requires_grad_() for i, g in upstream.items()}
    outputs = as_tuple(function(*args))
    inputs = [s.tensor for s in slots]
    first = torch.autograd.grad([outputs[i] for i in ups], inputs, list(ups.values()), create_graph=True, allow_unused=True)
    # Squares, so that a second derivative exists also where the first is linear in the incoming gradient.
    total = sum(((g.double() ** 2).sum() for g in first if g is not None and g.requires_grad), torch.zeros(()).double())
    if not total.requires_grad:
        return [None] * (len(inputs) + len(ups))
    return list(torch.autograd.grad(total, [*inputs, *ups.values()], allow_unused=True))


def _refused_or_right(case: OpUnderTest, args: Arguments) -> None:
    upstream = upstream_for(case, args)
    try:
        actual = _second(case, case.op, args, upstream)
    except (RuntimeError, NotImplementedError):
        return
    fp64 = {i: g.cpu().double() for i, g in upstream.items()}
    truth = _second(case, case.spec.reference, in_fp64(args), fp64)
    for i, (a, t) in enumerate(zip(actual, truth, strict=True)):
        zero = torch.zeros(()) if t is None else torch.zeros_like(t)
        t = zero if t is None else t
        a = torch.zeros_like(t) if a is None else a
        close(f"second derivative {i}, which was not refused", a, t, 0.05 * float(t.abs().max()) if t.numel() else 0.0, 64.0)


def check_forward_mode(case: OpUnderTest) -> None:
    """Forward-mode AD is refused, by `forward_ad` and by `torch.func.jvp`: the dispatcher would drop the tangent."""
    for sample in case.compile_samples():
        for slot in grad_slots(case, sample.args):
            with naming(sample.name):
                _dual_refused(case, sample.args, slot)
                _jvp_refused(case, sample.args, slot)
            break


def _dual_refused(case: OpUnderTest, args: Arguments, slot: Slot) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(slot.tensor.clone(), torch.ones_like(slot.tensor))
        _must_refuse("forward_ad", lambda: case.op(*slot.replaced(copied(args), dual)))


def _jvp_refused(case: OpUnderTest, args: Arguments, slot: Slot) -> None:
    def function(tensor: Tensor) -> Any:
        result = case.op(*slot.replaced(args, tensor))
        return tensor if result is None else result

    args = map_tensors(torch.clone, args)
    _must_refuse("torch.func.jvp", lambda: torch.func.jvp(function, (slot.tensor.clone(),), (torch.ones_like(slot.tensor),)))


def _must_refuse(how: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if "forward" not in str(error).lower() and "jvp" not in str(error).lower():
            raise CheckFailed(f"{how}: refused, but not for being forward-mode: {describe(error)}") from error
        return
    raise CheckFailed(f"{how}: accepted, and the tangent is dropped")
