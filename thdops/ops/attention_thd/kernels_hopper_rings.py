"""Rings of shared memory between the warp that loads and the warpgroups that compute, in the forward on Hopper.

There are three: Q with the integers of its tile, K, V. The loading warp runs ahead through them, the computing warpgroups follow at
their own pace.
"""

# Annotations of aggregates must be types, not strings: no `from __future__ import annotations` here.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from thdops.ops.attention_thd.kernels_hopper_common import packed, unpacked
from thdops.ops.attention_thd.kernels_hopper_names import aggregate, async_load, barrier
from thdops.ops.attention_thd.kernels_hopper_slots import await_release, release, threads_of
from thdops.ops.attention_thd.kernels_hopper_view import ROWS


@aggregate
class Ring:
    """STAGES buffers: what is loaded as the n-th stands in buffer n % STAGES until every warpgroup has released it."""

    buffers: gl.shared_memory_descriptor  # [STAGES * n, rows, columns]
    full: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    RELEASED: gl.constexpr  # the first of the barriers of `kernels_hopper_slots.py`, one for each buffer
    THREADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, STAGES, RELEASED, THREADS) -> None:
        self.buffers = buffers
        self.full = full
        self.STAGES = gl.constexpr(STAGES)
        self.RELEASED = gl.constexpr(RELEASED)
        self.THREADS = gl.constexpr(THREADS)

    @gluon.jit
    def wait_full(self, n, pred=True):
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def wait_empty(self, n):
        await_release(self.RELEASED + n % self.STAGES, self.THREADS, n >= self.STAGES)

    @gluon.jit
    def release(self, n):
        release(self.RELEASED + n % self.STAGES, self.THREADS)


@gluon.jit
def make_ring(desc, BUFFERS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, RELEASED: gl.constexpr):
    """A ring of STAGES times BUFFERS boxes of `desc`, for GROUPS warpgroups."""
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES * BUFFERS, desc.block_shape[0], desc.block_shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    return Ring(buffers, full, STAGES, RELEASED, threads_of(GROUPS * ROWS))


@gluon.jit
def load_boxes(desc, ring, n, row, column, PARTS: gl.constexpr, BOXES: gl.constexpr):
    """PARTS x BOXES boxes from (row, column) on, as the n-th content of the ring."""
    stage = n % ring.STAGES
    full = ring.full.index(stage)
    mbarrier.expect(full, PARTS * BOXES * desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for box in gl.static_range(BOXES):
            at = [row + part * desc.block_shape[0], column + box * desc.block_shape[1]]
            async_load(desc, at, full, ring.buffers.index((stage * PARTS + part) * BOXES + box))


@gluon.jit
def publish(fields, n, STAGES: gl.constexpr, values):
    """Integers for the warpgroups, read once the n-th content of the ring of Q is complete."""
    content = packed(values)
    fields.index(n % STAGES).store(content)
    barrier()


@gluon.jit
def receive(fields, n, q_ring):
    """What `publish` wrote for the n-th tile."""
    q_ring.wait_full(n)
    return unpacked(fields.index(n % q_ring.STAGES))


@gluon.jit
def vacate(q_ring, n):
    """At the end of the n-th tile: release its slot of Q if there is but one, when what was staged there has been read."""
    if q_ring.STAGES == 1:
        tma.store_wait(0)
        q_ring.release(n)


@gluon.jit
def vacate_before(q_ring, n):
    """While the n-th tile is attended to: release the slot of the tile before it, which nobody has to wait for any more."""
    if q_ring.STAGES > 1:  # noqa: SIM102  # known when the kernel is compiled, the other is not
        if n > 0:
            tma.store_wait(0)
            q_ring.release(n - 1)


@gluon.jit
def skip(k_ring, v_ring, it, count):
    """Release blocks that this warpgroup does not see; waiting first keeps it from releasing one twice in a round."""
    for i in range(count):
        k_ring.wait_full(it + i)
        k_ring.release(it + i)
        v_ring.wait_full(it + i)
        v_ring.release(it + i)
    return it + count
