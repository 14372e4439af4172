"""The forward kernel of attention for Hopper, in Gluon: one warp loads (TMA), warpgroups compute (wgmma).

Tq, Tk rows, Hq, Hkv heads, G = Hq / Hkv, D head dims (D_QK, D_V). A tile is GROUPS * ROWS rows of queries of one head, ROWS for
each warpgroup; a block is BLOCK_N keys. The head dim of Q and K is cut into CHUNKS of CHUNK columns. `tiles` and `counts` are
described in `kernels_tiles.py`.

A CTA takes tiles until none is left. The loading warp runs ahead through rings of shared memory (`kernels_hopper_rings.py`); what a
tile's rows see (`kernels_hopper_view.py`) says which blocks it loads. Each computing warpgroup attends to these on its own
(`kernels_hopper_softmax.py`), writes its rows of the tile or merges them with what other sections of the keys left there
(`kernels_hopper_outputs.py`), and only meets the others in the barriers of the rings.
"""

# Tuples and branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from thdops.ops.attention_thd.kernels_hopper_common import (
    ELEMENT,
    LN2,
    LOG2E,
    Boxes,
    addressable,
    box_of,
    integers,
    place_of,
    query_order,
    store_zeros,
)
from thdops.ops.attention_thd.kernels_hopper_names import async_store, barrier
from thdops.ops.attention_thd.kernels_hopper_outputs import joined, load_statistics, merge, store_fp32, store_out
from thdops.ops.attention_thd.kernels_hopper_rings import load_boxes, make_ring, publish, receive, skip, vacate, vacate_before
from thdops.ops.attention_thd.kernels_hopper_slots import BEHIND, FIRST
from thdops.ops.attention_thd.kernels_hopper_softmax import attend, finish
from thdops.ops.attention_thd.kernels_hopper_view import CHUNK, ROWS, Plan, View
from thdops.ops.attention_thd.kernels_tiles import narrow
from thdops.ops.launch import Launch, multiprocessors

# --- the warp that loads ---------------------------------------------------------------------------------------------------------


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, fields, tiles, counts, heads, head_strides, left, right, plan):
    q_head, k_head, v_head = head_strides
    entries = gl.load(counts)
    all_heads, near, group = heads
    work = gl.program_id(0)
    n = 0  # tiles
    it = 0  # blocks
    while work < entries * all_heads:
        index, head = place_of(work, entries, heads)
        tile = tiles + index.to(gl.int64) * 8
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
            load_boxes(q, q_ring, n, row, head * q_head, plan.GROUPS, plan.CHUNKS)
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


# --- the warpgroups that compute -------------------------------------------------------------------------------------------------


@gluon.jit
def consume(args, plan, GROUP: gl.constexpr):
    q_ring, k_ring, v_ring, fields, before, unit, out, out_desc, lse, sink, out_strides, left, right, scale, softcap = args
    n = 0
    it = 0
    row, rows, valid, others, position, head, begin, end = receive(fields, n, q_ring)
    while row >= 0:
        tile = (row, rows, valid, head)
        first = position + GROUP * ROWS
        view = View(others, first, gl.minimum(first + ROWS, position + valid) - 1, left, right, plan)
        own_begin, own_end = view.blocks()
        own_end = gl.where(own_end > own_begin, own_end, begin)
        it = skip(k_ring, v_ring, it, end - own_end)
        if len(before) > 0 or valid > GROUP * ROWS:
            it = _attend_tile(args, plan, GROUP, tile, view, n, it)
        else:
            _clear_tile(args, plan, GROUP, tile)
            vacate_before(q_ring, n)
        it = skip(k_ring, v_ring, it, gl.minimum(own_begin, own_end) - begin)
        vacate(q_ring, n)
        n += 1
        row, rows, valid, others, position, head, begin, end = receive(fields, n, q_ring)
    tma.store_wait(0)  # what the last tile has staged


@gluon.jit
def _attend_tile(args, plan, GROUP: gl.constexpr, tile, view, n, it):
    """Attend to a tile and leave its results; the new `it`."""
    q_ring, k_ring, v_ring, fields, before, unit, out, out_desc, lse, sink, out_strides, left, right, scale, softcap = args
    ADDS: gl.constexpr = len(before) > 0 and out.dtype.element_ty == gl.float32
    out_row, out_head, lse_head = out_strides
    row, rows, valid, head = tile
    q_first = (n % q_ring.STAGES * plan.GROUPS + GROUP) * plan.CHUNKS
    to = out + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
    lse_to = lse + head.to(gl.int64) * lse_head + row
    here = ()
    if len(before) > 0:
        found = before[0] + row.to(gl.int64) * out_row + head.to(gl.int64) * out_head
        unit_here = unit + head.to(gl.int64) * lse_head + row
        if ADDS:
            S_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.BLOCK_N, 16]))
            old_lse, old_unit = load_statistics(lse_to, unit_here, GROUP * ROWS, valid, S_ROWS)
        else:
            here = (found, lse_to, unit_here, GROUP * ROWS, valid, out_row)
    o, m, total, it = attend(q_ring, q_first, n, k_ring, v_ring, it, view, here, scale, softcap, plan)

    o, logsumexp = finish(o, m, total, sink, head, plan.SOFTMAX)
    i = GROUP * ROWS + gl.arange(0, ROWS, layout=logsumexp.type.layout)
    if ADDS:
        merge(o, logsumexp, to, lse_to, unit_here, i, valid, out_row, old_lse, old_unit)
    else:
        natural = gl.where(i < valid, logsumexp * LN2, float("-inf"))
        kept = rows if len(before) == 0 else valid  # what is padding now need not have been
        gl.store(lse_to + i, natural, mask=i < kept)
        if out.dtype.element_ty == gl.float32:
            gl.store(unit + head.to(gl.int64) * lse_head + row + i, natural, mask=i < rows)
            store_fp32(o, to, i, valid, rows, out_row)
        else:
            staging = joined(q_ring.buffers, q_first, plan.D_V // CHUNK)
            staging.store(o.to(staging.dtype))
            fence_async_shared()
            barrier()
            if len(before) == 0 and valid >= (GROUP + 1) * ROWS:
                async_store(out_desc, [row + GROUP * ROWS, head * plan.D_V], staging)
            else:
                store_out(staging, here, to, i, valid, rows, out_row, plan.D_V)
    return it


@gluon.jit
def _clear_tile(args, plan, GROUP: gl.constexpr, tile):
    """Zeros and -inf where all of a warpgroup's rows are padding."""
    q_ring, k_ring, v_ring, fields, before, unit, out, out_desc, lse, sink, out_strides, left, right, scale, softcap = args
    out_row, out_head, lse_head = out_strides
    row, rows, valid, head = tile
    first = row.to(gl.int64) + GROUP * ROWS
    store_zeros(out + first * out_row + head.to(gl.int64) * out_head, out_row, rows - GROUP * ROWS, ROWS, plan.D_V)
    i = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=i.type.layout)
    at = head.to(gl.int64) * lse_head + first + i
    gl.store(lse + at, nothing, mask=i < rows - GROUP * ROWS)
    if out.dtype.element_ty == gl.float32:
        gl.store(unit + at, nothing, mask=i < rows - GROUP * ROWS)


# --- the kernel ------------------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["heads", "near", "group", "q_head", "k_head", "v_head", "out_row", "out_head", "lse_head", "left", "right"],
)
def attention_forward(
    q, k, v, tiles, counts, found, unit, out, out_desc, lse, sink, heads, near, group, q_head, k_head, v_head, out_row, out_head,
    lse_head, left, right, scale, softcap,
    GROUPS: gl.constexpr, D_QK: gl.constexpr, D_V: gl.constexpr, BLOCK_N: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTMAX: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Every tile of every head, heaviest first within a sequence, taken in turn by persistent CTAs.

    q, k, v are descriptors of [ROWS, CHUNK], [BLOCK_N, CHUNK] and [BLOCK_N, D_V] boxes; `q_head`, `k_head`, `v_head` columns lead
    from one head to the next. Keys d - left..d + right are seen from diagonal d. `scale` makes base-2 logits.
    """
    plan = Plan(GROUPS, D_V, BLOCK_N, D_QK // CHUNK, HAS_LEFT, HAS_RIGHT, SOFTMAX, SOFTCAP)
    gl.static_assert(FIRST + Q_STAGES + 2 * STAGES <= BEHIND)
    q_ring = make_ring(q, GROUPS * D_QK // CHUNK, Q_STAGES, GROUPS, FIRST)
    k_ring = make_ring(k, D_QK // CHUNK, STAGES, GROUPS, FIRST + Q_STAGES)
    v_ring = make_ring(v, 1, STAGES, GROUPS, FIRST + Q_STAGES + STAGES)
    fields = integers(Q_STAGES)
    fence_async_shared()  # barriers must be seen by TMA
    before = () if found is None else (found,)
    heads_in = (q_head, k_head, v_head)
    heads_out = (out_row, out_head, lse_head)
    load = (q, k, v, q_ring, k_ring, v_ring, fields, tiles, counts, (heads, near, group), heads_in, left, right, plan)
    args = (
        q_ring, k_ring, v_ring, fields, before, unit, out, out_desc, lse, sink, heads_out, left, right,
        scale.to(gl.float32), softcap.to(gl.float32),
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize([(consume, (args, plan, 0)), (produce, load)], [1], [24])
    else:  # 2 * 240 + 24 registers a thread are what 384 threads have
        gl.warp_specialize([(consume, (args, plan, 0)), (consume, (args, plan, 1)), (produce, load)], [4, 1], [240, 24])


# --- launching -------------------------------------------------------------------------------------------------------------------

_LOG2E = LOG2E.value


class Shape(NamedTuple):
    """Warpgroups that compute (a third one leaves each too few registers), keys of a block, stages of Q and of K and V; grids on a
    multiprocessor and, where there are several, the registers of their threads.
    """

    groups: int
    keys: int
    q_stages: int
    stages: int
    grids: int = 1
    registers: int | None = None

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.groups * ROWS.value


# (D_QK, D_V): for long and for short rows of logits. A program's first product, its last one and its stores are hidden by nothing
# but other programs: with short rows several small ones beat a large one. Measured on an H200, causal bf16, us, two warpgroups with
# 128 or 64 keys against one: D 128, 128 x 256: 285, 271; lengths of 600 in the mean: 792, 709; 32 x 1024: 594, 626; 8 x 4096: 1838,
# 2257. D 64, 128 x 256: 132, with two grids 110 and with three 92; 8 x 4096: 672, 745, 646; with a window of 128 527, 482, 400.
# 192/128, 128 x 256: 203, 192; 8 x 4096: 1063, 1259. Over a second of replays, in which clocks fall, D 64 with 8 x 4096 takes 686
# and, with three grids, 745; D 128 with 128 x 256 is even. Storing whole tiles by TMA, not from registers, took 128 x 256 from 274
# to 249. Slower: three programs in one CTA, each with its own rings and 32 keys a block (D 128, 128 x 256: 404 to 422 instead of
# 292 over a second); exp2 of every fourth element as a polynomial (8 x 4096 2012 instead of 1880, D 64 707 instead of 679). No
# faster: the next tile's first product before this tile is left (282, 278). Q's slot is released while the next tile is attended
# to: 274 instead of 281. Two heads of a group besides, with K and V loaded once for both: 270, not kept.
_SHAPES = {
    (64, 64): (Shape(2, 128, 2, 4), Shape(1, 64, 2, 3, 3, 80)),
    (128, 128): (Shape(2, 128, 2, 2), Shape(1, 64, 2, 2, 2, 128)),
    (192, 128): (Shape(2, 128, 1, 2), Shape(1, 64, 1, 2, 2, 128)),
    (256, 256): (Shape(2, 64, 1, 2),) * 2,
}


def serves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether `Forward` takes such a call: head dims with a tuned shape, 16-bit floats, rows that TMA can load, scale > 0.

    Maxima are taken before the scale is applied, hence its sign. The GPU must be a Hopper (compute capability 9.0).
    """
    return (q.shape[2], v.shape[2]) in _SHAPES and q.dtype in ELEMENT and scale > 0.0 and all(map(addressable, (q, k, v)))


def shape_of(q: Tensor, v: Tensor, left: int, right: int, short: bool) -> Shape:
    """For tensors that `serves` takes: `short` sequences or a narrow window, or neither."""
    return _SHAPES[q.shape[2], v.shape[2]][short or narrow(left, right)]


class Forward:
    """Attention of q [Tq, Hq, D_QK] with k [Tk, Hkv, D_QK] and v [Tk, Hkv, D_V]: out [Tq, Hq, D_V] and lse float32 [Hq, Tq].

    Planned for tensors that `serves` takes; called with others of the same kind.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape,
        mean: float, left: int, right: int, scale: float, softcap: float, softmax: str,
    ) -> None:  # fmt: skip
        """
        Args:
            shape: one of `shape_of`.
            mean: rows of k that a sequence has on the average; only the order of work follows from it.
            left, right: keys on each side of the diagonal that a row sees, -1 unbounded; causal is right = 0.
            softcap: 0.0 is none.
            softmax: "vanilla", "off_by_one" or "sink".
        """
        self._boxes = (box_of(q, ROWS.value, CHUNK.value), box_of(k, shape.keys, CHUNK.value), box_of(v, shape.keys, v.shape[2]))
        self._out_box = box_of(out, ROWS.value, v.shape[2])
        strides = (q.stride(1), k.stride(1), v.stride(1), out.stride(0), out.stride(1), lse.stride(0))
        self._launch = Launch(
            attention_forward,
            (multiprocessors(q.get_device()) * shape.grids, 1, 1),
            (*query_order(q, k, v, mean), *strides, left, right, scale * _LOG2E, softcap),
            (shape.groups, q.shape[2], v.shape[2], *shape[1:4], left >= 0, right >= 0, softmax, softcap > 0.0),
            registers=shape.registers,
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
            tiles, counts: of blocks of the shape's rows, int32; counts[1] is 0 and counts up. Every row of `out` and `lse` is
                written, padding rows with +0.0 and -inf.
        """
        q_box, k_box, v_box = self._boxes
        sinks = lse if sink is None else sink
        rows_of_out = Boxes(out, *self._out_box) if found is None and out.dtype == q.dtype else None
        self._launch(Boxes(q, *q_box), Boxes(k, *k_box), Boxes(v, *v_box), tiles, counts, found, unit, out, rows_of_out, lse, sinks)
