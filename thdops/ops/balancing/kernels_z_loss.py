"""Triton kernels and launchers of `moe_z_loss` and its gradient.

T rows, E experts. The forward reads the logits once and keeps lse = logsumexp(x) of each row [T], so that the gradient, which reads
them once more, needs no sum over a row. A row that counts for nothing (padding, or all -inf) has lse -inf: that is all the gradient
has to know of padding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import balancing as contract
from thdops.ops.balancing.tiling import power_of_two, rows_of
from thdops.ops.launch import launch, multiprocessors

_TILE = 2048  # elements that four warps hold: some 70 registers a thread in fp32
_WIDEST = 4096  # columns of a tile; more are walked in several
_PROGRAMS = 6  # per multiprocessor, all resident: one program's sums hide behind the others' loads
_PARTIALS = 2048  # loaded at a time by the one program that adds them


@triton.jit(do_not_specialize=["rows", "width", "row_stride", "column_stride", "mask_stride"])
def reduce_rows(
    sums, counts, lse, logits, padding_mask, rows, width, row_stride, column_stride, mask_stride,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """lse of each row, -inf on padding; sums[program] = sum of lse^2 over its valid rows, counts[program] = number of these."""
    experts = width * VECTOR
    row_step = row_stride.to(tl.int64) * VECTOR
    total = tl.zeros([BLOCK_T], tl.float32)
    lost = tl.zeros([BLOCK_T], tl.float32)  # what rounding took from the total, given back to the next row (Kahan)
    count = tl.zeros([BLOCK_T], tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK_T
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK_T, rows.to(tl.int64), stride):
        row = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        valid = row < rows
        if padding_mask is not None:
            valid = valid & (tl.load(padding_mask + row * mask_stride, mask=valid, other=1) == 0)
        largest = tl.full([BLOCK_T], float("-inf"), tl.float32)
        shift = tl.zeros([BLOCK_T], tl.float32)
        mass = tl.zeros([BLOCK_T], tl.float32)  # sum of exp(x - shift) so far
        for first in range(0, experts, BLOCK_E):
            expert = first + tl.arange(0, BLOCK_E).to(tl.int64)
            at = logits + (row * row_step)[:, None] + (expert if UNIT else expert * column_stride)[None, :]
            inside = valid[:, None] & (expert < experts)[None, :]
            x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK_T, BLOCK_E]
            previous = largest
            largest = tl.maximum(largest, tl.max(x, axis=1))
            # Never inf - inf: a row of -inf has mass 0, one that holds +inf has mass +inf.
            shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
            mass = mass * tl.exp(previous - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        some = valid & (mass != 0)
        value = tl.where(some, tl.log(tl.where(some, mass, 1.0)) + shift, float("-inf"))
        tl.store(lse + row, value, mask=row < rows)
        term = tl.where(valid, value * value, 0.0) - lost
        longer = total + term
        # An infinite sum stays one: inf - inf would make it NaN.
        lost = tl.where(tl.abs(longer) == float("inf"), 0.0, (longer - total) - term)
        total = longer
        count += valid.to(tl.int64)
    tl.store(sums + tl.program_id(0), tl.sum(total))
    tl.store(counts + tl.program_id(0), tl.sum(count))


@triton.jit(do_not_specialize=["programs"])
def finish(loss, factor, sums, counts, coeff_tensor, programs, coeff, BLOCK: tl.constexpr):
    """The factor coeff / max(n, 1), and the loss: partial sums always added in the same order, by one program."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, programs, BLOCK):
        inside = start + lanes < programs
        total += tl.load(sums + start + lanes, mask=inside, other=0.0)
        count += tl.load(counts + start + lanes, mask=inside, other=0)
    tokens = tl.maximum(tl.sum(count), 1).to(tl.float32)
    scale = tl.load(coeff_tensor).to(tl.float32) if coeff_tensor is not None else coeff
    value = tl.div_rn(scale, tokens)
    tl.store(factor, value)
    tl.store(loss, tl.where(value == 0, 0.0, value * tl.sum(total)))


@triton.jit(do_not_specialize=["rows", "width", "row_stride", "column_stride", "lse_stride"])
def store_gradient(
    grad, grad_loss, factor, logits, lse, rows, width, row_stride, column_stride, lse_stride,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """grad[t, e] = factor * grad_loss * 2 * lse[t] * exp(x[t, e] - lse[t]), +0.0 where lse is -inf or the factor is 0."""
    experts = width * VECTOR
    blocks = tl.cdiv(experts, BLOCK_E)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    expert = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)  # [BLOCK_E]
    scale = tl.load(factor)
    statistic = tl.load(lse + row * lse_stride, mask=row < rows, other=float("-inf"))
    counts = tl.where(scale == 0, float("-inf"), statistic) != float("-inf")  # [BLOCK_T]
    statistic = tl.where(counts, statistic, 0.0)
    slope = scale * tl.load(grad_loss) * 2 * statistic

    exists = (expert < experts)[None, :]
    row_step = row_stride.to(tl.int64) * VECTOR
    at = logits + (row * row_step)[:, None] + (expert if UNIT else expert * column_stride)[None, :]
    x = tl.load(at, mask=counts[:, None] & exists, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_E]
    value = slope[:, None] * tl.exp(x - statistic[:, None])
    out = grad + (row * (width.to(tl.int64) * VECTOR))[:, None] + expert[None, :]
    tl.store(out, tl.where(counts[:, None], value, 0.0), mask=(row < rows)[:, None] & exists)


# --- launchers --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _tile(experts: int) -> tuple[int, int]:
    """(BLOCK_T, BLOCK_E)."""
    block_e = min(power_of_two(experts), _WIDEST)
    return max(_TILE // block_e, 1), block_e


def moe_z_loss(
    logits: Tensor, coeff_tensor: Tensor | None, padding_mask: Tensor | None, coeff: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    loss, factor, lse = contract.fake_moe_z_loss(logits, coeff_tensor, padding_mask, coeff)
    rows, experts = logits.shape
    block_t, block_e = _tile(experts)
    programs = min(triton.cdiv(rows, block_t), multiprocessors(logits.get_device()) * _PROGRAMS)
    sums = torch.empty(programs, dtype=torch.float32, device=logits.device)
    counts = torch.empty(programs, dtype=torch.int64, device=logits.device)
    width, row_stride, column_stride, vector, unit = rows_of(logits)
    mask_stride = 0 if padding_mask is None else padding_mask.stride(0)
    args = (sums, counts, lse, logits, padding_mask, rows, width, row_stride, column_stride, mask_stride)
    launch(reduce_rows, (programs, 1, 1), args, (vector, unit, block_t, block_e))
    launch(finish, (1, 1, 1), (loss, factor, sums, counts, coeff_tensor, programs, coeff or 0.0), (_PARTIALS,), num_warps=8)
    return loss, factor, lse


def moe_z_loss_grad(grad_loss: Tensor, factor: Tensor, logits: Tensor, lse: Tensor) -> Tensor:
    grad = contract.fake_moe_z_loss_grad(grad_loss, factor, logits, lse)
    rows, experts = logits.shape
    block_t, block_e = _tile(experts)
    width, row_stride, column_stride, vector, unit = rows_of(logits, grad)
    programs = triton.cdiv(rows, block_t) * triton.cdiv(experts, block_e)
    args = (grad, grad_loss, factor, logits, lse, rows, width, row_stride, column_stride, lse.stride(0))
    launch(store_gradient, (programs, 1, 1), args, (vector, unit, block_t, block_e))
    return grad
