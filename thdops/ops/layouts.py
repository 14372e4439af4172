"""Packed layouts that sample calls of every family share: small, nasty, and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The metadata of one packed batch. `total` is T; `padded` is None where sequences stand back to back."""

    cu_seqlens: Tensor
    padded: Tensor | None
    total: int


# name -> (valid lengths, padded lengths or None, rows before the first sequence, rows behind the last)
_LAYOUTS: dict[str, tuple[list[int], list[int] | None, int, int]] = {
    "full": ([5, 9, 2], None, 0, 0),
    "tail": ([5, 9, 2], None, 0, 7),
    "gaps and tail": ([3, 5, 1, 4], [4, 8, 2, 8], 0, 3),
    "empty sequences": ([0, 3, 0, 0, 6, 0], [2, 4, 0, 3, 6, 0], 0, 2),
    "rows before the first": ([4, 3], [5, 4], 3, 2),
    "no valid row": ([0, 0], [4, 3], 0, 1),
    "sentinels": ([7, 2] + [0] * 30, [8, 4] + [0] * 30, 0, 4),
    "no sequence": ([], None, 0, 5),
}

NAMES = tuple(_LAYOUTS)


def prefix_sums(lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32, first: int = 0) -> Tensor:
    """`[first, first + lengths[0], ...]`."""
    ends = [first]
    for length in lengths:
        ends.append(ends[-1] + length)
    return torch.tensor(ends, dtype=dtype, device=device)


def layout(name: str, device: torch.device, dtype: torch.dtype = torch.int32) -> Layout:
    """A layout by its name in `NAMES`."""
    lengths, padded, before, behind = _LAYOUTS[name]
    valid = prefix_sums(lengths, device, dtype)
    if padded is None:
        return Layout(valid, None, sum(lengths) + before + behind)
    return Layout(valid, prefix_sums(padded, device, dtype, before), sum(padded) + before + behind)


def others(base: Layout) -> list[Layout]:
    """Other contents for the same buffers: one long sequence, none at all, many short ones with gaps, empty ones in front.

    What a captured graph is replayed with; B, T, dtype and the presence of `padded` are `base`'s.
    """
    sequences = base.cu_seqlens.shape[0] - 1
    if sequences == 0:
        return []
    share = base.total // sequences
    valid_and_padded = {
        "one long": ([base.total] + [0] * (sequences - 1), [base.total] + [0] * (sequences - 1)),
        "none": ([0] * sequences, [0] * sequences),
        "even": ([max(share - 1, 0)] * sequences, [share] * sequences),
        "last only": ([0] * (sequences - 1) + [base.total // 2], [0] * (sequences - 1) + [base.total]),
    }
    device, dtype = base.cu_seqlens.device, base.cu_seqlens.dtype
    return [
        Layout(prefix_sums(valid, device, dtype), None if base.padded is None else prefix_sums(padded, device, dtype), base.total)
        for valid, padded in valid_and_padded.values()
    ]
