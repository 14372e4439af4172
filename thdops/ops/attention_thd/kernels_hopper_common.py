"""What the Hopper kernels share, and their launchers: constants, tensors as TMA loads them, the order of heads, integers that one
warp hands to others, and 16-byte stores.

[T, H, D] (rows, heads, head dim) is to TMA T rows of all heads, in which a head's columns start at head * stride, and which is
loaded in boxes of [rows, columns].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}  # what the kernels take
_INT32 = 2**31

Box = tuple[list[int], list[int], list[int], gl.NVMMASharedLayout]


class Boxes(TensorDescriptor):
    """A descriptor without the checks of its parent, which cost more than a launch; `addressable` makes sure of them."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: gl.NVMMASharedLayout
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.layout, self.padding = layout, "zero"


def box_of(x: Tensor, rows: int, columns: int) -> Box:
    """What `Boxes` needs beside the tensor."""
    t, h, d = x.shape
    row, head, _ = x.stride()
    return [t, (h - 1) * head + d], [row, 1], [rows, columns], _layout(rows, columns, x.dtype)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENT.get(dtype, gl.float32))


def addressable(x: Tensor) -> bool:
    """Some rows, none of them on top of another, 16-byte aligned in every respect, rows and columns within 32 bits."""
    t, h, d = x.shape
    row, head, column = x.stride()
    aligned = column == 1 and row % 8 == 0 and head % 8 == 0 and x.data_ptr() % 16 == 0
    return aligned and row > 0 and x.numel() > 0 and max(t, (h - 1) * head + d) < _INT32


# --- the order of heads ----------------------------------------------------------------------------------------------------------

# Bytes of the other side of as many heads as take turns at a tile: what the L2 cache of an H200 (50 MB) holds for sure. With more
# heads every tile reads it from memory. Measured there, causal bf16, us, with all heads together and with so many: 128 heads of
# 192/128, 4 x 4096 rows: forward 6211, 4793, backward 21583, 18607; 16 heads of 128, 2 x 16384 rows: 3765, 3658 and 11524, 11115.
# Where all of them fit into it, fewer are no faster.
_NEAR_BYTES = 32 * 2**20


def near_heads(heads: int, bytes_a_head: float) -> int:
    """How many key heads take turns at every tile: as many as the cache holds the other side of; they divide all of them."""
    return max(near for near in range(1, heads + 1) if heads % near == 0 and (near == 1 or near * bytes_a_head <= _NEAR_BYTES))


def query_order(q: Tensor, k: Tensor, v: Tensor, mean: float) -> tuple[int, int, int]:
    """(query heads, as many as take turns at every tile, query heads of a key head), where a sequence has `mean` rows of keys."""
    group = q.shape[1] // k.shape[1]
    return q.shape[1], near_heads(k.shape[1], mean * (q.shape[2] + v.shape[2]) * q.element_size()) * group, group


def key_order(q: Tensor, k: Tensor, v: Tensor, mean: float) -> tuple[int, int, int]:
    """The same for key heads, where a sequence has `mean` rows of queries."""
    group = q.shape[1] // k.shape[1]
    return k.shape[1], near_heads(k.shape[1], mean * group * (q.shape[2] + v.shape[2]) * q.element_size()), group


@gluon.jit
def place_of(item, entries, heads):
    """(index of the tile, head) of a work item; `heads` are those of `query_order` or `key_order`."""
    near = heads[1]
    within = item % (entries * near)
    return within // near, item // (entries * near) * near + within % near


# --- integers from one warp to others --------------------------------------------------------------------------------------------

FIELDS = gl.constexpr(8)


@gluon.jit
def integers(SLOTS: gl.constexpr):
    """Shared memory for FIELDS of them in each slot."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def packed(values):
    """At most FIELDS integers as what a slot holds, in one warp; zeros behind them."""
    i = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    out = i * 0
    for f in gl.static_range(len(values)):
        out = gl.where(i == f, values[f], out)
    return out


@gluon.jit
def unpacked(slot) -> Any:
    """The FIELDS integers of a slot, for every thread."""
    values = ()
    for f in gl.static_range(FIELDS):
        field = slot.slice(f, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        values = values + (gl.max(field, axis=0),)
    return values


# --- 16-byte stores, and zeros ---------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def wide(columns: int, warps: int) -> gl.BlockedLayout:
    """[rows, columns] of 16 bits, 16 bytes a thread; columns are a power of two."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.jit
def store_zeros(out, stride, rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros to the first `rows` of [ROWS, COLUMNS] from `out` on, if there are any; COLUMNS is a power of two."""
    LAYOUT: gl.constexpr = wide(COLUMNS, gl.num_warps())
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.multiple_of(out + r.to(gl.int64) * stride + d, [1, 16])
    gl.store(at, gl.zeros([ROWS, COLUMNS], out.dtype.element_ty, LAYOUT), mask=(r < rows) & (d >= 0))
