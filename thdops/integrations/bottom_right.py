"""What the drop-ins for FlashAttention and for torch's varlen attention share: diagonals end in the bottom right corner."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thdops.ops.attention_thd.op import attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `thdops.attention`. One tensor given for both sides is self-attention, which more backends serve, faster."""
    own = cu_seqlens_k is not cu_seqlens_q or q.shape[0] != k.shape[0]
    keys = cu_seqlens_k if own else None
    return attention(q, k, v, cu_seqlens_q, keys, causal_alignment="bottom_right", return_lse=True, **options)
