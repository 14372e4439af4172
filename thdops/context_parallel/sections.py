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

from meta_kernels.context import HALVES
from meta_kernels.context_attention import Call, GradCall
from meta_kernels.contract import accumulation_dtype

kernels: Any = None
"""`thdops.context_parallel.kernels`, from the first CUDA call on, for which the registry imports it."""


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


class Whole:
    """The rows of the batch, and where ranks have theirs: each looked up once a call, whoever asks."""

    def __init__(self, valid: Tensor, padded: Tensor) -> None:
        self.rows = Rows(valid, padded)
        self._shares: dict[Any, Rows] = {}

    def share(self, size: int, rank: int, partition: str, half: str | None = None) -> Rows:
        """A rank's rows of the batch in its own buffer; with `half`, one of its two chunks of each sequence."""
        key = (size, rank, partition, half)
        if key not in self._shares and kernels is not None and self.rows.valid.device.type == "cuda":
            self._make_all(size, partition)
        elif key not in self._shares:
            self._shares[key] = self._made(size, rank, partition, half)
        return self._shares[key]

    def _make_all(self, size: int, partition: str) -> None:
        valid, starts = kernels.all_local_cu_seqlens(*self.rows, size, partition)
        first, second = starts.unbind()
        for rank, of_rank in enumerate(valid.unbind()):
            for half, rows, start in zip((None, *HALVES), of_rank.unbind(), (first, first, second), strict=True):
                self._shares[size, rank, partition, half] = Rows(rows, start)

    def _made(self, size: int, rank: int, partition: str, half: str | None) -> Rows:
        valid, padded = torch.ops.thdops.local_cu_seqlens(*self.rows, size, rank, half, partition)
        if half is None:
            return Rows(valid, padded)
        padded = self.share(size, rank, partition).padded
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
    return Attended(*torch.ops.thdops.attention(call.q, call.k, call.v, *how(call, section), call.return_max_logit))


def attending(call: Call, into: Attended | None) -> Attending:
    """How the sections of a forward become one: native kernels do it on their way out, anything else behind each section.

    Results may be put `into` tensors that are there already.
    """
    return kernels.AttendingInPlace(call, into) if _in_place(call) else Attending()


class Attending:
    """Sections are calls of the op; each result is merged, in fp32, with those before it."""

    def __init__(self) -> None:
        self.result: Any = None

    def add(self, call: Call, section: Section, last: bool) -> None:
        """One more section. `last`: of those that its queries are in; then their out is rounded."""
        part = attend(call, section)
        if self.result is not None:
            dtype = part.out.dtype if last else accumulation_dtype(part.out.dtype)
            out, lse = torch.ops.thdops.merge_attention(self.result.out, self.result.lse, part.out, part.lse, dtype)
            part = Attended(out, lse, torch.maximum(self.result.max_logit, part.max_logit))
        self.result = part


# --- backward ------------------------------------------------------------------------------------------------------------------


def gradients(call: GradCall, section: Section) -> Gradients:
    """What one section adds; out and LSE are those of all sections."""
    tensors = (call.grad_out, call.grad_lse, call.q, call.k, call.v, call.out, call.lse)
    dq, dk, dv, dsink = torch.ops.thdops.attention_grad(*tensors, *how(call, section))
    if call.sink is not None and not section.has_sink:
        dsink = torch.zeros_like(call.sink)
    return Gradients(dq, dk, dv, dsink)


def adding(call: GradCall, own: Rows, into: Gradients | None, hides: bool) -> Adding:
    """How the gradients of sections are added up, in fp32. `own`: all queries.

    `hides`: dq is to be computed while dk and dv travel, and not together with them, even if that is faster.
    """
    return kernels.AddingInPlace(call, own, into, hides) if _in_place(call) else Adding()


class Adding:
    """Sections are calls of the op, whose gradients are added."""

    def __init__(self) -> None:
        self._sums: Any = None
        self._part: Any = None

    def add_queries(self, call: GradCall, section: Section) -> None:
        """dq of one more section, and whatever else does not need dk and dv to be there."""
        self._part = gradients(call, section)
        if self._sums is None:
            self._sums = _in_accumulation_dtype(self._part.q), _in_accumulation_dtype(self._part.sink)
        else:
            self._sums[0].add_(self._part.q)
            self._sums[1].add_(self._part.sink)

    def add_keys(self, call: GradCall, section: Section, sums: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """dk and dv of the same section, added to `sums` in place; None: there are none yet."""
        if sums is None:
            return _in_accumulation_dtype(self._part.k), _in_accumulation_dtype(self._part.v)
        sums[0].add_(self._part.k)
        sums[1].add_(self._part.v)
        return sums

    def result(self) -> tuple[Tensor, Tensor]:
        """dq, rounded or not, and dsink."""
        return self._sums


def _in_accumulation_dtype(x: Tensor) -> Tensor:
    """fp32, or fp64: what gradients are added up in."""
    return x.to(accumulation_dtype(x.dtype))


# --- calls of attention --------------------------------------------------------------------------------------------------------


def _in_place(call: Call | GradCall) -> bool:
    return kernels is not None and call.q.device.type == "cuda" and call.backend == "native"


def how(call: Call | GradCall, section: Section) -> tuple[Any, ...]:
    """The arguments of attention behind its tensors."""
    keys = (None, None) if section.keys is None else section.keys
    sink, softmax = (call.sink, call.softmax) if section.has_sink else (None, "vanilla")
    mask = (section.causal, section.bottom_right, *section.window)
    backend = "reference" if call.q.device.type == "cpu" else call.backend  # on CPU there is no other
    return (*section.queries, *keys, sink, *mask, call.scale, softmax, call.softcap, 0, 0, call.deterministic, backend)
