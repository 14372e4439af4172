"""Triton kernels that say where rows go: a counting sort of (token, expert) pairs, stable, bitwise repeatable, without atomics.

T rows (tokens), E experts, K top-k. A pair (t, k) is token t at its k-th expert; its number is t*K + k. Here a pair without an
expert has expert E. Three short launches, whose grids follow from T, K and E alone:

    rank_pairs    a program per chunk of pairs: the rank of each pair among those of its expert, and how many each expert has
    scan_chunks   a program per expert: the row of its first pair in each chunk
    place_pairs   the sum of rank and first row, for each pair
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thdops.ops.launch import launch

_BLOCK = 64  # pairs that are compared with one another at once
_STEPS = 8  # blocks of a chunk, one after the other
_BINS = 1024  # experts of a chunk that are counted at a time
_BLOCK_C = 1024  # chunks that a program of the scan takes at a time
_PLACED = 1024  # pairs of a program of the last step


@triton.jit
def _experts_of(indices, pair, inside, experts):
    """The expert of each pair, E where it has none."""
    ids = tl.load(indices + pair, mask=inside, other=-1)
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "chunks", "experts"])
def rank_pairs_kernel(
    indices, ranks, counts, starts, pairs, chunks, experts, STEPS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """ranks[p] = how many pairs of p's expert stand before p in this chunk of STEPS * BLOCK pairs.

    starts[e, chunk] = how many pairs of the chunk have an expert below e, for e from 0 to E + 1. The chunk's row of counts is
    scratch: pairs of each expert seen so far. Threads read there what others wrote: hence the barriers.
    Example: experts 1 0 1 1 of a chunk, E = 2: ranks 0 0 1 2, starts 0 1 4 4.
    """
    counts += tl.program_id(0).to(tl.int64) * (experts + 1)
    bins = tl.arange(0, BINS)
    for first in range(0, experts + 1, BINS):
        tl.store(counts + first + bins, tl.zeros([BINS], tl.int32), mask=first + bins <= experts)
    lane = tl.arange(0, BLOCK)
    # One sum tells how many of a pair's expert a block has and, in the upper half, how many of them stand before the pair.
    weight = tl.where(lane[:, None] < lane[None, :], 65537, 1)  # [BLOCK, BLOCK]
    for step in range(STEPS):
        pair = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + lane
        inside = pair < pairs
        expert = tl.where(inside, _experts_of(indices, pair, inside, experts), -1)
        both = tl.sum(tl.where(expert[:, None] == expert[None, :], weight, 0), axis=0)
        earlier, total = both >> 16, both & 65535
        tl.debug_barrier()
        rank = tl.load(counts + expert, mask=inside, other=0) + earlier
        tl.debug_barrier()
        tl.store(ranks + pair, rank, mask=inside)
        tl.store(counts + expert, rank + 1, mask=inside & (earlier + 1 == total))  # the last of its expert knows the new count
    tl.debug_barrier()
    before = tl.zeros([], tl.int32)
    for first in range(0, experts + 2, BINS):
        e = first + bins
        count = tl.load(counts + e, mask=e <= experts, other=0)
        at = starts + e.to(tl.int64) * chunks + tl.program_id(0)
        tl.store(at, before + tl.cumsum(count) - count, mask=e <= experts + 1)
        before += tl.sum(count)


@triton.jit(do_not_specialize=["chunks", "experts"])
def scan_chunks_kernel(starts, first_rows, offsets, chunks, experts, BLOCK_C: tl.constexpr):
    """For one expert: first_rows[chunk, e] = row of its first pair in the chunk; offsets[e - 1] = rows of the experts below it.

    Expert e begins behind all pairs of experts below e, and that is the sum of row e of starts: no program waits for another.
    Example: chunks 1 0 1 1 and 0 0 1 1, E = 2: starts 0 0, 1 2, 4 4, 4 4; first_rows 0 3 8 and 1 6 8; offsets 3 8.
    """
    e = tl.program_id(0).to(tl.int64)
    starts += e * chunks
    lane = tl.arange(0, BLOCK_C)
    row = tl.zeros([], tl.int32)
    for first in range(0, chunks, BLOCK_C):
        row += tl.sum(tl.load(starts + first + lane, mask=first + lane < chunks, other=0))
    tl.store(offsets + e - 1, row, mask=e > 0)
    for first in range(0, chunks, BLOCK_C):
        chunk = first + lane
        inside = chunk < chunks
        begin = tl.load(starts + chunk, mask=inside, other=0)
        count = tl.load(starts + chunks + chunk, mask=inside, other=0) - begin
        tl.store(first_rows + chunk.to(tl.int64) * (experts + 1) + e, row + tl.cumsum(count) - count, mask=inside)
        row += tl.sum(count)


@triton.jit(do_not_specialize=["pairs", "experts"])
def place_pairs_kernel(indices, first_rows, map, pairs, experts, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """map: the rank of each pair in its chunk becomes its row, or ~row if it has no expert."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = _experts_of(indices, pair, inside, experts)
    first = tl.load(first_rows + pair // CHUNK * (experts + 1) + expert, mask=inside, other=0)
    row = first + tl.load(map + pair, mask=inside, other=0)
    tl.store(map + pair, tl.where(expert < experts, row, ~row), mask=inside)


def sort_pairs(indices: Tensor, offsets: Tensor, map: Tensor) -> None:
    """Write `offsets` (int32 `[E]`) and `map` (int32 `[T, K]`, contiguous) of `permute_tokens`."""
    indices = indices.contiguous()
    pairs, experts = indices.numel(), offsets.shape[0]
    chunk = _STEPS * _BLOCK
    chunks = triton.cdiv(pairs, chunk)
    starts, first_rows = map.new_empty((experts + 2, chunks)), map.new_empty((chunks, experts + 1))
    bins = min(triton.next_power_of_2(experts + 2), _BINS)
    args = (indices, map, first_rows, starts, pairs, chunks, experts)
    launch(rank_pairs_kernel, (chunks, 1, 1), args, (_STEPS, _BLOCK, bins), num_warps=2)
    launch(scan_chunks_kernel, (experts + 1, 1, 1), (starts, first_rows, offsets, chunks, experts), (_BLOCK_C,))
    launch(place_pairs_kernel, (triton.cdiv(pairs, _PLACED), 1, 1), (indices, first_rows, map, pairs, experts), (chunk, _PLACED))
