"""Launchers of the router ops: how rows are cut, and which parts of `route_rows`, `finish` and `route_rows_grad` an op needs.

T rows, E experts, K chosen, B sequences, S sequences of sums (B, or 1). Everything that does not depend on the number of rows is
constant in a kernel: a router's E, K and rules do not change while it trains.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from meta_kernels import router as contract
from thdops.ops.launch import launch, multiprocessors
from thdops.ops.router.kernels_backward import route_rows_grad
from thdops.ops.router.kernels_forward import finish, fold, route_rows

_PROGRAMS = 1000  # per multiprocessor, at most: short programs share a GPU better
_SUM_PROGRAMS = 12  # the same, where programs keep sums, which then have to be added
_WAYS = 32  # of the search for the sequence of a row
_FOLDED = 64  # rows that the partial sums of many programs are added up to, before `finish` adds the rest
_FOLD_P, _FOLD_E, _FOLD_WARPS = 32, 32, 8
_FINISH_P, _FINISH_E, _FINISH_S, _FINISH_WARPS = _FOLDED, 32, 64, 8


class _Tiling(NamedTuple):
    """A chunk is `block_t` rows by `lanes` columns; `chunks` of them are a row. With groups, a row is one chunk of `group_lanes`."""

    lanes: int
    chunks: int
    width: int
    group_lanes: int
    block_t: int
    num_warps: int
    registers: int | None


@lru_cache
def _tiling(experts: int, num_groups: int, kind: str) -> _Tiling:
    """Few experts: several rows a warp. Up to 512: one, a chunk of 32 columns at a time. Above: a row for one to four warps.

    `kind` is "rows", "sums" (registers hold sums, too) or "grad". Measured on an H200; see the table of the benches.
    """
    padded = triton.next_power_of_2(experts)
    width = triton.next_power_of_2(experts // num_groups) if num_groups else 1
    group_lanes = triton.next_power_of_2(num_groups) * width if num_groups else 0
    if padded <= 64:
        lanes, block_t, registers = 8, 8 if kind == "sums" else 4, None
    elif padded <= 128:
        lanes, block_t = {"rows": (8, 4), "sums": (16, 2), "grad": (16, 4)}[kind]
        registers = 128 if kind == "sums" else None
    else:
        lanes, block_t = max(padded // 16, 32), 2 if kind == "grad" and padded <= 256 else 1
        registers = (128 if padded <= 256 else 168) if kind == "sums" and padded <= 512 else None
    return _Tiling(lanes, -(-experts // lanes), width, group_lanes, block_t, max(lanes // 64, 1), registers)


_RARE = 0.004


@lru_cache
def _depth(chunks: int, lanes: int, topk: int) -> int:
    """How many of its columns a lane keeps in order: so many that it seldom has more of a row's best `topk` + 1."""
    depth = 1
    while depth < min(chunks, topk + 1) and comb(topk + 1, depth) / lanes ** (depth - 1) > _RARE:
        depth += 1
    return depth


def _fill(block_t: int, experts: int) -> int:
    return min(triton.next_power_of_2(block_t * experts), 1024)


def _grid(rows: int, block_t: int, per_multiprocessor: int, device_index: int) -> tuple[int, int]:
    """(programs, tiles of each)."""
    blocks = -(-rows // block_t)
    tiles = max(-(-blocks // (multiprocessors(device_index) * per_multiprocessor)), 1)
    return -(-blocks // tiles), tiles


def _rows_of(logits: Tensor) -> tuple[int, int, int, bool]:
    """(rows, row stride, column stride, whether rows follow one another without a gap)."""
    rows, experts = logits.shape
    row_stride, column_stride = logits.stride()
    return rows, row_stride, column_stride, column_stride == 1 and row_stride == experts


def _stride(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.stride(0)


def router_topk(
    logits: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    topk: int,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    probs_format: str,
    routing_format: str,
    index_dtype: torch.dtype,
    pad_routing: str,
    pad_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = contract.fake_router_topk(
        logits, expert_bias, padding_mask, topk, score_function, pre_softmax, normalize, num_groups, group_topk, scaling_factor,
        probs_format, routing_format, index_dtype, pad_routing, pad_index,
    )  # fmt: skip
    probs, routing, chosen = outputs
    rows, row_stride, column_stride, contiguous = _rows_of(logits)
    experts = logits.shape[1]
    tiling = _tiling(experts, num_groups or 0, "rows")
    programs, tiles = _grid(rows, tiling.block_t, _PROGRAMS, logits.get_device())
    launch(
        route_rows,
        (programs, 1, 1),
        (
            logits, expert_bias, None if pad_routing == "keep" else padding_mask, None, None, probs, routing, chosen, None, None, None,
            None, None, None, None, rows, tiles, row_stride, column_stride, _stride(padding_mask), 0, pad_index,
            1.0 if scaling_factor is None else scaling_factor,
        ),
        (
            experts, topk, max(triton.next_power_of_2(topk), tiling.lanes), True, False, False, score_function, score_function, pre_softmax, normalize,
            num_groups or 0, group_topk or 0, tiling.width, probs_format, routing_format, pad_routing == "keep", contiguous,
            tiling.lanes, tiling.chunks, _depth(tiling.chunks, tiling.lanes, topk), tiling.group_lanes, tiling.block_t, _fill(tiling.block_t, experts),
            triton.next_power_of_2(-(-experts // 8)), 1,
        ),
        tiling.num_warps,
        tiling.registers,
    )  # fmt: skip
    return outputs


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
    grad = contract.fake_router_topk_grad(
        grad_probs, logits, chosen, score_function, pre_softmax, normalize, scaling_factor, probs_format
    )
    _grad(
        grad, logits, chosen, grad_probs, None, None, None, None, None, None, None, None, None, None,
        score_function, score_function, pre_softmax, normalize, scaling_factor, probs_format,
    )  # fmt: skip
    return grad


def _grad(
    grad: Tensor,
    logits: Tensor,
    chosen: Tensor | None,
    grad_probs: Tensor | None,
    padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    padded: Tensor | None,
    grad_scores: Tensor | None,
    counts: Tensor | None,
    coefficients: Tensor | None,
    grad_aux: Tensor | None,
    grad_z: Tensor | None,
    grad_score_sums: Tensor | None,
    grad_z_sum: Tensor | None,
    score_function: str,
    aux_score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
) -> None:
    rows, row_stride, column_stride, contiguous = _rows_of(logits)
    experts = logits.shape[1]
    tiling = _tiling(experts, 0, "grad")
    topk = 1 if chosen is None else chosen.shape[1]
    launch(
        route_rows_grad,
        (-(-rows // tiling.block_t), 1, 1),
        (
            grad, logits, chosen, grad_probs, padding_mask, cu_seqlens, padded, grad_scores, counts, coefficients, grad_aux, grad_z,
            grad_score_sums, grad_z_sum, rows, row_stride, column_stride, _stride(padding_mask),
            0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, *_strides(grad_probs), *_strides(grad_scores),
            *_strides(grad_score_sums), 1.0 if scaling_factor is None else scaling_factor,
        ),
        (
            experts, topk, max(triton.next_power_of_2(topk), tiling.lanes), score_function, aux_score_function, pre_softmax, normalize, probs_format,
            not (grad_scores is None and grad_aux is None and grad_score_sums is None), not (grad_z is None and grad_z_sum is None),
            contiguous, tiling.lanes, tiling.chunks, tiling.block_t, _fill(tiling.block_t, experts), _WAYS,
        ),
        tiling.num_warps,
        tiling.registers,
    )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def router_scores(
    logits: Tensor, padding_mask: Tensor | None, topk: int, score_function: str, routing_format: str = "mask"
) -> tuple[Tensor, Tensor]:
    routing, scores = contract.fake_router_scores(logits, padding_mask, topk, score_function, routing_format)
    rows, row_stride, column_stride, contiguous = _rows_of(logits)
    experts = logits.shape[1]
    tiling = _tiling(experts, 0, "rows")
    programs, tiles = _grid(rows, tiling.block_t, _PROGRAMS, logits.get_device())
    launch(
        route_rows,
        (programs, 1, 1),
        (
            logits, None, padding_mask, None, None, None, routing, None, scores, None, None, None, None, None, None, rows, tiles,
            row_stride, column_stride, _stride(padding_mask), 0, -1, 1.0,
        ),
        (
            experts, topk, max(triton.next_power_of_2(topk), tiling.lanes), False, True, False, score_function, score_function, False, True, 0, 0, 1,
            "none", routing_format, False, contiguous, tiling.lanes, tiling.chunks, _depth(tiling.chunks, tiling.lanes, topk), 0, tiling.block_t,
            _fill(tiling.block_t, experts), triton.next_power_of_2(-(-experts // 8)), 1,
        ),
        tiling.num_warps,
        tiling.registers,
    )  # fmt: skip
    return routing, scores


def router_scores_grad(grad_scores: Tensor, logits: Tensor, padding_mask: Tensor | None, score_function: str) -> Tensor:
    grad = contract.fake_router_scores_grad(grad_scores, logits, padding_mask, score_function)
    _grad(
        grad, logits, None, None, padding_mask, None, None, grad_scores, None, None, None, None, None, None,
        score_function, score_function, False, True, None, "none",
    )  # fmt: skip
    return grad


def router(
    logits: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    total_num_tokens_tensor: Tensor | None,
    aux_coeff_tensor: Tensor | None,
    z_coeff_tensor: Tensor | None,
    topk: int,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    probs_format: str,
    routing_format: str,
    index_dtype: torch.dtype,
    pad_routing: str,
    pad_index: int,
    aux_score_function: str,
    reduction: str,
    total_num_tokens: int | None = None,
    aux_coeff: float | None = None,
    z_coeff: float | None = None,
) -> tuple[Tensor, ...]:
    outputs = contract.fake_router(
        logits, expert_bias, padding_mask, cu_seqlens, cu_seqlens_padded, total_num_tokens_tensor, aux_coeff_tensor, z_coeff_tensor,
        topk, score_function, pre_softmax, normalize, num_groups, group_topk, scaling_factor, probs_format, routing_format,
        index_dtype, pad_routing, pad_index, aux_score_function, reduction, total_num_tokens, aux_coeff, z_coeff,
    )  # fmt: skip
    probs, routing, chosen, tokens_per_expert, aux_loss, z_loss, score_sums, counts, z_sum, num_tokens, coefficients = outputs
    rows, row_stride, column_stride, contiguous = _rows_of(logits)
    experts = logits.shape[1]
    sums = score_sums.shape[0]
    tiling = _tiling(experts, num_groups or 0, "sums")
    block_t = tiling.block_t
    programs, tiles = _grid(rows, block_t, _SUM_PROGRAMS, logits.get_device())
    sequences = 0 if cu_seqlens is None else sums
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    pairs = programs + sequences + 1
    folded = _FOLDED if cu_seqlens is None and programs > _FOLDED else 0
    new = {"device": logits.device}
    partial_sums = torch.empty((pairs + folded, experts), dtype=torch.float32, **new)
    partial_counts = torch.empty((pairs + folded, experts), dtype=torch.int32, **new)
    partial_tokens = torch.empty((pairs + folded, experts), dtype=torch.int32, **new)
    blocks_e = -(-experts // _FINISH_E)
    floats = torch.empty(pairs + folded + sums * blocks_e, dtype=torch.float32, **new)
    integers = torch.empty(pairs + folded + 1, dtype=torch.int32, **new)
    z_sums, balances = floats[: pairs + folded], floats[pairs + folded :]
    row_counts, ticket = integers[: pairs + folded], integers[pairs + folded :]
    if rows == 0:
        ticket.zero_()
    launch(
        route_rows,
        (programs, 1, 1),
        (
            logits, expert_bias, padding_mask, cu_seqlens, padded, probs, routing, chosen, None, partial_sums, partial_counts,
            row_counts, partial_tokens, z_sums, ticket, rows, tiles, row_stride, column_stride, _stride(padding_mask), sequences,
            pad_index, 1.0 if scaling_factor is None else scaling_factor,
        ),
        (
            experts, topk, max(triton.next_power_of_2(topk), tiling.lanes), True, False, True, score_function, aux_score_function, pre_softmax, normalize,
            num_groups or 0, group_topk or 0, tiling.width, probs_format, routing_format, pad_routing == "keep", contiguous,
            tiling.lanes, tiling.chunks, _depth(tiling.chunks, tiling.lanes, topk), tiling.group_lanes, block_t, _fill(block_t, experts),
            triton.next_power_of_2(-(-experts // 8)), _WAYS,
        ),
        tiling.num_warps,
        tiling.registers,
    )  # fmt: skip
    if folded:
        launch(
            fold,
            (folded, -(-experts // _FOLD_E), 1),
            (partial_sums, partial_counts, row_counts, partial_tokens, z_sums, programs, pairs),
            (experts, _FOLD_P, _FOLD_E),
            _FOLD_WARPS,
        )
    total = "tensor" if total_num_tokens_tensor is not None else "int" if total_num_tokens is not None else "own"
    launch(
        finish,
        (sums, blocks_e, 1),
        (
            partial_sums, partial_counts, row_counts, partial_tokens, z_sums, padded, total_num_tokens_tensor, aux_coeff_tensor,
            z_coeff_tensor, score_sums, counts, tokens_per_expert, num_tokens, aux_loss, z_loss, z_sum, coefficients, balances,
            ticket, pairs if folded else 0, folded or programs, tiles * block_t, rows, sums, total_num_tokens or 0, aux_coeff or 0.0, z_coeff or 0.0,
        ),
        (
            experts, topk, total, reduction == "mean" and cu_seqlens is not None, _FINISH_P, _FINISH_E, _FINISH_S,
        ),
        _FINISH_WARPS,
    )  # fmt: skip
    return outputs


def router_grad(
    logits: Tensor,
    chosen: Tensor,
    grad_probs: Tensor | None,
    grad_aux: Tensor | None,
    grad_z: Tensor | None,
    grad_score_sums: Tensor | None,
    grad_z_sum: Tensor | None,
    counts: Tensor,
    coefficients: Tensor,
    padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    score_function: str,
    pre_softmax: bool,
    normalize: bool,
    scaling_factor: float | None,
    probs_format: str,
    aux_score_function: str,
) -> Tensor:
    grad = contract.fake_router_grad(
        logits, chosen, grad_probs, grad_aux, grad_z, grad_score_sums, grad_z_sum, counts, coefficients, padding_mask, cu_seqlens,
        cu_seqlens_padded, score_function, pre_softmax, normalize, scaling_factor, probs_format, aux_score_function,
    )  # fmt: skip
    _grad(
        grad, logits, chosen, grad_probs, padding_mask, cu_seqlens, cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded,
        None, counts, coefficients, grad_aux, grad_z, grad_score_sums, grad_z_sum,
        score_function, aux_score_function, pre_softmax, normalize, scaling_factor, probs_format,
    )  # fmt: skip
    return grad
