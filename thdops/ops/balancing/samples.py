"""What the sample calls of all balancing ops are made of. T rows, E experts, K top-k. All devices see the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rows: int, experts: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Logits."""
    return (3 * torch.randn(rows, experts, generator=generator(seed))).to(device, dtype)


def uniform(rows: int, experts: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Scores."""
    return torch.rand(rows, experts, generator=generator(seed)).to(device, dtype)


def mask_of_padding(rows: int, device: torch.device, seed: int = 2) -> Tensor:
    """About a third of the rows is padding: some in the middle, and the last two."""
    mask = torch.rand(rows, generator=generator(seed)) < 0.3
    mask[-2:] = True
    return mask.to(device)


def one(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


# --- routing ----------------------------------------------------------------------------------------------------------------------


def as_indices(rows: int, experts: int, topk: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 1) -> Tensor:
    """K different experts a row; every seventh row goes nowhere (-1), or to E."""
    ids = torch.rand(rows, experts, generator=generator(seed)).argsort(1)[:, :topk]
    ids[3::7] = -1
    ids[5::7] = experts
    return ids.to(device, dtype)


def as_mask(rows: int, experts: int, topk: int, device: torch.device, seed: int = 1) -> Tensor:
    """The same choices."""
    ids = as_indices(rows, experts, topk, device, seed=seed)
    mask = torch.zeros(rows, experts + 2, dtype=torch.bool, device=device)  # the last column takes -1
    return mask.scatter_(1, ids.remainder(experts + 2), True)[:, :experts].contiguous()


def as_bitmap(rows: int, experts: int, topk: int, device: torch.device, seed: int = 1) -> Tensor:
    """The same choices."""
    whole = torch.zeros(rows, (experts + 7) // 8, 8, dtype=torch.uint8, device=device)
    whole.view(rows, (experts + 7) // 8 * 8)[:, :experts] = as_mask(rows, experts, topk, device, seed)
    return (whole << torch.arange(8, dtype=torch.uint8, device=device)).sum(-1, dtype=torch.uint8)
