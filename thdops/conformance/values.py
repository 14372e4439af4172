"""Checks of values: the op against its reference in fp64, the kernels against it, and that they repeat."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, copied, naming
from thdops.conformance.gradients import differentiable, gradients, upstream_for, with_grad
from thdops.conformance.interpreter import implementations, interpretable, interpreted, once
from thdops.conformance.tensors import as_good_as, close, kind, same_bits

# How many roundings eager code of a dtype may lose against fp64. Half precisions are rounded at every step, so a few steps are
# many ulps of nothing else; fp32 sums over a few hundred small samples lose some dozens.
_EAGER_ROUNDINGS = {torch.float32: 64.0, torch.bfloat16: 8.0, torch.float16: 8.0, torch.float64: 64.0}
_REPEATS = 4


def check_opcheck(case: OpUnderTest) -> None:
    """`torch.library.opcheck`: schema, autograd registration and fake on every sample, AOT dispatch on the compile samples."""
    for sample in case.samples():
        with naming(sample.name):
            args = sample.args
            if case.spec.backward is not None:
                args = with_grad(case, args)[0]
            tests = ["test_autograd_registration", "test_faketensor"]
            if not any(s.tensor.is_floating_point() and s.tensor.element_size() == 1 for s in case.slots(args)):
                tests.append("test_schema")  # compares with arithmetic that fp8 does not have
            if sample.compile:
                tests.append("test_aot_dispatch_dynamic")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.library.opcheck(case.op, copied(args), test_utils=tests)


def check_reference(case: OpUnderTest) -> None:
    """The op in its own dtype is the reference in fp64 up to eager rounding."""
    for sample in case.samples():
        with naming(sample.name):
            truth = case.truth(sample.args)
            for i, (actual, expected) in enumerate(zip(case.call(case.op, sample.args), truth, strict=True)):
                label = case.output_label(i)
                error = _eager_error(actual, expected, case.rounded_to(label, actual.dtype, sample.args))
                close(label, actual, expected, error, 0.0)


def _eager_error(actual: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """What eager code may be off: some roundings to `dtype` of the largest number of the whole result."""
    if not actual.is_floating_point() or truth.numel() == 0:
        return 0.0
    size = torch.where(truth.isfinite(), truth.abs().double(), 0.0).max()
    return _EAGER_ROUNDINGS.get(dtype, 1.0) * torch.finfo(dtype).eps * float(size)


def check_kernel(case: OpUnderTest) -> None:
    """The kernels are as near to the fp64 truth as the eager reference of the same dtype, plus the roundings the spec allows."""
    if case.device.type == "cuda":
        for sample in case.samples():
            with naming(sample.name):
                _near_truth(case, case.op, sample.args)
        return
    kernel = interpreted(case)
    ran = 0
    for sample in case.samples():
        with naming(sample.name):
            args = interpretable(sample.args)
            if args is not None:
                _near_truth(case, kernel, args)
                ran += 1
    if ran == 0:
        raise CheckFailed("no sample can run in the interpreter: give one that is not fp64")


def _near_truth(case: OpUnderTest, function: Callable[..., Any], args: Arguments) -> None:
    truth = case.truth(args)
    with torch.no_grad():
        eager = case.call(case.eager, args)
    results = once(case, function, args).results
    if len(results) != len(truth):
        raise CheckFailed(f"the kernel returns {len(results)} tensors, the reference {len(truth)}")
    for i, (actual, low, expected) in enumerate(zip(results, eager, truth, strict=True)):
        label = case.output_label(i)
        if (actual.dtype, actual.stride()) != (low.dtype, low.stride()):
            raise CheckFailed(
                f"{label}: the kernel returns {kind(actual)} strides {actual.stride()}, the reference {kind(low)} {low.stride()}"
            )
        dtype = case.rounded_to(label, actual.dtype, args)
        close(label, actual, expected, as_good_as(low, expected), case.spec.roundings, dtype=dtype)


def check_repeatable(case: OpUnderTest) -> None:
    """The same call gives the same bits every time; so do its gradients."""
    for label, function, fit in implementations(case):
        for sample in case.compile_samples():
            args = fit(sample.args)
            if args is None:
                continue
            with naming(label + sample.name):
                first = case.call(function, args)
                for _ in range(_REPEATS - 1):
                    for i, (again, once) in enumerate(zip(case.call(function, args), first, strict=True)):
                        same_bits(f"{case.output_label(i)}, a second time", again, once)
    for sample in case.compile_samples() if differentiable(case) else []:
        with naming(sample.name):
            _repeatable_gradients(case, sample.args)


def _repeatable_gradients(case: OpUnderTest, args: Arguments) -> None:
    upstream = upstream_for(case, args)
    once = gradients(case, case.op, args, upstream)
    for _ in range(_REPEATS - 1):
        for slot, g in gradients(case, case.op, args, upstream).items():
            same_bits(f"gradient of {slot}, a second time", g, once[slot])
