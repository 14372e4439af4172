"""Triton kernels and launchers of the row maps and of the metadata ops; `kernels_zero_fill.py` builds on the searches here.

T rows, B sequences, C = cu_seqlens, P = cu_seqlens_padded (C where that is None). Every lookup is one search in a sorted array:

    row r lies in sequence           #{b in [1, B] : P[b] <= r}
    padding row number k is row      k + C[c] - C[0],  c = #{b in [0, B) : P[b] - C[b] + C[0] <= k}

The second line is what lets `zero_fill_` visit padding rows only: P[b] - C[b] + C[0] padding rows stand before the gap of b.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import padding as contract
from thdops.ops.launch import launch

# --- searches -------------------------------------------------------------------------------------


@triton.jit
def count_at_most(ends, subtract, add, n, values, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """For each of [ROWS] int64 values: how many i in [0, n) have ends[i] (- subtract[i] + add) <= value. The array is sorted.

    WAYS-ary search: a step looks at WAYS pivots at once, so the chain of dependent loads is log(n) / log(WAYS) long. Addresses
    stay in [0, n) and the loop ends even where the array is not sorted.
    Example: ends = [4, 4, 9], value 4 -> 2 (an empty sequence is skipped).
    """
    low = tl.zeros([ROWS], tl.int64)
    span = n
    ways = tl.arange(0, WAYS)
    while span > 0:
        step = tl.cdiv(span, WAYS)
        pivot = low[:, None] + ways[None, :] * step  # [ROWS, WAYS]
        inside = (pivot < low[:, None] + span) & (pivot < n)
        end = tl.load(ends + pivot, mask=inside, other=0).to(tl.int64)
        if subtract is not None:
            end = end - tl.load(subtract + pivot, mask=inside, other=0).to(tl.int64) + add
        below = tl.sum((inside & (end <= values[:, None])).to(tl.int64), axis=1)
        low = tl.where(below > 0, low + (below - 1) * step + 1, low)
        span = step - 1
    return low


@triton.jit
def locate_rows(cu_seqlens, padded, sequences, rows, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """(valid, sequence, offset, length) of [ROWS] rows; sequence is in [0, B], and B where a row lies behind the last one."""
    sequence = count_at_most(padded + 1, None, 0, sequences, rows, ROWS, WAYS)
    inside = sequence < sequences
    start = tl.load(padded + sequence, mask=inside, other=0).to(tl.int64)
    end = tl.load(padded + sequence + 1, mask=inside, other=0).to(tl.int64)
    valid_start = tl.load(cu_seqlens + sequence, mask=inside, other=0).to(tl.int64)
    valid_end = tl.load(cu_seqlens + sequence + 1, mask=inside, other=0).to(tl.int64)
    offset = rows - start
    length = tl.minimum(valid_end - valid_start, end - start)
    valid = inside & (offset >= 0) & (offset < length)
    return valid, sequence, offset, length


# --- row maps -------------------------------------------------------------------------------------

_ROWS = 256


@triton.jit(do_not_specialize=["total", "sequences", "cp_size", "cp_rank"])
def row_map_kernel(
    cu_seqlens, padded, out, total, sequences, cp_size, cp_rank, KIND: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr
):
    """One value per row: KIND "mask" (True on padding), "sequence" (-1 on padding) or "position" (0 on padding)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid, sequence, offset, _ = locate_rows(cu_seqlens, padded, sequences, rows, ROWS, WAYS)
    if KIND == "mask":
        value = ~valid
    elif KIND == "sequence":
        value = tl.where(valid, sequence, -1)
    else:
        value = tl.minimum(tl.where(valid, offset, 0), total - 1)  # a bound that tables may rely on, whatever the metadata hold
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=rows < total)


@triton.jit(do_not_specialize=["total", "sequences", "cp_size", "cp_rank"])
def zigzag_position_kernel(cu_seqlens, padded, out, total, sequences, cp_size, cp_rank, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """The position in the whole sequence of a rank's rows: it holds chunks cp_rank and 2W-1-cp_rank of each sequence's 2W.

    floor(P[b] / W) <= row is the same as P[b] <= row * W + W - 1, so the search needs no divided copy of P.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sequence = count_at_most(padded + 1, None, 0, sequences, rows * cp_size + cp_size - 1, ROWS, WAYS)
    inside = sequence < sequences
    start = tl.load(padded + sequence, mask=inside, other=0).to(tl.int64)
    end = tl.load(padded + sequence + 1, mask=inside, other=0).to(tl.int64)
    valid_start = tl.load(cu_seqlens + sequence, mask=inside, other=0).to(tl.int64)
    valid_end = tl.load(cu_seqlens + sequence + 1, mask=inside, other=0).to(tl.int64)
    offset = rows - start // cp_size
    chunk = (end - start) // (2 * cp_size)
    position = offset + chunk * tl.where(offset < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank)
    valid = inside & (offset >= 0) & (position < tl.minimum(valid_end - valid_start, end - start))
    position = tl.minimum(tl.where(valid & (position >= 0), position, 0), total.to(tl.int64) * cp_size - 1)
    tl.store(out + rows, position.to(tl.int32), mask=rows < total)


def _launch_row_map(
    kernel: Any, out: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, cp: tuple[int, int], *kind: str
) -> Tensor:
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    total = out.shape[0]
    args = (cu_seqlens, padded, out, total, cu_seqlens.shape[0] - 1, *cp)
    launch(kernel, (triton.cdiv(total, _ROWS), 1, 1), args, (*kind, _ROWS, 8))
    return out


def padding_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    out = contract.fake_padding_mask(cu_seqlens, cu_seqlens_padded, total_tokens)
    return _launch_row_map(row_map_kernel, out, cu_seqlens, cu_seqlens_padded, (1, 0), "mask")


def sequence_ids(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    out = contract.fake_sequence_ids(cu_seqlens, cu_seqlens_padded, total_tokens)
    return _launch_row_map(row_map_kernel, out, cu_seqlens, cu_seqlens_padded, (1, 0), "sequence")


def positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    out = contract.fake_positions(cu_seqlens, cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    if cp_size == 1:
        return _launch_row_map(row_map_kernel, out, cu_seqlens, cu_seqlens_padded, (1, 0), "position")
    return _launch_row_map(zigzag_position_kernel, out, cu_seqlens, cu_seqlens_padded, (cp_size, cp_rank))


@triton.jit(do_not_specialize=["total", "sequences"])
def compact_rows_kernel(cu_seqlens, padded, index, inverse, total, sequences, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """[ROWS] entries of both directions, each found by a search of its own: no scan over blocks, no entry left unwritten."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keep = number < total
    first = tl.load(cu_seqlens).to(tl.int64)
    valid_total = tl.load(cu_seqlens + sequences).to(tl.int64) - first
    valid_total = tl.minimum(tl.maximum(valid_total, 0), total)

    # index: number -> row. Valid rows first: row number n is the (n - C[b])-th row of its sequence.
    sequence = count_at_most(cu_seqlens + 1, None, 0, sequences, number + first, ROWS, WAYS)
    sequence = tl.minimum(sequence, tl.maximum(sequences - 1, 0))
    valid_row = tl.load(padded + sequence).to(tl.int64) + number + first - tl.load(cu_seqlens + sequence).to(tl.int64)
    gap = number - valid_total
    before = count_at_most(padded, cu_seqlens, first, sequences, gap, ROWS, WAYS)
    gap_row = gap + tl.load(cu_seqlens + before).to(tl.int64) - first
    row = tl.where(number < valid_total, valid_row, gap_row)
    tl.store(index + number, tl.minimum(tl.maximum(row, 0), total - 1).to(tl.int32), mask=keep)

    # inverse: row -> number. A padding row stands behind all valid rows and behind the padding rows before it.
    valid, sequence, offset, length = locate_rows(cu_seqlens, padded, sequences, number, ROWS, WAYS)
    in_front = tl.load(cu_seqlens + sequence).to(tl.int64) - first
    valid_before = tl.where((sequence < sequences) & (offset >= 0), in_front + length, in_front)
    place = tl.where(valid, in_front + offset, valid_total + number - valid_before)
    tl.store(inverse + number, tl.minimum(tl.maximum(place, 0), total - 1).to(tl.int32), mask=keep)


def compact_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> tuple[Tensor, Tensor]:
    index, inverse = contract.fake_compact_rows(cu_seqlens, cu_seqlens_padded, total_tokens)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    args = (cu_seqlens, padded, index, inverse, total_tokens, cu_seqlens.shape[0] - 1)
    launch(compact_rows_kernel, (triton.cdiv(total_tokens, _ROWS), 1, 1), args, (_ROWS, 8))
    return index, inverse


# --- metadata -------------------------------------------------------------------------------------

_POSITIONS = 2048  # rows of position ids a program reads
_ENTRIES = 1024  # entries of a cu_seqlens a program scans at a time


@triton.jit
def _sequence_starts(position_ids, rows, total):
    """(starts a sequence, belongs to one) of [BLOCK] rows."""
    here = tl.load(position_ids + rows, mask=rows < total, other=-1).to(tl.int64)
    previous = tl.load(position_ids + rows - 1, mask=(rows > 0) & (rows < total), other=-1).to(tl.int64)
    inside = here >= 0
    return inside & ((rows == 0) | (here != previous + 1)), inside


@triton.jit(do_not_specialize=["total"])
def count_starts_kernel(position_ids, counts, total, BLOCK: tl.constexpr):
    """counts[0, i] = sequences that start in block i, counts[1, i] = rows of it that belong to one."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    starts, inside = _sequence_starts(position_ids, rows, total)
    tl.store(counts + tl.program_id(0), tl.sum(starts.to(tl.int32)))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(inside.to(tl.int32)))


@triton.jit(do_not_specialize=["total", "max_seqs", "blocks"])
def write_starts_kernel(position_ids, counts, out, total, max_seqs, blocks, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """Each start goes to its number's entry; the entries past the last sequence are shared out among the programs."""
    program = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    sequences = tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    for first in range(0, blocks, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        count = tl.load(counts + i, mask=i < blocks, other=0)
        before += tl.sum(tl.where(i < program, count, 0))
        sequences += tl.sum(count)
        end += tl.sum(tl.load(counts + blocks + i, mask=i < blocks, other=0))
    rows = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    starts, _ = _sequence_starts(position_ids, rows, total)
    number = before + tl.cumsum(starts.to(tl.int32)) - 1
    tl.store(out + number, rows.to(tl.int32), mask=starts & (rows * 0 + sequences <= max_seqs))
    for first in range(program * ENTRIES, max_seqs + 1, tl.num_programs(0) * ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        overflow = entry * 0 + sequences > max_seqs  # [ENTRIES]
        tl.store(out + entry, tl.where(overflow, -1, end), mask=(entry <= max_seqs) & ((entry >= sequences) | overflow))


def cu_seqlens_from_positions(position_ids: Tensor, max_seqs: int) -> Tensor:
    out = contract.fake_cu_seqlens_from_positions(position_ids, max_seqs)
    position_ids = position_ids.contiguous()
    total = position_ids.shape[0]
    blocks = max(triton.cdiv(total, _POSITIONS), 1)
    counts = out.new_empty((2, blocks))
    launch(count_starts_kernel, (blocks, 1, 1), (position_ids, counts, total), (_POSITIONS,))
    launch(write_starts_kernel, (blocks, 1, 1), (position_ids, counts, out, total, max_seqs, blocks), (_POSITIONS, _ENTRIES))
    return out


@triton.jit(do_not_specialize=["count", "max_seqs"])
def prefix_sums_kernel(lengths, out, count, max_seqs, ENTRIES: tl.constexpr):
    """out[i + 1] = lengths[0] + ... + lengths[i], in one program: a batch has few sequences."""
    total = tl.zeros([], tl.int64)
    tl.store(out, 0)
    for first in range(0, max_seqs, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        length = tl.maximum(tl.load(lengths + i, mask=i < count, other=0).to(tl.int64), 0)
        tl.store(out + 1 + i, (total + tl.cumsum(length)).to(tl.int32), mask=i < max_seqs)
        total += tl.sum(length)


def cu_seqlens_from_lengths(lengths: Tensor, max_seqs: int) -> Tensor:
    out = contract.fake_cu_seqlens_from_lengths(lengths, max_seqs)
    launch(prefix_sums_kernel, (1, 1, 1), (lengths.contiguous(), out, lengths.shape[0], max_seqs), (_ENTRIES,))
    return out


@triton.jit(do_not_specialize=["start", "length", "sequences"])
def slice_cu_seqlens_kernel(cu_seqlens, padded, valid_out, padded_out, start, length, sequences, ENTRIES: tl.constexpr):
    """Clip every sequence to rows [start, start + length), in one program."""
    low = start.to(tl.int64)
    high = low + length
    total = tl.zeros([], tl.int64)
    kind = valid_out.dtype.element_ty
    tl.store(valid_out, 0)
    for first in range(0, sequences + 1, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        inside = i < sequences
        begin = tl.load(padded + i, mask=i <= sequences, other=0).to(tl.int64)
        tl.store(padded_out + i, (tl.minimum(tl.maximum(begin, low), high) - low).to(kind), mask=i <= sequences)
        room = tl.load(padded + i + 1, mask=inside, other=0).to(tl.int64) - begin
        count = tl.load(cu_seqlens + i + 1, mask=inside, other=0).to(tl.int64) - tl.load(cu_seqlens + i, mask=inside, other=0)
        end = begin + tl.minimum(count, room)
        rows = tl.minimum(tl.maximum(end, low), high) - tl.minimum(tl.maximum(begin, low), high)
        rows = tl.where(inside, tl.maximum(rows, 0), 0)
        tl.store(valid_out + 1 + i, (total + tl.cumsum(rows)).to(kind), mask=inside)
        total += tl.sum(rows)


def slice_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> tuple[Tensor, Tensor]:
    valid, starts = contract.fake_slice_cu_seqlens(cu_seqlens, cu_seqlens_padded, start, length)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    args = (cu_seqlens, padded, valid, starts, start, length, cu_seqlens.shape[0] - 1)
    launch(slice_cu_seqlens_kernel, (1, 1, 1), args, (_ENTRIES,))
    return valid, starts
