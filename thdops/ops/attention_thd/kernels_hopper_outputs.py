"""What a warpgroup leaves of a tile on Hopper, O [ROWS, D_V] and its LSE, and what it finds there of other sections of the keys.

A section between others adds its O to the fp32 `out` of those before, by reductions that nobody waits for; each row has one
program, so the order is fixed. For that its scale must not change: a row of `out` is in units of e^`unit`, the LSE of the first
section that saw a key. Only where a later one is larger by 2^JUMP is the unit its LSE from there on. `lse` is updated in place.
Rows that are padding to the last section need not have been to all: they get what was found.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from thdops.ops.attention_thd.kernels_hopper_common import LN2, LOG2E, wide
from thdops.ops.attention_thd.kernels_hopper_names import VIEWS_REACH_BEYOND, reinterpret
from thdops.ops.attention_thd.kernels_hopper_view import CHUNK, ROWS

JUMP = gl.constexpr(40.0)  # powers of two; fp32 has room for two more such
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def by_row(x, o):
    """One value a row, [ROWS], as a column [ROWS, 1] that fits O."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    return gl.convert_layout(x, LAYOUT)[:, None]


# --- found -----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def load_statistics(lse, unit, first, valid, LAYOUT: gl.constexpr):
    """LSE and unit of the rows from `first` on as other keys left them; -inf behind the valid ones."""
    i = first + gl.arange(0, ROWS, layout=LAYOUT)
    return gl.load(lse + i, mask=i < valid, other=float("-inf")), gl.load(unit + i, mask=i < valid, other=float("-inf"))


@gluon.jit
def load_found(found, first, valid, row_stride, o):
    """O of the rows from `first` on as other keys left it; nothing behind the valid ones."""
    i = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(found + i.to(gl.int64) * row_stride + d, [1, 16])
    return gl.load(at, mask=(i < valid) & (d >= 0), other=0.0)


@gluon.jit
def share_of(lse, unit):
    """e^(lse - unit), 0 where nothing was seen."""
    return gl.where(lse == float("-inf"), 0.0, gl.exp2((lse - unit) * LOG2E))


# --- left ------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def joined(buffers, first, BOXES: gl.constexpr):
    """BOXES boxes side by side as one [ROWS, BOXES * CHUNK], among a warpgroup's boxes of Q, which begin with `first`.

    Where a view may not reach beyond its buffer, they are those that begin at a multiple of BOXES: of 3 boxes, 2 always do.
    """
    if VIEWS_REACH_BEYOND:
        return reinterpret(buffers.index(first), buffers.dtype, [ROWS, BOXES * CHUNK], SWIZZLED)
    else:
        rows = reinterpret(buffers, buffers.dtype, [buffers.shape[0] // BOXES, ROWS, BOXES * CHUNK], SWIZZLED)
        return rows.index((first + BOXES - 1) // BOXES)


@gluon.jit
def store_out(staging, before, out, i, valid, rows, out_row, D_V: gl.constexpr):
    """Rows i of the tile from where O is staged, those from `valid` on as found before or as zeros; in 16-byte stores."""
    LAYOUT: gl.constexpr = wide(D_V, gl.num_warps())
    x = staging.load(LAYOUT)
    fence_async_shared()  # the next Q comes here by TMA
    i = gl.convert_layout(i, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, D_V, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.multiple_of(out + i.to(gl.int64) * out_row + d, [1, 16])
    padding = gl.zeros_like(x)
    if len(before) > 0:
        found = gl.multiple_of(before[0] + i.to(gl.int64) * out_row + d, [1, 16])
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + before[3]
        lse = gl.load(before[1] + row, mask=(row >= valid) & (row < rows), other=float("-inf"))
        unit = gl.load(before[2] + row, mask=(row >= valid) & (row < rows), other=float("-inf"))
        share = gl.where(lse == float("-inf"), 0.0, gl.exp2((unit - lse) * LOG2E))[:, None]
        padding = (gl.load(found, mask=(i >= valid) & (i < rows) & (d >= 0), other=0.0) * share).to(x.dtype)
    gl.store(at, gl.where(i < valid, x, padding), mask=(i < rows) & (d >= 0))


@gluon.jit
def store_fp32(o, out, i, valid, rows, out_row):
    """`store_out` of fp32, from the registers: 4 threads have a sector of 32 bytes."""
    i = gl.convert_layout(i, gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(out + i.to(gl.int64) * out_row + d, [1, 16])
    gl.store(at, gl.where(i < valid, o, 0.0), mask=(i < rows) & (d >= 0))


@gluon.jit
def merge(o, logsumexp, out, lse, unit, i, valid, out_row, old_lse, old_unit):
    """Add O and its base-2 LSE to what the valid rows i hold."""
    old, base = old_lse * LOG2E, old_unit * LOG2E
    nothing = logsumexp == float("-inf")
    jumps = logsumexp > base + JUMP  # where nothing was found, too
    base_new = gl.where(jumps, logsumexp, base)
    weight = gl.where(nothing, 0.0, gl.exp2(logsumexp - base_new))
    decay = gl.where(jumps, gl.exp2(base - logsumexp) - 1.0, 0.0)  # of what is there, added as a difference
    top = gl.maximum(old, logsumexp)
    shift = gl.where(top == float("-inf"), 0.0, top)
    merged = shift + gl.log2(gl.exp2(old - shift) + gl.exp2(logsumexp - shift))
    gl.store(lse + i, merged * LN2, mask=i < valid)
    gl.store(unit + i, base_new * LN2, mask=(i < valid) & jumps)

    row = gl.convert_layout(i, gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(out + row.to(gl.int64) * out_row + d, [1, 16])
    decay = by_row(decay, o)
    there = gl.load(at, mask=(row < valid) & (decay < 0.0) & (d >= 0), other=0.0)
    gl.atomic_add(at, o * by_row(weight, o) + there * decay, mask=(row < valid) & (d >= 0), sem="relaxed")
