"""Checks of strides: any input strides give the same result, and a fake has the strides of what it stands for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, as_tuple, copied, naming
from thdops.conformance.declared import faked
from thdops.conformance.interpreter import implementations, once
from thdops.conformance.tensors import close, restrided

_SAME_VALUES_ROUNDINGS = 8.0  # other strides may make eager code sum in another order


def check_fake(case: OpUnderTest) -> None:
    """A fake result has the shape, dtype, strides and device of the real one, for contiguous and other inputs."""
    for sample in case.samples():
        with naming(sample.name):
            _fake_is_real(case, sample.args)
        for label, args in _restrided(case, sample.args) if sample.compile else ():
            with naming(f"{sample.name}, {label}"):
                _fake_is_real(case, args)


def _fake_is_real(case: OpUnderTest, args: Arguments) -> None:
    real = as_tuple(case.op(*copied(args)))
    with FakeTensorMode() as mode:
        fake = as_tuple(case.op(*faked(mode, args)))
    if len(fake) != len(real):
        raise CheckFailed(f"the fake returns {len(fake)} tensors, the op {len(real)}")
    for i, (f, r) in enumerate(zip(fake, real, strict=True)):
        for what, got, expected in (
            ("shape", tuple(f.shape), tuple(r.shape)),
            ("dtype", f.dtype, r.dtype),
            ("device", f.device, r.device),
            ("strides", _strides(f), _strides(r)),
        ):
            if got != expected:
                raise CheckFailed(f"{case.output_label(i)}: the fake has {what} {got}, the op returns {expected}")


def _restrided(case: OpUnderTest, args: Arguments) -> Iterator[tuple[str, Arguments]]:
    """The call with each tensor in other strides, one at a time. Metadata may refuse them: it is small, people can copy it."""
    for slot in case.slots(args):
        for name, tensor in restrided(slot.tensor):
            other = slot.replaced(args, tensor)
            if slot.tensor.is_floating_point() or not _refuses(case, other):
                yield f"{slot.label} {name}", other


def _refuses(case: OpUnderTest, args: Arguments) -> bool:
    try:
        case.spec.check(*args)
    except (ValueError, TypeError):
        return True
    return False


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that can be seen: those of dimensions with more than one element."""
    return () if tensor.numel() == 0 else tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def check_input_strides(case: OpUnderTest) -> None:
    """Transposed, sliced and stride-padded tensors give the result of contiguous ones; only metadata may refuse them instead."""
    for label, function, fit in implementations(case):
        for sample in case.compile_samples():
            args = fit(sample.args)
            if args is None:
                continue
            with naming(label + sample.name):
                expected = once(case, function, args).results
                for name, other in _restrided(case, args):
                    results = case.call(function, other)
                    for i, (actual, plain) in enumerate(zip(results, expected, strict=True)):
                        close(f"{case.output_label(i)} with {name}", actual, plain, 0.0, _SAME_VALUES_ROUNDINGS)
