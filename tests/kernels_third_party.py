"""Triton kernels and launchers of the third-party op, and a few that are wrong on purpose (for `broken_ops`).

T rows, D columns, B sequences; rows from cu_seqlens[B] on are padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thdops.ops.launch import launch

_INTEGERS = ["rows", "columns", "x_row", "x_column", "last"]
_GRAD_INTEGERS = ["rows", "columns", "g_row", "g_column", "s_row", "x_row", "x_column", "last"]


@triton.jit(do_not_specialize=_INTEGERS)
def _double_rows(x, cu, y, squares, rows, columns, x_row, x_column, last, factor, BEYOND: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per row: y = factor * x and the row's sum of squares; zeros on padding."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(cu + last).to(tl.int64)
    column = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = column < columns
    read = column < tl.where(row < end, columns, 0)  # nothing on padding
    value = tl.load(x + row * x_row + column * x_column, mask=read, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, value * factor, mask=inside)
    tl.store(squares + row, tl.sum(value * value))
    if BEYOND is not None:  # wrong on purpose: trusts the metadata beyond the last row
        beyond = row + rows
        outside = column < tl.where(beyond < end, columns, 0)
        if BEYOND == "read":
            tl.store(squares + row, tl.sum(tl.load(x + beyond * x_row + column * x_column, mask=outside, other=0.0)))
        else:
            tl.store(x + beyond * x_row + column * x_column, tl.zeros([BLOCK_D], tl.float32), mask=outside)


@triton.jit(do_not_specialize=_GRAD_INTEGERS)
def _double_rows_grad(
    g, s, x, cu, dx, rows, columns, g_row, g_column, s_row, x_row, x_column, last, HAS_G: tl.constexpr, HAS_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    valid = row < tl.load(cu + last).to(tl.int64)
    read = column < tl.where(valid, columns, 0)  # nothing on padding
    total = tl.zeros([BLOCK_D], tl.float32)
    if HAS_G:
        total += 2.0 * tl.load(g + row * g_row + column * g_column, mask=read, other=0.0).to(tl.float32)
    if HAS_S:
        up = tl.load(s + row * s_row, mask=valid, other=0.0)
        total += 2.0 * up * tl.load(x + row * x_row + column * x_column, mask=read, other=0.0).to(tl.float32)
    tl.store(dx + row * columns + column, total, mask=column < columns)


@triton.jit(do_not_specialize=["last"])
def _does_not_compile(cu, y, last, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "this kernel compiles for no GPU")
    tl.store(y, tl.load(cu + last))


def _launch(
    x: Tensor, cu_seqlens: Tensor, strides: tuple[int, ...], factor: float = 2.0, beyond: str | None = None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    cu_seqlens = cu_seqlens.contiguous()
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    squares = torch.empty(rows, dtype=torch.float32, device=x.device)
    args = (x, cu_seqlens, y, squares, rows, columns, *strides, cu_seqlens.shape[0] - 1, factor)
    launch(_double_rows, (rows, 1, 1), args, (beyond, max(16, triton.next_power_of_2(columns))))
    return y, squares


def double_rows(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, cu_seqlens, x.stride())


def double_rows_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    rows, columns = x.shape
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    strides = (*((0, 0) if g is None else g.stride()), *((0,) if s is None else s.stride()), *x.stride())
    cu_seqlens = cu_seqlens.contiguous()
    args = (g, s, x, cu_seqlens, dx, rows, columns, *strides, cu_seqlens.shape[0] - 1)
    launch(_double_rows_grad, (rows, 1, 1), args, (g is not None, s is not None, max(16, triton.next_power_of_2(columns))))
    return dx


# --- wrong on purpose ------------------------------------------------------------------------------------------------------------


def wrong_factor(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, cu_seqlens, x.stride(), factor=2.001)


def ignores_strides(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, cu_seqlens, (x.shape[1], 1))


def reads_beyond(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, cu_seqlens, x.stride(), beyond="read")


def writes_beyond(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, cu_seqlens, x.stride(), beyond="write")


def does_not_compile(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    launch(_does_not_compile, (1, 1, 1), (cu_seqlens, y, cu_seqlens.shape[0] - 1), (16,))
    return y, y[:, 0].float()


def reads_on_the_host(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    end = int(cu_seqlens[-1].item())
    return _launch(x, torch.full_like(cu_seqlens, end), x.stride())
