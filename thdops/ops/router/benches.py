"""Cost and benches of the router ops: what a call must move at least, and what people write in PyTorch without it.

T rows (tokens), E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype
from meta_kernels.router import EPS, RouterCall, RouterGradCall, TopkCall
from thdops.ops.padding.samples import size_of
from thdops.ops.router.samples import choice
from thdops.registry import Bench, Cost

_SHAPES = tuple((rows, *shape) for rows in (8192, 65536) for shape in ((64, 6), (128, 8), (256, 8), (512, 10)))
_LONG = tuple(shape for shape in _SHAPES if shape[0] == 65536)
_WIDE = (8192, 2304, 36)


# --- cost -------------------------------------------------------------------------------------------------------------------------


def _routed(call: TopkCall | RouterCall) -> float:
    """Bytes of probs, routing and chosen."""
    rows, experts = call.logits.shape
    probs = (experts if call.probs_format == "dense" else call.topk) * call.logits.element_size()
    routing = {"mask": experts, "indices": call.topk * call.index_dtype.itemsize, "bitmap": -(-experts // 8)}
    return rows * (probs + routing[call.routing_format] + 4 * call.topk)


def _picked(logits: Tensor, chosen: Tensor, pre_softmax: bool) -> float:
    """Bytes of logits that the gradient of the weights needs: those of the chosen experts, or all."""
    return size_of(logits) if pre_softmax else chosen.numel() * logits.element_size()


def router_topk_cost(*args: Any) -> Cost:
    call = TopkCall(*args)
    read = size_of(call.logits, call.expert_bias, call.padding_mask)
    return Cost(read, _routed(call), 10.0 * call.logits.numel())


def router_topk_grad_cost(*args: Any) -> Cost:
    _, logits, chosen, _, pre_softmax, *_ = args
    gradients = chosen.numel() * logits.element_size()
    return Cost(size_of(chosen) + gradients + _picked(logits, chosen, pre_softmax), size_of(logits), 10.0 * chosen.numel())


def router_scores_cost(*args: Any) -> Cost:
    logits, padding_mask, _, _, routing_format = args
    rows, experts = logits.shape
    routing = rows * (experts if routing_format == "mask" else -(-experts // 8))
    scores = logits.numel() * accumulation_dtype(logits.dtype).itemsize
    return Cost(size_of(logits, padding_mask), routing + scores, 10.0 * logits.numel())


def router_scores_grad_cost(*args: Any) -> Cost:
    grad_scores, logits, padding_mask, _ = args
    return Cost(size_of(grad_scores, logits, padding_mask), size_of(logits), 10.0 * logits.numel())


def router_cost(*args: Any) -> Cost:
    call = RouterCall(*args)
    read = size_of(call.logits, call.expert_bias, call.padding_mask, call.cu_seqlens, call.cu_seqlens_padded)
    sets = 1 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    sums = 12 * sets * call.logits.shape[1] + 8 * call.logits.shape[1]
    return Cost(read, _routed(call) + sums, 25.0 * call.logits.numel())


def router_grad_cost(*args: Any) -> Cost:
    call = RouterGradCall(*args)
    sums = (call.grad_aux, call.grad_z, call.grad_score_sums, call.grad_z_sum)
    every_row = any(grad is not None for grad in sums)
    read = size_of(call.chosen, call.counts, call.coefficients, call.padding_mask, call.cu_seqlens, call.cu_seqlens_padded)
    read += size_of(call.logits) if every_row else _picked(call.logits, call.chosen, call.pre_softmax)
    if call.grad_probs is not None:
        read += call.chosen.numel() * call.logits.element_size()
    return Cost(read + size_of(*sums), size_of(call.logits), 25.0 * call.logits.numel())


# --- inputs -----------------------------------------------------------------------------------------------------------------------


def _separated(rows: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(logits, bias): random, but such that all code agrees on the best experts, whether it ranks a row by sigmoid + bias or by
    logit. Random numbers would leave a few of 65536 rows with keys closer than the roundings of a sigmoid."""
    step = 0.4 / experts
    expert = torch.arange(experts, device=device)
    # Keys are a permutation of a grid. Biases are off the grid by another fraction of a step each: so scores differ as well.
    keys = 0.3 + step * torch.rand(rows, experts, device=device).argsort(1)
    bias = step * (torch.randint(0, experts // 4, (experts,), device=device) + expert / experts)
    return (keys - bias).logit(), bias


def _as(record: type[Any], args: tuple[Any, ...]) -> Any:
    """`args` by their names. Of type Any: a baseline knows which of its optional tensors are there."""
    return record(*args)


def _name(rows: int, experts: int, topk: int, more: str = "") -> str:
    return f"T={rows} E={experts} K={topk}{more}"


# --- router_topk ------------------------------------------------------------------------------------------------------------------


def _topk_arguments(rows: int, experts: int, topk: int, device: torch.device, **changed: Any) -> tuple[Any, ...]:
    logits, bias = _separated(rows, experts, device)
    return tuple(TopkCall(logits, bias, None, **choice(topk, score_function="sigmoid", **changed)))


def router_topk_benches(device: torch.device) -> Iterator[Bench]:
    for shape in (*_SHAPES, _WIDE):
        yield Bench(_name(*shape), partial(_topk_arguments, *shape, device), _topk_by_hand)
    in_order: dict[str, Any] = {"probs_format": "topk", "routing_format": "indices", "index_dtype": torch.int32}
    for shape in _LONG:
        yield Bench(_name(*shape, ", in order"), partial(_topk_arguments, *shape, device, **in_order), _topk_by_hand)


def _chosen_by_hand(logits: Tensor, bias: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    indices = torch.topk(scores + bias, topk).indices
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + EPS), indices


def _topk_by_hand(*args: Any) -> tuple[Tensor, Tensor]:
    call = _as(TopkCall, args)
    weights, indices = _chosen_by_hand(call.logits, call.expert_bias, call.topk)
    if call.probs_format == "topk":
        return weights, indices.to(call.index_dtype)
    return torch.zeros_like(call.logits).scatter(1, indices, weights), _mask_by_hand(call.logits, indices)


def _mask_by_hand(logits: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def _grad_arguments(rows: int, experts: int, topk: int, device: torch.device) -> tuple[Any, ...]:
    logits, bias = _separated(rows, experts, device)
    chosen = _chosen_by_hand(logits, bias, topk)[1].int()
    return torch.randn_like(logits), logits, chosen, "sigmoid", False, True, None, "dense"


def router_topk_grad_benches(device: torch.device) -> Iterator[Bench]:
    for shape in (*_SHAPES, _WIDE):
        yield Bench(_name(*shape), partial(_grad_arguments, *shape, device), _topk_grad_by_hand)


def _topk_grad_by_hand(grad_probs: Tensor, logits: Tensor, chosen: Tensor, *_: Any) -> Tensor:
    indices = chosen.long()
    scores, grad = logits.gather(1, indices).sigmoid(), grad_probs.gather(1, indices)
    total = scores.sum(-1, keepdim=True) + EPS
    grad = (grad - (grad * scores).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(logits).scatter(1, indices, grad * scores * (1 - scores))


# --- router_scores ----------------------------------------------------------------------------------------------------------------


def _scores_arguments(rows: int, experts: int, topk: int, device: torch.device) -> tuple[Any, ...]:
    return _separated(rows, experts, device)[0], None, topk, "softmax", "mask"


def router_scores_benches(device: torch.device) -> Iterator[Bench]:
    for shape in (*_SHAPES, _WIDE):
        yield Bench(_name(*shape), partial(_scores_arguments, *shape, device), _scores_by_hand)


def _scores_by_hand(logits: Tensor, _: None, topk: int, *__: Any) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1), _mask_by_hand(logits, torch.topk(logits, topk).indices)


def router_scores_grad_benches(device: torch.device) -> Iterator[Bench]:
    def make(rows: int, experts: int) -> tuple[Any, ...]:
        logits = torch.randn(rows, experts, device=device)
        return torch.randn_like(logits), logits, None, "softmax"

    for rows, experts, _ in (*_SHAPES, _WIDE):
        yield Bench(f"T={rows} E={experts}", partial(make, rows, experts), _scores_grad_by_hand)


def _scores_grad_by_hand(grad_scores: Tensor, logits: Tensor, *_: Any) -> Tensor:
    scores = logits.softmax(-1)
    return scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))


# --- router -----------------------------------------------------------------------------------------------------------------------


def _router_arguments(rows: int, experts: int, topk: int, device: torch.device, **changed: Any) -> tuple[Any, ...]:
    logits, bias = _separated(rows, experts, device)
    mask = torch.arange(rows, device=device) >= rows - rows // 20
    fields: dict[str, Any] = dict.fromkeys(RouterCall._fields) | choice(topk, score_function="sigmoid", **changed)
    losses: dict[str, Any] = {"aux_score_function": "softmax", "reduction": "mean", "aux_coeff": 0.01, "z_coeff": 0.001}
    fields |= losses | {"logits": logits, "expert_bias": bias, "padding_mask": mask}
    return tuple(RouterCall(**fields))


def router_benches(device: torch.device) -> Iterator[Bench]:
    for shape in (*_SHAPES, _WIDE):
        yield Bench(_name(*shape), partial(_router_arguments, *shape, device), _router_by_hand)
    in_order: dict[str, Any] = {"probs_format": "topk", "routing_format": "indices", "index_dtype": torch.int32}
    for shape in _LONG:
        yield Bench(_name(*shape, ", in order"), partial(_router_arguments, *shape, device, **in_order), _router_by_hand)


def _router_by_hand(*args: Any) -> tuple[Tensor, ...]:
    call = _as(RouterCall, args)
    logits, padding, topk = call.logits, call.padding_mask, call.topk
    weights, indices = _chosen_by_hand(logits, call.expert_bias, topk)
    weights = weights.masked_fill(padding[:, None], 0)
    mask = _mask_by_hand(logits, indices) & ~padding[:, None]
    indices = indices.masked_fill(padding[:, None], -1).int()
    dense = call.probs_format == "dense"
    probs = torch.zeros_like(logits).scatter(1, indices.clamp(min=0).long(), weights) if dense else weights
    scores = logits.softmax(-1).masked_fill(padding[:, None], 0).sum(0)
    counts = (_mask_by_hand(logits, torch.topk(logits, topk).indices) & ~padding[:, None]).sum(0)
    count = (~padding).sum()
    aux_loss = (scores * counts).sum() * call.aux_coeff * logits.shape[1] / topk / count / count
    z_sum = logits.logsumexp(-1).square().masked_fill(padding, 0).sum()
    z_loss = call.z_coeff * z_sum / count
    return probs, mask if dense else indices, indices, mask.sum(0), aux_loss, z_loss, scores[None], counts[None], z_sum


def _router_grad_arguments(rows: int, experts: int, topk: int, device: torch.device) -> tuple[Any, ...]:
    call = RouterCall(*_router_arguments(rows, experts, topk, device))
    _, _, chosen, _, _, _, _, counts, _ = _router_by_hand(*call)
    one = torch.ones((), device=device)
    coefficients = torch.tensor([0.01 * experts / topk / rows / rows, 0.001 / rows], device=device)
    fields: dict[str, Any] = dict.fromkeys(RouterGradCall._fields) | {
        "logits": call.logits,
        "chosen": chosen,
        "grad_probs": torch.randn_like(call.logits),
        "grad_aux": one,
        "grad_z": one,
        "counts": counts,
        "coefficients": coefficients,
        "padding_mask": call.padding_mask,
        "score_function": "sigmoid",
        "pre_softmax": False,
        "normalize": True,
        "probs_format": "dense",
        "aux_score_function": "softmax",
    }
    return tuple(RouterGradCall(**fields))


def router_grad_benches(device: torch.device) -> Iterator[Bench]:
    for shape in (*_SHAPES, _WIDE):
        yield Bench(_name(*shape), partial(_router_grad_arguments, *shape, device), _router_grad_by_hand)


def _router_grad_by_hand(*args: Any) -> Tensor:
    call = _as(RouterGradCall, args)
    through_probs = _topk_grad_by_hand(call.grad_probs, call.logits, call.chosen.clamp(min=0))
    through_scores = _scores_grad_by_hand(call.grad_aux * call.coefficients[0] * call.counts, call.logits)
    lse = call.logits.logsumexp(-1, keepdim=True)
    through_z = call.grad_z * call.coefficients[1] * 2 * lse * call.logits.softmax(-1)
    return (through_probs + through_scores + through_z).masked_fill(call.padding_mask[:, None], 0)
