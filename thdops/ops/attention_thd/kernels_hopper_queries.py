"""dQ on Hopper: `queries_kernel` owns tiles of queries and walks over the keys they see.

T rows, H heads, D head dim, G = Hq / Hkv query heads of a key head; blocks are BLOCK_K keys. `kernels_hopper_backward.py` has
the formulas and says how warps share the work. Where `out` is given, delta is made on the way (`kernels_hopper_delta.py`).
"""

# Branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from thdops.ops.attention_thd.kernels_hopper_common import LOG2E, integers, place_of
from thdops.ops.attention_thd.kernels_hopper_delta import begin_delta, delta_sources, finish_delta, unmet_delta
from thdops.ops.attention_thd.kernels_hopper_memory import (
    barriers,
    buffers,
    chunks_of,
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
from thdops.ops.attention_thd.kernels_hopper_slots import BEHIND, FIRST, await_release, release, threads_of
from thdops.ops.attention_thd.kernels_hopper_work import blocks_met, is_cut, is_hidden, post, take, tile_at, zero_hidden


@gluon.jit
def _queries_producer(args, D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    descs, columns, lse, delta, tq, work, heads, window, operands, terms, tile_bars, full = args
    q_desc, k_desc, v_desc, do_desc = descs
    q_head, k_head, v_head, do_head = columns
    tiles, counts, mail, mail_full, mail_empty = work
    all_heads, near, group = heads
    left, right = window
    q, k, v, do = operands
    lse_s, delta_s = terms
    q_full, q_empty = tile_bars
    PARTS: gl.constexpr = q[0].shape[0]
    ROWS: gl.constexpr = q[0].shape[1]
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    THREADS: gl.constexpr = threads_of(q[0].shape[0] * q[0].shape[1])
    Q_BYTES: gl.constexpr = q[0].shape[0] * q[0].shape[1] * 2 * (D_QK + D_V)
    BYTES: gl.constexpr = BLOCK_K * 2 * (D_QK + D_V)
    MAKES_DELTA: gl.constexpr = len(delta_s) == 0
    r = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    entries = gl.load(counts)
    item = gl.atomic_add(counts + 1, 1)
    turn = 0
    n = 0
    loaded = 0
    while item < entries * all_heads:
        index, head = place_of(item, entries, heads)
        row, rows, valid, other_row, others, position = tile_at(tiles, index)
        post(work, turn, (index, head, row, rows, valid, other_row, others, position))
        turn += 1
        first, blocks = blocks_met(position, valid, others, left, right, BLOCK_K, LEFT, RIGHT)
        if blocks > 0:
            at = head.to(gl.int64) * tq + row
            for part in gl.static_range(PARTS):
                here = part * ROWS + r
                lse_r = gl.load(lse + at + here, mask=here < valid, other=0.0) * LOG2E
                if not MAKES_DELTA:
                    delta_r = gl.load(delta + at + here, mask=here < valid, other=0.0)
                if part == 0:
                    mbarrier.wait(q_empty, (loaded & 1) ^ 1)
                lse_s.index(part).store(lse_r)
                if not MAKES_DELTA:
                    delta_s[0].index(part).store(delta_r)
            barrier()
            mbarrier.expect(q_full, Q_BYTES)
            copy_tile(q_desc, q, q_full, row, head * q_head)
            copy_tile(do_desc, do, q_full, row, head * do_head)
            loaded += 1
            for b in range(blocks):
                j = other_row + first + b * BLOCK_K
                slot = n % STAGES
                await_release(FIRST + slot, THREADS, n >= STAGES)
                mbarrier.expect(full.index(slot), BYTES)
                copy(k_desc, k, slot, full.index(slot), j, head // group * k_head)
                copy(v_desc, v, slot, full.index(slot), j, head // group * v_head)
                n += 1
        item = gl.atomic_add(counts + 1, 1)
    post(work, turn, (-1,))


@gluon.jit
def _queries_block(
    part: gl.constexpr, dq, lse_r, delta_r, j, tile, window, scale, operands, n, start,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, RUNS_ON: gl.constexpr, BRANCHES: gl.constexpr,
):  # fmt: skip
    """Take block n of keys, from row j on, into dQ."""
    q, k, v, do = operands
    left, right = window
    position, valid, others = tile
    ROWS: gl.constexpr = q[0].shape[1]
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    THREADS: gl.constexpr = threads_of(q[0].shape[0] * q[0].shape[1])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_K, 16])
    slot = n % STAGES
    s = dot_transposed(q, part, k, slot, S)
    dp = dot_transposed(do, part, v, slot, S)
    if RUNS_ON:
        dq = wait(dq, len(q) + len(v))
        if n > start:
            release(FIRST + (n + STAGES - 1) % STAGES, THREADS)
    cut = is_cut(j, position, valid, others, left, right, ROWS, BLOCK_K, LEFT, RIGHT)
    s = warpgroup_mma_wait(len(v), deps=(s,))
    p = gl.exp2(s * (scale * LOG2E) - lse_r[:, None])  # [ROWS, BLOCK_K]
    if cut:
        p = zero_hidden(p, j, position, valid, others, left, right, LEFT, RIGHT)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = p * (dp - delta_r[:, None])
    if not BRANCHES:
        ds = gl.where(p == 0.0, 0.0, ds)
    elif cut:
        ds = zero_hidden(ds, j, position, valid, others, left, right, LEFT, RIGHT)
    dq = dot(ds.to(k[0].dtype), k, slot, dq)
    if not RUNS_ON:
        dq = wait(dq, 0)
    return dq


@gluon.jit
def _queries_consumer(
    part: gl.constexpr, args,
    D_QK: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, BRANCHES: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    outputs, sources, lse, delta, tq, work, heads, window, scale, operands, terms, tile_bars, full, clean = args
    dq_out, dq_desc, dq_s = outputs
    lse_s, delta_s = terms
    all_heads, near, group = heads
    left, right = window
    q, k, v, do = operands
    q_full, q_empty = tile_bars
    PARTS: gl.constexpr = q[0].shape[0]
    ROWS: gl.constexpr = q[0].shape[1]
    BLOCK_K: gl.constexpr = k[0].shape[1]
    STAGES: gl.constexpr = k[0].shape[0]
    THREADS: gl.constexpr = threads_of(q[0].shape[0] * q[0].shape[1])
    RUNS_ON: gl.constexpr = PARTS == 1
    FP32: gl.constexpr = dq_out.dtype.element_ty == gl.float32
    MAKES_DELTA: gl.constexpr = len(sources) > 0
    ALONG: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_K, 16]))
    r = gl.arange(0, ROWS, ALONG)
    turn = 0
    n = 0
    loaded = 0
    cleared = 0
    index, head, row, rows, valid, other_row, others, position = take(work, turn)
    while index >= 0:
        turn += 1
        first, blocks = blocks_met(position, valid, others, left, right, BLOCK_K, LEFT, RIGHT)
        row += part * ROWS
        rows -= part * ROWS
        valid -= part * ROWS
        position += part * ROWS
        at = head.to(gl.int64) * tq + row
        if blocks > 0:
            if MAKES_DELTA:
                begun = begin_delta(sources, do, head, row, valid, ALONG)
            mbarrier.wait(q_full, loaded & 1)
            loaded += 1
            lse_r = lse_s.index(part).load(ALONG)
            if MAKES_DELTA:
                delta_r = finish_delta(begun, do, part, lse_r, valid, ALONG)
                gl.store(delta + at + r, delta_r, mask=r < rows)
            else:
                delta_r = delta_s[0].index(part).load(ALONG)
            dq = zeros(q)
            start = n
            running = as_running(dq) if RUNS_ON else dq
            for b in range(blocks):
                j = first + b * BLOCK_K
                mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                if j + BLOCK_K > others:
                    clear_shared(k, (), n % STAGES, others - j, part, PARTS, clean, cleared)
                    cleared += 1
                tile = (position, valid, others)
                if RUNS_ON:
                    running = _queries_block(
                        part, running, lse_r, delta_r, j, tile, window, scale, operands, n, start,
                        LEFT, RIGHT, RUNS_ON, BRANCHES,
                    )  # fmt: skip
                else:
                    if not is_hidden(j, position, valid, left, right, ROWS, BLOCK_K, LEFT, RIGHT):
                        running = _queries_block(
                            part, running, lse_r, delta_r, j, tile, window, scale, operands, n, start,
                            LEFT, RIGHT, RUNS_ON, BRANCHES,
                        )  # fmt: skip
                    release(FIRST + n % STAGES, THREADS)
                n += 1
            if RUNS_ON:
                dq = wait(running, 0)
                release(FIRST + (n + STAGES - 1) % STAGES, THREADS)
            else:
                dq = running
            if not FP32:
                tma.store_wait(0)  # what the tile before has staged has been read
            barrier()
            mbarrier.arrive(q_empty, count=1)
            if FP32:
                store_fp32(dq, dq_out + head * D_QK, row, rows, valid, all_heads * D_QK, scale, ADDS)
            else:
                stage(dq, dq_s, part, scale)
                fence_async_shared()
                barrier()
                store(dq_s, part, dq_desc, dq_out, head * D_QK, row, rows, valid, all_heads * D_QK)
        elif not ADDS:
            if MAKES_DELTA:
                gl.store(delta + at + r, unmet_delta(sources, lse + at, head, row, valid, ROWS, ALONG), mask=r < rows)
            clear_rows(dq_out + head * D_QK, row, rows, all_heads * D_QK, q)
        index, head, row, rows, valid, other_row, others, position = take(work, turn)
    tma.store_wait(0)


_STRIDES = ["q_head", "k_head", "v_head", "do_head", "out_row", "out_head", "grad_lse_head", "grad_lse_row"]


@gluon.jit(do_not_specialize=[*_STRIDES, "tq", "heads", "near", "group", "left", "right"])
def queries_kernel(
    q0, q1, k0, k1, v0, v1, do0, do1, dq0, dq1, q_head, k_head, v_head, do_head, lse, delta, dq, tq, tiles, counts,
    out, out_row, out_head, grad_lse, grad_lse_head, grad_lse_row, heads, near, group, left, right, scale,
    D_QK: gl.constexpr, D_V: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    BRANCHES: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """dQ of the query tiles of every query head. ADDS: onto what dq holds. out: delta is to be made, of it and of grad_lse."""
    gl.static_assert(FIRST + STAGES <= BEHIND)
    descs = (chunks_of(q0, q1), chunks_of(k0, k1), chunks_of(v0, v1), chunks_of(do0, do1))
    columns = (q_head, k_head, v_head, do_head)
    operands = (buffers(descs[0], PARTS), buffers(descs[1], STAGES), buffers(descs[2], STAGES), buffers(descs[3], PARTS))
    ROWS: gl.constexpr = operands[0][0].shape[1]
    sources = delta_sources(out, out_row, out_head, grad_lse, grad_lse_head, grad_lse_row)
    terms = (rows_of_fp32(PARTS, ROWS), () if len(sources) > 0 else (rows_of_fp32(PARTS, ROWS),))
    window = (left, right)
    work = (tiles, counts, integers(2), barriers(2, 1), barriers(2, PARTS))
    tile_bars = (barriers(1, 1).index(0), barriers(1, PARTS).index(0))
    full = barriers(STAGES, 1)
    clean = meeting(PARTS)
    fence_async_shared()
    barrier()
    load = (descs, columns, lse, delta, tq, work, (heads, near, group), window, operands, terms, tile_bars, full)
    outputs = (dq, chunks_of(dq0, dq1), operands[0] if dq.dtype.element_ty == gl.float32 else buffers(descs[0], PARTS))
    args = (outputs, sources, lse, delta, tq, work, (heads, near, group), window, scale, operands, terms, tile_bars, full, clean)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_queries_consumer, (gl.constexpr(0), args, D_QK, LEFT, RIGHT, BRANCHES, ADDS)),
                (_queries_producer, (load, D_QK, D_V, LEFT, RIGHT)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_queries_consumer, (gl.constexpr(0), args, D_QK, LEFT, RIGHT, BRANCHES, ADDS)),
                (_queries_consumer, (gl.constexpr(1), args, D_QK, LEFT, RIGHT, BRANCHES, ADDS)),
                (_queries_producer, (load, D_QK, D_V, LEFT, RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )
