"""Memory of the backward kernels for Hopper: buffers and barriers, copies to shared memory, zeros there, and what leaves a tile.

Tensors are tuples of chunks of the head dim, each a descriptor outside and [slots, rows, columns] in shared memory.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from thdops.ops.attention_thd.kernels_hopper_common import store_zeros, wide
from thdops.ops.attention_thd.kernels_hopper_names import async_load, async_store, barrier

# --- shared memory ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def chunks_of(first, second):
    """The chunks of the head dim as a tuple; there may be no second one."""
    if second is None:
        return (first,)
    else:
        return (first, second)


@gluon.jit
def buffer(desc, SLOTS: gl.constexpr):
    """[SLOTS, rows, columns] for boxes of a descriptor."""
    rows: gl.constexpr = desc.block_type.shape[0]
    columns: gl.constexpr = desc.block_type.shape[1]
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, rows, columns], desc.layout)


@gluon.jit
def buffers(descs, SLOTS: gl.constexpr) -> Any:
    out = ()
    for c in gl.static_range(len(descs)):
        out = out + (buffer(descs[c], SLOTS),)
    return out


@gluon.jit
def rows_of_fp32(SLOTS: gl.constexpr, BLOCK: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """One for each slot, complete after so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit
def meeting(PARTS: gl.constexpr):
    """Where consumers meet; nothing for one alone. A barrier without a use would lend its memory to whatever needs some, and to
    the hardware it stays a barrier: beside other processes, work items were lost in what was kept there.
    """
    if PARTS > 1:
        return barriers(1, PARTS).index(0)
    else:
        return ()


# --- in --------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def copy(descs, chunks, slot, bar, row, column):
    """Start copying a block of one head into a slot."""
    for c in gl.static_range(len(descs)):
        async_load(descs[c], [row, column + descs[0].block_type.shape[1] * c], bar, chunks[c].index(slot))


@gluon.jit
def copy_tile(descs, chunks, bar, row, column):
    """Start copying every consumer's rows of a tile of one head, each into a slot."""
    PARTS: gl.constexpr = chunks[0].shape[0]
    for p in gl.static_range(PARTS):
        copy(descs, chunks, p, bar, row + p * chunks[0].shape[1], column)


@gluon.jit
def _clear_chunk(memory, valid):
    rows: gl.constexpr = memory.shape[0]
    columns: gl.constexpr = memory.shape[1]
    layout: gl.constexpr = wide(columns, gl.num_warps())
    value = memory.load(layout)
    memory.store(gl.where((gl.arange(0, rows, gl.SliceLayout(1, layout)) < valid)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def clear(chunks, slot, valid):
    """Zero the rows from `valid` on: they are another sequence's or hold anything, and in a product 0 * NaN is NaN."""
    for c in gl.static_range(len(chunks)):
        _clear_chunk(chunks[c].index(slot), valid)
    fence_async_shared()
    barrier()


@gluon.jit
def clear_shared(a, b, slot, valid, part: gl.constexpr, PARTS: gl.constexpr, clean, cleared):
    """`clear` of what all consumers read. The first does it, and all meet: a warp two meetings behind would be misled by parity."""
    if part == 0:
        clear(a, slot, valid)
        clear(b, slot, valid)
    else:
        barrier()  # all its warps have left the last meeting
    if PARTS > 1:
        mbarrier.arrive(clean, count=1)
        mbarrier.wait(clean, cleared & 1)


# --- out -------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _store_rows(memory, out, row, rows, valid, stride):
    ROWS: gl.constexpr = memory.shape[0]
    COLUMNS: gl.constexpr = memory.shape[1]
    layout: gl.constexpr = wide(COLUMNS, gl.num_warps())
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    at = gl.multiple_of(out + (row + r).to(gl.int64) * stride + d, [1, 16])
    value = memory.load(layout)
    gl.store(at, gl.where(r < valid, value, gl.zeros_like(value)), mask=(r < rows) & (d >= 0))


@gluon.jit
def _store_chunk(acc, out, row, rows, valid, stride, scale):
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = out + (row + r).to(gl.int64)[:, None] * stride + d[None, :]
    gl.store(at, gl.where((r < valid)[:, None], acc * scale, 0.0), mask=(r < rows)[:, None])


@gluon.jit
def _add_chunk(acc, out, row, valid, stride, scale):
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = out + (row + r).to(gl.int64)[:, None] * stride + d[None, :]
    gl.atomic_add(at, acc * scale, mask=(r < valid)[:, None], sem="relaxed")


@gluon.jit
def stage(acc, staging, part, scale):
    """Leave sums in shared memory, where `store` finds them."""
    for c in gl.static_range(len(acc)):
        staging[c].index(part).store((acc[c] * scale).to(staging[c].dtype))


@gluon.jit
def store(staging, part, descs, out, column, row, rows, valid, stride):
    """Start writing the `rows` rows that a tile owns, those from `valid` on as zeros, from a column of `out` on."""
    ROWS: gl.constexpr = staging[0].shape[1]
    for c in gl.static_range(len(staging)):
        memory = staging[c].index(part)
        at = column + staging[0].shape[2] * c
        if valid >= ROWS:
            async_store(descs[c], [row, at], memory)
        else:
            _store_rows(memory, out + at, row, rows, valid, stride)


@gluon.jit
def store_fp32(acc, out, row, rows, valid, stride, scale, ADDS: gl.constexpr):
    """The same for fp32, from the registers; ADDS: add the valid rows to what is there."""
    for c in gl.static_range(len(acc)):
        if ADDS:
            _add_chunk(acc[c], out + acc[0].shape[1] * c, row, valid, stride, scale)
        else:
            _store_chunk(acc[c], out + acc[0].shape[1] * c, row, rows, valid, stride, scale)


@gluon.jit
def clear_rows(out, row, rows, stride, chunks):
    """`store` of zeros, for a consumer whose rows of the tile meet nothing."""
    for c in gl.static_range(len(chunks)):
        at = out + row.to(gl.int64) * stride + chunks[0].shape[2] * c
        store_zeros(at, stride, rows, chunks[c].shape[1], chunks[c].shape[2])
