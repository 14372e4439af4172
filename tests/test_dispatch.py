"""What is special to the dispatch: the order of rows, an MoE layer around a grouped GEMM, rows of no expert, captured routings.

T rows (tokens), E experts, K top-k, H and F the widths of a small MoE. Conformance covers what every op shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops.conformance.graphs import syncs_are_errors
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.ops.dispatch import reference
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN = float("nan")
OPS = ("permute_tokens", "unpermute_tokens", "unpermute_tokens_grad")
FUZZ = settings(max_examples=40, deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")
interpreted = pytest.mark.skipif(not CUDA and why_not() != "", reason=why_not() or "interpreted")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def random_values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def random_ids(tokens: int, topk: int, experts: int, none: float = 0.2, seed: int = 1) -> Tensor:
    """Experts of each token, no two the same where there are enough; a share of the tokens and of the pairs has none."""
    generator = torch.Generator().manual_seed(seed)
    if topk <= experts:
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk]
    else:
        ids = torch.randint(0, experts, (tokens, topk), generator=generator)
    without = (torch.rand(tokens, topk, generator=generator) < none) | (torch.rand(tokens, 1, generator=generator) < none)
    return torch.where(without, -1, ids).to(DEVICE)


def kernel(name: str) -> Callable[..., Any]:
    """An op's launcher on `DEVICE`, in guarded memory where it is interpreted."""
    if CUDA:
        return REGISTRY.op(name)
    launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))

    def run(*args: Any) -> Any:
        with guarded_memory([a for a in args if isinstance(a, Tensor)]):
            return launcher(*args)

    return run


def sorted_by_hand(ids: list[list[int]], experts: int) -> tuple[list[int], list[int], list[list[int]]]:
    """(pair of each row, offsets, map), one pair after the other."""
    flat = [e for row in ids for e in row]
    order = [p for e in range(experts) for p, other in enumerate(flat) if other == e]
    offsets = [sum(1 for e in flat if 0 <= e <= last) for last in range(experts)]
    valid = len(order)
    order += [p for p, e in enumerate(flat) if not 0 <= e < experts]
    row = {p: r if r < valid else ~r for r, p in enumerate(order)}
    width = len(ids[0]) if ids else 1
    return order, offsets, [[row[t * width + k] for k in range(width)] for t in range(len(ids))]


# --- order ------------------------------------------------------------------------------------------------------------------------


def test_a_small_example() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 0], [3, -1]], device=DEVICE)
    rows, offsets, map = thdops.permute_tokens(torch.tensor([10, 11, 12, 13], device=DEVICE), ids, 3)
    assert rows.tolist() == [10, 12, 12, 10, 11, 0, 0, 0]
    assert offsets.tolist() == [3, 3, 5]
    assert map.tolist() == [[3, 0], [~5, 4], [1, 2], [~6, ~7]]
    assert (offsets.dtype, map.dtype) == (torch.int32, torch.int32)
    assert thdops.unpermute_tokens(rows.float(), map).tolist() == [20, 11, 24, 0]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """(ids, E): any integers of the dtype, most of them experts, many of them the same."""
    experts = draw(st.sampled_from((1, 2, 5, 40)))
    tokens, topk = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from((torch.int16, torch.int32, torch.int64)))
    limits = torch.iinfo(dtype)
    strange = st.sampled_from((-1, experts, experts + 1, limits.min, limits.max, -experts))
    one = st.one_of(st.integers(0, experts - 1), st.integers(0, experts - 1), strange)
    row = st.lists(one, min_size=topk, max_size=topk)
    ids = draw(st.lists(row, min_size=tokens, max_size=tokens))
    return torch.tensor(ids, dtype=dtype, device=DEVICE).reshape(tokens, topk), experts


@interpreted
@FUZZ
@given(routings())
def test_rows_are_sorted_by_expert_and_number(routing: tuple[Tensor, int]) -> None:
    ids, experts = routing
    tokens, topk = ids.shape
    order, offsets, map = sorted_by_hand(ids.tolist(), experts)
    x = torch.arange(1, tokens + 1, device=DEVICE)
    legal = offsets[-1]
    for permute in (thdops.permute_tokens, kernel("permute_tokens")):
        rows, ends, where = permute(x, ids, experts)
        assert rows.tolist() == [p // topk + 1 for p in order[:legal]] + [0] * (tokens * topk - legal)
        assert ends.tolist() == offsets
        assert where.tolist() == map


@FUZZ
@given(routings(), st.integers(0, 2**31))
def test_there_and_back(routing: tuple[Tensor, int], seed: int) -> None:
    """Weights that sum to one give x back, exactly: they are powers of two. Counts are a histogram of the ids."""
    ids, experts = routing
    legal = (ids >= 0) & (ids < experts)
    x = torch.randint(-8, 9, (ids.shape[0], 3), generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float32)
    rows, offsets, map = thdops.permute_tokens(x, ids, experts)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    assert torch.equal(counts, torch.bincount(ids[legal].long(), minlength=experts).int())
    number = legal.cumsum(1)  # 1/2, 1/4, ..., and the last one twice
    weights = torch.where(number == legal.sum(1, keepdim=True), 0.5 ** (number - 1), 0.5**number)
    weights = torch.where(legal, weights, NAN)
    rows = torch.where((torch.arange(len(rows), device=DEVICE) < offsets[-1])[:, None], rows, NAN)
    back = thdops.unpermute_tokens(rows, map, weights)
    assert torch.equal(back, torch.where(legal.any(1, keepdim=True), x, 0.0))


@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        (torch.full((7, 3), 2), 5),
        (torch.full((7, 3), -1), 5),
        (torch.full((7, 1), 5), 5),
        (torch.tensor([[4], [0], [4]]), 5),
        (torch.zeros(6, 2, dtype=torch.int64), 1),
        (torch.tensor([[4095, 0], [4096, 17]]), 4096),
        (torch.zeros(0, 3, dtype=torch.int64), 5),
    ],
    ids=["one busy expert", "all padding", "all padding, K = 1", "K = 1", "E = 1", "E = 4096", "T = 0"],
)
@interpreted
def test_degenerate_routings(ids: Tensor, experts: int) -> None:
    ids = ids.to(DEVICE)
    x = random_values(ids.shape[0], 8)
    order, offsets, map = sorted_by_hand(ids.tolist(), experts)
    functions = [(thdops.permute_tokens, thdops.unpermute_tokens)]
    if CUDA or experts < 100:  # the interpreter takes seconds for thousands of programs
        functions.append((kernel("permute_tokens"), kernel("unpermute_tokens")))
    for permute, unpermute in functions:
        rows, ends, where = permute(x, ids, experts)
        assert ends.tolist() == offsets
        assert where.tolist() == (map if map else [])
        source = torch.tensor(order[: offsets[-1]], dtype=torch.int64, device=DEVICE) // ids.shape[1]
        assert torch.equal(rows[: offsets[-1]], x[source])
        assert not rows[offsets[-1] :].any()
        has_expert = (ids >= 0) & (ids < experts)
        expected = x * has_expert.sum(1, keepdim=True)
        torch.testing.assert_close(unpermute(rows, where, None), expected)


def test_every_row_is_named_once() -> None:
    """A pair without an expert says which trailing row is its own: the gradient writes every row without looking for it."""
    ids = random_ids(50, 3, 7)
    _, offsets, map = thdops.permute_tokens(random_values(50), ids, 7)
    rows = torch.where(map < 0, ~map, map).flatten()
    assert torch.equal(rows.sort().values, torch.arange(150, dtype=torch.int32, device=DEVICE))
    assert torch.equal(map < 0, ids < 0)
    assert (rows[map.flatten() < 0] >= offsets[-1]).all()


# --- an MoE layer -----------------------------------------------------------------------------------------------------------------


class _Unwritten(torch.autograd.Function):
    """rows with NaN from offsets[-1] on, in the forward and in the backward: what a grouped GEMM may leave there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return _poisoned(rows, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _poisoned(grads[0], *ctx.saved_tensors), None


def _poisoned(rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.where((torch.arange(len(rows), device=rows.device) < offsets[-1])[:, None], rows, NAN)


def layer(x: Tensor, ids: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows, offsets, map = thdops.permute_tokens(x, ids, up.shape[0])
    hidden = torch.nn.functional.grouped_mm(rows, up, offs=offsets)
    rows = torch.nn.functional.grouped_mm(torch.nn.functional.silu(hidden), down, offs=offsets)
    return thdops.unpermute_tokens(rows, map, probs)


def poisoned_layer(x: Tensor, ids: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same with NaN wherever a grouped GEMM need not write, before and behind each; products by a loop, so fp64 works too."""
    rows, offsets, map = thdops.permute_tokens(x, ids, up.shape[0])
    for weight in (up, down):
        ends = [0, *offsets.tolist()]
        product = [rows[a:b] @ w for a, b, w in zip(ends[:-1], ends[1:], weight, strict=True)]
        rest = rows[ends[-1] :, :1].expand(-1, weight.shape[2])
        rows = _Unwritten.apply(torch.cat([*product, rest]), offsets)
        if weight is up:
            rows = torch.nn.functional.silu(rows)
    return thdops.unpermute_tokens(rows, map, probs)


def loop(x: Tensor, ids: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Expert after expert, the tokens that chose it."""
    out = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, k = torch.nonzero(ids == expert, as_tuple=True)
        value = torch.nn.functional.silu(x[token] @ up[expert]) @ down[expert]
        out = out.index_add(0, token, value * probs[token, k, None].to(value.dtype))
    return out


def moe(dtype: torch.dtype, tokens: int = 37, experts: int = 6, topk: int = 3, width: int = 32) -> tuple[Tensor, ...]:
    """x, ids, probs, up, down; NaN where a token has no expert. Expert 0 has no token."""
    ids = random_ids(tokens, topk, experts - 1)
    ids = torch.where(ids < 0, ids, ids + 1)
    x = torch.where((ids < 0).all(1, keepdim=True), NAN, random_values(tokens, width))
    probs = torch.where(ids < 0, NAN, random_values(tokens, topk, seed=2).softmax(-1))
    up = random_values(experts, width, 48, seed=3) / width**0.5
    down = random_values(experts, 48, width, seed=4) / 48**0.5
    return x.to(dtype), ids, probs, up.to(dtype), down.to(dtype)


def value_and_gradients(function: Callable[..., Tensor], args: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    out = function(*leaves)
    wanted = [a for a in leaves if a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


NAMES = ("out", "x", "probs", "up", "down")


def truth(args: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    """The loop in fp64, tokens and probabilities of no expert replaced by zeros."""
    fp64 = tuple(a.double().nan_to_num(0.0) if a.is_floating_point() else a for a in args)
    return value_and_gradients(loop, fp64, upstream.double())


def check_layer(function: Callable[..., Tensor], args: tuple[Tensor, ...], tolerance: float) -> None:
    upstream = random_values(*args[0].shape, seed=5)
    actual = value_and_gradients(function, args, upstream)
    for name, a, expected in zip(NAMES, actual, truth(args, upstream), strict=True):
        bound = tolerance * expected.abs().max().item()
        torch.testing.assert_close(a.double(), expected, rtol=0.0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")
    without = (args[1] < 0).all(1)
    for name, a in zip(("out", "x"), actual, strict=False):
        assert torch.equal(a[without], torch.zeros_like(a[without])), name
        assert not a[without].signbit().any(), name
    assert not actual[2][args[1] < 0].any(), "probs of pairs without an expert"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_a_loop_over_experts(dtype: torch.dtype) -> None:
    check_layer(layer, moe(dtype), 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_grouped_gemm_leaves_unwritten_reaches_nothing(dtype: torch.dtype) -> None:
    args = moe(dtype)
    if CUDA and dtype == torch.float64:
        args = tuple(a.cpu() for a in args)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    upstream = random_values(*args[0].shape, seed=5).to(args[0].device)
    actual = value_and_gradients(poisoned_layer, args, upstream)
    for name, a, expected in zip(NAMES, actual, truth(args, upstream), strict=True):
        bound = max(tolerance, torch.finfo(a.dtype).eps) * expected.abs().max().item()  # probs stay fp32
        torch.testing.assert_close(a.double(), expected, rtol=0.0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


def test_a_batch_of_padding_gives_zeros() -> None:
    x, ids, probs, up, down = moe(torch.bfloat16)
    args = (torch.full_like(x, NAN), torch.full_like(ids, up.shape[0]), torch.full_like(probs, NAN), up, down)
    for value in value_and_gradients(layer, args, torch.full_like(x, NAN)):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_one_compiled_layer_serves_all_routings(backend: str) -> None:
    x, _, probs, up, down = moe(torch.bfloat16)
    x, probs = x.nan_to_num(0.0), probs.nan_to_num(0.5)
    upstream = random_values(*x.shape, dtype=torch.bfloat16, seed=5)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
    for seed, none in ((1, 0.2), (2, 0.0), (3, 0.9), (4, 1.0)):
        args = (x, random_ids(37, 3, 6, none, seed), probs, up, down)
        actual = value_and_gradients(compiled, args, upstream)
        for name, a, e in zip(NAMES, actual, value_and_gradients(layer, args, upstream), strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2 * e.abs().max().item(), msg=lambda t, n=name: f"{n}: {t}")
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_captured_layer_follows_the_routing(compiled: bool) -> None:
    """Forward and backward in one graph, replayed with other routings, tokens and gradients; the same bits as without the graph."""
    x, ids, probs, up, down = moe(torch.bfloat16, tokens=300, experts=16, topk=4, width=64)
    x, probs = x.nan_to_num(0.0), probs.nan_to_num(0.5)
    function = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    static = [a.clone().requires_grad_(a.is_floating_point()) for a in (x, ids, probs, up, down)]
    upstream = random_values(*x.shape, dtype=torch.bfloat16, seed=5)

    def step(args: list[Tensor]) -> list[Tensor]:
        out = function(*args)
        return [out.detach(), *torch.autograd.grad(out, [a for a in args if a.requires_grad], upstream)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), syncs_are_errors():
        results = step(static)
    for seed, none in ((1, 0.2), (2, 0.0), (3, 0.9), (4, 1.0), (5, 0.1)):
        with torch.no_grad():
            static[0].copy_(random_values(*x.shape, seed=seed))
            static[1].copy_(random_ids(300, 4, 16, none, seed))
        graph.replay()
        fresh = [a.detach().clone().requires_grad_(a.requires_grad) for a in static]
        for name, replayed, eager in zip(NAMES, results, step(fresh), strict=True):
            assert torch.equal(replayed, eager), (name, seed)
        check_layer(layer, tuple(a.detach() for a in static), 3e-2)


# --- autograd ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [False, True])
def test_rows_are_kept_only_for_the_gradient_of_weights(wanted: bool) -> None:
    rows, _, map = thdops.permute_tokens(random_values(5, 4), random_ids(5, 2, 3), 3)
    weights = random_values(5, 2).requires_grad_(wanted)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        thdops.unpermute_tokens(rows.requires_grad_(), map, weights).sum().backward()
    assert ((10, 4) in kept) == wanted
    assert rows.grad is not None
    assert (weights.grad is not None) == wanted


def test_integer_tokens_have_no_gradient() -> None:
    rows, offsets, map = thdops.permute_tokens(torch.arange(5, device=DEVICE), random_ids(5, 2, 3), 3)
    assert not any(result.requires_grad for result in (rows, offsets, map))


def test_changing_the_map_before_the_backward_raises() -> None:
    rows, _, map = thdops.permute_tokens(random_values(5, 4).requires_grad_(), random_ids(5, 2, 3), 3)
    map.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


# --- errors of the public functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (torch.tensor(3), "a tensor"),
        (3.0, "float"),
        (True, "bool"),
        (None, "NoneType"),
    ],
)
def test_the_number_of_experts_is_static(experts: Any, text: str) -> None:
    match = f"^permute_tokens: num_experts must be a Python integer, got {text}; pass the static number of experts$"
    with pytest.raises(TypeError, match=match):
        thdops.permute_tokens(random_values(4, 2), random_ids(4, 2, 3), experts)


def test_what_is_no_tensor_is_refused_by_name() -> None:
    not_a_tensor: Any = [[0, 1]]
    with pytest.raises(TypeError, match=r"^permute_tokens: indices must be a tensor, got a list;"):
        thdops.permute_tokens(random_values(1, 2), not_a_tensor, 3)
    with pytest.raises(TypeError, match=r"^unpermute_tokens: map must be a tensor, got a list;"):
        thdops.unpermute_tokens(random_values(2, 2), not_a_tensor)
    with pytest.raises(TypeError, match=r"^unpermute_tokens: weights must be a tensor, got a list;"):
        thdops.unpermute_tokens(random_values(2, 2), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), not_a_tensor)


# --- kernels ----------------------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("experts", [1, 14, 15, 16, 70])
@pytest.mark.parametrize("pairs", [(1, 1), (8, 4), (11, 3), (61, 5), (97, 4)])
def test_chunks_of_every_size(pairs: tuple[int, int], experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that every loop of the sort goes round several times, and ends where its numbers do or within a block."""
    from thdops.ops.dispatch import kernels_sort

    for name, size in (("_BLOCK", 16), ("_STEPS", 2), ("_BINS", 16), ("_BLOCK_C", 4), ("_PLACED", 64)):
        monkeypatch.setattr(kernels_sort, name, size)
    ids = random_ids(*pairs, experts)
    order, offsets, map = sorted_by_hand(ids.tolist(), experts)
    rows, ends, where = kernel("permute_tokens")(torch.arange(1, pairs[0] + 1, device=DEVICE), ids, experts)
    assert ends.tolist() == offsets
    assert where.tolist() == map
    assert rows[: offsets[-1]].tolist() == [p // pairs[1] + 1 for p in order[: offsets[-1]]]


@interpreted
@pytest.mark.parametrize("width", [1, 3, 16, 40, 130])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_wider_than_a_block(width: int, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from thdops.ops.dispatch import kernels

    for name, size in (("_COPIED", 32), ("_SUMMED_BYTES", 128), ("_WIDEST", 32), ("_UNROLL", 2), ("_MOST_T", 4)):
        monkeypatch.setattr(kernels, name, size)
    ids, x = random_ids(9, 3, 5), random_values(9, width)
    rows, _, map = kernel("permute_tokens")(x, ids, 5)
    assert torch.equal(rows, reference.permute_tokens(x, ids, 5)[0])
    weights = random_values(9, 3, seed=2) if weighted else None
    rows = random_values(27, width, seed=3)
    torch.testing.assert_close(kernel("unpermute_tokens")(rows, map, weights), reference.unpermute_tokens(rows, map, weights))
    args = (x, rows if weighted else None, map, weights)
    actual, expected = kernel("unpermute_tokens_grad")(*args), reference.unpermute_tokens_grad(*args)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-4)


@interpreted
@pytest.mark.parametrize("numbers", [(100, 200), (-300, 300), (-(2**31), 2**31)])
def test_a_map_of_any_integers_touches_nothing_outside(numbers: tuple[int, int]) -> None:
    map = torch.randint(*numbers, (9, 3), generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.int32)
    rows, weights, grad = random_values(27, 5), random_values(9, 3), random_values(9, 5)
    out = kernel("unpermute_tokens")(rows, map, weights)
    torch.testing.assert_close(out, reference.unpermute_tokens(rows, map, weights))
    _, grad_weights = kernel("unpermute_tokens_grad")(grad, rows, map, weights)
    torch.testing.assert_close(grad_weights, reference.unpermute_tokens_grad(grad, rows, map, weights)[1])
    kernel("unpermute_tokens_grad")(grad, None, map, None)


@pytest.mark.skipif(CUDA, reason="launches are intercepted on CPU tensors")
@interpreted
@pytest.mark.parametrize("layout", ["slice", "expanded", "every other row"])
def test_rows_that_are_runs_of_memory_are_not_copied(layout: str) -> None:
    from thdops.ops.launch import intercept

    def laid_out(rows: int) -> Tensor:
        buffer = random_values(2 * rows, 12)
        return {"slice": buffer[:rows, 3:11], "expanded": buffer[:1, :8].expand(rows, 8), "every other row": buffer[::2]}[layout]

    x, rows, map, weights = laid_out(6), laid_out(12), torch.arange(12, dtype=torch.int32).view(6, 2), random_values(6, 2)
    launches: dict[str, list[Any]] = {}
    for name, args in zip(OPS, ((x, map, 3), (rows, map, weights), (x, rows, map, weights)), strict=True):
        launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))
        with intercept(lambda kernel, grid, args, constants, options, name=name: launches.setdefault(name, []).append(args)):
            launcher(*args)
    assert [len(launches[name]) for name in OPS] == [4, 1, 1]
    assert launches["permute_tokens"][-1][0] == x.data_ptr()
    assert launches["unpermute_tokens"][0][0].data_ptr() == rows.data_ptr()
    assert [t.data_ptr() for t in launches["unpermute_tokens_grad"][0][:2]] == [x.data_ptr(), rows.data_ptr()]


@interpreted
def test_rows_far_apart_are_addressed_in_64_bits() -> None:
    """Three rows whose last starts 2**32 bytes behind the first; the memory between them is never touched."""
    buffer = torch.empty(2**32 + 8, dtype=torch.int8, device=DEVICE)
    x = buffer.as_strided((3, 3), (2**31, 1), 1)
    x.copy_(torch.arange(9, device=DEVICE).view(3, 3))
    rows, _, map = kernel("permute_tokens")(x, torch.tensor([[1], [0], [2]], device=DEVICE), 3)
    assert rows.tolist() == [[3, 4, 5], [0, 1, 2], [6, 7, 8]]
    far = buffer.view(torch.bfloat16).as_strided((3, 3), (2**30, 1), 1)
    far.copy_(random_values(3, 3))
    assert torch.equal(kernel("unpermute_tokens")(far, map, None), far[map.flatten().long()])
    weights = random_values(3, 1)
    args = (random_values(3, 3, dtype=torch.bfloat16), far, map, weights)
    for actual, expected in zip(
        kernel("unpermute_tokens_grad")(*args),
        reference.unpermute_tokens_grad(args[0], far.contiguous(), map, weights),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, topk, width = 2**17 + 3, 8, 2048
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    x[:] = (torch.arange(tokens, device=DEVICE) % 251)[:, None]
    ids = torch.rand(tokens, 128, device=DEVICE).argsort(1)[:, :topk]
    rows, offsets, map = thdops.permute_tokens(x, ids, 128)
    assert torch.equal(offsets, torch.bincount(ids.flatten(), minlength=128).cumsum(0).int())
    number = map.flatten().long().argsort()
    assert torch.equal(number, ids.flatten().argsort(stable=True))
    assert torch.equal(rows[:, 0], x[number // topk, 0])
    assert torch.equal(rows[:, -1], rows[:, 0])
    assert torch.equal(thdops.unpermute_tokens(rows, map, torch.full((tokens, topk), 1 / topk, device=DEVICE)), x)
