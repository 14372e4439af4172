"""The shape of the forward's tiles on Hopper, and which keys their rows see.

A tile is GROUPS * ROWS queries of one head, ROWS for each warpgroup; a block is BLOCK_N keys. The head dim D_QK of Q and K is cut
into CHUNKS of CHUNK columns, D_V is not.
"""

# Annotations of aggregates must be types, not strings: no `from __future__ import annotations` here.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thdops.ops.attention_thd.kernels_hopper_names import aggregate

ROWS = gl.constexpr(64)  # of a warpgroup: the M of wgmma
CHUNK = gl.constexpr(64)  # columns of a box of Q or K: 128 bytes, the widest swizzle


@aggregate
class Plan:
    """What is known when the kernel is compiled."""

    GROUPS: gl.constexpr
    D_V: gl.constexpr
    BLOCK_N: gl.constexpr
    CHUNKS: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    SOFTMAX: gl.constexpr
    SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUPS, D_V, BLOCK_N, CHUNKS, HAS_LEFT, HAS_RIGHT, SOFTMAX, SOFTCAP) -> None:
        self.GROUPS = gl.constexpr(GROUPS)
        self.D_V = gl.constexpr(D_V)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CHUNKS = gl.constexpr(CHUNKS)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.SOFTMAX = gl.constexpr(SOFTMAX)
        self.SOFTCAP = gl.constexpr(SOFTCAP)


@aggregate
class View:
    """Keys 0..others-1 as they are seen from the rows on diagonals first..last."""

    others: gl.tensor
    first: gl.tensor
    last: gl.tensor
    left: gl.tensor
    right: gl.tensor
    plan: Plan

    @gluon.constexpr_function
    def __init__(self, others, first, last, left, right, plan) -> None:
        self.others = others
        self.first = first
        self.last = last
        self.left = left
        self.right = right
        self.plan = plan

    @gluon.jit
    def blocks(self):
        """Blocks [begin, end) hold every key that a row sees."""
        N: gl.constexpr = self.plan.BLOCK_N
        begin = self.others * 0
        end = self.others
        if self.plan.HAS_RIGHT:
            end = gl.minimum(end, self.last + self.right + 1)
        if self.plan.HAS_LEFT:
            begin = gl.maximum(self.first - self.left, 0)
        some = (self.last >= self.first) & (end > begin)
        begin = begin // N
        return begin, gl.where(some, (end + N - 1) // N, begin)

    @gluon.jit
    def whole_blocks(self):
        """Blocks [begin, end) are seen as a whole by every row."""
        N: gl.constexpr = self.plan.BLOCK_N
        begin = self.others * 0
        end = self.others
        if self.plan.HAS_RIGHT:
            end = gl.maximum(gl.minimum(end, self.first + self.right + 1), 0)
        if self.plan.HAS_LEFT:
            begin = gl.maximum(self.last - self.left + N - 1, 0)
        return begin // N, end // N

    @gluon.jit
    def mask(self, s, block):
        """-inf where a row does not see a key; s is [ROWS, BLOCK_N]."""
        key = block * self.plan.BLOCK_N + gl.arange(0, self.plan.BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
        diagonal = self.first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))[:, None]
        end = self.others
        if self.plan.HAS_RIGHT:
            end = gl.minimum(end, diagonal + self.right + 1)
        seen = key < end
        if self.plan.HAS_LEFT:
            seen = seen & (key >= diagonal - self.left)
        return gl.where(seen, s, float("-inf"))
