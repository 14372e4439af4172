"""The forward of attention in plain Triton: runs on every GPU that Triton serves, and in its interpreter.

T rows, H heads, D head dims, BM query rows of a tile, BN keys of a block. A program takes one work item after the other, a tile of
queries (`kernels_tiles.py`) and a head, until none is left: empty sequences are no work, and sequences need no longest length.
It walks over the keys that the tile sees in blocks, with the running maximum, sum and weighted values of the online softmax;
blocks that every row sees whole take no mask. Rows of padding get their zeros, and an LSE of -inf, in the same store as the rest.

Where other keys were attended to before, the online softmax starts from what was found: fp32 weighted values in units of e^`unit`
of a row, and with `lse` the sum of weights. So sections of keys are merged by the way, `lse` and `unit` being updated in place.
Rows that are padding now need not have been: they get what was found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thdops.ops.attention_thd.kernels_blocks import (
    LN2,
    LOG2E,
    bounds,
    capped,
    chosen,
    inner,
    load_rows,
    negated,
    plus,
    scaled,
    seen,
    store_rows,
    weighted,
    zeros,
)
from thdops.ops.attention_thd.kernels_tiles import read_tile


@triton.jit(
    do_not_specialize=["q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "lse_head", "heads", "group", "before", "behind"]
)
def attention_forward_kernel(
    q,
    k,
    v,
    sink,
    found,  # fp32, as out; None
    unit,  # as lse; None where no other section follows or went before
    out,
    lse,
    max_logit,
    tiles,
    counts,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    lse_head,
    heads,
    group,
    before,
    behind,
    factor,  # log2(e) times the scale, above 0; the scale itself under a softcap
    softcap,
    NEGATIVE: tl.constexpr,  # the scale is: then the queries are negated
    DQK: tl.constexpr,
    DQK1: tl.constexpr,
    DQK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MAX_LOGIT: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    # Strides come in units: a factor that the compiler sees tells it how far apart rows are aligned.
    q_row = q_row * UNIT
    q_head = q_head * UNIT
    k_row = k_row * UNIT
    k_head = k_head * UNIT
    v_row = v_row * UNIT
    v_head = v_head * UNIT
    items = tl.load(counts) * heads
    item = tl.atomic_add(counts + 1, 1, sem="relaxed")
    rows = tl.arange(0, BM)
    while item < items:
        following = tl.atomic_add(counts + 1, 1, sem="relaxed")  # early: nobody waits for it
        row, owned, valid, other_row, others, position = read_tile(tiles, item // heads)
        head = item % heads
        kv_head = (head // group).to(tl.int64)
        q_here = q + row * q_row + head.to(tl.int64) * q_head
        k_here = k + other_row * k_row + kv_head * k_head
        v_here = v + other_row * v_row + kv_head * v_head

        if found is None:
            m, total = _initial(sink, head, SOFTMAX, BM)
            values = zeros(BM, DV1, DV2)
        else:
            of_rows = head.to(tl.int64) * lse_head + row + rows
            m = tl.load(unit + of_rows, mask=rows < valid, other=-float("inf")) * LOG2E
            total = tl.load(lse + of_rows, mask=rows < valid, other=-float("inf")) * LOG2E
            total = tl.where(m > -float("inf"), tl.exp2(total - m), 0.0)
            values = load_rows(found + (row * heads + head) * DV, heads.to(tl.int64) * DV, rows, rows < valid, DV, DV1, DV2, False)
        largest = tl.full([BM], -float("inf"), tl.float32)
        queries = load_rows(q_here, q_row, rows, rows < valid, DQK, DQK1, DQK2, False)
        if NEGATIVE:
            queries = negated(queries)
        edges = bounds(position, valid, others, before, behind, LEFT, RIGHT, BN)
        state = (m, total, values, largest)
        for section in tl.static_range(0 if LEFT else 1, 3):
            for first in range(edges[section], edges[section + 1], BN):
                if section == 1:
                    mask = None
                else:
                    mask = seen(position, first, BN, rows, before, behind, others, LEFT, RIGHT)
                here = tl.arange(0, BN)
                kept = first + here < others
                keys = load_rows(k_here + first * k_row.to(tl.int64), k_row, here, kept, DQK, DQK1, DQK2, section == 1)
                weights, state = _softmax(inner(queries, keys), mask, state, factor, softcap, SOFTCAP, MAX_LOGIT)
                block = load_rows(v_here + first * v_row.to(tl.int64), v_row, here, kept, DV, DV1, DV2, section == 1)
                state = (state[0], state[1], weighted(state[2], weights, block), state[3])
        m, total, values, largest = state

        some = (rows < valid) & (total > 0)
        result = chosen(some, scaled(values, 1 / tl.where(some, total, 1.0)))
        if found is not None:
            of_rows = head.to(tl.int64) * lse_head + row + rows
            passed = (rows >= valid) & (rows < owned)
            lses = tl.load(lse + of_rows, mask=passed, other=-float("inf"))
            units = tl.load(unit + of_rows, mask=passed, other=-float("inf"))
            share = tl.where(lses > -float("inf"), tl.exp2((units - lses) * LOG2E), 0.0)
            passing = load_rows(found + (row * heads + head) * DV, heads.to(tl.int64) * DV, rows, passed, DV, DV1, DV2, False)
            result = plus(result, scaled(passing, share))
        store_rows(out + (row * heads + head) * DV, heads.to(tl.int64) * DV, rows, rows < owned, result, DV, DV1)
        at = lse + head.to(tl.int64) * lse_head + row + rows
        logsumexp = tl.where(some, (m + tl.log2(total)) * LN2, -float("inf"))
        tl.store(at, logsumexp, mask=rows < (owned if found is None else valid))
        _store_unit(unit, head.to(tl.int64) * lse_head + row + rows, logsumexp, rows < owned)
        if MAX_LOGIT:
            top = tl.max(tl.where(rows < valid, largest, -float("inf")), 0)
            tl.atomic_max(max_logit + head, top * LN2, sem="relaxed")  # a maximum is the same in every order
        item = following


@triton.jit
def _store_unit(unit, at, logsumexp, kept):
    """Of a normalised out it is the LSE."""
    if unit is not None:
        tl.store(unit + at, logsumexp, mask=kept)


@triton.jit
def _initial(sink, head, SOFTMAX: tl.constexpr, BM: tl.constexpr):
    """Maximum and sum of rows that have seen nothing but their sink."""
    if SOFTMAX == "vanilla":
        return tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    elif SOFTMAX == "off_by_one":
        return tl.zeros([BM], tl.float32), tl.full([BM], 1.0, tl.float32)
    else:
        return tl.zeros([BM], tl.float32) + tl.load(sink + head) * LOG2E, tl.full([BM], 1.0, tl.float32)


@triton.jit
def _softmax(logits, mask, state, factor, softcap, SOFTCAP: tl.constexpr, MAX_LOGIT: tl.constexpr):
    """One step of the online softmax: the block's weights, and (m, total, values, largest) brought to the new maximum.

    `factor` is above 0, so the largest logit stays the largest when it is multiplied: behind the maximum, one product and
    difference an element is all that stands before exp2.
    """
    m, total, values, largest = state
    if SOFTCAP:
        logits, _ = capped(logits, factor, softcap)
        factor = 1.0
    if mask is not None:
        logits = tl.where(mask, logits, -float("inf"))
    top = tl.max(logits, 1) * factor
    if MAX_LOGIT:
        largest = tl.maximum(largest, top)
    new = tl.maximum(m, top)
    shift = new
    if mask is not None:
        shift = tl.where(new == -float("inf"), 0.0, new)  # rows that have seen nothing: -inf - -inf is NaN
    weights = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(m - shift)
    return weights, (new, total * decay + tl.sum(weights, 1), scaled(values, decay), largest)
