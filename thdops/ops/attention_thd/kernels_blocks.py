"""What the attention kernels share: head dims in two parts, loads of rows, scores of a block, bounds of what a tile sees.

A block of rows is a tuple of one or two parts along the head dim, each a power of two wide: 192 is 128 + 64, and no product is
computed over a third of zeros. Widths that are no sum of two powers of two have the second part padded.

Kernels think in powers of two: a logit s is kept as s * log2(e), so that e^s is exp2 of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def parts(dim: int) -> tuple[int, int]:
    """Widths of the two parts of a head dim; the second is 0 where the first is all of it."""
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    return first, rest and max(16, triton.next_power_of_2(rest))


@triton.jit
def load_rows(x, stride, rows, kept, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, ALL: tl.constexpr):
    """`rows` (int32 [R], counted from the pointer `x`) of a matrix of width D; rows that are not `kept` are 0. ALL: all are."""
    first = (_load_part(x, stride, rows, kept, D, 0, D1, ALL),)
    if D2 > 0:
        first = first + (_load_part(x, stride, rows, kept, D, D1, D2, ALL),)
    return first


@triton.jit
def _load_part(x, stride, rows, kept, D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr):
    columns = START + tl.arange(0, WIDTH)
    at = x + rows[:, None] * stride + columns[None, :]
    if START + WIDTH > D:
        return tl.load(at, mask=kept[:, None] & (columns[None, :] < D), other=0.0)
    elif ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=kept[:, None], other=0.0)


@triton.jit
def store_rows(out, stride, rows, kept, values, D: tl.constexpr, D1: tl.constexpr):
    """The inverse of `load_rows`: `values` into `kept` rows."""
    columns = tl.arange(0, D1)
    at = out + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, values[0].to(out.dtype.element_ty), mask=kept[:, None] & (columns[None, :] < D))
    if len(values) > 1:
        more = D1 + tl.arange(0, values[1].shape[1])
        at = out + rows.to(tl.int64)[:, None] * stride + more[None, :]
        tl.store(at, values[1].to(out.dtype.element_ty), mask=kept[:, None] & (more[None, :] < D))


@triton.jit
def plus(x, y):
    """Every part of one and of the other."""
    first = (x[0] + y[0],)
    if len(x) > 1:
        first = first + (x[1] + y[1],)
    return first


@triton.jit
def zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """fp32 accumulators of a block of rows."""
    first = (tl.zeros([ROWS, D1], tl.float32),)
    if D2 > 0:
        first = first + (tl.zeros([ROWS, D2], tl.float32),)
    return first


@triton.jit
def scaled(x, factor):
    """Every part times `factor` ([R] or a scalar that is broadcast to it)."""
    first = (x[0] * factor[:, None],)
    if len(x) > 1:
        first = first + (x[1] * factor[:, None],)
    return first


@triton.jit
def negated(x):
    """Every part with its sign changed, exactly."""
    first = (-x[0],)
    if len(x) > 1:
        first = first + (-x[1],)
    return first


@triton.jit
def chosen(kept, x):
    """Every part where `kept` ([R]), +0.0 elsewhere."""
    first = (tl.where(kept[:, None], x[0], 0.0),)
    if len(x) > 1:
        first = first + (tl.where(kept[:, None], x[1], 0.0),)
    return first


@triton.jit
def inner(a, b):
    """a b^T over the head dim: [R, D] x [N, D] -> fp32 [R, N]. fp32 operands are multiplied in full fp32."""
    total = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if len(a) > 1:
        total = tl.dot(a[1], tl.trans(b[1]), total, input_precision="ieee")
    return total


@triton.jit
def weighted(total, weights, x):
    """total + weights x: [R, N] x [N, D], added to fp32 [R, D]."""
    weights = weights.to(x[0].dtype)
    first = (tl.dot(weights, x[0], total[0], input_precision="ieee"),)
    if len(x) > 1:
        first = first + (tl.dot(weights, x[1], total[1], input_precision="ieee"),)
    return first


@triton.jit
def capped(logits, scale, softcap):
    """softcap * tanh(scale * logits / softcap) in powers of two, and the tanh.

    Small arguments by series, where 1 - 2 / (e^2x + 1) loses all digits.
    """
    x = logits * (scale / softcap)
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    tanh = tl.where(square < 0.0625, series, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))
    return tanh * (softcap * LOG2E), tanh


@triton.jit
def seen(position, first, count, rows, before, behind, others, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """bool [R, N] (or [1, N]): which of the other side's rows `first`, ... each of `rows` (counted from the tile's) sees.

    Row r stands at position + r and sees what is at most `before` to its left and `behind` to its right, if LEFT and RIGHT say
    that these bound it.
    """
    other = first + tl.arange(0, count)
    mask = (other < others)[None, :]
    distance = other[None, :] - (position + rows)[:, None]
    if RIGHT:
        mask = mask & (distance <= behind)
    if LEFT:
        mask = mask & (distance >= -before)
    return mask


@triton.jit
def bounds(position, valid, others, before, behind, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Edges (a, b, c, d) of the three sections of the other side that a tile walks over in blocks: [a, b) and [c, d) need a mask,
    of [b, c) every row sees all. a, b and c are multiples of BLOCK and a <= b <= c; c >= d where the last section is empty.
    """
    start = position * 0
    whole_start = start
    end = others
    whole_end = others
    if LEFT:
        start = tl.maximum(position - before, 0) // BLOCK * BLOCK
        whole_start = tl.cdiv(tl.maximum(position + valid - 1 - before, 0), BLOCK) * BLOCK
    if RIGHT:
        end = tl.minimum(others, position + valid + behind)
        whole_end = tl.minimum(others, position + behind + 1)
    end = tl.where(valid > 0, end, 0)
    whole_end = tl.maximum(whole_end, 0) // BLOCK * BLOCK
    whole_start = tl.minimum(whole_start, tl.cdiv(tl.maximum(end, 0), BLOCK) * BLOCK)
    whole_start = tl.maximum(whole_start, start)
    whole_end = tl.maximum(tl.minimum(whole_end, end), whole_start)
    return start, whole_start, whole_end, end
