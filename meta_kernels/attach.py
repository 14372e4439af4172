"""Contracts of attach_loss and of the op in its backward. The loss and the scale are numbers: 0-d, or of one element."""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    FLOAT_DTYPES,
    check_device,
    check_float,
    check_one_element,
    contiguous,
    dtype_of,
    names_of,
    refusal,
)


def _check_number(op: str, argument: str, tensor: Tensor, device: torch.device, owner: str) -> None:
    check_float(op, argument, tensor)
    check_one_element(op, argument, tensor)
    check_device(op, argument, tensor, device, owner)


def check_attach_loss(x: Tensor, loss: Tensor, scale: Tensor | None) -> None:
    """`scale` is None where it is a Python number."""
    op = "attach_loss"
    if not x.is_floating_point():
        raise refusal(op, "x", "be a floating-point tensor", dtype_of(x), "pass one that gradients flow through", TypeError)
    _check_number(op, "loss", loss, x.device, "x")
    if scale is not None:
        _check_number(op, "scale", scale, x.device, "x")


def check_attach_loss_grad(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    op = "attach_loss_grad"
    _check_number(op, "scale", scale, grad.device, "grad")
    if dtype not in FLOAT_DTYPES and (dtype != torch.float64 or grad.device.type != "cpu"):
        got = f"{str(dtype).removeprefix('torch.')} on {grad.device.type}"
        raise refusal(op, "dtype", f"be {names_of(FLOAT_DTYPES)}", got, "pass the dtype of the loss", TypeError)


def fake_attach_loss_grad(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return contiguous(dtype=dtype, device=grad.device)
