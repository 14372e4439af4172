"""The balancing ops in eager PyTorch: the specification.

T rows (tokens), E experts, K top-k, B packed sequences, L layers. Padding rows are selected away before anything is computed: they
may hold NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.balancing import experts_of, routing_format
from meta_kernels.contract import accumulation_dtype
from thdops.ops.aux_loss.reference import scalar
from thdops.ops.padding.reference import locate_rows


def _chosen(routing: Tensor, experts: int) -> Tensor:
    """How often each row chose each expert, int64 [T, E], from any of the three formats."""
    form = routing_format(routing)
    if form == "mask":
        return routing.long()
    if form == "bitmap":
        expert = torch.arange(experts, device=routing.device)
        return routing[:, expert // 8].long() >> expert % 8 & 1
    ids = routing.long()
    counts = ids.new_zeros(routing.shape[0], experts + 1)  # one column more, for ids of no expert
    slots = torch.where((ids >= 0) & (ids < experts), ids, experts)
    return counts.scatter_add_(1, slots, torch.ones_like(ids))[:, :experts]


def tokens_per_expert(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Tensor:
    chosen = _chosen(routing, experts_of(routing, num_experts))
    if padding_mask is not None:
        chosen = torch.where(padding_mask[:, None], 0, chosen)
    return chosen.sum(0)


# --- moe_z_loss -------------------------------------------------------------------------------------------------------------------


def moe_z_loss(
    logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss = factor * sum over valid rows of lse^2, factor = coeff / max(n, 1), n = number of valid rows, lse = logsumexp(x).

    A row that is all -inf has lse -inf, so the loss is infinite, but a gradient of 0; on padding rows lse is -inf, too.
    """
    dtype = accumulation_dtype(logits.dtype)
    padding = logits.new_zeros(logits.shape[0], dtype=torch.bool) if padding_mask is None else padding_mask
    empty = padding | (logits == -torch.inf).all(1)
    values = torch.where(empty[:, None], 0.0, logits.to(dtype))
    lse = torch.where(empty, -torch.inf, values.logsumexp(1))
    factor = scalar(coeff, coeff_tensor, dtype, logits.device) / (~padding).sum().clamp(min=1)
    total = torch.where(padding, 0.0, lse).square().sum()
    return torch.where(factor == 0, 0.0, factor * total), factor, lse


def moe_z_loss_grad(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Tensor:
    """dx = factor * 2 * lse * softmax(x) * grad_loss; +0.0 on rows whose lse is -inf, and where the factor is 0."""
    slope = factor.reshape(()) * grad_loss.reshape(()) * 2 * lse
    grad = slope[:, None] * (logits.to(lse.dtype) - lse[:, None]).exp()
    nothing = (lse == -torch.inf)[:, None] | (factor.reshape(()) == 0)
    return torch.where(nothing, 0.0, grad).to(logits.dtype).contiguous()


# --- moe_seq_aux_loss -------------------------------------------------------------------------------------------------------------


def moe_seq_aux_loss(
    scores: Tensor,
    routing: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    coeff_tensor: Tensor | None,
    num_experts: int,
    topk: int,
    reduction: str,
    coeff: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Over the valid rows of sequence b, n of them: S = sum of scores, R = sum of choices; loss_b = C * sum_e S[e] R[e] with
    C = coeff * E / K / n / n, 0 where n is 0. slopes = C R; share is what the gradient of the result gives to each loss_b.
    """
    dtype = accumulation_dtype(scores.dtype)
    sequences = cu_seqlens.shape[0] - 1
    rows = locate_rows(cu_seqlens, cu_seqlens_padded, scores.shape[0])
    sequence = torch.where(rows.valid, rows.sequence, sequences)

    def sums(of: Tensor) -> Tensor:
        # One sequence more takes the padding rows, which may hold NaN, and is cut off.
        return of.new_zeros(sequences + 1, num_experts).index_add(0, sequence, of)[:sequences]

    chosen = sums(_chosen(routing, num_experts)).to(dtype)
    tokens = torch.bincount(sequence, minlength=sequences + 1)[:sequences]
    count = tokens.clamp(min=1).to(dtype)
    scale = scalar(coeff, coeff_tensor, dtype, scores.device)
    coefficient = torch.where(tokens > 0, scale * num_experts / topk / count / count, 0.0)
    losses = torch.where(coefficient == 0, 0.0, coefficient * (sums(scores.to(dtype)) * chosen).sum(1))
    slopes = coefficient[:, None] * chosen
    share = 1 / (tokens > 0).sum().clamp(min=1).to(dtype) if reduction == "mean" else torch.ones_like(scale)
    loss = losses if reduction == "none" else share * losses.sum()
    return loss, slopes, share


def moe_seq_aux_loss_grad(
    grad_loss: Tensor,
    slopes: Tensor,
    share: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """share * grad_loss * slopes[b] on the valid rows of sequence b, +0.0 elsewhere and where the slope is 0."""
    place = locate_rows(cu_seqlens, cu_seqlens_padded, rows)
    if slopes.shape[0] == 0:
        return slopes.new_zeros(rows, slopes.shape[1], dtype=dtype)
    row_of = torch.where(slopes == 0, 0.0, slopes * (share.reshape(()) * grad_loss.reshape(-1, 1)))
    return torch.where(place.valid[:, None], row_of[place.sequence], 0.0).to(dtype)


# --- expert_bias_update -----------------------------------------------------------------------------------------------------------


def expert_bias_update(bias: Tensor, tokens_per_expert: Tensor, rate_tensor: Tensor | None, rate: float | None = None) -> Tensor:
    """bias + rate where an expert got fewer tokens than the mean of its layer, bias - rate where it got more. Whether it did is
    decided without a division: E * tokens against the sum, in int64, or fp64 where counts are floats.
    """
    dtype = accumulation_dtype(bias.dtype)
    counts = tokens_per_expert.to(torch.float64 if tokens_per_expert.is_floating_point() else torch.int64)
    scaled, total = counts * bias.shape[-1], counts.sum(-1, keepdim=True)
    step = scalar(rate, rate_tensor, dtype, bias.device) * ((scaled < total).to(dtype) - (scaled > total).to(dtype))
    return (bias.to(dtype) + step).to(bias.dtype).contiguous()
