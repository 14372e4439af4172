"""`thdops.attention` as transformers' attention interface calls it.

B rows of the batch, S columns, T = B * S rows, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meta_kernels.contract import kind_of, refusal
from thdops.integrations.transformers.rows import OP, sequences
from thdops.ops.attention_thd.op import attention


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **batch: Any,
) -> tuple[Tensor, None]:
    """Attention within each sequence of the batch; called by a model's attention module, by the library's names.

    Args:
        module: the attention module; its `is_causal` counts where the argument is None.
        query, key, value: `[B, Hq or Hkv, S, D]`; as models lay them out, their rows `[T, H, D]` are views.
        attention_mask: what `sequences_of_mask` made of the batch's mask, or None.
        dropout: 0.0.
        scaling: None is D**-0.5.
        sliding_window: w; a causal query sees w keys, its own included; any other w keys on each side and its own.
        softcap: None is none.
        s_aux: `[Hq]`, the logit of a sink in each head; differentiable.
        batch: the metadata that `register` describes; other keywords are not looked at.

    Returns:
        (out `[B, S, Hq, D]`, +0.0 on padding rows; None for the weights, which are never formed).

    Raises:
        ValueError, TypeError: what `register` says is refused, and everything that `thdops.attention` refuses.
    """
    rows, length = query.shape[0], query.shape[2]
    if key.shape[2] != length:
        got = f"{length} queries and {key.shape[2]} keys"
        raise refusal(OP, "past_key_values", "be empty (queries and keys are the same rows)", got, "pass use_cache=False")
    bias = batch.get("position_bias")
    if bias is not None:
        raise refusal(OP, "position_bias", "be None", kind_of(bias), "use another attn_implementation")
    cu_seqlens, padded = sequences(rows, length, query.device, {**batch, "attention_mask": attention_mask})
    longest = batch.get("max_length_q")
    longest = longest if isinstance(longest, int) else None  # a tensor would have to be read on the host
    causal = _is_causal(module) if is_causal is None else is_causal
    out = attention(
        _rows(query),
        _rows(key),
        _rows(value),
        cu_seqlens,
        cu_seqlens_q_padded=padded,
        causal=causal,
        window=_window(sliding_window, causal),
        scale=scaling,
        softmax="vanilla" if s_aux is None else "learnable",
        sink=None if s_aux is None else s_aux.float(),
        softcap=softcap or 0.0,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        dropout_p=dropout,
    )
    return out.unflatten(0, (rows, length)), None


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _is_causal(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))


def _window(width: int | None, causal: bool) -> tuple[int, int]:
    """In the library a causal window of w counts the query's own key, a window to both sides does not."""
    if width is None:
        return -1, -1
    return (width - 1, 0) if causal else (width, width)
