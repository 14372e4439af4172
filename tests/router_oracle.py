"""Routing of one row at a time in plain Python floats (fp64), sharing nothing with the reference; and inputs of router tests.

T rows (tokens), E experts, K top-k, G groups of E/G experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPS = 1e-20
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def ranked(keys: list[float]) -> list[int]:
    """Indices, best key first: descending, then by index; NaN last."""
    return sorted(range(len(keys)), key=lambda e: (math.isnan(keys[e]), 0.0 if math.isnan(keys[e]) else -keys[e], e))


def score(x: float, score_function: str) -> float:
    if math.isnan(x):
        return x
    if score_function == "sigmoid":
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
    return math.sqrt(x if x > 20 else math.log1p(math.exp(x)))


def softmax(xs: list[float]) -> list[float]:
    largest = max(xs)
    powers = [math.exp(x - largest) for x in xs]
    total = sum(powers)
    return [p / total for p in powers]


class Settings(NamedTuple):
    """How a row is routed; names as in `router_topk`."""

    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    normalize: bool = True
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None


def chosen_experts(row: list[float], bias: list[float] | None, settings: Settings) -> list[int]:
    """The K chosen experts of one row, best first."""
    keys = row
    if settings.score_function != "softmax":
        keys = [score(x, settings.score_function) + b for x, b in zip(row, bias or [0.0] * len(row), strict=True)]
    candidates = list(range(len(row)))
    if settings.num_groups is not None and settings.group_topk is not None:
        size, counted = len(row) // settings.num_groups, settings.topk // settings.group_topk
        worth = []
        for g in range(settings.num_groups):
            group = keys[g * size : (g + 1) * size]
            worth.append(sum(group[e] for e in ranked(group)[:counted]))
        groups = sorted(ranked(worth)[: settings.group_topk])
        candidates = [e for g in groups for e in range(g * size, (g + 1) * size)]
    return [candidates[i] for i in ranked([keys[e] for e in candidates])[: settings.topk]]


def weights(row: list[float], chosen: list[int], settings: Settings) -> list[float]:
    """The weights of the chosen experts of one row of numbers, in their order."""
    scale = 1.0 if settings.scaling_factor is None else settings.scaling_factor
    if settings.pre_softmax:
        shares = softmax(row)
        return [scale * shares[e] for e in chosen]
    if settings.score_function == "softmax":
        return [scale * w for w in softmax([row[e] for e in chosen])]
    scores = [score(row[e], settings.score_function) for e in chosen]
    total = sum(scores) + EPS if settings.normalize and settings.topk > 1 else 1.0
    return [scale * a / total for a in scores]


def routed(logits: Tensor, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """(weights fp64 [T, K], chosen int64 [T, K]) of all rows, on the CPU."""
    rows = logits.double().cpu().tolist()
    offsets = None if bias is None else bias.double().cpu().tolist()
    chosen = [chosen_experts(row, offsets, settings) for row in rows]
    probs = [weights(row, experts, settings) for row, experts in zip(rows, chosen, strict=True)]
    return torch.tensor(probs, dtype=torch.float64), torch.tensor(chosen)


def all_scores(logits: Tensor, score_function: str) -> Tensor:
    """fp64 [T, E]: scores that sum to 1 over all experts, on the CPU."""
    rows = []
    for row in logits.double().cpu().tolist():
        if score_function == "softmax":
            rows.append(softmax(row))
        else:
            scores = [score(x, score_function) for x in row]
            total = sum(scores) + EPS
            rows.append([a / total for a in scores])
    return torch.tensor(rows, dtype=torch.float64)


def clear_rows(logits: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """bool [T]: rows on which all code in fp32 must choose alike, in the same order. On the others two keys that are not equal are
    within 2 ulp among the best K + 1 (logits, the keys of a softmax, are not rounded), or two groups where the last is chosen."""
    keys, softmax = logits.double(), settings.score_function == "softmax"
    if settings.score_function == "sigmoid":
        keys = keys.sigmoid()
    elif settings.score_function == "sqrtsoftplus":
        keys = torch.nn.functional.softplus(keys).sqrt()
    keys = keys if bias is None else keys + bias.double()
    clear = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    if settings.num_groups is not None and settings.group_topk is not None:
        grouped = keys.unflatten(1, (settings.num_groups, -1))
        worth = grouped.topk(settings.topk // settings.group_topk).values.sum(-1)
        order = worth.sort(1, descending=True)
        clear = _apart(order.values[:, settings.group_topk - 1 : settings.group_topk + 1], 4)
        closed = torch.ones_like(worth, dtype=torch.bool).scatter(1, order.indices[:, : settings.group_topk], False)
        keys = grouped.masked_fill(closed[..., None], -math.inf).flatten(1)
    return clear & _apart(keys.sort(1, descending=True).values[:, : settings.topk + 1], 0 if softmax else 2)


def _apart(falling: Tensor, ulps: int) -> Tensor:
    """bool [T]: neighbours are equal or more than `ulps` of fp32 apart."""
    gap = falling[:, :-1] - falling[:, 1:]
    bound = ulps * torch.finfo(torch.float32).eps * falling[:, :-1].abs()
    return ((gap == 0) | (gap > bound)).all(1)


# --- inputs -----------------------------------------------------------------------------------------------------------------------


def spread_logits(rows: int, experts: int, device: torch.device) -> Tensor:
    """Logits for sigmoid and sqrtsoftplus: steps of 0.01 between experts, of 0.0001 between rows."""
    steps = torch.arange(-(experts // 2), experts - experts // 2) * 1e-2
    return (steps + torch.arange(-(rows // 2), rows - rows // 2)[:, None] * 1e-4).to(device)


def counted_logits(rows: int, experts: int, device: torch.device) -> Tensor:
    """Logits for a softmax: 0, 0.0001, 0.0002 and so on through all rows; far out, neighbours are equal in fp32."""
    half = rows * experts // 2
    return (torch.arange(-half, rows * experts - half) * 1e-4).view(rows, experts).to(device)


def falling_bias(experts: int, device: torch.device) -> Tensor:
    return torch.arange(experts, device=device).flip(0) * 0.1


def random_logits(rows: int, experts: int, device: torch.device, seed: int = 0, **kind: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, experts, generator=generator).to(device, **kind)


def random_mask(rows: int, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, generator=generator) < 0.3).to(device)


# --- comparing --------------------------------------------------------------------------------------------------------------------


def tolerance(experts: int) -> dict[str, Any]:
    """What probabilities and gradients of E experts in fp32 may be off."""
    return {"atol": max(1e-5, 4e-7 * experts), "rtol": max(1.3e-6, 4e-7 * experts)}


def mask_of(chosen: Tensor, experts: int) -> Tensor:
    """bool [T, E] of indices [T, K]."""
    return torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device).scatter(1, chosen, True)


def unpacked(bitmap: Tensor, experts: int) -> Tensor:
    """bool [T, E] of a bitmap; its spare bits must be 0."""
    bits = torch.stack([(bitmap >> i) & 1 for i in range(8)], -1).flatten(1).bool()
    assert not bits[:, experts:].any()
    return bits[:, :experts]
