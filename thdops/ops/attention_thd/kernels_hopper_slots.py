"""Slots of shared memory on Hopper: the warp that loads fills one again when every warp that computes has released it.

Releases arrive at the hardware's named barriers and wait for nothing. An mbarrier would count one arrival a warpgroup, and for
that its warps, and those of every warpgroup in its partition, have to meet first: in each block of each loop, so that all come to
the same part of it at the same time, products or softmax, and leave the rest of the multiprocessor idle.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The first of 16 that is free: Triton has one for each partition and one for all.
FIRST = gl.constexpr(6)
ALL = gl.constexpr(16)


@gluon.jit
def release(barrier, THREADS: gl.constexpr):
    """Of THREADS threads, those of the warps that compute and of the one that loads, this one will not read the slot any more."""
    asm: gl.constexpr = "bar.arrive $1, $2; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r,r", [barrier, gl.to_tensor(THREADS)], gl.int32, False, 1)


@gluon.jit
def await_release(barrier, THREADS: gl.constexpr, pred):
    """Wait in the warp that loads until all others have."""
    asm: gl.constexpr = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p bar.sync $1, $2; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(asm, "=r,r,r,r", [barrier, gl.to_tensor(THREADS), pred.to(gl.int32)], gl.int32, False, 1)
