"""Inputs on which other projects failed, with the right result: the reports that concern the padding ops, or ops of any family.

Each test names the public report it comes from. T rows, B sequences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from capturing import captured
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import thdops
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = ["aot_eager", "inductor"]
NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    # Inductor's cache knows neither fakes nor schemas: a stale entry would pass where the op is wrong.
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def offsets(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def zeroed_rows(x: Tensor) -> set[int]:
    """The rows that hold nothing but zeros; every other row must hold no zero at all."""
    zero = x.flatten(1) == 0
    assert torch.equal(zero.any(1), zero.all(1))
    return set(zero.all(1).nonzero().flatten().tolist())


def guarded(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher for the interpreter, whose wrong addresses become errors instead of a crash."""

    def run(*args: Any) -> Any:
        with guarded_memory([t for t in tree_leaves(args) if isinstance(t, Tensor)]):
            return launcher(*args)

    return run


# --- where padding stands ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "TransformerEngine PR 2898: gaps and a tail": (
        (0, 1, 2, 3, 7, 10, 12, 13, 14),
        (0, 1, 2, 4, 8, 12, 14, 15, 16),
        16,
        {3, 11},
    ),
    "TransformerEngine PR 3205: rows past the last padded offset": ((0, 3, 8), (0, 4, 12), 16, {3, *range(9, 16)}),
    "PyTorch 176793: more rows than sequences own": ((0, 144, 432, 944), None, 946, {944, 945}),
    "cudnn-frontend 737: addresses from padded, lengths from valid": ((0, 3, 5, 9), (0, 4, 8, 13), 13, {3, 6, 7, 12}),
    "vLLM 57017: a zero-length slot at the end": ((0, 2, 5, 6, 6), (0, 4, 8, 12, 12), 14, {2, 3, 7, 9, 10, 11, 12, 13}),
    "TransformerEngine 2599: hundreds of empty entries": ((0, 3, *[5] * 510), (0, 4, *[8] * 510), 9, {3, 6, 7, 8}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_reported_layouts_have_these_padding_rows(name: str, device: str) -> None:
    valid, padded, total, pads = LAYOUTS[name]
    batch = (offsets(*valid, device=device), None if padded is None else offsets(*padded, device=device))
    assert set(thdops.padding_mask(*batch, total).nonzero().flatten().tolist()) == pads
    x = torch.ones(total, 16, 64, device=device, requires_grad=True)
    y = thdops.zero_fill(x, *batch)
    y.backward(torch.full_like(y, 3.0))
    assert x.grad is not None
    in_place = torch.full_like(y, 2.0)
    thdops.zero_fill_(in_place, *batch)
    assert zeroed_rows(y) == zeroed_rows(x.grad) == zeroed_rows(in_place) == pads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same", ["object", "clone", "view", "absent"])
def test_padded_offsets_equal_to_valid_ones(same: str, device: str) -> None:
    """TransformerEngine 3487: whether padding exists was decided by the identity of two tensors."""
    valid = offsets(0, 3, 3, 7, device=device)
    padded = {"object": valid, "clone": valid.clone(), "view": valid[:], "absent": None}[same]
    x = torch.ones(9, 4, device=device)
    assert zeroed_rows(thdops.zero_fill(x, valid, padded)) == {7, 8}
    thdops.zero_fill_(x, valid, padded)
    assert zeroed_rows(x) == {7, 8}
    assert thdops.sequence_ids(valid, padded, 9).tolist() == [0, 0, 0, 2, 2, 2, 2, -1, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_an_amax_over_the_output_is_finite(device: str) -> None:
    """vLLM 57017: an amax ran over rows that a zero-length slot had left unwritten."""
    x = torch.full((14, 4), NAN, device=device)
    batch = (offsets(0, 2, 5, 6, 6, device=device), offsets(0, 4, 8, 12, 12, device=device))
    x[[0, 1, 4, 5, 6, 8]] = -2.0
    assert thdops.zero_fill(x, *batch).abs().amax().item() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_masked_by_selection(poison: float, device: str) -> None:
    """vLLM PR 41249: a mask applied by multiplication keeps NaN, forward and backward."""
    batch = (offsets(0, 3, 5, 9, device=device), offsets(0, 4, 8, 13, device=device))
    x = torch.full((13, 2), poison, device=device, requires_grad=True)
    y = thdops.zero_fill(x, *batch)
    y.backward(torch.full_like(y, poison))
    pads = thdops.padding_mask(*batch, 13)
    assert x.grad is not None
    assert y[pads].eq(0).all()
    assert x.grad[pads].eq(0).all()


def test_more_documents_than_the_capacity() -> None:
    """Megatron-LM 5619, PR 5046: documents past the capacity were cut off silently."""
    with pytest.raises(ValueError, match=r"max_seqs must be at least the number of lengths \(3\), got 2"):
        thdops.cu_seqlens_from_lengths(offsets(4, 4, 4), 2)
    # No host read, hence no exception: nothing of such a batch counts as valid.
    assert thdops.cu_seqlens_from_positions(offsets(0, 1, 0, 1, 0), 2).tolist() == [-1, -1, -1]


# --- addresses and launches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [2**29 - 1, 2**29 + 1])  # odd, or wider accesses would shrink the offsets
@pytest.mark.parametrize("device", DEVICES)
def test_offsets_around_two_to_the_31(stride: int, device: str) -> None:
    """sglang 20389: 32-bit offsets wrap. Row 4 begins just under and just over 2^31 elements; gaps between rows stay untouched."""
    x = torch.empty(6 * stride, dtype=torch.int8, device=device).view(6, stride)[:, :3]
    calls: list[tuple[Any, Any]] = [(REGISTRY.op("zero_fill"), REGISTRY.op("zero_fill_"))]
    if device == "cpu" and not why_not():
        launchers = (load_launcher(REGISTRY[name], REGISTRY.schema(name)) for name in ("zero_fill", "zero_fill_"))
        calls.append(tuple(map(guarded, launchers)))
    for functional, in_place in calls:
        x.fill_(1)
        ends = offsets(0, 2, 4, device=device), offsets(0, 3, 5, device=device)
        assert zeroed_rows(functional(x, *ends)) == {2, 5}
        in_place([x], [ends[0]], [])
        assert zeroed_rows(x) == {4, 5}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_launches_do_not_depend_on_the_contents_of_metadata() -> None:
    """TransformerEngine 2599 (empty entries made a kernel 10x slower), PR 2898 (eager and capture took different paths), 3487
    (whether padding exists was decided by the identity of two tensors)."""
    from thdops.ops.launch import intercept

    def launches(valid: Tensor, padded: Tensor) -> list[Any]:
        seen: list[Any] = []

        def note(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> None:
            seen.append((kernel, grid, [type(arg) for arg in args], constexprs, options))

        x = torch.zeros(4096, 8)
        with intercept(note):
            for name in ("padding_mask", "sequence_ids", "positions", "compact_rows"):
                load_launcher(REGISTRY[name], REGISTRY.schema(name))(valid, padded, 4096)
            load_launcher(REGISTRY["zero_fill"], REGISTRY.schema("zero_fill"))(x, valid, padded)
            load_launcher(REGISTRY["zero_fill_"], REGISTRY.schema("zero_fill_"))([x], [valid], [padded])
        return seen

    even, nothing = offsets(*range(0, 4097, 8)), offsets(*[0] * 513)
    full = launches(even, even.clone())
    assert len(full) == 6
    assert launches(even, even) == full
    assert launches(even, even[:]) == full
    assert launches(offsets(0, 100, *[200] * 511), offsets(0, 104, *[208] * 511)) == full
    assert launches(nothing, nothing.clone()) == full


@pytest.mark.gpu
def test_replay_with_another_layout() -> None:
    """torchtitan 3709, TransformerEngine PR 2898: what was read at capture time was used at every replay."""
    valid, padded = offsets(0, 8, 16, device="cuda"), offsets(0, 8, 16, device="cuda")
    x, in_place = torch.ones(16, 2, 8, device="cuda"), torch.ones(16, 8, device="cuda")
    out: list[Tensor] = [torch.empty(0)] * 2

    def step() -> None:
        out[:] = thdops.zero_fill(x, valid, padded), thdops.sequence_ids(valid, padded, 16)
        thdops.zero_fill_([in_place], valid, padded)

    graph, _ = captured(step)
    for lengths, owned in (((0, 3, 8), (0, 4, 12)), ((0, 0, 16), (0, 0, 16)), ((0, 0, 0), (0, 16, 16)), ((0, 1, 2), (0, 2, 4))):
        valid.copy_(offsets(*lengths))
        padded.copy_(offsets(*owned))
        in_place.fill_(1)
        graph.replay()
        pads = set(thdops.padding_mask(valid, padded, 16).nonzero().flatten().tolist())
        assert zeroed_rows(out[0]) == zeroed_rows(in_place) == pads
        assert torch.equal(out[1], thdops.sequence_ids(valid, padded, 16))


@pytest.mark.gpu
def test_graphs_that_share_a_pool() -> None:
    """vLLM 57136: 1196 real tokens in the graph for 2048, between replays of a smaller one, met the memory of that one."""
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]]] = {}
    for size in (2048, 1024):
        valid = offsets(0, size, device="cuda")
        out: list[Tensor] = []

        def step(valid: Tensor = valid, size: int = size, out: list[Tensor] = out) -> None:
            scratch = torch.full((size, 64), NAN, device="cuda")
            out[:] = [thdops.zero_fill(scratch, valid)]

        graphs[size] = captured(step, pool)[0], valid, out
    for size, real in ((1024, 1000), (2048, 1196), (1024, 3), (2048, 1196)):
        graph, valid, out = graphs[size]
        valid.copy_(offsets(0, real))
        graph.replay()
        assert out[0][:real].isnan().all()
        assert out[0][real:].eq(0).all()


# --- under torch.compile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_clone_before_the_mutation_is_kept(backend: str, device: str) -> None:
    """PyTorch 198031: the clone was dropped, and the op wrote to what it was cloned from."""

    def step(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        thdops.zero_fill_(y, ends)
        return y, x + 1

    x = torch.ones(6, 2, device=device)
    y, shifted = compiled(step, backend)(x, offsets(0, 3, device=device))
    assert y.sum(1).tolist() == [2, 2, 2, 0, 0, 0]
    assert x.eq(1).all()
    assert shifted.eq(2).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_destination_that_was_cloned_from_the_source(backend: str, device: str) -> None:
    """PyTorch 198031 as reported: the op reads what its destination is a clone of. Here that is metadata, zeroed by itself."""

    def step(source: Tensor) -> tuple[Tensor, Tensor]:
        destination = source.clone()
        thdops.zero_fill_(destination, source)
        return destination, source + 1

    source = offsets(1, 2, 3, 3, 3, device=device)  # owns rows 1 and 2 of its own five
    destination, shifted = compiled(step, backend)(source)
    assert destination.tolist() == [0, 2, 3, 0, 0]
    assert source.tolist() == [1, 2, 3, 3, 3]
    assert shifted.tolist() == [2, 3, 4, 4, 4]


def _equal_buffers(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    thdops.zero_fill_([x, y], ends)
    return x, y, x + y


def _equal_intermediates(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    dk, dv = x * 2, x * 2
    thdops.zero_fill_([dk, dv], [ends, ends[:2]])
    return dk, dv, y


def _views_of_an_input(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    thdops.zero_fill_([x[:, :2], x[:, 4:]], [ends, ends[:2]])
    return x * 1, y


def _views_of_an_intermediate(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    fused = x * 3
    thdops.zero_fill_(fused.view(8, 3, 2).unbind(1), ends)
    return fused, y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [_equal_buffers, _equal_intermediates, _views_of_an_input, _views_of_an_intermediate])
def test_mutated_buffers_of_one_shape_or_one_base(step: Callable[..., tuple[Tensor, ...]], backend: str, device: str) -> None:
    """PyTorch 132196, 153389: functionalisation mixed up what was written where."""

    def arguments() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.arange(1.0, 49.0, device=device).view(8, 6)
        return x, x + 100, offsets(0, 3, 6, device=device)

    eager, traced = arguments(), arguments()
    expected, actual = step(*eager), compiled(step, backend)(*traced)
    for right, got in zip((*expected, *eager), (*actual, *traced), strict=True):
        assert torch.equal(right, got)
    assert any(not torch.equal(right, start) for right, start in zip(expected, arguments(), strict=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_output_that_passes_through_cat(backend: str | None, device: str) -> None:
    """PyTorch 194719: gradients that come back as slices were read as if contiguous."""

    strides: list[tuple[int, ...]] = []

    def step(x: Tensor, ends: Tensor) -> Tensor:
        y = thdops.zero_fill(x, ends)  # used once: two slices would be added up to a contiguous gradient
        if backend is None:
            y.register_hook(lambda grad: strides.append(grad.stride()))
        return (torch.cat((x, y, x), dim=1) * torch.arange(36.0, device=x.device).view(6, 6)).sum()

    x = torch.ones(6, 2, device=device, requires_grad=True)
    run = compiled(step, backend) if backend else step
    run(x, offsets(0, 3, device=device)).backward()
    assert strides == ([] if backend else [(6, 1)])  # else this tests nothing
    assert x.grad is not None
    # Row r of the weights is 6r .. 6r+5; x gets columns 0, 1 and 4, 5, and where the row is valid 2, 3 as well.
    assert x.grad.tolist() == [[6, 9], [24, 27], [42, 45], [40, 42], [52, 54], [64, 66]]


VIEWS = {
    "transposed": lambda new: new(4, 8).t(),
    "fused [T, 3, H, D]": lambda new: new(8, 3, 2, 4)[:, 1],
    "fused [T, H, 3, D]": lambda new: new(8, 2, 3, 4)[:, :, 1],
    "one row": lambda new: new(4, 1).t(),
    "permuted": lambda new: new(4, 2, 8).permute(2, 1, 0),
    "expanded": lambda new: new(1).expand(8, 4),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS)
def test_fake_strides_are_the_real_ones(view: str, device: str) -> None:
    """PyTorch 182328, cudnn-frontend PR 517: strides differed for inputs that are not contiguous."""
    x, ends = VIEWS[view](partial(torch.ones, device=device)), offsets(0, 1, device=device)
    with FakeTensorMode() as mode:
        fake = thdops.zero_fill(mode.from_tensor(x), mode.from_tensor(ends))
    ways: list[Callable[..., Tensor]] = [thdops.zero_fill]
    if device == "cpu" and not why_not():
        ways.append(load_launcher(REGISTRY["zero_fill"], REGISTRY.schema("zero_fill")))
    for way in ways:
        real = way(x, ends, None)
        assert (fake.shape, fake.stride()) == (real.shape, real.stride())
        assert real[0].eq(1).all()
        assert real[1:].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_functional_form_for_cuda_graph_trees(device: str) -> None:
    """flashinfer 403: an op that mutates its inputs made `reduce-overhead` skip CUDA graphs."""

    def step(x: Tensor, valid: Tensor, padded: Tensor) -> Tensor:
        return thdops.zero_fill(x * 2, valid, padded) + 1

    counters.clear()
    run = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for lengths, owned in (((0, 3, 5), (0, 4, 8)), ((0, 1, 8), (0, 1, 8)), ((0, 0, 0), (0, 0, 0))):
        x = torch.ones(8, 2, device=device)
        batch = offsets(*lengths, device=device), offsets(*owned, device=device)
        assert torch.equal(run(x, *batch), step(x, *batch))
    if device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(("dynamic", "compilations"), [(True, 1), (None, 2)])
def test_other_sizes_compile_nothing_new(dynamic: bool | None, compilations: int) -> None:
    """OLMo-core 500, quack 150: a row count of 129 after 128 recompiled. By default the second size makes sizes symbolic."""
    counter = CompileCounter()

    def step(x: Tensor, valid: Tensor, padded: Tensor) -> tuple[Any, ...]:
        total = x.shape[0]
        y = thdops.zero_fill(x, valid, padded) * 2
        thdops.zero_fill_([y], valid, padded)
        batch = (valid, padded, total)
        maps = (thdops.padding_mask(*batch), thdops.sequence_ids(*batch), thdops.positions(*batch), *thdops.compact_rows(*batch))
        ends = thdops.cu_seqlens_from_positions(maps[2], total // 2)
        return y, *maps, ends, *thdops.slice_cu_seqlens(valid, padded, total // 4, total // 2)

    run = compiled(step, counter, dynamic=dynamic)  # type: ignore[arg-type]
    for total, sequences in ((128, 4), (129, 5), (130, 4), (1024, 32), (7, 3)):
        padded = torch.arange(sequences + 1, dtype=torch.int32) * (total // sequences)
        valid = torch.arange(sequences + 1, dtype=torch.int32)
        x = torch.ones(total, 2)
        for right, got in zip(step(x, valid, padded), run(x, valid, padded), strict=True):
            assert torch.equal(right, got)
    assert counter.frame_count == compilations
