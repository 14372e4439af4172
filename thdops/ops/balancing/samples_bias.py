"""Sample calls, refusals, cost and benches of `expert_bias_update`. E experts, L layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thdops.ops.balancing.samples import generator, normal, one
from thdops.ops.padding.samples import size_of
from thdops.registry import Bench, Cost, Refusal, Sample


def _counts(*shape: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 1) -> Tensor:
    """So small that several experts are at the mean."""
    counts = torch.randint(0, 4, shape, generator=generator(seed))
    counts[..., 0] += -counts.sum(-1) % shape[-1]
    return counts.to(device, dtype)


def expert_bias_update_samples(device: torch.device) -> Iterator[Sample]:
    yield Sample(
        "one layer, float rate",
        (normal(1, 12, device)[0], _counts(12, device=device), None, 1e-3),
        tuple({"tokens_per_expert": counts} for counts in (_counts(12, device=device, seed=5), _counts(12, device=device) * 0)),
        compile=True,
    )
    yield Sample("one layer, other sizes", (normal(1, 8, device)[0], _counts(8, device=device), None, 1e-3))
    yield Sample(
        "layers, int32 counts, rate on the device",
        (normal(3, 8, device), _counts(3, 8, device=device, dtype=torch.int32), one(1e-2, device), None),
        ({"rate_tensor": one(0.5, device)}, {"rate_tensor": one(0.0, device)}),
        compile=True,
    )
    for dtype in (torch.bfloat16, torch.float16):
        counts = _counts(2, 12, device=device, dtype=torch.float32)
        yield Sample(f"{dtype}, float counts", (normal(2, 12, device, dtype), counts, one(0.25, device).reshape(1), None))
    columns = _counts(8, 6, device=device).t(), normal(8, 6, device).t()
    yield Sample("transposed", (columns[1], columns[0], None, 0.25))
    yield Sample("every second expert", (normal(2, 16, device)[:, ::2], _counts(2, 16, device=device)[:, ::2], None, 0.25))
    yield Sample("no layer", (normal(0, 8, device), _counts(0, 8, device=device), None, 0.25))
    yield Sample("one expert", (normal(1, 1, device), _counts(1, 1, device=device), None, 0.25))
    yield Sample("wider than a block", (normal(2, 1100, device), _counts(2, 1100, device=device), None, 0.25))


def expert_bias_update_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "expert_bias_update: "
    bias, counts = normal(2, 8, device), _counts(2, 8, device=device)
    yield Refusal(
        "an integer bias",
        (bias.int(), counts, None, 0.1),
        TypeError,
        f"{op}bias must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal(
        "rank 3",
        (bias[None], counts[None], None, 0.1),
        ValueError,
        f"{op}bias must be [E] or [L, E] with at least one expert, got shape [1, 2, 8];"
        " pass the biases of one layer, or of several stacked",
    )
    yield Refusal(
        "counts of a bad dtype",
        (bias, counts.bfloat16(), None, 0.1),
        TypeError,
        f"{op}tokens_per_expert must be int32 or int64 or float32, got bfloat16; cast it",
    )
    yield Refusal(
        "counts of another shape",
        (bias, counts[0], None, 0.1),
        ValueError,
        f"{op}tokens_per_expert must have the shape of bias [2, 8], got shape [8]; pass one count per bias",
    )
    yield Refusal(
        "two rates",
        (bias, counts, one(0.1, device), 0.1),
        ValueError,
        f"{op}rate must be given either as rate (a float) or as rate_tensor, got both; pass exactly one and None for the other",
    )
    yield Refusal(
        "several rates",
        (bias, counts, one(0.1, device).expand(2), None),
        ValueError,
        f"{op}rate must have one element, got shape [2]; pass a 0-d tensor",
    )


def expert_bias_update_cost(bias: Tensor, tokens_per_expert: Tensor, rate_tensor: Tensor | None, rate: float | None = None) -> Cost:
    return Cost(size_of(bias, tokens_per_expert, rate_tensor), size_of(bias), 3.0 * bias.numel())


def expert_bias_update_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        return torch.zeros(60, 256, device=device), torch.randint(0, 5000, (60, 256), device=device), None, 1e-3

    yield Bench("L=60 E=256", make, _update_by_hand)


def _update_by_hand(bias: Tensor, tokens_per_expert: Tensor, rate_tensor: None, rate: float) -> Tensor:
    tokens = tokens_per_expert.float()
    return bias + rate * torch.sign(tokens.mean(-1, keepdim=True) - tokens)
