"""The backward kernel of the router ops: one pass over the logits, one dense gradient.

T rows, E experts, K chosen, S sequences of sums. The gradient of a row is, with s = softmax or a normalised activation over E,

    sparse part    from the probabilities of the chosen experts: K entries, or all of them for softmax before the choice
    score part     from the scores over all experts, whose incoming gradient is dense (`router_scores`) or one row for all rows of
                   a sequence (`router`): that row is never written out
    z part         from the squared logsumexp

The dense parts are stored for all columns; the entries of the chosen experts are made once more with the sparse part added, and
stored over them.
"""

# Tuples grow, and branches on constants vanish, while a kernel is traced, which Python's types cannot express.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from thdops.ops.router.kernels_forward import counted_rows, fill_zeros, softmax_of_chosen
from thdops.ops.router.kernels_select import (
    activation,
    activation_slope,
    activation_terms,
    columns,
    divide,
    load_rows,
    logsumexp_of,
    softmax_terms,
    term_of,
)


@triton.jit
def score_weight(
    grad_scores, counts, grad_score_sums, factor, row, sequence, expert, wanted, grad_row, grad_column, sums_row, sums_column,
    E: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores at `expert` [., N] of rows: what came in, or the row of the sequence. 0 where not wanted."""
    if grad_scores is not None:
        return tl.load(grad_scores + row[:, None] * grad_row + expert * grad_column, mask=wanted, other=0.0).to(tl.float32)
    else:
        count = tl.load(counts + sequence[:, None] * E + expert, mask=wanted, other=0).to(tl.float32)
        weight = tl.where(factor[:, None] == 0, 0.0, factor[:, None] * count)
        if grad_score_sums is not None:
            at = grad_score_sums + sequence[:, None] * sums_row + expert * sums_column
            weight += tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        return weight


@triton.jit(
    do_not_specialize=[
        "rows", "row_stride", "column_stride", "mask_stride", "sequences", "probs_row", "probs_column", "grad_row", "grad_column",
        "sums_row", "sums_column",
    ]
)  # fmt: skip
def route_rows_grad(
    grad, logits, chosen, grad_probs, padding_mask, cu_seqlens, padded, grad_scores, counts, coefficients, grad_aux, grad_z,
    grad_score_sums, grad_z_sum,
    rows, row_stride, column_stride, mask_stride, sequences, probs_row, probs_column, grad_row, grad_column, sums_row, sums_column,
    gamma,
    E: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, AUX: tl.constexpr, PRE: tl.constexpr,
    NORMALIZE: tl.constexpr, PROBS: tl.constexpr, AUX_GRAD: tl.constexpr, Z_GRAD: tl.constexpr, CONTIGUOUS: tl.constexpr,
    LANES: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr, FILL: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows. AUX_GRAD, Z_GRAD: whether a gradient of scores and of the z-loss is there; grad_probs is None where not."""
    EVEN: tl.constexpr = LANES * CHUNKS == E
    SPARSE: tl.constexpr = grad_probs is not None
    SOFTMAX: tl.constexpr = (SPARSE and PRE) or (AUX_GRAD and AUX == "softmax") or Z_GRAD
    DENSE: tl.constexpr = SOFTMAX or AUX_GRAD
    column_stride, probs_column = column_stride.to(tl.int64), probs_column.to(tl.int64)
    grad_column, sums_column = grad_column.to(tl.int64), sums_column.to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_T
    row = first_row + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, KEYS)[None, :]
    inside, counted, sequence = counted_rows(padding_mask, cu_seqlens, padded, row, rows, mask_stride, sequences, BLOCK_T, WAYS)
    sequence = tl.where(counted, sequence, 0)
    live = counted
    if SPARSE:
        expert = tl.load(chosen + row[:, None] * K + slot, mask=(slot < K) & inside[:, None], other=-1)
        has = (expert >= 0) & (expert < E)
        expert = tl.where(has, expert, 0)
        routed = tl.max(has.to(tl.int32), axis=1) == 1
        live = counted | routed
    row_at = logits + row * (E if CONTIGUOUS else row_stride)
    stride = 1 if CONTIGUOUS else column_stride
    if DENSE:
        xs = load_rows(row_at, live, stride, E, 0, 1, LANES, CHUNKS, EVEN)
    else:
        fill_zeros(grad, first_row, rows, E, BLOCK_T, FILL)
    if SOFTMAX:
        terms, rate, shift, total = softmax_terms(xs, E, LANES, CHUNKS, EVEN)
        share = 1.0 / total

    # The factor of softmax(x)_e that is the same for all e of a row; and whether a dense part has a factor other than 0 at all:
    # where not, a row with NaN among its logits gets none from it either.
    constant = tl.zeros([BLOCK_T], tl.float32)
    used = row < 0
    if SPARSE:
        x = tl.load(row_at[:, None] + expert * stride, mask=has, other=0.0).to(tl.float32)
        if PROBS == "dense":
            g = tl.load(grad_probs + row[:, None] * probs_row + expert * probs_column, mask=has, other=0.0)
        else:
            g = tl.load(grad_probs + row[:, None] * probs_row + slot * probs_column, mask=has, other=0.0)
        g = gamma * g.to(tl.float32)
        if SCORE == "softmax":
            if PRE:
                value = tl.where(has, term_of(x, rate, shift) * share[:, None], 0.0)
                constant -= tl.sum(value * g, axis=1)
                used = used | routed
                sparse = value * g
            else:
                value = softmax_of_chosen(x, has)
                sparse = value * (g - tl.sum(value * g, axis=1)[:, None])
        else:
            value = tl.where(has, activation(x, SCORE), 0.0)
            if K > 1 and NORMALIZE:
                whole = tl.broadcast_to((tl.sum(value, axis=1) + 1e-20)[:, None], value.shape)
                mean = tl.broadcast_to(tl.sum(value * g, axis=1)[:, None], value.shape)
                g = divide(g - divide(mean, whole), whole)
            sparse = g * activation_slope(x, value, SCORE)
    if Z_GRAD:
        z = tl.zeros([BLOCK_T], tl.float32)
        if grad_z is not None:
            z_factor = tl.load(coefficients + sequences)
            z += tl.where(z_factor == 0, 0.0, z_factor * tl.load(grad_z).to(tl.float32))
        if grad_z_sum is not None:
            z += tl.load(grad_z_sum).to(tl.float32)
        lse = logsumexp_of(rate, shift, total)
        reached = counted & (z != 0)
        constant += tl.where(reached, 2.0 * z * lse, 0.0)
        used = used | reached

    if AUX_GRAD:
        factor = tl.zeros([BLOCK_T], tl.float32)
        if grad_aux is not None:
            factor = tl.load(coefficients + sequence, mask=counted, other=0.0)
            factor = tl.where(factor == 0, 0.0, factor * tl.load(grad_aux).to(tl.float32))
        if grad_scores is not None or grad_score_sums is not None:
            used = used | counted
        else:
            used = used | (factor != 0)
        if AUX == "softmax":
            aux_terms = terms
            aux_share = share
        else:
            aux_terms, aux_total = activation_terms(xs, E, AUX, LANES, CHUNKS, EVEN)
            aux_share = 1.0 / aux_total
        weights = ()
        mean = tl.zeros([BLOCK_T, LANES], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            column, exists = columns(chunk * LANES, LANES, E, 0, 1)
            weight = score_weight(
                grad_scores, counts, grad_score_sums, factor, row, sequence, column[None, :], counted[:, None] & exists[None, :],
                grad_row, grad_column, sums_row, sums_column, E,
            )  # fmt: skip
            weights = weights + (weight,)
            mean += weight * aux_terms[chunk]
        mean = tl.sum(mean, axis=1) * aux_share

    if DENSE:
        for chunk in tl.static_range(CHUNKS):
            column, exists = columns(chunk * LANES, LANES, E, 0, 1)
            dx = tl.zeros([BLOCK_T, LANES], tl.float32)
            if SOFTMAX:
                weight = constant[:, None]
                if AUX_GRAD and AUX == "softmax":
                    weight = weight + (weights[chunk] - mean[:, None])
                dx += terms[chunk] * share[:, None] * weight
            if AUX_GRAD and AUX != "softmax":
                dx += activation_slope(xs[chunk], aux_terms[chunk], AUX) * (weights[chunk] - mean[:, None]) * aux_share[:, None]
            dx = tl.where(used[:, None], dx, 0.0)
            at = grad + row[:, None] * E + column[None, :]
            if EVEN:
                tl.store(at, dx.to(grad.dtype.element_ty), mask=inside[:, None])
            else:
                tl.store(at, dx.to(grad.dtype.element_ty), mask=inside[:, None] & exists[None, :])
    if SPARSE:
        dx = tl.zeros([BLOCK_T, KEYS], tl.float32)
        if SOFTMAX:
            weight = tl.broadcast_to(constant[:, None], sparse.shape)
        if AUX_GRAD:
            extra = score_weight(
                grad_scores, counts, grad_score_sums, factor, row, sequence, expert, has & counted[:, None],
                grad_row, grad_column, sums_row, sums_column, E,
            )  # fmt: skip
            extra = extra - mean[:, None]
            if AUX == "softmax":
                weight = weight + extra
            else:
                a = activation(x, AUX)
                dx += activation_slope(x, a, AUX) * extra * aux_share[:, None]
        if SOFTMAX:
            dx += term_of(x, rate, shift) * share[:, None] * weight
        if DENSE:
            dx = tl.where(used[:, None], dx, 0.0)
        dx += sparse
        tl.debug_barrier()  # what other threads stored there comes first
        tl.store(grad + row[:, None] * E + expert, dx.to(grad.dtype.element_ty), mask=has)
