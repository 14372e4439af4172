"""The router's losses from its sums, in eager PyTorch. E experts, K top-k, S sets of sums, N rows that count.

A coefficient that is 0 gives a loss, and a gradient, of exactly 0, whatever the sums hold.
"""

from __future__ import annotations

import torch
from torch import Tensor


def aux_coefficients(scale: Tensor, experts: int, topk: int, count: Tensor) -> Tensor:
    """scale * E / K / N / N, and 0 where N is not above 0; N is `count`, in floating point."""
    # Left to right: N * N, which may not fit, is never formed.
    return torch.where(count > 0, scale * experts / topk / count / count, 0.0)


def over_sequences(coefficients: Tensor, num_tokens: Tensor, reduction: str) -> Tensor:
    """[S] for a sum over sequences, or for a mean over those that have a row."""
    return coefficients if reduction == "sum" else coefficients / (num_tokens > 0).sum().clamp(min=1)


def z_coefficient(scale: Tensor, num_tokens: Tensor) -> Tensor:
    """scale / max(n, 1), 0-d, where n counts the rows of all sets."""
    return scale / num_tokens.sum().clamp(min=1)


def weighted(coefficients: Tensor, sums: Tensor) -> Tensor:
    """Their product; 0 where the coefficient is."""
    return torch.where(coefficients == 0, 0.0, coefficients * sums)
