"""The backward of attention in plain Triton: runs on every GPU that Triton serves, and in its interpreter; repeats bitwise.

T rows, H heads, D head dims, G query heads of a key head, BM query rows, BN key rows of a block. With P = e^(S - LSE) and
delta = <dout, out> - dLSE of each query row (`delta_kernel`):
    dP = dout v^T      dS = P (dP - delta), times 1 - tanh^2 under a softcap
    dv = P^T dout      dk = scale dS^T q      dq = scale dS k
Two kernels, so that nothing is added in an order that chance decides: `attention_grad_keys_kernel` owns a tile of keys and walks
over the queries of its G heads, `attention_grad_queries_kernel` owns a tile of queries and walks over keys; each computes P again.
A query row without keys and a padding row have an LSE of -inf; it is read as +inf, and P is 0 there. Padding rows of other
operands are read as 0. Rows of padding get their zeros in the same store as the rest.
ADDS: gradients are added to what stands in their fp32 tensors, by the one program that owns the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thdops.ops.attention_thd.kernels_blocks import (
    LOG2E,
    bounds,
    capped,
    chosen,
    inner,
    load_rows,
    plus,
    scaled,
    seen,
    store_rows,
    weighted,
    zeros,
)
from thdops.ops.attention_thd.kernels_tiles import read_tile

# --- what both kernels need of a query row -------------------------------------------------------------------------------------


_DELTA_STRIDES = ["out_row", "out_head", "grad_row", "grad_head", "grad_lse_head", "grad_lse_row"]


@triton.jit(do_not_specialize=[*_DELTA_STRIDES, "total", "heads", "left", "right"])
def delta_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta,
    sums,  # fp32 [T, H, ZEROED], valid rows of which are to be zeroed, but for `begun` tiles of BEGUN rows, if that is not 0; None
    tiles,  # of queries
    counts,
    out_row,
    out_head,
    grad_row,
    grad_head,
    grad_lse_head,
    grad_lse_row,
    total,
    heads,
    left,
    right,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ZEROED: tl.constexpr,
    BEGUN: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """fp32 delta [H, T] = <dout, out> - dLSE; 0 on padding rows and where no key is seen, whatever stands there. Zeroes `sums`."""
    out_row = out_row * UNIT  # as in the forward
    out_head = out_head * UNIT
    grad_row = grad_row * UNIT
    grad_head = grad_head * UNIT
    columns = tl.arange(0, WIDTH)
    for item in range(tl.program_id(0), tl.load(counts) * heads, tl.num_programs(0)):
        first, owned, valid, _, others, position = read_tile(tiles, item // heads)
        head = (item % heads).to(tl.int64)
        zeroed = valid
        if BEGUN:  # what `add_in_order` stores: whole blocks that a key meets, but for a sequence's first
            met = (others > 0) & ((right < 0) | (position + valid + right > 0)) & ((left < 0) | (position - left < others))
            begun = (tl.load(tiles + (item // heads).to(tl.int64) * 8 + 6) > 0) & (valid == BEGUN) & met
            zeroed = tl.where(begun, 0, valid)
        for start in range(0, valid, ROWS):
            row = start + tl.arange(0, ROWS)
            at = head * total + first + row
            alive = (row < valid) & (tl.load(lse + at, mask=row < valid, other=0.0) > -float("inf"))
            mask = alive[:, None] & (columns < D)[None, :]
            rows = (first + row)[:, None]
            values = tl.load(out + head * out_head + rows * out_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            grads = tl.load(grad_out + head * grad_head + rows * grad_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            products = tl.sum(values * grads, 1)
            if grad_lse is not None:
                products -= tl.load(grad_lse + head * grad_lse_head + (first + row) * grad_lse_row, mask=alive, other=0.0)
            tl.store(delta + at, products, mask=row < owned)
            if sums is not None:
                here = sums + (rows * heads + head) * ZEROED + tl.arange(0, ZEROED)[None, :]
                tl.store(here, tl.zeros([ROWS, ZEROED], tl.float32), mask=(row < zeroed)[:, None])
        for start in range((valid + ROWS - 1) // ROWS * ROWS, owned, 4 * ROWS):
            row = start + tl.arange(0, 4 * ROWS)
            tl.store(delta + head * total + first + row, tl.zeros([4 * ROWS], tl.float32), mask=row < owned)


@triton.jit(do_not_specialize=["total"])
def sink_grad_kernel(sink, lse, delta, grad_sink, total, ROWS: tl.constexpr):
    """dsink of a head: -sum over its rows of e^(sink - LSE) delta. One program adds them all, in order."""
    head = tl.program_id(0).to(tl.int64)
    logit = tl.load(sink + head)
    sums = tl.zeros([ROWS], tl.float32)
    for first in range(0, total, ROWS):
        rows = first + tl.arange(0, ROWS).to(tl.int64)
        deltas = tl.load(delta + head * total + rows, mask=rows < total, other=0.0)
        lses = tl.load(lse + head * total + rows, mask=rows < total, other=0.0)
        # Selected: padding rows have a delta of 0 and anything for an LSE.
        sums += tl.where(deltas == 0, 0.0, tl.exp2((logit - lses) * LOG2E) * deltas)
    tl.store(grad_sink + head, -tl.sum(sums, 0))


@triton.jit
def _statistics(lse, delta, rows, kept):
    """(LSE in powers of two, +inf where no key is seen; delta) of [R] rows; those that are not `kept` see nothing."""
    lses = tl.load(lse + rows, mask=kept, other=-float("inf"))
    lses = tl.where(lses == -float("inf"), float("inf"), lses * LOG2E)
    return lses, tl.load(delta + rows, mask=kept, other=0.0)


@triton.jit
def _in_powers_of_two(logits, factor, softcap, SOFTCAP: tl.constexpr):
    """(S times log2(e), dS of a logit over scale): the second is 1 - tanh^2 under a softcap and not used without."""
    if SOFTCAP:
        capped_logits, tanh = capped(logits, factor, softcap)
        return capped_logits, 1 - tanh * tanh
    else:
        return logits * factor, logits


# --- dk and dv -----------------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "q_row",
        "q_head",
        "k_row",
        "k_head",
        "v_row",
        "v_head",
        "grad_row",
        "grad_head",
        "total_q",
        "heads_kv",
        "group",
        "before",
        "behind",
    ]
)
def attention_grad_keys_kernel(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    grad_k,
    grad_v,
    tiles,  # of keys
    counts,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    total_q,
    heads_kv,
    group,
    before,  # bounds as a key has them: queries to its left and right that see it
    behind,
    scale,
    factor,
    softcap,
    DQK: tl.constexpr,
    DQK1: tl.constexpr,
    DQK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ADDS: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    # In units, as in the forward.
    q_row = q_row * UNIT
    q_head = q_head * UNIT
    k_row = k_row * UNIT
    k_head = k_head * UNIT
    v_row = v_row * UNIT
    v_head = v_head * UNIT
    grad_row = grad_row * UNIT
    grad_head = grad_head * UNIT
    items = tl.load(counts) * heads_kv
    item = tl.atomic_add(counts + 1, 1, sem="relaxed")
    rows = tl.arange(0, BN)
    while item < items:
        following = tl.atomic_add(counts + 1, 1, sem="relaxed")
        row, owned, valid, other_row, others, position = read_tile(tiles, item // heads_kv)
        kv_head = (item % heads_kv).to(tl.int64)
        keys = load_rows(k + row * k_row + kv_head * k_head, k_row, rows, rows < valid, DQK, DQK1, DQK2, False)
        block = load_rows(v + row * v_row + kv_head * v_head, v_row, rows, rows < valid, DV, DV1, DV2, False)
        edges = bounds(position, valid, others, before, behind, LEFT, RIGHT, BM)
        grads = (zeros(BN, DQK1, DQK2), zeros(BN, DV1, DV2))
        for head in range(kv_head * group, kv_head * group + group):
            q_here = q + other_row * q_row + head * q_head
            grad_here = grad_out + other_row * grad_row + head * grad_head
            lse_here = lse + head * total_q + other_row
            delta_here = delta + head * total_q + other_row
            for section in tl.static_range(0 if LEFT else 1, 3):
                for first in range(edges[section], edges[section + 1], BM):
                    if section == 1:
                        mask = None
                    else:
                        mask = tl.trans(seen(position, first, BM, rows, before, behind, others, LEFT, RIGHT))
                    grads = _add_queries(
                        grads, keys, block, mask, q_here, q_row, grad_here, grad_row, lse_here, delta_here, first, others,
                        factor, softcap, SOFTCAP, DQK, DQK1, DQK2, DV, DV1, DV2, BM,
                    )  # fmt: skip
        at = row * heads_kv + kv_head
        kept = rows < owned
        key_grads = chosen(rows < valid, scaled(grads[0], tl.zeros([BN], tl.float32) + scale))
        value_grads = chosen(rows < valid, grads[1])
        k_step, v_step = heads_kv.to(tl.int64) * DQK, heads_kv.to(tl.int64) * DV
        if ADDS:
            key_grads = plus(key_grads, load_rows(grad_k + at * DQK, k_step, rows, kept, DQK, DQK1, DQK2, False))
            value_grads = plus(value_grads, load_rows(grad_v + at * DV, v_step, rows, kept, DV, DV1, DV2, False))
        store_rows(grad_k + at * DQK, k_step, rows, kept, key_grads, DQK, DQK1)
        store_rows(grad_v + at * DV, v_step, rows, kept, value_grads, DV, DV1)
        item = following


@triton.jit
def _add_queries(
    grads, keys, block, mask, q, q_row, grad_out, grad_row, lse, delta, first, others,
    factor, softcap, SOFTCAP: tl.constexpr, DQK: tl.constexpr, DQK1: tl.constexpr, DQK2: tl.constexpr,
    DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with the share of BM queries from `first` on added; `mask` [BM, BN], None where all of them see all keys.

    Scores have queries for rows: a thread then needs the LSE and delta of few queries. The other way round every thread would
    load those of all, and their addresses alone would fill its registers.
    """
    queries = tl.arange(0, BM)
    kept = first + queries < others
    WHOLE: tl.constexpr = mask is None
    q_block = load_rows(q + first * q_row.to(tl.int64), q_row, queries, kept, DQK, DQK1, DQK2, WHOLE)
    lses, deltas = _statistics(lse + first, delta + first, queries, kept)
    logits, slope = _in_powers_of_two(inner(q_block, keys), factor, softcap, SOFTCAP)
    weights = tl.exp2(logits - lses[:, None])
    if mask is not None:
        weights = tl.where(mask, weights, 0.0)
    grad_block = load_rows(grad_out + first * grad_row.to(tl.int64), grad_row, queries, kept, DV, DV1, DV2, WHOLE)
    dv = weighted(grads[1], tl.trans(weights.to(grad_block[0].dtype)), grad_block)
    slopes = weights * (inner(grad_block, block) - deltas[:, None])
    if SOFTCAP:
        slopes = slopes * slope
    return weighted(grads[0], tl.trans(slopes.to(q_block[0].dtype)), q_block), dv


# --- dq ------------------------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "q_row",
        "q_head",
        "k_row",
        "k_head",
        "v_row",
        "v_head",
        "grad_row",
        "grad_head",
        "total_q",
        "heads",
        "group",
        "before",
        "behind",
    ]
)
def attention_grad_queries_kernel(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    grad_q,
    tiles,  # of queries
    counts,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    total_q,
    heads,
    group,
    before,
    behind,
    scale,
    factor,
    softcap,
    DQK: tl.constexpr,
    DQK1: tl.constexpr,
    DQK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ADDS: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    # In units, as in the forward.
    q_row = q_row * UNIT
    q_head = q_head * UNIT
    k_row = k_row * UNIT
    k_head = k_head * UNIT
    v_row = v_row * UNIT
    v_head = v_head * UNIT
    grad_row = grad_row * UNIT
    grad_head = grad_head * UNIT
    items = tl.load(counts) * heads
    item = tl.atomic_add(counts + 1, 1, sem="relaxed")
    rows = tl.arange(0, BM)
    while item < items:
        following = tl.atomic_add(counts + 1, 1, sem="relaxed")
        row, owned, valid, other_row, others, position = read_tile(tiles, item // heads)
        head = (item % heads).to(tl.int64)
        k_here = k + other_row * k_row + head // group * k_head
        v_here = v + other_row * v_row + head // group * v_head
        queries = load_rows(q + row * q_row + head * q_head, q_row, rows, rows < valid, DQK, DQK1, DQK2, False)
        grad_rows = load_rows(grad_out + row * grad_row + head * grad_head, grad_row, rows, rows < valid, DV, DV1, DV2, False)
        lses, deltas = _statistics(lse + head * total_q + row, delta + head * total_q + row, rows, rows < valid)
        edges = bounds(position, valid, others, before, behind, LEFT, RIGHT, BN)
        sums = zeros(BM, DQK1, DQK2)
        for section in tl.static_range(0 if LEFT else 1, 3):
            for first in range(edges[section], edges[section + 1], BN):
                if section == 1:
                    mask = None
                else:
                    mask = seen(position, first, BN, rows, before, behind, others, LEFT, RIGHT)
                sums = _add_keys(
                    sums, queries, grad_rows, lses, deltas, mask, k_here, k_row, v_here, v_row, first, others,
                    factor, softcap, SOFTCAP, DQK, DQK1, DQK2, DV, DV1, DV2, BN,
                )  # fmt: skip
        result = chosen(rows < valid, scaled(sums, tl.zeros([BM], tl.float32) + scale))
        at, step = (row * heads + head) * DQK, heads.to(tl.int64) * DQK
        if ADDS:
            result = plus(result, load_rows(grad_q + at, step, rows, rows < owned, DQK, DQK1, DQK2, False))
        store_rows(grad_q + at, step, rows, rows < owned, result, DQK, DQK1)
        item = following


@triton.jit
def _add_keys(
    sums, queries, grad_rows, lses, deltas, mask, k, k_row, v, v_row, first, others,
    factor, softcap, SOFTCAP: tl.constexpr, DQK: tl.constexpr, DQK1: tl.constexpr, DQK2: tl.constexpr,
    DV: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq / scale with the share of BN keys from `first` on added; `mask` [BM, BN], None where all rows see all of them."""
    keys = tl.arange(0, BN)
    kept = first + keys < others
    WHOLE: tl.constexpr = mask is None
    k_block = load_rows(k + first * k_row.to(tl.int64), k_row, keys, kept, DQK, DQK1, DQK2, WHOLE)
    logits, slope = _in_powers_of_two(inner(queries, k_block), factor, softcap, SOFTCAP)
    weights = tl.exp2(logits - lses[:, None])
    if mask is not None:
        weights = tl.where(mask, weights, 0.0)
    v_block = load_rows(v + first * v_row.to(tl.int64), v_row, keys, kept, DV, DV1, DV2, WHOLE)
    slopes = weights * (inner(grad_rows, v_block) - deltas[:, None])
    if SOFTCAP:
        slopes = slopes * slope
    return weighted(sums, slopes, k_block)


# --- sums to gradients ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "shares"])
def convert_kernel(sums, grad, tiles, counts, chunks, shares, scale, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """grad = scale sums on valid rows, of grad's dtype, and 0 on padding rows, whatever stands there.

    A row is `chunks` times CHUNK elements: a mask whose end is known to be a multiple of CHUNK leaves loads and stores wide. The
    elements of a tile are split into `shares`.
    """
    items = tl.load(counts) * shares
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, owned, valid, _, _, _ = read_tile(tiles, item // shares)
        first = row * chunks * CHUNK
        end, end_valid = owned * chunks * CHUNK, valid * chunks * CHUNK
        for start in range(item % shares * BLOCK, end, shares * BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(sums + first + at, mask=at < end_valid, other=0.0)
            tl.store(grad + first + at, values * scale, mask=at < end)
