"""Contracts of the aux-loss ops. T rows (tokens), E experts, K top-k, M sequences folded into columns: probs is `[T, M*E]`."""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    FLOAT_DTYPES,
    accumulation_dtype,
    check_count,
    check_dtype_and_device,
    check_either,
    check_float,
    check_mask,
    check_one_element,
    check_rank,
    contiguous,
    names_of,
    refusal,
    shape_of,
)

_TOKEN_DTYPES = (torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16)
_COUNT_DTYPES = (torch.int32, torch.int64, torch.float32)
_FLOAT32 = (torch.float32,)


def _check_mask(op: str, mask: Tensor, rows: int, folds: int, device: torch.device, owner: str) -> None:
    check_mask(op, mask, device, owner)
    if mask.dim() not in (1, 2) or mask.shape[0] != rows or (mask.dim() == 2 and mask.shape[1] != folds):
        rule = f"be [T] or [T, M] with T = {rows} rows and M = {folds} folded sequences"
        raise refusal(op, "padding_mask", rule, f"shape {shape_of(mask)}", "flatten it like the rows of probs")


def check_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens_tensor: Tensor | None,
    coeff_tensor: Tensor | None,
    padding_mask: Tensor | None,
    num_experts: int,
    topk: int,
    total_num_tokens: int | None = None,
    coeff: float | None = None,
) -> None:
    op = "moe_aux_loss"
    if probs.dim() != 2:
        check_rank(op, "probs", probs, 2, "[T, M*E]")
    check_float(op, "probs", probs)
    rows, columns = probs.shape
    device = probs.device
    check_count(op, "num_experts", num_experts, 1)
    if topk < 1 or topk > num_experts:
        raise refusal(op, "topk", f"be from 1 to num_experts ({num_experts})", topk, "pass the router's top-k")
    if columns == 0 or columns % num_experts != 0:
        rule = f"have a multiple of num_experts ({num_experts}) columns"
        raise refusal(op, "probs", rule, f"shape {shape_of(probs)}", "fold whole sequences into columns: [T, M*E]")
    if tokens_per_expert.dim() != 1 or tokens_per_expert.shape[0] != columns:
        rule = f"be [M*E] with one entry per column of probs ({columns})"
        raise refusal(op, "tokens_per_expert", rule, f"shape {shape_of(tokens_per_expert)}", "flatten it like the columns of probs")
    check_dtype_and_device(op, "tokens_per_expert", tokens_per_expert, _TOKEN_DTYPES, device, "probs")
    check_either(op, "total_num_tokens", total_num_tokens, total_num_tokens_tensor, "an int")
    check_either(op, "coeff", coeff, coeff_tensor, "a float")
    if total_num_tokens_tensor is not None:
        check_dtype_and_device(op, "total_num_tokens", total_num_tokens_tensor, _COUNT_DTYPES, device, "probs")
        check_one_element(op, "total_num_tokens", total_num_tokens_tensor)
    elif total_num_tokens is not None:
        check_count(op, "total_num_tokens", total_num_tokens, 0)
    if coeff_tensor is not None:
        check_dtype_and_device(op, "coeff", coeff_tensor, _FLOAT32, device, "probs")
        check_one_element(op, "coeff", coeff_tensor)
    if padding_mask is not None:
        _check_mask(op, padding_mask, rows, columns // num_experts, device, "probs")


def fake_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens_tensor: Tensor | None,
    coeff_tensor: Tensor | None,
    padding_mask: Tensor | None,
    num_experts: int,
    topk: int,
    total_num_tokens: int | None = None,
    coeff: float | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(probs.dtype)
    return contiguous(dtype=dtype, device=probs.device), contiguous(dtype=dtype, device=probs.device)


def check_moe_aux_loss_grad(
    grad_loss: Tensor,
    coefficient: Tensor,
    tokens_per_expert: Tensor,
    padding_mask: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> None:
    op = "moe_aux_loss_grad"
    device = tokens_per_expert.device
    if tokens_per_expert.dim() != 1:
        check_rank(op, "tokens_per_expert", tokens_per_expert, 1, "[M*E]")
    check_dtype_and_device(op, "tokens_per_expert", tokens_per_expert, _TOKEN_DTYPES, device, "tokens_per_expert")
    for name, scalar in (("grad_loss", grad_loss), ("coefficient", coefficient)):
        check_dtype_and_device(op, name, scalar, _FLOAT32, device, "tokens_per_expert")
        check_one_element(op, name, scalar)
    check_count(op, "rows", rows, 0)
    if dtype not in FLOAT_DTYPES and (dtype != torch.float64 or device.type != "cpu"):
        got = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        raise refusal(op, "dtype", f"be {names_of(FLOAT_DTYPES)}", got, "pass the dtype of probs", TypeError)
    if padding_mask is not None:
        columns = tokens_per_expert.shape[0]
        folds = padding_mask.shape[1] if padding_mask.dim() == 2 else 1
        _check_mask(op, padding_mask, rows, folds, device, "tokens_per_expert")
        if folds == 0 or columns % folds != 0:
            rule = f"be [T, M] with M a divisor of the {columns} columns"
            raise refusal(op, "padding_mask", rule, f"shape {shape_of(padding_mask)}", "pass the mask of the forward")


def fake_moe_aux_loss_grad(
    grad_loss: Tensor,
    coefficient: Tensor,
    tokens_per_expert: Tensor,
    padding_mask: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    return contiguous(rows, tokens_per_expert.shape[0], dtype=dtype, device=tokens_per_expert.device)
