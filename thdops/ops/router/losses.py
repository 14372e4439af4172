"""Public functions: the losses of `router` from its sums, in plain PyTorch. They have no op: sums are a few numbers.

E experts, K top-k, B sequences, N rows that count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    check_choice,
    check_dtype,
    check_integers,
    check_tensors,
    refusal,
    shape_of,
    split_count,
    split_scale,
)
from meta_kernels.router import REDUCTIONS
from thdops.ops.router.reference_losses import aux_coefficients, over_sequences, weighted, z_coefficient


def aux_loss_from_sums(
    scores: Tensor,
    counts: Tensor,
    num_tokens: int | Tensor,
    *,
    topk: int,
    coeff: float | Tensor,
    reduction: str = "mean",
) -> Tensor:
    """The aux loss of `router` from its sums, after the caller has added them up over process groups, micro-batches or layers.

    Plain differentiable PyTorch without a host sync: the gradient goes to `scores`. Counts and token counts must cover the same
    rows as the scores, or the loss is that of no batch.

    Args:
        scores: `[E]`, or `[B, E]` for a loss per sequence; fp32 (fp64 on CPU).
        counts: the same shape, any integer or float dtype.
        num_tokens: N, an int or a one-element tensor, or `[B]` where scores are `[B, E]`. Where N is not above 0 the loss is 0.
        topk: K, from 1 to E.
        coeff: a float or a one-element tensor. Where it is 0 the loss and its gradient are exactly 0.
        reduction: over sequences: "sum", or "mean" over those with N above 0.

    Returns:
        The loss, 0-d, in the dtype of scores.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype or value.
    """
    op = "aux_loss_from_sums"
    check_tensors(op, scores=scores, counts=counts)
    _check_sum(op, "scores", scores)
    if scores.dim() not in (1, 2):
        raise refusal(op, "scores", "be [E] or [B, E]", f"shape {shape_of(scores)}", "pass the sums that router returns")
    if counts.shape != scores.shape:
        raise refusal(op, "counts", f"have the shape of scores {shape_of(scores)}", shape_of(counts), "pass the same sums")
    check_choice(op, "reduction", reduction, REDUCTIONS)
    check_integers(op, topk=topk)
    experts = scores.shape[-1]
    if topk < 1 or topk > experts:
        raise refusal(op, "topk", f"be from 1 to the number of experts ({experts})", topk, "pass the router's")
    rows = _count(op, num_tokens, scores)
    if scores.dim() == 2:
        if rows.shape != scores.shape[:1]:
            rule = f"be [B] with one entry per sequence ({scores.shape[0]})"
            raise refusal(op, "num_tokens", rule, f"shape {shape_of(rows)}", "pass the same sums")
    elif rows.numel() != 1:
        raise refusal(op, "num_tokens", "have one element", f"shape {shape_of(rows)}", "pass the same sums")
    coefficients = aux_coefficients(_scale(op, coeff, scores), experts, topk, rows)
    if scores.dim() == 2:
        coefficients = over_sequences(coefficients, rows, reduction)
    return weighted(coefficients, (counts.detach() * scores).sum(-1)).sum()


def z_loss_from_sums(z: Tensor, num_tokens: int | Tensor, coeff: float | Tensor) -> Tensor:
    """The z-loss of `router` from its sums: `coeff * z / max(n, 1)`. Plain differentiable PyTorch without a host sync.

    Args:
        z: one element, fp32 (fp64 on CPU): the sum of logsumexp(logits)^2.
        num_tokens: n, an int or a tensor, whose entries are added up.
        coeff: a float or a one-element tensor. Where it is 0 the loss and its gradient are exactly 0.

    Returns:
        The loss, 0-d, in the dtype of z.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype or value.
    """
    op = "z_loss_from_sums"
    check_tensors(op, z=z)
    _check_sum(op, "z", z)
    if z.numel() != 1:
        raise refusal(op, "z", "have one element", f"shape {shape_of(z)}", "pass the sum that router returns")
    coefficient = z_coefficient(_scale(op, coeff, z), _count(op, num_tokens, z))
    return weighted(coefficient, z.reshape(()))


def _check_sum(op: str, argument: str, tensor: Tensor) -> None:
    check_dtype(op, argument, tensor, (torch.float32, torch.float64), "pass the sum that router returns")


def _count(op: str, num_tokens: int | Tensor, like: Tensor) -> Tensor:
    """The token count, or counts, as a tensor like a sum."""
    value, tensor = split_count(op, "num_tokens", num_tokens)
    return like.new_full((), value or 0) if tensor is None else tensor.detach().to(like.dtype)


def _scale(op: str, coeff: float | Tensor, like: Tensor) -> Tensor:
    """The coefficient as a 0-d tensor like a sum."""
    value, tensor = split_scale(op, "coeff", coeff)
    return like.new_full((), value or 0.0) if tensor is None else tensor.detach().to(like.dtype).reshape(())
