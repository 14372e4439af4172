"""The context-parallel row ops in eager PyTorch: the specification.

T rows, B sequences, W ranks (cp_size). P = cu_seqlens_padded cuts the rows into B+2 segments: those before P[0], the B sequences,
and those from P[B] on. A rank has 1/W of each segment, its share, in the same order: its own rows are cut at P / W. Of a sequence
that is two of 2W chunks (zigzag), else, and always of the two outer segments, one of W pieces:

    P = [0, 8], W = 2, zigzag:    rank 0 has rows 0 1 6 7, rank 1 has 2 3 4 5

The halves of a rank's rows are the contiguous shares of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.context import HALVES


class Segments(NamedTuple):
    """Of each row: where its segment starts and ends, and whether that is a sequence. int64."""

    start: Tensor
    end: Tensor
    of_sequence: Tensor


def _find_segments(cu_seqlens_padded: Tensor, total: int, rows: Tensor) -> Segments:
    """The segments of rows of the whole buffer. Offsets outside [0, T], which no legal metadata have, count as 0 or T."""
    outer = cu_seqlens_padded.new_tensor([0, total], dtype=torch.int64)
    ends = torch.cat((outer[:1], cu_seqlens_padded.long().clamp(0, total), outer[1:]))
    number = torch.searchsorted(ends[1:-1].contiguous(), rows, right=True)
    return Segments(ends[number], ends[number + 1], (number > 0) & (number < cu_seqlens_padded.shape[0]))


def rows_of_share(
    cu_seqlens_padded: Tensor, total: int, cp_size: int, cp_rank: int | Tensor, partition: str, local: Tensor
) -> Tensor:
    """The rows of the whole buffer that are rows `local` of rank `cp_rank`."""
    segment = _find_segments(cu_seqlens_padded, total, local * cp_size + cp_size - 1)  # P / W <= local, without a divided P
    size = (segment.end - segment.start) // cp_size
    offset = local - segment.start // cp_size
    row = segment.start + cp_rank * size + offset
    if partition == "zigzag":
        chunk = size // 2
        before = torch.where(offset < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank)
        row = torch.where(segment.of_sequence, segment.start + before * chunk + offset, row)
    return row.clamp(0, max(total - 1, 0))


def shares_of_rows(cu_seqlens_padded: Tensor, total: int, cp_size: int, partition: str) -> tuple[Tensor, Tensor]:
    """(the rank that has it, its number among that rank's rows) of every row of the whole buffer."""
    rows = torch.arange(total, device=cu_seqlens_padded.device)
    segment = _find_segments(cu_seqlens_padded, total, rows)
    size = (segment.end - segment.start) // cp_size
    offset = rows - segment.start
    rank = offset // size.clamp(min=1)
    local = segment.start // cp_size + offset - rank * size
    if partition == "zigzag":
        chunk = size // 2
        number = offset // chunk.clamp(min=1)
        mirrored = number >= cp_size
        zigzag_rank = torch.where(mirrored, 2 * cp_size - 1 - number, number)
        zigzag_local = segment.start // cp_size + offset - number * chunk + torch.where(mirrored, chunk, 0)
        rank = torch.where(segment.of_sequence, zigzag_rank, rank)
        local = torch.where(segment.of_sequence, zigzag_local, local)
    return rank.clamp(0, cp_size - 1), local.clamp(0, max(total // cp_size - 1, 0))


# --- metadata ------------------------------------------------------------------------------------------------------------------


def partition_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, partition: str = "zigzag"
) -> Tensor:
    local = torch.arange(total_tokens // cp_size, device=cu_seqlens_padded.device)
    return rows_of_share(cu_seqlens_padded, total_tokens, cp_size, cp_rank, partition, local).int()


def local_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    half: str | None = None,
    partition: str = "zigzag",
) -> tuple[Tensor, Tensor]:
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    chunk = starts.diff().clamp(min=0) // (2 * cp_size)
    length = torch.minimum(cu_seqlens.long().diff(), starts.diff())
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if partition == "zigzag" else (2 * cp_rank, 2 * cp_rank + 1)
    counts = {name: (length - number * chunk).clamp(min=0).minimum(chunk) for name, number in zip(HALVES, chunks, strict=True)}
    count = counts["first"] + counts["second"] if half is None else counts[half]
    valid = torch.nn.functional.pad(count.cumsum(0), (1, 0))
    padded = starts // (cp_size if half is None else 2 * cp_size)
    return valid.to(cu_seqlens.dtype), padded.to(cu_seqlens.dtype)


# --- rows ----------------------------------------------------------------------------------------------------------------------


def _select(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    """Rows `rows` of dimension `dim`, contiguous (through one dimension: a single row would keep odd strides)."""
    selected = x.index_select(dim, rows).contiguous()
    return selected.reshape(-1).view(selected.shape)


def to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    total = x.shape[0]
    place = torch.arange(total, device=x.device)
    rank, local = place // max(total // cp_size, 1), place % max(total // cp_size, 1)
    return _select(x, 0, rows_of_share(cu_seqlens_padded, total, cp_size, rank, partition, local))


def from_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    rank, local = shares_of_rows(cu_seqlens_padded, x.shape[0], cp_size, partition)
    return _select(x, 0, rank * (x.shape[0] // cp_size) + local)


def half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    total = x.shape[dim]
    local = torch.arange(total // 2, device=x.device)
    return _select(x, dim, rows_of_share(cu_seqlens_padded, total, 2, HALVES.index(which), "contiguous", local))


def from_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    rank, local = shares_of_rows(cu_seqlens_padded, 2 * x.shape[dim], 2, "contiguous")
    along = [1] * x.dim()
    along[dim] = -1
    kept = (rank == HALVES.index(which)).view(along)
    # Select, never multiply: the rows of the other half must not meet a NaN. `where` serves fp8 on CPU.
    return torch.where(kept, _select(x, dim, local), torch.zeros((), dtype=x.dtype, device=x.device))
