"""Products of the backward kernels for Hopper; their operands and sums are tuples of chunks of the head dim, powers of two wide.

Products are asynchronous: what a function starts is under way when it returns, until `wait` has seen it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait


@gluon.jit
def dot_transposed(a, part, b, slot, layout: gl.constexpr):
    """Start a b^T [ROWS, BLOCK]."""
    M: gl.constexpr = a[0].shape[1]
    N: gl.constexpr = b[0].shape[1]
    zero = gl.zeros([M, N], gl.float32, layout)
    out = warpgroup_mma(a[0].index(part), b[0].index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    for c in gl.static_range(1, len(a)):
        out = warpgroup_mma(a[c].index(part), b[c].index(slot).permute((1, 0)), out, is_async=True)
    return out


@gluon.jit
def _dot_chunk(a, b, acc):
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(a, left), b, acc, is_async=True)


@gluon.jit
def dot(a, b, slot, acc):
    """Start acc + a b [ROWS, D]; `a` is in registers."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (_dot_chunk(a, b[c].index(slot), acc[c]),)
    return out


@gluon.jit
def _zero(tile):
    rows: gl.constexpr = tile.shape[1]
    columns: gl.constexpr = tile.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, columns, 16])
    return gl.zeros([rows, columns], gl.float32, layout)


@gluon.jit
def zeros(tiles):
    """Sums for products whose rows and columns are those of `tiles`, chunk by chunk."""
    out = ()
    for c in gl.static_range(len(tiles)):
        out = out + (_zero(tiles[c]),)
    return out


@gluon.jit
def as_running(acc):
    """As accumulators of products that may be under way."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (warpgroup_mma_init(acc[c]),)
    return out


@gluon.jit
def wait(acc, PENDING: gl.constexpr):
    """The sums once all but PENDING of the products that were started are done."""
    out = ()
    for c in gl.static_range(len(acc)):
        out = out + (warpgroup_mma_wait(PENDING, deps=(acc[c],)),)
    return out
