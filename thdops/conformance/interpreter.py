"""Running the Triton kernels of an op on CPU, in Triton's interpreter, with every load and store held against known memory.

The interpreter follows any address it is given: a wrong one reads or writes a neighbour silently, or ends the process. Inside
`guarded_memory` each address must lie in a tensor that was passed in or that the launcher allocated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thdops.conformance.case import Arguments, CheckFailed, NotRun, OpUnderTest, map_tensors


def interprets(case: OpUnderTest) -> bool:
    """Whether the op's kernels can be interpreted here."""
    return case.device.type == "cpu" and "triton" in case.spec.backends and why_not() == ""


def why_not() -> str:
    """Why nothing can be interpreted in this process, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from triton import knobs

    if not knobs.runtime.interpret:
        return "kernels are interpreted on CPU only, where TRITON_INTERPRET=1 is set before Triton is imported"
    return ""


def interpreted(case: OpUnderTest) -> Callable[..., Any]:
    """The launcher, run by the interpreter in guarded memory. Raises `NotRun` where it cannot be."""
    reason = why_not()
    if reason:
        raise NotRun(reason)
    launcher = case.launcher()

    def run(*args: Any) -> Any:
        with guarded_memory([s.tensor for s in case.slots(args)]):
            return launcher(*args)

    return run


def implementations(case: OpUnderTest) -> Iterator[tuple[str, Callable[..., Any], Callable[[Arguments], Arguments | None]]]:
    """What to hold a check against: the op itself and, on CPU, its kernels in the interpreter.

    Each with a function that makes a sample's arguments fit, or returns None where they never can.
    """
    yield "", case.op, lambda args: args
    if interprets(case):
        yield "kernel in the interpreter, ", interpreted(case), interpretable


def interpretable(args: Arguments) -> Arguments | None:
    """`args` with 16-bit floats as fp32, which the interpreter computes right; None for fp64, which kernels do not serve."""
    if any(t.dtype == torch.float64 for t in _flat(args)):
        return None
    half = (torch.bfloat16, torch.float16)
    return map_tensors(lambda t: t.float() if t.dtype in half else t, args)


def _flat(args: Arguments) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) or t, args)
    return found


class _Allocations(TorchFunctionMode):
    """Remembers the extent of every tensor that a torch function returns, and keeps them alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.extents: dict[tuple[int, int], Tensor] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.numel() == 0 or type(tensor) is not Tensor:
            return
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        self.extents.setdefault((start, start + (last + 1) * tensor.element_size()), tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.add(item)
        return result

    def check(self, what: str, pointers: Any, mask: Any, itemsize: int) -> None:
        import numpy as np

        addresses = np.asarray(pointers, dtype=np.uint64)[np.broadcast_to(mask, np.shape(pointers)).astype(bool)]
        if addresses.size == 0:
            return
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, end in self.extents:
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(itemsize) <= np.uint64(end))
        if not inside.all():
            address = int(addresses[~inside][0])
            raise CheckFailed(f"the kernel {what} outside its tensors, {self._nearest(address, itemsize)}")

    def _nearest(self, address: int, itemsize: int) -> str:
        behind = [(address - end, "behind the end") for _, end in self.extents if address >= end]
        before = [(start - address, "before the start") for start, _ in self.extents if address < start]
        distance, where = min(behind + before, default=(0, "where no tensor is"))
        return f"{distance} bytes {where} of one"


class _GuardedInterpreter:
    """Triton's interpreter with addresses checked first."""

    def __init__(self, inner: Any, allocations: _Allocations) -> None:
        self._inner = inner
        self._allocations = allocations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._allocations.check("reads", pointers, mask, dtype.itemsize)
        return self._inner.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._allocations.check("writes", pointers, mask, values.dtype.itemsize)
        return self._inner.store(pointers, values, mask)


@contextmanager
def guarded_memory(tensors: list[Tensor]) -> Iterator[None]:
    """Hold every load and store of interpreted kernels against `tensors` and what is allocated inside."""
    from triton.runtime import interpreter as triton_interpreter

    allocations = _Allocations(tensors)
    inner = triton_interpreter._interpreter
    triton_interpreter._interpreter = _GuardedInterpreter(inner, allocations)
    try:
        with allocations:
            yield
    except Exception as error:
        if isinstance(error.__cause__, CheckFailed):  # the interpreter wraps what is raised in a kernel
            raise error.__cause__ from None
        raise
    finally:
        triton_interpreter._interpreter = inner
