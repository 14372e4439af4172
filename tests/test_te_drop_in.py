"""The drop-in for TransformerEngine's router functions: signatures, results, and what it refuses.

The oracle is written out here in plain PyTorch and knows no op of ours. Its `torch.topk` has no tie rule: logits are distinct.
T rows (tokens), E experts, K top-k, M sequences folded into columns.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import thdops
from thdops.integrations.transformer_engine import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
EXPERTS = 16
SCORE_FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]


def distinct_logits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """From -4 to 4, in each row so far apart that bf16 and fp16 tell them apart, and not so even that sums of groups tie."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(shape, generator=generator).argsort(-1) + 0.4 * torch.rand(shape, generator=generator)
    return (order * (8 / shape[-1]) - 4).to(DEVICE, dtype)


def bias_for(score_function: str) -> Tensor | None:
    if score_function == "softmax":
        return None
    return 0.3 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)


# --- the oracle -------------------------------------------------------------------------------------------------------------------


def scores_of(x: Tensor, score_function: str) -> Tensor:
    return x.sigmoid() if score_function == "sigmoid" else (1 + x.exp()).log().sqrt()


def best(keys: Tensor, topk: int) -> Tensor:
    return torch.zeros_like(keys, dtype=torch.bool).scatter(-1, keys.topk(topk, -1).indices, True)


def in_best_groups(keys: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    grouped = keys.unflatten(-1, (num_groups, -1))
    worth = grouped.topk(topk // group_topk, -1).values.sum(-1)
    return best(worth, group_topk)[..., None].expand_as(grouped).flatten(-2)


def oracle_topk(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x = logits.double()
    keys = x if score_function == "softmax" else scores_of(x, score_function)
    if expert_bias is not None:
        keys = keys + expert_bias
    if group_topk is not None and num_groups is not None:
        keys = keys.masked_fill(~in_best_groups(keys, topk, num_groups, group_topk), -torch.inf)
    chosen = best(keys, topk)
    if score_function == "softmax" and use_pre_softmax:
        probs = x.softmax(-1) * chosen
    elif score_function == "softmax":
        probs = x.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        probs = scores_of(x, score_function) * chosen
        if topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    return probs * (1.0 if scaling_factor is None else scaling_factor), chosen


def oracle_scores(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    x = logits.double()
    if score_function == "softmax":
        scores = x.softmax(-1)
    else:
        scores = scores_of(x, score_function)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return best(x, topk), scores


def packed(mask: Tensor) -> Tensor:
    """A mask as a bitmap, bit by bit."""
    bits = torch.zeros(*mask.shape[:-1], -(-mask.shape[-1] // 8), dtype=torch.uint8, device=mask.device)
    for e in range(mask.shape[-1]):
        bits[..., e // 8] |= mask[..., e].to(torch.uint8) << (e % 8)
    return bits


def grad_of(result: Tensor, logits: Tensor) -> Tensor:
    """The gradient of a sum weighted so that no term cancels."""
    weights = torch.linspace(-1, 2, result.numel(), device=DEVICE, dtype=torch.float64).reshape(result.shape)
    (grad,) = torch.autograd.grad((result.double() * weights).sum(), logits)
    return grad


def check_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 8 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --- signatures -------------------------------------------------------------------------------------------------------------------

NOTHING = inspect.Parameter.empty
SIGNATURES = {
    fused_topk_with_score_function: {
        "logits": NOTHING,
        "topk": NOTHING,
        "use_pre_softmax": NOTHING,
        "num_groups": NOTHING,
        "group_topk": NOTHING,
        "scaling_factor": NOTHING,
        "score_function": NOTHING,
        "expert_bias": NOTHING,
        "routing_map_format": RoutingMapFormat.BYTEMAP,
        "topk_indices": None,
        "qb_histogram": None,
        "qb_bin_bounds": None,
        "qb_histogram_mode": None,
    },
    fused_compute_score_for_moe_aux_loss: {
        "logits": NOTHING,
        "topk": NOTHING,
        "score_function": NOTHING,
        "routing_map_format": RoutingMapFormat.BYTEMAP,
    },
    fused_moe_aux_loss: {
        "probs": NOTHING,
        "tokens_per_expert": NOTHING,
        "total_num_tokens": NOTHING,
        "num_experts": NOTHING,
        "topk": NOTHING,
        "coeff": NOTHING,
    },
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters} == SIGNATURES[function]
    assert [p.name for p in parameters] == list(SIGNATURES[function])
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_the_enum_has_the_numbers_of_the_other() -> None:
    assert {f.name: int(f) for f in RoutingMapFormat} == {"BYTEMAP": 0, "BITMAP_U8": 1}


# --- fused_topk_with_score_function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("use_pre_softmax", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scaling_factor", [None, 2.5, 0.0])
def test_topk(score_function: str, topk: int, use_pre_softmax: bool, grouped: bool, scaling_factor: float | None) -> None:
    logits = distinct_logits(37, EXPERTS).requires_grad_()
    num_groups, group_topk = (4, min(2, topk)) if grouped else (None, None)
    settings = (topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, bias_for(score_function))
    probs, routing_map = fused_topk_with_score_function(logits, *settings)
    expected, expected_map = oracle_topk(logits, *settings)
    assert (probs.dtype, routing_map.dtype) == (torch.float32, torch.bool)
    assert torch.equal(routing_map, expected_map)
    check_close(probs, expected)
    grad = grad_of(probs, logits)
    check_close(grad, grad_of(expected, logits))
    ours, ours_map = thdops.router_topk(
        logits,
        topk,
        score_function=score_function,
        pre_softmax=use_pre_softmax and score_function == "softmax",
        expert_bias=bias_for(score_function),
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
    )
    assert torch.equal(probs, ours)
    assert torch.equal(routing_map, ours_map)
    assert torch.equal(grad, grad_of(ours, logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(EXPERTS,), (5, EXPERTS), (3, 2, EXPERTS), (0, EXPERTS)])
def test_topk_in_the_shape_and_dtype_of_logits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    logits = distinct_logits(*shape, dtype=dtype).requires_grad_()
    probs, routing_map = fused_topk_with_score_function(logits, 3, False, None, None, None, "sigmoid", None)
    expected, expected_map = oracle_topk(logits, 3, False, None, None, None, "sigmoid", None)
    assert (probs.shape, probs.dtype, routing_map.shape) == (shape, dtype, shape)
    assert torch.equal(routing_map, expected_map)
    check_close(probs, expected)
    assert grad_of(probs, logits).dtype == dtype


class OtherEnum:
    """As the other library's enum is: no int, but it gives its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    "routing_map_format", ["bytemap", RoutingMapFormat.BYTEMAP, 0, OtherEnum(0)], ids=["name", "enum", "number", "another enum"]
)
def test_spellings_of_a_bytemap(routing_map_format: Any) -> None:
    logits = distinct_logits(5, 13)
    _, chosen = oracle_topk(logits, 3, False, None, None, None, "softmax", None)
    arguments = (logits, 3, False, None, None, None, "softmax", None, routing_map_format)
    assert torch.equal(fused_topk_with_score_function(*arguments)[1], chosen)
    assert torch.equal(fused_compute_score_for_moe_aux_loss(logits, 3, "softmax", routing_map_format)[0], chosen)


@pytest.mark.parametrize(
    "routing_map_format", ["bitmap_u8", RoutingMapFormat.BITMAP_U8, 1, OtherEnum(1)], ids=["name", "enum", "number", "another enum"]
)
def test_spellings_of_a_bitmap(routing_map_format: Any) -> None:
    logits = distinct_logits(3, 5, 13)
    _, chosen = oracle_topk(logits, 3, False, None, None, None, "softmax", None)
    arguments = (logits, 3, False, None, None, None, "softmax", None, routing_map_format)
    assert torch.equal(fused_topk_with_score_function(*arguments)[1], packed(chosen))
    assert torch.equal(fused_compute_score_for_moe_aux_loss(logits, 3, "softmax", routing_map_format)[0], packed(chosen))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_indices_go_to_the_buffer_that_was_given(dtype: torch.dtype, score_function: str) -> None:
    logits = distinct_logits(3, 7, EXPERTS).requires_grad_()
    settings = (4, False, 4, 2, 1.5, score_function, bias_for(score_function))
    buffer = torch.full((3, 7, 4), -7, dtype=dtype, device=DEVICE)
    probs, indices = fused_topk_with_score_function(logits, *settings, topk_indices=buffer)
    assert indices is buffer
    assert buffer._version == 1
    expected, chosen = oracle_topk(logits, *settings)
    assert torch.equal(torch.zeros_like(chosen).scatter(-1, indices.long(), True), chosen)
    check_close(probs, expected)
    check_close(grad_of(probs, logits), grad_of(expected, logits))


def test_without_group_topk_there_are_no_groups() -> None:
    logits = distinct_logits(9, EXPERTS)
    probs, routing_map = fused_topk_with_score_function(logits, 4, False, 4, None, None, "softmax", None)
    expected, chosen = oracle_topk(logits, 4, False, None, None, None, "softmax", None)
    assert torch.equal(routing_map, chosen)
    check_close(probs, expected)
    assert torch.equal(fused_topk_with_score_function(logits, 4, False, 4, 0, None, "softmax", None)[1], chosen)


# --- fused_compute_score_for_moe_aux_loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("topk", [1, 4])
def test_scores(dtype: torch.dtype, score_function: str, topk: int) -> None:
    logits = distinct_logits(3, 7, EXPERTS, dtype=dtype).requires_grad_()
    routing_map, scores = fused_compute_score_for_moe_aux_loss(logits, topk, score_function)
    expected_map, expected = oracle_scores(logits, topk, score_function)
    assert (routing_map.dtype, scores.dtype) == (torch.bool, torch.float32)
    assert torch.equal(routing_map, expected_map)
    check_close(scores, expected)
    grad = grad_of(scores, logits)
    check_close(grad, grad_of(expected, logits))
    ours_map, ours = thdops.router_scores(logits, topk, score_function)
    assert torch.equal(routing_map, ours_map)
    assert torch.equal(scores, ours)
    assert torch.equal(grad, grad_of(ours, logits))


# --- fused_moe_aux_loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens_dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("folds", [1, 3])
def test_aux_loss(dtype: torch.dtype, tokens_dtype: torch.dtype, folds: int) -> None:
    columns = EXPERTS * folds
    probs = distinct_logits(12, columns).softmax(-1).to(dtype).requires_grad_()
    tokens = torch.randint(1, 9, (columns,), generator=torch.Generator().manual_seed(2)).to(DEVICE, tokens_dtype)
    if tokens_dtype == torch.float32:
        tokens = tokens / 4  # averages over micro-batches are no integers
    loss = fused_moe_aux_loss(probs, tokens, 12, EXPERTS, 4, 0.5)
    expected = EXPERTS * 0.5 / (4 * 12**2) * (probs.double().sum(0) * tokens.double()).sum()
    assert (loss.shape, loss.dtype) == ((), dtype)
    check_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, probs)
    assert grad.dtype == dtype
    check_close(grad, torch.autograd.grad(expected, probs)[0])
    ours = thdops.moe_aux_loss(probs, tokens, 12, num_experts=EXPERTS, topk=4, coeff=0.5)
    assert torch.equal(loss, ours.to(dtype))
    assert torch.equal(grad, torch.autograd.grad(ours, probs)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [0, 5, 8175])
def test_counts_on_the_device_are_those_on_the_host(dtype: torch.dtype, count: int) -> None:
    probs, tokens = distinct_logits(12, EXPERTS).softmax(-1), torch.arange(EXPERTS, device=DEVICE)
    expected = fused_moe_aux_loss(probs, tokens, count, num_experts=EXPERTS, topk=2, coeff=0.1)
    loss = fused_moe_aux_loss(probs, tokens, torch.tensor(count, dtype=dtype, device=DEVICE), EXPERTS, 2, 0.1)
    assert torch.equal(loss, expected)
    assert (loss == 0) == (count == 0)


# --- compiled ---------------------------------------------------------------------------------------------------------------------


def test_compiled_as_one_graph() -> None:
    def step(logits: Tensor, tokens: Tensor, count: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        probs, indices = fused_topk_with_score_function(logits, 4, False, 4, 2, 1.5, "sigmoid", None, topk_indices=buffer)
        _, bitmap = fused_topk_with_score_function(logits, 4, True, None, None, None, "softmax", None, "bitmap_u8")
        routing_map, scores = fused_compute_score_for_moe_aux_loss(logits, 4, "sigmoid", RoutingMapFormat.BITMAP_U8)
        return probs, indices, bitmap, routing_map, fused_moe_aux_loss(scores, tokens, count, EXPERTS, 4, 0.1)

    logits, tokens = distinct_logits(9, EXPERTS), torch.arange(EXPERTS, device=DEVICE)
    count = torch.tensor(9, device=DEVICE)
    results = []
    torch._dynamo.reset()
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaf, buffer = logits.clone().requires_grad_(), torch.zeros(9, 4, dtype=torch.int32, device=DEVICE)
        probs, *others, loss = run(leaf, tokens, count, buffer)
        results.append((probs, *others, loss, buffer, grad_of(torch.cat([probs.flatten(), loss[None]]), leaf)))
    torch._dynamo.reset()
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# --- errors -----------------------------------------------------------------------------------------------------------------------

FORMATS = "routing_map_format must be 'bytemap' or 'bitmap_u8', or a RoutingMapFormat or its number, got"


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"qb_histogram": torch.zeros(8, 4)}, ValueError, "qb_histogram must be None, got a Tensor; quantile balancing is not"),
        ({"qb_bin_bounds": torch.zeros(2)}, ValueError, "qb_bin_bounds must be None, got a Tensor; quantile balancing is not"),
        ({"qb_histogram_mode": "two_kernel"}, ValueError, "qb_histogram_mode must be None, got a str; quantile balancing is not"),
        ({"routing_map_format": "BYTEMAP"}, ValueError, f"{FORMATS} 'BYTEMAP'; choose one"),
        ({"routing_map_format": 2}, ValueError, f"{FORMATS} 2; choose one"),
        ({"routing_map_format": None}, TypeError, f"{FORMATS} None; choose one"),
        (
            {"topk_indices": torch.zeros(6, 2, dtype=torch.int32), "routing_map_format": "bitmap_u8"},
            ValueError,
            "topk_indices must be None with a bitmap, got a buffer; ask for a bytemap: indices come in its place",
        ),
        ({"topk_indices": [0, 1]}, TypeError, "topk_indices must be a tensor, got a list;"),
        (
            {"topk_indices": torch.zeros(6, 2, dtype=torch.uint8)},
            TypeError,
            "topk_indices must be int16 or int32 or int64, got uint8; cast it",
        ),
        (
            {"topk_indices": torch.zeros(6, 3, dtype=torch.int32)},
            ValueError,
            r"topk_indices must have the shape of logits with K in place of E, \[6, 2\], got shape \[6, 3\]; allocate it so",
        ),
        (
            {"topk_indices": torch.zeros(6, 2, dtype=torch.int32, device="meta")},
            ValueError,
            "topk_indices must be on the device of logits",
        ),
    ],
)
def test_errors_of_topk(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "logits": distinct_logits(6, 8),
        "topk": 2,
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "score_function": "softmax",
        "expert_bias": None,
    } | changed
    arguments = {k: v.to(DEVICE) if isinstance(v, Tensor) and not v.is_meta else v for k, v in arguments.items()}
    with pytest.raises(error, match=f"^fused_topk_with_score_function: {text}"):
        fused_topk_with_score_function(**arguments)


def test_errors_of_scores() -> None:
    with pytest.raises(ValueError, match=f"^fused_compute_score_for_moe_aux_loss: {FORMATS} 'dense'; choose one"):
        fused_compute_score_for_moe_aux_loss(distinct_logits(6, 8), 2, "softmax", "dense")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ((2, False, None, None, None, "softmax", torch.zeros(8)), "router_topk: expert_bias must "),
        ((2, False, None, None, None, "tanh", None), "router_topk: score_function must be one of "),
        ((9, False, None, None, None, "softmax", None), "router_topk: topk must be "),
        ((2, False, 3, 2, None, "softmax", None), "router_topk: num_groups must "),
        ((2, False, None, 2, None, "softmax", None), "router_topk: "),
    ],
)
def test_the_ops_own_errors(settings: tuple[Any, ...], text: str) -> None:
    settings = tuple(s.to(DEVICE) if isinstance(s, Tensor) else s for s in settings)
    with pytest.raises(ValueError, match=f"^{text}"):
        fused_topk_with_score_function(distinct_logits(6, 8), *settings)
