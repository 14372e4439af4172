"""Packing: what a pack holds, in-place loading, refusals, validation, streams of documents, slots."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thdops
from thdops.packing import IGNORE_INDEX, Extra, PackedSequences, PackedSlots, PackSpec, Tail, pack_documents, validate

FAST = settings(max_examples=40, deadline=None)
CU = functools.partial(torch.tensor, dtype=torch.int32)


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens differ from each other and from padding."""
    first = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(first, lengths, strict=True)]


def contents(pack: PackedSequences) -> list[Tensor]:
    return [tensor.clone() for tensor in pack.tensors()]


@st.composite
def loads(draw: st.DrawFn) -> tuple[PackSpec, list[list[int]], list[list[int]]]:
    """A capacity, documents that fit it, and others that fit it too."""
    multiple = draw(st.sampled_from([1, 2, 4]))
    tail: Tail = draw(st.sampled_from(["padding", "sequence"]))

    def lengths() -> list[int]:
        return draw(st.lists(st.integers(0, 9), max_size=5))

    first, second = lengths(), lengths()
    rows = max(sum(-(-n // multiple) * multiple for n in some) for some in (first, second))
    spec = PackSpec(
        max_tokens=max(rows + multiple * draw(st.integers(0, 3)), multiple),
        max_seqs=max(len(first), len(second)) + 1 + draw(st.integers(1, 3)),
        pad_multiple=multiple,
        tail=tail,
    )
    return spec, documents_of(first), documents_of(second)


# --- what a pack holds ------------------------------------------------------------------------------------------------------------


@FAST
@given(loads())
def test_a_pack_holds_its_documents_and_nothing_of_the_load_before(load: tuple[PackSpec, list[list[int]], list[list[int]]]) -> None:
    spec, before, documents = load
    pack = PackedSequences.collate(before, spec)
    assert pack.load_(documents) is pack
    pack.validate()

    assert [rows.tolist() for rows in pack.unpack(pack.tokens)] == documents
    assert [rows.tolist() for rows in pack.unpack(pack.labels)] == [[*d[1:], IGNORE_INDEX] if d else [] for d in documents]
    assert int(pack.num_seqs) == len(documents)
    assert int(pack.num_tokens) == sum(map(len, documents)) == int((~pack.padding_mask).sum())
    assert pack.tokens[pack.padding_mask].eq(0).all()
    assert pack.labels[pack.padding_mask].eq(IGNORE_INDEX).all()

    offsets = (pack.cu_seqlens, pack.cu_seqlens_padded)
    assert torch.equal(pack.positions, thdops.positions(*offsets, spec.max_tokens))
    assert pack.cu_seqlens_padded.remainder(spec.pad_multiple).eq(0).all()
    in_a_sequence = ~thdops.padding_mask(*offsets, spec.max_tokens)
    if spec.tail == "padding":
        assert torch.equal(in_a_sequence, ~pack.padding_mask)
    used = len(documents) + (spec.tail == "sequence")
    if spec.tail == "sequence":
        assert int(pack.cu_seqlens_padded[-1]) == spec.max_tokens
        dummy = thdops.sequence_ids(*offsets, spec.max_tokens) == len(documents)
        assert torch.equal(in_a_sequence, ~pack.padding_mask | dummy)
    for cu in offsets:
        assert cu[used:].eq(cu[-1]).all()


def test_exact_values_with_gaps_and_padding_tail() -> None:
    pack = PackedSequences.allocate(12, 4, pad_multiple=4, pad_token=9)
    pack.load_([[1, 2, 3, 4, 5], [], [6, 7]])
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 9, 9, 9, 6, 7, 9, 9]
    assert pack.labels.tolist() == [2, 3, 4, 5, -100, -100, -100, -100, 7, -100, -100, -100]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 0, 0]
    assert pack.cu_seqlens.tolist() == [0, 5, 5, 7, 7]
    assert pack.cu_seqlens_padded.tolist() == [0, 8, 8, 12, 12]
    assert [t.dtype for t in pack.tensors()] == [
        *(torch.int64, torch.int64, torch.int32, torch.bool, torch.int32, torch.int32, torch.int64, torch.int64)
    ]


def test_exact_values_with_a_tail_sequence() -> None:
    pack = PackedSequences.allocate(8, 3, pad_multiple=2, tail="sequence")
    pack.load_([[1, 2, 3]])
    assert pack.labels.tolist() == [2, 3, -100, -100, -100, -100, -100, -100]
    assert pack.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert pack.padding_mask.tolist() == [False] * 3 + [True] * 5
    assert pack.cu_seqlens.tolist() == [0, 3, 7, 7]
    assert pack.cu_seqlens_padded.tolist() == [0, 4, 8, 8]
    assert (int(pack.num_tokens), int(pack.num_seqs)) == (3, 1)
    pack.load_([[1] * 8])
    assert pack.cu_seqlens.tolist() == [0, 8, 8, 8]


def test_no_document_at_all() -> None:
    pack = PackedSequences.allocate(6, 2)
    pack.load_([])
    pack.validate()
    assert pack.padding_mask.all()
    assert int(pack.num_tokens) == int(pack.num_seqs) == int(pack.cu_seqlens[-1]) == 0
    assert pack.unpack(pack.tokens) == []


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(list, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(torch.tensor, id="int64 tensor"),
        pytest.param(lambda d: torch.tensor(d, dtype=torch.int16)[:], id="int16 tensor"),
        pytest.param(lambda d: torch.tensor([[t, 0] for t in d]).view(-1, 2)[:, 0], id="strided tensor"),
        pytest.param(lambda d: np.array(d, dtype=np.uint16), id="uint16 array"),
        pytest.param(lambda d: np.array(d[::-1], dtype=np.int32)[::-1], id="reversed array"),
        pytest.param(lambda d: np.frombuffer(np.array(d, dtype=np.int64).tobytes(), dtype=np.int64), id="read-only array"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_documents_come_in_many_forms(convert: object) -> None:
    documents = documents_of([4, 1, 3])
    pack = PackedSequences.allocate(10, 3)
    pack.load_(map(convert, documents))  # type: ignore[arg-type]
    assert [rows.tolist() for rows in pack.unpack(pack.tokens)] == documents


def test_own_labels_are_shifted_within_their_document() -> None:
    pack = PackedSequences.allocate(8, 2)
    pack.load_([{"tokens": [1, 2, 3], "labels": [-100, -100, 30]}, {"tokens": [4, 5]}])
    assert pack.labels.tolist() == [-100, 30, -100, 5, -100, -100, -100, -100]


def test_extras_have_their_own_dtype_and_shape() -> None:
    extras = (Extra("weight", torch.bfloat16), Extra("image", torch.float32, (2,)))
    pack = PackedSequences.allocate(8, 3, pad_multiple=2, extras=extras)
    pack.load_(
        [
            {"tokens": [1], "weight": [0.5], "image": torch.ones(1, 2)},
            {"tokens": [], "weight": [], "image": []},
            {"tokens": [2, 3], "weight": np.array([1.0, 2.0]), "image": [[2, 3], [4, 5]]},
        ]
    )
    assert list(pack.token_like()) == ["tokens", "labels", "positions", "padding_mask", "weight", "image"]
    assert pack.extras["weight"].tolist() == [0.5, 0, 1, 2, 0, 0, 0, 0]
    assert pack.extras["weight"].dtype == torch.bfloat16
    assert pack.extras["image"].tolist() == [[1, 1], [0, 0], [2, 3], [4, 5], [0, 0], [0, 0], [0, 0], [0, 0]]
    pack.validate()
    assert pack.unpack(pack.extras["image"])[2].tolist() == [[2, 3], [4, 5]]


def test_integers_at_the_ends_of_their_dtype_are_kept() -> None:
    extras = (Extra("small", torch.uint8), Extra("large", torch.uint64))
    pack = PackedSequences.allocate(4, 2, extras=extras)
    pack.load_([{"tokens": np.array([0, 2**63 - 1], dtype=np.uint64), "small": [0, 255], "large": torch.tensor([0, 2**63 - 1])}])
    assert pack.tokens.tolist() == [0, 2**63 - 1, 0, 0]
    assert pack.extras["small"].tolist() == [0, 255, 0, 0]
    assert pack.extras["large"].tolist() == [0, 2**63 - 1, 0, 0]


def test_documents_may_be_views_of_the_pack_itself() -> None:
    """Whatever is written first must not be what a later column is read from."""
    pack = PackedSequences.allocate(8, 3, extras=(Extra("weight", torch.int32), Extra("place", torch.int32)))
    pack.load_([{"tokens": [1, 2], "weight": [10, 20], "place": [0, 0]}, {"tokens": [3, 4], "weight": [30, 40], "place": [5, 6]}])
    old = {name: pack.unpack(rows)[1] for name, rows in pack.token_like().items()}
    pack.load_([{"tokens": old["tokens"], "weight": old["positions"], "place": old["weight"]}])
    assert pack.tokens.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert pack.extras["weight"].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert pack.extras["place"].tolist() == [30, 40, 0, 0, 0, 0, 0, 0]


def test_a_default_device_does_not_catch_host_tensors() -> None:
    torch.set_default_device("meta")
    try:
        pack = PackedSequences.allocate(8, 2, pad_multiple=2, tail="sequence")
        pack.load_([[1, 2, 3]])
    finally:
        torch.set_default_device(None)
    assert pack.tokens.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_loading_is_in_place() -> None:
    pack = PackedSequences.allocate(16, 4, extras=(Extra("weight", torch.float32),))
    pointers = [t.data_ptr() for t in pack.tensors()]
    pack.load_([{"tokens": [1, 2], "weight": [1.0, 1.0]}])
    pack.load_(PackedSequences.collate([], pack.spec))
    assert [t.data_ptr() for t in pack.tensors()] == pointers


def test_loading_before_the_backward_is_noticed_by_autograd() -> None:
    pack = PackedSequences.allocate(8, 2)
    pack.load_([[1, 2, 3]])
    table = torch.ones(10, 4, requires_grad=True)
    out = torch.nn.functional.embedding(pack.tokens, table).sum()
    pack.load_([[4, 5]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# --- refusals ---------------------------------------------------------------------------------------------------------------------

SMALL = PackSpec(max_tokens=8, max_seqs=3, max_seqlen=5, pad_multiple=2)
WITH_EXTRA = PackSpec(max_tokens=8, max_seqs=3, extras=(Extra("weight", torch.int32),))

REFUSED_LOADS = {
    "too many documents": (SMALL, [[1]] * 4, ValueError, r"documents must be at most 3, got 4; pack fewer \(pack_documents"),
    "no slot for the tail": (
        PackSpec(8, 3, tail="sequence"),
        [[1]] * 3,
        ValueError,
        r"at most 2 \(one slot of max_seqs is the tail's\)",
    ),
    "too many tokens": (PackSpec(8, 3), [[1] * 5, [1] * 4], ValueError, r"fit max_tokens \(8\), got 9 tokens; pack fewer"),
    "too many rows": (SMALL, [[1] * 5, [1], [1]], ValueError, r"got 7 tokens \(10 rows, each length rounded up to 2\)"),
    "above max_seqlen": (SMALL, [[1], [1] * 6], ValueError, r"documents\[1\] must have at most max_seqlen \(5\) tokens, got 6"),
    "one document, not a list": (SMALL, [1, 2], ValueError, r"documents\[0\] must have shape \[tokens\].*list of documents"),
    "two dimensions": (SMALL, [[[1, 2]]], ValueError, r"must have shape \[tokens\], got shape \[1, 2\]"),
    "text": (SMALL, ["word"], TypeError, r"documents\[0\] must be numbers.*got str; tokenise it first"),
    "floats": (SMALL, [[1.5]], TypeError, r"documents\[0\] must hold integers, got float32"),
    "bools": (SMALL, [[True]], TypeError, "must hold integers, got bool"),
    "not on the CPU": (SMALL, [torch.ones(1, dtype=torch.int64, device="meta")], ValueError, "must be on the CPU, got meta"),
    "unaligned labels": (
        SMALL,
        [{"tokens": [1, 2], "labels": [1]}],
        ValueError,
        r"\['labels'\] must have one entry per token \(2\), got 1",
    ),
    "an extra is missing": (WITH_EXTRA, [[1, 2]], ValueError, r"documents\[0\] must hold tokens, weight and.*got no weight"),
    "an unknown name": (SMALL, [{"tokens": [1], "mask": [1]}], ValueError, "got also mask"),
    "an extra of another dtype": (WITH_EXTRA, [{"tokens": [1], "weight": [0.5]}], TypeError, "must hold int32, got float32"),
    "an extra above its dtype": (
        WITH_EXTRA,
        [{"tokens": [1], "weight": [2**40]}],
        ValueError,
        r"must hold int32 \(-2.*got 1099511627776",
    ),
    "an extra below its dtype": (
        PackSpec(max_tokens=8, max_seqs=3, extras=(Extra("weight", torch.uint8),)),
        [{"tokens": [1, 2], "weight": [255, -1]}],
        ValueError,
        r"\['weight'\] must hold uint8 \(0 to 255\), got -1; it would wrap around",
    ),
    "a token above int64": (
        SMALL,
        [np.array([1, 2**63 + 1], dtype=np.uint64)],
        ValueError,
        "must hold int64 .*got 9223372036854775809",
    ),
    "a pack of another spec": (SMALL, PackedSequences.allocate(8, 2), ValueError, "must be a pack of this spec"),
}


@pytest.mark.parametrize("case", REFUSED_LOADS)
def test_a_refused_load_writes_nothing(case: str) -> None:
    spec, documents, error, text = REFUSED_LOADS[case]
    weights = {"weight": [7]} if spec.extras else {}
    pack = PackedSequences.collate([{"tokens": [7], **weights}], spec)
    before = contents(pack)
    with pytest.raises(error, match=text):
        pack.load_(documents)
    assert all(map(torch.equal, before, pack.tensors()))


def test_more_documents_than_capacity_are_refused_by_collate_too() -> None:
    """Megatron-LM#5619, PR#5046: nothing is cut off."""
    with pytest.raises(ValueError, match=r"PackedSequences.collate: documents must be at most 2, got 3"):
        PackedSequences.collate([[1], [2], [3]], PackSpec(8, 2))


def test_lengths_4_and_3_in_10_rows_for_two_ranks() -> None:
    """TransformerEngine#1930: 10 is no multiple of 4, refused up front; with 12 every token is there."""
    with pytest.raises(ValueError, match=r"max_tokens must be a multiple of pad_multiple \(4\), got 10; pass 12"):
        PackedSequences.allocate(10, 2, pad_multiple=4)
    pack = PackedSequences.allocate(12, 2, pad_multiple=4)
    pack.load_([[1, 2, 3, 4], [5, 6, 7]])
    assert [rows.tolist() for rows in pack.unpack(pack.tokens)] == [[1, 2, 3, 4], [5, 6, 7]]
    assert pack.cu_seqlens_padded.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_seqs": 0}, "max_seqs must be at least 1"),
        ({"pad_multiple": 0}, "pad_multiple must be at least 1"),
        ({"max_seqlen": 0}, "max_seqlen must be at least 1"),
        ({"max_tokens": 2**31}, r"max_tokens must be below 2\*\*31"),
        ({"tail": "drop"}, "tail must be 'padding' or 'sequence', got 'drop'"),
        ({"tail": "sequence", "max_seqs": 1}, "max_seqs must be at least 2 with tail='sequence'"),
        ({"tail": "sequence", "max_seqlen": 7}, r"max_seqlen must be None or at least max_tokens \(8\)"),
        ({"extras": (Extra("tokens", torch.int32),)}, "extras must have names of their own, got 'tokens'"),
        ({"extras": (Extra("a", torch.int32), Extra("a", torch.int64))}, "extras must have names of their own, got 'a'"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"PackSpec: {text}"):
        PackSpec(**{"max_tokens": 8, "max_seqs": 2, **arguments})


def test_unpack_refuses_other_row_counts() -> None:
    with pytest.raises(ValueError, match=r"tensor must have max_tokens \(8\) rows, got shape \[4, 2\]"):
        PackedSequences.allocate(8, 2).unpack(torch.zeros(4, 2))


# --- validate ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"cu_seqlens": torch.tensor([0.0, 1.0])}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
        ({"cu_seqlens": CU([0, 2]), "cu_seqlens_padded": torch.tensor([0, 2])}, TypeError, "must have the dtype of cu_seqlens"),
        ({"cu_seqlens": CU([0, 2]), "cu_seqlens_padded": CU([0, 2, 2])}, ValueError, "as many entries as cu_seqlens"),
        ({"cu_seqlens": CU([-1, -1, -1])}, ValueError, "cu_seqlens_from_positions found more sequences than its max_seqs"),
        ({"cu_seqlens": CU([5, 9])}, ValueError, "cu_seqlens must start at 0, got 5; prepend the 0"),
        ({"cu_seqlens": CU([0, 4, 3])}, ValueError, r"cu_seqlens\[2\] must be at least the entry before it \(4\), got 3"),
        ({"cu_seqlens": CU([0, -2])}, ValueError, r"cu_seqlens\[1\] must be at least the entry before it \(0\), got -2"),
        ({"cu_seqlens": CU([0, 1]), "cu_seqlens_padded": CU([-1, 1])}, ValueError, r"cu_seqlens_padded\[0\] must not be negative"),
        ({"cu_seqlens": CU([0, 1, 2]), "cu_seqlens_padded": CU([0, 3, 1])}, ValueError, r"cu_seqlens_padded\[2\] must be at least"),
        (
            {"cu_seqlens": CU([0, 3, 7]), "cu_seqlens_padded": CU([0, 4, 7])},
            ValueError,
            r"give sequence 1 at most its padded length \(3\)",
        ),
        ({"cu_seqlens": CU([0, 9]), "total_tokens": 8}, ValueError, r"cu_seqlens\[-1\] must be at most total_tokens \(8\), got 9"),
        (
            {"cu_seqlens": CU([0, 3]), "cu_seqlens_padded": CU([6, 9]), "total_tokens": 8},
            ValueError,
            r"cu_seqlens_padded\[-1\] must be at most total_tokens \(8\), got 9",
        ),
        ({"cu_seqlens": CU([0, 2, 7]), "max_seqlen": 4}, ValueError, r"at least every length \(sequence 1 has 5\), got 4"),
        (
            {"cu_seqlens": CU([0, 3]), "cu_seqlens_padded": CU([0, 6]), "pad_multiple": 4},
            ValueError,
            r"cu_seqlens_padded\[1\] must be a multiple of pad_multiple \(4\), got 6",
        ),
        ({"cu_seqlens": CU([0, 4]), "total_tokens": 10, "pad_multiple": 4}, ValueError, "total_tokens must be a multiple"),
        ({"cu_seqlens": CU([0, 4]), "pad_multiple": 0}, ValueError, "pad_multiple must be at least 1, got 0"),
    ],
)
def test_validate_names_what_is_wrong(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"validate: .*{text}"):
        validate(**arguments)  # type: ignore[arg-type]


def test_validate_accepts_what_ops_accept() -> None:
    validate(CU([0]))
    validate(CU([0, 0, 5, 5]), None, 7, max_seqlen=5)
    validate(torch.tensor([0, 3, 3, 7]), torch.tensor([4, 8, 12, 16]), 20, 4, pad_multiple=4)
    validate(thdops.cu_seqlens_from_positions(CU([0, 1, 2, 0, 1, -1]), 4), None, 6)


def test_validate_recognises_the_overflow_mark_of_the_op() -> None:
    with pytest.raises(ValueError, match="more sequences than its max_seqs"):
        validate(thdops.cu_seqlens_from_positions(CU([0, 0, 0]), 2))


def spoil(name: str, row: int | None, value: int) -> object:
    def change(pack: PackedSequences) -> None:
        tensor = getattr(pack, name)
        tensor[... if row is None else row] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (spoil("cu_seqlens", 1, 9), r"cu_seqlens\[2\] must be at least the entry before it"),
        (spoil("num_tokens", None, 6), r"num_tokens must be the tokens of 2 documents \(7\), got 6"),
        (spoil("num_seqs", None, 5), "num_seqs must be from 0 to 4, got 5"),
        (spoil("cu_seqlens_padded", -1, 12), r"cu_seqlens_padded must hold 2 sequences, got a longer one"),
        (spoil("padding_mask", 0, 1), "padding_mask must be True exactly on rows without a document token, got True on row 0"),
        (spoil("labels", 11, 3), "labels must be -100 on rows without a document token, got 3 on row 11"),
        (lambda pack: setattr(pack, "tokens", pack.tokens.int()), "tokens must be int64, got int32"),
        (lambda pack: setattr(pack, "positions", pack.positions[:4]), r"positions must have shape \[12\]"),
    ],
)
def test_a_pack_changed_by_hand_is_found_out(change: object, text: str) -> None:
    pack = PackedSequences.allocate(12, 4, pad_multiple=4)
    pack.load_(documents_of([4, 3]))
    pack.validate()
    change(pack)  # type: ignore[operator]
    with pytest.raises((TypeError, ValueError), match=text):
        pack.validate()


# --- a stream of documents --------------------------------------------------------------------------------------------------------


@FAST
@given(
    st.lists(st.integers(0, 30), max_size=12),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["padding", "sequence"]),
)
def test_pack_documents_loses_nothing(lengths: list[int], slots: int, multiple: int, max_seqlen: int | None, tail: Tail) -> None:
    spec = PackSpec(8, slots + 1, max_seqlen if tail == "padding" else None, multiple, tail)
    pack = PackedSequences.collate([], spec)
    seen: list[int] = []
    for documents in spec.pack(documents_of(lengths), split=True):
        assert documents
        assert pack.fits(documents)
        pack.load_(documents)
        seen += [token for rows in pack.unpack(pack.tokens) for token in rows.tolist()]
    assert seen == list(range(1, sum(lengths) + 1))


def test_pack_documents_is_greedy_lazy_and_keeps_documents_whole() -> None:
    def endless() -> object:
        for n in [3, 3, 4, 0, 8, 1]:
            yield [n] * n
        raise AssertionError("read beyond what was asked for")

    packs = pack_documents(endless(), max_tokens=8, max_seqs=4)  # type: ignore[arg-type]
    assert next(packs) == [[3] * 3, [3] * 3]
    assert next(packs) == [[4] * 4, []]
    assert next(packs) == [[8] * 8]


def test_pack_documents_counts_padded_rows_and_slots() -> None:
    assert list(pack_documents([[1] * 5, [2], [3]], 8, 4, pad_multiple=4)) == [[[1] * 5], [[2], [3]]]
    assert list(pack_documents([[1], [2], [3]], 8, 2)) == [[[1], [2]], [[3]]]


def test_pack_documents_refuses_or_splits_long_documents() -> None:
    with pytest.raises(ValueError, match=r"pack_documents: documents\[1\] must have at most 8 tokens.*got 9; pass split=True"):
        list(pack_documents([[1], [1] * 9], 8, 4))
    long = {"tokens": torch.arange(9), "weight": np.arange(9)}
    (first,), (second,) = pack_documents([long], 8, 4, max_seqlen=8, split=True)
    assert first["tokens"].tolist() == first["weight"].tolist() == list(range(8))  # type: ignore[index]
    assert second["weight"].tolist() == [8]  # type: ignore[index]
    with pytest.raises(ValueError, match="max_tokens must be a multiple of pad_multiple"):
        pack_documents([], 10, 4, pad_multiple=4)
    without = {"tokens": [1, 2, 3], "labels": None}  # None says that there are none, as load_ takes it
    assert list(pack_documents([without], 2, 1, split=True)) == [
        [{"tokens": [1, 2], "labels": None}],
        [{"tokens": [3], "labels": None}],
    ]


def test_what_has_no_length_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"pack_documents: documents\[1\] must have a length, got int; documents is a list"):
        list(pack_documents([[1], 5], 8, 4))  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"fits: documents\[0\] must have a length, got Tensor"):
        SMALL.fits([torch.tensor(5)])
    with pytest.raises(ValueError, match=r"pack_documents: documents\[0\] must hold tokens, got only labels; name them so"):
        list(pack_documents([{"labels": [1]}], 8, 4))


# --- slots ------------------------------------------------------------------------------------------------------------------------


def test_a_slot_in_flight_is_not_reloaded() -> None:
    slots = PackedSlots(PackSpec(8, 2), slots=2)
    slots.load_([[1, 2]], 0)
    slots.load_([[3]], 1)
    assert slots.in_flight == (0, 1)
    with pytest.raises(RuntimeError, match=r"slot must be free, got slot 1, whose backward is pending; call release\(1\)"):
        slots.load_([[4]], 1)
    assert slots[1].tokens.tolist() == [3] + [0] * 7
    slots.release(1)
    assert slots.load_([[4]], 1) is slots[1]
    assert [int(pack.tokens[0]) for pack in slots] == [1, 4]
    slots.release()
    assert slots.in_flight == ()


def test_slots_share_no_memory() -> None:
    slots = PackedSlots(PackSpec(8, 2), slots=3)
    pointers = [t.untyped_storage().data_ptr() for pack in slots for t in pack.tensors()]
    assert len(set(pointers)) == len(pointers) == 3 * 8


def test_a_refused_load_leaves_its_slot_free() -> None:
    slots = PackedSlots(PackSpec(8, 2), slots=1)
    with pytest.raises(ValueError, match="at most 2"):
        slots.load_([[1]] * 3, 0)
    assert slots.in_flight == ()
    slots.load_([[1]], 0)


def test_wrong_slots_are_refused() -> None:
    slots = PackedSlots(PackSpec(8, 2), slots=2)
    with pytest.raises(IndexError, match=r"PackedSlots.load_: slot must be from 0 to 1, got 2"):
        slots.load_([], 2)
    with pytest.raises(RuntimeError, match="slot must be in flight, got slot 0, which is free"):
        slots.release(0)
    slots.load_([], 1)
    not_one: Any = True
    with pytest.raises(TypeError, match=r"PackedSlots\.release: slot must be a Python number, got a bool"):
        slots.release(not_one)
    assert slots.in_flight == (1,)
    with pytest.raises(ValueError, match="slots must be at least 1"):
        PackedSlots(PackSpec(8, 2), slots=0)
