"""Contracts of the context-parallel row ops.

T rows, B sequences, W ranks (cp_size). P = cu_seqlens_padded: rows [P[b], P[b+1]) are sequence b's; T and every P are multiples of
2W (T alone can be checked here). "zigzag": rank r has chunks r and 2W-1-r of every sequence's 2W; "contiguous": chunks 2r, 2r+1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import check_choice, check_count, check_cu_seqlens, contiguous, dtype_of, refusal, shape_of
from meta_kernels.padding import check_row_numbers

PARTITIONS = ("zigzag", "contiguous")
HALVES = ("first", "second")


def _check_group(op: str, cp_size: int, partition: str, cp_rank: int | None = None) -> None:
    check_count(op, "cp_size", cp_size, 1)
    if cp_rank is not None and not 0 <= cp_rank < cp_size:
        rule = f"be from 0 to cp_size - 1 ({cp_size - 1})"
        raise refusal(op, "cp_rank", rule, cp_rank, "pass this rank's number in its group")
    check_choice(op, "partition", partition, PARTITIONS)


def _check_rows(op: str, x: Tensor, cu_seqlens_padded: Tensor, dim: int = 0) -> None:
    if x.dim() == 0:
        raise refusal(op, "x", "have at least one dimension [T, ...]", "a 0-d tensor", "rows are dimension 0")
    if not -x.dim() <= dim < x.dim():
        raise refusal(op, "dim", f"name a dimension of x {shape_of(x)}", dim, "pass 0, or -1 for [H, T]")
    check_cu_seqlens(op, cu_seqlens_padded, None, x.device, "x", "cu_seqlens_padded")
    check_row_numbers(op, "x", x.shape[dim], cu_seqlens_padded)


def _check_multiple(op: str, argument: str, rule: str, rows: int, unit: int, fix: str) -> None:
    if rows % unit != 0:
        raise refusal(op, argument, rule, rows, fix)


# --- metadata ------------------------------------------------------------------------------------------------------------------


def check_partition_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, partition: str = "zigzag"
) -> None:
    op = "partition_indices"
    check_cu_seqlens(op, cu_seqlens_padded, None, argument="cu_seqlens_padded")
    check_count(op, "total_tokens", total_tokens, 0)
    _check_group(op, cp_size, partition, cp_rank)
    rule = f"be a multiple of 2 * cp_size ({2 * cp_size})"
    _check_multiple(op, "total_tokens", rule, total_tokens, 2 * cp_size, "pad the batch, and every sequence, to such multiples")
    if total_tokens > 2**31 - 1:
        raise refusal(op, "total_tokens", "be below 2**31", total_tokens, "split the batch")


def fake_partition_indices(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, partition: str = "zigzag"
) -> Tensor:
    return contiguous(total_tokens // cp_size, dtype=torch.int32, device=cu_seqlens_padded.device)


def check_local_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    half: str | None = None,
    partition: str = "zigzag",
) -> None:
    op = "local_cu_seqlens"
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded)
    _check_group(op, cp_size, partition, cp_rank)
    if half is not None:
        check_choice(op, "half", half, HALVES)


def fake_local_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    half: str | None = None,
    partition: str = "zigzag",
) -> tuple[Tensor, Tensor]:
    def new() -> Tensor:
        return contiguous(cu_seqlens.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    return new(), new()


# --- rows of all ranks ---------------------------------------------------------------------------------------------------------


def _check_rank_order(op: str, x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str) -> None:
    _check_rows(op, x, cu_seqlens_padded)
    _check_group(op, cp_size, partition)
    rule = f"have a multiple of 2 * cp_size ({2 * cp_size}) rows"
    _check_multiple(op, "x", rule, x.shape[0], 2 * cp_size, "pad the batch, and every sequence, to such multiples")


def check_to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> None:
    _check_rank_order("to_rank_order", x, cu_seqlens_padded, cp_size, partition)


def fake_to_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    return contiguous(*x.shape, dtype=x.dtype, device=x.device)


def check_from_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> None:
    _check_rank_order("from_rank_order", x, cu_seqlens_padded, cp_size, partition)


def fake_from_rank_order(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Tensor:
    return contiguous(*x.shape, dtype=x.dtype, device=x.device)


# --- halves of one rank's rows -------------------------------------------------------------------------------------------------


def check_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> None:
    _check_rows("half", x, cu_seqlens_padded, dim)
    check_choice("half", "which", which, HALVES)
    _check_multiple("half", "x", "have an even number of rows", x.shape[dim], 2, "pass all rows of the rank")


def fake_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // 2
    return contiguous(*shape, dtype=x.dtype, device=x.device)


def check_from_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> None:
    _check_rows("from_half", x, cu_seqlens_padded, dim)
    check_choice("from_half", "which", which, HALVES)
    if x.dtype == torch.float8_e8m0fnu:
        raise refusal(
            "from_half", "x", "have a dtype that can hold 0", dtype_of(x), "this format holds powers of two only", TypeError
        )


def fake_from_half(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Tensor:
    shape = list(x.shape)
    shape[dim] = 2 * shape[dim]
    return contiguous(*shape, dtype=x.dtype, device=x.device)
