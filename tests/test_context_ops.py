"""What is special to the context-parallel row ops. T rows, B sequences, W ranks; conformance covers what every op shares.

References are held against loops over sequences; kernels (on CPU in Triton's interpreter) against references.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thdops
from thdops import context_parallel
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.ops.context import reference
from thdops.registry import load_launcher

_cp: Any = context_parallel  # for calls that a type checker would refuse
FUZZ = settings(max_examples=60, deadline=None)
WORLDS, PARTITIONS, HALVES = (1, 2, 3, 4), ("zigzag", "contiguous"), ("first", "second")


class Batch(NamedTuple):
    """A batch for W ranks, and what a plain loop says of it."""

    cu_seqlens: Tensor
    padded: Tensor
    total: int
    world: int
    partition: str
    shares: list[list[tuple[list[int], list[int]]]]
    """Of each rank, segment by segment: the rows of its first half and those of its second one."""

    @property
    def mine(self) -> list[list[int]]:
        return [[row for halves in segments for half in halves for row in half] for segments in self.shares]

    def half(self, rank: int, which: str) -> list[int]:
        return [row for halves in self.shares[rank] for row in halves[HALVES.index(which)]]


def deal(padded: list[int], total: int, world: int, partition: str) -> list[list[tuple[list[int], list[int]]]]:
    shares: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(world)]
    pieces = [0, *padded, total]
    for number, (begin, end) in enumerate(pairwise(pieces)):
        rows = list(range(begin, end))
        size = len(rows) // (2 * world)
        chunks = [rows[k * size : (k + 1) * size] for k in range(2 * world)]
        zigzag = partition == "zigzag" and 0 < number < len(pieces) - 2
        for rank in range(world):
            first, second = (rank, 2 * world - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)
            shares[rank].append((chunks[first], chunks[second]))
    return shares


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(valid: list[int], owned: list[int], world: int, partition: str = "zigzag", before: int = 0, behind: int = 0) -> Batch:
    padded = torch.tensor([before, *owned]).cumsum(0)
    total = int(padded[-1]) + behind
    ends = torch.tensor([0, *valid]).cumsum(0)
    return Batch(ends.int(), padded.int(), total, world, partition, deal(padded.tolist(), total, world, partition))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to 5 sequences whose last chunks may hold no valid row, some of them empty; rows of no sequence on both sides."""
    world, partition = draw(st.sampled_from(WORLDS)), draw(st.sampled_from(PARTITIONS))
    unit = 2 * world
    owned = [unit * n for n in draw(st.lists(st.integers(0, 3), max_size=5))]
    valid = [draw(st.integers(0, n)) for n in owned]
    batch = batch_of(valid, owned, world, partition, unit * draw(st.integers(0, 2)), unit * draw(st.integers(0, 2)))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    shift = draw(st.integers(0, 3))  # counts matter, not where they start
    return batch._replace(cu_seqlens=(batch.cu_seqlens + shift).to(dtype), padded=batch.padded.to(dtype))


# --- who has what --------------------------------------------------------------------------------------------------------------


@FUZZ
@given(batches())
def test_every_row_has_exactly_one_owner(batch: Batch) -> None:
    seen = []
    for rank in range(batch.world):
        mine = context_parallel.partition_indices(batch.padded, batch.total, batch.world, rank, partition=batch.partition)
        assert mine.tolist() == batch.mine[rank]
        seen += mine.tolist()
    assert sorted(seen) == list(range(batch.total))


@FUZZ
@given(batches())
def test_a_rank_is_a_packed_batch(batch: Batch) -> None:
    """The metadata of a rank's rows, and of each half, say of every row what the whole batch's say of it."""
    ids = thdops.sequence_ids(batch.cu_seqlens, batch.padded, batch.total)
    for rank in range(batch.world):
        for half in (None, *HALVES):
            metadata = context_parallel.local_cu_seqlens(
                batch.cu_seqlens, batch.padded, batch.world, rank, half=half, partition=batch.partition
            )
            rows = torch.tensor(batch.mine[rank] if half is None else batch.half(rank, half), dtype=torch.int64)
            assert thdops.sequence_ids(*metadata, len(rows)).tolist() == ids[rows].tolist()
            assert [x.dtype for x in metadata] == [batch.padded.dtype] * 2
            assert metadata[0][0] == 0


@FUZZ
@given(batches())
def test_positions_know_the_same_partition(batch: Batch) -> None:
    everywhere = thdops.positions(batch.cu_seqlens, batch.padded, batch.total)
    for rank in range(batch.world if batch.partition == "zigzag" else 0):
        mine = context_parallel.partition_indices(batch.padded, batch.total, batch.world, rank)
        got = thdops.positions(batch.cu_seqlens, batch.padded, len(mine), cp_size=batch.world, cp_rank=rank)
        assert got.tolist() == everywhere[mine].tolist()


@FUZZ
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-9, 40), min_size=1, max_size=6), st.integers(0, 4), st.data())
def test_no_offsets_lead_outside(offsets: list[int], units: int, data: st.DataObject) -> None:
    world = data.draw(st.sampled_from(WORLDS))
    rank, partition = data.draw(st.integers(0, world - 1)), data.draw(st.sampled_from(PARTITIONS))
    total = 2 * world * units
    for device, partition_indices in (("cpu", reference.partition_indices), (DEVICE, kernel("partition_indices"))):
        rows = partition_indices(cu(*offsets).to(device), total, world, rank, partition)
        assert all(0 <= row < total for row in rows.tolist())


# --- rows moved ----------------------------------------------------------------------------------------------------------------


@FUZZ
@given(batches())
def test_rank_order_and_back(batch: Batch) -> None:
    x = torch.randn(batch.total, 3, requires_grad=True)
    how: Any = {"partition": batch.partition}
    ranks = context_parallel.to_rank_order(x, batch.padded, batch.world, **how)
    order = torch.tensor([row for mine in batch.mine for row in mine], dtype=torch.int64)
    assert torch.equal(ranks, x[order])
    assert torch.equal(context_parallel.from_rank_order(ranks, batch.padded, batch.world, **how), x)
    upstream = torch.randn_like(x)
    (grad,) = torch.autograd.grad(ranks, x, upstream)
    assert torch.equal(grad[order], upstream)
    (grad,) = torch.autograd.grad(context_parallel.from_rank_order(x, batch.padded, batch.world, **how), x, upstream)
    assert torch.equal(grad, upstream[order])


@FUZZ
@given(batches(), st.sampled_from([((0,), (4, 2)), ((-1,), (3,)), ((1,), (2, 3))]))
def test_halves_of_a_rank(batch: Batch, where: tuple[tuple[int], tuple[int, ...]]) -> None:
    """Both halves come back to where they were, zeros elsewhere; a gradient takes the same ways, and NaN of the other half none."""
    (dim,), others = where
    shape = [*others]
    shape.insert(dim if dim >= 0 else len(shape), batch.total // batch.world)
    for rank in range(batch.world):
        _, padded = context_parallel.local_cu_seqlens(batch.cu_seqlens, batch.padded, batch.world, rank, partition=batch.partition)
        x = torch.randn(shape, requires_grad=True)
        for which in HALVES:
            mine = batch.mine[rank]
            index = torch.tensor([mine.index(row) for row in batch.half(rank, which)], dtype=torch.int64)
            half = context_parallel.half(x, padded, which, dim=dim)
            assert torch.equal(half, x.index_select(dim, index))
            back = context_parallel.from_half(half, padded, which, dim=dim)
            assert torch.equal(back, torch.zeros(shape).index_copy(dim, index, half.detach()))
            upstream = torch.full(shape, float("nan")).index_copy(dim, index, torch.ones_like(half))
            (grad,) = torch.autograd.grad(back, x, upstream)
            assert torch.equal(grad, torch.zeros(shape).index_fill(dim, index, 1))


# --- reported inputs -----------------------------------------------------------------------------------------------------------


def test_a_last_chunk_without_a_valid_row() -> None:
    """Six sequences, W = 2, chunks of 3, 2, 2, 3, 2 and 3 rows: the fourth chunk of the first sequence is nothing but padding."""
    ends, padded = cu(0, 9, 17, 25, 37, 45, 57), cu(0, 12, 20, 28, 40, 48, 60)
    valid = [
        [context_parallel.local_cu_seqlens(ends, padded, 2, rank, half=half)[0].diff().tolist() for half in HALVES]
        for rank in range(2)
    ]
    assert valid[0] == [[3, 2, 2, 3, 2, 3], [0, 2, 2, 3, 2, 3]]
    assert valid[1] == [[3, 2, 2, 3, 2, 3], [3, 2, 2, 3, 2, 3]]


def test_rows_behind_the_last_sequence_belong_to_none() -> None:
    """16 rows, of which 12 on are the tail: no rank has one of the last sequence's rows twice."""
    ends, padded = cu(0, 3, 8), cu(0, 4, 12)
    assert context_parallel.partition_indices(padded, 16, 2, 0).tolist() == [0, 3, 4, 5, 10, 11, 12, 13]
    assert context_parallel.partition_indices(padded, 16, 2, 1).tolist() == [1, 2, 6, 7, 8, 9, 14, 15]
    for rank, padding in enumerate(([1, 4, 5, 6, 7], [5, 6, 7])):
        metadata = context_parallel.local_cu_seqlens(ends, padded, 2, rank)
        assert thdops.padding_mask(*metadata, 8).nonzero().flatten().tolist() == padding


def test_lengths_that_chunks_do_not_divide() -> None:
    """Lengths 4 and 3, W = 2: ten rows are refused, twelve keep every token."""
    text = "partition_indices: total_tokens must be a multiple of 2 * cp_size (4), got 10"
    with pytest.raises(ValueError, match=re.escape(text)):
        context_parallel.partition_indices(cu(0, 5, 10), 10, 2, 0)
    valid = [context_parallel.local_cu_seqlens(cu(0, 4, 7), cu(0, 4, 8), 2, rank)[0].diff() for rank in range(2)]
    assert (valid[0] + valid[1]).tolist() == [4, 3]


# --- kernels -------------------------------------------------------------------------------------------------------------------

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel(name: str) -> Callable[..., Any]:
    """An op's launcher on `DEVICE`, in guarded memory where it is interpreted."""
    if DEVICE.type == "cuda":
        return REGISTRY.op(name)
    if why_not():
        pytest.skip(why_not())
    launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))

    def run(*args: Any) -> Any:
        with guarded_memory([x for x in args if isinstance(x, Tensor)]):
            return launcher(*args)

    return run


@settings(max_examples=40, deadline=None)
@given(batches(), st.data())
def test_kernels_move_rows_of_any_view(batch: Batch, data: st.DataObject) -> None:
    """Any dimensions in any order of memory, any dtype and alignment."""
    dtype = data.draw(st.sampled_from((torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)))
    name = data.draw(st.sampled_from(("to_rank_order", "from_rank_order", "half", "from_half")))
    sizes: list[int] = [*data.draw(st.lists(st.sampled_from((1, 2, 3, 5, 30)), max_size=2))]
    by_half = "half" in name
    dim = data.draw(st.integers(0, len(sizes))) if by_half else 0
    sizes.insert(dim, batch.total // 2 if name == "from_half" else batch.total)
    order = data.draw(st.permutations(range(len(sizes))))
    start = data.draw(st.integers(0, 3))
    larger = [sizes[d] + data.draw(st.sampled_from((0, 1))) for d in order]
    count = torch.Size(larger).numel()
    buffer = (torch.arange(start + count, device=DEVICE) % 50 + 1).to(dtype)[start:].view(larger)
    for axis, d in enumerate(order):
        buffer = buffer.narrow(axis, 0, sizes[d])
    x = buffer.permute([order.index(d) for d in range(len(sizes))])
    args = (x, batch.padded.to(DEVICE), *((data.draw(st.sampled_from(HALVES)), dim) if by_half else (batch.world, batch.partition)))
    got = kernel(name)(*args)
    assert got.is_contiguous()
    assert torch.equal(got, getattr(reference, name)(*args))


def test_more_rows_than_a_program_has() -> None:
    """Several blocks of a row map, and of narrow rows."""
    batch = batch_of([1500, 0, 77, 301], [1600, 0, 80, 320], 4, before=80, behind=160)
    padded = batch.padded.to(DEVICE)
    assert kernel("partition_indices")(padded, batch.total, 4, 2, "zigzag").tolist() == batch.mine[2]
    ranks = kernel("to_rank_order")(torch.arange(batch.total, dtype=torch.int16, device=DEVICE), padded, 4, "zigzag")
    assert ranks.tolist() == [row for mine in batch.mine for row in mine]
    assert kernel("from_rank_order")(ranks, padded, 4, "zigzag").tolist() == list(range(batch.total))


def test_more_columns_than_a_program_has() -> None:
    """Several lanes of several blocks of columns."""
    x = torch.arange(3 * 24 * 2100, dtype=torch.int32, device=DEVICE).view(3, 24, 2100)
    args = (cu(2, 10, 10, 20).to(DEVICE), "second", 1)
    half = kernel("half")(x, *args)
    assert torch.equal(half, reference.half(x, *args))
    assert torch.equal(kernel("from_half")(half, *args), reference.from_half(half, *args))


def test_more_lanes_than_a_program_has() -> None:
    """Several programs of narrow rows, the last of them with fewer lanes; side by side along rows, and along lanes."""
    x = torch.arange(37 * 320, dtype=torch.int32, device=DEVICE)
    args = (cu(2, 50, 50, 300).to(DEVICE), "second", 1)
    for lse in (x.view(37, 320), x.view(320, 37).t()):
        half = kernel("half")(lse, *args)
        assert torch.equal(half, reference.half(lse, *args))
        assert torch.equal(kernel("from_half")(half, *args), reference.from_half(half, *args))


@pytest.mark.parametrize("half", [None, *HALVES])
def test_more_sequences_than_are_scanned_at_a_time(half: str | None) -> None:
    owned = [4 * (b % 4) for b in range(1500)]
    batch = batch_of([max(n - b % 5, 0) for b, n in enumerate(owned)], owned, 2)
    args = (batch.cu_seqlens.to(DEVICE), batch.padded.to(DEVICE), 2, 1, half, "zigzag")
    for got, expected in zip(kernel("local_cu_seqlens")(*args), reference.local_cu_seqlens(*args), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.skipif(why_not() != "" and DEVICE.type != "cuda", reason=why_not() or "interpreted")
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
def test_all_ranks_metadata_in_one_launch(partition: str) -> None:
    """Entries that are no multiple of a row's alignment, more of them than are scanned at a time, and none."""
    from thdops.ops.context.kernels import all_local_cu_seqlens

    for world, owned in ((4, [16, 0, 24, 8]), (2, [4 * (b % 4) for b in range(1500)]), (2, [])):
        batch = batch_of([max(n - b % 7, 0) for b, n in enumerate(owned)], owned, world, before=2 * world)
        metadata = batch.cu_seqlens.to(DEVICE), batch.padded.to(DEVICE)
        valid, starts = all_local_cu_seqlens(*metadata, world, partition)
        for rank, (half, rows) in itertools.product(range(world), enumerate((None, *HALVES))):
            expected, padded = reference.local_cu_seqlens(*metadata, world, rank, rows, partition)
            assert torch.equal(valid[rank, half], expected)
            if rows is None:
                middles = padded[:-1] + padded.diff() // 2
                assert torch.equal(starts[0], padded)
                assert torch.equal(starts[1, :-1], middles)
                assert torch.equal(starts[1, -1], padded[-1])


# --- calls -----------------------------------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[], Any]] = {
    "partition_indices: cu_seqlens_padded must be a tensor, got a list": lambda: _cp.partition_indices([0, 4], 4, 2, 0),
    "partition_indices: total_tokens must be a Python number, got a tensor": lambda: _cp.partition_indices(cu(0), cu(4), 2, 0),
    "local_cu_seqlens: half must be a string, got an int": lambda: _cp.local_cu_seqlens(cu(0, 4), None, 2, 0, half=1),
    "to_rank_order: cp_size must be a": lambda: _cp.to_rank_order(torch.ones(4), cu(0, 4), None),
    "half: cu_seqlens_padded must be a tensor, got None": lambda: _cp.half(torch.ones(4), None, "first"),
}


@pytest.mark.parametrize("text", CALLS)
def test_arguments_of_another_kind_are_refused_by_name(text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        CALLS[text]()
