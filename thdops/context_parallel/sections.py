"""Attention cut into sections: which queries of a rank meet which keys at a time, and how the sections' results become one.

T rows, B sequences, H heads, D head dims, W ranks. A section is metadata only. The first half of every sequence is a shorter
prefix of it, and the second half is where each sequence starts plus half its length, up to the next one's: so an attention call
reads halves where they lie and copies nothing. Its other rows are padding for it (out 0, LSE -inf, gradients 0), and drop out of
the merge.

Forward: outs are merged in fp32 by their LSE. Backward: every section is given the out and LSE of the whole, so that P and D are
those of the whole, and gradients of the sections add up, in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.context_attention import Call, GradCall
from meta_kernels.contract import accumulation_dtype


class Rows(NamedTuple):
    """Where the rows of sequences stand in a buffer: cu_seqlens and physical offsets, as everywhere."""

    valid: Tensor
    padded: Tensor


class Section(NamedTuple):
    """One call of attention. `keys` None: the queries' own rows."""

    queries: Rows
    keys: Rows | None = None
    causal: bool = False
    bottom_right: bool = False
    window: tuple[int, int] = (-1, -1)
    has_sink: bool = True  # one section of each row has what the softmax adds; with none it would be counted again


class Attended(NamedTuple):
    """out [T, Hq, Dv], lse [Hq, T], max_logit [Hq] or [0]."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor


class Gradients(NamedTuple):
    """Of q, k, v, and of the sink: [Hq] or [0]."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor


# --- where a rank's rows stand -------------------------------------------------------------------------------------------------


def rows_of(whole: Rows, size: int, rank: int, partition: str, half: str | None = None) -> Rows:
    """A rank's rows of the batch that `whole` describes, in its own buffer; with `half`, one of its two chunks of each sequence."""
    valid, padded = torch.ops.thdops.local_cu_seqlens(whole.valid, whole.padded, size, rank, None, partition)
    if half is None:
        return Rows(valid, padded)
    valid, _ = torch.ops.thdops.local_cu_seqlens(whole.valid, whole.padded, size, rank, half, partition)
    return Rows(valid, padded if half == "first" else _from_middle(padded))


def _from_middle(padded: Tensor) -> Tensor:
    """Every sequence from its middle on; what is before is a gap behind the sequence before it."""
    return padded + torch.nn.functional.pad(padded.diff() // 2, (0, 1))


def from_row(whole: Rows, first: Tensor) -> Rows:
    """Every sequence from its row `first` [B] on, one row at least being left out or the sequence being empty from there on."""
    lengths = torch.minimum(whole.valid.diff(), whole.padded.diff())
    starts = whole.padded + torch.nn.functional.pad(torch.minimum(first, whole.padded.diff()), (0, 1))
    return Rows(_ends((lengths - first).clamp(min=0)), starts)


def up_to(whole: Rows, last: Tensor) -> Rows:
    """The first `last` [B] rows of every sequence, those that are valid."""
    return Rows(_ends(torch.minimum(whole.valid.diff(), last)), whole.padded)


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))


# --- forward -------------------------------------------------------------------------------------------------------------------


def attend(call: Call, section: Section) -> Attended:
    """One section."""
    return Attended(*torch.ops.thdops.attention(call.q, call.k, call.v, *_how(call, section), call.return_max_logit))


def attend_all(call: Call, sections: list[Section]) -> Attended:
    """Several sections over the same keys."""
    first, *others = sections
    so_far = attend(call, first)
    for i, section in enumerate(others, 1):
        so_far = merged(so_far, attend(call, section), last=i == len(others))
    return so_far


def merged(so_far: Attended, part: Attended, last: bool) -> Attended:
    """One more section; out is kept in fp32 until the last one, so that it is rounded once."""
    dtype = part.out.dtype if last else accumulation_dtype(part.out.dtype)
    out, lse = torch.ops.thdops.merge_attention(so_far.out, so_far.lse, part.out, part.lse, dtype)
    return Attended(out, lse, torch.maximum(so_far.max_logit, part.max_logit))


# --- backward ------------------------------------------------------------------------------------------------------------------


def gradients(call: GradCall, section: Section) -> Gradients:
    """What one section adds; out and LSE are those of all sections."""
    tensors = (call.grad_out, call.grad_lse, call.q, call.k, call.v, call.out, call.lse)
    dq, dk, dv, dsink = torch.ops.thdops.attention_grad(*tensors, *_how(call, section))
    if call.sink is not None and not section.has_sink:
        dsink = torch.zeros_like(call.sink)
    return Gradients(dq, dk, dv, dsink)


def gradients_of_all(call: GradCall, sections: list[Section]) -> Gradients:
    """Of several sections over the same keys, in fp32."""
    first, *others = (gradients(call, section) for section in sections)
    sums = [in_accumulation_dtype(x) for x in first]
    for part in others:
        for total, x in zip(sums, part, strict=True):
            total.add_(x)
    return Gradients(*sums)


def in_accumulation_dtype(x: Tensor) -> Tensor:
    """fp32, or fp64: what gradients are added up in."""
    return x.to(accumulation_dtype(x.dtype))


def _how(call: Call | GradCall, section: Section) -> tuple[Any, ...]:
    """The arguments of attention behind its tensors."""
    keys = (None, None) if section.keys is None else section.keys
    sink, softmax = (call.sink, call.softmax) if section.has_sink else (None, "vanilla")
    mask = (section.causal, section.bottom_right, *section.window)
    backend = "reference" if call.q.device.type == "cpu" else call.backend  # on CPU there is no other
    return (*section.queries, *keys, sink, *mask, call.scale, softmax, call.softcap, 0, 0, call.deterministic, backend)
