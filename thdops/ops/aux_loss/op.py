"""Public function and specs of the aux-loss ops.

T rows (tokens), E experts, K top-k, N counted tokens, M sequences folded into columns (1 for an ordinary aux loss).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels import aux_loss as contract
from meta_kernels.contract import check_tensors, split_count, split_scale
from thdops.namespace import REGISTRY
from thdops.ops.aux_loss import reference, samples
from thdops.registry import OpSpec, register

_KERNELS = "thdops.ops.aux_loss.kernels"


def moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    *,
    num_experts: int,
    topk: int,
    coeff: float | Tensor,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The load-balancing loss of an MoE router: `C * sum_c tokens_per_expert[c] * sum_t probs[t, c]`, C = E*coeff/K/N/N.

    Bitwise repeatable. N and `coeff` may be tensors: the kernel reads them, so a replayed CUDA graph follows their contents and
    a compiled program serves all their values. A Python int N is part of a captured graph; a compiled program takes all its
    values too (one more compilation at the second). A Python float `coeff` is a compile-time constant.

    Args:
        probs: `[T, M*E]` fp32, bf16 or fp16 (fp64 on CPU), any strides; the router's scores for the aux loss, over all experts.
        tokens_per_expert: `[M*E]` int16, int32, int64, fp32, bf16 or fp16: how often each expert was chosen. Only read; no
            gradient, even where it is a float.
        total_num_tokens: N, the tokens that `tokens_per_expert` counts (over the same processes), as an int >= 0 or a
            one-element int32, int64 or fp32 tensor on the device of probs. An N that is not above 0 (a batch without a valid
            token) gives loss 0 and zero gradients.
        num_experts: E, not M*E. With M > 1 sequences folded into columns the result is the sum of their M losses, all with N.
        topk: K, from 1 to E.
        coeff: a float, or a one-element fp32 tensor on the device of probs (fp32 only: a schedule in bf16 would move in steps
            of 0.4 %). No gradient. Where it is 0 the loss and its gradients are exactly 0.
        padding_mask: bool `[T]`, or `[T, M]` for folded sequences; True = padding. Those rows add nothing, whatever stands
            there (NaN included), and get gradient exactly 0.

    Returns:
        The loss, 0-d fp32 (fp64 for fp64 probs). The gradient of probs is dense and contiguous, in the dtype of probs.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or shape of an argument; columns not a multiple of `num_experts`;
            `topk` out of range; a negative Python int N.
    """
    check_tensors("moe_aux_loss", ("padding_mask",), probs=probs, tokens_per_expert=tokens_per_expert, padding_mask=padding_mask)
    count, count_tensor = split_count("moe_aux_loss", "total_num_tokens", total_num_tokens)
    scale, scale_tensor = split_scale("moe_aux_loss", "coeff", coeff)
    loss, _ = torch.ops.thdops.moe_aux_loss(
        probs, tokens_per_expert, count_tensor, scale_tensor, padding_mask, num_experts, topk, count, scale
    )
    return loss


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    probs, tokens_per_expert, _, _, padding_mask, *_ = inputs
    _, coefficient = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(coefficient)
    ctx.save_for_backward(coefficient, tokens_per_expert, padding_mask)
    ctx.rows, ctx.dtype = probs.shape[0], probs.dtype


def _backward(ctx: Any, grad_loss: Tensor | None, grad_coefficient: None) -> tuple[Tensor | None, ...]:
    others = (None,) * 8
    if grad_loss is None:
        return None, *others
    coefficient, tokens_per_expert, padding_mask = ctx.saved_tensors
    grad = torch.ops.thdops.moe_aux_loss_grad(grad_loss, coefficient, tokens_per_expert, padding_mask, ctx.rows, ctx.dtype)
    return grad, *others


# --- specs ------------------------------------------------------------------------------------------------------------------------

register(
    OpSpec(
        name="moe_aux_loss",
        schema="(Tensor probs, Tensor tokens_per_expert, Tensor? total_num_tokens_tensor, Tensor? coeff_tensor,"
        " Tensor? padding_mask, SymInt num_experts, SymInt topk, SymInt? total_num_tokens=None, float? coeff=None)"
        " -> (Tensor loss, Tensor coefficient)",
        summary="load-balancing loss of a router; token count and coefficient may live on the device",
        check=contract.check_moe_aux_loss,
        fake=contract.fake_moe_aux_loss,
        reference=reference.moe_aux_loss,
        cuda=f"{_KERNELS}:moe_aux_loss",
        setup_context=_save,
        backward=_backward,
        samples=samples.moe_aux_loss_samples,
        refusals=samples.moe_aux_loss_refusals,
        padding=samples.moe_aux_loss_padding,
        cost=samples.moe_aux_loss_cost,
        benches=samples.moe_aux_loss_benches,
        no_gradient=("tokens_per_expert", "total_num_tokens_tensor", "coeff_tensor", "coefficient"),
        # A sum of T*M*E numbers in another order than the reference's, and four roundings of the coefficient.
        roundings=8.0,
    ),
    REGISTRY,
)
register(
    OpSpec(
        name="moe_aux_loss_grad",
        schema="(Tensor grad_loss, Tensor coefficient, Tensor tokens_per_expert, Tensor? padding_mask, SymInt rows,"
        " ScalarType dtype) -> Tensor",
        summary="gradient of moe_aux_loss: one row, stored dense to every row that is not padding",
        check=contract.check_moe_aux_loss_grad,
        fake=contract.fake_moe_aux_loss_grad,
        reference=reference.moe_aux_loss_grad,
        cuda=f"{_KERNELS}:moe_aux_loss_grad",
        samples=samples.moe_aux_loss_grad_samples,
        refusals=samples.moe_aux_loss_grad_refusals,
        padding=samples.moe_aux_loss_grad_padding,
        cost=samples.moe_aux_loss_grad_cost,
        benches=samples.moe_aux_loss_grad_benches,
        roundings=2.0,  # two products in fp32
        pads_zeroed=True,
    ),
    REGISTRY,
)
