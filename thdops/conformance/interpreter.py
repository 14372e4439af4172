"""Running the Triton kernels of an op on CPU, in Triton's interpreter, with every load and store held against known memory.

The interpreter follows any address it is given: a wrong one reads or writes a neighbour silently, or ends the process. Inside
`guarded_memory` each address must lie in a tensor that was passed in or that the launcher allocated.

It is slow, too, and several checks look at the same calls: `once` runs each of those once.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thdops.conformance.case import Arguments, CheckFailed, NotRun, OpUnderTest, as_tuple, copied, map_tensors


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


@dataclass(frozen=True)
class _Interpreted:
    """A launcher whose kernels are interpreted in guarded memory."""

    case: OpUnderTest
    launcher: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        with guarded_memory([s.tensor for s in self.case.slots(args)]):
            return self.launcher(*args)


def interpreted(case: OpUnderTest) -> Callable[..., Any]:
    """The launcher, run by the interpreter in guarded memory. Raises `NotRun` where it cannot be."""
    reason = why_not()
    if reason:
        raise NotRun(reason)
    return _Interpreted(case, case.launcher())


@dataclass(frozen=True)
class Run:
    """One call: what `OpUnderTest.call` gives, and the copies of the arguments that it ran on, as it left them."""

    results: tuple[Tensor, ...]
    args: Arguments


_runs: dict[tuple[Callable[..., Any], Hashable], Run] = {}
"""What was interpreted of the launcher that was asked for last: checks come op by op."""


def once(case: OpUnderTest, function: Callable[..., Any], args: Arguments) -> Run:
    """A call on copies of `args`. Where kernels are interpreted, no second one of the same launcher on the same memory: what an
    earlier check saw is given again. (That a second call gives the same is a check of its own, which does not come here.)
    """
    if not isinstance(function, _Interpreted):
        return _run(case, function, args)
    key = (function.launcher, _memory(case, args))
    if key not in _runs:
        if any(launcher is not function.launcher for launcher, _ in _runs):
            _runs.clear()
        _runs[key] = _run(case, function, args)
    return _runs[key]


def _run(case: OpUnderTest, function: Callable[..., Any], args: Arguments) -> Run:
    work = copied(args)
    results = as_tuple(function(*work))
    return Run(tuple(case.written(work)) if case.spec.mutates else results, work)


def _memory(case: OpUnderTest, args: Arguments) -> Hashable:
    """Everything that a call depends on: each tensor with its whole storage, and which of them share one."""
    storages: list[int] = []

    def tensor(x: Tensor) -> Hashable:
        address = x.untyped_storage().data_ptr()
        if address not in storages:
            storages.append(address)
        content = hashlib.sha256(whole_storage(x).numpy().tobytes()).digest()
        return x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), storages.index(address), content

    others = repr(map_tensors(lambda _: torch.empty(0), args))
    return tuple(tensor(slot.tensor) for slot in case.slots(args)), others


def whole_storage(tensor: Tensor) -> Tensor:
    """Everything that a tensor's storage holds, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


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
