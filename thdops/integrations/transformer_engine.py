"""The router functions of TransformerEngine 2.18's `transformer_engine.pytorch.router`, served by thdops' ops.

Same names, keywords, order of arguments and of results, so that an import is all that changes; TransformerEngine itself is not
imported. What is served beyond it: any strides, no rows, CPU tensors, counts on the device as int32 and fp32, compiled functions.
What is not: quantile balancing. The functions are those of `thdops.router_topk`, `router_scores` and `moe_aux_loss`: their
docstrings give order, ties, NaN and errors.

T rows (tokens), E experts, K top-k, M sequences folded into columns. `...` are leading dimensions, T of them in all.
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import check_device, check_dtype, check_tensors, refusal, shape_of
from thdops.ops.aux_loss.op import moe_aux_loss
from thdops.ops.router.op import router_scores, router_topk

__all__ = [
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

_INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)


class RoutingMapFormat(IntEnum):
    """How a routing map is laid out; the enum of TransformerEngine is taken in its place, and so are numbers and names."""

    BYTEMAP = 0
    """bool `[..., E]`."""
    BITMAP_U8 = 1
    """uint8 `[..., ceil(E/8)]`, expert e is bit e % 8 of byte e // 8."""


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`thdops.router_topk` with dense probs, called as TransformerEngine's function.

    Args:
        logits: `[..., E]` fp32, bf16 or fp16.
        topk: K.
        use_pre_softmax: softmax over all experts; without effect on other score functions.
        num_groups, group_topk: without `group_topk` there are no groups.
        scaling_factor: None is 1; 0.0 is 0.0.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". The latter two are normalised over the chosen unless K is 1.
        expert_bias: `[E]`, not with "softmax"; counts in the choice alone.
        routing_map_format: "bytemap" or "bitmap_u8", or a `RoutingMapFormat`, or its number.
        topk_indices: a buffer for the indices, `[..., K]` int16, int32 or int64, on the device of logits. It is written in place
            and returned instead of a map (not with a bitmap). Best expert first.
        qb_histogram, qb_bin_bounds, qb_histogram_mode: None.

    Returns:
        (probs `[..., E]` in the dtype of logits, routing map or `topk_indices`).
    """
    op = "fused_topk_with_score_function"
    balancing = {"qb_histogram": qb_histogram, "qb_bin_bounds": qb_bin_bounds, "qb_histogram_mode": qb_histogram_mode}
    for argument, value in balancing.items():
        if value is not None:
            raise refusal(op, argument, "be None", f"a {type(value).__name__}", "quantile balancing is not served")
    routing = _routing(op, routing_map_format)
    settings: dict[str, Any] = {
        "score_function": score_function,
        "pre_softmax": use_pre_softmax and score_function == "softmax",
        "expert_bias": expert_bias,
        "scaling_factor": scaling_factor,
    }
    if group_topk is not None and group_topk > 0:
        settings |= {"num_groups": num_groups, "group_topk": group_topk}
    if topk_indices is None:
        return router_topk(logits, topk, routing=routing, **settings)
    if routing == "bitmap":
        raise refusal(op, "topk_indices", "be None with a bitmap", "a buffer", "ask for a bytemap: indices come in its place")
    check_tensors(op, topk_indices=topk_indices)
    check_dtype(op, "topk_indices", topk_indices, _INDEX_DTYPES)
    probs, indices = router_topk(logits, topk, routing="indices", index_dtype=topk_indices.dtype, **settings)
    check_device(op, "topk_indices", topk_indices, indices.device, "logits")
    if topk_indices.shape != indices.shape:
        rule = f"have the shape of logits with K in place of E, {shape_of(indices)}"
        raise refusal(op, "topk_indices", rule, f"shape {shape_of(topk_indices)}", "allocate it so")
    return probs, topk_indices.copy_(indices)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
) -> tuple[Tensor, Tensor]:
    """`thdops.router_scores`: (routing map, scores fp32 `[..., E]`). Arguments as `fused_topk_with_score_function`."""
    routing = _routing("fused_compute_score_for_moe_aux_loss", routing_map_format)
    return router_scores(logits, topk, score_function, routing=routing)


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """`thdops.moe_aux_loss`, rounded to the dtype of probs.

    Args:
        probs: `[T, M*E]`, the scores.
        tokens_per_expert: `[M*E]`, integers, or floats where they are averages.
        total_num_tokens: an int, or a one-element int32, int64 or fp32 tensor, which a captured graph follows.
        num_experts: E.
        topk: K.
        coeff: a float.

    Returns:
        The loss, 0-d, in the dtype of probs.
    """
    loss = moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts=num_experts, topk=topk, coeff=coeff)
    return loss.to(probs.dtype)


def _routing(op: str, routing_map_format: Any) -> str:
    """The name that the router ops have for a format."""
    known = {"bytemap": "mask", "bitmap_u8": "bitmap", 0: "mask", 1: "bitmap"}
    try:
        key = routing_map_format if isinstance(routing_map_format, (str, int)) else operator.index(routing_map_format)
    except TypeError:
        key = None
    if key not in known:
        rule = "be 'bytemap' or 'bitmap_u8', or a RoutingMapFormat or its number"
        error = TypeError if key is None else ValueError
        raise refusal(op, "routing_map_format", rule, repr(routing_map_format), "choose one", error)
    return known[key]
