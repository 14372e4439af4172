"""Slots of shared memory on Hopper: the warp that loads fills one again when every warp that computes has released it.

Releases arrive at the hardware's named barriers, of which a CTA has 16, and wait for nothing. An mbarrier counts one arrival of a
partition's, and for that its warps have to meet first, at every release, and so come to the same part of the loop at the same time,
to products or to the softmax. (They still meet once a block, where Triton puts a barrier before a wait.) At most one round of a
slot's releases is under way, for a slot is filled only after the round before; the last round is for nobody and ends with its CTA.
Shares of dQ go the other way: consumers release one when it is full, and the warp that adds them awaits that.

Measured on an H200 (Triton 3.6, bf16, causal, ms): dK and dV of 192/128, 8 x 4096 rows, 16 heads 2.71 by mbarriers and 2.67 by
these, which let loads of LSE move up, too: 2.52. The same at D 128 with dQ added in order, 32/8 heads: 5.46, 5.36. The forward of
D 64: 0.697, 0.686.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST = gl.constexpr(6)  # Triton has one for each partition and one for all, from 0 on
BEHIND = gl.constexpr(16)


@gluon.constexpr_function
def threads_of(rows: int) -> int:
    """The threads that meet at a slot: a warpgroup for 64 rows of the tile, and the warp that loads, or adds."""
    return rows * 2 + 32


@gluon.jit
def release(slot, THREADS: gl.constexpr):
    """This thread is done with the slot; with its whole warp. `slot`: the number of the slot's barrier."""
    asm: gl.constexpr = "bar.arrive $1, $2; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r,r", [slot, gl.to_tensor(THREADS)], gl.int32, False, 1)


@gluon.jit
def await_release(slot, THREADS: gl.constexpr, filled):
    """Wait in the warp that loads, or adds, until all have released the slot, if it was filled before."""
    asm: gl.constexpr = "{ .reg .pred filled; setp.ne.u32 filled, $3, 0; @filled bar.sync $1, $2; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(asm, "=r,r,r,r", [slot, gl.to_tensor(THREADS), filled.to(gl.int32)], gl.int32, False, 1)
