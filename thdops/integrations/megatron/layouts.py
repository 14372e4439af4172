"""What stands in the tensors of each of Megatron's layouts, as rows that `thdops.attention` takes: by strides, not by copies.

T rows, B sequences, S rows of each, H heads (Hq of queries, Hkv of keys), D head dim, W context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.contract import check_integers, check_rank, check_tensors, kind_of, refusal, shape_of
from thdops.integrations.padded import has_holes, sequences_of_tokens

OP = "DotProductAttention"

_NAMES = {"thd": "[T, H, D]", "sbhd": "[S, B, H, D]", "bshd": "[B, S, H, D]"}
_BATCH = {"sbhd": 1, "bshd": 0}
"""Along which dimension the sequences of a batch stand."""


class Mask(NamedTuple):
    """What a type of mask says: the diagonal, and whether sequences of a batch may be shorter than S."""

    causal: bool
    padding: bool
    alignment: str


_LEFT, _RIGHT = "top_left", "bottom_right"
_MASKS = {
    "no_mask": Mask(False, False, _RIGHT),  # where the diagonal of a window ends
    "padding": Mask(False, True, _RIGHT),
    "causal": Mask(True, False, _LEFT),
    "padding_causal": Mask(True, True, _LEFT),
    "causal_padding": Mask(True, True, _LEFT),
    "causal_bottom_right": Mask(True, False, _RIGHT),
    "padding_causal_bottom_right": Mask(True, True, _RIGHT),
}


def mask_of(kind: Any) -> Mask:
    """From a member of an enum, by its name, or from TransformerEngine's string."""
    name = kind if isinstance(kind, str) else getattr(kind, "name", None)
    mask = _MASKS.get(name.replace(",", "_")) if isinstance(name, str) else None
    if mask is None:
        got = kind_of(kind) if name is None else repr(name)
        raise refusal(OP, "attn_mask_type", f"be one of {', '.join(_MASKS)}", got, "say who sees whom with cu_seqlens or a window")
    return mask


class Rows(NamedTuple):
    """Arguments of attention. `folded` sequences stand side by side, as heads; `restore` gives out the caller's layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen: tuple[int | None, int | None]
    restore: Callable[[Tensor], Tensor]
    folded: int = 1


def check_shapes(layout: str, query: Tensor, key: Tensor, value: Tensor, heads: int, kv_heads: int) -> None:
    """Refuse what could not be told from a legal call once sequences and heads are rows."""
    names = _NAMES[layout]
    check_tensors(OP, query=query, key=key, value=value)
    for name, x, own in (("query", query, heads), ("key", key, kv_heads), ("value", value, kv_heads)):
        if x.dim() != names.count(",") + 1:
            raise refusal(OP, name, f"be {names} with qkv_format={layout!r}", f"shape {shape_of(x)}", "reshape it")
        if x.shape[-2] != own:
            rule = f"have {own} heads, as the configuration says"
            raise refusal(OP, name, rule, x.shape[-2], "pass one tensor-parallel rank's heads")
    if layout in _BATCH and key.shape[_BATCH[layout]] != query.shape[_BATCH[layout]]:
        batch = query.shape[_BATCH[layout]]
        fix = "pass keys of the same sequences"
        raise refusal(OP, "key", f"have the {batch} sequences of query", key.shape[_BATCH[layout]], fix)
    if value.shape[:-2] != key.shape[:-2]:
        raise refusal(OP, "value", f"stand in the rows of key ({shape_of(key)})", shape_of(value), "pass values of the same keys")


def rows_of(
    layout: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, attention_mask: Any, params: Any, self_attention: bool, ranks: int
) -> Rows:
    """The rows of a call that `check_shapes` let pass; `params` has the fields of `PackedSeqParams`, or is None. `ranks` is W, q, k
    and v one rank's."""
    if layout == "thd":
        return _packed(q, k, v, params, self_attention)
    if mask.padding:
        if ranks > 1:
            got = f"qkv_format={layout!r} and a mask with padding"
            raise refusal(OP, "qkv_format", "be 'thd' with padding and context parallelism", got, "pack the batch")
        lengths = _lengths_of(q, k, _BATCH[layout], attention_mask, params, self_attention)
    else:
        lengths = None
    if layout == "bshd":
        return _batch(q, k, v, lengths, self_attention, ranks)
    if lengths is not None or q.shape[1] == 0:  # no sequence would be no head
        rows = _batch(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), lengths, self_attention, ranks)
        return rows._replace(restore=lambda out: rows.restore(out).transpose(0, 1).contiguous())
    return _folded(q, k, v, self_attention, ranks)


def _packed(q: Tensor, k: Tensor, v: Tensor, params: Any, self_attention: bool) -> Rows:
    valid, padded = _field(params, "cu_seqlens_q"), _field(params, "cu_seqlens_q_padded")
    if valid is None:
        raise refusal(OP, "packed_seq_params", "have cu_seqlens_q with qkv_format='thd'", "none", "pass prefix sums of the lengths")
    longest = (_static(params, "max_seqlen_q"), _static(params, "max_seqlen_kv"))
    keys = keys_padded = None
    if not _same_rows(q, k, 0, self_attention):
        keys, keys_padded = _field(params, "cu_seqlens_kv"), _field(params, "cu_seqlens_kv_padded")
    return Rows(q, k, v, valid, padded, keys, keys_padded, longest, lambda out: out.flatten(1))


def _batch(q: Tensor, k: Tensor, v: Tensor, lengths: list[Tensor] | None, self_attention: bool, ranks: int) -> Rows:
    """`[B, S, H, D]`: T = B * S rows, sequence b from row b * S. Views where rows are evenly spaced in memory."""
    batch, length, key_length = q.shape[0], q.shape[1], k.shape[1]
    if lengths is None:
        lengths = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * (n * ranks) for n in (length, key_length)]
        valid, valid_keys = lengths
        padded = padded_keys = None
    else:
        (valid, padded), (valid_keys, padded_keys) = lengths
    if _same_rows(q, k, 1, self_attention):
        valid_keys = padded_keys = None

    def restore(out: Tensor) -> Tensor:
        return out.unflatten(0, (batch, length)).flatten(2)

    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return Rows(q, k, v, valid, padded, valid_keys, padded_keys, (length, key_length), restore)


def _folded(q: Tensor, k: Tensor, v: Tensor, self_attention: bool, ranks: int) -> Rows:
    """`[S, B, H, D]` with all sequences S long: one sequence of B * H heads, which is a view. Query head b * Hq + h belongs to
    key head b * Hkv + h // (Hq / Hkv), as it must."""
    length, batch = q.shape[:2]
    ends = [torch.arange(2, dtype=torch.int32, device=q.device) * (x.shape[0] * ranks) for x in (q, k)]
    keys = None if _same_rows(q, k, 0, self_attention) else ends[1]

    def restore(out: Tensor) -> Tensor:
        return out.unflatten(1, (batch, -1)).flatten(2)

    q, k, v = (x.flatten(1, 2) for x in (q, k, v))
    return Rows(q, k, v, ends[0], None, keys, None, (length, k.shape[0]), restore, batch)


def _same_rows(q: Tensor, k: Tensor, along: int, self_attention: bool) -> bool:
    """Whether keys are the queries' rows: values of two offset tensors are not compared, which would be a sync."""
    return self_attention and q.shape[along] == k.shape[along]


def _lengths_of(q: Tensor, k: Tensor, along: int, attention_mask: Any, params: Any, self_attention: bool) -> list[Any]:
    """(cu_seqlens, cu_seqlens_padded) of queries and of keys, from their offsets or from masks that are True on padding."""
    batch = q.shape[along]
    if _field(params, "cu_seqlens_q") is not None:
        found = []
        shared = _same_rows(q, k, 1 - along, self_attention)
        for name, x in (("cu_seqlens_q", q), ("cu_seqlens_q" if shared else "cu_seqlens_kv", k)):
            valid: Any = _field(params, name)
            check_tensors(OP, (), **{name: valid})
            check_rank(OP, name, valid, 1, "[B+1]")
            if valid.shape[0] != batch + 1:
                got = f"{valid.shape[0]} entries"
                raise refusal(OP, name, f"have B + 1 entries ({batch + 1})", got, "pass one length per sequence of the batch")
            rows = torch.arange(batch + 1, dtype=valid.dtype, device=valid.device) * x.shape[1 - along]
            found.append((valid, rows))
        return found
    paired = isinstance(attention_mask, (tuple, list))
    masks = attention_mask if paired else (attention_mask, attention_mask)
    if len(masks) != 2 or not (paired or self_attention):
        got = f"{len(masks)} masks" if paired else kind_of(attention_mask)
        raise refusal(OP, "attention_mask", "be a pair of masks in cross-attention", got, "pass (queries', keys')")
    found = []
    for mask, x in zip(masks, (q, k), strict=True):
        shape = (batch, 1, 1, x.shape[1 - along])
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
            got = f"{mask.dtype} {shape_of(mask)}" if isinstance(mask, Tensor) else kind_of(mask)
            rule = f"be bool [{', '.join(map(str, shape))}], True on padding, with a mask type that has padding"
            raise refusal(OP, "attention_mask", rule, got, "pass it, or cu_seqlens_q in packed_seq_params")
        sequences = sequences_of_tokens(~mask[:, 0, 0])
        if has_holes(sequences):
            raise refusal(OP, "attention_mask", "have its tokens side by side in each sequence", "a hole", "pad left or right only")
        found.append(tuple(sequences))
    return found


def _field(params: Any, name: str) -> Any:
    """A field that an older or a newer `PackedSeqParams` may lack."""
    return getattr(params, name, None)


def _static(params: Any, name: str) -> int | None:
    """A hint, if the host has it: one on the device would have to be read."""
    value = _field(params, name)
    if value is None or isinstance(value, Tensor):
        return None
    check_integers(OP, **{name: value})
    return value
