"""Contracts of the padding ops. T rows, B sequences; C = cu_seqlens, P = cu_seqlens_padded (C where that is None)."""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    INDEX_DTYPES,
    check_count,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_rank,
    contiguous,
    dtype_of,
    refusal,
    shape_of,
)


def check_row_numbers(op: str, argument: str, rows: int, cu_seqlens: Tensor) -> None:
    """int32 metadata cannot number the padding rows of a larger tensor."""
    if rows > 2**31 - 1 and cu_seqlens.dtype == torch.int32:
        raise refusal(op, argument, "have fewer than 2**31 rows where cu_seqlens is int32", rows, "pass int64 cu_seqlens")


def _check_rows(op: str, argument: str, x: Tensor) -> None:
    if x.dim() == 0:
        raise refusal(op, argument, "have at least one dimension [T, ...]", "a 0-d tensor", "rows are dimension 0")
    if x.dtype == torch.float8_e8m0fnu:
        raise refusal(op, argument, "have a dtype that can hold 0", dtype_of(x), "this format holds powers of two only", TypeError)


def check_zero_fill(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> None:
    _check_rows("zero_fill", "x", x)
    check_cu_seqlens("zero_fill", cu_seqlens, cu_seqlens_padded, x.device, "x")
    check_row_numbers("zero_fill", "x", x.shape[0], cu_seqlens)


def fake_zero_fill(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    return contiguous(*x.shape, dtype=x.dtype, device=x.device)


def check_zero_fill_(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
    op = "zero_fill_"
    count = len(tensors)
    if count == 0:
        raise refusal(op, "tensors", "hold at least one tensor", "an empty list", "leave the call out")
    if len(cu_seqlens) not in (1, count):
        raise refusal(op, "cu_seqlens", f"be one tensor or one per tensor ({count})", len(cu_seqlens), "pass one of the two")
    if len(cu_seqlens_padded) not in (0, len(cu_seqlens)):
        raise refusal(
            op,
            "cu_seqlens_padded",
            f"be None or as many as cu_seqlens ({len(cu_seqlens)})",
            len(cu_seqlens_padded),
            "pass one of the two",
        )
    device = tensors[0].device
    for i, x in enumerate(tensors):
        _check_rows(op, f"tensors[{i}]", x)
        check_device(op, f"tensors[{i}]", x, device, "tensors[0]")
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            got = f"shape {shape_of(x)} with strides {list(x.stride())}"
            raise refusal(op, f"tensors[{i}]", "have a place in memory for each element", got, "clone the expanded tensor")
    for i, cu in enumerate(cu_seqlens):
        check_cu_seqlens(op, cu, cu_seqlens_padded[i] if cu_seqlens_padded else None, device, "tensors[0]")
    for i, x in enumerate(tensors):
        check_row_numbers(op, f"tensors[{i}]", x.shape[0], cu_seqlens[0 if len(cu_seqlens) == 1 else i])


def fake_zero_fill_(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
    return None


def _check_row_map(op: str, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> None:
    check_cu_seqlens(op, cu_seqlens, cu_seqlens_padded)
    check_count(op, "total_tokens", total_tokens, 0)


def check_padding_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> None:
    _check_row_map("padding_mask", cu_seqlens, cu_seqlens_padded, total_tokens)


def fake_padding_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    return contiguous(total_tokens, dtype=torch.bool, device=cu_seqlens.device)


def check_sequence_ids(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> None:
    _check_row_map("sequence_ids", cu_seqlens, cu_seqlens_padded, total_tokens)


def fake_sequence_ids(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    return contiguous(total_tokens, dtype=torch.int32, device=cu_seqlens.device)


def check_positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> None:
    _check_row_map("positions", cu_seqlens, cu_seqlens_padded, total_tokens)
    check_count("positions", "cp_size", cp_size, 1)
    if not 0 <= cp_rank < cp_size:
        raise refusal(
            "positions", "cp_rank", f"be from 0 to cp_size - 1 ({cp_size - 1})", cp_rank, "pass this rank's number in its group"
        )


def fake_positions(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    return contiguous(total_tokens, dtype=torch.int32, device=cu_seqlens.device)


def check_compact_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> None:
    _check_row_map("compact_rows", cu_seqlens, cu_seqlens_padded, total_tokens)
    if total_tokens > 2**31 - 1:
        raise refusal("compact_rows", "total_tokens", "be below 2**31", total_tokens, "split the batch")


def fake_compact_rows(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> tuple[Tensor, Tensor]:
    def new() -> Tensor:
        return contiguous(total_tokens, dtype=torch.int32, device=cu_seqlens.device)

    return new(), new()


def check_cu_seqlens_from_positions(position_ids: Tensor, max_seqs: int) -> None:
    check_rank("cu_seqlens_from_positions", "position_ids", position_ids, 1, "[T]")
    check_dtype("cu_seqlens_from_positions", "position_ids", position_ids, INDEX_DTYPES)
    check_count("cu_seqlens_from_positions", "max_seqs", max_seqs, 1)


def fake_cu_seqlens_from_positions(position_ids: Tensor, max_seqs: int) -> Tensor:
    return contiguous(max_seqs + 1, dtype=torch.int32, device=position_ids.device)


def check_cu_seqlens_from_lengths(lengths: Tensor, max_seqs: int) -> None:
    op = "cu_seqlens_from_lengths"
    check_rank(op, "lengths", lengths, 1, "[number of sequences]")
    check_dtype(op, "lengths", lengths, INDEX_DTYPES)
    if lengths.shape[0] > max_seqs:
        raise refusal(op, "max_seqs", f"be at least the number of lengths ({lengths.shape[0]})", max_seqs, "raise it or pass fewer")


def fake_cu_seqlens_from_lengths(lengths: Tensor, max_seqs: int) -> Tensor:
    return contiguous(max_seqs + 1, dtype=torch.int32, device=lengths.device)


def check_slice_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> None:
    check_cu_seqlens("slice_cu_seqlens", cu_seqlens, cu_seqlens_padded)
    check_count("slice_cu_seqlens", "start", start, 0)
    check_count("slice_cu_seqlens", "length", length, 0)


def fake_slice_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> tuple[Tensor, Tensor]:
    def new() -> Tensor:
        return contiguous(cu_seqlens.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    return new(), new()
