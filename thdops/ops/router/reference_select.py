"""Which experts each row chooses, in eager PyTorch: the specification of the order, and of the forms a choice is returned in.

T rows (tokens), E experts, K top-k, G groups of E/G experts.
Keys are ranked in descending order, equal ones by ascending index; -0.0 and +0.0 are equal, and NaN ranks below -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def descending(keys: Tensor) -> Tensor:
    """int64, the shape of `keys`: the indices of the last dimension, best key first."""
    # Ascending order of the negated keys: a stable sort keeps equal keys in the order of their indices and puts NaN last.
    # 0 - key is never -0.0, and every NaN is made the same one: sorts that compare bits see signs.
    return torch.where(keys.isnan(), torch.nan, 0.0 - keys).sort(dim=-1, stable=True).indices


def choose(keys: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> Tensor:
    """int64 [T, K]: the best experts of each row, best first; with groups, from the `group_topk` best groups only.

    A group is worth the sum of its K / group_topk best keys.
    """
    order = descending(keys)
    if num_groups is None or group_topk is None:
        return order[:, :topk]
    rows, experts = keys.shape
    grouped = keys.view(rows, num_groups, experts // num_groups)
    best = grouped.gather(2, descending(grouped)[..., : topk // group_topk])
    groups = descending(best.sum(-1))[:, :group_topk]
    open_groups = torch.zeros(rows, num_groups, dtype=torch.bool, device=keys.device).scatter(1, groups, True)
    closed = ~open_groups.repeat_interleave(experts // num_groups, dim=1)
    # Experts of closed groups go behind all others, NaN included; the rest keeps its order.
    last = closed.gather(1, order).byte().sort(dim=1, stable=True).indices
    return order.gather(1, last)[:, :topk]


def mask_of(chosen: Tensor, routed: Tensor, experts: int) -> Tensor:
    """bool [T, E]: True at the chosen experts of rows that are `routed` (bool [T])."""
    mask = torch.zeros(len(chosen), experts, dtype=torch.bool, device=chosen.device)
    return mask.scatter(1, chosen, routed[:, None].expand_as(chosen))


def bitmap_of(mask: Tensor) -> Tensor:
    """uint8 [T, ceil(E/8)]: expert e is bit e % 8 of byte e // 8; spare bits are 0."""
    rows, experts = mask.shape
    bits = torch.nn.functional.pad(mask, (0, -experts % 8)).view(rows, (experts + 7) // 8, 8).byte()
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)
