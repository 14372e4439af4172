"""Contracts of the balancing ops: what is counted and lost about a router's choices, besides the aux loss.

T rows (tokens), E experts, K top-k, B packed sequences, L layers. What a router chose ("routing") comes in three formats, told
apart by dtype: mask bool [T, E]; indices int16, int32 or int64 [T, K], where an id outside [0, E) counts nowhere; bitmap uint8
[T, ceil(E/8)], expert e being bit e % 8 of byte e // 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    FLOAT_DTYPES,
    accumulation_dtype,
    check_choice,
    check_count,
    check_cu_seqlens,
    check_device,
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
)

REDUCTIONS = ("mean", "sum", "none")
_ID_DTYPES = (torch.int16, torch.int32, torch.int64)
_COUNT_DTYPES = (torch.int32, torch.int64, torch.float32)
_FLOAT32 = (torch.float32,)


# --- rules that these ops share ---------------------------------------------------------------------------------------------------


def routing_format(routing: Tensor) -> str:
    """mask, bitmap or indices."""
    return {torch.bool: "mask", torch.uint8: "bitmap"}.get(routing.dtype, "indices")


def _check_routing(op: str, routing: Tensor, num_experts: int | None) -> None:
    if routing.dtype not in (torch.bool, torch.uint8, *_ID_DTYPES):
        rule = f"be bool (a mask), {names_of(_ID_DTYPES)} (indices) or uint8 (a bitmap)"
        raise refusal(op, "routing", rule, dtype_of(routing), "pass what the router returned", TypeError)
    check_rank(op, "routing", routing, 2, "[T, E], [T, K] or [T, ceil(E/8)]")
    form, columns = routing_format(routing), routing.shape[1]
    if form == "mask":
        if columns == 0 or (num_experts is not None and columns != num_experts):
            rule = "have a column per expert" + ("" if num_experts is None else f" ({num_experts})")
            raise refusal(op, "routing", rule, f"shape {shape_of(routing)}", "pass the mask [T, E], and E or None as num_experts")
        return
    if num_experts is None:
        got = f"None with routing {dtype_of(routing)}{shape_of(routing)}"
        raise refusal(op, "num_experts", "be given for indices and bitmaps", got, "only a mask tells the number of experts")
    check_count(op, "num_experts", num_experts, 1)
    if form == "bitmap" and columns != (num_experts + 7) // 8:
        rule = f"have a bit per expert, ceil({num_experts}/8) bytes a row, where it is uint8"
        raise refusal(op, "routing", rule, f"shape {shape_of(routing)}", "pass the bitmap, or a mask as bool")


def experts_of(routing: Tensor, num_experts: int | None) -> int:
    """E."""
    return routing.shape[1] if num_experts is None else num_experts


def _check_rows_mask(op: str, mask: Tensor | None, rows: int, device: torch.device, owner: str) -> None:
    if mask is None:
        return
    check_mask(op, mask, device, owner)
    if mask.dim() != 1 or mask.shape[0] != rows:
        rule = f"be [T] with one entry per row of {owner} ({rows})"
        raise refusal(op, "padding_mask", rule, f"shape {shape_of(mask)}", f"flatten it like the rows of {owner}")


def _check_scale(op: str, argument: str, value: float | None, tensor: Tensor | None, device: torch.device, owner: str) -> None:
    """A float, or an fp32 tensor of one element."""
    check_either(op, argument, value, tensor, "a float")
    if tensor is not None:
        _check_scalar(op, argument, tensor, device, owner)


def _check_scalar(op: str, argument: str, tensor: Tensor, device: torch.device, owner: str) -> None:
    check_dtype_and_device(op, argument, tensor, _FLOAT32, device, owner)
    check_one_element(op, argument, tensor)


# --- tokens_per_expert ------------------------------------------------------------------------------------------------------------


def check_tokens_per_expert(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> None:
    op = "tokens_per_expert"
    _check_routing(op, routing, num_experts)
    _check_rows_mask(op, padding_mask, routing.shape[0], routing.device, "routing")


def fake_tokens_per_expert(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Tensor:
    return contiguous(experts_of(routing, num_experts), dtype=torch.int64, device=routing.device)


# --- moe_z_loss -------------------------------------------------------------------------------------------------------------------


def _check_logits(op: str, logits: Tensor) -> None:
    check_float(op, "logits", logits)
    check_rank(op, "logits", logits, 2, "[T, E]")
    if logits.shape[1] == 0:
        raise refusal(op, "logits", "have at least one expert", f"shape {shape_of(logits)}", "pass [T, E]")


def check_moe_z_loss(logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None) -> None:
    op = "moe_z_loss"
    _check_logits(op, logits)
    _check_scale(op, "coeff", coeff, coeff_tensor, logits.device, "logits")
    _check_rows_mask(op, padding_mask, logits.shape[0], logits.device, "logits")


def fake_moe_z_loss(
    logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, device = accumulation_dtype(logits.dtype), logits.device
    loss, factor = contiguous(dtype=dtype, device=device), contiguous(dtype=dtype, device=device)
    return loss, factor, contiguous(logits.shape[0], dtype=dtype, device=device)


def check_moe_z_loss_grad(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> None:
    op = "moe_z_loss_grad"
    _check_logits(op, logits)
    for name, scalar in (("grad_loss", grad_loss), ("factor", factor)):
        _check_scalar(op, name, scalar, logits.device, "logits")
    check_dtype_and_device(op, "lse", lse, _FLOAT32, logits.device, "logits")
    if lse.dim() != 1 or lse.shape[0] != logits.shape[0]:
        rule = f"be [T] with one entry per row of logits ({logits.shape[0]})"
        raise refusal(op, "lse", rule, f"shape {shape_of(lse)}", "pass what the forward returned")


def fake_moe_z_loss_grad(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Tensor:
    return contiguous(*logits.shape, dtype=logits.dtype, device=logits.device)


# --- moe_seq_aux_loss -------------------------------------------------------------------------------------------------------------


def check_moe_seq_aux_loss(
    scores: Tensor,
    routing: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    coeff_tensor: Tensor | None,
    num_experts: int,
    topk: int,
    reduction: str,
    coeff: float | None = None,
) -> None:
    op = "moe_seq_aux_loss"
    check_float(op, "scores", scores)
    check_rank(op, "scores", scores, 2, "[T, E]")
    check_count(op, "num_experts", num_experts, 1)
    if scores.shape[1] != num_experts:
        rule = f"have a column per expert ({num_experts})"
        raise refusal(op, "scores", rule, f"shape {shape_of(scores)}", "pass the scores over all experts: [T, E]")
    if topk < 1 or topk > num_experts:
        raise refusal(op, "topk", f"be from 1 to num_experts ({num_experts})", topk, "pass the router's top-k")
    _check_routing(op, routing, num_experts)
    check_device(op, "routing", routing, scores.device, "scores")
    if routing.shape[0] != scores.shape[0]:
        rule = f"have the rows of scores ({scores.shape[0]})"
        raise refusal(op, "routing", rule, f"shape {shape_of(routing)}", "pass both of the same tokens")
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded, scores.device, "scores")
    _check_scale(op, "coeff", coeff, coeff_tensor, scores.device, "scores")
    check_choice(op, "reduction", reduction, REDUCTIONS)


def fake_moe_seq_aux_loss(
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
    dtype, device = accumulation_dtype(scores.dtype), scores.device
    sequences = cu_seqlens.shape[0] - 1
    loss = contiguous(*((sequences,) if reduction == "none" else ()), dtype=dtype, device=device)
    return loss, contiguous(sequences, num_experts, dtype=dtype, device=device), contiguous(dtype=dtype, device=device)


def check_moe_seq_aux_loss_grad(
    grad_loss: Tensor,
    slopes: Tensor,
    share: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> None:
    op = "moe_seq_aux_loss_grad"
    device = slopes.device
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded, device, "slopes")
    sequences = cu_seqlens.shape[0] - 1
    check_dtype_and_device(op, "slopes", slopes, _FLOAT32, device, "slopes")
    if slopes.dim() != 2 or slopes.shape[0] != sequences or slopes.shape[1] == 0:
        rule = f"be [B, E] with B = {sequences} sequences"
        raise refusal(op, "slopes", rule, f"shape {shape_of(slopes)}", "pass what the forward returned")
    _check_scalar(op, "share", share, device, "slopes")
    check_dtype_and_device(op, "grad_loss", grad_loss, _FLOAT32, device, "slopes")
    if grad_loss.dim() != 0 and (grad_loss.dim() != 1 or grad_loss.shape[0] != sequences):
        rule = f"be 0-d or [B] with B = {sequences} sequences"
        raise refusal(op, "grad_loss", rule, f"shape {shape_of(grad_loss)}", "pass the gradient of the loss")
    check_count(op, "rows", rows, 0)
    if dtype not in FLOAT_DTYPES and (dtype != torch.float64 or device.type != "cpu"):
        got = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        raise refusal(op, "dtype", f"be {names_of(FLOAT_DTYPES)}", got, "pass the dtype of scores", TypeError)


def fake_moe_seq_aux_loss_grad(
    grad_loss: Tensor,
    slopes: Tensor,
    share: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    return contiguous(rows, slopes.shape[1], dtype=dtype, device=slopes.device)


# --- expert_bias_update -----------------------------------------------------------------------------------------------------------


def check_expert_bias_update(
    bias: Tensor, tokens_per_expert: Tensor, rate_tensor: Tensor | None, rate: float | None = None
) -> None:
    op = "expert_bias_update"
    check_float(op, "bias", bias)
    if bias.dim() not in (1, 2) or bias.shape[-1] == 0:
        rule = "be [E] or [L, E] with at least one expert"
        raise refusal(op, "bias", rule, f"shape {shape_of(bias)}", "pass the biases of one layer, or of several stacked")
    check_dtype_and_device(op, "tokens_per_expert", tokens_per_expert, _COUNT_DTYPES, bias.device, "bias")
    if tokens_per_expert.shape != bias.shape:
        rule = f"have the shape of bias {shape_of(bias)}"
        raise refusal(op, "tokens_per_expert", rule, f"shape {shape_of(tokens_per_expert)}", "pass one count per bias")
    _check_scale(op, "rate", rate, rate_tensor, bias.device, "bias")


def fake_expert_bias_update(
    bias: Tensor, tokens_per_expert: Tensor, rate_tensor: Tensor | None, rate: float | None = None
) -> Tensor:
    return contiguous(*bias.shape, dtype=bias.dtype, device=bias.device)
