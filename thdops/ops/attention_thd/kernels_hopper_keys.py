"""dK and dV on Hopper, and by reduction dQ: `keys_kernel` owns tiles of keys and walks over the queries that see them.

T rows, H heads, D head dim, G = Hq / Hkv query heads of a key head; blocks are BLOCK_Q queries. `kernels_hopper_backward.py` has
the formulas and says how warps share the work. Adding dQ with red.global.add.v2.f32 instead of TMA takes 6.6 ms instead of 5.22 at
D 128 (an H200, Triton 3.6, bf16, causal, 8 x 4096 rows, 32/8 heads).
"""

# Branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from thdops.ops.attention_thd.kernels_hopper_common import LOG2E, integers
from thdops.ops.attention_thd.kernels_hopper_memory import (
    barriers,
    buffers,
    chunks_of,
    clear,
    clear_rows,
    clear_shared,
    copy,
    copy_tile,
    meeting,
    rows_of_fp32,
    stage,
    store,
    store_fp32,
)
from thdops.ops.attention_thd.kernels_hopper_names import barrier
from thdops.ops.attention_thd.kernels_hopper_products import as_running, dot, dot_transposed, wait, zeros
from thdops.ops.attention_thd.kernels_hopper_shares import add_in_order, first_step, hand_over, make_shares, next_step, start_share
from thdops.ops.attention_thd.kernels_hopper_slots import BEHIND, FIRST, await_release, release, threads_of
from thdops.ops.attention_thd.kernels_hopper_work import blocks_met, is_cut, is_hidden, key_place, post, take, tile_at, zero_hidden


@gluon.jit
def _keys_producer(
    args, D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ORDERED: gl.constexpr
):  # fmt: skip
    descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, full = args
    q_desc, k_desc, v_desc, do_desc = descs
    q_head, k_head, v_head, do_head = columns
    tiles, counts, mail, mail_full, mail_empty = work
    kv_heads, near, group = heads
    left, right = window
    q, k, v, do = operands
    lse_s, delta_s = terms
    kv_full, kv_empty = tile_bars
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    THREADS: gl.constexpr = threads_of(k[0].shape[0] * k[0].shape[1])
    KV_BYTES: gl.constexpr = k[0].shape[0] * k[0].shape[1] * 2 * (D_QK + D_V)
    BYTES: gl.constexpr = BLOCK_Q * 2 * (D_QK + D_V)
    offsets = gl.arange(0, BLOCK_Q, gl.BlockedLayout([1], [32], [1], [0]))
    entries = gl.load(counts)
    item = gl.atomic_add(counts + 1, 1)
    turn = 0
    n = 0
    loaded = 0
    while item < entries * kv_heads:
        index, head = key_place(item, entries, heads)
        row, rows, valid, other_row, others, position = tile_at(tiles, index)
        post(work, turn, (index, head, row, rows, valid, other_row, others, position))
        turn += 1
        first, blocks = blocks_met(position, valid, others, right, left, BLOCK_Q, RIGHT, LEFT, ORDERED)
        if blocks > 0:
            mbarrier.wait(kv_empty, (loaded & 1) ^ 1)
            mbarrier.expect(kv_full, KV_BYTES)
            copy_tile(k_desc, k, kv_full, row, head * k_head)
            copy_tile(v_desc, v, kv_full, row, head * v_head)
            loaded += 1
            g, i = first_step(first, blocks, BLOCK_Q, ORDERED)
            for _ in range(group * blocks):
                h = head * group + g
                at = h.to(gl.int64) * tq + other_row
                inside = i + offsets < others
                lse_b = gl.load(lse + at + i + offsets, mask=inside, other=0.0) * LOG2E
                delta_b = gl.load(delta + at + i + offsets, mask=inside, other=0.0)
                slot = n % STAGES
                await_release(FIRST + slot, THREADS, n >= STAGES)
                lse_s.index(slot).store(lse_b)
                delta_s.index(slot).store(delta_b)
                barrier()
                mbarrier.expect(full.index(slot), BYTES)
                copy(q_desc, q, slot, full.index(slot), other_row + i, h * q_head)
                copy(do_desc, do, slot, full.index(slot), other_row + i, h * do_head)
                n += 1
                g, i = next_step(g, i, group, first, blocks, BLOCK_Q, ORDERED)
        item = gl.atomic_add(counts + 1, 1)
    post(work, turn, (-1,))


@gluon.jit
def _keys_block(
    part: gl.constexpr, dk, dv, shares, dq_at, i, tile, window, scale, operands, terms, n, taken, start,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, RUNS_ON: gl.constexpr, BRANCHES: gl.constexpr, REDUCE: gl.constexpr,
):  # fmt: skip
    """Take block n of queries, from row i on, into dK and dV. Shares of dQ take turns by how many were `taken`: of blocks that this
    consumer does not see there are none.
    """
    q, k, v, do = operands
    lse_s, delta_s = terms
    left, right = window
    position, valid, others = tile
    ROWS: gl.constexpr = k[0].shape[1]
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    THREADS: gl.constexpr = threads_of(k[0].shape[0] * k[0].shape[1])
    ORDERED: gl.constexpr = REDUCE and RUNS_ON  # a single consumer's shares
    dtype: gl.constexpr = k[0].dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_Q, 16])
    along: gl.constexpr = gl.SliceLayout(0, S)
    slot = n % STAGES
    lse_b = lse_s.index(slot).load(along)
    s = dot_transposed(k, part, q, slot, S)
    dp = dot_transposed(v, part, do, slot, S)
    if RUNS_ON:
        dk = wait(dk, len(k) + len(v))
        if n > start:
            release(FIRST + (n + STAGES - 1) % STAGES, THREADS)
    cut = is_cut(i, position, valid, others, right, left, ROWS, BLOCK_Q, RIGHT, LEFT)
    s = warpgroup_mma_wait(len(v), deps=(s,))
    p = gl.exp2(s * (scale * LOG2E) - lse_b[None, :])  # [ROWS, BLOCK_Q]
    if cut:
        p = zero_hidden(p, i, position, valid, others, right, left, RIGHT, LEFT)
    dv = dot(p.to(dtype), do, slot, dv)
    delta_b = delta_s.index(slot).load(along)
    dp = warpgroup_mma_wait(len(v), deps=(dp,))
    ds = p * (dp - delta_b[None, :])
    if not BRANCHES:
        ds = gl.where(p == 0.0, 0.0, ds)
    elif cut:
        ds = zero_hidden(ds, i, position, valid, others, right, left, RIGHT, LEFT)
    ds = ds.to(dtype)
    if REDUCE:
        ds_s = shares[2].index(taken % 2 if ORDERED else 0)
        ds_s.store(ds)
        fence_async_shared()
        if not ORDERED:
            tma.store_wait(1)  # the older share has been read; here, as Triton puts a barrier behind this
        barrier()
        dq = start_share(ds_s, k[0].index(part))
        dk = dot(ds, q, slot, dk)
        dq = warpgroup_mma_wait(len(k), deps=(dq,))
        hand_over(dq, others - i, shares, taken, dq_at[0], dq_at[1], FIRST + STAGES, THREADS, ORDERED)
    else:
        dk = dot(ds, q, slot, dk)
    dv = wait(dv, len(k))
    if not RUNS_ON:
        dk = wait(dk, 0)
    return dk, dv


@gluon.jit
def _keys_consumer(
    part: gl.constexpr, args,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BRANCHES: gl.constexpr,
    REDUCE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    outputs, shares, work, heads, window, scale, operands, terms, tile_bars, full, clean = args
    dk_out, dv_out, dk_desc, dv_desc, dk_s, dv_s = outputs
    kv_heads, near, group = heads
    left, right = window
    q, k, v, do = operands
    kv_full, kv_empty = tile_bars
    PARTS: gl.constexpr = k[0].shape[0]
    ROWS: gl.constexpr = k[0].shape[1]
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    STAGES: gl.constexpr = q[0].shape[0]
    THREADS: gl.constexpr = threads_of(k[0].shape[0] * k[0].shape[1])
    RUNS_ON: gl.constexpr = PARTS == 1
    ORDERED: gl.constexpr = REDUCE and RUNS_ON
    FP32: gl.constexpr = dk_out.dtype.element_ty == gl.float32
    turn = 0
    n = 0
    taken = 0
    loaded = 0
    cleared = 0
    index, head, row, rows, valid, other_row, others, position = take(work, turn)
    while index >= 0:
        turn += 1
        first, blocks = blocks_met(position, valid, others, right, left, BLOCK_Q, RIGHT, LEFT, ORDERED)
        row += part * ROWS
        rows -= part * ROWS
        valid -= part * ROWS
        position += part * ROWS
        if blocks > 0:
            dk = zeros(k)
            dv = zeros(v)
            mbarrier.wait(kv_full, loaded & 1)
            loaded += 1
            if REDUCE and valid < ROWS:
                clear(k, part, valid)
            start = n
            running = as_running(dk) if RUNS_ON else dk
            g, i = first_step(first, blocks, BLOCK_Q, ORDERED)
            for _ in range(group * blocks):
                mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                if i + BLOCK_Q > others:
                    clear_shared(q, do, n % STAGES, others - i, part, PARTS, clean, cleared)
                    cleared += 1
                dq_at = (other_row + i, (head * group + g) * D_QK)
                tile = (position, valid, others)
                if RUNS_ON:
                    running, dv = _keys_block(
                        part, running, dv, shares, dq_at, i, tile, window, scale, operands, terms, n, n, start,
                        LEFT, RIGHT, RUNS_ON, BRANCHES, REDUCE,
                    )  # fmt: skip
                else:
                    if not is_hidden(i, position, valid, right, left, ROWS, BLOCK_Q, RIGHT, LEFT):
                        running, dv = _keys_block(
                            part, running, dv, shares, dq_at, i, tile, window, scale, operands, terms, n, taken, start,
                            LEFT, RIGHT, RUNS_ON, BRANCHES, REDUCE,
                        )  # fmt: skip
                        taken += 1
                    release(FIRST + n % STAGES, THREADS)
                n += 1
                g, i = next_step(g, i, group, first, blocks, BLOCK_Q, ORDERED)
            if RUNS_ON:
                dk = wait(running, 0)
                release(FIRST + (n + STAGES - 1) % STAGES, THREADS)
            else:
                dk = running
            if not FP32:
                tma.store_wait(0)  # what the tile before has staged has been read
            barrier()
            if FP32 or not REDUCE:
                mbarrier.arrive(kv_empty, count=1)
            if FP32:
                store_fp32(dk, dk_out + head * D_QK, row, rows, valid, kv_heads * D_QK, scale, ADDS)
                store_fp32(dv, dv_out + head * D_V, row, rows, valid, kv_heads * D_V, 1.0, ADDS)
            else:
                stage(dk, dk_s, part, scale)
                stage(dv, dv_s, part, 1.0)
                fence_async_shared()
                barrier()
                store(dk_s, part, dk_desc, dk_out, head * D_QK, row, rows, valid, kv_heads * D_QK)
                store(dv_s, part, dv_desc, dv_out, head * D_V, row, rows, valid, kv_heads * D_V)
                if REDUCE:  # staged where K and V were
                    tma.store_wait(0)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(kv_empty, count=1)
        elif not ADDS:
            clear_rows(dk_out + head * D_QK, row, rows, kv_heads * D_QK, k)
            clear_rows(dv_out + head * D_V, row, rows, kv_heads * D_V, v)
        index, head, row, rows, valid, other_row, others, position = take(work, turn)
    tma.store_wait(0)


_STRIDES = ["q_head", "k_head", "v_head", "do_head"]


@gluon.jit(do_not_specialize=[*_STRIDES, "tq", "turns_a_head", "begins", "kv_heads", "near", "group", "left", "right"])
def keys_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, dk0, dk1, dv0, dv1, dq_desc, turns, q_head, k_head, v_head, do_head, lse, delta, dk, dv, tq,
    tiles, counts, turns_a_head, begins, kv_heads, near, group, left, right, scale,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    BRANCHES: gl.constexpr, REDUCE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """dK and dV of the key tiles of every key head; with REDUCE, their shares of dQ too, a single consumer's in a fixed order, for
    which there are `turns` and `begins`. ADDS: onto what dk and dv hold.
    """
    ORDERED: gl.constexpr = REDUCE and PARTS == 1
    gl.static_assert(FIRST + STAGES + 2 <= BEHIND)
    descs = (chunks_of(q0, q1), chunks_of(k0, k1), chunks_of(v0, v1), chunks_of(do0, do1))
    columns = (q_head, k_head, v_head, do_head)
    q = buffers(descs[0], STAGES)
    k = buffers(descs[1], PARTS)
    v = buffers(descs[2], PARTS)
    do = buffers(descs[3], STAGES)
    operands = (q, k, v, do)
    BLOCK_Q: gl.constexpr = q[0].shape[1]
    terms = (rows_of_fp32(STAGES, BLOCK_Q), rows_of_fp32(STAGES, BLOCK_Q))
    heads = (kv_heads, near, group)
    window = (left, right)
    work = (tiles, counts, integers(2), barriers(2, 1), barriers(2, PARTS + (1 if ORDERED else 0)))
    tile_bars = (barriers(1, 1).index(0), barriers(1, PARTS).index(0))
    full = barriers(STAGES, 1)
    clean = meeting(PARTS)
    both = (work, heads, window, scale, operands, terms, tile_bars, full, clean)
    # With shares there is no memory left for dk and dv; long sequences do not mind K and V waiting.
    staging = (k, v) if REDUCE or dk.dtype.element_ty == gl.float32 else (buffers(descs[1], PARTS), buffers(descs[2], PARTS))
    outputs = (dk, dv, chunks_of(dk0, dk1), chunks_of(dv0, dv1)) + staging
    first = (outputs, make_shares(dq_desc, k, q, REDUCE, ORDERED)) + both
    second = (outputs, make_shares(dq_desc, k, q, REDUCE and PARTS > 1, False)) + both
    fence_async_shared()
    barrier()
    load = (descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, full)
    if ORDERED:
        ROWS: gl.constexpr = k[0].shape[1]
        gl.warp_specialize(
            [
                (_keys_consumer, (gl.constexpr(0), first, D_QK, D_V, LEFT, RIGHT, BRANCHES, REDUCE, ADDS)),
                (_keys_producer, (load, D_QK, D_V, LEFT, RIGHT, ORDERED)),
                (
                    add_in_order,
                    (first[1], turns, turns_a_head, begins, work, heads, window, D_QK, ROWS, LEFT, RIGHT, FIRST + STAGES),
                ),
            ],
            [1, 1],
            [24, 24],
        )
    elif PARTS == 1:
        gl.warp_specialize(
            [
                (_keys_consumer, (gl.constexpr(0), first, D_QK, D_V, LEFT, RIGHT, BRANCHES, REDUCE, ADDS)),
                (_keys_producer, (load, D_QK, D_V, LEFT, RIGHT, ORDERED)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_keys_consumer, (gl.constexpr(0), first, D_QK, D_V, LEFT, RIGHT, BRANCHES, REDUCE, ADDS)),
                (_keys_consumer, (gl.constexpr(1), second, D_QK, D_V, LEFT, RIGHT, BRANCHES, REDUCE, ADDS)),
                (_keys_producer, (load, D_QK, D_V, LEFT, RIGHT, ORDERED)),
            ],
            [4, 1],
            [240, 24],
        )
