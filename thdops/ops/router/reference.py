"""The router ops in eager PyTorch: the specification.

T rows (tokens), E experts, K top-k, B sequences, S sets of sums (B, or 1 without cu_seqlens).

A row is routed unless it is padding and `pad_routing` is "nowhere"; it counts, in all sums, unless it is padding. What stands on
rows that are not routed, or do not count, is replaced before anything is computed. Formulas of single rows: reference_scores.py;
the order of experts: reference_select.py. Sums of `router`, over the rows that count (of sequence s):

    score_sums[s, e] = sum of scores[t, e]          counts[s, e] = how often e is among the best K by score, without bias or groups
    aux_loss = sum over s of coefficients[s] * sum_e counts[s, e] * score_sums[s, e]
    z_sum    = sum of logsumexp(x[t])^2             z_loss = coefficients[S] * z_sum

    C_s = aux_coeff * E / K / N / N, and 0 where N is not above 0. N is the number of rows that count in sequence s; without
    cu_seqlens it is total_num_tokens where that is given.
    coefficients[s] = C_s, over the number of sequences with a row that counts where `reduction` is "mean"
    coefficients[S] = z_coeff / max(n, 1), n = all rows that count

A coefficient that is not given is 0. Where a coefficient is 0 the loss and its gradient are exactly 0, whatever the sums hold.
Sources: the load-balancing loss of the Switch Transformer (Fedus et al., 2021, equations 4 to 6), on sums instead of means; the
router z-loss of ST-MoE (Zoph et al., 2022, equation 5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype, takes
from meta_kernels.router import RouterCall, RouterGradCall, TopkCall, sets_of_sums
from thdops.ops.padding.reference import locate_rows
from thdops.ops.router.reference_losses import aux_coefficients, over_sequences, weighted, z_coefficient
from thdops.ops.router.reference_scores import (
    Scoring,
    all_scores,
    all_scores_grad,
    chosen_probs,
    chosen_probs_grad,
    selection_keys,
)
from thdops.ops.router.reference_select import bitmap_of, choose, mask_of


class _Rows(NamedTuple):
    """Of each row: whether it counts, and the set of sums it belongs to; S, which no set has, if it does not."""

    counted: Tensor
    bins: Tensor


def _selected(logits: Tensor, rows: Tensor) -> Tensor:
    """The logits of `rows` (bool [T]), 0 on others; contiguous, in the dtype of all arithmetic."""
    # Select, never multiply: padding may hold NaN.
    return torch.where(rows[:, None], logits.to(accumulation_dtype(logits.dtype)), 0.0).contiguous()


def _not_padding(logits: Tensor, padding_mask: Tensor | None) -> Tensor:
    """bool [T]."""
    if padding_mask is None:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return ~padding_mask


def _rows(logits: Tensor, padding_mask: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None) -> _Rows:
    counted = _not_padding(logits, padding_mask)
    sequence = torch.zeros_like(counted, dtype=torch.int64)
    if cu_seqlens is not None:
        located = locate_rows(cu_seqlens, cu_seqlens_padded, len(logits))
        counted, sequence = counted & located.valid, located.sequence
    return _Rows(counted, torch.where(counted, sequence, sets_of_sums(cu_seqlens)))


# --- router_topk ------------------------------------------------------------------------------------------------------------------


@takes(TopkCall)
def router_topk(call: TopkCall) -> tuple[Tensor, Tensor, Tensor]:
    return _route(call, _not_padding(call.logits, call.padding_mask))


def _route(call: TopkCall | RouterCall, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, routing, chosen); `chosen` int32 [T, K] is -1 on rows that are not routed."""
    routed = counted if call.pad_routing == "nowhere" else torch.ones_like(counted)
    routed_column = routed[:, None]
    x = _selected(call.logits, routed)
    experts = x.shape[1]
    keys = selection_keys(x.detach(), call.expert_bias, call.score_function)
    chosen = choose(keys, call.topk, call.num_groups, call.group_topk)
    scoring = Scoring(call.score_function, call.pre_softmax, call.normalize, call.scaling_factor)
    probs = torch.where(routed_column, chosen_probs(x, chosen, scoring), 0.0).to(call.logits.dtype)
    if call.probs_format == "dense":
        probs = torch.zeros(len(x), experts, dtype=probs.dtype, device=x.device).scatter(1, chosen, probs)
    if call.routing_format == "indices":
        routing = torch.where(routed_column, chosen, call.pad_index).to(call.index_dtype)
    else:
        routing = mask_of(chosen, routed, experts)
        routing = bitmap_of(routing) if call.routing_format == "bitmap" else routing
    return probs, routing, torch.where(routed_column, chosen, -1).int()


def router_topk_grad(
    grad_probs: Tensor,
    logits: Tensor,
    chosen: Tensor,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
) -> Tensor:
    scoring = Scoring(score_function, pre_softmax, normalize, scaling_factor)
    return _route_grad(grad_probs, logits, chosen, scoring, probs_format).to(logits.dtype)


def _route_grad(grad_probs: Tensor, logits: Tensor, chosen: Tensor, scoring: Scoring, probs_format: str) -> Tensor:
    """[T, E]: the gradient of the logits, 0 on rows that were not routed. Gradients of weights not chosen are not read."""
    routed = chosen[:, :1] >= 0
    experts = torch.where(routed, chosen, 0).long()
    g = grad_probs.gather(1, experts) if probs_format == "dense" else grad_probs
    x = _selected(logits, routed[:, 0])
    return torch.where(routed, chosen_probs_grad(g.to(x.dtype), x, experts, scoring), 0.0)


# --- router_scores ----------------------------------------------------------------------------------------------------------------


def router_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str = "mask"
) -> tuple[Tensor, Tensor]:
    scores, routing = _score(logits, _not_padding(logits, padding_mask), topk, score_function)
    return scores, bitmap_of(routing) if routing_format == "bitmap" else routing


def _score(logits: Tensor, counted: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """(scores of all experts, mask of the best K), 0 and False on rows that do not count."""
    x = _selected(logits, counted)
    chosen = choose(selection_keys(x.detach(), None, score_function), topk)
    return torch.where(counted[:, None], all_scores(x, score_function), 0.0), mask_of(chosen, counted, x.shape[1])


def router_scores_grad(grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str) -> Tensor:
    counted = _not_padding(logits, padding_mask)
    grad = all_scores_grad(grad_scores.contiguous(), _selected(logits, counted), score_function)
    return torch.where(counted[:, None], grad, 0.0).to(logits.dtype)


# --- router -----------------------------------------------------------------------------------------------------------------------


@takes(RouterCall)
def router(call: RouterCall) -> tuple[Tensor, ...]:
    rows = _rows(call.logits, call.padding_mask, call.cu_seqlens, call.cu_seqlens_padded)
    sets, dtype = sets_of_sums(call.cu_seqlens), accumulation_dtype(call.logits.dtype)
    probs, routing, chosen = _route(call, rows.counted)
    tokens_per_expert = mask_of(chosen.clamp(min=0).long(), rows.counted, call.logits.shape[1]).sum(0)

    scores, mask = _score(call.logits, rows.counted, call.topk, call.aux_score_function)
    score_sums = _sums(scores, rows, sets)
    counts = _sums(mask.long(), rows, sets)
    num_tokens = _sums(rows.counted.long(), rows, sets)
    x = _selected(call.logits, rows.counted)
    z_sum = torch.where(rows.counted, x.logsumexp(-1).square(), 0.0).sum()

    per_set, of_z = _coefficients(call, num_tokens, dtype)
    aux_loss = weighted(per_set, (counts * score_sums).sum(1)).sum()
    z_loss = weighted(of_z, z_sum)
    coefficients = torch.cat((per_set, of_z[None]))
    return probs, routing, chosen, tokens_per_expert, aux_loss, z_loss, score_sums, counts, z_sum, num_tokens, coefficients


def _sums(values: Tensor, rows: _Rows, sets: int) -> Tensor:
    """[S, ...]: the sum of `values`, [T, ...], over the rows of each set."""
    return values.new_zeros(sets + 1, *values.shape[1:]).index_add(0, rows.bins, values)[:-1].clone()


def _coefficients(call: RouterCall, num_tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(of the aux loss [S], of the z-loss [])."""

    def number(value: float | None, tensor: Tensor | None) -> Tensor:
        if tensor is not None:
            return tensor.detach().to(dtype).reshape(())
        return torch.full((), 0.0 if value is None else value, dtype=dtype, device=num_tokens.device)

    count = num_tokens.to(dtype)
    if call.total_num_tokens is not None or call.total_num_tokens_tensor is not None:
        count = number(call.total_num_tokens, call.total_num_tokens_tensor)[None]
    scale = number(call.aux_coeff, call.aux_coeff_tensor)
    coefficients = aux_coefficients(scale, call.logits.shape[1], call.topk, count)
    if call.cu_seqlens is not None:
        coefficients = over_sequences(coefficients, num_tokens, call.reduction)
    return coefficients, z_coefficient(number(call.z_coeff, call.z_coeff_tensor), num_tokens)


@takes(RouterGradCall)
def router_grad(call: RouterGradCall) -> Tensor:
    logits = call.logits
    rows = _rows(logits, call.padding_mask, call.cu_seqlens, call.cu_seqlens_padded)
    x = _selected(logits, rows.counted)
    grad = torch.zeros_like(x)
    if call.grad_probs is not None:
        scoring = Scoring(call.score_function, call.pre_softmax, call.normalize, call.scaling_factor)
        grad = grad + _route_grad(call.grad_probs, logits, call.chosen, scoring, call.probs_format)
    for row_grad, active in (_grad_of_score_sums(call, rows, x), _grad_of_z_sum(call, x)):
        # A gradient of 0 adds exactly 0, also to rows that hold NaN.
        grad = grad + torch.where(rows.counted[:, None] & active, row_grad, 0.0)
    return grad.to(logits.dtype)


def _grad_of_score_sums(call: RouterGradCall, rows: _Rows, x: Tensor) -> tuple[Tensor, Tensor]:
    """([T, E]: what reaches the logits through score_sums, bool [T, 1]: where that is not 0)."""
    g = x.new_zeros(sets_of_sums(call.cu_seqlens), x.shape[1])
    if call.grad_aux is not None:
        coefficients = call.coefficients[:-1, None]
        g = torch.where(coefficients == 0, g, call.grad_aux * coefficients * call.counts)
    if call.grad_score_sums is not None:
        g = g + call.grad_score_sums
    g = torch.cat((g, g.new_zeros(1, g.shape[1])))[rows.bins]  # [T, E]; rows that do not count are in the set after the last
    return all_scores_grad(g, x, call.aux_score_function), (g != 0).any(1, keepdim=True)


def _grad_of_z_sum(call: RouterGradCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """([T, E]: what reaches the logits through z_sum, bool []: whether that is not 0)."""
    g = x.new_zeros(())
    if call.grad_z is not None:
        coefficient = call.coefficients[-1]
        g = torch.where(coefficient == 0, g, call.grad_z * coefficient)
    if call.grad_z_sum is not None:
        g = g + call.grad_z_sum
    return g * 2 * x.logsumexp(-1, keepdim=True) * x.softmax(-1), g != 0
