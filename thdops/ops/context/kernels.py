"""Triton kernels and launchers of the context-parallel row ops; `reference.py` says what segments are.

T rows, B sequences, W shares (one per rank; two for halves), n = T / W rows of a share, P = cu_seqlens_padded.

Rows may be any dimension: a tensor is [lanes, rows, width] here, [T, H, D] has one lane and an LSE [H, T] has H of width 1. Each op
that moves rows looks up, for every row of its result, where that comes from: so all of it is written once, whatever stands in P.
Rows are bytes: every dtype is served, and a NaN keeps its payload. Widths and strides reach the kernel in units of UNIT elements,
16 bytes where everything is aligned to that: a product with a constant tells the compiler so, without specialising it for a value.
"""

from __future__ import annotations

from math import gcd, prod

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import context as contract
from meta_kernels.context import HALVES
from thdops.ops.launch import launch
from thdops.ops.padding.kernels import count_at_most

# --- whose row is it -----------------------------------------------------------------------------------------------------------


@triton.jit
def find_segments(padded, sequences, total, rows, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """(start, end, whether it is a sequence) of the segment that each of [ROWS] rows of the whole buffer lies in."""
    number = count_at_most(padded, None, 0, sequences + 1, rows, ROWS, WAYS)  # [ROWS], in [0, B+1]
    start = tl.load(padded + number - 1, mask=number > 0, other=0).to(tl.int64)
    end = tl.load(padded + number, mask=number <= sequences, other=0).to(tl.int64)
    end = tl.where(number <= sequences, end, total)
    start, end = tl.minimum(tl.maximum(start, 0), total), tl.minimum(tl.maximum(end, 0), total)
    return start, end, (number > 0) & (number <= sequences)


@triton.jit
def rows_of_share(
    padded, sequences, total, shares, share, local, ZIGZAG: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """The rows of the whole buffer that are rows `local` of `share`, [ROWS], in [0, T).

    floor(P[b] / W) <= local is the same as P[b] <= local * W + W - 1, so the search needs no divided copy of P.
    Example: P = [0, 8], W = 2, share 1, zigzag: local 0 1 2 3 are rows 2 3 4 5.
    """
    start, end, of_sequence = find_segments(padded, sequences, total, local * shares + shares - 1, ROWS, WAYS)
    size = (end - start) // shares
    offset = local - start // shares
    before = share * size
    if ZIGZAG:
        chunk = size // 2
        mirrored = chunk * tl.where(offset < chunk, share, 2 * (shares - 1) - share)
        before = tl.where(of_sequence, mirrored, before)
    return tl.minimum(tl.maximum(start + before + offset, 0), total - 1)


@triton.jit
def shares_of_rows(padded, sequences, total, shares, rows, ZIGZAG: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """(the share that has it, in [0, W), and its number there, in [0, n)) of each of [ROWS] rows of the whole buffer.

    Example: P = [0, 8], W = 2, zigzag: row 6 is number 2 of share 0.
    """
    start, end, of_sequence = find_segments(padded, sequences, total, rows, ROWS, WAYS)
    size = (end - start) // shares
    offset = rows - start
    share = offset // tl.maximum(size, 1)
    local = offset - share * size
    if ZIGZAG:
        chunk = size // 2
        number = offset // tl.maximum(chunk, 1)
        second = number >= shares
        share = tl.where(of_sequence, tl.where(second, 2 * shares - 1 - number, number), share)
        local = tl.where(of_sequence, offset - number * chunk + tl.where(second, chunk, 0), local)
    local += start // shares
    return tl.minimum(tl.maximum(share, 0), shares - 1), tl.minimum(tl.maximum(local, 0), total // shares - 1)


# --- metadata ------------------------------------------------------------------------------------------------------------------

_ROWS = 128  # one for each thread
_ENTRIES, _SCANNING = 512, 16  # entries of a cu_seqlens a program scans at a time, one for each thread of so many warps


@triton.jit(do_not_specialize=["rows", "sequences", "shares", "share"])
def partition_indices_kernel(
    padded, out, rows, sequences, shares, share, ZIGZAG: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """[ROWS] rows of a share."""
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = rows.to(tl.int64) * shares
    row = rows_of_share(padded, sequences, total, shares, share, local, ZIGZAG, ROWS, WAYS)
    tl.store(out + local, row.to(tl.int32), mask=local < rows)


def partition_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, partition: str = "zigzag"
) -> Tensor:
    out = contract.fake_partition_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank, partition)
    rows = out.shape[0]
    args = (cu_seqlens_padded, out, rows, cu_seqlens_padded.shape[0] - 1, cp_size, cp_rank)
    launch(partition_indices_kernel, (triton.cdiv(rows, _ROWS), 1, 1), args, (partition == "zigzag", _ROWS, 8))
    return out


@triton.jit(do_not_specialize=["sequences", "chunks", "first_chunk", "second_chunk", "pieces"])
def local_cu_seqlens_kernel(
    cu_seqlens, padded, valid_out, padded_out, sequences, chunks, first_chunk, second_chunk, pieces, ENTRIES: tl.constexpr
):  # fmt: skip
    """Valid rows of one or two (None: one) of every sequence's chunks, and P / pieces, in one program."""
    total = tl.zeros([], tl.int64)
    kind = valid_out.dtype.element_ty
    tl.store(valid_out, 0)
    for first in range(0, sequences + 1, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        inside = i < sequences
        begin = tl.load(padded + i, mask=i <= sequences, other=0).to(tl.int64)
        tl.store(padded_out + i, (begin // pieces).to(kind), mask=i <= sequences)
        owned = tl.maximum(tl.load(padded + i + 1, mask=inside, other=0).to(tl.int64) - begin, 0)
        length = tl.load(cu_seqlens + i + 1, mask=inside, other=0).to(tl.int64) - tl.load(cu_seqlens + i, mask=inside, other=0)
        length = tl.minimum(length, owned)
        chunk = owned // chunks
        rows = tl.minimum(tl.maximum(length - first_chunk * chunk, 0), chunk)
        if second_chunk is not None:
            rows += tl.minimum(tl.maximum(length - second_chunk * chunk, 0), chunk)
        rows = tl.where(inside, rows, 0)
        tl.store(valid_out + 1 + i, (total + tl.cumsum(rows)).to(kind), mask=inside)
        total += tl.sum(rows)


def local_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    half: str | None = None,
    partition: str = "zigzag",
) -> tuple[Tensor, Tensor]:
    valid, starts = contract.fake_local_cu_seqlens(cu_seqlens, cu_seqlens_padded, cp_size, cp_rank, half, partition)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if partition == "zigzag" else (2 * cp_rank, 2 * cp_rank + 1)
    wanted = chunks if half is None else (chunks[HALVES.index(half)], None)
    pieces = cp_size if half is None else 2 * cp_size
    args = (cu_seqlens, padded, valid, starts, cu_seqlens.shape[0] - 1, 2 * cp_size, *wanted, pieces)
    launch(local_cu_seqlens_kernel, (1, 1, 1), args, (_ENTRIES,), _SCANNING)
    return valid, starts


@triton.jit(do_not_specialize=["sequences", "row_entries", "shares"])
def all_local_cu_seqlens_kernel(
    cu_seqlens, padded, valid_out, padded_out, sequences, row_entries, shares, ZIGZAG: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """One program for each row of the result: of a rank, both chunks of every sequence, the first, or the second."""
    share, which = tl.program_id(0) // 3, tl.program_id(0) % 3
    first_chunk = share if ZIGZAG else 2 * share
    second_chunk = 2 * shares - 1 - share if ZIGZAG else 2 * share + 1
    row = valid_out + tl.program_id(0).to(tl.int64) * row_entries
    total = tl.zeros([], tl.int64)
    kind = valid_out.dtype.element_ty
    tl.store(row, 0)
    for first in range(0, sequences + 1, ENTRIES):
        i = first + tl.arange(0, ENTRIES)
        inside = i < sequences
        begin = tl.load(padded + i, mask=i <= sequences, other=0).to(tl.int64)
        end = tl.load(padded + i + 1, mask=inside, other=0).to(tl.int64)
        own = begin // shares
        tl.store(padded_out + i, own.to(kind), mask=i <= tl.where(tl.program_id(0) == 0, sequences, -1))
        middle = own + tl.where(inside, (end // shares - own) // 2, 0)
        tl.store(padded_out + row_entries + i, middle.to(kind), mask=i <= tl.where(tl.program_id(0) == 1, sequences, -1))
        owned = tl.maximum(end - begin, 0)
        length = tl.load(cu_seqlens + i + 1, mask=inside, other=0).to(tl.int64) - tl.load(cu_seqlens + i, mask=inside, other=0)
        length = tl.minimum(length, owned)
        chunk = owned // (2 * shares)
        rows = tl.where(which < 2, tl.minimum(tl.maximum(length - first_chunk * chunk, 0), chunk), 0)
        rows += tl.where(which != 1, tl.minimum(tl.maximum(length - second_chunk * chunk, 0), chunk), 0)
        rows = tl.where(inside, rows, 0)
        tl.store(row + 1 + i, (total + tl.cumsum(rows)).to(kind), mask=inside)
        total += tl.sum(rows)


def all_local_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str) -> tuple[Tensor, Tensor]:
    """What `local_cu_seqlens` gives for every rank, in one launch: valid `[W, 3, B+1]` of all its rows, first and second halves.

    And where they stand among all of its rows, `[2, B+1]`: all of them and the first halves, the second halves.
    """
    entries = cu_seqlens.shape[0]
    row = triton.cdiv(entries, 4) * 4  # so that every row is aligned alike, which kernels are compiled for
    valid, starts = cu_seqlens.new_empty(cp_size, 3, row), cu_seqlens.new_empty(2, row)
    args = (cu_seqlens, cu_seqlens_padded, valid, starts, entries - 1, row, cp_size)
    launch(all_local_cu_seqlens_kernel, (3 * cp_size, 1, 1), args, (partition == "zigzag", _ENTRIES), _SCANNING)
    return valid[..., :entries], starts[..., :entries]


# --- rows ----------------------------------------------------------------------------------------------------------------------

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_MOVED = 1024  # elements of at most 8 bytes that a program moves of one lane
_MOST_R = 128  # rows of a program where rows are narrow
_MOST = 4096  # elements of all its lanes


@triton.jit(
    do_not_specialize=[
        "source", "target", "sequences", "total", "shares", "share", "lanes", "rows", "width", "lane_stride", "row_stride",
    ]
)  # fmt: skip
def move_rows_kernel(
    source, target, padded, sequences, total, shares, share, lanes, rows, width, lane_stride, row_stride,
    SPLIT: tl.constexpr, ZIGZAG: tl.constexpr, DTYPE: tl.constexpr, UNIT: tl.constexpr,
    LANES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, LANES, BLOCK_W] of target. SPLIT: from the whole buffer to shares of it; else from shares to the whole.

    With a `share`, there is that one alone, and rows of the whole buffer that are another's become zero; None: all W stand one
    after the other. A row is looked up once for all LANES. Neighbouring programs have neighbouring columns.
    """
    width, row_stride, lane_stride = width.to(tl.int64) * UNIT, row_stride.to(tl.int64) * UNIT, lane_stride.to(tl.int64) * UNIT
    total = total.to(tl.int64)
    column_blocks, row_blocks = tl.cdiv(width, BLOCK_W), tl.cdiv(rows, BLOCK_R)
    block = tl.program_id(0).to(tl.int64)
    columns = block % column_blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    r = block // column_blocks % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = block // column_blocks // row_blocks * LANES + tl.arange(0, LANES)
    n = total // shares
    exists = r < rows
    if SPLIT:
        owner = r // n if share is None else share
        local = r - owner * n if share is None else r
        found = rows_of_share(padded, sequences, total, shares, owner, local, ZIGZAG, BLOCK_R, WAYS)
        wanted = exists
    else:
        owner, local = shares_of_rows(padded, sequences, total, shares, r, ZIGZAG, BLOCK_R, WAYS)
        found = owner * n + local if share is None else local
        wanted = exists if share is None else exists & (owner == share)

    read = source.to(tl.int64).to(tl.pointer_type(DTYPE))
    write = target.to(tl.int64).to(tl.pointer_type(DTYPE))
    if UNIT == 2:
        read, write = tl.multiple_of(read, 16), tl.multiple_of(write, 16)
    read += (found * row_stride)[:, None, None] + (lane * lane_stride)[None, :, None] + columns[None, None, :]
    write += (r * width)[:, None, None] + (lane * (rows * width))[None, :, None] + columns[None, None, :]
    inside = (lane < lanes)[None, :, None] & (columns < width)[None, None, :]
    value = tl.load(read, mask=wanted[:, None, None] & inside, other=0)
    tl.store(write, value, mask=exists[:, None, None] & inside)


def _move_rows(
    x: Tensor, out: Tensor, dim: int, cu_seqlens_padded: Tensor, shares: int, share: int | None, split: bool, zigzag: bool
) -> Tensor:
    """Fill `out`, contiguous, with rows of `x`; the larger one has the rows of the whole buffer."""
    if out.numel() == 0:
        return out
    lanes, width = prod(x.shape[: dim % x.dim()]), prod(x.shape[dim % x.dim() + 1 :])
    x = x.reshape(lanes, x.shape[dim], width)  # a view where one stride leads from lane to lane, and one from column to column
    if width > 1 and x.stride(2) != 1:
        x = x.contiguous()
    rows, total = out.shape[dim], max(out.shape[dim], x.shape[1])
    lane_stride, row_stride = x.stride(0) * x.itemsize, x.stride(1) * x.itemsize
    width *= x.itemsize
    aligned = gcd(16, x.data_ptr(), out.data_ptr(), lane_stride, row_stride, width)
    size = min(aligned, 8)
    block_w = min(triton.next_power_of_2(width // size), _MOVED)
    block_r = min(_MOVED // block_w, _MOST_R)
    block_lanes = min(triton.next_power_of_2(lanes), _MOST // (block_r * block_w))
    launch(
        move_rows_kernel,
        (triton.cdiv(lanes, block_lanes) * triton.cdiv(rows, block_r) * triton.cdiv(width // size, block_w), 1, 1),
        (
            x.data_ptr(), out.data_ptr(), cu_seqlens_padded, cu_seqlens_padded.shape[0] - 1, total, shares, share, lanes, rows,
            width // aligned, lane_stride // aligned, row_stride // aligned,
        ),
        (split, zigzag, _INTEGERS[size], aligned // size, block_lanes, block_r, block_w, 32 if block_r <= 16 else 8),
    )  # fmt: skip
    return out


def to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    out = contract.fake_to_rank_order(x, cu_seqlens_padded, cp_size, partition)
    return _move_rows(x, out, 0, cu_seqlens_padded, cp_size, None, True, partition == "zigzag")


def from_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    out = contract.fake_from_rank_order(x, cu_seqlens_padded, cp_size, partition)
    return _move_rows(x, out, 0, cu_seqlens_padded, cp_size, None, False, partition == "zigzag")


def half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    out = contract.fake_half(x, cu_seqlens_padded, which, dim)
    return _move_rows(x, out, dim, cu_seqlens_padded, 2, HALVES.index(which), True, False)


def from_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    out = contract.fake_from_half(x, cu_seqlens_padded, which, dim)
    return _move_rows(x, out, dim, cu_seqlens_padded, 2, HALVES.index(which), False, False)
