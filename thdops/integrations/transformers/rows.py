"""Which rows of a batch are which sequence: the metadata of packed ops from what a model of transformers is called with.

B rows of the batch, S columns; T = B * S rows of the flattened batch, N sequences (N = B unless packed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import kind_of, refusal, shape_of
from thdops.integrations.padded import has_holes, sequences_of_tokens
from thdops.ops.padding.op import cu_seqlens_from_positions

OP = "thdops for transformers"

_FAR = 1 << 40  # between the positions of two rows of a batch: no position continues that of another row


def sequences_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> Tensor | None:
    """What the mask interface calls, once a forward: int32 `[2, B+1]`, cu_seqlens and cu_seqlens_padded; None without a mask.

    `attention_mask` is bool `[B, S]`, True on tokens.
    """
    if kv_length != q_length:
        got = f"{q_length} queries and {kv_length} keys"
        raise refusal(OP, "past_key_values", "be empty (queries and keys are the same rows)", got, "pass use_cache=False")
    pattern = getattr(mask_function, "__name__", "")
    chunk = getattr(settings.get("config"), "attention_chunk_size", None)
    if settings.get("use_vmap") or pattern == "or_mask" or (chunk is not None and settings.get("local_size") == chunk):
        got = "a pattern of the model's own (blocks, chunks, an overlay)"
        raise refusal(OP, "the mask", "be causal, windowed or full", got, "use another attn_implementation")
    if attention_mask is None:
        return None
    return sequences_of_tokens(attention_mask)


def sequences(batch_size: int, length: int, device: torch.device, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """(cu_seqlens, cu_seqlens_padded or None), `[N+1]`, of a batch `[B, S]` from the keywords that a layer is called with.

    `batch["attention_mask"]` is what `sequences_of_mask` made of a mask.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    cu_seqlens, padded = batch.get("cu_seq_lens_q"), batch.get("cu_seqlens_padded")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (2, batch_size + 1) or mask.dtype != torch.int32):
        got = f"shape {shape_of(mask)}" if isinstance(mask, Tensor) else kind_of(mask)
        raise refusal(OP, "attention_mask", "be 2-D [B, S]", got, "say who sees whom with cu_seq_lens_q or position_ids")
    if cu_seqlens is not None:
        _check_packed(cu_seqlens, batch.get("cu_seq_lens_k"), batch_size)
        return cu_seqlens, padded
    if padded is not None:
        raise refusal(OP, "cu_seqlens_padded", "come with cu_seq_lens_q", "it alone", "pass both")
    if mask is not None:
        if has_holes(mask):
            raise refusal(OP, "attention_mask", "have its tokens side by side in each row", "a hole", "pad left or right only")
        return mask[0], mask[1]
    if positions is None or positions.shape[0] != batch_size:
        # One row of positions for all rows of a batch is what a model makes where it is given none.
        return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length, None
    if batch_size > 1:
        positions = positions.long() + _FAR * torch.arange(batch_size, device=device)[:, None]
    most = batch.get("max_seqs")
    return cu_seqlens_from_positions(positions.flatten(), batch_size * length if most is None else most), None


def _check_packed(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, batch_size: int) -> None:
    if batch_size != 1:
        raise refusal(OP, "input_ids", "be [1, T] beside cu_seq_lens_q", f"{batch_size} rows", "flatten the batch")
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens.shape:
        rule = f"be cu_seq_lens_q ({shape_of(cu_seqlens)}): a row is a query and a key"
        raise refusal(OP, "cu_seq_lens_k", rule, f"shape {shape_of(cu_seqlens_k)}", "pass the same offsets")
