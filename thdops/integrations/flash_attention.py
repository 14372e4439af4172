"""`flash_attn_varlen_func` of flash-attn 2.x, served by `thdops.attention`.

Same name, order of arguments, defaults and results, so that an import is all that changes; flash-attn itself is not imported. What
is served beyond it: CPU tensors, fp32, values narrower or wider than keys, a gradient of the LSE, compiled functions and CUDA
graphs without host syncs, and rows behind the last sequence, which come back 0. What is not: dropout, ALiBi, paged caches.

T rows (Tq of queries, Tk of keys), B sequences, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from meta_kernels.contract import check_integers, check_kinds, check_tensors, refusal
from thdops.integrations.bottom_right import attend

__all__ = ["flash_attn_varlen_func"]

_OP = "flash_attn_varlen_func"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention within each sequence, aligned bottom-right, called as flash-attn's function.

    Args:
        q: `[Tq, Hq, D]` bf16, fp16 or fp32 (fp64 on CPU), any strides.
        k, v: `[Tk, Hkv, D]`; Hq is a multiple of Hkv. D is at most 256; what is no multiple of 8 from 16 on is padded with zeros.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[B+1]`, prefix sums of the lengths. For self-attention give one tensor for both.
        max_seqlen_q, max_seqlen_k: at least every length, as Python ints. Only backends that need them look at them.
        dropout_p: 0.0.
        softmax_scale: None is D**-0.5.
        causal: query i of n_q sees keys up to i + n_k - n_q.
        window_size: (left, right) around that diagonal; -1 is unbounded. With `causal` right is 0.
        softcap: c > 0 replaces each logit s by c * tanh(s / c).
        alibi_slopes, block_table: None.
        deterministic: the backward repeats bitwise; so it does under `torch.use_deterministic_algorithms(True)`.
        return_attn_probs: also return the LSE.

    Returns:
        out `[Tq, Hq, D]`, or with `return_attn_probs` a tuple (out, lse fp32 `[Hq, Tq]`, None): the third, flash-attn's pattern of
        dropout, needs dropout. Where flash-attn reports an LSE of +inf, for rows that see no key, it is -inf, as on rows of no
        sequence; out is 0 on both.

    Raises:
        ValueError, TypeError: what is not served, and everything that `thdops.attention` refuses.
    """
    check_tensors(_OP, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_integers(_OP, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    check_kinds(_OP, bool, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if dropout_p != 0:
        raise refusal(_OP, "dropout_p", "be 0.0", dropout_p, "dropout in attention is not served: drop values elsewhere")
    for name, value in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if value is not None:
            raise refusal(_OP, name, "be None", f"a {type(value).__name__}", "neither ALiBi nor paged caches are served")
    out, lse = attend(
        _widened(q),
        _widened(k),
        _widened(v),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=tuple(window_size),
        softcap=softcap,
        deterministic=deterministic or None,
    )
    out = out[..., : v.shape[-1]]
    return (out, lse, None) if return_attn_probs else out


def _widened(x: Tensor) -> Tensor:
    """With a head dim that attention takes. Zeros change no product, and columns of zeros come out of values as they went in."""
    width = x.shape[-1]
    missing = max(16 - width, -width % 8)
    return pad(x, (0, missing)) if missing > 0 else x
