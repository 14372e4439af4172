"""The forward kernel of attention for Hopper, in Gluon: one warp loads (TMA), warpgroups compute (wgmma).

Tq, Tk rows, Hq, Hkv heads, G = Hq / Hkv, D head dims (D_QK, D_V). A tile is BLOCK_M = GROUPS * ROWS rows of queries of one head,
ROWS for each warpgroup; a block is BLOCK_N keys. The head dim of Q and K is cut into CHUNKS of CHUNK columns. `tiles` and `counts`
are described in `kernels_tiles.py`.

A CTA takes tiles until none is left. The loading warp runs ahead through three rings of shared memory (Q with the integers of its
tile, K, V); the computing warpgroups follow at their own pace and only meet in the barriers of the rings. Blocks go from the last
visible key to the first, so that the blocks that need a mask on the right, or zeros behind the last key, come first.

A warpgroup keeps the tensor cores busy during its softmax: having issued S = Q K^T of block j it issues O += P V of block j + 1,
waits for S only, and takes the softmax of S while the second product runs.

A section of keys between others adds its O to the fp32 `out` of those before, by reductions that nobody waits for; each row has one
program, so the order is fixed. For that its scale must not change: a row of `out` is in units of e^`unit`, the LSE of the first
section that saw a key. Only where a later one is larger by 2^JUMP is the unit its LSE from there on. The last section reads what
was found while its first S is computed: its softmax starts from there. `lse` is updated in place. Rows that are padding to the last
section need not have been to all: they get what was found.
"""

# Tuples and branches on constants vanish while a kernel is traced, which Python's types cannot express. Annotations of aggregates
# must be types, not strings: no `from __future__ import annotations` here.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportAssignmentType=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from thdops.ops.attention_thd.kernels_hopper_common import ELEMENT, Boxes, addressable, box_of
from thdops.ops.attention_thd.kernels_hopper_names import VIEWS_REACH_BEYOND, aggregate, async_load, barrier, reinterpret
from thdops.ops.launch import Launch, multiprocessors

_LOG2E = 1.4426950408889634
LOG2E = gl.constexpr(_LOG2E)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup: the M of wgmma
GROUPS = gl.constexpr(2)  # warpgroups that compute; a third one leaves each too few registers, and gains nothing
CHUNK = gl.constexpr(64)  # columns of a box of Q or K: 128 bytes, the widest swizzle
JUMP = gl.constexpr(40.0)  # powers of two; fp32 has room for two more such
FIELDS = gl.constexpr(8)  # integers that the loading warp hands on with a tile
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@aggregate
class Plan:
    """What is known when the kernel is compiled."""

    D_V: gl.constexpr
    BLOCK_N: gl.constexpr
    CHUNKS: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    SOFTMAX: gl.constexpr
    SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, D_V, BLOCK_N, CHUNKS, HAS_LEFT, HAS_RIGHT, SOFTMAX, SOFTCAP) -> None:
        self.D_V = gl.constexpr(D_V)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CHUNKS = gl.constexpr(CHUNKS)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.SOFTMAX = gl.constexpr(SOFTMAX)
        self.SOFTCAP = gl.constexpr(SOFTCAP)


# --- rings of shared memory ------------------------------------------------------------------------------------------------------


@aggregate
class Ring:
    """STAGES buffers: what is loaded as the n-th stands in buffer n % STAGES until every warpgroup has released it."""

    buffers: gl.shared_memory_descriptor  # [STAGES * n, rows, columns]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, STAGES) -> None:
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def wait_full(self, n, pred=True):
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1, pred=pred)

    @gluon.jit
    def wait_empty(self, n):
        mbarrier.wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, n):
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


@gluon.jit
def make_ring(desc, BUFFERS: gl.constexpr, STAGES: gl.constexpr):
    """A ring of STAGES times BUFFERS boxes of `desc`."""
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES * BUFFERS, desc.block_shape[0], desc.block_shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    return Ring(buffers, full, empty, STAGES)


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


# --- what rows see ----------------------------------------------------------------------------------------------------------------


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


# --- the warp that loads ----------------------------------------------------------------------------------------------------------


@gluon.jit
def publish(fields, n, STAGES: gl.constexpr, values):
    """Integers for the warpgroups, read once the n-th content of the ring of Q is complete."""
    i = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    packed = i * 0
    for f in gl.static_range(len(values)):
        packed = gl.where(i == f, values[f], packed)
    fields.index(n % STAGES).store(packed)
    barrier()


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, fields, tiles, counts, heads, group, head_strides, left, right, plan):
    q_head, k_head, v_head = head_strides
    total = gl.load(counts) * heads
    work = gl.program_id(0)
    n = 0  # tiles
    it = 0  # blocks
    while work < total:
        tile = tiles + (work // heads).to(gl.int64) * 8
        head = work % heads
        row = gl.load(tile)
        rows = gl.load(tile + 1)
        valid = gl.load(tile + 2)
        other_row = gl.load(tile + 3)
        others = gl.load(tile + 4)
        position = gl.load(tile + 5)
        work = gl.atomic_add(counts + 1, 1, sem="relaxed") + gl.num_programs(0)  # fetched early: it takes as long as a load
        begin, end = View(others, position, position + valid - 1, left, right, plan).blocks()

        q_ring.wait_empty(n)
        publish(fields, n, q_ring.STAGES, (row, rows, valid, others, position, head, begin, end))
        if end > begin:
            load_boxes(q, q_ring, n, row, head * q_head, GROUPS, plan.CHUNKS)
        else:
            mbarrier.arrive(q_ring.full.index(n % q_ring.STAGES), count=1)
        n += 1
        for i in range(end - begin):
            key = other_row + (end - 1 - i) * plan.BLOCK_N
            k_ring.wait_empty(it)
            load_boxes(k, k_ring, it, key, head // group * k_head, 1, plan.CHUNKS)
            v_ring.wait_empty(it)
            load_boxes(v, v_ring, it, key, head // group * v_head, 1, 1)
            it += 1
    q_ring.wait_empty(n)
    publish(fields, n, q_ring.STAGES, (-1,))
    mbarrier.arrive(q_ring.full.index(n % q_ring.STAGES), count=1)


# --- the warpgroups that compute -----------------------------------------------------------------------------------------------


@gluon.jit
def receive(fields, n, q_ring):
    """What `publish` wrote for the n-th tile."""
    q_ring.wait_full(n)
    values = ()
    for f in gl.static_range(8):
        field = fields.index(n % q_ring.STAGES).slice(f, 1).load(gl.BlockedLayout([1], [32], [4], [0]))
        values = values + (gl.max(field, axis=0),)
    return values


@gluon.jit
def by_row(x, o):
    """One value a row, [ROWS], as a column [ROWS, 1] that fits O."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    return gl.convert_layout(x, LAYOUT)[:, None]


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
def skip(k_ring, v_ring, it, count):
    """Release blocks that this warpgroup does not see; waiting first keeps it from releasing one twice in a round."""
    for i in range(count):
        k_ring.wait_full(it + i)
        k_ring.release(it + i)
        v_ring.wait_full(it + i)
        v_ring.release(it + i)
    return it + count


@gluon.jit
def load_statistics(lse, unit, first, valid, LAYOUT: gl.constexpr):
    """LSE and unit of the rows from `first` on as other keys left them; -inf behind the valid ones."""
    i = first + gl.arange(0, ROWS, layout=LAYOUT)
    return gl.load(lse + i, mask=i < valid, other=float("-inf")), gl.load(unit + i, mask=i < valid, other=float("-inf"))


@gluon.jit
def load_found(found, first, valid, row_stride, o):
    """O of the rows from `first` on as other keys left it; nothing behind the valid ones."""
    i = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(found + i.to(gl.int64) * row_stride + d, [1, 16])
    return gl.load(at, mask=(i < valid) & (d >= 0), other=0.0)


@gluon.jit
def share_of(lse, unit):
    """e^(lse - unit), 0 where nothing was seen."""
    return gl.where(lse == float("-inf"), 0.0, gl.exp2((lse - unit) * LOG2E))


@gluon.jit
def attend(q_ring, q_first, k_ring, v_ring, it, view, before, scale, softcap, plan):
    """Unnormalised O [ROWS, D_V], maxima m and sums [ROWS] of base-2 logits over the blocks of a view, and the new `it`.

    `it` counts the blocks of all tiles: it says where they stand in the rings. `before`: where `load_found` finds what, or ().
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
    elif len(before) > 0:
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


@gluon.jit
def joined(buffers, first, BOXES: gl.constexpr):
    """BOXES boxes side by side as one [ROWS, BOXES * CHUNK], among a warpgroup's boxes of Q, which begin with `first`.

    Where a view may not reach beyond its buffer, they are those that begin at a multiple of BOXES: of 3 boxes, 2 always do.
    """
    if VIEWS_REACH_BEYOND:
        return reinterpret(buffers.index(first), buffers.dtype, [ROWS, BOXES * CHUNK], SWIZZLED)
    else:
        rows = reinterpret(buffers, buffers.dtype, [buffers.shape[0] // BOXES, ROWS, BOXES * CHUNK], SWIZZLED)
        return rows.index((first + BOXES - 1) // BOXES)


@gluon.jit
def store_out(o, staging, before, out, i, valid, rows, out_row, D_V: gl.constexpr):
    """Rows i of the tile, those from `valid` on as found before or as zeros; through shared memory, for 16-byte stores."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_V, D_V // 8], [4, 1], [1, 0])
    staging.store(o.to(staging.dtype))
    x = staging.load(LAYOUT)
    fence_async_shared()  # the next Q comes here by TMA
    i = gl.convert_layout(i, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, D_V, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = gl.multiple_of(out + i.to(gl.int64) * out_row + d, [1, 16])
    padding = gl.zeros_like(x)
    if len(before) > 0:
        found = gl.multiple_of(before[0] + i.to(gl.int64) * out_row + d, [1, 16])
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + before[3]
        lse = gl.load(before[1] + row, mask=(row >= valid) & (row < rows), other=float("-inf"))
        unit = gl.load(before[2] + row, mask=(row >= valid) & (row < rows), other=float("-inf"))
        share = gl.where(lse == float("-inf"), 0.0, gl.exp2((unit - lse) * LOG2E))[:, None]
        padding = (gl.load(found, mask=(i >= valid) & (i < rows) & (d >= 0), other=0.0) * share).to(x.dtype)
    gl.store(at, gl.where(i < valid, x, padding), mask=(i < rows) & (d >= 0))


@gluon.jit
def store_fp32(o, out, i, valid, rows, out_row):
    """`store_out` of fp32, from the registers: 4 threads have a sector of 32 bytes."""
    i = gl.convert_layout(i, gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(out + i.to(gl.int64) * out_row + d, [1, 16])
    gl.store(at, gl.where(i < valid, o, 0.0), mask=(i < rows) & (d >= 0))


@gluon.jit
def merge(o, logsumexp, out, lse, unit, i, valid, out_row, old_lse, old_unit):
    """Add O and its base-2 LSE to what the valid rows i hold."""
    old, base = old_lse * LOG2E, old_unit * LOG2E
    nothing = logsumexp == float("-inf")
    jumps = logsumexp > base + JUMP  # where nothing was found, too
    base_new = gl.where(jumps, logsumexp, base)
    weight = gl.where(nothing, 0.0, gl.exp2(logsumexp - base_new))
    decay = gl.where(jumps, gl.exp2(base - logsumexp) - 1.0, 0.0)  # of what is there, added as a difference
    top = gl.maximum(old, logsumexp)
    shift = gl.where(top == float("-inf"), 0.0, top)
    merged = shift + gl.log2(gl.exp2(old - shift) + gl.exp2(logsumexp - shift))
    gl.store(lse + i, merged * LN2, mask=i < valid)
    gl.store(unit + i, base_new * LN2, mask=(i < valid) & jumps)

    row = gl.convert_layout(i, gl.SliceLayout(1, o.type.layout))[:, None]
    d = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))[None, :]
    at = gl.multiple_of(out + row.to(gl.int64) * out_row + d, [1, 16])
    decay = by_row(decay, o)
    there = gl.load(at, mask=(row < valid) & (decay < 0.0) & (d >= 0), other=0.0)
    gl.atomic_add(at, o * by_row(weight, o) + there * decay, mask=(row < valid) & (d >= 0), sem="relaxed")


@gluon.jit
def consume(args, plan, GROUP: gl.constexpr):
    q_ring, k_ring, v_ring, fields, before, unit, out, lse, sink, out_strides, left, right, scale, softcap = args
    ADDS: gl.constexpr = len(before) > 0 and out.dtype.element_ty == gl.float32
    out_row, out_head, lse_head = out_strides
    n = 0
    it = 0
    row, rows, valid, others, position, head, begin, end = receive(fields, n, q_ring)
    while row >= 0:
        q_first = (n % q_ring.STAGES * GROUPS + GROUP) * plan.CHUNKS
        first = position + GROUP * ROWS
        view = View(others, first, gl.minimum(first + ROWS, position + valid) - 1, left, right, plan)
        own_begin, own_end = view.blocks()
        own_end = gl.where(own_end > own_begin, own_end, begin)
        it = skip(k_ring, v_ring, it, end - own_end)
        here = ()
        if len(before) > 0:
            found = before[0] + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
            lse_here = lse + head.to(gl.int64) * lse_head + row
            unit_here = unit + head.to(gl.int64) * lse_head + row
            if ADDS:
                S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.BLOCK_N, 16]))
                old_lse, old_unit = load_statistics(lse_here, unit_here, GROUP * ROWS, valid, S_ROWS)
            else:
                here = (found, lse_here, unit_here, GROUP * ROWS, valid, out_row)
        o, m, total, it = attend(q_ring, q_first, k_ring, v_ring, it, view, here, scale, softcap, plan)
        it = skip(k_ring, v_ring, it, gl.minimum(own_begin, own_end) - begin)

        o, logsumexp = finish(o, m, total, sink, head, plan.SOFTMAX)
        i = GROUP * ROWS + gl.arange(0, ROWS, layout=logsumexp.type.layout)
        if ADDS:
            to = out + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
            merge(o, logsumexp, to, lse_here, unit_here, i, valid, out_row, old_lse, old_unit)
        elif out.dtype.element_ty == gl.float32:
            natural = gl.where(i < valid, logsumexp * LN2, float("-inf"))
            gl.store(lse + head.to(gl.int64) * lse_head + row + i, natural, mask=i < rows)
            gl.store(unit + head.to(gl.int64) * lse_head + row + i, natural, mask=i < rows)
            to = out + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
            store_fp32(o, to, i, valid, rows, out_row)
        else:
            kept = rows if len(before) == 0 else valid  # what is padding now need not have been
            gl.store(
                lse + head.to(gl.int64) * lse_head + row + i,
                gl.where(i < valid, logsumexp * LN2, float("-inf")),
                mask=i < kept,
            )
            staging = joined(q_ring.buffers, q_first, plan.D_V // CHUNK)
            to = out + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
            store_out(o, staging, here, to, i, valid, rows, out_row, plan.D_V)
        q_ring.release(n)
        n += 1
        row, rows, valid, others, position, head, begin, end = receive(fields, n, q_ring)


# --- the kernel ------------------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["heads", "group", "q_head", "k_head", "v_head", "out_row", "out_head", "lse_head", "left", "right"],
)
def attention_forward(
    q, k, v, tiles, counts, found, unit, out, lse, sink, heads, group, q_head, k_head, v_head, out_row, out_head, lse_head,
    left, right, scale, softcap,
    D_QK: gl.constexpr, D_V: gl.constexpr, BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTMAX: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Every tile of every head, heaviest first within a sequence, taken in turn by persistent CTAs.

    q, k, v are descriptors of [ROWS, CHUNK], [BLOCK_N, CHUNK] and [BLOCK_N, D_V] boxes; `q_head`, `k_head`, `v_head` columns lead
    from one head to the next. Keys d - left..d + right are seen from diagonal d. `scale` makes base-2 logits.
    """
    plan = Plan(D_V, BLOCK_N, D_QK // CHUNK, HAS_LEFT, HAS_RIGHT, SOFTMAX, SOFTCAP)
    q_ring = make_ring(q, GROUPS * D_QK // CHUNK, Q_STAGES)
    k_ring = make_ring(k, D_QK // CHUNK, STAGES)
    v_ring = make_ring(v, 1, STAGES)
    fields = gl.allocate_shared_memory(gl.int32, [Q_STAGES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()  # barriers must be seen by TMA
    before = () if found is None else (found,)
    heads_in = (q_head, k_head, v_head)
    heads_out = (out_row, out_head, lse_head)
    load = (q, k, v, q_ring, k_ring, v_ring, fields, tiles, counts, heads, group, heads_in, left, right, plan)
    args = (
        q_ring, k_ring, v_ring, fields, before, unit, out, lse, sink, heads_out, left, right,
        scale.to(gl.float32), softcap.to(gl.float32),
    )  # fmt: skip
    # 2 * 240 + 24 registers a thread are what 384 threads have.
    gl.warp_specialize([(consume, (args, plan, 0)), (consume, (args, plan, 1)), (produce, load)], [4, 1], [240, 24])


# --- launching -------------------------------------------------------------------------------------------------------------------

BLOCK_M = 128  # rows of a tile, for whoever makes `tiles`

# (D_QK, D_V): (BLOCK_N, Q_STAGES, STAGES) for long and for short rows of logits; as many stages as shared memory holds. Measured on
# an H200, causal bf16, TFLOP/s of blocks of 64 and of 128: D 128, 8 x 4096: 515 and 647; 128 x 256: 207 and 185; lengths of 600 in
# the mean: 397 and 399; D 64, window of 128: 103 and 74; (192, 128), 8 x 4096: 584 and 650.
_SHAPES = {
    (64, 64): ((128, 2, 4), (64, 2, 6)),
    (128, 128): ((128, 2, 2), (64, 2, 4)),
    (192, 128): ((128, 1, 2), (64, 1, 4)),
    (256, 256): ((64, 1, 2), (64, 1, 2)),
}
_SHORT = 512  # keys: below, blocks of 64 win more at their ends than they lose to blocks of 128


def serves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether `Forward` takes such a call: head dims with a tuned shape, 16-bit floats, rows that TMA can load, scale > 0.

    Maxima are taken before the scale is applied, hence its sign. The GPU must be a Hopper (compute capability 9.0).
    """
    return (q.shape[2], v.shape[2]) in _SHAPES and q.dtype in ELEMENT and scale > 0.0 and all(map(addressable, (q, k, v)))


class Forward:
    """Attention of q [Tq, Hq, D_QK] with k [Tk, Hkv, D_QK] and v [Tk, Hkv, D_V]: out [Tq, Hq, D_V] and lse float32 [Hq, Tq].

    Planned for tensors that `serves` takes; called with others of the same kind.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: int,
        left: int, right: int, scale: float, softcap: float, softmax: str,
    ) -> None:  # fmt: skip
        """
        Args:
            sequences: how many there are; only their mean length is looked at, to choose the blocks.
            left, right: keys on each side of the diagonal that a row sees, -1 unbounded; causal is right = 0.
            softcap: 0.0 is none.
            softmax: "vanilla", "off_by_one" or "sink".
        """
        windowed = left >= 0 and right >= 0 and left + right < _SHORT
        block_n, q_stages, stages = _SHAPES[q.shape[2], v.shape[2]][windowed or k.shape[0] < _SHORT * sequences]
        self._boxes = (box_of(q, ROWS.value, CHUNK.value), box_of(k, block_n, CHUNK.value), box_of(v, block_n, v.shape[2]))
        heads = (q.shape[1], q.shape[1] // k.shape[1])
        strides = (q.stride(1), k.stride(1), v.stride(1), out.stride(0), out.stride(1), lse.stride(0))
        self._launch = Launch(
            attention_forward,
            (multiprocessors(q.get_device()), 1, 1),
            (*heads, *strides, left, right, scale * _LOG2E, softcap),
            (q.shape[2], v.shape[2], block_n, q_stages, stages, left >= 0, right >= 0, softmax, softcap > 0.0),
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, found: Tensor | None, unit: Tensor | None, out: Tensor,
        lse: Tensor, _: Tensor, tiles: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        """
        Args:
            sink: float32 [Hq], for softmax "sink".
            found, unit: None, or what attention to other keys gave for the rows that have tiles, fp32 [Tq, Hq, D_V], in units of
                e^unit ([Hq, Tq], strided as lse), `lse` being its LSE: `out` and `lse` then become those of all keys. Softmax is
                "vanilla". If `out` is fp32, too, it is `found` itself, and rows of tiles are all valid. `unit` alone: to be
                written with an fp32 `out`.
            out: contiguous, of q's dtype or fp32. `lse` is in natural log, its rows side by side.
            tiles, counts: of blocks of BLOCK_M queries, int32; counts[1] is 0 and counts up. Every row of `out` and `lse` is
                written, padding rows with +0.0 and -inf.
        """
        q_box, k_box, v_box = self._boxes
        sinks = lse if sink is None else sink
        self._launch(Boxes(q, *q_box), Boxes(k, *k_box), Boxes(v, *v_box), tiles, counts, found, unit, out, lse, sinks)
