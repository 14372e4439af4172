"""Contracts of the dispatch ops. T rows (tokens), E experts, K top-k; a pair (t, k) is token t at its k-th expert."""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    check_count,
    check_device,
    check_dtype,
    check_float,
    check_rank,
    contiguous,
    dtype_of,
    refusal,
    shape_of,
)

_ID_DTYPES = (torch.int16, torch.int32, torch.int64)
_MAP_DTYPES = (torch.int32,)


def _check_pairs(op: str, argument: str, pairs: Tensor) -> None:
    """`pairs` is `[T, K]` with K at least 1, and int32 can number them."""
    check_rank(op, argument, pairs, 2, "[T, K]")
    tokens, copies = pairs.shape
    if copies < 1:
        raise refusal(op, argument, "have at least one column [T, K]", f"shape {shape_of(pairs)}", "pass the router's top-k")
    if tokens * copies >= 2**31:
        raise refusal(op, argument, "have fewer than 2**31 elements", tokens * copies, "dispatch fewer tokens at a time")


def _check_rows(op: str, argument: str, tensor: Tensor, layout: str) -> None:
    if tensor.dim() == 0:
        raise refusal(op, argument, f"have at least one dimension {layout}", "a 0-d tensor", "rows are dimension 0")


def check_permute_tokens(x: Tensor, indices: Tensor, num_experts: int) -> None:
    op = "permute_tokens"
    _check_rows(op, "x", x, "[T, ...]")
    if x.dtype == torch.float8_e8m0fnu:
        raise refusal(op, "x", "have a dtype that can hold 0", dtype_of(x), "this format holds powers of two only", TypeError)
    check_dtype(op, "indices", indices, _ID_DTYPES, "pass expert ids [T, K], from router_topk(..., routing='indices')")
    _check_pairs(op, "indices", indices)
    check_device(op, "indices", indices, x.device, "x")
    if indices.shape[0] != x.shape[0]:
        raise refusal(op, "indices", f"have one row per row of x ({x.shape[0]})", indices.shape[0], "pass [T, K]")
    check_count(op, "num_experts", num_experts, 1)


def fake_permute_tokens(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, copies = indices.shape
    return (
        contiguous(tokens * copies, *x.shape[1:], dtype=x.dtype, device=x.device),
        contiguous(num_experts, dtype=torch.int32, device=x.device),
        contiguous(tokens, copies, dtype=torch.int32, device=x.device),
    )


def _check_map(op: str, map: Tensor, device: torch.device, owner: str) -> None:
    check_dtype(op, "map", map, _MAP_DTYPES, "pass the map that permute_tokens returned")
    _check_pairs(op, "map", map)
    check_device(op, "map", map, device, owner)


def _check_weights(op: str, weights: Tensor, map: Tensor) -> None:
    check_float(op, "weights", weights)
    if weights.shape != map.shape:
        raise refusal(op, "weights", f"have the shape of map {shape_of(map)}", shape_of(weights), "pass one per pair, [T, K]")
    check_device(op, "weights", weights, map.device, "map")


def check_unpermute_tokens(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> None:
    op = "unpermute_tokens"
    _check_rows(op, "rows", rows, "[T*K, ...]")
    check_float(op, "rows", rows)
    _check_map(op, map, rows.device, "rows")
    if rows.shape[0] != map.shape[0] * map.shape[1]:
        rule = f"have one row per element of map ({map.shape[0] * map.shape[1]})"
        raise refusal(op, "rows", rule, rows.shape[0], "pass all rows that permute_tokens made")
    if weights is not None:
        _check_weights(op, weights, map)


def fake_unpermute_tokens(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Tensor:
    return contiguous(map.shape[0], *rows.shape[1:], dtype=rows.dtype, device=rows.device)


def check_unpermute_tokens_grad(grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None) -> None:
    op = "unpermute_tokens_grad"
    _check_rows(op, "grad", grad, "[T, ...]")
    check_float(op, "grad", grad)
    _check_map(op, map, grad.device, "grad")
    if grad.shape[0] != map.shape[0]:
        raise refusal(op, "grad", f"have one row per row of map ({map.shape[0]})", grad.shape[0], "pass out's gradient")
    if weights is not None:
        _check_weights(op, weights, map)
    if rows is None:
        return
    if weights is None:
        raise refusal(op, "rows", "be None where weights is None", f"shape {shape_of(rows)}", "only weights' gradient reads rows")
    check_dtype(op, "rows", rows, (grad.dtype,), "out has the dtype of rows")
    if rows.shape != (map.shape[0] * map.shape[1], *grad.shape[1:]):
        expected = ", ".join(str(n) for n in (map.shape[0] * map.shape[1], *grad.shape[1:]))
        raise refusal(op, "rows", f"have the shape [{expected}]", shape_of(rows), "pass the rows of the forward")
    check_device(op, "rows", rows, grad.device, "grad")


def fake_unpermute_tokens_grad(
    grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, copies = map.shape
    grad_rows = contiguous(tokens * copies, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    if rows is None or weights is None:
        return grad_rows, contiguous(0, dtype=grad.dtype, device=grad.device)
    return grad_rows, contiguous(tokens, copies, dtype=weights.dtype, device=grad.device)
