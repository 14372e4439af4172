"""`varlen_attn` of `torch.nn.attention.varlen`, served by `thdops.attention`.

Same name, arguments and results as in torch 2.13, so that an import is all that changes. What is served beyond it: CPU tensors,
fp32, values narrower or wider than keys, gradients of the LSE and with `seqused_k`, and rows behind the last sequence, which come
back 0. What is not: paged caches.

T rows (Tq of queries, Tk of keys), B sequences, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from meta_kernels.contract import check_integers, check_tensors, refusal
from thdops.integrations.bottom_right import attend

__all__ = ["AuxRequest", "varlen_attn"]

_OP = "varlen_attn"


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each sequence, aligned bottom-right, called as torch's function.

    Args:
        query: `[Tq, Hq, D]` bf16, fp16 or fp32 (fp64 on CPU), any strides.
        key, value: `[Tk, Hkv, D]`; Hq is a multiple of Hkv. D is a multiple of 8 from 16 to 256.
        cu_seq_q: int32 or int64 `[B+1]`, prefix sums of the lengths.
        cu_seq_k: the same for keys; the same tensor, or None, is self-attention.
        max_q, max_k: at least every length, as Python ints. Only backends that need them look at them.
        return_aux: with `lse=True`, also return the LSE.
        scale: None is D**-0.5.
        window_size: (left, right) around the diagonal, which is i + n_k - n_q for query i of n_q; (-1, 0) is causal.
        enable_gqa: of no effect. Heads in groups are served either way, as in torch before it had this argument.
        seqused_k: int32 or int64 `[B]`: only so many keys of each sequence count, and `cu_seq_k` says where sequences start.
        block_table: None.
        num_splits: of no effect. Keys are never split by what else is in the batch.

    Returns:
        out `[Tq, Hq, D]`, or (out, lse fp32 `[Hq, Tq]`). Rows of no sequence, and rows that see no key, have out 0 and an LSE of
        -inf (torch's is +inf where no key is seen).

    Raises:
        ValueError, TypeError: what is not served, and everything that `thdops.attention` refuses.
    """
    check_tensors(
        _OP, ("cu_seq_k", "seqused_k"), query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, seqused_k=seqused_k
    )
    check_integers(_OP, ("num_splits",), max_q=max_q, max_k=max_k, num_splits=num_splits)
    if block_table is not None:
        raise refusal(_OP, "block_table", "be None", f"a {type(block_table).__name__}", "paged caches are not served")
    options: dict[str, Any] = {"scale": scale, "window": tuple(window_size), "max_seqlen_q": max_q, "max_seqlen_kv": max_k}
    keys = cu_seq_q if cu_seq_k is None else cu_seq_k
    if seqused_k is not None:
        options["cu_seqlens_kv_padded"] = keys
        keys = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).to(keys.dtype)
    out, lse = attend(query, key, value, cu_seq_q, keys, **options)
    return (out, lse) if return_aux is not None and return_aux.lse else out
