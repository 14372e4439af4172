"""Names of Gluon that differ between the releases of Triton: what the Hopper kernels call, in each of 3.6 to 3.9.

They are the newest release's; where that release's is missing, the older name stands for the same operation.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate

__all__ = ["VIEWS_REACH_BEYOND", "aggregate", "async_atomic_add", "async_load", "async_store", "barrier", "reinterpret"]


def _named(namespace: Any, name: str, older: str) -> Any:
    return getattr(namespace, name, None) or getattr(namespace, older)


@builtin
def _async_atomic_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Triton has the operation, Gluon before 3.8 has no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


aggregate = _aggregate
async_atomic_add = getattr(tma, "async_atomic_add", _async_atomic_add)
async_load = _named(tma, "async_load", "async_copy_global_to_shared")  # since 3.8
async_store = _named(tma, "async_store", "async_copy_shared_to_global")  # since 3.8
barrier = _named(gl, "barrier", "thread_barrier")  # since 3.7
reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # since 3.9
VIEWS_REACH_BEYOND = gl.constexpr(not hasattr(tma, "async_load"))  # whether a reinterpreted buffer may grow; not since 3.8
