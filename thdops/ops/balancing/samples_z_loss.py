"""Sample calls, refusals, padding, cost and benches of `moe_z_loss` and its gradient. T rows, E experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype
from thdops.ops.balancing.samples import mask_of_padding, normal, one
from thdops.ops.padding.samples import size_of
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BENCH_SHAPES = ((65536, 256), (65536, 64), (8192, 256))


def _masked_experts(logits: Tensor) -> Tensor:
    """Two experts out of reach in every second row."""
    logits = logits.clone()
    logits[::2, 1::3] = float("-inf")
    return logits


# --- moe_z_loss -------------------------------------------------------------------------------------------------------------------


def moe_z_loss_samples(device: torch.device) -> Iterator[Sample]:
    mask = mask_of_padding(19, device)
    yield Sample(
        "float coefficient",
        (normal(40, 8, device), None, None, 0.01),
        tuple({"logits": normal(40, 8, device, seed=k)} for k in (5, 6)),
        compile=True,
    )
    yield Sample("float coefficient, other sizes", (normal(21, 12, device), None, None, 0.01))
    yield Sample(
        "coefficient and mask on the device, experts out of reach",
        (_masked_experts(normal(19, 8, device)), one(0.01, device), mask, None),
        (
            {"coeff_tensor": one(0.5, device), "padding_mask": ~mask},
            {"coeff_tensor": one(0.0, device), "padding_mask": torch.zeros_like(mask)},
            {"logits": normal(19, 8, device, seed=7), "padding_mask": torch.ones_like(mask)},
        ),
        compile=True,
    )
    for dtype in (torch.bfloat16, torch.float16):
        yield Sample(f"{dtype}, strided mask", (normal(19, 12, device, dtype), None, mask_of_padding(38, device)[::2], 1.0))
    yield Sample("transposed", (normal(12, 19, device).t(), one(1.0, device).reshape(1), mask, None))
    yield Sample("sliced columns", (normal(19, 20, device)[:, 3:15], None, mask, 1.0))
    yield Sample("every second row and column", (normal(38, 16, device)[::2, ::2], None, mask, 1.0))
    yield Sample("expanded row", (normal(1, 8, device).expand(9, 8), None, None, 1.0))
    yield Sample("large logits", (1e4 * normal(9, 8, device), None, None, 1e-6))
    yield Sample("coefficient 0", (normal(9, 8, device), None, None, 0.0))
    yield Sample("nothing but padding", (normal(5, 8, device), None, torch.ones(5, dtype=torch.bool, device=device), 1.0))
    yield Sample("no row", (normal(0, 8, device), None, None, 1.0))
    yield Sample("one expert", (normal(5, 1, device), None, None, 1.0))
    yield Sample("wider than a block", (normal(2, 4100, device), None, None, 1.0))


def moe_z_loss_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "moe_z_loss: "
    logits = normal(6, 8, device)
    yield Refusal(
        "integers",
        (logits.int(), None, None, 0.1),
        TypeError,
        f"{op}logits must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal(
        "rank 3",
        (logits[None], None, None, 0.1),
        ValueError,
        f"{op}logits must have 2 dimensions [T, E], got shape [1, 6, 8]; reshape it",
    )
    yield Refusal(
        "no expert",
        (logits[:, :0], None, None, 0.1),
        ValueError,
        f"{op}logits must have at least one expert, got shape [6, 0]; pass [T, E]",
    )
    yield Refusal(
        "no coefficient",
        (logits, None, None, None),
        ValueError,
        f"{op}coeff must be given either as coeff (a float) or as coeff_tensor, got neither;"
        " pass exactly one and None for the other",
    )
    yield Refusal(
        "coefficient of a bad dtype",
        (logits, one(0.1, device).half(), None, None),
        TypeError,
        f"{op}coeff must be float32, got float16; cast it",
    )
    yield Refusal(
        "mask of other rows",
        (logits, None, mask_of_padding(5, device), 0.1),
        ValueError,
        f"{op}padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits",
    )


def moe_z_loss_padding(
    logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None
) -> Padding:
    if padding_mask is None:
        return Padding(outputs=(None, None, None))
    return Padding({"logits": PadRows(padding_mask)}, (None, None, PadRows(padding_mask, value=float("-inf"))))


def moe_z_loss_cost(logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None) -> Cost:
    written = (logits.shape[0] + 2) * accumulation_dtype(logits.dtype).itemsize
    return Cost(size_of(logits, padding_mask), written, 4.0 * logits.numel())


def moe_z_loss_benches(device: torch.device) -> Iterator[Bench]:
    for rows, experts in _BENCH_SHAPES:

        def make(rows: int = rows, experts: int = experts) -> tuple[Any, ...]:
            return torch.randn(rows, experts, device=device), None, None, 1e-3

        yield Bench(f"T={rows} E={experts}", make, _loss_by_hand)


def _loss_by_hand(logits: Tensor, coeff_tensor: None, padding_mask: None, coeff: float) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.logsumexp(logits, dim=-1)
    return lse.square().mean() * coeff, torch.full_like(lse[0], coeff / logits.shape[0]), lse


# --- moe_z_loss_grad --------------------------------------------------------------------------------------------------------------


def _grad_call(logits: Tensor, factor: float, grad_loss: float, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
    lse = logits.to(accumulation_dtype(logits.dtype)).logsumexp(1)
    if padding_mask is not None:
        lse = torch.where(padding_mask, float("-inf"), lse)
    return one(grad_loss, logits.device), one(factor, logits.device), logits, lse


def moe_z_loss_grad_samples(device: torch.device) -> Iterator[Sample]:
    mask = mask_of_padding(19, device)
    base = _grad_call(normal(40, 8, device), 0.01, 1.0)
    other = _grad_call(normal(40, 8, device, seed=5), 0.01, 1.0, mask_of_padding(40, device))
    replays = (
        {"grad_loss": one(-2.5, device)},
        {"factor": one(0.0, device)},
        {"logits": other[2], "lse": other[3]},
    )
    yield Sample("no padding", base, replays, compile=True)
    yield Sample(
        "padding, experts out of reach", _grad_call(_masked_experts(normal(19, 12, device)), 0.02, 3.0, mask), compile=True
    )
    for dtype in (torch.bfloat16, torch.float16):
        yield Sample(f"{dtype}", _grad_call(normal(19, 12, device, dtype), 1.0, 1.0, mask))
    grad_loss, factor, logits, lse = _grad_call(normal(12, 19, device).t(), 0.02, 3.0, mask)
    strided = torch.stack((lse, lse), 1)[:, 0]
    yield Sample("transposed, strided lse, one element each", (grad_loss.reshape(1), factor.reshape(1, 1), logits, strided))
    yield Sample("sliced columns", _grad_call(normal(19, 20, device)[:, 3:15], 0.02, 3.0, mask))
    yield Sample("expanded row", _grad_call(normal(1, 8, device).expand(9, 8), 0.02, 3.0))
    yield Sample("factor 0", _grad_call(normal(9, 8, device), 0.0, 3.0))
    yield Sample("no row", _grad_call(normal(0, 8, device), 0.02, 3.0))
    yield Sample("one expert", _grad_call(normal(5, 1, device), 0.02, 3.0))
    yield Sample("wider than a block", _grad_call(normal(2, 4100, device), 0.02, 3.0))


def moe_z_loss_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "moe_z_loss_grad: "
    grad_loss, factor, logits, lse = _grad_call(normal(6, 8, device), 0.1, 1.0)
    yield Refusal(
        "integers",
        (grad_loss, factor, logits.int(), lse),
        TypeError,
        f"{op}logits must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it",
    )
    yield Refusal(
        "gradient of several elements",
        (grad_loss.expand(2), factor, logits, lse),
        ValueError,
        f"{op}grad_loss must have one element, got shape [2]; pass a 0-d tensor",
    )
    yield Refusal(
        "factor of a bad dtype",
        (grad_loss, factor.bfloat16(), logits, lse),
        TypeError,
        f"{op}factor must be float32, got bfloat16; cast it",
    )
    yield Refusal(
        "lse of other rows",
        (grad_loss, factor, logits, lse[:5]),
        ValueError,
        f"{op}lse must be [T] with one entry per row of logits (6), got shape [5]; pass what the forward returned",
    )


def moe_z_loss_grad_padding(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Padding:
    rows = PadRows(lse == float("-inf"))
    return Padding({"logits": rows}, (rows,))


def moe_z_loss_grad_cost(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Cost:
    return Cost(size_of(logits, lse) + 8, size_of(logits), 4.0 * logits.numel())


def moe_z_loss_grad_benches(device: torch.device) -> Iterator[Bench]:
    for rows, experts in _BENCH_SHAPES:

        def make(rows: int = rows, experts: int = experts) -> tuple[Any, ...]:
            return _grad_call(torch.randn(rows, experts, device=device), 1e-3 / rows, 1.0)

        yield Bench(f"T={rows} E={experts}", make, _grad_by_hand)


def _grad_by_hand(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Tensor:
    return (grad_loss * factor * 2 * lse)[:, None] * (logits - lse[:, None]).exp()
