"""Launching Triton kernels cheaply, and the two other things that can be done with a launch.

`kernel[grid](...)` costs 15 to 22 us of Python a call. Here a compiled kernel is found under a key of our own and handed its
arguments directly. For the key to be right, integers must never specialise a kernel: a kernel that lets them is refused.

Besides launching, a launch can be interpreted on CPU tensors (TRITON_INTERPRET=1, Triton's own interpreter) or, while
`intercept` is set, be handed to someone else: that is how every kernel is compiled ahead of time without a GPU.

Imports triton; only `kernels*.py` import this file, and they are imported when an op is first called on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from thdops.ops.plans import number

Grid = tuple[int, int, int]

_compiled: dict[Any, Any] = {}  # by the keys of callers, who may name one per shape
_kinds: dict[Any, Any] = {}  # the same kernels by all that specialises them
_COMPILED_KEPT = 8192  # of each; Triton keeps the kernels themselves, so forgetting costs one slow launch
_interceptor: Callable[..., None] | None = None


def launch(
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constexprs: tuple[Any, ...],
    num_warps: int = 4,
    registers: int | None = None,
    stages: int | None = None,
) -> None:
    """Launch `kernel` over `grid` on the current device and stream.

    `args` are the leading parameters: tensors, ints, floats, None, or tuples of these; `constexprs` the trailing ones. `registers`
    bounds what a thread may use, so that more of them run at a time; `stages` is how many loads of a loop are under way at a time.
    """
    how = (constexprs, num_warps, registers, stages)
    launch_as(_kind(kernel, args, *how), kernel, grid, args, *how)


def launch_as(
    key: Any,
    kernel: Any,
    grid: Grid,
    args: tuple[Any, ...],
    constexprs: tuple[Any, ...],
    num_warps: int = 4,
    registers: int | None = None,
    stages: int | None = None,
) -> None:
    """`launch` for a caller that knows a key which determines all that specialises the kernel, and is found faster than that.

    That is: the kernel, `constexprs`, `num_warps`, `registers`, `stages`, the dtype and 16-byte alignment of each tensor, which
    integers need 64 bits and, for integers inside a tuple, which are 1 or multiples of 16.
    """
    if 0 in grid:
        return
    if _interceptor is not None:
        _interceptor(kernel, grid, args, constexprs, _options(num_warps, registers, stages))
        return
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*args, *constexprs, num_warps=num_warps)
        return
    device = torch._C._cuda_getDevice()
    compiled = _compiled.get((key, device))
    if compiled is None:
        kind = _kind(kernel, args, constexprs, num_warps, registers, stages), device  # another key may have had it compiled
        compiled = _kinds.get(kind)
        if compiled is None:
            _refuse_specialised_integers(kernel, args)
            compiled = kernel[grid](*args, *constexprs, **_options(num_warps, registers, stages))
            _keep(_kinds, kind, compiled)
            _keep(_compiled, (key, device), compiled)
            return
        _keep(_compiled, (key, device), compiled)
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not knobs.runtime.launch_enter_hook.calls:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constexprs)
    else:  # a profiler wants to see launches
        compiled[grid](*args, *constexprs, stream=stream)


def _options(num_warps: int, registers: int | None, stages: int | None) -> dict[str, int]:
    """What Triton calls them."""
    given = {"num_warps": num_warps, "maxnreg": registers, "num_stages": stages}
    return {name: value for name, value in given.items() if value is not None}


def _keep(known: dict[Any, Any], key: Any, compiled: Any) -> None:
    if len(known) >= _COMPILED_KEPT:
        known.clear()
    known[key] = compiled


def _kind(
    kernel: Any, args: tuple[Any, ...], constexprs: tuple[Any, ...], num_warps: int, registers: int | None, stages: int | None
) -> tuple[Any, ...]:
    """All that specialises a kernel. True, 1 and 1.0 are equal and compile to different code."""
    key = [id(kernel), num_warps, registers, stages, constexprs, *map(type, constexprs)]
    for arg in args:
        _append_kind(key, arg)
    return tuple(key)


def _append_kind(key: list[Any], arg: Any) -> None:
    """What of an argument a compiled kernel depends on."""
    if isinstance(arg, int):  # a bool is one, and a type of its own to a kernel
        key.append(type(arg) if isinstance(arg, bool) else -(2**31) <= arg < 2**31)
    elif isinstance(arg, Tensor):
        key += (arg.dtype, arg.data_ptr() % 16 == 0)
    elif isinstance(arg, tuple):
        key.append(len(arg))  # ((a, b), (c,)) is not ((a,), (b, c))
        for part in arg:
            _append_kind(key, part)
            if isinstance(part, int):  # inside a tuple, do_not_specialize is not heeded (Triton 3.6)
                key += (part == 1, part % 16 == 0)
    elif hasattr(arg, "block_shape"):  # a TMA descriptor
        key += (arg.base.dtype, *arg.block_shape, arg.layout)
    else:
        key.append(type(arg))


def _refuse_specialised_integers(kernel: Any, args: tuple[Any, ...]) -> None:
    for parameter, arg in zip(kernel.params, args, strict=False):
        if isinstance(arg, (int, tuple)) and not parameter.do_not_specialize:
            raise TypeError(
                f"launch: parameter {parameter.name!r} of kernel {kernel.__name__} must be in do_not_specialize, got an integer"
                " that would compile one kernel per kind of value; list it in @triton.jit(do_not_specialize=[...])"
            )


class Launch:
    """A launch that a plan holds: all of it but the leading arguments, which come with a call; `numbers` follow them.

    Whatever specialises the kernel must follow from the kind of call that the plan is for: a launch has one compiled kernel, which
    others may have, too.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        numbers: tuple[Any, ...],
        constexprs: tuple[Any, ...],
        num_warps: int = 4,
        registers: int | None = None,
        stages: int | None = None,
    ) -> None:
        self._key, self._kernel, self._grid, self._numbers = number(), kernel, grid, numbers
        self._how = (constexprs, num_warps, registers, stages)

    def __call__(self, *args: Any) -> None:
        launch_as(self._key, self._kernel, self._grid, args + self._numbers, *self._how)


@contextmanager
def intercept(interceptor: Callable[..., None]) -> Iterator[None]:
    """Hand every launch to `interceptor(kernel, grid, args, constexprs, options)` instead of launching it."""
    global _interceptor
    previous, _interceptor = _interceptor, interceptor
    try:
        yield
    finally:
        _interceptor = previous


@lru_cache
def multiprocessors(device_index: int) -> int:
    """How many multiprocessors a grid has to fill; an H200's where there is no GPU (interpreter, ahead-of-time compiles)."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count if device_index >= 0 else 132
