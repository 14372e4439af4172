"""The attention of a warpgroup on Hopper: S = Q K^T [ROWS, BLOCK_N] block by block, its softmax P, and O += P V [ROWS, D_V].

Blocks go from the last visible key to the first, so that the blocks that need a mask on the right, or zeros behind the last key,
come first. A warpgroup keeps the tensor cores busy during its softmax: having issued S of block j it issues O += P V of block
j + 1, waits for S only, and takes the softmax of S while the second product runs.

The last of several sections of keys reads what the others found while its first S is computed: its softmax starts from there.
"""

# Tuples and branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from thdops.ops.attention_thd.kernels_hopper_common import LOG2E
from thdops.ops.attention_thd.kernels_hopper_outputs import by_row, load_found, load_statistics, share_of
from thdops.ops.attention_thd.kernels_hopper_rings import vacate_before
from thdops.ops.attention_thd.kernels_hopper_view import ROWS


@gluon.jit
def issue_logits(q_ring, q_first, k_ring, it, CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start S = Q K^T, [ROWS, BLOCK_N]."""
    BLOCK_N: gl.constexpr = k_ring.buffers.shape[1]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=LAYOUT)
    for c in gl.static_range(CHUNKS):
        keys = k_ring.buffers.index(it % k_ring.STAGES * CHUNKS + c).permute((1, 0))
        s = warpgroup_mma(q_ring.buffers.index(q_first + c), keys, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def softmax_step(s, m, total, scale):
    """P = 2^(scale * s - m), the new maxima m, the new sums and the factor that older results take."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # of a row that has seen no key
    p = gl.exp2(s * scale - shift[:, None])
    factor = gl.exp2(m - shift)
    return p, m_new, total * factor + gl.sum(p, axis=1), factor


@gluon.jit
def cap(s, scale, softcap):
    """softcap * tanh(logit / softcap) * log2(e) of logits that `scale` makes base-2 ones."""
    return (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(s * (2.0 * scale / softcap)) + 1.0))


@gluon.jit
def settle(s, block, whole_begin, whole_end, view, scale, softcap, SOFTCAP: gl.constexpr):
    """The logits of a block, capped and masked where needed."""
    if SOFTCAP:
        s = cap(s, scale, softcap)
    if (block >= whole_end) | (block < whole_begin):
        s = view.mask(s, block)
    return s


@gluon.jit
def zero_behind(values, left):
    """Zero the rows of a block of V from `left` on: they are not of this sequence, and 0 * NaN is NaN.

    Each warpgroup does so for itself, even while the other already multiplies: rows before `left` stay as they are, and the rows
    behind are zeros to it, too.
    """
    PART: gl.constexpr = 16
    BLOCK_N: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for start in gl.static_range(0, BLOCK_N, PART):
        if start + PART > left:
            part = values.slice(start, PART, dim=0)
            row = start + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            x = part.load(LAYOUT)
            part.store(gl.where(row < left, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def attend(q_ring, q_first, n, k_ring, v_ring, it, view, before, scale, softcap, plan):
    """Unnormalised O [ROWS, D_V], maxima m and sums [ROWS] of base-2 logits over the blocks of a view, and the new `it`.

    `it` counts the blocks of all tiles: it says where they stand in the rings. `before`: where `load_found` finds what, or ().
    Meanwhile Q's slot of the tile before the n-th is released.
    """
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.D_V, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.BLOCK_N, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o = gl.zeros([ROWS, plan.D_V], gl.float32, layout=O_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    if len(before) > 0:
        found, lse, unit, first, valid, row_stride = before
        o = load_found(found, first, valid, row_stride, o)
        S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
        lse, unit = load_statistics(lse, unit, first, valid, S_ROWS)
    begin, end = view.blocks()
    if end > begin:
        whole_begin, whole_end = view.whole_blocks()
        if plan.SOFTCAP:
            factor = 1.0
        else:
            factor = scale
        k_ring.wait_full(it)
        s = warpgroup_mma_wait(0, deps=[issue_logits(q_ring, q_first, k_ring, it, plan.CHUNKS, S_LAYOUT)])
        k_ring.release(it)
        vacate_before(q_ring, n)
        if len(before) > 0:  # looked at no earlier than here: meanwhile it was loaded
            m = unit * LOG2E
            total = share_of(lse, unit)
        behind = view.others - (end - 1) * plan.BLOCK_N
        if behind < plan.BLOCK_N:
            v_ring.wait_full(it)
            zero_behind(v_ring.buffers.index(it % v_ring.STAGES), behind)
        s = settle(s, end - 1, whole_begin, whole_end, view, scale, softcap, plan.SOFTCAP)
        p, m, total, older = softmax_step(s, m, total, factor)
        if len(before) > 0:
            o = o * by_row(older, o)
        p = gl.convert_layout(p.to(q_ring.buffers.dtype), P_LAYOUT)
        k_ring.wait_full(it + 1, pred=end - 1 > begin)
        for i in range(end - 1 - begin):
            s_next = issue_logits(q_ring, q_first, k_ring, it + 1, plan.CHUNKS, S_LAYOUT)
            v_ring.wait_full(it)
            o_next = warpgroup_mma(p, v_ring.buffers.index(it % v_ring.STAGES), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_next])
            k_ring.release(it + 1)
            s = settle(s, end - 2 - i, whole_begin, whole_end, view, scale, softcap, plan.SOFTCAP)
            p_next, m, total, older = softmax_step(s, m, total, factor)
            # The next keys are awaited here, not above, because a wait is what the assembler moves no arithmetic across: it would
            # pull the wait for O up, to before the softmax.
            k_ring.wait_full(it + 2, pred=i < end - 2 - begin)
            o, p_next, total = warpgroup_mma_wait(0, deps=[o_next, p_next, total])
            v_ring.release(it)
            o = o * by_row(older, o)
            p = gl.convert_layout(p_next.to(q_ring.buffers.dtype), P_LAYOUT)
            it += 1
        v_ring.wait_full(it)
        o = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_ring.buffers.index(it % v_ring.STAGES), o, is_async=True)])
        v_ring.release(it)
        it += 1
    else:
        vacate_before(q_ring, n)
        if len(before) > 0:
            m = unit * LOG2E
            total = share_of(lse, unit)
    return o, m, total, it


@gluon.jit
def finish(o, m, total, sink, head, SOFTMAX: gl.constexpr):
    """Normalised O and the base-2 log-sum-exp, -inf where there is nothing to sum."""
    extra = float("-inf")
    if SOFTMAX == "off_by_one":
        extra = 0.0
    elif SOFTMAX == "sink":
        extra = gl.load(sink + head) * LOG2E
    top = gl.maximum(m, extra)
    shift = gl.where(top == float("-inf"), 0.0, top)
    factor = gl.exp2(m - shift)
    total = total * factor + gl.exp2(extra - shift)
    factor = factor / gl.where(total == 0.0, 1.0, total)
    return o * by_row(factor, o), shift + gl.log2(total)
