"""Launching Triton kernels cheaply, and the two other things that can be done with a launch.

`kernel[grid](...)` costs 15 to 22 us of Python a call. Here a compiled kernel is found under a key of our own and launched
directly. For the key to be right, integers must never specialise a kernel: `launch` refuses a kernel that lets them.

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
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_INT32 = range(-(2**31), 2**31)
_compiled: dict[Any, Any] = {}
_interceptor: Callable[..., None] | None = None


def launch(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constexprs: tuple[Any, ...], num_warps: int = 4) -> None:
    """Launch `kernel` over `grid` on the current device and stream.

    `args` are the leading parameters: tensors, ints, floats, None, or tuples of ints; `constexprs` the trailing ones.
    """
    if 0 in grid:
        return
    if _interceptor is not None:
        _interceptor(kernel, grid, args, constexprs, num_warps)
        return
    if isinstance(kernel, InterpretedFunction):
        kernel[grid](*args, *constexprs, num_warps=num_warps)
        return
    device = torch._C._cuda_getDevice()
    key = (kernel, device, num_warps, constexprs, *map(_kind, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _refuse_specialised_integers(kernel, args)
        _compiled[key] = kernel[grid](*args, *constexprs, num_warps=num_warps)
        return
    compiled[grid](*args, *constexprs, stream=torch._C._cuda_getCurrentRawStream(device))


def _kind(arg: Any) -> Any:
    """What of an argument a compiled kernel depends on."""
    if isinstance(arg, Tensor):
        return (arg.dtype, arg.data_ptr() % 16 == 0)
    if isinstance(arg, int):
        return arg in _INT32
    if isinstance(arg, tuple):
        return tuple(map(_kind, arg))
    return type(arg)


def _refuse_specialised_integers(kernel: Any, args: tuple[Any, ...]) -> None:
    for parameter, arg in zip(kernel.params, args, strict=False):
        if isinstance(arg, (int, tuple)) and not parameter.do_not_specialize:
            raise TypeError(
                f"launch: parameter {parameter.name!r} of kernel {kernel.__name__} must be in do_not_specialize, got an integer that"
                " would compile one kernel per kind of value; list it in @triton.jit(do_not_specialize=[...])"
            )


@contextmanager
def intercept(interceptor: Callable[..., None]) -> Iterator[None]:
    """Hand every launch to `interceptor(kernel, grid, args, constexprs, num_warps)` instead of launching it."""
    global _interceptor
    previous, _interceptor = _interceptor, interceptor
    try:
        yield
    finally:
        _interceptor = previous


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a grid has to fill; an H200's where there is no GPU (interpreter, ahead-of-time compiles)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return triton.next_power_of_2(n)
