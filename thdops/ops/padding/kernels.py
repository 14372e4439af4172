"""Triton kernels of the padding ops.

T rows, B sequences, C = cu_seqlens, P = cu_seqlens_padded (C where that is None); G[b] = P[b] - C[b] + C[0] is the number of
padding rows before the gap of sequence b. Every lookup is one search in a sorted array of B entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import padding as contract
from thdops.ops.launch import launch, multiprocessors


@triton.jit
def count_at_most(ends, subtract, add, n, values, WAYS: tl.constexpr, ROWS: tl.constexpr):
    """For each of [ROWS] values: how many i in [0, n) have ends[i] (- subtract[i] + add) <= value. The array is sorted.

    WAYS-ary search: each step looks at WAYS pivots at once, so the chain of dependent loads is log(n)/log(WAYS) long. Every
    address stays in [0, n) and every loop ends even if the array is not sorted.
    Example: ends = [4, 4, 9], value 4 -> 2 (an empty sequence is skipped).
    """
    low = tl.zeros([ROWS], tl.int64)
    span = n
    ways = tl.arange(0, WAYS)
    while span > 0:
        step = tl.cdiv(span, WAYS)
        pivot = low[:, None] + ways[None, :] * step  # [ROWS, WAYS]
        inside = (pivot < low[:, None] + span) & (pivot < n)
        end = tl.load(ends + pivot, mask=inside, other=0).to(tl.int64)
        if subtract is not None:
            end = end - tl.load(subtract + pivot, mask=inside, other=0).to(tl.int64) + add
        below = tl.sum((inside & (end <= values[:, None])).to(tl.int64), axis=1)
        low = tl.where(below > 0, low + (below - 1) * step + 1, low)
        span = step - 1
    return low
