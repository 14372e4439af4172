"""The dispatch ops in eager PyTorch: the specification.

T rows (tokens), E experts, K top-k. A pair (t, k) is token t at its k-th expert, indices[t, k]; its number is t*K + k. An id
outside [0, E) is no expert. rows holds one row per pair: those with an expert by (expert, number), then those without, by number.

    map[t, k] = r where the pair has an expert, ~r = -1 - r where it has none, r being its row
    rows[r] = x[t], and 0 where the pair has no expert
    offsets[e] = how many pairs have one of the experts 0..e
    out[t] = sum over k of weights[t, k] * rows[map[t, k]], pairs without an expert left out
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype


def _like_rows(values: Tensor, rows: Tensor) -> Tensor:
    """One value per row as what broadcasts against `rows`."""
    return values.reshape(-1, *(1,) * (rows.dim() - 1))


def permute_tokens(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = indices.flatten().long()
    expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    number = torch.argsort(expert, stable=True)  # of the pair in each row
    row = torch.argsort(number)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device).scatter_add_(0, expert, torch.ones_like(expert))
    map = torch.where(expert < num_experts, row, ~row).int().reshape(indices.shape)
    rows = x[number // indices.shape[1]]
    # Select, never multiply: a token without an expert may hold NaN.
    rows = torch.where(_like_rows(expert[number] < num_experts, rows), rows, torch.zeros((), dtype=x.dtype, device=x.device))
    return rows.contiguous(), counts.cumsum(0)[:num_experts].int(), map


def unpermute_tokens(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Tensor:
    dtype = accumulation_dtype(rows.dtype)
    out = torch.zeros(map.shape[0], *rows.shape[1:], dtype=dtype, device=rows.device)
    for k in range(map.shape[1]):
        row = map[:, k].long()
        legal = (row >= 0) & (row < rows.shape[0])
        # Select before computing: rows of no expert may hold NaN.
        value = torch.where(_like_rows(legal, rows), rows[torch.where(legal, row, 0)].to(dtype), 0)
        if weights is not None:
            value = value * _like_rows(torch.where(legal, weights[:, k].to(dtype), 0), rows)
        out = out + value
    return out.to(rows.dtype)


def unpermute_tokens_grad(grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(grad.dtype)
    tokens, copies = map.shape
    number = map.flatten().long()
    row = torch.where(number < 0, ~number, number).clamp(max=max(tokens * copies - 1, 0))
    legal = (number >= 0) & (number < tokens * copies)
    each = grad.to(dtype)[torch.arange(tokens * copies, device=grad.device) // copies]  # of each pair
    scale = torch.ones((), dtype=dtype, device=grad.device) if weights is None else _like_rows(weights.flatten().to(dtype), each)
    scaled = torch.where(_like_rows(legal, each), each * scale, 0)
    grad_rows = torch.zeros_like(scaled, dtype=grad.dtype, memory_format=torch.contiguous_format)
    grad_rows[row] = scaled.to(grad.dtype)
    if rows is None or weights is None:
        return grad_rows, grad.new_empty(0)
    product = torch.where(_like_rows(legal, each), each * rows[row].to(dtype), 0)
    return grad_rows, product.unsqueeze(-1).flatten(1).sum(1).reshape(map.shape).to(weights.dtype)
