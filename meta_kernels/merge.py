"""Contracts of the merge ops.

T rows, H heads, D head dim. out_a, out_b [T, H, D] and lse_a, lse_b [H, T]: attention of the same queries over two sets of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.contract import (
    FLOAT_DTYPES,
    accumulation_dtype,
    check_device,
    check_dtype,
    check_float,
    check_rank,
    contiguous,
    names_of,
    refusal,
    shape_of,
)


def statistics_dtype(out_a: Tensor, out_b: Tensor) -> torch.dtype:
    """Both LSE are fp32; fp64 where a part is fp64 (CPU)."""
    return accumulation_dtype(torch.promote_types(out_a.dtype, out_b.dtype))


def _check_parts(op: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        check_rank(op, name, out, 3, "[T, H, D]")
        check_float(op, name, out)
    check_device(op, "out_b", out_b, out_a.device, "out_a")
    if out_b.shape != out_a.shape:
        fix = "pass two results for the same queries"
        raise refusal(op, "out_b", f"have the shape of out_a {shape_of(out_a)}", shape_of(out_b), fix)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_like_lse(op, name, lse, out_a, out_b)


def _check_like_lse(op: str, name: str, lse: Tensor, out_a: Tensor, out_b: Tensor) -> None:
    rows, heads, _ = out_a.shape
    check_dtype(op, name, lse, (statistics_dtype(out_a, out_b),))
    check_device(op, name, lse, out_a.device, "out_a")
    if lse.shape != (heads, rows):
        fix = "transpose it where it is [T, H]"
        raise refusal(op, name, f"have one entry per head and row, [H, T] = [{heads}, {rows}]", shape_of(lse), fix)


# --- merge_attention -----------------------------------------------------------------------------------------------------------


def check_merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None = None) -> None:
    _check_parts("merge_attention", out_a, lse_a, out_b, lse_b)
    served = (None, *FLOAT_DTYPES) if out_a.device.type != "cpu" else (None, *FLOAT_DTYPES, torch.float64)
    if dtype not in served:
        got = f"{str(dtype).removeprefix('torch.')} on {out_a.device.type}"
        raise refusal("merge_attention", "dtype", f"be {names_of(FLOAT_DTYPES)}", got, "pass another, or None", TypeError)


def fake_merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    result = torch.promote_types(out_a.dtype, out_b.dtype) if dtype is None else dtype
    return (
        contiguous(*out_a.shape, dtype=result, device=out_a.device),
        contiguous(*lse_a.shape, dtype=lse_a.dtype, device=out_a.device),
    )


# --- merge_attention_grad ------------------------------------------------------------------------------------------------------


def check_merge_attention_grad(
    grad_out: Tensor | None, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    op = "merge_attention_grad"
    _check_parts(op, out_a, lse_a, out_b, lse_b)
    if grad_out is not None:
        check_float(op, "grad_out", grad_out)
        check_device(op, "grad_out", grad_out, out_a.device, "out_a")
        if grad_out.shape != out_a.shape:
            raise refusal(op, "grad_out", f"have the shape of out_a {shape_of(out_a)}", shape_of(grad_out), "pass out's gradient")
    if grad_lse is not None:
        _check_like_lse(op, "grad_lse", grad_lse, out_a, out_b)


def fake_merge_attention_grad(
    grad_out: Tensor | None, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_a, grad_lse_a, grad_b, grad_lse_b = (
        contiguous(*x.shape, dtype=x.dtype, device=out_a.device) for x in (out_a, lse_a, out_b, lse_b)
    )
    return grad_a, grad_lse_a, grad_b, grad_lse_b
