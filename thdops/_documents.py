"""The host side of packing: what a pack holds, reading documents, laying them out in rows, writing a pack on the CPU.

T rows (`max_tokens`), B sequences (`max_seqs`). Everything that can be refused is refused before a row is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meta_kernels.contract import check_count, dtype_of, refusal, shape_of

IGNORE_INDEX = -100  # of a label that takes no part in a loss; what `torch.nn.functional.cross_entropy` ignores by default

Document: TypeAlias = Sized
"""Tokens (a list of ints, a numpy array, a CPU tensor), or a mapping of "tokens", optionally "labels", and the pack's extras."""

Tail: TypeAlias = Literal["padding", "sequence"]

ROW_FIELDS = {"tokens": torch.int64, "labels": torch.int64, "positions": torch.int32, "padding_mask": torch.bool}
_OFFSET_FIELDS = ("cu_seqlens", "cu_seqlens_padded")
_COUNT_FIELDS = ("num_tokens", "num_seqs")
FIELDS = (*ROW_FIELDS, *_OFFSET_FIELDS, *_COUNT_FIELDS)

_CPU = torch.device("cpu")  # named in every call: a default device that the user has set must not catch host tensors


@dataclass(frozen=True)
class Extra:
    """One more token-like tensor `[T, *shape]` that documents bring along, 0 on padding rows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackSpec:
    """What a pack can hold. Hashable and static: it takes no part in tensors, and a compiler may specialise on it.

    Attributes:
        max_tokens: rows T; a multiple of `pad_multiple`, below 2**31.
        max_seqs: sequences B.
        max_seqlen: longer documents are refused, so it can be given to attention as its static hint; None: no such limit.
        pad_multiple: every document's rows are rounded up to it (2 * cp_size for context parallelism).
        tail: what rows behind the last document are: "padding", or one more "sequence" (see `PackedSequences`).
        pad_token: the token on rows that hold no document token.
        extras: further token-like tensors that documents bring along.

    Raises:
        ValueError: a size below 1; `max_tokens` no multiple of `pad_multiple` or not below 2**31; a tail sequence that has no
            slot or may exceed `max_seqlen`; an extra that bears a field's name or another extra's.
    """

    max_tokens: int
    max_seqs: int
    max_seqlen: int | None = None
    pad_multiple: int = 1
    tail: Tail = "padding"
    pad_token: int = 0
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        op = "PackSpec"
        if self.tail not in ("padding", "sequence"):
            raise refusal(op, "tail", "be 'padding' or 'sequence'", repr(self.tail), "pass one of the two")
        check_capacity(op, self.max_tokens, self.max_seqs, self.pad_multiple, self.max_seqlen)
        if self.tail == "sequence" and self.max_seqs < 2:
            fix = "the tail takes one slot, pass one for documents too"
            raise refusal(op, "max_seqs", "be at least 2 with tail='sequence'", self.max_seqs, fix)
        if self.tail == "sequence" and self.max_seqlen is not None and self.max_seqlen < self.max_tokens:
            rule = f"be None or at least max_tokens ({self.max_tokens}) with tail='sequence'"
            raise refusal(
                op, "max_seqlen", rule, self.max_seqlen, "the tail may be one sequence of all rows; or use tail='padding'"
            )
        seen = set(FIELDS) | {"extras", "spec"}
        for extra in self.extras:
            if not isinstance(extra, Extra):
                fix = "pass thdops.packing.Extra(name, dtype, shape)"
                raise refusal(op, "extras", "hold Extra(name, dtype, shape) only", f"a {type(extra).__name__}", fix, TypeError)
            if extra.name in seen:
                raise refusal(op, "extras", "have names of their own", repr(extra.name), "rename it")
            seen.add(extra.name)

    @property
    def max_documents(self) -> int:
        """How many documents fit: `max_seqs`, less the slot that a tail sequence takes."""
        return self.max_seqs - (self.tail == "sequence")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a pack, in their fixed order; extras come last."""
        named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        named |= {name: ((self.max_tokens,), dtype) for name, dtype in ROW_FIELDS.items()}
        named |= dict.fromkeys(_OFFSET_FIELDS, ((self.max_seqs + 1,), torch.int32))
        named |= dict.fromkeys(_COUNT_FIELDS, ((), torch.int64))
        named |= {extra.name: ((self.max_tokens, *extra.shape), extra.dtype) for extra in self.extras}
        return named

    def rows(self, length: int) -> int:
        """Rows that a document of `length` tokens takes: rounded up to `pad_multiple`."""
        return -(-length // self.pad_multiple) * self.pad_multiple

    def misfit(self, op: str, lengths: Sequence[int]) -> Exception | None:
        """Why documents of these lengths do not fit, or None."""
        fix = "pack fewer (pack_documents makes packs that fit) or allocate more"
        if len(lengths) > self.max_documents:
            slot = " (one slot of max_seqs is the tail's)" if self.tail == "sequence" else ""
            return refusal(op, "documents", f"be at most {self.max_documents}{slot}", len(lengths), fix)
        for i, length in enumerate(lengths):
            if self.max_seqlen is not None and length > self.max_seqlen:
                cut = "split it (pack_documents(split=True) does) or allocate a larger max_seqlen"
                return refusal(op, f"documents[{i}]", f"have at most max_seqlen ({self.max_seqlen}) tokens", length, cut)
        rows = sum(self.rows(length) for length in lengths)
        if rows > self.max_tokens:
            padded = f" ({rows} rows, each length rounded up to {self.pad_multiple})" if self.pad_multiple > 1 else ""
            return refusal(op, "documents", f"fit max_tokens ({self.max_tokens})", f"{sum(lengths)} tokens{padded}", fix)
        return None

    def fits(self, documents: Iterable[Document]) -> bool:
        """Whether these documents fit, by their number and lengths."""
        return self.misfit("fits", [document_length("fits", i, document) for i, document in enumerate(documents)]) is None

    def pack(self, documents: Iterable[Document], *, split: bool = False) -> Iterator[list[Document]]:
        """`pack_documents` with this capacity: every list it yields can be loaded."""
        return pack_documents(documents, self.max_tokens, self.max_documents, self.pad_multiple, self.max_seqlen, split=split)


def spec_to_json(spec: PackSpec) -> dict[str, Any]:
    """As values that JSON knows."""
    extras = [{**asdict(extra), "dtype": str(extra.dtype).removeprefix("torch.")} for extra in spec.extras]
    return {**asdict(spec), "extras": extras}


def spec_from_json(values: dict[str, Any]) -> PackSpec:
    """The inverse of `spec_to_json`."""
    extras = (Extra(extra["name"], getattr(torch, extra["dtype"]), tuple(extra["shape"])) for extra in values["extras"])
    return PackSpec(**{**values, "extras": tuple(extras)})


def check_capacity(op: str, max_tokens: int, max_seqs: int, pad_multiple: int, max_seqlen: int | None) -> None:
    """The sizes of a pack agree with each other."""
    check_count(op, "max_tokens", max_tokens, 1)
    check_count(op, "max_seqs", max_seqs, 1)
    check_count(op, "pad_multiple", pad_multiple, 1)
    if max_seqlen is not None:
        check_count(op, "max_seqlen", max_seqlen, 1)
    if max_tokens > 2**31 - 1:
        raise refusal(op, "max_tokens", "be below 2**31, as cu_seqlens is int32", max_tokens, "use smaller packs")
    if max_tokens % pad_multiple:
        more = -(-max_tokens // pad_multiple) * pad_multiple
        raise refusal(op, "max_tokens", f"be a multiple of pad_multiple ({pad_multiple})", max_tokens, f"pass {more}")


# --- documents --------------------------------------------------------------------------------------------------------------------


def document_length(op: str, i: int, document: Document) -> int:
    """How many tokens a document has, without converting it."""
    if isinstance(document, Mapping) and "tokens" not in document:
        raise refusal(op, f"documents[{i}]", "hold tokens", f"only {', '.join(map(str, document)) or 'nothing'}", "name them so")
    try:
        return len(document["tokens"] if isinstance(document, Mapping) else document)
    except TypeError as error:
        fix = "documents is a list of documents, one entry each"
        raise refusal(op, f"documents[{i}]", "have a length", type(document).__name__, fix, TypeError) from error


class Columns(NamedTuple):
    """Documents as tensors: a list per column, an entry per document. "labels" is absent where no document has its own."""

    lengths: list[int]
    values: dict[str, list[Tensor]]

    def rows(self, spec: PackSpec) -> int:
        """Rows that they take together."""
        return sum(spec.rows(length) for length in self.lengths)


def _as_tensor(op: str, argument: str, value: Any) -> Tensor:
    """A CPU tensor that shares memory where it can."""
    if hasattr(value, "__array_interface__") and hasattr(value, "copy"):
        # torch takes neither negative strides nor (without a warning) read-only memory, such as a memory-mapped corpus
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = value.copy()
    elif isinstance(value, Tensor) and value.device.type != "cpu":
        fix = "reading it would wait for the device, pass a CPU tensor"
        raise refusal(op, argument, "be on the CPU", str(value.device), fix)
    try:
        return torch.as_tensor(value, device=_CPU).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        fix = f"tokenise it first ({error})"
        raise refusal(
            op, argument, "be numbers: a list, a numpy array or a tensor", type(value).__name__, fix, TypeError
        ) from error


def _column(op: str, argument: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], length: int | None) -> Tensor:
    """`value` as `[length, *shape]`, still in its own dtype."""
    column = _as_tensor(op, argument, value)
    if column.numel() == 0 and column.dim() == 1 and length in (None, 0):
        return torch.empty((0, *shape), dtype=dtype, device=_CPU)  # an empty list has no dtype and no trailing shape
    if column.dim() == 0 or column.shape[1:] != shape:
        layout = f"[{', '.join(['tokens', *map(str, shape)])}]"
        fix = "documents is a list of documents, one entry each"
        raise refusal(op, argument, f"have shape {layout}", f"shape {shape_of(column)}", fix)
    integers = dtype == torch.int64
    if not torch.can_cast(column.dtype, dtype) or (integers and column.dtype == torch.bool):
        wanted = "integers" if integers else str(dtype).removeprefix("torch.")
        raise refusal(op, argument, f"hold {wanted}", dtype_of(column), "convert it", TypeError)
    if length is not None and column.shape[0] != length:
        raise refusal(op, argument, f"have one entry per token ({length})", column.shape[0], "align it with the tokens")
    _check_range(op, argument, column, dtype)
    return column


def _check_range(op: str, argument: str, column: Tensor, dtype: torch.dtype) -> None:
    """Integers that `dtype` cannot hold would wrap around silently."""
    if column.dtype == torch.bool or column.is_floating_point() or dtype.is_floating_point or dtype.is_complex:
        return
    given, held = torch.iinfo(column.dtype), torch.iinfo(dtype)
    if held.min <= given.min and given.max <= held.max:
        return
    unsigned = column.dtype == torch.uint64  # read as int64, what is above 2**63 - 1 is negative
    wide = column.view(torch.int64) if unsigned else column.long()
    outside = wide[(wide < (0 if unsigned else held.min)) | (wide > min(held.max, 2**63 - 1))]
    if outside.numel():
        value = int(outside[0])
        wanted = f"hold {str(dtype).removeprefix('torch.')} ({held.min} to {held.max})"
        raise refusal(op, argument, wanted, value + 2**64 if unsigned and value < 0 else value, "it would wrap around")


def read_documents(op: str, documents: Iterable[Document], spec: PackSpec) -> Columns:
    """Convert and check every document: types, shapes, names, capacity."""
    extras = {extra.name: extra for extra in spec.extras}
    lengths: list[int] = []
    values: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "labels", *extras)}
    own_labels = False
    for i, document in enumerate(documents):
        parts: Mapping[str, Any] = document if isinstance(document, Mapping) else {"tokens": document}
        if extras or parts is document:
            _check_names(op, f"documents[{i}]", parts, extras)
        tokens = _column(op, f"documents[{i}]", parts["tokens"], torch.int64, (), None)
        length = tokens.shape[0]
        lengths.append(length)
        values["tokens"].append(tokens)
        labels = parts.get("labels")
        if labels is None:
            values["labels"].append(tokens)
        else:
            values["labels"].append(_column(op, f"documents[{i}]['labels']", labels, torch.int64, (), length))
            own_labels = True
        for name, extra in extras.items():
            values[name].append(_column(op, f"documents[{i}][{name!r}]", parts[name], extra.dtype, extra.shape, length))
    misfit = spec.misfit(op, lengths)
    if misfit is not None:
        raise misfit
    if not own_labels:
        del values["labels"]
    return Columns(lengths, values)


def _check_names(op: str, argument: str, parts: Mapping[str, Any], extras: Mapping[str, Extra]) -> None:
    missing = {"tokens", *extras} - parts.keys()
    unknown = parts.keys() - {"tokens", "labels", *extras}
    if missing or unknown:
        names = ", ".join(["tokens", *extras]) + " and, if given, labels"
        got = f"no {', '.join(sorted(missing))}" if missing else f"also {', '.join(sorted(map(str, unknown)))}"
        raise refusal(op, argument, f"hold {names}", got, "extras are declared when the pack is allocated")


# --- writing ----------------------------------------------------------------------------------------------------------------------


def _offsets(lengths: Tensor, entries: int) -> Tensor:
    """int64 `[entries]`: prefix sums of `lengths`, the end repeated."""
    ends = torch.zeros(entries, dtype=torch.int64, device=_CPU)
    count = lengths.shape[0]
    torch.cumsum(lengths, 0, out=ends[1 : count + 1])
    ends[count + 1 :] = ends[count]
    return ends


@torch.no_grad()
def write_pack(out: Mapping[str, Tensor], columns: Columns, spec: PackSpec) -> None:
    """Fill the CPU tensors `out` (named as `spec.tensors()`) with documents that were read for this `spec`.

    Every element is written, so buffers may hold anything before. No loop over tokens.
    """
    lengths = torch.tensor(columns.lengths, dtype=torch.int64, device=_CPU)
    padded_lengths = torch.tensor([spec.rows(length) for length in columns.lengths], dtype=torch.int64, device=_CPU)
    count, total = len(columns.lengths), sum(columns.lengths)
    valid = _offsets(lengths, spec.max_seqs + 1)
    padded = _offsets(padded_lengths, spec.max_seqs + 1)
    end = int(padded[-1])

    token = torch.arange(total, device=_CPU)
    tensors = spec.tensors()
    gaps = end != total
    row = token + torch.repeat_interleave((padded - valid)[:count], lengths) if gaps else token

    def place(name: str, flat: Tensor, padding: float) -> None:
        rows = out[name]
        if gaps:
            rows.fill_(padding)[row] = flat
        else:
            rows[:total] = flat
            rows[total:].fill_(padding)

    def flatten(name: str) -> Tensor:
        shape, dtype = tensors[name]
        none = torch.empty((0, *shape[1:]), dtype=dtype, device=_CPU)
        return torch.cat([none, *(v if v.dtype == dtype else v.to(dtype) for v in columns.values[name])])

    tokens = flatten("tokens")
    targets = flatten("labels") if "labels" in columns.values else tokens
    labels = torch.full((total,), IGNORE_INDEX, dtype=torch.int64, device=_CPU)
    labels[:-1] = targets[1:]
    labels[(valid[1 : count + 1] - 1)[lengths > 0]] = IGNORE_INDEX

    # Read all before anything is written: documents may be views of the pack itself.
    extras = {extra.name: flatten(extra.name) for extra in spec.extras}

    place("tokens", tokens, spec.pad_token)
    place("labels", labels, IGNORE_INDEX)
    place("positions", (token - torch.repeat_interleave(valid[:count], lengths)).int(), 0)
    place("padding_mask", torch.zeros(total, dtype=torch.bool, device=_CPU), True)
    for name, flat in extras.items():
        place(name, flat, 0)

    tail = spec.max_tokens - end
    if spec.tail == "sequence" and tail:
        # Both coordinate systems grow by the tail, so it is one more sequence without a gap. It is no document: it stays masked.
        valid[count + 1 :] = total + tail
        padded[count + 1 :] = spec.max_tokens
        out["positions"][end:] = torch.arange(tail, device=_CPU)
    out["cu_seqlens"].copy_(valid)
    out["cu_seqlens_padded"].copy_(padded)
    out["num_tokens"].fill_(total)
    out["num_seqs"].fill_(count)


# --- a stream of documents --------------------------------------------------------------------------------------------------------


def _pieces(document: Document, length: int, limit: int) -> Iterator[tuple[Document, int]]:
    for start in range(0, length, limit):
        stop = min(start + limit, length)
        if isinstance(document, Mapping):
            yield {name: None if value is None else value[start:stop] for name, value in document.items()}, stop - start
        else:
            sliceable: Any = document
            yield sliceable[start:stop], stop - start


def pack_documents(
    documents: Iterable[Document],
    max_tokens: int,
    max_seqs: int,
    pad_multiple: int = 1,
    max_seqlen: int | None = None,
    *,
    split: bool = False,
) -> Iterator[list[Document]]:
    """Lists of documents, each of which fits one pack; greedy, in order, nothing left out.

    A pack is closed when the next document does not fit it. Documents are passed on as they came; empty ones too (they take a
    slot). `PackSpec.pack` calls this with a pack's own capacity (with tail="sequence" that is one document less than `max_seqs`).

    Args:
        documents: any iterable; each document as `PackedSequences.load_` takes it.
        max_tokens, max_seqs, pad_multiple, max_seqlen: the capacity, as for `PackedSequences.allocate`.
        split: cut a document that no pack can hold into pieces of the greatest length that fits (views, not copies, where the
            document slices to views). Each piece is then a document of its own: its last token predicts nothing.

    Raises:
        ValueError: the capacity is inconsistent; a document without tokens; without `split`, one that no pack can hold.
        TypeError: a document that has no length.
    """
    op = "pack_documents"
    check_capacity(op, max_tokens, max_seqs, pad_multiple, max_seqlen)
    limit = max_tokens if max_seqlen is None else min(max_seqlen, max_tokens)
    return _greedy(op, documents, max_tokens, max_seqs, pad_multiple, limit, split)


def _greedy(
    op: str, documents: Iterable[Document], max_tokens: int, max_seqs: int, pad_multiple: int, limit: int, split: bool
) -> Iterator[list[Document]]:
    pack: list[Document] = []
    used = 0
    for i, document in enumerate(documents):
        length = document_length(op, i, document)
        if length > limit and not split:
            fix = "pass split=True to cut it, or raise the capacity"
            raise refusal(op, f"documents[{i}]", f"have at most {limit} tokens, the most one pack can hold", length, fix)
        pieces = _pieces(document, length, limit) if length > limit else iter([(document, length)])
        for piece, tokens in pieces:
            rows = -(-tokens // pad_multiple) * pad_multiple
            if pack and (len(pack) == max_seqs or used + rows > max_tokens):
                yield pack
                pack, used = [], 0
            pack.append(piece)
            used += rows
    if pack:
        yield pack
