"""Triton kernels and launchers of the dispatch ops; `kernels_sort.py` finds out where rows go.

T rows (tokens), E experts, K top-k. A pair (t, k) is token t at its k-th expert; its number is t*K + k.

Bytes are all that counts: a row is read once and written K times, or read K times and written once, each row being one run of
memory. Widths and row strides reach a kernel in units of VECTOR (or UNIT) elements, 16 bytes where every row is aligned to that: a
product with a constant tells the compiler that rows are aligned, without specialising it for a value of the integer.
"""

from __future__ import annotations

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import dispatch as contract
from thdops.ops.dispatch.kernels_sort import sort_pairs
from thdops.ops.launch import launch

# --- one row to its K rows --------------------------------------------------------------------------------------------------------

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_COPIED = 512  # elements of at most 8 bytes that a program copies at a time
_COPY_WARPS = 2
_MOST_T = 128  # rows of a program where rows are narrow


@triton.jit
def _destination(map, pair, wanted, pairs):
    """(row of each pair, exists, has an expert): whatever stands in map, a row that exists lies in [0, pairs)."""
    number = tl.load(map + pair, mask=wanted, other=0)
    row = tl.where(number < 0, ~number, number).to(tl.int64)
    exists = wanted & (row < pairs)
    return row, exists, exists & (number >= 0)


@triton.jit(do_not_specialize=["source", "target", "tokens", "copies", "row_stride", "width"])
def copy_rows_kernel(
    source, target, map, tokens, copies, row_stride, width,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """target[row of (t, k)] = source[t], zero where the pair has no expert, for [BLOCK_T, BLOCK_W] of the source.

    Neighbouring programs have neighbouring columns.
    """
    row_stride, width = row_stride.to(tl.int64) * UNIT, width.to(tl.int64) * UNIT
    column_blocks = tl.cdiv(width, BLOCK_W)
    block = tl.program_id(0).to(tl.int64)
    t = block // column_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = block % column_blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    read = source.to(tl.int64).to(tl.pointer_type(DTYPE))
    write = target.to(tl.int64).to(tl.pointer_type(DTYPE))
    if UNIT == 2:
        read, write = tl.multiple_of(read, 16), tl.multiple_of(write, 16)
    pairs = tokens.to(tl.int64) * copies
    inside = (columns < width)[None, :]
    value = tl.load(read + t[:, None] * row_stride + columns[None, :], mask=(t < tokens)[:, None] & inside, other=0)
    for k in range(copies):
        row, exists, legal = _destination(map, t * copies + k, t < tokens, pairs)
        kept = tl.where(legal[:, None], value, 0)
        tl.store(write + row[:, None] * width + columns[None, :], kept, mask=exists[:, None] & inside)


def _launch_copy(source: Tensor, map: Tensor, target: Tensor) -> None:
    """Copy rows as bytes, so that every dtype is served and a NaN keeps its payload."""
    source = _in_runs(source)
    tokens, copies = map.shape
    if target.numel() == 0:
        return
    row_stride, width = source.stride(0) * source.itemsize, source.numel() // tokens * source.itemsize
    aligned = gcd(16, source.data_ptr(), row_stride, width)
    size = min(aligned, 8)
    block_w = min(triton.next_power_of_2(width // size), _COPIED)
    block_t = min(_COPIED // block_w, _MOST_T)
    launch(
        copy_rows_kernel,
        (triton.cdiv(tokens, block_t) * triton.cdiv(width // size, block_w), 1, 1),
        (source.data_ptr(), target.data_ptr(), map, tokens, copies, row_stride // aligned, width // aligned),
        (_INTEGERS[size], aligned // size, block_t, block_w),
        _COPY_WARPS,
    )


def _in_runs(x: Tensor) -> Tensor:
    """`x`, or a copy where a row of it is not one run of memory. Rows may be any distance apart, none included."""
    return x if x.is_contiguous() or x[:1].is_contiguous() else x.contiguous()


def permute_tokens(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, offsets, map = contract.fake_permute_tokens(x, indices, num_experts)
    sort_pairs(indices, offsets, map)
    _launch_copy(x, map, rows)
    return rows, offsets, map


# --- K rows to one ----------------------------------------------------------------------------------------------------------------

_SUMMED_BYTES = 4096  # of each of UNROLL rows that a program has in flight
_UNROLL = 8


@triton.jit(do_not_specialize=["tokens", "copies", "row_stride", "width"])
def sum_rows_kernel(
    rows, map, weights, out, tokens, copies, row_stride, width,
    VECTOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k, in this order, of weights[t, k] * rows[map[t, k]], for [BLOCK_T, BLOCK_W] of out.

    The rows of pairs without an expert are not read, nor are their weights. UNROLL rows are in flight together.
    """
    row_stride, width = row_stride.to(tl.int64) * VECTOR, width.to(tl.int64) * VECTOR
    column_blocks = tl.cdiv(width, BLOCK_W)
    block = tl.program_id(0).to(tl.int64)
    t = block // column_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = block % column_blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    pairs = tokens.to(tl.int64) * copies
    inside = (columns < width)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for first in range(0, copies, UNROLL):
        for step in tl.static_range(UNROLL):
            k = t * 0 + first + step  # [BLOCK_T]
            pair = t * copies + k
            row, _, legal = _destination(map, pair, (t < tokens) & (k < copies), pairs)
            at = rows + row[:, None] * row_stride + columns[None, :]
            value = tl.load(at, mask=legal[:, None] & inside, other=0).to(tl.float32)
            if weights is not None:
                value = value * tl.load(weights + pair, mask=legal, other=0).to(tl.float32)[:, None]
            total += value
    tl.store(out + t[:, None] * width + columns[None, :], total.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & inside)


def unpermute_tokens(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Tensor:
    out = contract.fake_unpermute_tokens(rows, map, weights)
    if out.numel() == 0:
        return out
    rows, map = _in_runs(rows), map.contiguous()
    weights = None if weights is None else weights.contiguous()
    tokens, copies = map.shape
    width = out.numel() // tokens
    vector = _vector(width, rows, out)
    block_w = min(triton.next_power_of_2(width), _SUMMED_BYTES // rows.itemsize)
    block_t = min(_SUMMED_BYTES // rows.itemsize // block_w, _MOST_T)
    launch(
        sum_rows_kernel,
        (triton.cdiv(tokens, block_t) * triton.cdiv(width, block_w), 1, 1),
        (rows, map, weights, out, tokens, copies, rows.stride(0) // vector, width // vector),
        (vector, block_t, block_w, min(triton.next_power_of_2(copies), _UNROLL)),
    )
    return out


def _vector(width: int, *tensors: Tensor) -> int:
    """Elements of a 16-byte access where every row of every tensor is aligned to that, else 1."""
    vector = 16 // tensors[0].itemsize
    whole = all(x.data_ptr() % 16 == 0 and x.stride(0) % vector == 0 for x in tensors)
    return vector if whole and width % vector == 0 else 1


# --- and its gradient -------------------------------------------------------------------------------------------------------------

_WIDEST = 8192  # elements of a row held in registers by one program
_PER_WARP = 512  # elements of a block per warp


@triton.jit(do_not_specialize=["tokens", "copies", "grad_stride", "row_stride", "width"])
def weighted_rows_kernel(
    grad, rows, map, weights, grad_rows, grad_weights, tokens, copies, grad_stride, row_stride, width,
    VECTOR: tl.constexpr, WHOLE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """grad_rows[row of (t, k)] = weights[t, k] * grad[t]; grad_weights[t, k] = <grad[t], rows[map[t, k]]> unless rows is None.

    Both are zero where the pair has no expert. A program has BLOCK_T tokens; WHOLE: their rows fit into one block of columns, and
    the gradient is read once.
    """
    grad_stride, row_stride = grad_stride.to(tl.int64) * VECTOR, row_stride.to(tl.int64) * VECTOR
    width = width.to(tl.int64) * VECTOR
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    wanted = t < tokens
    lanes = tl.arange(0, BLOCK_W)
    pairs = tokens.to(tl.int64) * copies
    grad_at = grad + t[:, None] * grad_stride + lanes[None, :]
    value = tl.load(grad_at, mask=wanted[:, None] & (lanes < width)[None, :], other=0)
    for k in range(copies):
        pair = t * copies + k
        row, exists, legal = _destination(map, pair, wanted, pairs)
        weight = tl.load(weights + pair, mask=legal, other=0).to(tl.float32)
        products = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        for first in range(0, width, BLOCK_W):
            inside = (first + lanes < width)[None, :]
            if not WHOLE:
                value = tl.load(grad_at + first, mask=legal[:, None] & inside, other=0)
            if rows is not None:
                row_at = rows + row[:, None] * row_stride + first + lanes[None, :]
                other = tl.load(row_at, mask=legal[:, None] & inside, other=0).to(tl.float32)
                products += tl.where(legal[:, None], value.to(tl.float32) * other, 0.0)
            scaled = tl.where(legal[:, None], value.to(tl.float32) * weight[:, None], 0.0).to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + row[:, None] * width + first + lanes[None, :], scaled, mask=exists[:, None] & inside)
        if rows is not None:
            tl.store(grad_weights + pair, tl.sum(products, axis=1).to(grad_weights.dtype.element_ty), mask=wanted)


def unpermute_tokens_grad(grad: Tensor, rows: Tensor | None, map: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    grad_rows, grad_weights = contract.fake_unpermute_tokens_grad(grad, rows, map, weights)
    map = map.contiguous()
    if weights is None:
        _launch_copy(grad, map, grad_rows)
        return grad_rows, grad_weights
    grad, weights = _in_runs(grad), weights.contiguous()
    rows = None if rows is None else _in_runs(rows)
    tokens, copies = map.shape
    width = grad_rows.numel() // max(tokens * copies, 1)
    block_w = triton.next_power_of_2(max(width, 1))
    whole = block_w <= _WIDEST
    block_w = min(block_w, _WIDEST)
    block_t = min(max(_PER_WARP // block_w, 1), _MOST_T)
    read = grad if rows is None else rows
    vector = _vector(width, grad, read, grad_rows)
    launch(
        weighted_rows_kernel,
        (triton.cdiv(tokens, block_t), 1, 1),
        (
            grad, rows, map, weights, grad_rows, grad_weights, tokens, copies, grad.stride(0) // vector, read.stride(0) // vector,
            width // vector,
        ),
        (vector, whole, block_t, block_w),
        num_warps=min(max(block_w // _PER_WARP, 2), 16),
    )  # fmt: skip
    return grad_rows, grad_weights
