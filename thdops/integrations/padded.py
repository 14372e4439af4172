"""A padded batch as a packed one: the rows of `[B, S]` behind one another, of which some hold a token.

B rows of the batch, S columns; T = B * S rows of the packed batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def sequences_of_tokens(tokens: Tensor) -> Tensor:
    """int32 `[2, B+1]`, cu_seqlens and cu_seqlens_padded, of a mask bool `[B, S]` that is True on tokens. No host sync.

    The tokens of a row are one run, which may stand anywhere: sequence b starts at row b * S + (the padding on its left), so that
    what follows its tokens up to the next sequence's start is its gap. Where a row has several runs, every entry is -1, so that all
    rows count as padding.
    """
    batch_size, length = tokens.shape
    starts_here = tokens & ~pad(tokens, (1, 0))[:, :-1]
    broken = (starts_here.sum(1) > 1).any()
    left = (tokens.cumsum(1) == 0).sum(1)
    row = torch.arange(batch_size + 1, device=tokens.device) * length
    cu_seqlens = pad(tokens.sum(1).cumsum(0), (1, 0))
    # A row of padding alone has its start at its end, where the next row may start too: offsets never decrease.
    padded = row + pad(left, (0, 1))
    return torch.where(broken, -1, torch.stack((cu_seqlens, padded))).int()


def has_holes(sequences: Tensor) -> bool:
    """Whether `sequences_of_tokens` found several runs in a row, where that can be told without a sync: eagerly, on a CPU."""
    return sequences.device.type == "cpu" and not torch.compiler.is_compiling() and bool(sequences[0, 0] < 0)
