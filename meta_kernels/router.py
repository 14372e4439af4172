"""Contracts of the router ops.

T rows (tokens), E experts, K top-k, G groups of E/G experts, B sequences, S = B sets of sums (1 without cu_seqlens).
logits [T, E]. What a call chose: mask bool [T, E], indices [T, K], or bitmap uint8 [T, ceil(E/8)] (bit e % 8 of byte e // 8).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.contract import (
    accumulation_dtype,
    check_choice,
    check_count,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_dtype_and_device,
    check_either,
    check_float,
    check_mask,
    check_one_element,
    check_rank,
    contiguous,
    dtype_of,
    names_of,
    refusal,
    shape_of,
    takes,
)
from meta_kernels.padding import check_row_numbers

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
PROBS_FORMATS = ("dense", "topk")
ROUTING_FORMATS = ("mask", "indices", "bitmap")
PAD_ROUTING = ("nowhere", "keep")
REDUCTIONS = ("mean", "sum")
EPS = 1e-20
"""Beside a sum of scores that is divided by."""

_ROUTED_INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)
_COUNT_DTYPES = (torch.int32, torch.int64, torch.float32)
_FLOAT32 = (torch.float32,)


class TopkCall(NamedTuple):
    """The arguments of the op `router_topk`, in the order of its schema."""

    logits: Tensor
    expert_bias: Tensor | None
    padding_mask: Tensor | None
    topk: int
    score_function: str
    pre_softmax: bool
    normalize: bool
    num_groups: int | None
    group_topk: int | None
    scaling_factor: float | None
    probs_format: str
    routing_format: str
    index_dtype: torch.dtype
    pad_routing: str
    pad_index: int


class RouterCall(NamedTuple):
    """The arguments of the op `router`: those of `router_topk`, and what its sums and losses need."""

    logits: Tensor
    expert_bias: Tensor | None
    padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    total_num_tokens_tensor: Tensor | None
    aux_coeff_tensor: Tensor | None
    z_coeff_tensor: Tensor | None
    topk: int
    score_function: str
    pre_softmax: bool
    normalize: bool
    num_groups: int | None
    group_topk: int | None
    scaling_factor: float | None
    probs_format: str
    routing_format: str
    index_dtype: torch.dtype
    pad_routing: str
    pad_index: int
    aux_score_function: str
    reduction: str
    total_num_tokens: int | None = None
    aux_coeff: float | None = None
    z_coeff: float | None = None


class RouterGradCall(NamedTuple):
    """The arguments of the op `router_grad`: incoming gradients (None = zero), then what the forward saved and its settings."""

    logits: Tensor
    chosen: Tensor
    grad_probs: Tensor | None
    grad_aux: Tensor | None
    grad_z: Tensor | None
    grad_score_sums: Tensor | None
    grad_z_sum: Tensor | None
    counts: Tensor
    coefficients: Tensor
    padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    score_function: str
    pre_softmax: bool
    normalize: bool
    scaling_factor: float | None
    probs_format: str
    aux_score_function: str


def sets_of_sums(cu_seqlens: Tensor | None) -> int:
    """S: one set of sums per sequence, or one for all rows."""
    return 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1


# --- router_topk ------------------------------------------------------------------------------------------------------------------


@takes(TopkCall)
def check_router_topk(call: TopkCall) -> None:
    _check_topk_call("router_topk", call)


@takes(TopkCall)
def fake_router_topk(call: TopkCall) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_topk_call(call)


def check_router_topk_grad(
    grad_probs: Tensor,
    logits: Tensor,
    chosen: Tensor,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
) -> None:
    op = "router_topk_grad"
    _check_logits(op, logits)
    _check_scoring(op, score_function, pre_softmax, normalize)
    check_choice(op, "probs", probs_format, PROBS_FORMATS)
    _check_chosen(op, chosen, logits)
    _check_grad_probs(op, grad_probs, logits, chosen, probs_format)


def fake_router_topk_grad(
    grad_probs: Tensor,
    logits: Tensor,
    chosen: Tensor,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
) -> Tensor:
    return _like(logits)


# --- router_scores ----------------------------------------------------------------------------------------------------------------


def check_router_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str = "mask"
) -> None:
    op = "router_scores"
    _check_logits(op, logits)
    _check_topk(op, topk, logits)
    check_choice(op, "score_function", score_function, SCORE_FUNCTIONS)
    if routing_format == "indices":
        raise refusal(op, "routing", "be mask or bitmap", "'indices'", "call router_topk, which orders them")
    check_choice(op, "routing", routing_format, ROUTING_FORMATS)
    _check_padding_mask(op, padding_mask, logits)


def fake_router_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str = "mask"
) -> tuple[Tensor, Tensor]:
    scores = contiguous(*logits.shape, dtype=accumulation_dtype(logits.dtype), device=logits.device)
    return scores, _fake_map(logits, routing_format)


def check_router_scores_grad(grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str) -> None:
    op = "router_scores_grad"
    _check_logits(op, logits)
    check_choice(op, "score_function", score_function, SCORE_FUNCTIONS)
    _check_saved(op, "grad_scores", grad_scores, logits.shape, accumulation_dtype(logits.dtype), logits)
    _check_padding_mask(op, padding_mask, logits)


def fake_router_scores_grad(grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str) -> Tensor:
    return _like(logits)


# --- router -----------------------------------------------------------------------------------------------------------------------


@takes(RouterCall)
def check_router(call: RouterCall) -> None:
    op = "router"
    _check_topk_call(op, call)
    check_choice(op, "aux_score_function", call.aux_score_function, SCORE_FUNCTIONS)
    check_choice(op, "reduction", call.reduction, REDUCTIONS)
    _check_sequences(op, call.logits, call.cu_seqlens, call.cu_seqlens_padded)
    _check_number(op, "total_num_tokens", call.total_num_tokens, call.total_num_tokens_tensor, _COUNT_DTYPES, "an int", call.logits)
    if call.total_num_tokens is not None:
        check_count(op, "total_num_tokens", call.total_num_tokens, 0)
    if call.cu_seqlens is not None and (call.total_num_tokens is not None or call.total_num_tokens_tensor is not None):
        fix = "leave it out: each sequence counts its own rows"
        raise refusal(op, "total_num_tokens", "be None where cu_seqlens is given", "both", fix)
    _check_number(op, "aux_coeff", call.aux_coeff, call.aux_coeff_tensor, _FLOAT32, "a float", call.logits)
    _check_number(op, "z_coeff", call.z_coeff, call.z_coeff_tensor, _FLOAT32, "a float", call.logits)


@takes(RouterCall)
def fake_router(call: RouterCall) -> tuple[Tensor, ...]:
    experts, sets = call.logits.shape[1], sets_of_sums(call.cu_seqlens)
    device, dtype = call.logits.device, accumulation_dtype(call.logits.dtype)

    def count(*shape: int) -> Tensor:
        return contiguous(*shape, dtype=torch.int64, device=device)

    def real(*shape: int) -> Tensor:
        return contiguous(*shape, dtype=dtype, device=device)

    probs, routing, chosen = _fake_topk_call(call)
    tokens_per_expert, aux_loss, z_loss = count(experts), real(), real()
    score_sums, counts, z_sum, num_tokens = real(sets, experts), count(sets, experts), real(), count(sets)
    coefficients = real(sets + 1)
    return probs, routing, chosen, tokens_per_expert, aux_loss, z_loss, score_sums, counts, z_sum, num_tokens, coefficients


@takes(RouterGradCall)
def check_router_grad(call: RouterGradCall) -> None:
    op, logits = "router_grad", call.logits
    _check_logits(op, logits)
    _check_scoring(op, call.score_function, call.pre_softmax, call.normalize)
    check_choice(op, "probs", call.probs_format, PROBS_FORMATS)
    check_choice(op, "aux_score_function", call.aux_score_function, SCORE_FUNCTIONS)
    _check_chosen(op, call.chosen, logits)
    _check_padding_mask(op, call.padding_mask, logits)
    _check_sequences(op, logits, call.cu_seqlens, call.cu_seqlens_padded)
    if call.grad_probs is not None:
        _check_grad_probs(op, call.grad_probs, logits, call.chosen, call.probs_format)
    dtype, sets = accumulation_dtype(logits.dtype), sets_of_sums(call.cu_seqlens)
    sums = (sets, logits.shape[1])
    for name, tensor, shape in (
        ("grad_aux", call.grad_aux, ()),
        ("grad_z", call.grad_z, ()),
        ("grad_score_sums", call.grad_score_sums, sums),
        ("grad_z_sum", call.grad_z_sum, ()),
        ("coefficients", call.coefficients, (sets + 1,)),
    ):
        if tensor is not None:
            _check_saved(op, name, tensor, shape, dtype, logits)
    _check_saved(op, "counts", call.counts, sums, torch.int64, logits)
    _check_contiguous(op, "counts", call.counts)


@takes(RouterGradCall)
def fake_router_grad(call: RouterGradCall) -> Tensor:
    return _like(call.logits)


# --- what they share: fakes -------------------------------------------------------------------------------------------------------


def _like(logits: Tensor) -> Tensor:
    return contiguous(*logits.shape, dtype=logits.dtype, device=logits.device)


def _fake_map(logits: Tensor, routing_format: str) -> Tensor:
    rows, experts = logits.shape
    if routing_format == "mask":
        return contiguous(rows, experts, dtype=torch.bool, device=logits.device)
    return contiguous(rows, (experts + 7) // 8, dtype=torch.uint8, device=logits.device)


def _fake_topk_call(call: TopkCall | RouterCall) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = call.logits.shape
    columns = experts if call.probs_format == "dense" else call.topk
    device = call.logits.device
    if call.routing_format == "indices":
        routing = contiguous(rows, call.topk, dtype=call.index_dtype, device=device)
    else:
        routing = _fake_map(call.logits, call.routing_format)
    probs = contiguous(rows, columns, dtype=call.logits.dtype, device=device)
    return probs, routing, contiguous(rows, call.topk, dtype=torch.int32, device=device)


# --- what they share: checks ------------------------------------------------------------------------------------------------------


def _check_logits(op: str, logits: Tensor) -> None:
    check_rank(op, "logits", logits, 2, "[T, E]")
    check_float(op, "logits", logits)
    if logits.shape[1] == 0:
        raise refusal(op, "logits", "have at least one column", f"shape {shape_of(logits)}", "pass one column per expert")


def _check_topk(op: str, topk: int, logits: Tensor) -> None:
    if topk < 1 or topk > logits.shape[1]:
        raise refusal(op, "topk", f"be from 1 to the number of experts ({logits.shape[1]})", topk, "pass another")


def _check_topk_call(op: str, call: TopkCall | RouterCall) -> None:
    _check_logits(op, call.logits)
    _check_topk(op, call.topk, call.logits)
    _check_scoring(op, call.score_function, call.pre_softmax, call.normalize)
    if call.expert_bias is not None:
        _check_bias(op, call.expert_bias, call.logits, call.score_function)
    _check_groups(op, call.topk, call.logits.shape[1], call.num_groups, call.group_topk)
    _check_formats(op, call)
    _check_padding_mask(op, call.padding_mask, call.logits)


def _check_scoring(op: str, score_function: str, pre_softmax: bool, normalize: bool) -> None:
    check_choice(op, "score_function", score_function, SCORE_FUNCTIONS)
    if pre_softmax and score_function != "softmax":
        rule, got = "be False unless score_function is softmax", f"True with {score_function!r}"
        raise refusal(op, "pre_softmax", rule, got, "pass normalize=False for scores that are not renormalised")
    if score_function == "softmax" and not normalize and not pre_softmax:
        rule, got = "be True for a softmax over the chosen logits", "False"
        raise refusal(op, "normalize", rule, got, "pass pre_softmax=True for the softmax over all experts")


def _check_bias(op: str, bias: Tensor, logits: Tensor, score_function: str) -> None:
    if score_function == "softmax":
        rule, got = "be None with score_function 'softmax'", "a tensor"
        raise refusal(op, "expert_bias", rule, got, "a bias is added to sigmoid or sqrtsoftplus scores")
    check_float(op, "expert_bias", bias)
    if bias.dim() != 1 or bias.shape[0] != logits.shape[1]:
        rule = f"be [E] with one entry per expert ({logits.shape[1]})"
        raise refusal(op, "expert_bias", rule, f"shape {shape_of(bias)}", "pass one number per column of logits")
    check_device(op, "expert_bias", bias, logits.device, "logits")


def _check_groups(op: str, topk: int, experts: int, num_groups: int | None, group_topk: int | None) -> None:
    if num_groups is None and group_topk is None:
        return
    if num_groups is None or group_topk is None:
        missing, present = ("num_groups", "group_topk") if num_groups is None else ("group_topk", "num_groups")
        raise refusal(op, missing, f"be given where {present} is", "None", "pass both or neither")
    if num_groups < 1 or experts % num_groups != 0:
        raise refusal(op, "num_groups", f"divide the number of experts ({experts})", num_groups, "groups are equally large")
    if group_topk < 1 or group_topk > num_groups:
        raise refusal(op, "group_topk", f"be from 1 to num_groups ({num_groups})", group_topk, "pass another")
    if topk % group_topk != 0:
        rule = f"be a multiple of group_topk ({group_topk})"
        raise refusal(op, "topk", rule, topk, "a group is ranked by its topk / group_topk best experts")
    if topk > group_topk * (experts // num_groups):
        rule = f"be at most the experts of {group_topk} groups ({group_topk * (experts // num_groups)})"
        raise refusal(op, "topk", rule, topk, "choose more groups")


def _check_formats(op: str, call: TopkCall | RouterCall) -> None:
    experts = call.logits.shape[1]
    check_choice(op, "probs", call.probs_format, PROBS_FORMATS)
    check_choice(op, "routing", call.routing_format, ROUTING_FORMATS)
    check_choice(op, "pad_routing", call.pad_routing, PAD_ROUTING)
    if call.probs_format == "topk" and call.routing_format == "bitmap":
        raise refusal(op, "routing", "have an order with probs='topk'", "'bitmap'", "pass routing='indices', or probs='dense'")
    if call.index_dtype not in _ROUTED_INDEX_DTYPES:
        got = str(call.index_dtype).removeprefix("torch.")
        raise refusal(op, "index_dtype", f"be {names_of(_ROUTED_INDEX_DTYPES)}", got, "pass one of these", TypeError)
    if call.routing_format == "indices" and call.index_dtype == torch.int16 and experts > 2**15 - 1:
        raise refusal(op, "index_dtype", f"hold {experts} experts", "int16", "pass torch.int32")
    if call.pad_index not in (-1, experts):
        raise refusal(op, "pad_index", f"be -1 or the number of experts ({experts})", call.pad_index, "choose one")


def _check_padding_mask(op: str, mask: Tensor | None, logits: Tensor) -> None:
    if mask is None:
        return
    check_mask(op, mask, logits.device, "logits")
    if mask.dim() != 1 or mask.shape[0] != logits.shape[0]:
        rule = f"be [T] with one entry per row of logits ({logits.shape[0]})"
        raise refusal(op, "padding_mask", rule, f"shape {shape_of(mask)}", "flatten it like the rows of logits")


def _check_sequences(op: str, logits: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None) -> None:
    if cu_seqlens is None:
        if cu_seqlens_padded is not None:
            raise refusal(op, "cu_seqlens_padded", "come with cu_seqlens", "it alone", "pass both or neither")
        return
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded, logits.device, "logits")
    check_row_numbers(op, "logits", logits.shape[0], cu_seqlens)


def _check_number(
    op: str,
    argument: str,
    value: float | None,
    tensor: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    kind: str,
    logits: Tensor,
) -> None:
    """A Python number, a one-element tensor, or neither."""
    if tensor is None:
        return
    check_dtype_and_device(op, argument, tensor, dtypes, logits.device, "logits")
    check_one_element(op, argument, tensor)
    if value is not None:
        check_either(op, argument, value, tensor, kind)


def _check_chosen(op: str, chosen: Tensor, logits: Tensor) -> None:
    rows, experts = logits.shape
    check_dtype(op, "chosen", chosen, (torch.int32,), "pass the forward's")
    if chosen.dim() != 2 or chosen.shape[0] != rows or chosen.shape[1] < 1 or chosen.shape[1] > experts:
        rule = f"be [T, K] with T = {rows} rows and K from 1 to {experts}"
        raise refusal(op, "chosen", rule, f"shape {shape_of(chosen)}", "pass the forward's")
    _check_contiguous(op, "chosen", chosen)
    check_device(op, "chosen", chosen, logits.device, "logits")


def _check_grad_probs(op: str, grad_probs: Tensor, logits: Tensor, chosen: Tensor, probs_format: str) -> None:
    shape = logits.shape if probs_format == "dense" else chosen.shape
    _check_saved(op, "grad_probs", grad_probs, shape, logits.dtype, logits)


def _check_saved(op: str, argument: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, logits: Tensor) -> None:
    """What the forward returned, or a gradient of it."""
    if tensor.dtype != dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise refusal(op, argument, f"be {wanted}", dtype_of(tensor), "pass the forward's, or its gradient", TypeError)
    if tensor.shape != shape:
        wanted = f"[{', '.join(map(str, shape))}]"
        raise refusal(op, argument, f"have shape {wanted}", shape_of(tensor), "pass the forward's, or its gradient")
    check_device(op, argument, tensor, logits.device, "logits")


def _check_contiguous(op: str, argument: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise refusal(op, argument, "be contiguous", f"strides {list(tensor.stride())}", "pass the forward's")
