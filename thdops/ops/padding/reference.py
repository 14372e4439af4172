"""The padding ops in eager PyTorch: the specification.

T rows, B sequences. C = cu_seqlens, P = cu_seqlens_padded (C where that is None). Sequence b owns rows [P[b], P[b+1]); its valid
rows are the first C[b+1]-C[b] of them, at most P[b+1]-P[b]. Every other row is padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Of each of T rows: whether it is valid, the sequence it lies in (in [0, B), also where there is none), its offset in it."""

    valid: Tensor
    sequence: Tensor
    offset: Tensor


def locate_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Rows:
    """Find the sequence of every row; the kernels' search, written with `searchsorted`. int64."""
    valid_ends = cu_seqlens.long()
    starts = valid_ends if cu_seqlens_padded is None else cu_seqlens_padded.long()
    sequences = starts.shape[0] - 1
    rows = torch.arange(total_tokens, device=cu_seqlens.device)
    if sequences == 0:
        return Rows(torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows), torch.zeros_like(rows))
    found = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    sequence = found.clamp(max=sequences - 1)
    offset = rows - starts[sequence]
    length = torch.minimum(valid_ends.diff(), starts.diff())[sequence]
    valid = (found < sequences) & (offset >= 0) & (offset < length)
    return Rows(valid, sequence, offset)


def padding_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    return ~locate_rows(cu_seqlens, cu_seqlens_padded, total_tokens).valid


def sequence_ids(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    rows = locate_rows(cu_seqlens, cu_seqlens_padded, total_tokens)
    return torch.where(rows.valid, rows.sequence, -1).int()


def locate_positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int, cp_rank: int
) -> tuple[Tensor, Tensor]:
    """Of each of a rank's T rows: whether it is valid, and its position in the whole sequence (any number where it is not)."""
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    if cp_size == 1 or starts.shape[0] == 1:
        rows = locate_rows(cu_seqlens, cu_seqlens_padded, total_tokens)
        return rows.valid, rows.offset
    # Zigzag: a rank holds chunks cp_rank and 2W-1-cp_rank of each sequence's 2W, one behind the other.
    local = locate_rows(starts // cp_size, None, total_tokens)
    chunk = (starts.diff() // (2 * cp_size))[local.sequence]
    shift = torch.where(local.offset < chunk, cp_rank, 2 * (cp_size - 1) - cp_rank)
    position = local.offset + chunk * shift
    length = torch.minimum(cu_seqlens.long().diff(), starts.diff())[local.sequence]
    return local.valid & (position < length), position


def positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    valid, position = locate_positions(cu_seqlens, cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    # A bound that tables may rely on, whatever the metadata hold.
    return torch.where(valid, position, 0).clamp(0, max(total_tokens * cp_size - 1, 0)).int()


def zero_fill(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    padding = padding_mask(cu_seqlens, cu_seqlens_padded, x.shape[0])
    padding = padding.view(-1, *[1] * (x.dim() - 1))
    # Select, never multiply: padding may hold NaN. `where` serves fp8 on CPU, where masked_fill is missing.
    filled = torch.where(padding, torch.zeros((), dtype=x.dtype, device=x.device), x)
    # Through one dimension: a single row that is contiguous already would keep the odd strides of a transposed x.
    return filled.reshape(-1).view(x.shape)


def zero_fill_(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
    for i, x in enumerate(tensors):
        one_for_all = len(cu_seqlens) == 1
        cu = cu_seqlens[0 if one_for_all else i]
        padded = cu_seqlens_padded[0 if one_for_all else i] if cu_seqlens_padded else None
        x.copy_(zero_fill(x, cu, padded))


def compact_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> tuple[Tensor, Tensor]:
    padding = padding_mask(cu_seqlens, cu_seqlens_padded, total_tokens)
    index = torch.argsort(padding, stable=True)
    inverse = torch.argsort(index)
    return index.int(), inverse.int()


def cu_seqlens_from_positions(position_ids: Tensor, max_seqs: int) -> Tensor:
    total = position_ids.shape[0]
    rows = torch.arange(total, device=position_ids.device)
    inside = position_ids >= 0
    previous = torch.cat((position_ids[:1], position_ids[:-1]))
    starts = inside & ((rows == 0) | (position_ids != previous + 1))
    number = starts.cumsum(0) - 1  # of the sequence that a row starts or continues
    end = inside.sum().int()
    # One slot more, for every row that starts nothing and for the starts past the capacity.
    slot = torch.where(starts & (number < max_seqs), number, max_seqs + 1)
    boundaries = end.expand(max_seqs + 2).clone().scatter_(0, slot, rows.int())[: max_seqs + 1]
    return torch.where(starts.sum() > max_seqs, -1, boundaries).int()


def cu_seqlens_from_lengths(lengths: Tensor, max_seqs: int) -> Tensor:
    missing = lengths.new_zeros(max_seqs - lengths.shape[0])
    ends = torch.cat((lengths.clamp(min=0), missing)).cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).int()


def slice_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> tuple[Tensor, Tensor]:
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    valid_length = torch.minimum(cu_seqlens.long().diff(), starts.diff())
    low = starts[:-1].clamp(start, start + length)
    high = (starts[:-1] + valid_length).clamp(start, start + length)
    valid = torch.nn.functional.pad((high - low).clamp(min=0).cumsum(0), (1, 0))
    padded = starts.clamp(start, start + length) - start
    return valid.to(cu_seqlens.dtype), padded.to(cu_seqlens.dtype)
