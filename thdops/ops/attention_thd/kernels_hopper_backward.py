"""The backward of packed attention on Hopper: TMA copies, mbarriers and asynchronous wgmma, in Gluon.

T rows, H heads, D head dim, G = Hq / Hkv query heads of a key head; blocks are BLOCK_Q queries and BLOCK_K keys.

    S = Q K^T    P = exp(scale S - LSE)    dP = dO V^T    dS = P (dP - delta)
    dV = P^T dO    dK = scale dS^T Q    dQ = scale dS K

`keys_kernel` owns tiles of keys, walks over the queries that see them and makes dK and dV. dQ comes in one of two ways:
- `queries_kernel` owns tiles of queries and walks over the keys they see. Everything is summed in registers in a fixed order, so
  results repeat bitwise; S and dP are computed twice, seven products in all.
- With REDUCE, `keys_kernel` adds its share of dQ to an fp32 buffer (TMA reduction), in no fixed order: five products, and the
  buffer has to be zeroed before and converted after.

One warp copies; PARTS consumers multiply, each for ROWS rows of the tile. A tile's rows are the rows of every product, so that P
and dS leave the tensor cores in the registers in which they return as left operands. A single consumer lets the last product of a
block run on while the loop turns (RUNS_ON); two consumers fill each other's gaps instead, for ptxas serialises every product of a
kernel in which another than the first partition carries one around a loop. Head dims are split into chunks of a power of two.

Measured on an H200 with Triton 3.6 (bf16, causal, 8 x 4096 rows, ms for keys / queries; see the plans for what is used):
- D 128, 32/8 heads: one consumer 3.53 / 3.36, its products not running on 3.62 / 3.04 (128 keys a block), two consumers 3.83 /
  2.57, two grids of one warpgroup on a multiprocessor - / 2.45. dQ by reduction: 5.22 with dK and dV, and 0.42 around it.
- D 64, 16/16: one consumer 1.43 / 1.04, two 1.13 / 0.78, three grids of one warpgroup 1.78 / 1.30. All of a backward by reduction
  1.75 ms (two consumers, 64 queries a block in three stages; in two 1.85; one consumer 2.08), by two kernels 1.90.
- 192/128, 16/16: one consumer 2.73 / 1.93, two 2.83 / 1.54; 32 queries a block, as 64 leave no registers for dK.
- Adding dQ with red.global.add.v2.f32 instead of TMA: 6.6 at D 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from thdops.ops.attention_thd.kernels_hopper_common import ELEMENT, Boxes, addressable, box_of
from thdops.ops.attention_thd.kernels_hopper_names import async_atomic_add, async_load, barrier
from thdops.ops.launch import Launch, multiprocessors
from thdops.ops.plans import meta

_LOG2E = gl.constexpr(1.4426950408889634)


# ---- work items ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _post(work, turn, item):
    """Tell the consumers which item comes next; two may be on their way."""
    tiles, counts, mail, full, empty = work
    slot = turn % 2
    mbarrier.wait(empty.index(slot), ((turn // 2) & 1) ^ 1)
    mail.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _take(work, turn):
    """Which item comes next."""
    tiles, counts, mail, full, empty = work
    slot = turn % 2
    mbarrier.wait(full.index(slot), (turn // 2) & 1)
    item = gl.max(mail.index(slot).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return item


@gluon.jit
def _tile(tiles, index):
    entry = tiles + index.to(gl.int64) * 8
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)


# A row at position p of the other side's axis meets the rows [p - before, p + after] of it.


@gluon.jit
def _range(position, valid, others, before, after, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """First row and number of the blocks of the other side that any row of a tile meets."""
    first = gl.maximum(position - before, 0) if BEFORE else position * 0
    last = gl.minimum(position + valid + after, others) if AFTER else others
    return first, gl.where(valid > 0, (gl.maximum(last - first, 0) + BLOCK - 1) // BLOCK, 0)


@gluon.jit
def _is_cut(
    i, position, valid, others, before, after, ROWS: gl.constexpr, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr
):
    """Whether any pair of a tile and the block from i on is hidden."""
    cut = (valid < ROWS) | (i + BLOCK > others)
    if BEFORE:
        cut = cut | (i < position + ROWS - 1 - before)
    if AFTER:
        cut = cut | (i + BLOCK - 1 > position + after)
    return cut


@gluon.jit
def _is_hidden(
    i, position, valid, before, after, ROWS: gl.constexpr, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr
):
    """Whether every pair is: a consumer's rows may be, where the tile's are not."""
    hidden = valid <= 0
    if BEFORE:
        hidden = hidden | (i + BLOCK - 1 < position - before)
    if AFTER:
        hidden = hidden | (i > position + ROWS - 1 + after)
    return hidden


@gluon.jit
def _cut(x, i, position, valid, others, before, after, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """Zero for the hidden pairs of [ROWS, BLOCK]; by selection, for what stands there may be NaN."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = i + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    seen = (r < valid)[:, None] & (c < others)[None, :]
    if BEFORE:
        seen = seen & (c[None, :] >= (position + r - before)[:, None])
    if AFTER:
        seen = seen & (c[None, :] <= (position + r + after)[:, None])
    return gl.where(seen, x, 0.0)


# ---- products: operands are tuples of chunks of the head dim ---------------------------------------------------------------------


@gluon.jit
def _dot_transposed(a, part, b, slot, layout: gl.constexpr):
    """Start a b^T [ROWS, BLOCK]."""
    M: gl.constexpr = a[0].shape[1]
    N: gl.constexpr = b[0].shape[1]
    zero = gl.zeros([M, N], gl.float32, layout)
    out = warpgroup_mma(a[0].index(part), b[0].index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, len(a)):
        out = warpgroup_mma(a[c].index(part), b[c].index(slot).permute((1, 0)), out, is_async=True)
    return out


@gluon.jit
def _dot_chunk(a, b, acc):
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(a, left), b, acc, is_async=True)


@gluon.jit
def _dot(a, b, slot, acc):
    """Start acc + a b [ROWS, D]; `a` is in registers."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (_dot_chunk(a, b[c].index(slot), acc[c]),)
    return out


@gluon.jit
def _zero(tile):
    rows: gl.constexpr = tile.shape[1]
    columns: gl.constexpr = tile.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, columns, 16])
    return gl.zeros([rows, columns], gl.float32, layout)


@gluon.jit
def _zeros(tiles):
    out = ()
    for c in gl.static_range(len(tiles)):
        out = out + (_zero(tiles[c]),)
    return out


@gluon.jit
def _running(acc):
    """As accumulators of products that may be under way."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (warpgroup_mma_init(acc[c]),)
    return out


@gluon.jit
def _wait(acc, PENDING: gl.constexpr):
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (warpgroup_mma_wait(PENDING, deps=(acc[c],)),)
    return out


@gluon.jit
def _clear_chunk(memory, valid):
    rows: gl.constexpr = memory.shape[0]
    columns: gl.constexpr = memory.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [gl.num_warps(), 1], [1, 0])
    value = memory.load(layout)
    memory.store(gl.where((gl.arange(0, rows, gl.SliceLayout(1, layout)) < valid)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _clear(chunks, slot, valid):
    """Zero the rows from `valid` on: they are another sequence's or hold anything, and in a product 0 * NaN is NaN."""
    for c in gl.static_range(len(chunks)):
        _clear_chunk(chunks[c].index(slot), valid)
    fence_async_shared()
    barrier()


@gluon.jit
def _clear_shared(a, b, slot, valid, part: gl.constexpr, PARTS: gl.constexpr, clean, cleared):
    """`_clear` of what all consumers read. The first does it, and all meet: were it two blocks ahead, parity would mislead."""
    if part == 0:
        _clear(a, slot, valid)
        _clear(b, slot, valid)
    if PARTS > 1:
        mbarrier.arrive(clean, count=1)
        mbarrier.wait(clean, cleared & 1)


# ---- memory --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy(descs, chunks, slot, bar, row, column):
    """Start copying a block of one head into a slot."""
    for c in gl.static_range(len(descs)):
        async_load(descs[c], [row, column + descs[0].block_type.shape[1] * c], bar, chunks[c].index(slot))


@gluon.jit
def _copy_tile(descs, chunks, bar, row, column):
    PARTS: gl.constexpr = chunks[0].shape[0]
    for p in gl.static_range(PARTS):
        _copy(descs, chunks, p, bar, row + p * chunks[0].shape[1], column)


@gluon.jit
def _store_chunk(acc, out, row, rows, valid, stride, scale):
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    value = gl.where((r < valid)[:, None], acc * scale, 0.0).to(out.dtype.element_ty)
    gl.store(out + (row + r).to(gl.int64)[:, None] * stride + d[None, :], value, mask=(r < rows)[:, None])


@gluon.jit
def _add_chunk(acc, out, row, valid, stride, scale):
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    at = out + (row + r).to(gl.int64)[:, None] * stride + d[None, :]
    gl.atomic_add(at, acc * scale, mask=(r < valid)[:, None], sem="relaxed")


@gluon.jit
def _store(acc, out, row, rows, valid, stride, scale, ADDS: gl.constexpr):
    """Write the `rows` rows that a tile owns, those from `valid` on as zeros; ADDS: add the valid ones to what is there, fp32."""
    for c in gl.static_range(len(acc)):
        if ADDS:
            _add_chunk(acc[c], out + acc[0].shape[1] * c, row, valid, stride, scale)
        else:
            _store_chunk(acc[c], out + acc[0].shape[1] * c, row, rows, valid, stride, scale)


@gluon.jit
def _chunks(first, second):
    if second is None:
        return (first,)
    else:
        return (first, second)


@gluon.jit
def _buffer(desc, SLOTS: gl.constexpr):
    rows: gl.constexpr = desc.block_type.shape[0]
    columns: gl.constexpr = desc.block_type.shape[1]
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, rows, columns], desc.layout)


@gluon.jit
def _buffers(descs, SLOTS: gl.constexpr) -> Any:
    out = ()
    for c in gl.static_range(len(descs)):
        out = out + (_buffer(descs[c], SLOTS),)
    return out


@gluon.jit
def _rows_of_fp32(SLOTS: gl.constexpr, BLOCK: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _mailbox():
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(bars.index(s), count=ARRIVALS)
    return bars


@gluon.jit
def _meeting(PARTS: gl.constexpr):
    """Where consumers meet; nothing for one alone. A barrier without a use would lend its memory to whatever needs some, and to
    the hardware it stays a barrier: beside other processes, work items were lost in what was kept there.
    """
    if PARTS > 1:
        return _barriers(1, PARTS).index(0)
    else:
        return ()


# ---- keys ----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _keys_producer(
    descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, block_bars,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descs
    q_head, k_head, v_head, do_head = columns
    tiles, counts, mail, mail_full, mail_empty = work
    kv_heads, group = heads
    left, right = window
    q, k, v, do = operands
    lse_s, delta_s = terms
    kv_full, kv_empty = tile_bars
    full, empty = block_bars
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    KV_BYTES: gl.constexpr = k[0].shape[0] * k[0].shape[1] * 2 * (D_QK + D_V)
    BYTES: gl.constexpr = BLOCK_Q * 2 * (D_QK + D_V)
    offsets = gl.arange(0, BLOCK_Q, gl.BlockedLayout([1], [32], [1], [0]))
    entries = gl.load(counts)
    item = gl.atomic_add(counts + 1, 1)
    turn = 0
    n = 0
    loaded = 0
    while item < entries * kv_heads:
        _post(work, turn, item)
        turn += 1
        head = item % kv_heads
        row, rows, valid, other_row, others, position = _tile(tiles, entries - 1 - item // kv_heads)
        first, blocks = _range(position, valid, others, right, left, BLOCK_Q, RIGHT, LEFT)
        if blocks > 0:
            mbarrier.wait(kv_empty, (loaded & 1) ^ 1)
            mbarrier.expect(kv_full, KV_BYTES)
            _copy_tile(k_desc, k, kv_full, row, head * k_head)
            _copy_tile(v_desc, v, kv_full, row, head * v_head)
            loaded += 1
            for g in range(group):
                h = head * group + g
                at = h.to(gl.int64) * tq + other_row
                for b in range(blocks):
                    i = first + b * BLOCK_Q
                    inside = i + offsets < others
                    lse_b = gl.load(lse + at + i + offsets, mask=inside, other=0.0) * _LOG2E
                    delta_b = gl.load(delta + at + i + offsets, mask=inside, other=0.0)
                    slot = n % STAGES
                    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                    lse_s.index(slot).store(lse_b)
                    delta_s.index(slot).store(delta_b)
                    barrier()
                    mbarrier.expect(full.index(slot), BYTES)
                    _copy(q_desc, q, slot, full.index(slot), other_row + i, h * q_head)
                    _copy(do_desc, do, slot, full.index(slot), other_row + i, h * do_head)
                    n += 1
        item = gl.atomic_add(counts + 1, 1)
    _post(work, turn, item)


@gluon.jit
def _share(dq_desc, k, q, REDUCE: gl.constexpr):
    """What a consumer reduces dQ with: the descriptor of the buffer, two shares on their way, and dS^T in shared memory."""
    if REDUCE:
        shape: gl.constexpr = [k[0].shape[1], q[0].shape[1]]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, k[0].dtype)
        return dq_desc, _buffer(dq_desc, 2), gl.allocate_shared_memory(k[0].dtype, shape, layout)
    else:
        return ()


@gluon.jit
def _dq_share(ds_s, k):
    """Start dS K [BLOCK_Q, D] of one tile of keys; shared memory holds dS^T."""
    rows: gl.constexpr = ds_s.shape[1]
    columns: gl.constexpr = k.shape[1]
    ALONG: gl.constexpr = gl.num_warps() if rows >= 16 * gl.num_warps() else rows // 16
    ACROSS: gl.constexpr = gl.num_warps() // ALONG
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ALONG, ACROSS], [16, columns // ACROSS, 16])
    zero = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(ds_s.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq, valid, dq_desc, dq_s, row, column):
    """Start adding [BLOCK_Q, D] to the buffer; rows from `valid` on are another sequence's and get zeros."""
    if valid < dq.shape[0]:
        r = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout))
        dq = gl.where((r < valid)[:, None], dq, 0.0)
    dq_s.store(dq)
    fence_async_shared()
    barrier()
    async_atomic_add(dq_desc, [row, column], dq_s)


@gluon.jit
def _keys_block(
    part: gl.constexpr, dk, dv, share, dq_at, i, tile, window, scale, operands, terms, empty, n, start,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, RUNS_ON: gl.constexpr, REDUCE: gl.constexpr,
):  # fmt: skip
    """Take block n of queries, from row i on, into dK and dV."""
    q, k, v, do = operands
    lse_s, delta_s = terms
    left, right = window
    position, valid, others = tile
    ROWS: gl.constexpr = k[0].shape[1]
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    dtype: gl.constexpr = k[0].dtype
    # P may start into dV before dS is known, where the registers suffice for both.
    EARLY: gl.constexpr = BLOCK_Q < 128 and not REDUCE
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_Q, 16])
    along: gl.constexpr = gl.SliceLayout(0, S)
    slot = n % STAGES
    s = _dot_transposed(k, part, q, slot, S)
    dp = _dot_transposed(v, part, do, slot, S)
    if RUNS_ON:
        dk = _wait(dk, len(k) + len(v))
        barrier()
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > start)
    cut = _is_cut(i, position, valid, others, right, left, ROWS, BLOCK_Q, RIGHT, LEFT)
    lse_b = lse_s.index(slot).load(along)
    s = warpgroup_mma_wait(len(v), deps=(s,))
    p = gl.exp2(s * (scale * _LOG2E) - lse_b[None, :])  # [ROWS, BLOCK_Q]
    if cut:
        p = _cut(p, i, position, valid, others, right, left, RIGHT, LEFT)
    if EARLY:
        dv = _dot(p.to(dtype), do, slot, dv)
    delta_b = delta_s.index(slot).load(along)
    dp = warpgroup_mma_wait(len(v) if EARLY else 0, deps=(dp,))
    ds = p * (dp - delta_b[None, :])
    if cut:
        ds = gl.where(p == 0.0, 0.0, ds)
    if not EARLY:
        dv = _dot(p.to(dtype), do, slot, dv)
    ds = ds.to(dtype)
    if REDUCE:
        dq_desc, dq_s, ds_s = share
        ds_s.store(ds)
        tma.store_wait(dq_s.shape[0] - 1)  # the oldest share has been read
        fence_async_shared()
        barrier()
        dq = _dq_share(ds_s, k[0].index(part))
        dk = _dot(ds, q, slot, dk)
        dq = warpgroup_mma_wait(len(k), deps=(dq,))
        _add_dq(dq, others - i, dq_desc, dq_s.index(n % dq_s.shape[0]), dq_at[0], dq_at[1])
    else:
        dk = _dot(ds, q, slot, dk)
    dv = _wait(dv, len(k))
    if not RUNS_ON:
        dk = _wait(dk, 0)
    return dk, dv


@gluon.jit
def _keys_consumer(
    part: gl.constexpr, dk_out, dv_out, share, work, heads, window, scale, operands, terms, tile_bars, block_bars, clean,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, REDUCE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    tiles, counts, mail, mail_full, mail_empty = work
    kv_heads, group = heads
    left, right = window
    q, k, v, do = operands
    kv_full, kv_empty = tile_bars
    full, empty = block_bars
    PARTS: gl.constexpr = k[0].shape[0]
    ROWS: gl.constexpr = k[0].shape[1]
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    RUNS_ON: gl.constexpr = PARTS == 1
    entries = gl.load(counts)
    turn = 0
    n = 0
    loaded = 0
    cleared = 0
    item = _take(work, turn)
    while item < entries * kv_heads:
        turn += 1
        head = item % kv_heads
        # From the end: under a causal mask, a sequence's last keys are seen by few, and light work should come last.
        row, rows, valid, other_row, others, position = _tile(tiles, entries - 1 - item // kv_heads)
        first, blocks = _range(position, valid, others, right, left, BLOCK_Q, RIGHT, LEFT)
        row += part * ROWS
        rows -= part * ROWS
        valid -= part * ROWS
        position += part * ROWS
        dk = _zeros(k)
        dv = _zeros(v)
        if blocks > 0:
            mbarrier.wait(kv_full, loaded & 1)
            loaded += 1
            if REDUCE and valid < ROWS:
                _clear(k, part, valid)
            start = n
            running = _running(dk) if RUNS_ON else dk
            for g in range(group):
                for b in range(blocks):
                    i = first + b * BLOCK_Q
                    mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                    if i + BLOCK_Q > others:
                        _clear_shared(q, do, n % STAGES, others - i, part, PARTS, clean, cleared)
                        cleared += 1
                    dq_at = (other_row + i, (head * group + g) * D_QK)
                    tile = (position, valid, others)
                    if RUNS_ON:
                        running, dv = _keys_block(
                            part, running, dv, share, dq_at, i, tile, window, scale, operands, terms, empty, n, start,
                            LEFT, RIGHT, RUNS_ON, REDUCE,
                        )  # fmt: skip
                    else:
                        if not _is_hidden(i, position, valid, right, left, ROWS, BLOCK_Q, RIGHT, LEFT):
                            running, dv = _keys_block(
                                part, running, dv, share, dq_at, i, tile, window, scale, operands, terms, empty, n, start,
                                LEFT, RIGHT, RUNS_ON, REDUCE,
                            )  # fmt: skip
                        barrier()
                        mbarrier.arrive(empty.index(n % STAGES), count=1)
                    n += 1
            if RUNS_ON:
                dk = _wait(running, 0)
                barrier()
                mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1)
            else:
                dk = running
            mbarrier.arrive(kv_empty, count=1)
        _store(dk, dk_out + head * D_QK, row, rows, valid, kv_heads * D_QK, scale, ADDS)
        _store(dv, dv_out + head * D_V, row, rows, valid, kv_heads * D_V, 1.0, ADDS)
        item = _take(work, turn)
    if REDUCE:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_head", "k_head", "v_head", "do_head", "tq", "kv_heads", "group", "left", "right"])
def keys_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, dq_desc, q_head, k_head, v_head, do_head, lse, delta, dk, dv, tq, tiles, counts,
    kv_heads, group, left, right, scale,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    REDUCE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """dK and dV of the key tiles of every key head; with REDUCE, their shares of dQ too. ADDS: onto what dk and dv hold."""
    descs = (_chunks(q0, q1), _chunks(k0, k1), _chunks(v0, v1), _chunks(do0, do1))
    columns = (q_head, k_head, v_head, do_head)
    q = _buffers(descs[0], STAGES)
    k = _buffers(descs[1], PARTS)
    v = _buffers(descs[2], PARTS)
    do = _buffers(descs[3], STAGES)
    operands = (q, k, v, do)
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    terms = (_rows_of_fp32(STAGES, BLOCK_Q), _rows_of_fp32(STAGES, BLOCK_Q))
    share = _share(dq_desc, k, q, REDUCE)
    heads = (kv_heads, group)
    window = (left, right)
    work = (tiles, counts, _mailbox(), _barriers(2, 1), _barriers(2, PARTS))
    tile_bars = (_barriers(1, 1).index(0), _barriers(1, PARTS).index(0))
    block_bars = (_barriers(STAGES, 1), _barriers(STAGES, PARTS))
    clean = _meeting(PARTS)
    fence_async_shared()
    barrier()
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_keys_consumer, (
                    gl.constexpr(0), dk, dv, share, work, heads, window, scale, operands, terms, tile_bars, block_bars,
                    clean, D_QK, D_V, LEFT, RIGHT, REDUCE, ADDS,
                )),
                (_keys_producer, (
                    descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, block_bars, D_QK, D_V,
                    LEFT, RIGHT,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_keys_consumer, (
                    gl.constexpr(0), dk, dv, share, work, heads, window, scale, operands, terms, tile_bars, block_bars,
                    clean, D_QK, D_V, LEFT, RIGHT, REDUCE, ADDS,
                )),
                (_keys_consumer, (
                    gl.constexpr(1), dk, dv, _share(dq_desc, k, q, REDUCE), work, heads, window, scale, operands, terms,
                    tile_bars, block_bars, clean, D_QK, D_V, LEFT, RIGHT, REDUCE, ADDS,
                )),
                (_keys_producer, (
                    descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, block_bars, D_QK, D_V,
                    LEFT, RIGHT,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# ---- queries -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _queries_producer(
    descs, columns, work, all_heads, window, operands, tile_bars, block_bars,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc = descs
    q_head, k_head, v_head, do_head = columns
    tiles, counts, mail, mail_full, mail_empty = work
    heads, group = all_heads
    left, right = window
    q, k, v, do = operands
    q_full, q_empty = tile_bars
    full, empty = block_bars
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    Q_BYTES: gl.constexpr = q[0].shape[0] * q[0].shape[1] * 2 * (D_QK + D_V)
    BYTES: gl.constexpr = BLOCK_K * 2 * (D_QK + D_V)
    total = gl.load(counts) * heads
    item = gl.atomic_add(counts + 1, 1)
    turn = 0
    n = 0
    loaded = 0
    while item < total:
        _post(work, turn, item)
        turn += 1
        head = item % heads
        row, rows, valid, other_row, others, position = _tile(tiles, item // heads)
        first, blocks = _range(position, valid, others, left, right, BLOCK_K, LEFT, RIGHT)
        if blocks > 0:
            mbarrier.wait(q_empty, (loaded & 1) ^ 1)
            mbarrier.expect(q_full, Q_BYTES)
            _copy_tile(q_desc, q, q_full, row, head * q_head)
            _copy_tile(do_desc, do, q_full, row, head * do_head)
            loaded += 1
            for b in range(blocks):
                j = other_row + first + b * BLOCK_K
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                _copy(k_desc, k, slot, full.index(slot), j, head // group * k_head)
                _copy(v_desc, v, slot, full.index(slot), j, head // group * v_head)
                n += 1
        item = gl.atomic_add(counts + 1, 1)
    _post(work, turn, item)


@gluon.jit
def _queries_block(
    part: gl.constexpr, dq, lse_r, delta_r, j, tile, window, scale, operands, empty, n, start,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, RUNS_ON: gl.constexpr,
):  # fmt: skip
    """Take block n of keys, from row j on, into dQ."""
    q, k, v, do = operands
    left, right = window
    position, valid, others = tile
    ROWS: gl.constexpr = q[0].shape[1]
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_K, 16])
    slot = n % STAGES
    s = _dot_transposed(q, part, k, slot, S)
    dp = _dot_transposed(do, part, v, slot, S)
    if RUNS_ON:
        dq = _wait(dq, len(q) + len(v))
        barrier()
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > start)
    cut = _is_cut(j, position, valid, others, left, right, ROWS, BLOCK_K, LEFT, RIGHT)
    s = warpgroup_mma_wait(len(v), deps=(s,))
    p = gl.exp2(s * (scale * _LOG2E) - lse_r[:, None])  # [ROWS, BLOCK_K]
    if cut:
        p = _cut(p, j, position, valid, others, left, right, LEFT, RIGHT)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * (dp - delta_r[:, None])
    if cut:
        ds = gl.where(p == 0.0, 0.0, ds)
    dq = _dot(ds.to(k[0].dtype), k, slot, dq)
    if not RUNS_ON:
        dq = _wait(dq, 0)
    return dq


@gluon.jit
def _queries_consumer(
    part: gl.constexpr, dq_out, lse, delta, tq, work, heads, window, scale, operands, tile_bars, block_bars, clean,
    D_QK: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    tiles, counts, mail, mail_full, mail_empty = work
    left, right = window
    q, k, v, do = operands
    q_full, q_empty = tile_bars
    full, empty = block_bars
    PARTS: gl.constexpr = q[0].shape[0]
    ROWS: gl.constexpr = q[0].shape[1]
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    RUNS_ON: gl.constexpr = PARTS == 1
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_K, 16])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    total = gl.load(counts) * heads
    turn = 0
    n = 0
    loaded = 0
    cleared = 0
    item = _take(work, turn)
    while item < total:
        turn += 1
        head = item % heads
        row, rows, valid, other_row, others, position = _tile(tiles, item // heads)
        first, blocks = _range(position, valid, others, left, right, BLOCK_K, LEFT, RIGHT)
        row += part * ROWS
        rows -= part * ROWS
        valid -= part * ROWS
        position += part * ROWS
        dq = _zeros(q)
        if blocks > 0:
            at = head.to(gl.int64) * tq + row
            lse_r = gl.load(lse + at + r, mask=r < valid, other=0.0) * _LOG2E
            delta_r = gl.load(delta + at + r, mask=r < valid, other=0.0)
            mbarrier.wait(q_full, loaded & 1)
            loaded += 1
            start = n
            running = _running(dq) if RUNS_ON else dq
            for b in range(blocks):
                j = first + b * BLOCK_K
                mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                if j + BLOCK_K > others:
                    _clear_shared(k, (), n % STAGES, others - j, part, PARTS, clean, cleared)
                    cleared += 1
                tile = (position, valid, others)
                if RUNS_ON:
                    running = _queries_block(
                        part, running, lse_r, delta_r, j, tile, window, scale, operands, empty, n, start, LEFT, RIGHT, RUNS_ON
                    )
                else:
                    if not _is_hidden(j, position, valid, left, right, ROWS, BLOCK_K, LEFT, RIGHT):
                        running = _queries_block(
                            part, running, lse_r, delta_r, j, tile, window, scale, operands, empty, n, start, LEFT, RIGHT, RUNS_ON
                        )
                    barrier()
                    mbarrier.arrive(empty.index(n % STAGES), count=1)
                n += 1
            if RUNS_ON:
                dq = _wait(running, 0)
                barrier()
                mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1)
            else:
                dq = running
            mbarrier.arrive(q_empty, count=1)
        _store(dq, dq_out + head * D_QK, row, rows, valid, heads * D_QK, scale, ADDS)
        item = _take(work, turn)


@gluon.jit(do_not_specialize=["q_head", "k_head", "v_head", "do_head", "tq", "heads", "group", "left", "right"])
def queries_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, q_head, k_head, v_head, do_head, lse, delta, dq, tq, tiles, counts,
    heads, group, left, right, scale,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """dQ of the query tiles of every query head. ADDS: onto what dq holds."""
    descs = (_chunks(q0, q1), _chunks(k0, k1), _chunks(v0, v1), _chunks(do0, do1))
    columns = (q_head, k_head, v_head, do_head)
    operands = (_buffers(descs[0], PARTS), _buffers(descs[1], STAGES), _buffers(descs[2], STAGES), _buffers(descs[3], PARTS))
    window = (left, right)
    work = (tiles, counts, _mailbox(), _barriers(2, 1), _barriers(2, PARTS))
    tile_bars = (_barriers(1, 1).index(0), _barriers(1, PARTS).index(0))
    block_bars = (_barriers(STAGES, 1), _barriers(STAGES, PARTS))
    clean = _meeting(PARTS)
    fence_async_shared()
    barrier()
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_queries_consumer, (
                    gl.constexpr(0), dq, lse, delta, tq, work, heads, window, scale, operands, tile_bars, block_bars,
                    clean, D_QK, LEFT, RIGHT, ADDS,
                )),
                (_queries_producer, (
                    descs, columns, work, (heads, group), window, operands, tile_bars, block_bars, D_QK, D_V, LEFT, RIGHT,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_queries_consumer, (
                    gl.constexpr(0), dq, lse, delta, tq, work, heads, window, scale, operands, tile_bars, block_bars,
                    clean, D_QK, LEFT, RIGHT, ADDS,
                )),
                (_queries_consumer, (
                    gl.constexpr(1), dq, lse, delta, tq, work, heads, window, scale, operands, tile_bars, block_bars,
                    clean, D_QK, LEFT, RIGHT, ADDS,
                )),
                (_queries_producer, (
                    descs, columns, work, (heads, group), window, operands, tile_bars, block_bars, D_QK, D_V, LEFT, RIGHT,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# ---- host ----------------------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Measured on an H200. Rows of a tile and consumers that share it, rows of a block and how many are on their way, warps of the
    first consumer, grids per multiprocessor and, where more than one, registers of a thread.
    """

    rows: int
    parts: int
    block: int
    stages: int
    warps: int
    per_sm: int = 1
    registers: int | None = None


_KEYS = {
    (64, 64): _Plan(128, 2, 128, 2, 4),
    (96, 96): _Plan(128, 1, 64, 2, 8),
    (128, 128): _Plan(128, 1, 64, 2, 8),
    (192, 128): _Plan(128, 1, 32, 2, 8),
}
_QUERIES = {
    (64, 64): _Plan(128, 2, 128, 2, 4),
    (96, 96): _Plan(128, 2, 64, 2, 4),
    (128, 128): _Plan(64, 1, 64, 2, 4, 2, 128),
    (192, 128): _Plan(128, 2, 64, 2, 4),
}
# With the reduction, where that was the faster way to dQ: tiles as above.
_REDUCED = {
    (64, 64): _Plan(128, 2, 64, 3, 4),
    (128, 128): _Plan(128, 1, 64, 2, 8),
}


def serves(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """Whether `Keys` and `Queries` take these: a tuned pair of head dims, 16 bits, rows that TMA can address, something to do."""
    return (q.shape[2], v.shape[2]) in _KEYS and q.dtype in ELEMENT and all(map(addressable, (q, k, v, do)))


def tile_rows(d_qk: int, d_v: int) -> tuple[int, int]:
    """Rows of a query tile and of a key tile: what the tile tables are made with."""
    return _QUERIES[d_qk, d_v].rows, _KEYS[d_qk, d_v].rows


def reduces(d_qk: int, d_v: int) -> bool:
    """Whether `Keys` had better be given the fp32 sums for dQ, where any order of adding will do."""
    return (d_qk, d_v) in _REDUCED


class Keys:
    """dk and dv [Tk, Hkv, D], planned for tensors that `serves` takes; zeros on padding rows.

    left, right: rows of the window on either side of the diagonal, -1 for all of them. adds: gradients are added to what stands in
    the rows of tiles, fp32. reduces: there will be `sums`.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, left: int, right: int, scale: float, adds: bool, reduces: bool
    ) -> None:
        shape = (q.shape[2], v.shape[2])
        plan = (_REDUCED if reduces else _KEYS)[shape]
        self._operands = _Operands(q, k, v, do, plan.block, plan.rows // plan.parts)
        self._sums = box_of(meta(*q.shape, dtype=torch.float32), plan.block, q.shape[2])
        constexprs = (*shape, int(left >= 0), int(right >= 0), plan.parts, plan.stages, int(reduces), int(adds))
        self._launch = _launch(keys_kernel, plan, q, (k.shape[1], q.shape[1] // k.shape[1], left, right, scale), constexprs)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
        tiles: Tensor, counts: Tensor, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """lse and delta = rowsum(dO * O) - dLSE: fp32 [Hq, Tq], contiguous. Tiles of `tile_rows` rows each, the work counter zero.
        sums: fp32 [Tq, Hq, Dqk], to which dq / scale is added on the way to dk and dv.
        """
        descs = self._operands(q, k, v, do)
        added = descs[0] if sums is None else Boxes(sums, *self._sums)
        self._launch(*descs, added, *self._operands.columns, lse, delta, dk, dv, q.shape[0], tiles, counts)


class Queries:
    """dq [Tq, Hq, D]: as `Keys`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, left: int, right: int, scale: float, adds: bool) -> None:
        shape = (q.shape[2], v.shape[2])
        plan = _QUERIES[shape]
        self._operands = _Operands(q, k, v, do, plan.rows // plan.parts, plan.block)
        constexprs = (*shape, int(left >= 0), int(right >= 0), plan.parts, plan.stages, int(adds))
        self._launch = _launch(queries_kernel, plan, q, (q.shape[1], q.shape[1] // k.shape[1], left, right, scale), constexprs)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, tiles: Tensor, counts: Tensor
    ) -> None:
        self._launch(*self._operands(q, k, v, do), *self._operands.columns, lse, delta, dq, q.shape[0], tiles, counts)


def _launch(kernel: Any, plan: _Plan, q: Tensor, numbers: tuple[Any, ...], constexprs: tuple[Any, ...]) -> Launch:
    grid = (multiprocessors(q.get_device()) * plan.per_sm, 1, 1)
    return Launch(kernel, grid, numbers, constexprs, plan.warps, plan.registers)


class _Operands:
    """Descriptors of q, k, v, do in two chunks of the head dim each, the second None where one will do; `columns` between heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, q_rows: int, k_rows: int) -> None:
        self.columns = (q.stride(1), k.stride(1), v.stride(1), do.stride(1))
        self._boxes = [_two_chunks(x, rows) for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows), (do, q_rows))]

    def __call__(self, *operands: Tensor) -> list[Any]:
        return [box and Boxes(x, *box) for x, boxes in zip(operands, self._boxes, strict=True) for box in boxes]


def _two_chunks(x: Tensor, rows: int) -> list[Any]:
    chunks = {192: (128, 64), 96: (64, 32)}.get(x.shape[2], (x.shape[2],))
    return [box_of(x, rows, columns) for columns in chunks] + [None] * (2 - len(chunks))
