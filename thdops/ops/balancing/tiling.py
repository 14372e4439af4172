"""How a `[T, E]` tensor of floats reaches a kernel: in accesses as wide as its memory allows, up to 16 bytes.

Widths and row strides are passed in units of VECTOR elements: a product with a constant tells the compiler that rows are aligned,
without specialising a kernel for the value of an integer.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from torch import Tensor

_ACCESS_BYTES = 16


class Rows(NamedTuple):
    """`width` and `row_stride` in units of `vector` elements, `column_stride` in elements; `unit`: columns are adjacent."""

    width: int
    row_stride: int
    column_stride: int
    vector: int
    unit: bool


def rows_of(x: Tensor, *others: Tensor) -> Rows:
    """The rows of x; `others` are contiguous tensors of its shape, walked in the same accesses."""
    width = x.shape[1]
    row_stride, column_stride = x.stride()
    unit = column_stride == 1
    vector = 1
    if unit:
        vector = _ACCESS_BYTES // min(t.element_size() for t in (x, *others))
        offsets = (t.data_ptr() % _ACCESS_BYTES // t.element_size() for t in (x, *others))
        vector = gcd(vector, width, row_stride, *offsets)
    return Rows(width // vector, row_stride // vector, column_stride, vector, unit)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
