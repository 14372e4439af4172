"""Checks of padding: what stands on padding rows of inputs does not matter, what is returned there is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, naming, row_mask
from thdops.conformance.gradients import differentiable, grad_slots, gradients, upstream_for
from thdops.conformance.interpreter import implementations, once
from thdops.conformance.tensors import poisoned, same_bits
from thdops.registry import PadRows

_POISONS = (float("nan"), float("inf"), float("-inf"))


def check_padding_values(case: OpUnderTest) -> None:
    """Padding rows of every output hold the promised value to the bit (+0.0, not -0.0), and gradients +0.0."""
    seen = False
    for label, function, fit in implementations(case):
        for sample in case.samples():
            with naming(sample.name):
                args = fit(sample.args)
                if args is None:
                    continue
                results = once(case, function, args).results
                seen |= _check_promised(case, label, args, results)
    if case.spec.pads_zeroed and not seen:
        raise CheckFailed("pads_zeroed is promised but no sample has a padding row")
    for sample in case.samples():
        with naming(sample.name):
            if differentiable(case) and grad_slots(case, sample.args):
                _check_zero_gradients(case, sample.args, gradients(case, case.op, sample.args, upstream_for(case, sample.args)))


def _check_promised(case: OpUnderTest, label: str, args: Arguments, results: tuple[Tensor, ...]) -> bool:
    seen = False
    for i, (rows, result) in enumerate(zip(case.padding_of_outputs(args, len(results)), results, strict=True)):
        if rows is not None:
            mask = row_mask(rows, result)
            seen |= bool(mask.any())
            value = torch.full(result.shape, rows.value, device=result.device, dtype=torch.float64).to(result.dtype)
            same_bits(f"{label}padding rows of {case.output_label(i)}", result, value, ignore=~mask)
    return seen


def _check_zero_gradients(case: OpUnderTest, args: Arguments, grads: dict[str, Tensor]) -> None:
    for slot, rows in case.padding_slots(args):
        grad = grads.get(slot.label)
        if grad is not None:
            same_bits(f"padding rows of the gradient of {slot.label}", grad, torch.zeros_like(grad), ignore=~row_mask(rows, grad))


def check_poisoned_padding(case: OpUnderTest) -> None:
    """NaN, Inf and -Inf on padding rows of inputs and of incoming gradients change no other bit."""
    for label, function, fit in implementations(case):
        for sample in case.samples():
            with naming(sample.name):
                args = fit(sample.args)
                if args is not None and case.padding_slots(args):
                    _check_poisoned_call(case, label, function, args)
    for sample in case.samples():
        with naming(sample.name):
            if differentiable(case) and grad_slots(case, sample.args):
                _check_poisoned_gradients(case, sample.args)


def _poison_inputs(case: OpUnderTest, args: Arguments, value: float) -> Arguments:
    for slot, rows in case.padding_slots(args):
        args = slot.replaced(args, poisoned(slot.tensor, row_mask(rows, slot.tensor), value))
    return args


def _check_poisoned_call(case: OpUnderTest, label: str, function: Callable[..., Any], args: Arguments) -> None:
    before = once(case, function, args).results
    for value in _POISONS:
        bad = _poison_inputs(case, args, value)
        after = once(case, function, bad).results
        for i, (a, b) in enumerate(zip(after, before, strict=True)):
            same_bits(f"{label}{case.output_label(i)} with {value} on padding rows of the inputs", a, b)


def _check_poisoned_gradients(case: OpUnderTest, args: Arguments) -> None:
    upstream = upstream_for(case, args)
    before = gradients(case, case.op, args, upstream)
    pads: list[PadRows | None] = case.padding_of_outputs(args, max(upstream, default=-1) + 1)
    for value in _POISONS:
        bad_upstream = {}
        for i, g in upstream.items():
            rows = pads[i]
            bad_upstream[i] = g if rows is None else poisoned(g, row_mask(rows, g), value)
        with naming(f"{value} on padding rows"):
            after = gradients(case, case.op, _poison_inputs(case, args, value), bad_upstream)
            for label, grad in after.items():
                same_bits(f"gradient of {label}", grad, before[label])
