"""Sample calls, refusals, padding, cost and benches of `tokens_per_expert`. T rows, E experts, K top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.balancing import experts_of
from thdops.ops.balancing.samples import as_bitmap, as_indices, as_mask, mask_of_padding
from thdops.ops.padding.samples import size_of
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BENCH_ROWS, _BENCH_EXPERTS, _BENCH_TOPK = 65536, 256, 8


def tokens_per_expert_samples(device: torch.device) -> Iterator[Sample]:
    padding = mask_of_padding(19, device)
    others = (~padding, torch.ones_like(padding), torch.zeros_like(padding))
    replays = tuple({"routing": as_mask(19, 16, 3, device, seed=10 + k), "padding_mask": mask} for k, mask in enumerate(others))
    yield Sample("mask, padding", (as_mask(19, 16, 3, device), padding, None), replays, compile=True)
    yield Sample("mask, padding, other sizes", (as_mask(40, 8, 2, device), mask_of_padding(40, device), None))
    yield Sample("mask, num_experts given", (as_mask(33, 16, 2, device), None, 16))
    yield Sample("mask, columns no multiple of four", (as_mask(21, 10, 2, device), None, None))
    yield Sample("transposed mask, strided padding", (as_mask(16, 19, 3, device).t(), mask_of_padding(38, device)[::2], None))
    yield Sample("every second column of a mask", (as_mask(20, 32, 3, device)[:, ::2], None, None))
    for dtype in (torch.int16, torch.int32, torch.int64):
        indices = as_indices(19, 16, 3, device, dtype)
        more = tuple({"routing": as_indices(19, 16, 3, device, dtype, 10 + k), "padding_mask": m} for k, m in enumerate(others))
        yield Sample(f"indices, {dtype}", (indices, padding, 16), more, compile=dtype == torch.int32)
    yield Sample("transposed indices", (as_indices(19, 16, 3, device).t().contiguous().t(), None, 16))
    yield Sample("an id twice in a row", (torch.tensor([[1, 1], [0, 1]], device=device), None, 16))
    for experts in (16, 20, 32):  # bytes a row: fewer than a word, no multiple of one, a word
        bitmap = as_bitmap(19, experts, 3, device)
        yield Sample(f"bitmap of {experts} experts", (bitmap, padding, experts), ({"padding_mask": ~padding},))
    yield Sample("bitmap whose spare bits are set", (torch.full((4, 2), 255, dtype=torch.uint8, device=device), None, 12))
    yield Sample("transposed bitmap", (as_bitmap(19, 20, 3, device).t().contiguous().t(), None, 20))
    yield Sample("nothing but padding", (as_mask(5, 16, 3, device), torch.ones(5, dtype=torch.bool, device=device), None))
    yield Sample("no row", (as_mask(0, 16, 3, device), None, None))
    yield Sample("one expert", (as_mask(5, 1, 1, device), None, None))
    yield Sample("wider than a block", (as_mask(9, 600, 3, device), None, None))
    yield Sample("indices of more experts than a block", (as_indices(9, 600, 3, device), None, 600))


def tokens_per_expert_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "tokens_per_expert: "
    mask, indices, bitmap = as_mask(6, 12, 2, device), as_indices(6, 12, 2, device), as_bitmap(6, 12, 2, device)
    yield Refusal(
        "a float mask",
        (mask.float(), None, None),
        TypeError,
        f"{op}routing must be bool (a mask), int16 or int32 or int64 (indices) or uint8 (a bitmap), got float32;"
        " pass what the router returned",
    )
    yield Refusal(
        "one dimension",
        (mask[0], None, None),
        ValueError,
        f"{op}routing must have 2 dimensions [T, E], [T, K] or [T, ceil(E/8)], got shape [12]; reshape it",
    )
    yield Refusal(
        "a mask of no expert",
        (mask[:, :0], None, None),
        ValueError,
        f"{op}routing must have a column per expert, got shape [6, 0]; pass the mask [T, E], and E or None as num_experts",
    )
    yield Refusal(
        "a mask of other experts",
        (mask, None, 8),
        ValueError,
        f"{op}routing must have a column per expert (8), got shape [6, 12]; pass the mask [T, E], and E or None as num_experts",
    )
    for name, routing, kind in (("indices", indices, "int64[6, 2]"), ("a bitmap", bitmap, "uint8[6, 2]")):
        yield Refusal(
            f"{name} alone",
            (routing, None, None),
            ValueError,
            f"{op}num_experts must be given for indices and bitmaps, got None with routing {kind};"
            " only a mask tells the number of experts",
        )
    yield Refusal("no expert", (indices, None, 0), ValueError, f"{op}num_experts must be at least 1, got 0; pass a larger one")
    yield Refusal(
        "a mask of bytes",
        (mask.byte(), None, 12),
        ValueError,
        f"{op}routing must have a bit per expert, ceil(12/8) bytes a row, where it is uint8, got shape [6, 12];"
        " pass the bitmap, or a mask as bool",
    )
    padding = mask_of_padding(6, device)
    yield Refusal(
        "padding of a bad dtype",
        (mask, padding.int(), None),
        TypeError,
        f"{op}padding_mask must be bool, True on padding rows, got int32; cast it with .bool()",
    )
    yield Refusal(
        "padding of other rows",
        (mask, padding[:5], None),
        ValueError,
        f"{op}padding_mask must be [T] with one entry per row of routing (6), got shape [5]; flatten it like the rows of routing",
    )


def tokens_per_expert_padding(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Padding:
    return Padding({} if padding_mask is None else {"routing": PadRows(padding_mask)}, (None,))


def tokens_per_expert_cost(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Cost:
    return Cost(read=size_of(routing, padding_mask), written=8 * experts_of(routing, num_experts))


def tokens_per_expert_benches(device: torch.device) -> Iterator[Bench]:
    rows, experts, topk = _BENCH_ROWS, _BENCH_EXPERTS, _BENCH_TOPK
    size = f"T={rows} E={experts} K={topk}"

    def masked() -> tuple[Any, ...]:
        return as_mask(rows, experts, topk, device), None, None

    def indexed() -> tuple[Any, ...]:
        return as_indices(rows, experts, topk, device), None, experts

    yield Bench(f"mask, {size}", masked, lambda routing, padding_mask, num_experts: routing.sum(0))
    yield Bench(f"indices, {size}", indexed, _scatter_by_hand)


def _scatter_by_hand(routing: Tensor, padding_mask: None, num_experts: int) -> Tensor:
    ids = routing.flatten()
    slots = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return ids.new_zeros(num_experts + 1).scatter_add_(0, slots, torch.ones_like(ids))[:num_experts]
