"""The balancing kernels on inputs that samples are too few and too small for: tilings, many chunks, many sequences, odd layouts.

On CPU they run in Triton's interpreter, every address held against the tensors' memory; on a GPU they are called as ops.
T rows, E experts, K top-k, B sequences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.conformance.memory import poisoned_allocations
from thdops.namespace import REGISTRY
from thdops.ops.balancing.samples import as_bitmap, as_indices, as_mask, mask_of_padding, normal, uniform
from thdops.ops.layouts import prefix_sums
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN, INF = float("nan"), float("inf")
FORMATS: dict[str, Callable[..., Tensor]] = {"mask": as_mask, "indices": as_indices, "bitmap": as_bitmap}
LAYOUTS = ["contiguous", "transposed", "aligned slice", "odd slice", "every second column"]
FUZZ = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = [] if CUDA else [pytest.mark.skipif(why_not() != "", reason=why_not() or "interpreted")]


def kernel(name: str) -> Callable[..., Any]:
    """An op's launcher on `DEVICE`, in guarded memory where it is interpreted."""
    if CUDA:
        return REGISTRY.op(name)
    launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))

    def run(*args: Any) -> Any:
        with guarded_memory([a for a in args if isinstance(a, Tensor)]):
            return launcher(*args)

    return run


def reference(name: str) -> Callable[..., Any]:
    return REGISTRY[name].reference


def laid_out(x: Tensor, form: str) -> Tensor:
    """The same values in another layout."""
    rows, columns = x.shape
    if form == "transposed":
        return x.t().contiguous().t()
    if form == "contiguous":
        return x
    offset, step, more = {"aligned slice": (16, 1, 32), "odd slice": (1, 1, 3), "every second column": (0, 2, columns)}[form]
    view = x.new_ones(rows, columns + more)[:, offset::step][:, :columns]
    return view.copy_(x)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of a few rows, so that a few hundred rows are many chunks."""
    from thdops.ops.balancing import kernels_count, kernels_seq_aux

    monkeypatch.setattr(kernels_count, "_TILES", {0: 16, 1: 16, 8: 64})
    monkeypatch.setattr(kernels_seq_aux, "_TILE", 256)  # 16 chunks are joined at a time
    kernels_count._tile.cache_clear()
    kernels_seq_aux._chunk.cache_clear()
    yield
    kernels_count._tile.cache_clear()
    kernels_seq_aux._chunk.cache_clear()


# --- tokens_per_expert ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("experts", [1, 12, 64, 130, 600])
@pytest.mark.parametrize("programs", [1, 4])
def test_counts_of_every_tiling(programs: int, experts: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from thdops.ops.balancing import kernels_count

    monkeypatch.setattr(kernels_count, "multiprocessors", lambda device_index: 1)
    monkeypatch.setattr(kernels_count, "_PROGRAMS", programs)
    monkeypatch.setattr(kernels_count, "_PARTIALS", 2)
    for routing in (choose(150, experts, min(experts, 3), DEVICE) for choose in FORMATS.values()):
        for padding in (None, mask_of_padding(150, DEVICE)):
            args = (laid_out(routing, form), padding, experts)
            assert torch.equal(kernel("tokens_per_expert")(*args), reference("tokens_per_expert")(*args))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_ids_of_no_expert_count_nowhere(dtype: torch.dtype) -> None:
    """Ids just outside, and ids that would be inside if they were cut down to 32 bits."""
    limits = torch.iinfo(dtype)
    ids = [-1, 5, 300, limits.min, limits.max, *((2**32 + 1, -(2**32) + 1) if dtype == torch.int64 else ())]
    indices = torch.tensor([[0, i] for i in ids], dtype=dtype, device=DEVICE)
    for op in (kernel("tokens_per_expert"), reference("tokens_per_expert")):
        assert op(indices, None, 5).tolist() == [len(ids), 0, 0, 0, 0]


def test_more_rows_than_a_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of a counter holds 255 rows: programs are as many as that takes, however few multiprocessors there are."""
    from thdops.ops.balancing import kernels_count, kernels_seq_aux

    monkeypatch.setattr(kernels_count, "multiprocessors", lambda device_index: 1)
    monkeypatch.setattr(kernels_count, "_PROGRAMS", 1)
    monkeypatch.setattr(kernels_seq_aux, "_CHUNKS", 1)
    kernels_seq_aux._chunk.cache_clear()
    rows, experts = 9000, 512
    mask = torch.ones(rows, experts, dtype=torch.bool, device=DEVICE)
    assert kernel("tokens_per_expert")(mask, None, None).eq(rows).all()
    call = uniform(1, experts, DEVICE).expand(rows, experts), mask, prefix_sums([rows], DEVICE), None, None, experts, 2, "sum", 1.0
    _, slopes, _ = kernel("moe_seq_aux_loss")(*call)
    torch.testing.assert_close(slopes, torch.full_like(slopes, experts / 2 / rows))
    kernels_seq_aux._chunk.cache_clear()


@pytest.mark.parametrize("experts", [7, 8])
def test_routing_rows_far_apart_are_addressed_in_64_bits(experts: int) -> None:
    """Three rows whose last starts 2**31 bytes behind the first; the memory between them is never touched."""
    buffer = torch.empty(2**31 + 64, dtype=torch.bool, device=DEVICE)
    mask = buffer.as_strided((3, experts), (2**30 + 16, 1))
    mask.copy_(as_mask(3, experts, 2, DEVICE))
    assert torch.equal(kernel("tokens_per_expert")(mask, None, None), mask.sum(0))


# --- moe_z_loss -------------------------------------------------------------------------------------------------------------------


def hold_z_loss(logits: Tensor, padding: Tensor | None) -> None:
    args = (logits, None, padding, 1.0)
    results, expected = kernel("moe_z_loss")(*args), reference("moe_z_loss")(*args)
    for actual, right in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=2e-6, atol=1e-6)
    grad_args = (torch.tensor(-2.0, device=DEVICE), expected[1], logits, expected[2])
    grad = kernel("moe_z_loss_grad")(*grad_args)
    torch.testing.assert_close(grad, reference("moe_z_loss_grad")(*grad_args), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("experts", [1, 12, 130, 2304, 4100])
def test_z_loss_of_every_tiling(experts: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from thdops.ops.balancing import kernels_z_loss

    monkeypatch.setattr(kernels_z_loss, "multiprocessors", lambda device_index: 1)
    logits = normal(19, experts, DEVICE)
    logits[::3, 0] = -INF if experts > 1 else 0.0
    logits[1::2, -1] += 20.0  # the largest of its row, in the last tile
    hold_z_loss(laid_out(logits, form), None)
    padding = mask_of_padding(19, DEVICE)
    hold_z_loss(laid_out(torch.where(padding[:, None], NAN, logits), form), padding)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("experts", [8, 4100])
def test_kernels_on_rows_that_are_not_finite(experts: int) -> None:
    """All -inf, in the first tile or in all of them; +inf; NaN: the reference's lse, and gradients that touch no other row."""
    logits = normal(6, experts, DEVICE)
    logits[0], logits[1, : min(experts, 4096) - 1], logits[2, 3], logits[3, -1] = -INF, -INF, INF, NAN
    loss, factor, lse = kernel("moe_z_loss")(logits, None, None, 1.0)
    _, expected_factor, expected = reference("moe_z_loss")(logits, None, None, 1.0)
    assert loss.isnan()
    assert torch.equal(factor, expected_factor)
    torch.testing.assert_close(lse, expected, equal_nan=True)
    assert lse[0] == -INF
    assert lse[2] == INF
    one = torch.full((), -1.0, device=DEVICE)
    grad = kernel("moe_z_loss_grad")(one, factor, logits, lse)
    assert grad[0].eq(0).all()
    assert not grad[0].signbit().any()
    finite = [1, 4, 5]
    expected_grad = reference("moe_z_loss_grad")(one, factor, logits, lse)
    torch.testing.assert_close(grad[finite], expected_grad[finite], rtol=2e-6, atol=1e-7)


@pytest.mark.skipif(CUDA, reason="launches are intercepted on CPU tensors")
@pytest.mark.parametrize("form", LAYOUTS)
def test_strided_tensors_reach_the_kernels_without_a_copy(form: str) -> None:
    from thdops.ops.launch import intercept

    x, mask = laid_out(normal(8, 8, DEVICE), form), laid_out(as_mask(8, 8, 2, DEVICE), form)
    seen: list[int] = []

    def note(kernel: Any, grid: Any, args: tuple[Any, ...], constants: Any, num_warps: int) -> None:
        seen.extend(a.data_ptr() for a in args if isinstance(a, Tensor))

    calls = {
        "moe_z_loss": (x, None, None, 1.0),
        "moe_z_loss_grad": (torch.ones(()), torch.ones(()), x, torch.ones(8)),
        "moe_seq_aux_loss": (x, mask, prefix_sums([8], DEVICE), None, None, 8, 2, "mean", 1.0),
        "tokens_per_expert": (mask, None, None),
    }
    for name, args in calls.items():
        seen.clear()
        with intercept(note):
            load_launcher(REGISTRY[name], REGISTRY.schema(name))(*args)
        assert all(a.data_ptr() in seen for a in args if isinstance(a, Tensor)), name


# --- moe_seq_aux_loss -------------------------------------------------------------------------------------------------------------


def hold_seq_aux_loss(
    form: str, cu_seqlens: Tensor, padded: Tensor | None, rows: int, experts: int = 12, reduction: str = "none"
) -> None:
    scores, routing = uniform(rows, experts, DEVICE), FORMATS[form](rows, experts, 3, DEVICE)
    args = (scores, routing, cu_seqlens, padded, None, experts, 3, reduction, 1.0)
    with poisoned_allocations():
        results = kernel("moe_seq_aux_loss")(*args)
    expected = reference("moe_seq_aux_loss")(*args)
    for actual, right in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=4e-6, atol=0.0)
    grad_args = (-torch.ones_like(expected[0]), *expected[1:], cu_seqlens, padded, rows, torch.float32)
    with poisoned_allocations():
        grad = kernel("moe_seq_aux_loss_grad")(*grad_args)
    torch.testing.assert_close(grad, reference("moe_seq_aux_loss_grad")(*grad_args), rtol=1e-6, atol=0.0)
    assert not grad[grad == 0].signbit().any()


@st.composite
def packing(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, int]:
    """(cu_seqlens, padded, T): one long sequence among many short ones, empty ones, gaps, rows in front and behind."""
    lengths = draw(st.lists(st.integers(0, 3), max_size=50))
    lengths.insert(draw(st.integers(0, len(lengths))), draw(st.sampled_from((0, 30, 90))))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    behind = draw(st.integers(0, 9))
    if draw(st.booleans()):
        return prefix_sums(lengths, DEVICE, dtype), None, sum(lengths) + behind
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    owned = prefix_sums([n + g for n, g in zip(lengths, gaps, strict=True)], DEVICE, dtype, draw(st.integers(0, 6)))
    return prefix_sums(lengths, DEVICE, dtype), owned, int(owned[-1]) + behind


@pytest.mark.usefixtures("small_tiles")
@FUZZ
@given(packing(), st.sampled_from(list(FORMATS)), st.sampled_from(("mean", "sum", "none")))
def test_sequence_losses_over_many_chunks(batch: tuple[Tensor, Tensor | None, int], form: str, reduction: str) -> None:
    hold_seq_aux_loss(form, *batch, reduction=reduction)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("form", FORMATS)
def test_a_sequence_over_more_chunks_than_are_joined_at_a_time(form: str) -> None:
    """40 chunks of four rows, behind a short sequence and in front of dozens that are empty."""
    padded = prefix_sums([3, 160, *[0] * 50, 2], DEVICE)
    hold_seq_aux_loss(form, prefix_sums([2, 157, *[0] * 50, 1], DEVICE), padded, 170)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("experts", [300, 600])
def test_rows_wider_than_a_block(experts: int, form: str) -> None:
    hold_seq_aux_loss(form, prefix_sums([40, 0, 25, 1], DEVICE), prefix_sums([41, 2, 25, 4], DEVICE), 80, experts, "mean")


def test_so_many_sequences_that_a_program_joins_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from thdops.ops.balancing import kernels_seq_aux

    monkeypatch.setattr(kernels_seq_aux, "_JOINS", 8)
    monkeypatch.setattr(kernels_seq_aux, "_LOSSES", 16)  # and not all losses are added at a time
    lengths = [2, 0, 1, 0, 0, 3] * 4
    for reduction in ("mean", "sum", "none"):
        hold_seq_aux_loss("mask", prefix_sums(lengths, DEVICE), None, sum(lengths) + 2, 80, reduction)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_launches_do_not_depend_on_the_contents_of_metadata() -> None:
    """TransformerEngine#2599: with hundreds of empty entries a kernel took 10x as long."""
    from thdops.ops.launch import intercept

    scores, mask = torch.zeros(4096, 8), torch.zeros(4096, 8, dtype=torch.bool)

    def launches(valid: list[int], padded: list[int]) -> list[Any]:
        seen: list[Any] = []
        batch = torch.tensor(valid, dtype=torch.int32), torch.tensor(padded, dtype=torch.int32)
        with intercept(lambda kernel, grid, args, constexprs, num_warps: seen.append((kernel, grid, constexprs, num_warps))):
            forward = load_launcher(REGISTRY["moe_seq_aux_loss"], REGISTRY.schema("moe_seq_aux_loss"))
            loss, slopes, share = forward(scores, mask, *batch, None, 8, 2, "mean", 1.0)
            backward = load_launcher(REGISTRY["moe_seq_aux_loss_grad"], REGISTRY.schema("moe_seq_aux_loss_grad"))
            backward(loss, slopes, share, *batch, 4096, torch.float32)
        return seen

    even = list(range(0, 4097, 8))
    full = launches(even, even)
    assert len(full) == 4
    assert launches([0, 100, *[200] * 511], [0, 104, *[208] * 511]) == full
    assert launches([0] * 513, [0] * 513) == full


@pytest.mark.usefixtures("small_tiles")
@FUZZ
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 60), min_size=1, max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 60), min_size=9, max_size=9),
    st.sampled_from((torch.int32, torch.int64)),
    st.booleans(),
    st.integers(0, 40),
)
@example([0, 5, 10, 10, 10, 10], [30, 40, 60, *[9] * 6], torch.int32, True, 10)  # begins behind T, in a chunk that looks at it
def test_malformed_metadata_stays_within_the_tensors(
    valid: list[int], owned: list[int], dtype: torch.dtype, gaps: bool, rows: int
) -> None:
    """Whatever the offsets say: no address outside the tensors, the loops end, and no memory that nobody wrote is read."""
    cu_seqlens = torch.tensor(valid, dtype=dtype, device=DEVICE)
    padded = torch.tensor(owned[: len(valid)], dtype=dtype, device=DEVICE) if gaps else None
    scores = uniform(rows, 12, DEVICE)
    for choose in FORMATS.values():
        args = (scores, choose(rows, 12, 3, DEVICE), cu_seqlens, padded, None, 12, 3, "none", 1.0)
        with poisoned_allocations():
            loss, slopes, share = kernel("moe_seq_aux_loss")(*args)
            grad = kernel("moe_seq_aux_loss_grad")(loss, slopes, share, cu_seqlens, padded, rows, torch.float32)
        assert all(x.isfinite().all() for x in (loss, slopes, share, grad))


# --- all of them ------------------------------------------------------------------------------------------------------------------


def test_losses_and_counts_repeat_bitwise() -> None:
    """Megatron-LM#6254: the same input eight times."""
    rows = 65536 if CUDA else 700  # on a GPU enough programs that atomics would add them up in another order each time
    logits, mask = normal(rows, 64, DEVICE), as_mask(rows, 64, 6, DEVICE)
    cu_seqlens = prefix_sums([rows // 8] * 7, DEVICE)
    calls: dict[str, tuple[Any, ...]] = {
        "moe_z_loss": (logits, None, None, 1.0),
        "moe_seq_aux_loss": (logits.sigmoid(), mask, cu_seqlens, None, None, 64, 6, "mean", 1.0),
        "tokens_per_expert": (mask, None, None),
    }
    for name, args in calls.items():
        first = kernel(name)(*args)
        for _ in range(7):
            again = kernel(name)(*args)
            for one, other in zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]:
                assert torch.equal(one, other), name


def test_logits_far_apart_are_addressed_in_64_bits() -> None:
    """Three rows whose last starts 2**31 elements behind the first; the memory between them is never touched."""
    buffer = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    x = buffer.as_strided((3, 8), (2**30 + 8, 1))
    x.copy_(uniform(3, 8, DEVICE, torch.bfloat16))
    hold = torch.testing.assert_close
    loss, factor, lse = kernel("moe_z_loss")(x, None, None, 1.0)
    hold(loss, reference("moe_z_loss")(x, None, None, 1.0)[0])
    grad_args = (torch.ones((), device=DEVICE), factor, x, lse)
    hold(kernel("moe_z_loss_grad")(*grad_args), reference("moe_z_loss_grad")(*grad_args))
    args = (x, as_mask(3, 8, 2, DEVICE), prefix_sums([2, 1], DEVICE), None, None, 8, 2, "sum", 1.0)
    hold(kernel("moe_seq_aux_loss")(*args)[0], reference("moe_seq_aux_loss")(*args)[0])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, experts = 2**20 + 3, 2048
    logits = torch.zeros(rows, experts, dtype=torch.bfloat16, device=DEVICE)
    loss, factor, lse = kernel("moe_z_loss")(logits, None, None, 1.0)
    value = torch.tensor(experts, dtype=torch.float32, device=DEVICE).log()
    torch.testing.assert_close(loss, value**2)
    grad = kernel("moe_z_loss_grad")(torch.full((), float(rows), device=DEVICE), factor, logits, lse)
    torch.testing.assert_close(grad[[0, -1]].float(), (2 * value / experts).expand(2, experts), rtol=1e-2, atol=0.0)
    mask = torch.ones(rows, experts, dtype=torch.bool, device=DEVICE)
    assert kernel("tokens_per_expert")(mask, None, None).eq(rows).all()
    scores = torch.ones_like(logits)
    ends = prefix_sums([5, rows - 5], DEVICE)
    each, slopes, share = kernel("moe_seq_aux_loss")(scores, mask, ends, None, None, experts, 2, "none", 1.0)
    torch.testing.assert_close(each, torch.full_like(each, experts**2 / 2))
    grad = kernel("moe_seq_aux_loss_grad")(torch.ones_like(each), slopes, share, ends, None, rows, torch.float32)
    torch.testing.assert_close(grad[-1], torch.full_like(grad[-1], experts / 2 / (rows - 5)))
