"""The padding kernels on inputs that samples are too few and too small for: random views, many tensors, blocks that do not fit.

On CPU they run in Triton's interpreter, every address held against the tensors' memory; on a GPU they are called as ops.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.ops.padding import reference
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [] if CUDA else [pytest.mark.skipif(why_not() != "", reason=why_not() or "interpreted")]
FUZZ = settings(max_examples=40, deadline=None)


def kernel(name: str) -> Callable[..., Any]:
    """An op's launcher on `DEVICE`, in guarded memory where it is interpreted."""
    if CUDA:
        return REGISTRY.op(name)
    launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))

    def run(*args: Any) -> Any:
        flat = [t for arg in args for t in (arg if isinstance(arg, list) else (arg,)) if isinstance(t, Tensor)]
        with guarded_memory(flat):
            return launcher(*args)

    return run


def prefix(lengths: list[int], dtype: torch.dtype = torch.int32, first: int = 0) -> Tensor:
    return torch.tensor([first, *lengths], device=DEVICE).cumsum(0).to(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@st.composite
def metadata(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, int]:
    """(cu_seqlens, padded, T), many short sequences or few."""
    lengths = draw(st.lists(st.integers(0, draw(st.sampled_from((2, 40)))), max_size=draw(st.sampled_from((3, 70)))))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    before, behind = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    if draw(st.booleans()):
        return prefix(lengths, dtype, before), None, before + sum(lengths) + behind
    owned = [length + gap for length, gap in zip(lengths, gaps, strict=True)]
    return prefix(lengths, dtype), prefix(owned, dtype, before), before + sum(owned) + behind


@st.composite
def views(draw: st.DrawFn, total: int) -> Tensor:
    """A [T, ...] view: any dimensions in any order of memory, any of them cut out of a larger one, any item size and alignment."""
    dtype = draw(st.sampled_from((torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)))
    sizes = [total, *draw(st.lists(st.integers(1, 5), max_size=3))]
    order = draw(st.permutations(range(len(sizes))))
    larger = [sizes[d] + draw(st.sampled_from((0, 0, 1, 3))) for d in order]
    start = draw(st.integers(0, 3))
    count = torch.Size(larger).numel()
    buffer = (torch.arange(start + count, device=DEVICE) % 50 + 1).to(dtype)[start:].view(larger)
    for axis, d in enumerate(order):
        buffer = buffer.narrow(axis, draw(st.integers(0, larger[axis] - sizes[d])), sizes[d])
    return buffer.permute([order.index(d) for d in range(len(sizes))])


def whole(view: Tensor) -> Tensor:
    """All memory that a view is cut from."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


@FUZZ
@given(st.data())
def test_zero_fill_of_any_view(data: st.DataObject) -> None:
    cu_seqlens, padded, total = data.draw(metadata())
    x = data.draw(views(total))
    before = whole(x).clone()
    assert same(kernel("zero_fill")(x, cu_seqlens, padded), reference.zero_fill(x, cu_seqlens, padded))
    assert torch.equal(whole(x), before)


@FUZZ
@given(st.data())
def test_zero_fill_in_place_of_any_views(data: st.DataObject) -> None:
    """Several tensors, each with metadata of its own; what lies between their elements stays."""
    batches = data.draw(st.lists(metadata(), min_size=1, max_size=4))
    tensors = [data.draw(views(total)) for _, _, total in batches]
    gaps = data.draw(st.booleans())  # all tensors have padded offsets, or none has
    starts = [cu_seqlens if padded is None else padded for cu_seqlens, padded, _ in batches]
    cu = [cu_seqlens for cu_seqlens, _, _ in batches] if gaps else starts
    padded = starts if gaps else []
    expected = []
    for i, x in enumerate(tensors):
        copy = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(
            x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride()
        )
        reference.zero_fill_([copy], [cu[i]], [padded[i]] if gaps else [])
        expected.append(whole(copy))
    kernel("zero_fill_")(tensors, cu, padded)
    assert all(torch.equal(whole(x), memory) for x, memory in zip(tensors, expected, strict=True))


@FUZZ
@given(metadata())
def test_row_maps(batch: tuple[Tensor, Tensor | None, int]) -> None:
    for name in ("padding_mask", "sequence_ids", "positions"):
        assert same(kernel(name)(*batch), getattr(reference, name)(*batch)), name
    for actual, expected in zip(kernel("compact_rows")(*batch), reference.compact_rows(*batch), strict=True):
        assert same(actual, expected)
    for actual, expected in zip(
        kernel("slice_cu_seqlens")(*batch[:2], 5, 30), reference.slice_cu_seqlens(*batch[:2], 5, 30), strict=True
    ):
        assert same(actual, expected)


@FUZZ
@given(st.lists(st.integers(-3, 40), max_size=90), st.integers(0, 5))
def test_cu_seqlens_from_lengths(lengths: list[int], spare: int) -> None:
    args = (torch.tensor(lengths, dtype=torch.int64, device=DEVICE), len(lengths) + spare)
    assert same(kernel("cu_seqlens_from_lengths")(*args), reference.cu_seqlens_from_lengths(*args))


@FUZZ
@given(st.lists(st.integers(1, 9), max_size=40), st.integers(0, 5), st.integers(1, 60))
def test_cu_seqlens_from_positions(lengths: list[int], tail: int, max_seqs: int) -> None:
    ids = [i for length in lengths for i in range(length)] + [-1] * tail
    args = (torch.tensor(ids, dtype=torch.int32, device=DEVICE), max_seqs)
    assert same(kernel("cu_seqlens_from_positions")(*args), reference.cu_seqlens_from_positions(*args))


@pytest.mark.parametrize("total", [2047, 2048, 2049, 6000])
@pytest.mark.parametrize("max_seqs", [1, 700, 3000, 9000])
def test_cu_seqlens_from_positions_over_many_blocks(total: int, max_seqs: int) -> None:
    """Starts on both sides of a block's border, entries past one block, and overflow found by every block."""
    ids = torch.arange(total, device=DEVICE) % 3
    ids[-5:] = -1
    expected = reference.cu_seqlens_from_positions(ids, max_seqs)
    assert same(kernel("cu_seqlens_from_positions")(ids, max_seqs), expected)


def test_many_sequences() -> None:
    """More sequences than any search step or scan block holds, with empty ones and sentinels among them."""
    lengths = [1, 0, 1, 0, 0, 3] * 200 + [0] * 400
    cu_seqlens, padded = prefix(lengths), prefix([length + length % 2 for length in lengths])
    total = int(padded[-1]) + 11
    for name in ("padding_mask", "sequence_ids", "positions"):
        assert same(kernel(name)(cu_seqlens, padded, total), getattr(reference, name)(cu_seqlens, padded, total)), name
    for name, more in (("compact_rows", (total,)), ("slice_cu_seqlens", (100, 800))):
        expected = getattr(reference, name)(cu_seqlens, padded, *more)
        for actual, right in zip(kernel(name)(cu_seqlens, padded, *more), expected, strict=True):
            assert same(actual, right), name
    x = torch.ones(total, 3, device=DEVICE)
    expected = reference.zero_fill(x, cu_seqlens, padded)
    assert same(kernel("zero_fill")(x, cu_seqlens, padded), expected)
    kernel("zero_fill_")([x], [cu_seqlens], [padded])
    assert same(x, expected)


def test_more_tensors_than_one_launch_takes() -> None:
    cu_seqlens, padded = prefix([3, 5]), prefix([4, 8])
    tensors = [torch.ones(14, 1 + i % 5, device=DEVICE) for i in range(21)]
    kernel("zero_fill_")(tensors, [cu_seqlens], [padded])
    for x in tensors:
        assert same(x, reference.zero_fill(torch.ones_like(x), cu_seqlens, padded))


def test_two_metadata_are_one_per_tensor_or_one_with_its_padded_offsets() -> None:
    """The same tensors in the same order mean two things; a launch plan of one must not serve the other."""
    one, other = prefix([3, 5]), prefix([4, 8])
    for cu, padded in (([one, other], []), ([one], [other]), ([one, other], [])):
        tensors = [torch.ones(14, 4, device=DEVICE) for _ in range(2)]
        expected = [x.clone() for x in tensors]
        reference.zero_fill_(expected, cu, padded)
        kernel("zero_fill_")(tensors, cu, padded)
        assert all(map(same, tensors, expected))


@pytest.mark.parametrize("width", [255, 256, 257, 3000])
def test_rows_wider_than_a_block(width: int) -> None:
    cu_seqlens, padded = prefix([2, 1], torch.int64), prefix([3, 2], torch.int64)
    x = torch.ones(9, width, dtype=torch.bfloat16, device=DEVICE)
    expected = reference.zero_fill(x, cu_seqlens, padded)
    assert same(kernel("zero_fill")(x, cu_seqlens, padded), expected)
    kernel("zero_fill_")([x], [cu_seqlens], [padded])
    assert same(x, expected)


EXPANDED = {
    "everything": lambda x: x[:1, :1, :1].expand(14, 3, 4),
    "rows": lambda x: x[:1].expand(14, 3, 4),
    "heads": lambda x: x[:, :1].expand(14, 3, 4),
    "last": lambda x: x[..., :1].expand(14, 3, 4),
    "rows and last": lambda x: x[:1, :, :1].expand(14, 3, 4),
}


@pytest.mark.parametrize("kind", EXPANDED)
def test_zero_fill_of_expanded_tensors(kind: str) -> None:
    """What the gradient of a sum looks like."""
    x = EXPANDED[kind](torch.arange(1.0, 169.0, device=DEVICE).view(14, 3, 4))
    cu_seqlens, padded = prefix([3, 5]), prefix([4, 8])
    assert same(kernel("zero_fill")(x, cu_seqlens, padded), reference.zero_fill(x, cu_seqlens, padded))


FAR_APART = {  # more than a test can allocate: what is told to the kernel must do
    "rows": ((4, 16), (2**32, 1)),
    "heads": ((4, 2, 16), (16, 2**32, 1)),
    "heads beside others": ((4, 3, 2, 16), (96, 16, 2**32, 1)),
    "one wide row": ((1, 2**32 + 4), (2**32 + 4, 1)),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("what", FAR_APART)
def test_no_product_of_a_size_and_its_unit_wraps_around(what: str) -> None:
    """A size that fits in 32 bits reaches the kernel as an int32, and so does its product with UNIT (16 GiB and up)."""
    from thdops.ops.padding.kernels_zero_fill import _zero_fill_plan

    shape, stride = FAR_APART[what]
    x = torch.empty(2**33 + 128, device="meta").as_strided(shape, stride)
    for step in _zero_fill_plan([x], [1]):
        _, unit, *_ = step.constexprs
        for size in (size for job in step.sizes for size in job):
            assert size >= 2**31 or size * unit < 2**31


OVERLAPPING = {
    "windows of 3": lambda x: x.view(14, 12).unfold(1, 3, 1),
    "windows of rows": lambda x: x[:17].unfold(0, 4, 1),
    "equal strides": lambda x: x.as_strided((14, 2, 3), (6, 4, 4)),
    "a stride that skips nothing": lambda x: x.as_strided((14, 2, 5, 3), (6, 2, 1, 1)),
}


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_zero_fill_of_windows_that_overlap(kind: str) -> None:
    """Two dimensions of one stride: memory does not tell which is the faster, the order of elements does."""
    x = OVERLAPPING[kind](torch.arange(1.0, 169.0, device=DEVICE))
    cu_seqlens, padded = prefix([3, 5]), prefix([4, 8])
    assert same(kernel("zero_fill")(x, cu_seqlens, padded), reference.zero_fill(x, cu_seqlens, padded))


@FUZZ
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 60), min_size=1, max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 60), min_size=9, max_size=9),
    st.sampled_from((torch.int32, torch.int64)),
    st.booleans(),
    st.integers(0, 40),
)
def test_malformed_metadata_stays_within_the_tensors(
    valid: list[int], owned: list[int], dtype: torch.dtype, gaps: bool, total: int
) -> None:
    """Whatever the offsets say: no address outside the tensors, the loops end, every output element is written and in range."""
    cu_seqlens = torch.tensor(valid, dtype=dtype, device=DEVICE)
    padded = torch.tensor(owned[: len(valid)], dtype=dtype, device=DEVICE) if gaps else None
    sequences = len(valid) - 1
    ids = kernel("sequence_ids")(cu_seqlens, padded, total)
    assert ((ids >= -1) & (ids < max(sequences, 0))).all() or total == 0
    kernel("padding_mask")(cu_seqlens, padded, total)
    for world in (1, 2):
        places = kernel("positions")(cu_seqlens, padded, total, world, world - 1)
        assert total == 0 or (places.min() >= 0 and places.max() < total * world)
    for rows in kernel("compact_rows")(cu_seqlens, padded, total):
        assert ((rows >= 0) & (rows < total)).all()
    kernel("slice_cu_seqlens")(cu_seqlens, padded, 3, total)
    x = torch.ones(total + 2, 5, device=DEVICE)
    inner = x[1:-1]
    filled = kernel("zero_fill")(inner, cu_seqlens, padded)
    assert ((filled == 0) | (filled == 1)).all()
    kernel("zero_fill_")([inner], [cu_seqlens], [] if padded is None else [padded])
    assert x[0].eq(1).all()
    assert x[-1].eq(1).all()
    kernel("cu_seqlens_from_positions")(cu_seqlens, 3)
    kernel("cu_seqlens_from_lengths")(cu_seqlens, 12)
