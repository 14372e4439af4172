"""Sample calls, refusals, cost and benches of the op in attach_loss's backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thdops.registry import Bench, Cost, Refusal, Sample


def _one(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def attach_loss_grad_samples(device: torch.device) -> Iterator[Sample]:
    grad = torch.randn(5, 3, device=device)
    replays = tuple({"scale": _one(value, device)} for value in (0.0, 65536.0))
    yield Sample("fp32", (grad, _one(0.1, device), torch.float32), replays, compile=True)
    for scale_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)):
        names = " scale, ".join(str(d).removeprefix("torch.") for d in (scale_dtype, dtype))
        yield Sample(f"{names} loss", (grad, _one(0.1, device, scale_dtype), dtype))
    yield Sample("one element", (grad.bfloat16(), _one(3.0, device).reshape(1, 1), torch.float32))
    yield Sample("the third of several scales", (grad.t(), torch.arange(4.0, device=device)[2], torch.float32))
    yield Sample("more rows", (torch.randn(9, 3, device=device), _one(0.1, device), torch.float32))
    yield Sample("no row", (grad[:0], _one(2.0, device), torch.float32))


def attach_loss_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    grad, scale = torch.randn(5, 3, device=device), _one(1.0, device)
    op, kinds = "attach_loss_grad: ", "float32 or bfloat16 or float16"
    text = f"{op}scale must have one element, got shape [2]; pass a 0-d tensor"
    yield Refusal("several scales", (grad, scale.expand(2), torch.float32), ValueError, text)
    text = f"{op}scale must be {kinds}, got int64 on {device.type}; cast it"
    yield Refusal("integer scale", (grad, scale.long(), torch.float32), TypeError, text)
    text = f"{op}dtype must be {kinds}, got int32 on {device.type}; pass the dtype of the loss"
    yield Refusal("integer dtype", (grad, scale, torch.int32), TypeError, text)


def attach_loss_grad_cost(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Cost:
    return Cost(scale.element_size(), dtype.itemsize)


def attach_loss_grad_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        return torch.randn(8192, 4096, device=device, dtype=torch.bfloat16), _one(1024.0, device), torch.float32

    yield Bench("fp32", make, lambda grad, scale, dtype: torch.ones_like(scale, dtype=dtype) * scale)
