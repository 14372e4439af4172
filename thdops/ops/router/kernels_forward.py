"""The forward kernels of the router ops.

T rows, E experts, K chosen, B sequences of the metadata, S sequences of sums (B, or 1 where sums are over all rows). `route_rows`
serves `router_topk` (ROUTE), `router_scores` (SCORES) and `router` (ROUTE and SUMS): a program has BLOCK_T rows at a time in
registers and derives all from their logits. A row that is not routed is not read.

Sums over rows are kept in registers and stored once a program, for `finish` to add in a fixed order: no floating-point atomics.
With sequences, a program's rows are consecutive, and it stores its sums whenever a sequence ends. Program p and sequence b meet in
at most P + B pairs along a staircase (both only grow), so the sums of a pair have row p + b of the partial sums to themselves.
"""

# Tuples grow, and branches on constants vanish, while a kernel is traced, which Python's types cannot express.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from thdops.ops.padding.kernels import locate_rows
from thdops.ops.router.kernels_select import (
    activation,
    activation_terms,
    choose,
    columns,
    divide,
    exp,
    load_rows,
    logsumexp_of,
    settle,
    softmax_terms,
    term_of,
)

# --- what is written for a row ----------------------------------------------------------------------------------------------------


@triton.jit
def fill_zeros(out, first_row, rows, ROW: tl.constexpr, BLOCK_T: tl.constexpr, FILL: tl.constexpr):
    """Zeros to BLOCK_T whole rows of ROW elements, as one flat range."""
    at = out + first_row * ROW
    left = (rows - first_row) * ROW
    for start in tl.static_range(0, BLOCK_T * ROW, FILL):
        offset = start + tl.arange(0, FILL)
        inside = offset < left
        if start + FILL > BLOCK_T * ROW:
            inside = inside & (offset < BLOCK_T * ROW)
        tl.store(at + offset, tl.zeros([FILL], out.dtype.element_ty), mask=inside)


@triton.jit
def exp_below(x):
    """e^x of x <= 0, -inf included; NaN stays NaN."""
    return tl.where(x < -87.0, 0.0, exp(tl.where(x < -87.0, 0.0, x)))


@triton.jit
def softmax_of_chosen(x, chosen):
    """Softmax over the chosen logits of each row, [BLOCK_T, KEYS]; 0 in other slots."""
    best = tl.max(tl.where(chosen, x, float("-inf")), axis=1)[:, None]
    value = tl.where(chosen, exp_below(x - best), 0.0)
    return divide(value, tl.broadcast_to(tl.sum(value, axis=1)[:, None], value.shape))


@triton.jit
def store_bitmap(out, row, inside, expert, chosen, E: tl.constexpr, BYTES: tl.constexpr):
    """Bit e % 8 of byte e // 8 of each row; `expert`, `chosen` are [BLOCK_T, KEYS], BYTES a power of two."""
    STRIDE: tl.constexpr = (E + 7) // 8
    byte = tl.arange(0, BYTES)
    bit = tl.where(chosen, 1 << (expert % 8), 0)
    bits = tl.sum(tl.where((expert // 8)[:, None, :] == byte[None, :, None], bit[:, None, :], 0), axis=2)
    tl.store(out + row[:, None] * STRIDE + byte[None, :], bits.to(tl.uint8), mask=inside[:, None] & (byte < STRIDE)[None, :])


@triton.jit
def store_sums(sums, counts, row_counts, at, scores, chosen, rows, E: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr):
    """One row of the partial sums: of `scores` and `chosen` over the rows that each lane saw, and the number of rows."""
    for chunk in tl.static_range(CHUNKS):
        expert, exists = columns(chunk * LANES, LANES, E, 0, 1)
        tl.store(sums + at * E + expert, tl.sum(scores[chunk], axis=0), mask=exists)
        tl.store(counts + at * E + expert, tl.sum(chosen[chunk], axis=0), mask=exists)
    tl.store(row_counts + at, tl.sum(rows, axis=0))


@triton.jit
def zeros_of(BLOCK_T: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, DTYPE: tl.constexpr):
    """A tuple of CHUNKS [BLOCK_T, LANES] of zeros."""
    zeros = ()
    for _ in tl.static_range(CHUNKS):
        zeros = zeros + (tl.zeros([BLOCK_T, LANES], DTYPE),)
    return zeros


@triton.jit
def add_scaled(total, new, scale, wanted, UNCLEAN: tl.constexpr, CHUNKS: tl.constexpr):
    """`total` + `new` * `scale` of the wanted rows, tuples of [BLOCK_T, LANES] and a factor a row.

    UNCLEAN: other rows may hold NaN, which a factor of 0 does not remove.
    """
    scale = tl.where(wanted, scale, 0.0)[:, None]
    added = ()
    for chunk in tl.static_range(CHUNKS):
        scaled = new[chunk] * scale
        if UNCLEAN:
            scaled = tl.where(wanted[:, None], scaled, 0.0)
        added = added + (total[chunk] + scaled,)
    return added


@triton.jit
def add_rows(total, new, wanted, CHUNKS: tl.constexpr):
    """`total` + `new` of the wanted rows, tuples of [BLOCK_T, LANES]."""
    added = ()
    for chunk in tl.static_range(CHUNKS):
        added = added + (total[chunk] + tl.where(wanted[:, None], new[chunk], tl.zeros_like(new[chunk])),)
    return added


# --- rows -------------------------------------------------------------------------------------------------------------------------


@triton.jit
def counted_rows(
    padding_mask, cu_seqlens, padded, row, rows, mask_stride, sequences, BLOCK_T: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """(inside, counted, sequence) of rows: which exist, which of these are no padding, and their sequences, 0 without sequences."""
    inside = row < rows
    counted = inside
    sequence = tl.zeros([BLOCK_T], tl.int64)
    if padding_mask is not None:
        counted = counted & (tl.load(padding_mask + row * mask_stride, mask=inside, other=1) == 0)
    if cu_seqlens is not None:
        valid, sequence, offset, length = locate_rows(cu_seqlens, padded, sequences, row, BLOCK_T, WAYS)
        counted = counted & valid
    return inside, counted, sequence


@triton.jit
def load_tile(
    logits, padding_mask, cu_seqlens, padded, first_row, rows, row_stride, column_stride, mask_stride, sequences,
    E: tl.constexpr, KEEP: tl.constexpr, CONTIGUOUS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """(row, inside, counted, sequence, live, row_at, xs) of BLOCK_T rows: which exist, which are no padding, their sequences, which
    are routed, where their logits stand, and the logits.
    """
    row = first_row + tl.arange(0, BLOCK_T)
    inside, counted, sequence = counted_rows(padding_mask, cu_seqlens, padded, row, rows, mask_stride, sequences, BLOCK_T, WAYS)
    live = inside if KEEP else counted
    row_at = logits + row * (E if CONTIGUOUS else row_stride)
    xs = load_rows(row_at, live, 1 if CONTIGUOUS else column_stride, E, 0, 1, LANES, CHUNKS, LANES * CHUNKS == E)
    return row, inside, counted, sequence, live, row_at, xs


@triton.jit(do_not_specialize=["rows", "tiles", "row_stride", "column_stride", "mask_stride", "sequences", "pad_index"])
def route_rows(
    logits, bias, padding_mask, cu_seqlens, padded, probs, routing, chosen, scores, sums, counts, row_counts, tokens, z_sums,
    ticket, rows, tiles, row_stride, column_stride, mask_stride, sequences, pad_index, gamma,
    E: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, ROUTE: tl.constexpr, SCORES: tl.constexpr, SUMS: tl.constexpr,
    SCORE: tl.constexpr, AUX: tl.constexpr, PRE: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, WIDTH: tl.constexpr, PROBS: tl.constexpr, ROUTING: tl.constexpr, KEEP: tl.constexpr,
    CONTIGUOUS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, DEPTH: tl.constexpr, GROUP_LANES: tl.constexpr,
    BLOCK_T: tl.constexpr, FILL: tl.constexpr, BYTES: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """`tiles` times BLOCK_T rows from program * tiles * BLOCK_T on.

    ROUTE: probabilities, routing and chosen experts by SCORE, with bias and groups. SCORES: the scores over all experts by AUX, and
    the routing by them. SUMS: the sums of these scores, how often they choose each expert, and what else the losses need.
    """
    EVEN: tl.constexpr = LANES * CHUNKS == E
    SAME: tl.constexpr = ROUTE and bias is None and GROUPS == 0 and SCORE == AUX  # the scores choose as the routing does
    SEQUENCES: tl.constexpr = cu_seqlens is not None
    TOKEN_LANES: tl.constexpr = GROUP_LANES if GROUPS > 0 else LANES
    TOKEN_CHUNKS: tl.constexpr = 1 if GROUPS > 0 else CHUNKS
    program = tl.program_id(0).to(tl.int64)
    column_stride = column_stride.to(tl.int64)
    slot = tl.arange(0, KEYS)[None, :]
    if SUMS:
        sum_scores = zeros_of(BLOCK_T, LANES, CHUNKS, tl.float32)
        sum_chosen = zeros_of(BLOCK_T, LANES, CHUNKS, tl.int32)
        sum_tokens = zeros_of(BLOCK_T, TOKEN_LANES, TOKEN_CHUNKS, tl.int32)
        sum_rows = tl.zeros([BLOCK_T], tl.int32)
        sum_z = tl.zeros([BLOCK_T], tl.float32)
        current = tl.zeros([], tl.int64)
        if SEQUENCES:
            first = tl.full([BLOCK_T], 0, tl.int64) + program * tiles * BLOCK_T
            current = tl.max(locate_rows(cu_seqlens, padded, sequences, first, BLOCK_T, WAYS)[1], axis=0)
        if program == 0:
            tl.store(ticket, 0)
    rows_now = load_tile(
        logits, padding_mask, cu_seqlens, padded, program * tiles * BLOCK_T, rows, row_stride, column_stride, mask_stride,
        sequences, E, KEEP, CONTIGUOUS, LANES, CHUNKS, BLOCK_T, WAYS,
    )  # fmt: skip
    for tile in range(tiles):
        first_row = (program * tiles + tile) * BLOCK_T
        row, inside, counted, sequence, live, row_at, xs = rows_now
        if tile + 1 < tiles:  # in flight while this tile is worked on
            end = rows
        else:
            end = tl.zeros_like(rows)
        rows_now = load_tile(
            logits, padding_mask, cu_seqlens, padded, first_row + BLOCK_T, end, row_stride, column_stride, mask_stride, sequences,
            E, KEEP, CONTIGUOUS, LANES, CHUNKS, BLOCK_T, WAYS,
        )  # fmt: skip
        stride = 1 if CONTIGUOUS else column_stride
        if ROUTE and PROBS == "dense":
            fill_zeros(probs, first_row, rows, E, BLOCK_T, FILL)
        if ROUTING == "mask":
            fill_zeros(routing, first_row, rows, E, BLOCK_T, FILL)

        # All that is long and certain comes before the first branch, so that its chains of maxima run beside one another.
        if ROUTE:
            if GROUPS > 0:
                grouped = load_rows(row_at, live, stride, E, GROUPS, WIDTH, GROUP_LANES, 1, False)
                choice = choose(grouped, bias, E, K, KEYS, SCORE, GROUPS, CHOSEN_GROUPS, WIDTH, GROUP_LANES, 1, 1, False)
            else:
                choice = choose(xs, bias, E, K, KEYS, SCORE, 0, 0, 1, LANES, CHUNKS, DEPTH, EVEN)
        if (SCORES or SUMS) and not SAME:
            aux_choice = choose(xs, None, E, K, KEYS, AUX, 0, 0, 1, LANES, CHUNKS, DEPTH, EVEN)
        if PRE or (AUX == "softmax" and (SCORES or SUMS)) or SUMS:
            terms, rate, shift, total = softmax_terms(xs, E, LANES, CHUNKS, EVEN)
        if SCORES or SUMS:
            if AUX == "softmax":
                all_terms = terms
                share = 1.0 / total
            else:
                all_terms, whole = activation_terms(xs, E, AUX, LANES, CHUNKS, EVEN)
                share = 1.0 / whole
        if SUMS:
            lse = logsumexp_of(rate, shift, total)
            sum_z += tl.where(counted, lse * lse, 0.0)
            if not SEQUENCES:
                sum_scores = add_scaled(sum_scores, all_terms, share, counted, KEEP, CHUNKS)
                sum_rows += counted

        if ROUTE:
            if GROUPS > 0:
                expert, x, taken = settle(
                    choice, row_at, live, stride, bias, E, K, KEYS, SCORE, GROUPS, CHOSEN_GROUPS, WIDTH, GROUP_LANES, 1, False, True
                )
            else:
                expert, x, taken = settle(choice, row_at, live, stride, bias, E, K, KEYS, SCORE, 0, 0, 1, LANES, CHUNKS, EVEN, True)
            routed = (slot < K) & live[:, None]
            if SCORE == "softmax":
                if PRE:
                    value = term_of(x, rate, shift) / total[:, None]
                else:
                    value = softmax_of_chosen(x, slot < K)
            else:
                value = activation(x, SCORE)
                if K > 1 and NORMALIZE:
                    whole = tl.sum(tl.where(slot < K, value, 0.0), axis=1) + 1e-20
                    value = divide(value, tl.broadcast_to(whole[:, None], value.shape))
            value = (gamma * value).to(probs.dtype.element_ty)
            writable = (slot < K) & inside[:, None]
            tl.store(chosen + row[:, None] * K + slot, tl.where(routed, expert, -1), mask=writable)
            if PROBS == "topk":
                tl.store(probs + row[:, None] * K + slot, tl.where(routed, value, 0.0), mask=writable)
            if ROUTING == "indices":
                index = tl.where(routed, expert, pad_index).to(routing.dtype.element_ty)
                tl.store(routing + row[:, None] * K + slot, index, mask=writable)
            if SUMS:
                sum_tokens = add_rows(sum_tokens, taken, counted, TOKEN_CHUNKS)

        if SCORES or SUMS:
            if not SAME:
                aux_expert, aux_x, aux_taken = settle(
                    aux_choice, row_at, live, stride, None, E, K, KEYS, AUX, 0, 0, 1, LANES, CHUNKS, EVEN, False
                )
            else:
                aux_expert = expert
                aux_taken = taken
        if SCORES:
            expert = aux_expert
            routed = (slot < K) & live[:, None]
            for chunk in tl.static_range(CHUNKS):
                column, exists = columns(chunk * LANES, LANES, E, 0, 1)
                at = scores + row[:, None] * E + column[None, :]
                tl.store(
                    at, tl.where(live[:, None], all_terms[chunk] * share[:, None], 0.0), mask=inside[:, None] & exists[None, :]
                )

        if ROUTING == "bitmap":
            store_bitmap(routing, row, inside, expert, routed, E, BYTES)
        tl.debug_barrier()  # the zeros of other threads stand before what follows
        if ROUTE and PROBS == "dense":
            tl.store(probs + row[:, None] * E + expert, value, mask=routed)
        if ROUTING == "mask":
            tl.store(routing + row[:, None] * E + expert, tl.full([BLOCK_T, KEYS], 1, routing.dtype.element_ty), mask=routed)

        if SUMS:
            if SEQUENCES:
                # Sequences that end in this tile; those without a row in it are stepped over.
                last = tl.max(tl.where(inside, sequence, current), axis=0)
                while current < last:
                    here = counted & (sequence == current)
                    sum_scores = add_scaled(sum_scores, all_terms, share, here, True, CHUNKS)
                    sum_chosen = add_rows(sum_chosen, aux_taken, here, CHUNKS)
                    at = program + current
                    store_sums(sums, counts, row_counts, at, sum_scores, sum_chosen, sum_rows + here, E, LANES, CHUNKS)
                    sum_scores = zeros_of(BLOCK_T, LANES, CHUNKS, tl.float32)
                    sum_chosen = zeros_of(BLOCK_T, LANES, CHUNKS, tl.int32)
                    sum_rows = tl.zeros([BLOCK_T], tl.int32)
                    current = tl.min(tl.where(inside & (sequence > current), sequence, last), axis=0)
                here = counted & (sequence == current)
                sum_scores = add_scaled(sum_scores, all_terms, share, here, True, CHUNKS)
                sum_rows += here
            else:
                here = counted
            sum_chosen = add_rows(sum_chosen, aux_taken, here, CHUNKS)
    if SUMS:
        store_sums(sums, counts, row_counts, program + current, sum_scores, sum_chosen, sum_rows, E, LANES, CHUNKS)
        for chunk in tl.static_range(TOKEN_CHUNKS):
            expert, exists = columns(chunk * TOKEN_LANES, TOKEN_LANES, E, GROUPS, WIDTH)
            tl.store(tokens + program * E + expert, tl.sum(sum_tokens[chunk], axis=0), mask=exists)
        tl.store(z_sums + program, tl.sum(sum_z, axis=0))


# --- sums and losses --------------------------------------------------------------------------------------------------------------


@triton.jit
def load_partials(partials, at, there, expert, exists, E: tl.constexpr):
    """Rows `at` [BLOCK_P] of `partials` [., E] in some columns; 0 where there is none."""
    return tl.load(partials + at[:, None] * E + expert[None, :], mask=there[:, None] & exists[None, :], other=0)


@triton.jit(do_not_specialize=["programs", "into"])
def fold(
    sums, counts, row_counts, tokens, z_sums, programs, into, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Program (f, block of columns): the partial sums of every program that is f modulo the number of f, as row `into` + f."""
    share = tl.program_id(0)
    shares = tl.num_programs(0)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = expert < E
    score = tl.zeros([BLOCK_P, BLOCK_E], tl.float32)
    chosen = tl.zeros([BLOCK_P, BLOCK_E], tl.int32)
    routed = tl.zeros([BLOCK_P, BLOCK_E], tl.int32)
    valid = tl.zeros([BLOCK_P], tl.int32)
    squares = tl.zeros([BLOCK_P], tl.float32)
    for begin in range(share, programs, shares * BLOCK_P):
        row = begin + tl.arange(0, BLOCK_P).to(tl.int64) * shares
        there = row < programs
        score += load_partials(sums, row, there, expert, exists, E)
        chosen += load_partials(counts, row, there, expert, exists, E)
        routed += load_partials(tokens, row, there, expert, exists, E)
        valid += tl.load(row_counts + row, mask=there, other=0)
        squares += tl.load(z_sums + row, mask=there, other=0.0)
    at = (into + share).to(tl.int64)
    tl.store(sums + at * E + expert, tl.sum(score, axis=0), mask=exists)
    tl.store(counts + at * E + expert, tl.sum(chosen, axis=0), mask=exists)
    tl.store(tokens + at * E + expert, tl.sum(routed, axis=0), mask=exists)
    tl.store(row_counts + at, tl.sum(valid, axis=0))
    tl.store(z_sums + at, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["start_row", "programs", "program_rows", "rows", "sequences", "total_num_tokens"])
def finish(
    sums, counts, row_counts, tokens, z_sums, padded, total_num_tokens_tensor, aux_coeff_tensor, z_coeff_tensor,
    score_sums, all_counts, tokens_per_expert, num_tokens, aux_loss, z_loss, z_sum, coefficients, balances, ticket,
    start_row, programs, program_rows, rows, sequences, total_num_tokens, aux_coeff, z_coeff,
    E: tl.constexpr, K: tl.constexpr, TOTAL: tl.constexpr, MEAN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (s, block of columns): the sums of sequence s from its partial ones; the last program to come makes the losses.

    Without sequences the partial sums are the `programs` rows from `start_row` on.
    TOTAL: the aux loss divides by "tensor" or "int" total_num_tokens, or by the "own" number of valid rows.
    """
    sequence = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(1)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = expert < E
    if padded is not None:
        # There may be no sequence at all, and one program all the same: for the tokens of each expert.
        start = tl.load(padded + tl.minimum(sequence, sequences)).to(tl.int64)
        end = tl.load(padded + tl.minimum(sequence + 1, sequences)).to(tl.int64)
        start = tl.maximum(tl.minimum(start, rows), 0)
        end = tl.maximum(tl.minimum(end, rows), start)
        first = start // program_rows
        count = tl.where(end > start, (end - 1) // program_rows - first + 1, 0)
        first += sequence
    else:
        first = start_row.to(tl.int64)
        count = programs.to(tl.int64)
    score = tl.zeros([BLOCK_P, BLOCK_E], tl.float32)
    chosen = tl.zeros([BLOCK_P, BLOCK_E], tl.int32)
    routed = tl.zeros([BLOCK_P, BLOCK_E], tl.int32)
    valid = tl.zeros([BLOCK_P], tl.int32)
    # All partial sums of a row are loaded together: what counts here is how often a load is waited for.
    for begin in range(0, count, BLOCK_P):
        lane = begin + tl.arange(0, BLOCK_P)
        there = lane < count
        score += load_partials(sums, first + lane, there, expert, exists, E)
        chosen += load_partials(counts, first + lane, there, expert, exists, E)
        valid += tl.load(row_counts + first + lane, mask=there, other=0)
        if padded is None:
            routed += load_partials(tokens, first + lane, there, expert, exists, E)
    if padded is not None and sequence == 0:
        for whole in range(0, programs, BLOCK_P):
            row = whole + tl.arange(0, BLOCK_P).to(tl.int64)
            routed += load_partials(tokens, row, row < programs, expert, exists, E)
    score = tl.sum(score, axis=0)
    chosen = tl.sum(chosen, axis=0).to(tl.int64)
    if sequence < sequences:
        tl.store(score_sums + sequence * E + expert, score, mask=exists)
        tl.store(all_counts + sequence * E + expert, chosen, mask=exists)
        tl.store(balances + sequence * blocks + tl.program_id(1), tl.sum(score * chosen.to(tl.float32), axis=0))
        if tl.program_id(1) == 0:
            tl.store(num_tokens + sequence, tl.sum(valid, axis=0).to(tl.int64))
    if sequence == 0:
        tl.store(tokens_per_expert + expert, tl.sum(routed, axis=0).to(tl.int64), mask=exists)

    # What the last program needs and can have before it knows that it is the last.
    squares = tl.zeros([BLOCK_P], tl.float32)
    for program in range(0, programs, BLOCK_P):
        at = program + tl.arange(0, BLOCK_P)
        squares += tl.load(z_sums + start_row + at, mask=at < programs, other=0.0)
    scale = tl.load(aux_coeff_tensor).to(tl.float32) if aux_coeff_tensor is not None else aux_coeff
    z_scale = tl.load(z_coeff_tensor).to(tl.float32) if z_coeff_tensor is not None else z_coeff
    if TOTAL == "tensor":
        given = tl.load(total_num_tokens_tensor).to(tl.float32)
    else:
        given = total_num_tokens.to(tl.float32)

    tl.debug_barrier()  # the stores of all threads come before the ticket
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) * blocks - 1:
        z = tl.sum(squares, axis=0)
        everyone = tl.zeros([BLOCK_S], tl.int64)
        filled = tl.zeros([BLOCK_S], tl.int32)
        for lot in range(0, sequences, BLOCK_S):
            s = lot + tl.arange(0, BLOCK_S)
            own = tl.load(num_tokens + s, mask=s < sequences, other=0, cache_modifier=".cg")
            everyone += own
            filled += own > 0
        everyone = tl.sum(everyone, axis=0).to(tl.float32)
        filled = tl.sum(filled, axis=0).to(tl.float32)

        loss = tl.zeros([BLOCK_S], tl.float32)
        for lot in range(0, sequences, BLOCK_S):
            s = lot + tl.arange(0, BLOCK_S)
            there = s < sequences
            if TOTAL == "own":
                n = tl.load(num_tokens + s, mask=there, other=0, cache_modifier=".cg").to(tl.float32)
            else:
                n = tl.zeros([BLOCK_S], tl.float32) + given
            # Left to right and correctly rounded, as the specification: N * N, which may not fit, is never formed.
            divisor = tl.where(n > 0, n, 1.0)
            factor = tl.zeros([BLOCK_S], tl.float32) + scale * E
            factor = tl.div_rn(tl.div_rn(tl.div_rn(factor, tl.full([BLOCK_S], K, tl.float32)), divisor), divisor)
            factor = tl.where(n > 0, factor, 0.0)
            if MEAN:
                factor = tl.div_rn(factor, tl.zeros([BLOCK_S], tl.float32) + tl.maximum(filled, 1.0))
            balance = tl.zeros([BLOCK_S], tl.float32)
            for block in range(blocks):
                balance += tl.load(balances + s * blocks + block, mask=there, other=0.0, cache_modifier=".cg")
            loss += tl.where(factor == 0, 0.0, factor * balance)
            tl.store(coefficients + s, factor, mask=there)
        tl.store(aux_loss, tl.sum(loss, axis=0))

        z_factor = z_scale / tl.maximum(everyone, 1.0)
        tl.store(z_sum, z)
        tl.store(coefficients + sequences, z_factor)
        tl.store(z_loss, tl.where(z_factor == 0, 0.0, z_factor * z))
