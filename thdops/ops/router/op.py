"""Public functions and specs of the router ops.

T rows (tokens), E experts, K top-k, G groups of E/G experts, B sequences, S sets of sums (B, or 1 without cu_seqlens).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels import router as contract
from meta_kernels.contract import (
    check_integers,
    check_kinds,
    check_static,
    check_tensors,
    refusal,
    shape_of,
    split_count,
    split_scale,
)
from meta_kernels.router import RouterCall, TopkCall
from thdops.namespace import REGISTRY
from thdops.ops.router import benches, reference, refusals, samples, samples_router, samples_scores
from thdops.registry import OpSpec, register

_KERNELS = "thdops.ops.router.kernels"


class RouterSums(NamedTuple):
    """What the losses of `router` are made of, over the rows that count; with `cu_seqlens`, of each sequence by itself.

    A caller adds them up over its process groups, micro-batches or layers and then takes `aux_loss_from_sums` and
    `z_loss_from_sums`: exact for losses over a global batch. `scores` and `z` are differentiable.
    """

    scores: Tensor
    """fp32 `[E]` or `[B, E]`: sums of the aux scores."""
    counts: Tensor
    """int64 `[E]` or `[B, E]`: how often each expert is among the best K by aux score, without bias and groups."""
    z: Tensor
    """fp32 0-d, over all sequences: the sum of logsumexp(logits)^2."""
    num_tokens: Tensor
    """int64 0-d or `[B]`: rows that count."""


class RouterOutput(NamedTuple):
    """What `router` returns: where each row goes, and the losses with the sums they are made of."""

    probs: Tensor
    """In the dtype of the logits, `[..., E]` or `[..., K]`; differentiable."""
    routing: Tensor
    """Mask, indices or bitmap of the chosen experts."""
    tokens_per_expert: Tensor
    """int64 `[E]`: how many rows that count were sent to each expert, bias and groups included: for the update of a bias. The aux
    loss takes `sums.counts`, the choice by scores alone."""
    aux_loss: Tensor
    """fp32 0-d; differentiable."""
    z_loss: Tensor
    """fp32 0-d; differentiable."""
    sums: RouterSums


# --- public functions -------------------------------------------------------------------------------------------------------------


def router_topk(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    normalize: bool = True,
    expert_bias: Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    padding_mask: Tensor | None = None,
    probs: str = "dense",
    routing: str = "mask",
    index_dtype: torch.dtype = torch.int64,
    pad_routing: str = "nowhere",
    pad_index: int = -1,
) -> tuple[Tensor, Tensor]:
    """The K best experts of every row, and the weight of each.

    Every row chooses K different experts, whatever its logits hold: keys in descending order, equal keys by ascending index,
    -0.0 equal to +0.0, NaN below -inf. The key is the logit for a softmax, else a + `expert_bias`, where a is the score of the
    logit by itself: sigmoid(x), or sqrt(softplus(x)). All arithmetic is fp32. The formulas, and where they come from, are in
    thdops/ops/router/reference_scores.py.

    Args:
        logits: `[..., E]` fp32, bf16 or fp16 (fp64 on CPU), any strides.
        topk: K, from 1 to E.
        score_function: "softmax": weights are a softmax over the K chosen logits. "sigmoid", "sqrtsoftplus": weights are the
            chosen scores over their sum.
        pre_softmax: with "softmax" only: weights are the softmax over all E logits, taken at the chosen experts.
        normalize: False leaves "sigmoid" and "sqrtsoftplus" scores undivided, as they always are where K is 1.
        expert_bias: `[E]`, any float dtype, not with "softmax": added to the scores for the choice alone. No gradient.
        num_groups, group_topk: choose among the experts of the `group_topk` best of `num_groups` equal groups of neighbours. A
            group is worth the sum of its K / group_topk best keys. Both or neither; E is a multiple of `num_groups`, K one of
            `group_topk`.
        scaling_factor: multiplies the weights; None is 1.
        padding_mask: bool, the shape of logits without E; True = padding.
        probs: "dense": `[..., E]`, 0 at other experts. "topk": `[..., K]`, in the order of the indices (beside a mask: the same
            order, which the mask does not tell).
        routing: "mask": bool `[..., E]`. "indices": `[..., K]`, best first. "bitmap": uint8 `[..., ceil(E/8)]`, expert e is bit
            e % 8 of byte e // 8, spare bits 0; it has no order, so not with probs="topk".
        index_dtype: of the indices: int64, int32, or int16 up to 32767 experts.
        pad_routing: "nowhere": a padding row has weights +0.0, mask False, indices `pad_index`, bits 0, and gradient +0.0, whatever
            its logits hold. "keep": it is routed like any row, for dispatchers that need K experts of every row.
        pad_index: the index on padding rows: -1, or E, which sorts behind all experts.

    Returns:
        (probs in the dtype of logits, routing), contiguous. A NaN among the logits of a row stays in that row. The gradient of the
        logits is dense and contiguous, in their dtype; weights of experts that were not chosen pass none.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value.
    """
    op = "router_topk"
    numbers = {"topk": topk, "num_groups": num_groups, "group_topk": group_topk}
    check_integers(op, ("num_groups", "group_topk"), **numbers, pad_index=pad_index)
    check_static(op, scaling_factor=scaling_factor)
    check_kinds(op, str, score_function=score_function, probs=probs, routing=routing, pad_routing=pad_routing)
    check_kinds(op, bool, pre_softmax=pre_softmax, normalize=normalize)
    check_kinds(op, torch.dtype, index_dtype=index_dtype)
    rows, mask = _rows(op, logits, padding_mask, expert_bias=expert_bias)
    call = TopkCall(
        logits=rows,
        expert_bias=expert_bias,
        padding_mask=mask,
        score_function=score_function,
        pre_softmax=pre_softmax,
        normalize=normalize,
        probs_format=probs,
        routing_format=routing,
        index_dtype=index_dtype,
        pad_routing=pad_routing,
        pad_index=pad_index,
        **numbers,
        scaling_factor=scaling_factor,
    )
    weights, chosen_experts, _ = torch.ops.thdops.router_topk(*call)
    return _restored(weights, logits), _restored(chosen_experts, logits)


def router_scores(
    logits: Tensor, topk: int, score_function: str, padding_mask: Tensor | None = None, *, routing: str = "mask"
) -> tuple[Tensor, Tensor]:
    """The scores of all experts for the balancing loss, and the K best by them: no bias, no groups, no scaling.

    Scores sum to 1 over all experts, for every K: a softmax, or sigmoid or sqrtsoftplus scores over their sum.

    Args:
        logits: `[..., E]` fp32, bf16 or fp16 (fp64 on CPU), any strides.
        topk: K, from 1 to E. Order as `router_topk`.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        padding_mask: bool, the shape of logits without E; True = padding.
        routing: "mask": bool `[..., E]`. "bitmap": uint8 `[..., ceil(E/8)]`.

    Returns:
        (routing, scores `[..., E]` fp32, fp64 for fp64 logits), contiguous; False (or 0 bits) and +0.0 on padding rows, and
        gradient +0.0.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value.
    """
    check_integers("router_scores", topk=topk)
    check_kinds("router_scores", str, score_function=score_function, routing=routing)
    rows, mask = _rows("router_scores", logits, padding_mask)
    scores, best = torch.ops.thdops.router_scores(rows, mask, topk, score_function, routing)
    return _restored(best, logits), _restored(scores, logits)


def router(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    normalize: bool = True,
    expert_bias: Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    padding_mask: Tensor | None = None,
    probs: str = "dense",
    routing: str = "mask",
    index_dtype: torch.dtype = torch.int64,
    pad_routing: str = "nowhere",
    pad_index: int = -1,
    aux_score_function: str | None = None,
    aux_coeff: float | Tensor | None = None,
    z_coeff: float | Tensor | None = None,
    total_num_tokens: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    reduction: str = "mean",
) -> RouterOutput:
    """`router_topk`, its load-balancing loss and its z-loss, in one pass over the logits forward and one backward.

    Equal to `router_topk`, `router_scores`, `moe_aux_loss` and a z-loss one after the other, except that scores are never written
    to memory. Bitwise repeatable. Counts and coefficients may be tensors: kernels read them, so a replayed CUDA graph and a
    compiled program follow their contents; Python floats are constants of both. Sources: the aux loss of the Switch Transformer
    (Fedus et al., 2021), per sequence that of DeepSeek-V3 (2024), the z-loss of ST-MoE (Zoph et al., 2022).

    A row counts unless `padding_mask` marks it or, with `cu_seqlens`, it is no valid row of a sequence. Rows that do not count
    are padding (see `pad_routing`): they take no part in any sum, whatever they hold. With n rows that count, counts[e] and
    scores[e] summed over them,

        aux_loss = aux_coeff * E / (K * N^2) * sum_e counts[e] * scores[e],  N = total_num_tokens, or n where that is None
        z_loss = z_coeff / max(n, 1) * sum of logsumexp(logits)^2

    and with `cu_seqlens` an aux loss of that form for each sequence, N being its own rows, reduced over sequences. Where a
    coefficient is 0 (as without rows that count) loss and gradient are exactly 0, whatever the sums hold.

    Args:
        logits .. pad_index: as `router_topk`. With `cu_seqlens` the rows of logits, its leading dimensions flattened, are packed.
        aux_score_function: of the aux loss; None is `score_function`. The aux loss counts the best K by its own scores.
        aux_coeff, z_coeff: floats, or one-element fp32 tensors on the device of logits; None is 0. No gradient.
        total_num_tokens: N as an int >= 0 or a one-element int32, int64 or fp32 tensor, for losses of a larger batch than this
            one; not with `cu_seqlens`.
        cu_seqlens: int32 or int64 `[B+1]` on the device of logits: valid rows per sequence as prefix sums; asks for one aux loss
            per sequence.
        cu_seqlens_padded: physical offsets, same shape and dtype; None where sequences stand back to back.
        reduction: over sequences: "sum", or "mean" over those that have a row that counts.

    Returns:
        A `RouterOutput`: probs, routing, tokens_per_expert, aux_loss, z_loss, and sums to reduce elsewhere. Losses and sums are
        fp32 (fp64 for fp64 logits).

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value.
    """
    op = "router"
    numbers = {"topk": topk, "num_groups": num_groups, "group_topk": group_topk}
    check_integers(op, ("num_groups", "group_topk"), **numbers, pad_index=pad_index)
    check_static(op, scaling_factor=scaling_factor)
    aux_score_function = score_function if aux_score_function is None else aux_score_function
    names = {"aux_score_function": aux_score_function, "reduction": reduction, "probs": probs, "routing": routing}
    check_kinds(op, str, score_function=score_function, pad_routing=pad_routing, **names)
    check_kinds(op, bool, pre_softmax=pre_softmax, normalize=normalize)
    check_kinds(op, torch.dtype, index_dtype=index_dtype)
    rows, mask = _rows(
        op, logits, padding_mask, expert_bias=expert_bias, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded
    )
    count, count_tensor = (None, None) if total_num_tokens is None else split_count(op, "total_num_tokens", total_num_tokens)
    aux, aux_tensor = (None, None) if aux_coeff is None else split_scale(op, "aux_coeff", aux_coeff)
    z, z_tensor = (None, None) if z_coeff is None else split_scale(op, "z_coeff", z_coeff)
    call = RouterCall(
        logits=rows,
        expert_bias=expert_bias,
        padding_mask=mask,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        total_num_tokens_tensor=count_tensor,
        aux_coeff_tensor=aux_tensor,
        z_coeff_tensor=z_tensor,
        pre_softmax=pre_softmax,
        normalize=normalize,
        probs_format=probs,
        routing_format=routing,
        index_dtype=index_dtype,
        pad_routing=pad_routing,
        pad_index=pad_index,
        total_num_tokens=count,
        aux_coeff=aux,
        z_coeff=z,
        **numbers,
        scaling_factor=scaling_factor,
        score_function=score_function,
        aux_score_function=aux_score_function,
        reduction=reduction,
    )
    weights, chosen_experts, _, tokens_per_expert, aux_loss, z_loss, scores, counts, z_sum, num_tokens, _ = torch.ops.thdops.router(
        *call
    )
    if cu_seqlens is None:
        scores, counts, num_tokens = scores[0], counts[0], num_tokens[0]
    sums = RouterSums(scores, counts, z_sum, num_tokens)
    return RouterOutput(_restored(weights, logits), _restored(chosen_experts, logits), tokens_per_expert, aux_loss, z_loss, sums)


# --- arguments of public functions ------------------------------------------------------------------------------------------------


def _rows(op: str, logits: Tensor, padding_mask: Tensor | None, **others: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(logits [T, E], padding_mask [T]), leading dimensions flattened. `others` may be None."""
    check_tensors(op, ("padding_mask", *others), logits=logits, padding_mask=padding_mask, **others)
    if logits.dim() == 2 or logits.dim() == 0:  # the op refuses a scalar by name
        return logits, padding_mask
    if padding_mask is not None and padding_mask.shape != logits.shape[:-1]:
        rule = f"have the shape of logits without E, [{', '.join(map(str, logits.shape[:-1]))}]"
        raise refusal(op, "padding_mask", rule, f"shape {shape_of(padding_mask)}", "reshape it")
    rows = logits.flatten(0, -2) if logits.dim() > 2 else logits[None]
    return rows, None if padding_mask is None else padding_mask.reshape(-1)


def _restored(result: Tensor, logits: Tensor) -> Tensor:
    """[T, ...] with the leading dimensions of `logits` in place of T."""
    return result if logits.dim() == 2 else result.view(*logits.shape[:-1], result.shape[1])


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def _save_topk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = TopkCall(*inputs)
    _, _, chosen = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.logits, chosen)
    ctx.settings = (call.score_function, call.pre_softmax, call.normalize, call.scaling_factor, call.probs_format)


def _topk_backward(ctx: Any, grad_probs: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    others = (None,) * (len(TopkCall._fields) - 1)
    if grad_probs is None:
        return None, *others
    return torch.ops.thdops.router_topk_grad(grad_probs, *ctx.saved_tensors, *ctx.settings), *others


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, padding_mask, _, score_function, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, padding_mask)
    ctx.score_function = score_function


def _scores_backward(ctx: Any, grad_scores: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    others = (None,) * 4
    if grad_scores is None:
        return None, *others
    return torch.ops.thdops.router_scores_grad(grad_scores, *ctx.saved_tensors, ctx.score_function), *others


def _save_router(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = RouterCall(*inputs)
    chosen, counts, coefficients = output[2], output[7], output[10]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(coefficients)
    ctx.save_for_backward(call.logits, chosen, counts, coefficients, call.padding_mask, call.cu_seqlens, call.cu_seqlens_padded)
    ctx.settings = (call.score_function, call.pre_softmax, call.normalize, call.scaling_factor, call.probs_format)
    ctx.settings += (call.aux_score_function,)


def _router_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (len(RouterCall._fields) - 1)
    probs, _, _, _, aux, z, score_sums, _, z_sum, _, _ = grads
    incoming = (probs, aux, z, score_sums, z_sum)
    if all(grad is None for grad in incoming):
        return None, *others
    logits, chosen, *metadata = ctx.saved_tensors  # read once: activation checkpointing recomputes them once
    return torch.ops.thdops.router_grad(logits, chosen, *incoming, *metadata, *ctx.settings), *others


# --- specs ------------------------------------------------------------------------------------------------------------------------

_SCORING = "str score_function, bool pre_softmax, bool normalize"
_CHOICE = (
    f"SymInt topk, {_SCORING}, SymInt? num_groups, SymInt? group_topk, float? scaling_factor, str probs_format,"
    " str routing_format, ScalarType index_dtype, str pad_routing, SymInt pad_index"
)
_CHOSEN = "Tensor probs, Tensor routing, Tensor chosen"
_SEQUENCES = "Tensor? padding_mask, Tensor? cu_seqlens, Tensor? cu_seqlens_padded"


def _spec(name: str, schema: str, summary: str, calls: ModuleType, **rest: Any) -> None:
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            check=getattr(contract, f"check_{name}"),
            fake=getattr(contract, f"fake_{name}"),
            reference=getattr(reference, name),
            cuda=f"{_KERNELS}:{name}",
            samples=getattr(calls, f"{name}_samples"),
            refusals=getattr(refusals, f"{name}_refusals"),
            padding=getattr(calls, f"{name}_padding"),
            cost=getattr(benches, f"{name}_cost"),
            benches=getattr(benches, f"{name}_benches"),
            pads_zeroed=True,
            launcher_checks=True,
            # A softmax or a normalised score: an exponential, a sum of E numbers, a quotient.
            roundings=8.0,
            **rest,
        ),
        REGISTRY,
    )


_spec(
    "router_topk",
    f"(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, {_CHOICE}) -> ({_CHOSEN})",
    "the K best experts of each row and their weights; ties by index, NaN last, padding rows nowhere",
    samples,
    setup_context=_save_topk,
    backward=_topk_backward,
    no_gradient=("expert_bias",),
    save=True,
)
_spec(
    "router_topk_grad",
    f"(Tensor grad_probs, Tensor logits, Tensor chosen, {_SCORING}, float? scaling_factor, str probs_format) -> Tensor",
    "gradient of router_topk",
    samples,
)
_spec(
    "router_scores",
    '(Tensor logits, Tensor? padding_mask, SymInt topk, str score_function, str routing_format="mask")'
    " -> (Tensor scores, Tensor routing)",
    "scores of all experts for the balancing loss, and the K best by them",
    samples_scores,
    setup_context=_save_scores,
    backward=_scores_backward,
    save=True,
)
_spec(
    "router_scores_grad",
    "(Tensor grad_scores, Tensor logits, Tensor? padding_mask, str score_function) -> Tensor",
    "gradient of router_scores",
    samples_scores,
)
_spec(
    "router",
    "(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, Tensor? cu_seqlens, Tensor? cu_seqlens_padded,"
    " Tensor? total_num_tokens_tensor, Tensor? aux_coeff_tensor, Tensor? z_coeff_tensor,"
    f" {_CHOICE}, str aux_score_function, str reduction, SymInt? total_num_tokens=None, float? aux_coeff=None,"
    f" float? z_coeff=None) -> ({_CHOSEN}, Tensor tokens_per_expert, Tensor aux_loss, Tensor z_loss, Tensor score_sums,"
    " Tensor counts, Tensor z_sum, Tensor num_tokens, Tensor coefficients)",
    "router_topk, its aux loss and z-loss, and the sums they are made of, in one pass over the logits",
    samples_router,
    setup_context=_save_router,
    backward=_router_backward,
    no_gradient=("expert_bias", "total_num_tokens_tensor", "aux_coeff_tensor", "z_coeff_tensor", "coefficients"),
    save=True,
)
_spec(
    "router_grad",
    "(Tensor logits, Tensor chosen, Tensor? grad_probs, Tensor? grad_aux, Tensor? grad_z, Tensor? grad_score_sums,"
    f" Tensor? grad_z_sum, Tensor counts, Tensor coefficients, {_SEQUENCES}, {_SCORING}, float? scaling_factor,"
    " str probs_format, str aux_score_function) -> Tensor",
    "gradient of router: what comes through probs, losses and sums, in one pass over the logits",
    samples_router,
)
