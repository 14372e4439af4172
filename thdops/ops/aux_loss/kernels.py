"""Triton kernels of the aux-loss ops.

T rows (tokens), E experts, M sequences folded into columns; N counted tokens, K top-k. A `[T, M*E]` tensor is walked as `folds`
groups of `width` columns: M groups of E where the padding mask is `[T, M]`, so that a block of columns sees one mask, else one
group. Blocks are BLOCK_T rows by BLOCK_E columns. Both passes move bytes and do nothing else worth counting, so what matters is
16-byte accesses, several of them in flight per thread, and every multiprocessor busy to the end.

Row strides and widths reach a kernel in units of VECTOR elements (16 bytes where every row is aligned to that, else 1): a product
with a constant tells the compiler that rows are aligned, without specialising it for a value of the integer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import aux_loss as contract
from thdops.ops.launch import launch, launch_as, multiprocessors

_THREADS = 128  # four warps
_VECTOR_BYTES = 16
_ACCESSES = 4  # of 16 bytes, by each thread to one block
_UNROLL = 2  # blocks whose loads are in flight together
_PROGRAMS = 8  # per multiprocessor: 128 KiB in flight on each, and one program's sums hide behind the others' loads
_WIDEST = 1024  # columns of a block
_NARROW = 16  # columns of a block where columns are not adjacent: then more rows, which may be
_PARTIALS = 2048  # loaded at a time by the one program of the second stage: all of them, on up to 256 multiprocessors


@triton.jit
def locate(folds, group, BLOCK_E: tl.constexpr):
    """(share, shares, fold, first): this program walks every `shares`-th chunk of rows from the `share`-th on, in the columns from
    `first` on of one group. Neighbouring programs have neighbouring columns.
    """
    per_fold = tl.cdiv(group, BLOCK_E)
    blocks = folds * per_fold
    block = tl.program_id(0) % blocks
    share = (tl.program_id(0) // blocks).to(tl.int64)
    shares = (tl.num_programs(0) // blocks).to(tl.int64)
    return share, shares, (block // per_fold).to(tl.int64), (block % per_fold).to(tl.int64) * BLOCK_E


@triton.jit(
    do_not_specialize=[
        "rows", "folds", "width", "row_stride", "column_stride", "tokens_stride", "mask_row_stride", "mask_fold_stride",
    ]
)  # fmt: skip
def sum_rows(
    partials,
    probs,
    tokens_per_expert,
    padding_mask,
    rows,
    folds,
    width,
    row_stride,
    column_stride,
    tokens_stride,
    mask_row_stride,
    mask_fold_stride,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    DENSE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """partials[program] = sum over its rows and columns of probs[t, c] * tokens_per_expert[c], padding rows left out.

    UNIT is 1 where columns are adjacent in memory, 0 where rows are, -1 where neither; DENSE: a block is BLOCK_T whole rows without
    a gap; EVEN: no block overruns the columns.
    Example: T = 8, one block of columns, BLOCK_T = UNROLL = 2, two programs: the first sums rows 0..3, the second rows 4..7.
    """
    group = width * VECTOR
    share, shares, fold, first = locate(folds, group, BLOCK_E)
    lanes = tl.arange(0, BLOCK_E)
    column = fold * group + first
    exists = first + lanes < group  # [BLOCK_E]
    tokens_at = tokens_per_expert + (column + lanes) * tokens_stride
    tokens = tl.load(tokens_at).to(tl.float32) if EVEN else tl.load(tokens_at, mask=exists, other=0).to(tl.float32)

    row_step = BLOCK_E if DENSE else row_stride.to(tl.int64) * VECTOR
    columns_at = probs + column + lanes if UNIT == 1 else probs + (column + lanes) * column_stride.to(tl.int64)

    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(share * BLOCK_T * UNROLL, rows.to(tl.int64), shares * BLOCK_T * UNROLL):
        for step in tl.static_range(UNROLL):
            row = start + step * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
            wanted = row < rows
            if padding_mask is not None:
                is_padding = tl.load(padding_mask + row * mask_row_stride + fold * mask_fold_stride, mask=wanted, other=1)
                wanted = wanted & (is_padding == 0)
            inside = wanted[:, None]
            if not EVEN:
                inside = inside & exists[None, :]
            rows_at = row if UNIT == 0 else row * row_step
            total += tl.load(columns_at[None, :] + rows_at[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(0), tl.sum(total * tokens[None, :]))


@triton.jit(do_not_specialize=["count", "total_num_tokens", "num_experts", "topk"])
def finish(
    loss,
    coefficient,
    partials,
    total_num_tokens_tensor,
    coeff_tensor,
    count,
    total_num_tokens,
    num_experts,
    topk,
    coeff,
    BLOCK: tl.constexpr,
):
    """The coefficient from N, K, E, and the loss from `count` partial sums, always added in the same order. One program."""
    if total_num_tokens_tensor is not None:
        tokens = tl.load(total_num_tokens_tensor).to(tl.float32)
    else:
        tokens = total_num_tokens.to(tl.float32)
    scale = tl.load(coeff_tensor).to(tl.float32) if coeff_tensor is not None else coeff
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        total += tl.load(partials + start + lanes, mask=start + lanes < count, other=0.0)

    # Left to right and correctly rounded, as the specification: N * N, which may not fit, is never formed.
    divisor = tl.where(tokens > 0, tokens, 1.0)
    factor = tl.div_rn(scale * num_experts.to(tl.float32), topk.to(tl.float32))
    factor = tl.where(tokens > 0, tl.div_rn(tl.div_rn(factor, divisor), divisor), 0.0)
    tl.store(coefficient, factor)
    tl.store(loss, tl.where(factor == 0, 0.0, factor * tl.sum(total)))


@triton.jit(do_not_specialize=["rows", "folds", "width", "tokens_stride", "mask_row_stride", "mask_fold_stride"])
def store_rows(
    grad,
    grad_loss,
    coefficient,
    tokens_per_expert,
    padding_mask,
    rows,
    folds,
    width,
    tokens_stride,
    mask_row_stride,
    mask_fold_stride,
    VECTOR: tl.constexpr,
    DENSE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """grad[t, c] = coefficient * tokens_per_expert[c] * grad_loss, 0 on padding rows: one row, made once, stored many times."""
    group = width * VECTOR
    share, shares, fold, first = locate(folds, group, BLOCK_E)
    lanes = tl.arange(0, BLOCK_E)
    column = fold * group + first
    exists = first + lanes < group  # [BLOCK_E]
    tokens_at = tokens_per_expert + (column + lanes) * tokens_stride
    tokens = tl.load(tokens_at).to(tl.float32) if EVEN else tl.load(tokens_at, mask=exists, other=0).to(tl.float32)
    factor = tl.load(coefficient)
    value = tl.where(factor == 0, 0.0, factor * tokens * tl.load(grad_loss))
    block = tl.broadcast_to(value.to(grad.dtype.element_ty)[None, :], [BLOCK_T, BLOCK_E])

    row_step = BLOCK_E if DENSE else folds.to(tl.int64) * group
    columns_at = grad + column + lanes
    for start in range(share * BLOCK_T, rows.to(tl.int64), shares * BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        inside = (row < rows)[:, None]
        if not EVEN:
            inside = inside & exists[None, :]
        at = columns_at[None, :] + (row * row_step)[:, None]
        if padding_mask is not None:
            is_padding = tl.load(padding_mask + row * mask_row_stride + fold * mask_fold_stride, mask=row < rows, other=1)
            tl.store(at, tl.where((is_padding == 0)[:, None], block, 0.0), mask=inside)
        else:
            tl.store(at, block, mask=inside)


# --- launchers --------------------------------------------------------------------------------------------------------------------


class _Tiling(NamedTuple):
    """How a tensor is cut: `vector` elements per access, `programs`, and the constants DENSE, EVEN, BLOCK_T, BLOCK_E."""

    vector: int
    programs: int
    constants: tuple[bool, bool, int, int]


@lru_cache(maxsize=1024)
def _tiling(
    rows: int, folds: int, width: int, row_stride: int, unit: int, itemsize: int, aligned: bool, unroll: int, sms: int
) -> _Tiling:
    vector = _VECTOR_BYTES // itemsize
    if not (unit == 1 and aligned and row_stride % vector == 0 and width % vector == 0):
        vector = 1
    block_e = _block_width(width) if unit == 1 else min(_block_width(width), _NARROW)
    block_t = max(_THREADS * _ACCESSES * _VECTOR_BYTES // itemsize // block_e, 1)
    blocks = folds * -(-width // block_e)
    chunks = -(-rows // (block_t * unroll))
    shares = min(chunks, max(sms * _PROGRAMS // blocks, 1))
    dense = unit == 1 and folds == 1 and row_stride == width == block_e
    return _Tiling(vector, shares * blocks, (dense, width % block_e == 0, block_t, block_e))


def _block_width(width: int) -> int:
    """A power of two that divides `width` if that is not a narrow one, so that no lane idles; else the next one."""
    divisor = width & -width
    return min(divisor if divisor >= 64 else triton.next_power_of_2(width), _WIDEST)


def _mask_layout(padding_mask: Tensor | None) -> tuple[int, int, int]:
    """(folds, stride of a row, stride of a fold)."""
    if padding_mask is None:
        return 1, 0, 0
    if padding_mask.dim() == 1:
        return 1, padding_mask.stride(0), 0
    return padding_mask.shape[1], padding_mask.stride(0), padding_mask.stride(1)


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, bool] | None:
    """What of a tensor a compiled kernel depends on."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % _VECTOR_BYTES == 0)


def _launch(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: tuple[Any, ...], kinds: Any, largest: int, num_warps: int = 4
) -> None:
    """Launch under a key that costs less than looking at every argument: `kinds` of the tensors that are not freshly allocated
    (those are aligned), and `largest`, at least every integer.
    """
    grid = (programs, 1, 1)
    if largest < 2**31:
        launch_as((id(kernel), constants, kinds), kernel, grid, args, constants, num_warps)
    else:
        launch(kernel, grid, args, constants, num_warps)


def moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens_tensor: Tensor | None,
    coeff_tensor: Tensor | None,
    padding_mask: Tensor | None,
    num_experts: int,
    topk: int,
    total_num_tokens: int | None = None,
    coeff: float | None = None,
) -> tuple[Tensor, Tensor]:
    loss, coefficient = contract.fake_moe_aux_loss(
        probs, tokens_per_expert, total_num_tokens_tensor, coeff_tensor, padding_mask, num_experts, topk, total_num_tokens, coeff
    )
    rows, columns = probs.shape
    row_stride, column_stride = probs.stride()
    tokens_stride = tokens_per_expert.stride(0)
    folds, mask_row_stride, mask_fold_stride = _mask_layout(padding_mask)
    width = columns // folds
    unit = 1 if column_stride == 1 else 0 if row_stride == 1 else -1
    aligned = probs.data_ptr() % _VECTOR_BYTES == 0
    sms = multiprocessors(probs.get_device())
    tiling = _tiling(rows, folds, width, row_stride, unit, probs.element_size(), aligned, _UNROLL, sms)
    vector, programs, constants = tiling
    partials = torch.empty(programs, dtype=torch.float32, device=probs.device)
    _launch(
        sum_rows,
        programs,
        (
            partials, probs, tokens_per_expert, padding_mask, rows, folds, width // vector, row_stride // vector, column_stride,
            tokens_stride, mask_row_stride, mask_fold_stride,
        ),
        (unit, vector, *constants, _UNROLL),
        (probs.dtype, aligned, _kind(tokens_per_expert), _kind(padding_mask)),
        max(rows, columns, row_stride, column_stride, tokens_stride, mask_row_stride, mask_fold_stride),
    )  # fmt: skip
    count = total_num_tokens or 0
    _launch(
        finish,
        1,
        (
            loss, coefficient, partials, total_num_tokens_tensor, coeff_tensor, programs, count, num_experts, topk, coeff or 0.0,
        ),
        (_PARTIALS,),
        (_kind(total_num_tokens_tensor), _kind(coeff_tensor)),
        max(programs, count, num_experts),
        num_warps=8,
    )  # fmt: skip
    return loss, coefficient


def moe_aux_loss_grad(
    grad_loss: Tensor,
    coefficient: Tensor,
    tokens_per_expert: Tensor,
    padding_mask: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    grad = contract.fake_moe_aux_loss_grad(grad_loss, coefficient, tokens_per_expert, padding_mask, rows, dtype)
    columns = grad.shape[1]
    tokens_stride = tokens_per_expert.stride(0)
    folds, mask_row_stride, mask_fold_stride = _mask_layout(padding_mask)
    width = columns // folds
    aligned = grad.data_ptr() % _VECTOR_BYTES == 0
    tiling = _tiling(rows, folds, width, columns, 1, grad.element_size(), aligned, 1, multiprocessors(grad.get_device()))
    vector, programs, constants = tiling
    _launch(
        store_rows,
        programs,
        (
            grad, grad_loss, coefficient, tokens_per_expert, padding_mask, rows, folds, width // vector, tokens_stride,
            mask_row_stride, mask_fold_stride,
        ),
        (vector, *constants),
        (dtype, _kind(grad_loss), _kind(coefficient), _kind(tokens_per_expert), _kind(padding_mask)),
        max(rows, columns, tokens_stride, mask_row_stride, mask_fold_stride),
    )  # fmt: skip
    return grad
