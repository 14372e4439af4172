"""Triton kernels and launchers of `moe_seq_aux_loss` and its gradient.

T rows, E experts, K ids a row, B sequences; C = cu_seqlens, P = cu_seqlens_padded (C where that is None). The sums over each
sequence's valid rows come without atomics: rows are cut into chunks, and a chunk writes one partial sum for each sequence it meets.
Since both are in order, the pairs (chunk c, sequence b) that meet form a staircase: c + b is different for each, and below
chunks + B. So the partial sum of a pair stands in row c + b of a buffer [chunks + B, E], and the sum of sequence b is that of rows
c + b over the chunks it lies in, always added in the same order. A chunk passes sequences without a row by, many at a time.

Example: 12 rows, chunks of 4, three sequences that own rows 0..4, 5..6 and 7..11:

    chunk 0 meets 0 (row 0); chunk 1 meets 0, 1, 2 (rows 1, 2, 3); chunk 2 meets 2 (row 4)
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import balancing as contract
from thdops.ops.balancing.kernels_count import MOST_TILES, choices_of, count_choices
from thdops.ops.balancing.tiling import power_of_two, rows_of
from thdops.ops.launch import launch
from thdops.ops.padding.kernels import count_at_most, locate_rows

_WAYS = 16  # of a search: two steps for 272 sequences
_SEARCHED = 64  # rows, at most, that a program finds the sequences of
_GROUP = 32  # sequences that a chunk looks at together
_TILE = 4096  # elements of a tile: 32 a thread
_WIDEST = 256  # columns of it; rows are few, so that a short sequence fills it
_CHUNKS = 512
_JOINED = (16, 64)  # columns of a program that joins chunks: few, so that it joins many chunks at a time, or
_JOINS = 2048  # where that takes more programs than this, more: an empty sequence costs programs too
_LOSSES = 2048  # parts of losses that are added at a time


@triton.jit
def count_tokens(cu_seqlens, padded, b, inside, rows):
    """(first row, number of valid rows) of sequences b, both in [0, T] whatever the metadata hold."""
    start = tl.load(padded + b, mask=inside, other=0).to(tl.int64)
    room = tl.load(padded + b + 1, mask=inside, other=0).to(tl.int64) - start
    length = tl.load(cu_seqlens + b + 1, mask=inside, other=0).to(tl.int64) - tl.load(cu_seqlens + b, mask=inside, other=0)
    tokens = tl.minimum(tl.maximum(tl.minimum(length, room), 0), rows)
    return tl.minimum(tl.maximum(start, 0), rows), tokens


@triton.jit
def rows_in_chunk(start, tokens, c, chunk, rows):
    """[low, high): what of rows [start, start + tokens) lies in chunk c."""
    return tl.maximum(start, c * chunk), tl.minimum(tl.minimum(start + tokens, (c + 1) * chunk), rows)


@triton.jit
def sum_scores(
    out, scores, start, end, block, width, row_stride, column_stride,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over rows [start, end) of the scores of one block of experts."""
    experts = width * VECTOR
    expert = block.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = expert < experts
    columns_at = scores + (expert if UNIT else expert * column_stride)
    row_step = row_stride.to(tl.int64) * VECTOR
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(start, end, BLOCK_T):
        row = first + tl.arange(0, BLOCK_T)
        inside = (row < end)[:, None] & exists[None, :]
        total += tl.load(columns_at[None, :] + (row * row_step)[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + expert, tl.sum(total, axis=0), mask=exists)


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "chunk", "choice_blocks", "width", "score_row", "score_column", "routing_width", "routing_row",
        "routing_column",
    ]
)  # fmt: skip
def sum_chunks(
    sums, counts, met, scores, routing, cu_seqlens, padded, rows, sequences, chunk, choice_blocks, width, score_row, score_column,
    routing_width, routing_row, routing_column,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr, BYTES: tl.constexpr, ROUTING_VECTOR: tl.constexpr, ROUTING_UNIT: tl.constexpr,
    ROUTING_T: tl.constexpr, ROUTING_C: tl.constexpr, ROUTING_E: tl.constexpr, GROUP: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """sums[c + b] and counts[c + b] = scores and choices summed over the rows of chunk c that are valid rows of sequence b;
    met[c] = the first and the last sequence that chunk c looked at: those in between whose valid rows it holds have been written.

    A program has one chunk of rows, and one block of the scores' experts or of the choices'.
    """
    experts = width * VECTOR
    score_blocks = tl.cdiv(experts, BLOCK_E)
    c = (tl.program_id(0) // (score_blocks + choice_blocks)).to(tl.int64)
    block = tl.program_id(0) % (score_blocks + choice_blocks)
    edges = tl.where(tl.arange(0, 2) == 0, c * chunk, tl.minimum((c + 1) * chunk, rows) - 1)
    found = count_at_most(padded + 1, None, 0, sequences, edges, 2, WAYS)
    first_met = tl.min(found)
    last_met = tl.minimum(tl.max(found), sequences - 1)
    tl.store(met + 2 * c, first_met)
    tl.store(met + 2 * c + 1, last_met)

    for group in range(first_met, last_met + 1, GROUP):
        number = group + tl.arange(0, GROUP)
        start, tokens = count_tokens(cu_seqlens, padded, number, number <= last_met, rows)
        low, high = rows_in_chunk(start, tokens, c, chunk, rows)
        number = tl.where((number <= last_met) & (low < high), number, sequences)
        b = tl.min(number)
        while b < sequences:
            first_row, length = count_tokens(cu_seqlens, padded, b, b < sequences, rows)
            begin, end = rows_in_chunk(first_row, length, c, chunk, rows)
            pair = (c + b) * experts
            if block < score_blocks:
                sum_scores(sums + pair, scores, begin, end, block, width, score_row, score_column, VECTOR, UNIT, BLOCK_T, BLOCK_E)
            else:
                count_choices(
                    counts + pair, routing, None, begin, end, ROUTING_T, block - score_blocks, routing_width, experts,
                    routing_row, routing_column, 0,
                    PLANES, BYTES, ROUTING_VECTOR, ROUTING_UNIT, ROUTING_T, ROUTING_C, ROUTING_E,
                )  # fmt: skip
            b = tl.min(tl.where(number > b, number, sequences))


@triton.jit
def coefficient(tokens, coeff_tensor, coeff, num_experts, topk):
    """C = coeff * E / K / n / n, left to right and correctly rounded, as the specification; 0 where n is 0."""
    scale = tl.load(coeff_tensor).to(tl.float32) if coeff_tensor is not None else coeff
    count = tl.maximum(tokens, 1).to(tl.float32)
    factor = tl.div_rn(scale * num_experts.to(tl.float32), topk.to(tl.float32))
    return tl.where(tokens > 0, tl.div_rn(tl.div_rn(factor, count), count), 0.0)


@triton.jit(do_not_specialize=["rows", "sequences", "experts", "topk", "chunk"])
def join_chunks(
    parts, slopes, sums, counts, met, cu_seqlens, padded, coeff_tensor, rows, sequences, experts, topk, chunk, coeff,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """With S and R the sums over sequence b: slopes[b] = C R, parts[b, block] = sum of S R over one block of experts."""
    blocks = tl.cdiv(experts, BLOCK_E)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    expert = block.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = expert < experts
    start, tokens = count_tokens(cu_seqlens, padded, b, b < sequences, rows)
    chunks_end = tl.cdiv(tl.minimum(start + tokens, rows), chunk)

    total = tl.zeros([BLOCK_E], tl.float32)
    count = tl.zeros([BLOCK_E], tl.int64)
    for first in range(start // chunk, chunks_end, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)  # [BLOCK_C]
        low, high = rows_in_chunk(start, tokens, c, chunk, rows)
        inside = (c < chunks_end) & (low < high)
        # Always so where the metadata are in order; where they are not, a chunk may have passed b by.
        written = (tl.load(met + 2 * c, mask=inside, other=0) <= b) & (tl.load(met + 2 * c + 1, mask=inside, other=-1) >= b)
        at = (c + b)[:, None] * experts + expert[None, :]
        wanted = (inside & written)[:, None] & exists[None, :]
        total += tl.sum(tl.load(sums + at, mask=wanted, other=0.0), axis=0)
        count += tl.sum(tl.load(counts + at, mask=wanted, other=0).to(tl.int64), axis=0)
    chosen = count.to(tl.float32)
    slope = coefficient(tokens, coeff_tensor, coeff, experts, topk) * chosen
    tl.store(slopes + b * experts + expert, slope, mask=exists)
    tl.store(parts + b * blocks + block, tl.sum(total * chosen))


@triton.jit(do_not_specialize=["rows", "sequences", "blocks", "num_experts", "topk"])
def finish(
    loss, share, parts, cu_seqlens, padded, coeff_tensor, rows, sequences, blocks, num_experts, topk, coeff,
    REDUCTION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """loss_b = C * sum of its parts, and what REDUCTION makes of these losses, in one program, always in the same order."""
    total = tl.zeros([BLOCK_B], tl.float32)
    some = tl.zeros([BLOCK_B], tl.int64)
    for first in range(0, sequences, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B).to(tl.int64)
        inside = b < sequences
        _, tokens = count_tokens(cu_seqlens, padded, b, inside, rows)
        balance = tl.zeros([BLOCK_B], tl.float32)
        for j in range(0, blocks, BLOCK_J):
            block = j + tl.arange(0, BLOCK_J)
            at = parts + b[:, None] * blocks + block[None, :]
            balance += tl.sum(tl.load(at, mask=inside[:, None] & (block < blocks)[None, :], other=0.0), axis=1)
        factor = coefficient(tokens, coeff_tensor, coeff, num_experts, topk)
        value = tl.where(factor == 0, 0.0, factor * balance)
        if REDUCTION == "none":
            tl.store(loss + b, value, mask=inside)
        total += tl.where(inside, value, 0.0)
        some += (inside & (tokens > 0)).to(tl.int64)
    each = tl.full([], 1.0, tl.float32)
    if REDUCTION == "mean":
        each = tl.div_rn(each, tl.maximum(tl.sum(some), 1).to(tl.float32))
    tl.store(share, each)
    if REDUCTION != "none":
        tl.store(loss, each * tl.sum(total))


@triton.jit(do_not_specialize=["rows", "sequences", "width", "grad_stride"])
def store_slopes(
    grad, grad_loss, slopes, share, cu_seqlens, padded, rows, sequences, width, grad_stride,
    VECTOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """grad[t] = share * grad_loss[b] * slopes[b] on the valid rows of sequence b, +0.0 elsewhere and where the slope is 0."""
    experts = width.to(tl.int64) * VECTOR
    blocks = tl.cdiv(width * VECTOR, BLOCK_E)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    expert = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    valid, sequence, _, _ = locate_rows(cu_seqlens, padded, sequences, row, BLOCK_T, WAYS)
    factor = tl.load(share) * tl.load(grad_loss + sequence * grad_stride, mask=valid, other=0.0)  # [BLOCK_T]
    exists = (expert < experts)[None, :]
    slope = tl.load(slopes + (sequence * experts)[:, None] + expert[None, :], mask=valid[:, None] & exists, other=0.0)
    value = tl.where(slope == 0, 0.0, slope * factor[:, None])  # [BLOCK_T, BLOCK_E]
    tl.store(grad + (row * experts)[:, None] + expert[None, :], value, mask=(row < rows)[:, None] & exists)


# --- launchers --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _chunk(rows: int, tile: int) -> int:
    """Rows of a chunk: of any number of tiles, but no more than one program may count."""
    return tile * min(max(triton.cdiv(rows, tile * _CHUNKS), 1), MOST_TILES)


def _tile(experts: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_E)."""
    block_e = min(power_of_two(experts), _WIDEST)
    return _TILE // block_e, block_e


def moe_seq_aux_loss(
    scores: Tensor,
    routing: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    coeff_tensor: Tensor | None,
    num_experts: int,
    topk: int,
    reduction: str,
    coeff: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    loss, slopes, share = contract.fake_moe_seq_aux_loss(
        scores, routing, cu_seqlens, cu_seqlens_padded, coeff_tensor, num_experts, topk, reduction, coeff
    )
    rows, experts = scores.shape
    sequences = slopes.shape[0]
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    block_t, block_e = _tile(experts)
    width, row_stride, column_stride, vector, unit = rows_of(scores)
    choices = choices_of(routing, experts)
    chunk = _chunk(rows, choices.block_t)
    chunks = triton.cdiv(rows, chunk)
    joined = _JOINED[sequences * triton.cdiv(experts, _JOINED[0]) > _JOINS]
    blocks = triton.cdiv(experts, joined)

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=scores.device)

    sums = scratch(chunks + sequences, experts, dtype=torch.float32)
    counts = scratch(chunks + sequences, experts, dtype=torch.int32)
    met = scratch(chunks, 2, dtype=torch.int64)
    parts = scratch(sequences, blocks, dtype=torch.float32)
    launch(
        sum_chunks,
        (chunks * (triton.cdiv(experts, block_e) + choices.blocks), 1, 1),
        (
            sums, counts, met, scores, routing, cu_seqlens, padded, rows, sequences, chunk, choices.blocks, width, row_stride,
            column_stride, *choices.sizes,
        ),
        (vector, unit, block_t, block_e, *choices.constants, _GROUP, _WAYS),
    )  # fmt: skip
    scale = coeff or 0.0
    launch(
        join_chunks,
        (sequences * blocks, 1, 1),
        (parts, slopes, sums, counts, met, cu_seqlens, padded, coeff_tensor, rows, sequences, experts, topk, chunk, scale),
        (_TILE // joined, joined),
    )
    block_j = min(power_of_two(blocks), 64)
    launch(
        finish,
        (1, 1, 1),
        (loss, share, parts, cu_seqlens, padded, coeff_tensor, rows, sequences, blocks, experts, topk, scale),
        (reduction, _LOSSES // block_j, block_j),
        num_warps=8,
    )
    return loss, slopes, share


def moe_seq_aux_loss_grad(
    grad_loss: Tensor,
    slopes: Tensor,
    share: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    grad = contract.fake_moe_seq_aux_loss_grad(grad_loss, slopes, share, cu_seqlens, cu_seqlens_padded, rows, dtype)
    slopes = slopes.contiguous()
    sequences, experts = slopes.shape
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    block_t, block_e = _tile(experts)
    block_t = min(block_t, _SEARCHED)
    width, _, _, vector, _ = rows_of(grad, slopes)
    grid = (triton.cdiv(rows, block_t) * triton.cdiv(experts, block_e), 1, 1)
    grad_stride = grad_loss.stride(0) if grad_loss.dim() else 0
    args = (grad, grad_loss, slopes, share, cu_seqlens, padded, rows, sequences, width, grad_stride)
    launch(store_slopes, grid, args, (vector, block_t, block_e, _WAYS))
    return grad
