"""What is special to router_topk and router_scores: the order of experts, weights and scores against an oracle, formats, padding.

T rows (tokens), E experts, K top-k, G groups of E/G experts. Conformance covers what every op shares; losses and sums of `router`
are in test_router_losses.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given, settings
from hypothesis import strategies as st
from router_oracle import (
    SCORE_FUNCTIONS,
    Settings,
    all_scores,
    clear_rows,
    counted_logits,
    falling_bias,
    mask_of,
    random_logits,
    random_mask,
    ranked,
    routed,
    spread_logits,
    tolerance,
    unpacked,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops.namespace import REGISTRY

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN, INF = float("nan"), float("inf")
INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def topk_in_order(logits: Tensor, bias: Tensor | None, settings: Settings, **options: Any) -> tuple[Tensor, Tensor]:
    """(weights [T, K], indices [T, K])."""
    return thdops.router_topk(logits, expert_bias=bias, **{"probs": "topk", "routing": "indices", **settings._asdict(), **options})


def gradient(probs: Tensor, logits: Tensor, grad: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(probs, logits, grad.to(probs), retain_graph=True)
    return found


# --- the grids of the fused router's tests ----------------------------------------------------------------------------------------

# (T, E, K): at full size on a GPU, where the oracle is the reference; few rows of each against the oracle in Python.
_EXPERTS, _TOPK = (1024, 128, 32), (4, 8, 16, 32)
_SIZES = [(experts, topk) for experts in _EXPERTS for topk in _TOPK if topk < experts]


def grid(experts: int, topk: int, *score_functions: str) -> Iterator[tuple[Settings, bool, torch.dtype]]:
    """(settings, with a bias, dtype of indices): groups, scaling, bias or pre-softmax; index dtypes take turns."""
    dtypes = itertools.cycle(INDEX_DTYPES)
    for score_function, groups, scale, flag in itertools.product(score_functions, (None, 4), (None, 1.2), (False, True)):
        if groups is not None and topk // groups >= experts // 8:
            continue
        softmax = score_function == "softmax"
        num_groups = None if groups is None else 8
        chosen = Settings(topk, score_function, softmax and flag, True, num_groups, groups, scale)
        yield chosen, flag and not softmax, next(dtypes)


@pytest.mark.parametrize(("experts", "topk"), _SIZES)
def test_weights_and_choices_equal_the_oracle(experts: int, topk: int) -> None:
    rows = 12
    for chosen, biased, dtype in grid(experts, topk, *SCORE_FUNCTIONS):
        make = counted_logits if chosen.score_function == "softmax" else spread_logits
        logits, bias = make(rows, experts, DEVICE), falling_bias(experts, DEVICE) if biased else None
        probs, indices = topk_in_order(logits, bias, chosen, index_dtype=dtype)
        expected_probs, expected = routed(logits, bias, chosen)
        clear = clear_rows(logits, bias, chosen).cpu()
        assert clear.float().mean() > 0.9  # else the rule below excuses everything
        assert indices.dtype == dtype
        assert torch.equal(indices.cpu().long()[clear], expected[clear])
        torch.testing.assert_close(probs.cpu().double()[clear], expected_probs[clear], **tolerance(experts))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2048, 7168, 8992, 14234])
@pytest.mark.parametrize(("experts", "topk"), _SIZES)
def test_kernels_equal_the_reference_at_full_size(experts: int, topk: int, rows: int) -> None:
    reference = REGISTRY["router_topk"].reference
    for chosen, biased, dtype in grid(experts, topk, *SCORE_FUNCTIONS):
        make = counted_logits if chosen.score_function == "softmax" else spread_logits
        logits, bias = make(rows, experts, DEVICE).requires_grad_(), falling_bias(experts, DEVICE) if biased else None
        call = (logits, bias, None, *chosen, "dense", "indices", dtype, "nowhere", -1)
        probs, indices, _ = REGISTRY.op("router_topk")(*call)
        expected_probs, expected, _ = reference(*call)
        clear = clear_rows(logits.detach(), bias, chosen)
        assert torch.equal(indices[clear], expected[clear])
        torch.testing.assert_close(probs[clear], expected_probs[clear], **tolerance(experts))
        for grad in (torch.ones_like(probs), random_logits(rows, experts, DEVICE)):
            actual, wanted = gradient(probs, logits, grad), gradient(expected_probs, logits, grad)
            torch.testing.assert_close(actual[clear], wanted[clear], **tolerance(experts))
        ordered = indices.long().sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all()


@pytest.mark.parametrize("experts", [1024, 256, 128, 32])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_scores_equal_the_oracle(experts: int, score_function: str) -> None:
    """TransformerEngine PR#2720: scores are normalised over all experts, for K = 1 too."""
    logits = random_logits(9, experts, DEVICE).requires_grad_()
    expected = all_scores(logits.detach(), score_function)
    grad = random_logits(9, experts, DEVICE, seed=3)
    fp64 = logits.detach().double().requires_grad_()
    truth = REGISTRY["router_scores"].reference(fp64, None, 1, score_function)[0]
    for topk in (1, 4, 8, 16, 32):
        routing, scores = thdops.router_scores(logits, topk, score_function)
        torch.testing.assert_close(scores.detach().cpu().double(), expected, **tolerance(experts))
        torch.testing.assert_close(scores.sum(1), torch.ones(9, device=DEVICE))
        assert torch.equal(routing, mask_of(logits.detach().argsort(1, descending=True)[:, :topk], experts))
        torch.testing.assert_close(gradient(scores, logits, grad).double(), gradient(truth, fp64, grad), **tolerance(experts))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2048, 7168])
@pytest.mark.parametrize("experts", [1024, 256, 128, 32])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_score_kernels_equal_the_reference_at_full_size(score_function: str, experts: int, rows: int) -> None:
    logits = spread_logits(rows, experts, DEVICE).requires_grad_()
    grad = random_logits(rows, experts, DEVICE)
    for topk in (1, 4, 8, 16, 32):
        scores, routing = REGISTRY.op("router_scores")(logits, None, topk, score_function, "mask")
        expected, expected_routing = REGISTRY["router_scores"].reference(logits, None, topk, score_function, "mask")
        torch.testing.assert_close(scores, expected, **tolerance(experts))
        clear = clear_rows(logits.detach(), None, Settings(topk, score_function))
        assert torch.equal(routing[clear], expected_routing[clear])
        torch.testing.assert_close(gradient(scores, logits, grad), gradient(expected, logits, grad), **tolerance(experts))


# --- formats ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "experts", "topk"), [(128, 32, 4), (256, 128, 8), (256, 130, 8), (128, 1024, 16)])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_formats_hold_the_same_bits(score_function: str, rows: int, experts: int, topk: int) -> None:
    logits = random_logits(rows, experts, DEVICE).requires_grad_()
    mask = random_mask(rows, DEVICE)
    options: dict[str, Any] = {"score_function": score_function, "padding_mask": mask}
    probs, routing = thdops.router_topk(logits, topk, **options)
    grad = random_logits(rows, experts, DEVICE, seed=5)
    logits_grad = gradient(probs, logits, grad)

    again, bitmap = thdops.router_topk(logits, topk, routing="bitmap", **options)
    assert (bitmap.dtype, bitmap.shape) == (torch.uint8, (rows, -(-experts // 8)))
    assert torch.equal(unpacked(bitmap, experts), routing)
    assert torch.equal(again, probs)
    assert torch.equal(gradient(again, logits, grad), logits_grad)

    for dtype, pad_index in itertools.product(INDEX_DTYPES, (-1, experts)):
        in_order: dict[str, Any] = {"routing": "indices", "index_dtype": dtype, "pad_index": pad_index, **options}
        dense, indices = thdops.router_topk(logits, topk, **in_order)
        ordered, same = thdops.router_topk(logits, topk, probs="topk", **in_order)
        torch.testing.assert_close(dense, probs, rtol=1e-6, atol=0.0)
        assert torch.equal(indices, same)
        assert indices.dtype == dtype
        assert (indices[mask] == pad_index).all()
        assert not ordered[mask].any()
        chosen = indices[~mask].long()
        assert torch.equal(mask_of(chosen, experts), routing[~mask])
        torch.testing.assert_close(ordered[~mask], probs[~mask].gather(1, chosen), rtol=1e-6, atol=0.0)
        assert (ordered[~mask].diff(dim=1) <= 0).all()  # without a bias the best key is the largest weight
        picked = torch.zeros_like(grad[:, :topk])
        picked[~mask] = grad[~mask].gather(1, chosen)
        torch.testing.assert_close(gradient(ordered, logits, picked), logits_grad, rtol=1e-6, atol=1e-7)

    scored, scores = thdops.router_scores(logits, topk, score_function, mask)
    scored_bitmap, same_scores = thdops.router_scores(logits, topk, score_function, mask, routing="bitmap")
    assert torch.equal(unpacked(scored_bitmap, experts), scored)
    assert torch.equal(same_scores, scores)
    assert torch.equal(scored, routing)  # without bias and groups both choose alike


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 12), (2, 0, 12), (1, 2, 3, 12)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, device=DEVICE).requires_grad_()
    rows = logits.reshape(-1, 12) if logits.numel() else logits.new_zeros(0, 12)
    mask = torch.rand(shape[:-1], device=DEVICE) < 0.3
    for routing, columns in (("mask", 12), ("indices", 3), ("bitmap", 2)):
        probs, found = thdops.router_topk(logits, 3, padding_mask=mask, routing=routing)
        flat_probs, flat = thdops.router_topk(rows, 3, padding_mask=mask.reshape(-1), routing=routing)
        assert (probs.shape, found.shape) == (shape, (*shape[:-1], columns))
        assert torch.equal(probs.reshape(-1, 12), flat_probs)
        assert torch.equal(found.reshape(-1, columns), flat)
    best, scores = thdops.router_scores(logits, 3, "sigmoid", mask)
    assert best.shape == scores.shape == shape
    output = thdops.router(logits, 3, padding_mask=mask, routing="indices", probs="topk")
    assert output.probs.shape == output.routing.shape == (*shape[:-1], 3)
    assert output.probs.is_contiguous()
    grad = gradient(output.probs.sum() + scores.square().sum(), logits, torch.ones(()))
    assert grad.shape == shape


def test_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, *(() if CUDA else (torch.float64,))):
        logits = random_logits(6, 8, DEVICE, dtype=dtype).requires_grad_()
        probs, _ = thdops.router_topk(logits, 2)
        _, scores = thdops.router_scores(logits, 2, "softmax")
        assert probs.dtype == gradient(probs, logits, torch.ones_like(probs)).dtype == dtype
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# --- the order of experts ---------------------------------------------------------------------------------------------------------


def test_a_row_of_nan_stays_alone() -> None:
    """vLLM#37758, tokenspeed PR#1461: all logits of a row are NaN; E = 896, K = 16."""
    clean = random_logits(7, 896, DEVICE)
    logits = clean.clone()
    logits[3] = NAN
    others = torch.arange(7, device=DEVICE) != 3
    for score_function in SCORE_FUNCTIONS:
        settings = Settings(16, score_function)
        probs, indices = topk_in_order(logits, None, settings)
        clean_probs, clean_indices = topk_in_order(clean, None, settings)
        assert torch.equal(indices[3], torch.arange(16, device=DEVICE))
        assert probs[3].isnan().all()
        assert torch.equal(indices[others], clean_indices[others])
        assert torch.equal(probs[others], clean_probs[others])
        routing = thdops.router_topk(logits, 16, score_function=score_function)[1]
        assert (routing.sum(1) == 16).all()


@pytest.mark.parametrize("experts", [12, 44, 132])
@pytest.mark.parametrize("content", [-INF, NAN, 0.0])
def test_lanes_past_the_last_expert_never_win(content: float, experts: int) -> None:
    """vLLM PR#32058: E, or a group of 3 or 11 experts, is no power of two, and padding lanes tie with the worst of logits."""
    logits = torch.full((3, experts), content, device=DEVICE)
    logits[1, -2:] = 1.0
    size = experts // 4
    in_first_groups = [*range(min(size, 4)), size][:4]
    for score_function in SCORE_FUNCTIONS:
        _, indices = topk_in_order(logits, None, Settings(4, score_function))
        assert indices.tolist() == [[0, 1, 2, 3], [experts - 2, experts - 1, 0, 1], [0, 1, 2, 3]]
        _, indices = topk_in_order(logits, None, Settings(4, score_function, num_groups=4, group_topk=2))
        assert indices.tolist() == [in_first_groups, [experts - 2, experts - 1, 0, 1], in_first_groups]


def test_groups_of_one_expert() -> None:
    """vLLM PR#29439: 8 experts in 8 groups."""
    logits = random_logits(6, 8, DEVICE)
    for topk in (1, 2, 8):
        alone = topk_in_order(logits, None, Settings(topk, "sigmoid"))
        grouped = topk_in_order(logits, None, Settings(topk, "sigmoid", num_groups=8, group_topk=topk))
        assert torch.equal(grouped[1], alone[1])
        assert torch.equal(grouped[0], alone[0])


@pytest.mark.parametrize(("experts", "topk"), [(2304, 36), (2049, 7), (4096, 64)])
def test_more_experts_than_a_block_of_threads(experts: int, topk: int) -> None:
    """TransformerEngine PR#2821, #2582: E = 2304, K = 36 was an invalid argument."""
    logits = random_logits(3, experts, DEVICE)
    for chosen in (Settings(topk), Settings(topk, "sigmoid"), Settings(topk, pre_softmax=True)):
        probs, indices = topk_in_order(logits, None, chosen)
        expected_probs, expected = routed(logits, None, chosen)
        clear = clear_rows(logits, None, chosen).cpu()
        assert torch.equal(indices.cpu()[clear], expected[clear])
        torch.testing.assert_close(probs.cpu().double(), expected_probs, **tolerance(experts))


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("groups", [None, 2])
def test_ties_of_bf16_logits(score_function: str, groups: int | None) -> None:
    """vLLM PR#55514: value descending, index ascending, the same on CPU and GPU."""
    logits = (random_logits(40, 48, DEVICE) * 2).round().div(2).bfloat16()
    logits[logits == 0] = -0.0
    logits[:, ::5] = 0.0
    logits[::7] = 1.0
    settings = Settings(6, score_function, num_groups=None if groups is None else 6, group_topk=groups)
    _, indices = topk_in_order(logits, None, settings)
    assert torch.equal(indices.cpu(), routed(logits, None, settings)[1])
    _, on_cpu = topk_in_order(logits.cpu(), None, settings)
    assert torch.equal(indices.cpu(), on_cpu)


_NUMBERS = st.one_of(
    st.sampled_from([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 30.0, 1e-40, -3e38]),
    st.floats(-4, 4, width=16),
)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, Settings, Tensor]:
    groups = draw(st.integers(1, 6))
    size = draw(st.integers(1, 5))
    experts, rows = groups * size, draw(st.integers(0, 4))
    group_topk = draw(st.integers(1, groups))
    topk = group_topk * draw(st.integers(1, size))
    score_function = draw(st.sampled_from(SCORE_FUNCTIONS))
    grouped = draw(st.booleans())

    def numbers(count: int) -> Tensor:
        return torch.tensor(draw(st.lists(_NUMBERS, min_size=count, max_size=count)), device=DEVICE)

    bias = numbers(experts) if score_function != "softmax" and draw(st.booleans()) else None
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool, device=DEVICE)
    limits = (groups, group_topk) if grouped else (None, None)
    chosen = Settings(topk, score_function, score_function == "softmax" and draw(st.booleans()), True, *limits)
    return numbers(rows * experts).view(rows, experts), bias, chosen, mask


@settings(max_examples=150, deadline=None)
@given(_problems())
def test_every_valid_row_chooses_different_experts(problem: tuple[Tensor, Tensor | None, Settings, Tensor]) -> None:
    logits, bias, chosen, mask = problem
    experts = logits.shape[1]
    probs, indices = topk_in_order(logits, bias, chosen, padding_mask=mask)
    assert (indices[mask] == -1).all()
    assert not probs[mask].any()
    valid = indices[~mask]
    assert ((valid >= 0) & (valid < experts)).all()
    assert all(len(set(row)) == chosen.topk for row in valid.tolist())
    dense, routing = thdops.router_topk(logits, expert_bias=bias, padding_mask=mask, **chosen._asdict())
    assert torch.equal(routing[~mask], mask_of(valid, experts))
    assert torch.equal(routing.sum(1), torch.where(mask, 0, chosen.topk))
    assert not dense[~routing].any()
    if chosen.num_groups is not None and chosen.group_topk is not None:
        size = experts // chosen.num_groups
        assert all(len({e // size for e in row}) <= chosen.group_topk for row in valid.tolist())
    elif chosen.score_function == "softmax":
        order = [ranked(row)[: chosen.topk] for row in logits[~mask].tolist()]
        assert valid.tolist() == order
    best, _ = thdops.router_scores(logits, chosen.topk, chosen.score_function, mask)
    assert torch.equal(best.sum(1), torch.where(mask, 0, chosen.topk))


# --- bias, normalisation, scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_selects_and_nothing_else(dtype: torch.dtype) -> None:
    """A bias a million times a score leaves no bit of it in the weights, and gets no gradient."""
    logits = random_logits(6, 8, DEVICE).requires_grad_()
    bias = torch.zeros(8, dtype=dtype, device=DEVICE)
    bias[[2, 5]] = 4096.0
    bias.requires_grad_()
    probs, routing = thdops.router_topk(logits, 2, score_function="sigmoid", expert_bias=bias)
    assert torch.equal(routing, torch.tensor([False, False, True, False, False, True, False, False], device=DEVICE).expand(6, 8))
    scores = logits.detach()[:, [2, 5]].sigmoid()
    torch.testing.assert_close(probs.detach()[:, [2, 5]], scores / scores.sum(1, keepdim=True))
    probs.square().sum().backward()
    assert bias.grad is None
    assert logits.grad is not None


def test_one_chosen_score_is_not_divided() -> None:
    logits = random_logits(6, 8, DEVICE)
    for score_function in ("sigmoid", "sqrtsoftplus"):
        for topk, normalize in ((1, True), (1, False), (3, False)):
            probs, indices = topk_in_order(logits, None, Settings(topk, score_function, False, normalize))
            picked = logits.gather(1, indices)
            scores = picked.sigmoid() if score_function == "sigmoid" else torch.nn.functional.softplus(picked).sqrt()
            torch.testing.assert_close(probs, scores)


@pytest.mark.parametrize("scale", [0.0, -2.0, 2.5])
def test_scaling(scale: float) -> None:
    """0 is a factor like any other: it does not stand for none."""
    logits = random_logits(6, 8, DEVICE).requires_grad_()
    for chosen in (Settings(3), Settings(3, pre_softmax=True), Settings(3, "sigmoid"), Settings(3, "sqrtsoftplus")):
        probs, _ = topk_in_order(logits, None, chosen)
        scaled, _ = topk_in_order(logits, None, chosen._replace(scaling_factor=scale))
        torch.testing.assert_close(scaled, scale * probs)
        grad = random_logits(6, 3, DEVICE, seed=8)
        torch.testing.assert_close(gradient(scaled, logits, grad), scale * gradient(probs, logits, grad))


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_extreme_logits_give_finite_weights_and_gradients(score_function: str) -> None:
    logits = torch.tensor([[-1e4, -100.0, -90.0, -20.0], [1e4, 100.0, 25.0, 15.0], [-INF, -INF, 0.0, 1.0]], device=DEVICE)
    logits.requires_grad_()
    for topk in (2, 4):
        probs, _ = thdops.router_topk(logits, topk, score_function=score_function)
        assert probs.isfinite().all()
        assert gradient(probs, logits, torch.ones_like(probs)).isfinite().all()
        _, scores = thdops.router_scores(logits, topk, score_function)
        assert gradient(scores, logits, random_logits(3, 4, DEVICE)).isfinite().all()


# --- padding ----------------------------------------------------------------------------------------------------------------------


def test_padding_that_is_kept_is_routed_like_any_row() -> None:
    logits, mask = random_logits(9, 12, DEVICE).requires_grad_(), random_mask(9, DEVICE)
    kept = topk_in_order(logits, None, Settings(3), padding_mask=mask, pad_routing="keep")
    plain = topk_in_order(logits, None, Settings(3))
    for a, b in zip(kept, plain, strict=True):
        assert torch.equal(a, b)
    grad = random_logits(9, 3, DEVICE, seed=4)
    assert torch.equal(gradient(kept[0], logits, grad), gradient(plain[0], logits, grad))


def test_gradients_of_weights_that_were_not_chosen_are_not_read() -> None:
    logits = random_logits(9, 12, DEVICE).requires_grad_()
    for pre_softmax in (False, True):
        probs, routing = thdops.router_topk(logits, 3, pre_softmax=pre_softmax)
        grad = random_logits(9, 12, DEVICE, seed=4)
        expected = gradient(probs, logits, grad)
        assert torch.equal(gradient(probs, logits, torch.where(routing, grad, NAN)), expected)


# --- errors of the public functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"logits": [[1.0]]}, TypeError, "logits must be a tensor, got a list;"),
        ({"logits": torch.zeros(())}, ValueError, r"logits must have 2 dimensions \[T, E\], got shape \[\];"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"logits must have at least one column, got shape \[2, 0\];"),
        ({"topk": torch.tensor(2)}, TypeError, "topk must be a Python number, got a tensor;"),
        ({"topk": 2.0}, TypeError, "topk must be an int, got a float; pass int(...)"),
        ({"topk": None}, TypeError, "topk must be an int, got None;"),
        ({"topk": True}, TypeError, "topk must be a Python number, got a bool;"),
        ({"num_groups": "4", "group_topk": 2}, TypeError, "num_groups must be a Python number, got a str;"),
        ({"normalize": torch.tensor(True)}, TypeError, "normalize must be a bool, got a Tensor;"),
        ({"pre_softmax": None}, TypeError, "pre_softmax must be a bool, got None;"),
        ({"probs": None}, TypeError, "probs must be a string, got None;"),
        ({"score_function": 1}, TypeError, "score_function must be a string, got an int;"),
        ({"index_dtype": "int32"}, TypeError, "index_dtype must be a torch.dtype, got a str;"),
        ({"scaling_factor": "2"}, TypeError, "scaling_factor must be a Python number, got a str;"),
        ({"topk": 9}, ValueError, r"topk must be from 1 to the number of experts \(8\), got 9;"),
        ({"scaling_factor": torch.tensor(2.0)}, TypeError, "scaling_factor must be a Python number, got a tensor;"),
        ({"pad_index": torch.tensor(-1)}, TypeError, "pad_index must be a Python number, got a tensor;"),
        (
            {"logits": torch.zeros(2, 3, 8), "padding_mask": torch.zeros(6, dtype=torch.bool)},
            ValueError,
            r"padding_mask must have the shape of logits without E, \[2, 3\], got shape \[6\];",
        ),
        ({"expert_bias": torch.zeros(8)}, ValueError, "expert_bias must be None with score_function 'softmax', got a tensor;"),
        ({"normalize": False}, ValueError, "normalize must be True for a softmax over the chosen logits, got False;"),
        ({"probs": "topk", "routing": "bitmap"}, ValueError, "routing must have an order with probs='topk', got 'bitmap';"),
        ({"probs": "sparse"}, ValueError, "probs must be one of dense, topk, got 'sparse';"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(4, 8), "topk": 2} | changed
    arguments = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=f"^router_topk: {text}"):
        thdops.router_topk(**arguments)
    with pytest.raises(error, match=f"^router: {text}"):
        thdops.router(**arguments)


# --- compiled ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_for_all_masks_and_biases_and_for_all_row_counts(dynamic: bool) -> None:
    def step(logits: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        probs, routing = thdops.router_topk(
            logits, 2, score_function="sigmoid", expert_bias=bias, num_groups=4, group_topk=2, padding_mask=mask
        )
        return probs, routing, *thdops.router_scores(logits, 2, "softmax", mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    for seed, rows in enumerate((16, 17, 40, 2) if dynamic else (16, 16, 16)):
        logits, bias = random_logits(rows, 8, DEVICE, seed).requires_grad_(), random_logits(1, 8, DEVICE, seed)[0]
        mask = random_mask(rows, DEVICE, seed)
        results, expected = compiled(logits, bias, mask), step(logits, bias, mask)
        for actual, right in zip(results, expected, strict=True):
            assert torch.equal(actual, right)
        grads = [random_logits(rows, 8, DEVICE, seed) for seed in (8, 9)]
        ways = [torch.autograd.grad([found[0], found[3]], logits, grads)[0] for found in (results, expected)]
        torch.testing.assert_close(*ways)
    assert counter.frame_count == 1


# --- large tensors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, experts = 2**20 + 3, 2048
    logits = torch.zeros(rows, experts, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, -2:] = torch.tensor([1.0, 2.0], device=DEVICE)
    logits.requires_grad_()
    probs, indices = topk_in_order(logits, None, Settings(2), index_dtype=torch.int16)
    assert indices[-1].tolist() == [experts - 1, experts - 2]
    assert (indices[:-1] == torch.tensor([0, 1], device=DEVICE)).all()
    grad = torch.zeros_like(probs)
    grad[-1, 0] = 1.0
    found = gradient(probs, logits, grad)
    assert not found[:-1].any()
    assert found[-1].count_nonzero() == 2
