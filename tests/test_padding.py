"""What is special to the padding ops. T rows, B sequences, W context-parallel ranks; conformance covers what every op shares."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thdops
from thdops.ops.padding import reference

FUZZ = settings(max_examples=60, deadline=None)


class Batch(NamedTuple):
    """A random packed batch: the metadata, T, and what a plain loop says of each row: (sequence, offset), or None on padding."""

    cu_seqlens: Tensor
    padded: Tensor | None
    total: int
    rows: list[tuple[int, int] | None]

    @property
    def mask(self) -> Tensor:
        return torch.tensor([row is None for row in self.rows], dtype=torch.bool)


def offsets(lengths: list[int], first: int = 0) -> list[int]:
    ends = [first]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def batches(draw: st.DrawFn, unit: int = 1) -> Batch:
    """Up to 6 sequences; padded lengths, the rows before the first and T are multiples of `unit`."""
    count = draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    before, behind = (unit * draw(st.integers(0, 3)) for _ in range(2))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    if unit == 1 and draw(st.booleans()):
        owned, valid = lengths, torch.tensor(offsets(lengths, before), dtype=dtype)
        padded = None
    else:
        owned = [unit * (-(-length // unit) + draw(st.integers(0, 2))) for length in lengths]
        valid = torch.tensor(offsets(lengths, draw(st.integers(0, 2))), dtype=dtype)
        padded = torch.tensor(offsets(owned, before), dtype=dtype)
    rows: list[tuple[int, int] | None] = [None] * before
    for b, (length, size) in enumerate(zip(lengths, owned, strict=True)):
        rows += [(b, i) if i < length else None for i in range(size)]
    rows += [None] * behind
    return Batch(valid, padded, len(rows), rows)


# --- the reference against a plain loop -------------------------------------------------------------------------------------------


@FUZZ
@given(batches())
def test_row_maps_agree_with_a_loop(batch: Batch) -> None:
    args = (batch.cu_seqlens, batch.padded, batch.total)
    assert thdops.padding_mask(*args).tolist() == [row is None for row in batch.rows]
    assert thdops.sequence_ids(*args).tolist() == [-1 if row is None else row[0] for row in batch.rows]
    assert thdops.positions(*args).tolist() == [0 if row is None else row[1] for row in batch.rows]


@FUZZ
@given(batches())
def test_zero_fill_agrees_with_a_loop(batch: Batch) -> None:
    x = torch.full((batch.total, 3), float("nan"))
    for r, row in enumerate(batch.rows):
        if row is not None:
            x[r] = r + 1.0
    expected = [[0.0 if row is None else r + 1.0] * 3 for r, row in enumerate(batch.rows)]
    assert thdops.zero_fill(x, batch.cu_seqlens, batch.padded).tolist() == expected
    thdops.zero_fill_(x, batch.cu_seqlens, batch.padded)
    assert x.tolist() == expected


@FUZZ
@given(batches())
def test_compact_rows_is_a_permutation_that_round_trips(batch: Batch) -> None:
    index, inverse = thdops.compact_rows(batch.cu_seqlens, batch.padded, batch.total)
    valid = [r for r, row in enumerate(batch.rows) if row is not None]
    padding = [r for r, row in enumerate(batch.rows) if row is None]
    assert index.tolist() == valid + padding
    x = torch.arange(batch.total)
    assert x.index_select(0, index).index_select(0, inverse).tolist() == x.tolist()
    # What the docstring promises to a kernel that knows one cu_seqlens: its offsets fit the compacted rows.
    ids = thdops.sequence_ids(batch.cu_seqlens, batch.padded, batch.total)[index]
    assert ids.tolist() == thdops.sequence_ids(batch.cu_seqlens - batch.cu_seqlens[0], None, batch.total).tolist()


@FUZZ
@given(batches(), st.integers(0, 30), st.integers(0, 30))
def test_slice_has_the_rows_of_the_whole(batch: Batch, start: int, length: int) -> None:
    sliced = thdops.slice_cu_seqlens(batch.cu_seqlens, batch.padded, start, length)
    window = (batch.rows + [None] * 60)[start : start + length]
    assert thdops.padding_mask(*sliced, length).tolist() == [row is None for row in window]
    assert thdops.sequence_ids(*sliced, length).tolist() == [-1 if row is None else row[0] for row in window]
    assert sliced[0][0] == 0
    assert all(piece.diff().min() >= 0 for piece in sliced if piece.numel() > 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_positions_of_a_rank_agree_with_its_partition(world: int) -> None:
    @FUZZ
    @given(batches(unit=2 * world))
    def agree(batch: Batch) -> None:
        starts = batch.cu_seqlens if batch.padded is None else batch.padded
        pieces = [0, *starts.tolist(), batch.total]
        seen: list[int] = []
        for rank in range(world):
            mine: list[int] = []
            for part, (begin, end) in enumerate(pairwise(pieces)):
                rows = list(range(begin, end))
                if part in (0, len(pieces) - 2):  # rows of no sequence are split contiguously
                    share = len(rows) // world
                    mine += rows[rank * share : (rank + 1) * share]
                else:  # zigzag: chunks rank and 2W-1-rank of 2W
                    chunk = len(rows) // (2 * world)
                    for c in (rank, 2 * world - 1 - rank):
                        mine += rows[c * chunk : (c + 1) * chunk]
            got = thdops.positions(batch.cu_seqlens, batch.padded, len(mine), cp_size=world, cp_rank=rank)
            assert got.tolist() == [0 if (row := batch.rows[r]) is None else row[1] for r in mine]
            seen += mine
        assert sorted(seen) == list(range(batch.total))

    agree()


# --- metadata from positions and lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "max_seqs", "expected"),
    [
        ([0, 1, 2, 0, 1, 0], 5, [0, 3, 5, 6, 6, 6]),
        ([0, 1, 2, 0, 1, 0], 3, [0, 3, 5, 6]),
        ([7, 8, 9, 0, 1], 3, [0, 3, 5, 5]),  # the first row continues a sequence that was cut before this batch
        ([0, 1, 0, 1, -1, -1], 3, [0, 2, 4, 4]),  # negative tail belongs to nobody
        ([0, 0, 0], 3, [0, 1, 2, 3]),  # sequences of one row
        ([0, 1, 5, 6, 6], 4, [0, 2, 4, 5, 5]),  # a jump and a repeat both start a sequence
        ([-1, -1], 2, [0, 0, 0]),
        ([], 2, [0, 0, 0]),
        ([0, 1, 2, 0, 1, 0], 2, [-1, -1, -1]),  # one sequence too many: nothing is cut off silently
        ([0, 0, 0, 0, -1], 1, [-1, -1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_from_positions(ids: list[int], max_seqs: int, expected: list[int], dtype: torch.dtype) -> None:
    got = thdops.cu_seqlens_from_positions(torch.tensor(ids, dtype=dtype), max_seqs)
    assert got.tolist() == expected
    assert got.dtype == torch.int32


@FUZZ
@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 4), st.integers(0, 3))
def test_positions_and_cu_seqlens_are_inverse(lengths: list[int], tail: int, spare: int) -> None:
    ends = torch.tensor(offsets(lengths) + [sum(lengths)] * spare, dtype=torch.int32)
    total = sum(lengths) + tail
    ids = thdops.positions(ends, None, total).masked_fill(thdops.padding_mask(ends, None, total), -1)
    # No sequence at all still needs one slot.
    expected = ends.tolist() if len(ends) > 1 else [0, 0]
    assert thdops.cu_seqlens_from_positions(ids, len(expected) - 1).tolist() == expected


def test_rows_of_an_overflowing_batch_all_count_as_padding() -> None:
    overflowing = thdops.cu_seqlens_from_positions(cu(0, 1, 0, 1, 0), 2)
    assert thdops.padding_mask(overflowing, None, 5).all()


@pytest.mark.parametrize(
    ("lengths", "max_seqs", "expected"),
    [([3, 0, 4], 3, [0, 3, 3, 7]), ([3, 4], 4, [0, 3, 7, 7, 7]), ([3, -9, 4], 3, [0, 3, 3, 7]), ([], 2, [0, 0, 0]), ([], 0, [0])],
)
def test_cu_seqlens_from_lengths(lengths: list[int], max_seqs: int, expected: list[int]) -> None:
    got = thdops.cu_seqlens_from_lengths(torch.tensor(lengths, dtype=torch.int64), max_seqs)
    assert got.tolist() == expected
    assert got.dtype == torch.int32


# --- in place ---------------------------------------------------------------------------------------------------------------------


def test_zero_fill_in_place_takes_one_or_many() -> None:
    one, two = torch.ones(6, 2), torch.ones(5, 3)
    thdops.zero_fill_(one, cu(0, 3, 4))
    assert one.sum(1).tolist() == [2, 2, 2, 2, 0, 0]
    thdops.zero_fill_((one, two), (cu(0, 1), cu(0, 2)), (cu(0, 2), cu(0, 4)))
    assert one.sum(1).tolist() == [2, 0, 0, 0, 0, 0]
    assert two.sum(1).tolist() == [3, 3, 0, 0, 0]
    one, two = torch.ones(6, 2), torch.ones(5, 3)
    thdops.zero_fill_([one, two], cu(0, 1), cu(0, 2))
    assert one.sum().item() == 2
    assert two.sum().item() == 3


@pytest.mark.parametrize("dim", [1, 2])
def test_zero_fill_in_place_leaves_the_rest_of_a_fused_buffer(dim: int) -> None:
    fused = torch.ones(8, *((3, 2) if dim == 1 else (2, 3)), 4)
    before = fused.clone()
    thdops.zero_fill_([fused.select(dim, 0), fused.select(dim, 2)], cu(0, 2, 3), cu(0, 4, 6))
    assert torch.equal(fused.select(dim, 1), before.select(dim, 1))
    assert fused.select(dim, 0).sum((1, 2)).tolist() == [8, 8, 0, 0, 8, 0, 0, 0]


def test_zero_fill_in_place_keeps_every_bit_of_a_valid_row() -> None:
    patterns = torch.tensor([0x7FC00001, -1, 0x7F800001, -0x80000000, 1], dtype=torch.int32)  # NaNs with payloads, -0.0, a denormal
    x = patterns.view(torch.float32).clone()
    thdops.zero_fill_(x, cu(0, 4))
    assert x.view(torch.int32).tolist() == [*patterns[:4].tolist(), 0]


def test_zero_fill_in_place_refuses_a_tensor_that_requires_grad() -> None:
    x = torch.ones(5, 2, requires_grad=True)
    with pytest.raises(ValueError, match="must not require grad in grad mode"):
        thdops.zero_fill_(x, cu(0, 3))
    with pytest.raises(ValueError, match="must not require grad in grad mode"):
        thdops.zero_fill_([torch.ones(5), x * 2], cu(0, 3))
    with pytest.raises(Exception, match="must not require grad in grad mode"):
        torch.compile(lambda x: thdops.zero_fill_(x * 2, cu(0, 3)), backend="aot_eager", fullgraph=True)(x)
    with torch.no_grad():
        thdops.zero_fill_(x, cu(0, 3))
    assert x.sum().item() == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_zero_fill_in_place_is_seen_by_autograd(device: str) -> None:
    x, weight = torch.ones(5, 2, device=device), torch.ones(5, 2, device=device, requires_grad=True)
    version = x._version
    loss = (x * weight).sum()  # saves x
    thdops.zero_fill_(x.t().t(), cu(0, 3).to(device))
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_zero_fill_in_place_works_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(5, 2)
        thdops.zero_fill_(x, cu(0, 3))
        assert x.sum().item() == 6


# --- gradients --------------------------------------------------------------------------------------------------------------------

# name -> a scalar whose gradient reaches `y` with strides of that kind
GRADIENTS = {
    "expanded": lambda y: y.sum(),
    "row expanded": lambda y: (y.sum(0) * torch.arange(1.0, 4.0)).sum(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(24.0).view(3, 8)).sum(),
    "slice of a cat": lambda y: (torch.cat((y, y * 2), dim=1) * torch.arange(48.0).view(8, 6)).sum(),
    "some rows": lambda y: (y[::2] * torch.arange(12.0).view(4, 3)).sum(),
}


def _grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("function", [thdops.zero_fill, thdops.zero_fill_grad])
def test_gradients_of_any_strides_are_zero_filled(kind: str, function: Any) -> None:
    batch = (cu(0, 2, 4), cu(0, 3, 6))
    x = torch.randn(8, 3, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    GRADIENTS[kind](function(x, *batch)).backward()
    GRADIENTS[kind](plain * 1).backward()
    keep = ~thdops.padding_mask(*batch, 8)
    grad, plain_grad = _grad_of(x), _grad_of(plain)
    assert torch.equal(grad[keep], plain_grad[keep])
    assert grad[~keep].view(torch.int32).eq(0).all()  # +0.0, not -0.0
    assert grad.is_contiguous()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poison_in_padding_reaches_neither_output_nor_gradient(poison: float) -> None:
    batch = (cu(0, 2, 4), cu(0, 3, 6))
    mask = thdops.padding_mask(*batch, 8)
    x = torch.ones(8, 3).masked_fill(mask[:, None], poison).requires_grad_()
    y = thdops.zero_fill(x, *batch)
    y.backward(torch.full((8, 3), 2.0).masked_fill(mask[:, None], poison))
    assert y.sum().item() == 12
    assert _grad_of(x).sum().item() == 24


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_zero_fill_grad_is_the_identity_forward(backend: str | None) -> None:
    batch = (cu(0, 2, 4), cu(0, 3, 6))

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return (thdops.zero_fill_grad(x, *batch) * weight).sum()

    run = torch.compile(step, backend=backend, fullgraph=True) if backend else step
    x = torch.randn(8, 3, requires_grad=True)
    weight = torch.full((8, 3), float("nan"))
    weight[[0, 1, 3, 4]] = 5.0
    run(x, weight).backward()
    assert _grad_of(x).sum(1).tolist() == [15, 15, 0, 15, 15, 0, 0, 0]
    assert thdops.zero_fill_grad(x, *batch).data_ptr() == x.data_ptr()
    assert torch.equal(thdops.zero_fill_grad(x, *batch), x)


@pytest.mark.parametrize("function", [thdops.zero_fill, thdops.zero_fill_grad])
def test_metadata_overwritten_before_the_backward_raises(function: Any) -> None:
    ends = cu(0, 2, 4)
    x = torch.randn(6, 2, requires_grad=True)
    y = function(x, ends).sum()
    ends.copy_(cu(0, 1, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_zero_fill_grad_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="zero_fill: cu_seqlens must be int32 or int64, got float32"):
        thdops.zero_fill_grad(torch.ones(4), torch.ones(2))


# --- every dtype, malformed metadata ----------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_dtype_that_has_a_zero(dtype: torch.dtype, device: str) -> None:
    x = torch.ones(6, 5, device=device).to(dtype)
    ends = cu(0, 1, 4).to(device)
    for filled in (thdops.zero_fill(x, ends), x):
        if filled is x:
            thdops.zero_fill_(x, ends)
        assert filled.dtype == dtype
        assert filled.to(torch.complex128).real.sum(1).tolist() == [5, 5, 5, 5, 0, 0]
        assert filled[4:].contiguous().view(torch.uint8).eq(0).all()


MALFORMED = {
    "decreasing": ([0, 9, 2, 5], [0, 7, 3, 9]),
    "negative": ([-4, -2, 3, -9], [-3, 4, -8, 2]),
    "beyond T": ([0, 50, 1000, 2**31 - 1], [0, 70, 2000, 2**31 - 1]),
    "longer than owned": ([0, 6, 12, 18], [0, 1, 2, 3]),
    "extreme": ([2**31 - 1, -(2**31), 2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1, -(2**31), 0]),
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gaps", [True, False])
def test_malformed_metadata_never_raises_in_the_reference(kind: str, dtype: torch.dtype, gaps: bool) -> None:
    valid, padded = (torch.tensor(values, dtype=dtype) for values in MALFORMED[kind])
    for total in (0, 1, 12):
        args = (valid, padded if gaps else None, total)
        thdops.padding_mask(*args)
        thdops.sequence_ids(*args)
        for world in (1, 2, 4):
            thdops.positions(*args, cp_size=world, cp_rank=world - 1)
        index, inverse = thdops.compact_rows(*args)
        assert sorted(index.tolist()) == sorted(inverse.tolist()) == list(range(total))
        x = torch.ones(total, 3)
        thdops.zero_fill(x, *args[:2])
        thdops.zero_fill_(x, *args[:2])
        thdops.slice_cu_seqlens(*args[:2], 3, total)
    thdops.cu_seqlens_from_positions(valid, 2)
    thdops.cu_seqlens_from_lengths(padded, 9)


def test_valid_lengths_are_clamped_to_padded_lengths() -> None:
    assert reference.sequence_ids(cu(0, 6, 12), cu(0, 2, 4), 6).tolist() == [0, 0, 1, 1, -1, -1]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda n: thdops.padding_mask(cu(0, 2), None, n), "padding_mask: total_tokens must be a Python integer, got a tensor"),
        (lambda n: thdops.sequence_ids(cu(0, 2), None, n), "sequence_ids: total_tokens must"),
        (lambda n: thdops.positions(cu(0, 2), None, 4, cp_size=n), "positions: cp_size must"),
        (lambda n: thdops.compact_rows(cu(0, 2), None, n), "compact_rows: total_tokens must"),
        (lambda n: thdops.cu_seqlens_from_positions(cu(0, 1), n), "cu_seqlens_from_positions: max_seqs must"),
        (lambda n: thdops.cu_seqlens_from_lengths(cu(0, 1), n), "cu_seqlens_from_lengths: max_seqs must"),
        (lambda n: thdops.slice_cu_seqlens(cu(0, 2), None, 0, n), "slice_cu_seqlens: length must"),
    ],
)
def test_a_size_on_the_device_is_refused_since_reading_it_would_sync(call: Callable[[Tensor], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(torch.tensor(4))


def _untyped(name: str) -> Any:
    return getattr(thdops, name)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: _untyped("zero_fill")([1.0], cu(0, 1)), "zero_fill: x must be a tensor, got a list; pass torch.as_tensor"),
        (lambda: _untyped("zero_fill_")("abc", cu(0, 1)), "zero_fill_: tensors must be a tensor or a list of tensors, got a str"),
        (
            lambda: _untyped("zero_fill_")([1, 2], cu(0, 1)),
            "zero_fill_: tensors must be a tensor or a list of tensors, got a list of",
        ),
        (lambda: _untyped("padding_mask")([0, 3], None, 4), "padding_mask: cu_seqlens must be a tensor, got a list"),
        (lambda: _untyped("cu_seqlens_from_lengths")([3, 5], 4), "cu_seqlens_from_lengths: lengths must be a tensor, got a list"),
        (lambda: _untyped("zero_fill")(torch.ones(1), None), "zero_fill: cu_seqlens must be a tensor, got None"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_positions_stay_below_the_number_of_rows_whatever_the_metadata_hold() -> None:
    wild = torch.tensor([-2147483647, 2], dtype=torch.int32)
    assert thdops.positions(wild, None, 2).tolist() == [1, 1]
