"""Packs of fixed capacity that one captured graph reads, whatever documents they hold.

    batch = PackedSequences.allocate(max_tokens=8192, max_seqs=64, device="cuda")
    for documents in batch.spec.pack(corpus):        # lists of documents that fit
        batch.load_(documents)                       # in place: pointers never change, no sync
        out = thdops.attention(q, k, v, batch.cu_seqlens, cu_seqlens_q_padded=batch.cu_seqlens_padded, causal=True)

T rows (`max_tokens`), B sequences (`max_seqs`). Sequence b owns rows [P[b], P[b+1]) (P = cu_seqlens_padded), its tokens are the
first C[b+1]-C[b] of them (C = cu_seqlens). Entries past the last sequence repeat the last value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meta_kernels.contract import check_count, check_cu_seqlens, check_integers, dtype_of, refusal, shape_of
from thdops._documents import (
    FIELDS,
    IGNORE_INDEX,
    ROW_FIELDS,
    Document,
    Extra,
    PackSpec,
    Tail,
    pack_documents,
    read_documents,
    spec_from_json,
    spec_to_json,
    write_pack,
)
from thdops.context_parallel.groups import place_in
from thdops.sharding import ShardedSequences

if TYPE_CHECKING:
    from thdops.context_parallel.groups import Group

__all__ = [
    "IGNORE_INDEX",
    "Document",
    "Extra",
    "PackSpec",
    "PackedSequences",
    "PackedSlots",
    "ShardedSequences",
    "pack_documents",
    "validate",
]


def validate(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    total_tokens: int | None = None,
    max_seqlen: int | None = None,
    pad_multiple: int = 1,
) -> None:
    """Say what is wrong with a batch's metadata. Reads the tensors on the host, which waits for the device: use it outside steps.

    Args:
        cu_seqlens: int32 or int64 `[B+1]`, from 0: prefix sums of valid lengths.
        cu_seqlens_padded: physical offsets, same shape and dtype, may start above 0; None where sequences stand back to back.
        total_tokens: rows T of the batch's tensors; None skips what needs it.
        max_seqlen: the hint that attention is given; every valid length must be within it.
        pad_multiple: every physical offset and `total_tokens` must be a multiple of it (2 * cp_size for context parallelism).

    Raises:
        TypeError: a dtype other than int32 and int64, or two different ones.
        ValueError: anything else: shapes or devices that differ, the overflow mark of `cu_seqlens_from_positions`, a first entry
            other than 0, a decreasing or negative entry, a valid length above its padded one, an end beyond `total_tokens`, a
            length above `max_seqlen`, an offset that is no multiple of `pad_multiple`, a `pad_multiple` below 1.
    """
    op = "validate"
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded)
    check_count(op, "pad_multiple", pad_multiple, 1)
    valid: list[int] = cu_seqlens.tolist()
    if all(entry == -1 for entry in valid):
        fix = "cu_seqlens_from_positions found more sequences than its max_seqs and marked the batch, raise max_seqs"
        raise refusal(op, "cu_seqlens", "be offsets", "-1 in every entry", fix)
    if valid[0] != 0:
        fix = "prepend the 0; rows before the first sequence are told by cu_seqlens_padded, which may start above 0"
        raise refusal(op, "cu_seqlens", "start at 0", valid[0], fix)
    _check_rising(op, "cu_seqlens", valid)
    starts, name = valid, "cu_seqlens"
    if cu_seqlens_padded is not None:
        starts, name = cu_seqlens_padded.tolist(), "cu_seqlens_padded"
        _check_rising(op, name, starts)
    lengths = [stop - start for start, stop in pairwise(valid)]
    for b, length in enumerate(lengths):
        room = starts[b + 1] - starts[b]
        if length > room:
            fix = "padding stands behind each sequence, so its padded length is at least its valid one"
            raise refusal(op, f"cu_seqlens[{b + 1}]", f"give sequence {b} at most its padded length ({room})", length, fix)
        if max_seqlen is not None and length > max_seqlen:
            raise refusal(op, "max_seqlen", f"be at least every length (sequence {b} has {length})", max_seqlen, "raise it")
    if total_tokens is not None and starts[-1] > total_tokens:
        fix = "the last sequence must end within the rows"
        raise refusal(op, f"{name}[-1]", f"be at most total_tokens ({total_tokens})", starts[-1], fix)
    for b, start in enumerate(starts):
        if start % pad_multiple:
            raise refusal(
                op, f"{name}[{b}]", f"be a multiple of pad_multiple ({pad_multiple})", start, "pad each sequence up to it"
            )
    if total_tokens is not None and total_tokens % pad_multiple:
        raise refusal(op, "total_tokens", f"be a multiple of pad_multiple ({pad_multiple})", total_tokens, "add padding rows")


def _check_rising(op: str, name: str, offsets: list[int]) -> None:
    if offsets[0] < 0:
        raise refusal(op, f"{name}[0]", "not be negative", offsets[0], "offsets count rows from 0")
    for b in range(1, len(offsets)):
        if offsets[b] < offsets[b - 1]:
            fix = "offsets are prefix sums of lengths; repeat the last one past the last sequence"
            raise refusal(op, f"{name}[{b}]", f"be at least the entry before it ({offsets[b - 1]})", offsets[b], fix)


def _recorded(device: torch.device) -> torch.cuda.Event:
    """An event behind everything that the current stream of `device` has been given."""
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


class _Staging:
    """Two sets of pinned host buffers, used in turn, so that a load seldom waits for an earlier load's copies."""

    def __init__(self, spec: PackSpec, device: torch.device) -> None:
        self.device = device
        self._sets = [self._pinned(spec), self._pinned(spec)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @staticmethod
    def _pinned(spec: PackSpec) -> dict[str, Tensor]:
        named = spec.tensors().items()
        return {name: torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for name, (shape, dtype) in named}

    def take(self) -> dict[str, Tensor]:
        """The set whose turn it is, once the copies out of it are done."""
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._sets[self._turn]

    def sent(self) -> None:
        """Copies out of the set taken last are on the current stream."""
        self._copied[self._turn] = _recorded(self.device)
        self._turn = 1 - self._turn


@dataclass(eq=False, repr=False)
class PackedSequences:
    """One pack: tensors of fixed shape, and the static `spec` of what they can hold. A pytree whose leaves are the tensors.

    Make it with `allocate` (then `load_` reloads it in place) or `collate` (a fresh one on the CPU, for a DataLoader). What
    changes from batch to batch is on the device, in tensors; no field is a Python number of one batch, so a compiled function that
    takes a pack compiles once, and a captured graph follows each `load_`.

    Attributes:
        tokens: int64 `[T]`; `spec.pad_token` on rows that hold no document token.
        labels: int64 `[T]`, the next token of the same document; -100 on each document's last token and on all other rows.
        positions: int32 `[T]`, as `thdops.positions`: the row's place in its sequence, 0 on padding.
        padding_mask: bool `[T]`, True on rows that hold no document token: what the router and its losses take as mask.
        cu_seqlens: int32 `[B+1]`, prefix sums of valid lengths.
        cu_seqlens_padded: int32 `[B+1]`, physical offsets.
        num_tokens: 0-d int64, how many document tokens the pack holds: the rows where `padding_mask` is False.
        num_seqs: 0-d int64, how many documents it holds, empty ones included.
        extras: further token-like tensors `[T, ...]` by name (see `thdops.packing.Extra`); 0 on rows that hold no document token.
        spec: the capacity.

    Where the rows behind the last document go is `spec.tail`. "padding": they belong to no sequence, and `cu_seqlens` tells the
    same padding as `padding_mask`. "sequence": they are one more sequence, whose positions count up (for kernels that want every
    row in a sequence). It takes a slot and `cu_seqlens` counts it as valid, but it is no document: its labels are -100,
    `padding_mask` is True, and neither `num_tokens` nor `num_seqs` nor `unpack` knows it. So losses take `padding_mask` and
    `num_tokens` from here, and agree; of those per sequence `router` does (`moe_seq_aux_loss` knows `cu_seqlens` only).
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    padding_mask: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    num_tokens: Tensor
    num_seqs: Tensor
    extras: dict[str, Tensor]
    spec: PackSpec
    _staging: _Staging | None = field(default=None, init=False)
    _rows: int | None = field(default=None, init=False)

    # --- making one ---

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        max_seqs: int,
        *,
        max_seqlen: int | None = None,
        pad_multiple: int = 1,
        tail: Tail = "padding",
        pad_token: int = 0,
        extras: Sequence[Extra] = (),
        device: torch.device | str = "cpu",
    ) -> PackedSequences:
        """An empty pack on `device`, for `load_`. Other arguments and errors as `PackSpec`."""
        return cls._empty(
            PackSpec(max_tokens, max_seqs, max_seqlen, pad_multiple, tail, pad_token, tuple(extras)), torch.device(device)
        )

    @classmethod
    def collate(cls, documents: Iterable[Document], spec: PackSpec) -> PackedSequences:
        """A fresh CPU pack of these documents: `collate_fn=functools.partial(PackedSequences.collate, spec=batch.spec)`.

        Works in a DataLoader's worker processes (it pickles) and with `pin_memory=True`; give the result to `batch.load_`.
        Documents and errors as `load_`.
        """
        pack = cls._unwritten(spec, torch.device("cpu"))
        columns = read_documents("PackedSequences.collate", documents, spec)
        write_pack(pack._named(), columns, spec)
        pack._rows = columns.rows(spec)
        return pack

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], spec: PackSpec) -> PackedSequences:
        """The inverse of `tensors()`; no copy. `spec` is static: take it from the pack that the tensors came from."""
        names = list(spec.tensors())
        if len(tensors) != len(names):
            fix = "pass what tensors() gave"
            raise refusal("PackedSequences.from_tensors", "tensors", f"be {len(names)} ({', '.join(names)})", len(tensors), fix)
        return cls(*tensors[: len(FIELDS)], extras=dict(zip(names[len(FIELDS) :], tensors[len(FIELDS) :], strict=True)), spec=spec)

    @classmethod
    def _unwritten(cls, spec: PackSpec, device: torch.device) -> PackedSequences:
        return cls.from_tensors([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in spec.tensors().values()], spec)

    @classmethod
    def _empty(cls, spec: PackSpec, device: torch.device, staging: _Staging | None = None) -> PackedSequences:
        pack = cls._unwritten(spec, device)
        pack._staging = staging
        pack.load_([])
        return pack

    # --- loading ---

    def load_(self, documents: Iterable[Document] | PackedSequences) -> PackedSequences:
        """Replace what the pack holds, in place: pointers stay, and graphs and compiled functions see the new documents.

        On CUDA the copies go through pinned staging on the current stream, behind whatever that stream has been given. The host
        waits at most for the copies of the load before the last, so it may run two batches ahead of the device. A consumer on
        another stream must wait for this one. Loading before the backward of the last batch was issued corrupts it: autograd
        raises where it saved these tensors in eager code, a captured graph cannot tell. `PackedSlots` keeps several batches
        apart and does tell.

        Args:
            documents: each a 1-D list, numpy array or CPU tensor of integers, or a mapping: "tokens", every extra `[n, ...]`, and
                optionally "labels" `[n]` (the token that should stand at each place, -100 where none counts; shifted here, as
                tokens are). Empty documents are legal and take a slot; so is an empty list. Or a pack of the same `spec` (from
                `collate`): one that is pinned is copied from directly and must stay as it is until the copies are done.

        Returns:
            The pack itself.

        Raises:
            ValueError: too many documents or tokens, a document above `max_seqlen`, a wrong shape, length, name or device, an
                integer that its dtype cannot hold.
            TypeError: a document that is no numbers, or not integers.
            RuntimeError: a CUDA graph is being captured.
            Nothing is written before an error.
        """
        op = "PackedSequences.load_"
        device = self.tokens.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            fix = "load before the capture and before each replay: the graph reads these buffers"
            raise refusal(op, "the current stream", "not be capturing a CUDA graph", "a capture", fix, RuntimeError)
        if isinstance(documents, PackedSequences):
            self._copy_pack_(op, documents)
            self._rows = documents._rows
            return self
        columns = read_documents(op, documents, self.spec)
        if device.type == "cpu":
            write_pack(self._named(), columns, self.spec)
        elif device.type == "cuda":
            with torch.cuda.device(device):
                staged = self._stage().take()
                write_pack(staged, columns, self.spec)
                self._send_(staged)
        else:
            host = self._unwritten(self.spec, torch.device("cpu"))
            write_pack(host._named(), columns, self.spec)
            self._copy_(host._named())
        self._rows = columns.rows(self.spec)
        return self

    def _copy_pack_(self, op: str, pack: PackedSequences) -> None:
        if pack.spec != self.spec:
            fix = "collate with the spec of the pack that it is loaded into"
            raise refusal(op, "documents", f"be a pack of this spec ({self.spec})", str(pack.spec), fix)
        source = pack._named()
        on_cuda = self.tokens.device.type == "cuda"
        if not on_cuda or all(tensor.device.type != "cpu" or tensor.is_pinned() for tensor in source.values()):
            self._copy_(source)
            return
        with torch.cuda.device(self.tokens.device):
            staged = self._stage().take()
            for name, tensor in source.items():
                staged[name].copy_(tensor)
            self._send_(staged)

    def _stage(self) -> _Staging:
        if self._staging is None:
            self._staging = _Staging(self.spec, self.tokens.device)
        return self._staging

    def _send_(self, staged: Mapping[str, Tensor]) -> None:
        self._copy_(staged)
        self._stage().sent()

    @torch.no_grad()
    def _copy_(self, source: Mapping[str, Tensor]) -> None:
        for name, tensor in self._named().items():
            tensor.copy_(source[name], non_blocking=tensor.is_cuda)  # a copy to the host must have arrived when this returns

    # --- reading ---

    def _named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in FIELDS} | self.extras

    @property
    def loaded_rows(self) -> int | None:
        """How many rows, from the first, the documents take that were loaded last, each one's padding included.

        A number that the host has from `load_` or `collate`: what chooses a bucket (`thdops.graphs`). None in a pack that was put
        together otherwise, by `from_tensors` or as a pytree.
        """
        return self._rows

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in a fixed order: what a graphed callable takes. `from_tensors` puts them back together."""
        return tuple(self._named().values())

    def token_like(self) -> dict[str, Tensor]:
        """Every tensor that has a row per token, by name: tokens, labels, positions, padding_mask and the extras."""
        return {name: getattr(self, name) for name in ROW_FIELDS} | self.extras

    def shard(self, group: Group, partition: str = "zigzag") -> ShardedSequences:
        """This process's rows of the pack, shared out among the ranks of a group for `context_parallel.attention`.

        Every rank loads the same documents. No host sync and static shapes: call it inside the step, compiled or captured, and
        each replay shares out what was loaded last.

        Args:
            group: as for `context_parallel.attention`: a process group, its name, a `DeviceMesh`, or one group per axis.
            partition: "zigzag", which gives every rank the same work under a causal mask, or "contiguous".

        Returns:
            A `thdops.sharding.ShardedSequences`: n = T / W rows of every token-like tensor, extras included, with the metadata of
            the whole pack and of the rank's own rows. `ShardedSequences.of` takes a rank's number instead of a group.

        Raises:
            ValueError: `max_tokens` or `pad_multiple` is no multiple of 2W; no such partition; a group that this process is not in.
        """
        return ShardedSequences.of(self, *place_in("PackedSequences.shard", group), partition)

    def fits(self, documents: Iterable[Document]) -> bool:
        """Whether `load_` would find room for these documents."""
        return self.spec.fits(documents)

    def unpack(self, tensor: Tensor) -> list[Tensor]:
        """The rows of each document, as views of `tensor` `[T, ...]`. Reads offsets on the host: waits for the device.

        Raises:
            ValueError: `tensor` does not have T rows.
        """
        if tensor.dim() == 0 or tensor.shape[0] != self.spec.max_tokens:
            fix = "pass a tensor with the pack's rows as its first dimension"
            rule = f"have max_tokens ({self.spec.max_tokens}) rows"
            raise refusal("PackedSequences.unpack", "tensor", rule, f"shape {shape_of(tensor)}", fix)
        entries = self.spec.max_seqs + 1
        # One read, so one wait.
        host = torch.cat((self.cu_seqlens, self.cu_seqlens_padded, self.num_seqs.view(1).to(self.cu_seqlens.dtype))).tolist()
        valid, padded, count = host[:entries], host[entries:-1], host[-1]
        return [tensor[padded[b] : padded[b] + valid[b + 1] - valid[b]] for b in range(count)]

    def validate(self) -> None:
        """Say what is wrong with the pack, if its tensors were changed by hand. Reads on the host: waits for the device.

        Raises:
            TypeError, ValueError: a tensor of another shape, dtype or device than the pack was allocated with; anything that
                `packing.validate` names; offsets, counts and mask that contradict each other; a label on a row without a token.
        """
        op = "PackedSequences.validate"
        spec, named = self.spec, self._named()
        for name, (shape, dtype) in spec.tensors().items():
            if name not in named:
                raise refusal(op, "extras", f"hold {name}", "none of that name", "keep the tensors that were allocated")
            tensor = named[name]
            if tensor.dtype != dtype:
                wanted = str(dtype).removeprefix("torch.")
                raise refusal(op, name, f"be {wanted}", dtype_of(tensor), "keep the tensor that was allocated", TypeError)
            if tensor.shape != shape or tensor.device != self.tokens.device:
                rule = f"have shape {list(shape)} on {self.tokens.device}"
                raise refusal(op, name, rule, f"{shape_of(tensor)} on {tensor.device}", "keep the tensor that was allocated")
        validate(self.cu_seqlens, self.cu_seqlens_padded, spec.max_tokens, spec.max_seqlen, spec.pad_multiple)
        count, total = int(self.num_seqs), int(self.num_tokens)
        if not 0 <= count <= spec.max_documents:
            raise refusal(op, "num_seqs", f"be from 0 to {spec.max_documents}", count, "load_ the pack again")
        valid, padded = self.cu_seqlens.tolist(), self.cu_seqlens_padded.tolist()
        if valid[count] != total:
            raise refusal(op, "num_tokens", f"be the tokens of {count} documents ({valid[count]})", total, "load_ the pack again")
        last = min(count + (spec.tail == "sequence"), spec.max_seqs)
        for name, offsets in (("cu_seqlens", valid), ("cu_seqlens_padded", padded)):
            if offsets[last] != offsets[-1]:
                fix = "entries past the last sequence repeat its end"
                raise refusal(op, name, f"hold {last} sequences", f"a longer one: {offsets[last:]}", fix)
        documents = torch.zeros(spec.max_tokens, dtype=torch.bool, device="cpu")
        for b in range(count):
            documents[padded[b] : padded[b] + valid[b + 1] - valid[b]] = True
        mask = self.padding_mask.cpu()
        if not torch.equal(mask, ~documents):
            row = int((mask == documents).nonzero()[0])
            rule = "be True exactly on rows without a document token"
            raise refusal(op, "padding_mask", rule, f"{bool(mask[row])} on row {row}", "load_ the pack again")
        stray = (~documents & (self.labels.cpu() != IGNORE_INDEX)).nonzero()
        if len(stray):
            row = int(stray[0])
            got = f"{int(self.labels[row])} on row {row}"
            raise refusal(op, "labels", f"be {IGNORE_INDEX} on rows without a document token", got, "load_ the pack again")

    # --- moving ---

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """A pack of the same contents on `device`; tensors that stand there already are shared."""
        return self._moved([t.to(device, non_blocking=non_blocking) for t in self.tensors()])

    def pin_memory(self) -> PackedSequences:
        """A pack of the same contents in pinned memory: what a DataLoader calls with `pin_memory=True`."""
        return self._moved([t.pin_memory() for t in self.tensors()])

    def _moved(self, tensors: Sequence[Tensor]) -> PackedSequences:
        pack = self.from_tensors(tensors, self.spec)
        pack._rows = self._rows
        return pack

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"_staging": None}  # pinned buffers belong to a process

    def __repr__(self) -> str:
        return f"PackedSequences({self.spec}, device={getattr(self.tokens, 'device', None)})"  # contents would need a sync


def _flatten(pack: PackedSequences) -> tuple[list[Any], PackSpec]:
    return list(pack.tensors()), pack.spec


def _flatten_with_keys(pack: PackedSequences) -> tuple[list[tuple[Any, Any]], PackSpec]:
    # Keys in brackets: torch.export substitutes paths as text, and `.cu_seqlens` would match inside `.cu_seqlens_padded`.
    keys = [pytree.MappingKey(name) for name in pack.spec.tensors()]
    return list(zip(keys, pack.tensors(), strict=True)), pack.spec


def _unflatten(leaves: Iterable[Any], spec: PackSpec) -> PackedSequences:
    return PackedSequences.from_tensors(list(leaves), spec)


pytree.register_pytree_node(
    PackedSequences,
    _flatten,
    _unflatten,
    serialized_type_name="thdops.packing.PackedSequences",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=spec_to_json,
    from_dumpable_context=spec_from_json,
)
# Plain data, so that saved packs and exported programs load with `weights_only=True`.
torch.serialization.add_safe_globals([PackedSequences, PackSpec, Extra])


class PackedSlots:
    """Sets of buffers for micro-batches in flight: pipeline schedules, gradient accumulation. `slots[i]` is a `PackedSequences`.

        slots = PackedSlots(PackSpec(max_tokens=8192, max_seqs=64), slots=4, device="cuda")
        slots.load_(documents, i)       # slot i is in flight from here
        loss = model(slots[i])          # or graphs[i].replay(): a graph per slot, captured on slots[i]
        loss.backward()
        slots.release(i)                # everything that reads the slot has been issued

    A slot is in flight from `load_` until `release`; loading it in between is an error that names it. `release` belongs behind
    the call that issues the slot's backward (or its forward, where there is none): the host need not wait, because a later
    `load_` makes its stream wait for what was issued before `release`, on whichever stream that was. Both are host calls, outside
    a capture, so they work the same in eager, compiled and captured code.
    """

    def __init__(self, spec: PackSpec, slots: int, device: torch.device | str = "cpu") -> None:
        if slots < 1:
            raise refusal("PackedSlots", "slots", "be at least 1", slots, "pass one per micro-batch in flight")
        device, staging = torch.device(device), None
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            staging = _Staging(spec, device)
        self.spec = spec
        self._packs = tuple(PackedSequences._empty(spec, device, staging) for _ in range(slots))
        self._in_flight: set[int] = set()
        self._released: dict[int, torch.cuda.Event] = {}

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, slot: int) -> PackedSequences:
        return self._packs[slot]

    def __iter__(self) -> Iterator[PackedSequences]:
        return iter(self._packs)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The slots that were loaded and not released."""
        return tuple(sorted(self._in_flight))

    def load_(self, documents: Iterable[Document] | PackedSequences, slot: int) -> PackedSequences:
        """`PackedSequences.load_` into a slot that is free; returns it. After an error the slot is as it was.

        Raises:
            RuntimeError: the slot is in flight.
            IndexError: no such slot; TypeError: not a number.
            ValueError, TypeError: as `PackedSequences.load_`.
        """
        self._check_slot("load_", slot)
        if slot in self._in_flight:
            fix = f"call release({slot}) once its backward is issued, or allocate more slots"
            raise refusal("PackedSlots.load_", "slot", "be free", f"slot {slot}, whose backward is pending", fix, RuntimeError)
        pack = self._packs[slot]
        released = self._released.get(slot)
        if released is not None:
            torch.cuda.current_stream(pack.tokens.device).wait_event(released)
        pack.load_(documents)
        self._in_flight.add(slot)
        return pack

    def release(self, slot: int | None = None) -> None:
        """Free a slot, or all that are in flight; call it behind the last thing that reads the slot.

        Raises:
            RuntimeError: the slot is not in flight.
            IndexError: no such slot; TypeError: not a number.
        """
        if slot is not None:
            self._check_slot("release", slot)
            if slot not in self._in_flight:
                fix = "release a slot once per load_"
                raise refusal("PackedSlots.release", "slot", "be in flight", f"slot {slot}, which is free", fix, RuntimeError)
        for freed in self.in_flight if slot is None else (slot,):
            device = self._packs[freed].tokens.device
            if device.type == "cuda":
                self._released[freed] = _recorded(device)
            self._in_flight.discard(freed)

    def _check_slot(self, method: str, slot: int) -> None:
        check_integers(f"PackedSlots.{method}", slot=slot)
        if not 0 <= slot < len(self):
            raise refusal(f"PackedSlots.{method}", "slot", f"be from 0 to {len(self) - 1}", slot, "allocate more slots", IndexError)
