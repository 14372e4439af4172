"""Public functions and specs of the balancing ops. T rows (tokens), E experts, K top-k, B packed sequences, L layers.

What a router chose ("routing") is taken in three formats, told apart by dtype: a mask (bool, a column per expert), indices (int16,
int32 or int64, K a row; an id outside [0, E), such as the one on padding rows, counts nowhere), or a bitmap (uint8, ceil(E/8) bytes
a row, expert e being bit e % 8 of byte e // 8).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meta_kernels import balancing as contract
from meta_kernels.contract import check_integers, check_tensors, refusal, shape_of, split_scale
from thdops.namespace import REGISTRY
from thdops.ops.balancing import reference, samples_bias, samples_count, samples_seq_aux, samples_z_loss
from thdops.registry import OpSpec, register

_KERNELS = "thdops.ops.balancing.kernels"


def tokens_per_expert(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Tensor:
    """How many tokens each expert was chosen for.

    Args:
        routing: mask bool `[..., E]`, indices int16, int32 or int64 `[..., K]`, or bitmap uint8 `[..., ceil(E/8)]`; any strides.
        padding_mask: bool with the leading dimensions of routing, True = padding: those rows count nothing, whatever they hold.
        num_experts: E. Needed for indices and bitmaps; a mask has it, and may be given it all the same.

    Returns:
        int64 `[E]`. Indices count as often as they stand in a row; ids outside `[0, E)` count nowhere.

    Raises:
        ValueError, TypeError: another dtype of routing; `num_experts` missing, or not that of routing; a mask of another shape.
    """
    op = "tokens_per_expert"
    check_tensors(op, ("padding_mask",), routing=routing, padding_mask=padding_mask)
    check_integers(op, ("num_experts",), num_experts=num_experts)
    return torch.ops.thdops.tokens_per_expert(*_as_rows(op, "routing", routing, padding_mask), num_experts)


def moe_z_loss(logits: Tensor, coeff: float | Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The z-loss of an MoE router: `coeff / max(n, 1) * sum over valid rows of logsumexp(x)^2`, n = number of valid rows.

    Bitwise repeatable; n is counted on the device, so a replayed CUDA graph follows the mask's contents, and those of `coeff` where
    it is a tensor. Source: ST-MoE (Zoph et al., 2022, arXiv 2202.08906, equation 5).

    Args:
        logits: fp32, bf16 or fp16 (fp64 on CPU) `[..., E]`, any strides. -inf is legal (an expert that is masked out): its gradient
            is 0. A row that is all -inf makes the loss +inf and gets gradient 0; other rows' gradients are what they are without
            it. NaN and +inf make the loss, and their own row's gradient, not finite.
        coeff: a float, or a one-element fp32 tensor on the device of logits. No gradient. Where it is 0 the loss and its gradients
            are exactly 0.
        padding_mask: bool with the leading dimensions of logits, True = padding. Those rows add nothing, whatever stands there
            (NaN included), and get gradient exactly 0.

    Returns:
        The loss, 0-d fp32 (fp64 for fp64 logits); 0 if no row is valid. The gradient of logits is dense, in their dtype.

    Raises:
        ValueError, TypeError: wrong dtype, device or shape of an argument; no expert.
    """
    op = "moe_z_loss"
    check_tensors(op, ("padding_mask",), logits=logits, padding_mask=padding_mask)
    scale, scale_tensor = split_scale(op, "coeff", coeff)
    rows, mask = _as_rows(op, "logits", logits, padding_mask)
    loss, _, _ = torch.ops.thdops.moe_z_loss(rows, scale_tensor, mask, scale)
    return loss


def moe_seq_aux_loss(
    scores: Tensor,
    routing: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    num_experts: int,
    topk: int,
    coeff: float | Tensor,
    reduction: str = "mean",
) -> Tensor:
    """The load-balancing loss of each packed sequence by itself: `loss_b = coeff * E / (K * n^2) * sum_e S[e] R[e]`.

    n is the number of valid rows of sequence b, S the sum of their scores, R how often they chose each expert: `moe_aux_loss` of
    that sequence alone. Bitwise repeatable, and lengths are read on the device. Source: the sequence-wise loss of DeepSeek-V3
    (2024, arXiv 2412.19437, equations 17 to 20), for packed sequences.

    Args:
        scores: fp32, bf16 or fp16 (fp64 on CPU) `[T, E]`, any strides; the router's scores for the aux loss, over all experts.
        routing: mask `[T, E]`, indices `[T, K]` or bitmap `[T, ceil(E/8)]` of the same tokens. No gradient.
        cu_seqlens: int32 or int64 `[B+1]`: sequence b has `cu_seqlens[b+1] - cu_seqlens[b]` valid rows. Every sequence counts:
            where one is no document (the tail of a `PackedSequences` with `tail="sequence"`), use `router` with `padding_mask`.
        cu_seqlens_padded: the same dtype and shape: sequence b owns rows `[padded[b], padded[b+1])`, its valid rows being the first
            of them. None: `cu_seqlens`. What stands on other rows does not matter (NaN included); their gradient is exactly 0.
        num_experts: E.
        topk: K, from 1 to E.
        coeff: a float, or a one-element fp32 tensor on the device of scores. No gradient. Where it is 0 the loss and its gradients
            are exactly 0.
        reduction: "mean" over the sequences that have a token (0 if none has), "sum", or "none": one loss per sequence, 0 for
            those without a token.

    Returns:
        The loss, 0-d or, with "none", `[B]`; fp32 (fp64 for fp64 scores). The gradient of scores is dense, in their dtype, and
        exactly 0 where an expert was not chosen in a sequence.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or shape of an argument; `topk` out of range; an unknown reduction.
        Malformed `cu_seqlens` are not seen here: the result is then unspecified, but nothing outside the tensors is touched.
    """
    op = "moe_seq_aux_loss"
    check_tensors(
        op,
        ("cu_seqlens_padded",),
        scores=scores,
        routing=routing,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
    )
    check_integers(op, num_experts=num_experts, topk=topk)
    scale, scale_tensor = split_scale(op, "coeff", coeff)
    loss, _, _ = torch.ops.thdops.moe_seq_aux_loss(
        scores, routing, cu_seqlens, cu_seqlens_padded, scale_tensor, num_experts, topk, reduction, scale
    )
    return loss


def expert_bias_update(bias: Tensor, tokens_per_expert: Tensor, rate: float | Tensor) -> Tensor:
    """The next expert bias of a router that balances without a loss: `bias + rate * sign(mean(tokens) - tokens)`.

    Functional, and without a gradient: `bias.copy_(thdops.expert_bias_update(bias, tokens, rate))` updates a buffer in place.
    Whether an expert got more or fewer tokens than the mean of its layer is decided without a division: E * tokens against the sum,
    in int64, or fp64 where counts are fp32; an expert at the mean keeps its bias. Source: auxiliary-loss-free load balancing
    (Wang et al., 2024, arXiv 2408.15664, algorithm 1).

    Args:
        bias: fp32, bf16 or fp16 (fp64 on CPU) `[E]` or `[L, E]`, any strides. A bias of 16 bits swallows small rates.
        tokens_per_expert: int32, int64 or fp32 in the shape of bias: the counts of all processes that share the bias. Where a
            layer's counts hold a NaN, the bias of that layer stays.
        rate: a float, or a one-element fp32 tensor on the device of bias.

    Returns:
        The new bias, contiguous, in the shape and dtype of bias.

    Raises:
        ValueError, TypeError: wrong dtype, device or shape of an argument.
    """
    op = "expert_bias_update"
    check_tensors(op, bias=bias, tokens_per_expert=tokens_per_expert)
    step, step_tensor = split_scale(op, "rate", rate)
    return torch.ops.thdops.expert_bias_update(bias.detach(), tokens_per_expert.detach(), step_tensor, step)


def _as_rows(op: str, argument: str, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x `[..., columns]` as `[T, columns]`, its mask as `[T]`."""
    if padding_mask is not None and padding_mask.shape != x.shape[:-1]:
        rule = f"have the leading dimensions of {argument}, {list(x.shape[:-1])}"
        raise refusal(op, "padding_mask", rule, f"shape {shape_of(padding_mask)}", f"pass one entry per row of {argument}")
    rows = x.flatten(end_dim=-2) if x.dim() > 1 else x.unsqueeze(0)
    return rows, None if padding_mask is None else padding_mask.flatten()


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def _save_z_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, factor, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(factor, lse)
    ctx.save_for_backward(factor, inputs[0], lse)


def _z_loss_backward(ctx: Any, grad_loss: Tensor | None, *nothing: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 4
    return torch.ops.thdops.moe_z_loss_grad(grad_loss, *ctx.saved_tensors), None, None, None


def _save_seq_aux_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, _, cu_seqlens, cu_seqlens_padded, *_ = inputs
    _, slopes, share = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(slopes, share)
    ctx.save_for_backward(slopes, share, cu_seqlens, cu_seqlens_padded)
    ctx.rows, ctx.dtype = scores.shape[0], scores.dtype


def _seq_aux_loss_backward(ctx: Any, grad_loss: Tensor | None, *nothing: None) -> tuple[Tensor | None, ...]:
    others = (None,) * 8
    if grad_loss is None:
        return None, *others
    return torch.ops.thdops.moe_seq_aux_loss_grad(grad_loss, *ctx.saved_tensors, ctx.rows, ctx.dtype), *others


# --- specs ------------------------------------------------------------------------------------------------------------------------


def _spec(name: str, schema: str, summary: str, cases: ModuleType, kernels: str, **rest: Any) -> None:
    pieces = {piece: getattr(contract, f"{piece}_{name}") for piece in ("check", "fake")}
    pieces |= {piece: getattr(cases, f"{name}_{piece}") for piece in ("samples", "refusals", "cost", "benches")}
    pieces["padding"] = getattr(cases, f"{name}_padding", None)
    cuda = f"{_KERNELS}_{kernels}:{name}"
    register(
        OpSpec(name=name, schema=schema, summary=summary, reference=getattr(reference, name), cuda=cuda, **pieces, **rest),
        REGISTRY,
    )


_spec(
    "tokens_per_expert",
    "(Tensor routing, Tensor? padding_mask=None, SymInt? num_experts=None) -> Tensor",
    "how many tokens each expert was chosen for, from a mask, indices or a bitmap",
    samples_count,
    "count",
)
_spec(
    "moe_z_loss",
    "(Tensor logits, Tensor? coeff_tensor, Tensor? padding_mask, float? coeff=None) -> (Tensor loss, Tensor factor, Tensor lse)",
    "z-loss of a router: mean over valid rows of the squared logsumexp",
    samples_z_loss,
    "z_loss",
    setup_context=_save_z_loss,
    backward=_z_loss_backward,
    no_gradient=("coeff_tensor", "factor", "lse"),
    roundings=8.0,  # a sum of T squares in another order than the reference's
)
_spec(
    "moe_z_loss_grad",
    "(Tensor grad_loss, Tensor factor, Tensor logits, Tensor lse) -> Tensor",
    "gradient of moe_z_loss",
    samples_z_loss,
    "z_loss",
    roundings=8.0,  # an exponential and four products in fp32
    pads_zeroed=True,
)
_spec(
    "moe_seq_aux_loss",
    "(Tensor scores, Tensor routing, Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? coeff_tensor, SymInt num_experts,"
    " SymInt topk, str reduction, float? coeff=None) -> (Tensor loss, Tensor slopes, Tensor share)",
    "load-balancing loss of each packed sequence by itself",
    samples_seq_aux,
    "seq_aux",
    setup_context=_save_seq_aux_loss,
    backward=_seq_aux_loss_backward,
    no_gradient=("coeff_tensor", "slopes", "share"),
    roundings=8.0,  # sums over rows and experts in another order than the reference's, and four roundings of the coefficient
)
_spec(
    "moe_seq_aux_loss_grad",
    "(Tensor grad_loss, Tensor slopes, Tensor share, Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt rows, ScalarType dtype)"
    " -> Tensor",
    "gradient of moe_seq_aux_loss: a row per sequence, stored dense to its valid rows",
    samples_seq_aux,
    "seq_aux",
    roundings=2.0,  # two products in fp32
    pads_zeroed=True,
)
_spec(
    "expert_bias_update",
    "(Tensor bias, Tensor tokens_per_expert, Tensor? rate_tensor, float? rate=None) -> Tensor",
    "the next expert bias of a router that balances without a loss",
    samples_bias,
    "bias",
    no_gradient=("bias", "tokens_per_expert", "rate_tensor"),
)
