"""dQ by reduction on Hopper: the shares that tiles of keys have in it are added to fp32 sums, in any order or in a fixed one.

A consumer of `keys_kernel` leaves dS K of a block of queries in shared memory, two shares on their way; TMA adds it to the sums.
The order of additions decides a sum's last bits:
- Any order, of two consumers: they start the additions themselves.
- ORDERED, of a single one: a warp does, the adder. Each block of queries counts the tiles that have added to it; the adder of a
  tile waits for all tiles before it in its sequence that meet the block. All tiles go through their queries from the last block to
  the first, and through the heads of a group at each: so they follow each other at a distance of one block, whatever the mask, and
  those with the most to do begin. A work item waits only for items that were taken before it, so that one of those being worked on
  waits for none. Who comes first may store its share, so that nobody has to write zeros before.

Measured on an H200 (Triton 3.6, bf16, causal, all of a backward, ms over a second of replays), D 128 in a fixed order, in any (the
adder does not wait; block after block, or head after head of a group), and with a kernel for dQ, which repeats bitwise too:
- 8 x 4096 rows, 32/8 heads 6.0, 6.2, 5.9, 6.8; 64/8 heads 12.0 to 12.8, 12.8, 13.3, 14.3; 2 x 16384, 16/16 heads 10.7, 10.7, 10.8,
  12.8; documents of 600 rows 7.9, 7.9, 8.0, 9.0, and 7.6 since first shares are stored. So D 128 has no other order.
  Earlier, beside 6.4, 13.2, 11.3 of the first three: last tile first, each from its diagonal on 6.8, 15.4, 11.4; one head of a
  group after the other 7.2, 14.9, 11.1.
- Shares for the adder at named barriers, dS^T in two buffers (so that all warps meet once less a block), P multiplied before dS is
  known: 8 x 4096 rows 6.1 instead of 6.35, in a fixed order.
- D 64, one consumer, in a fixed order: 1.98, and in any by two 1.77; by a kernel for dQ 1.90.
- 192/128, 16/16 heads, in blocks of 32 queries (K^T dS^T makes its transpose): 4.64 to 4.76, with a kernel for dQ 4.59.
- Products for dS K put off until the next block's have begun: 11.1 instead of 6.3, for ptxas makes all products wait where one that
  a loop carries is read (at D 64, too).
"""

# Branches on constants vanish while a kernel is traced, which Python's types cannot express.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from thdops.ops.attention_thd.kernels_hopper_memory import barriers, buffer
from thdops.ops.attention_thd.kernels_hopper_names import async_atomic_add, async_store, barrier
from thdops.ops.attention_thd.kernels_hopper_slots import await_release, release, threads_of
from thdops.ops.attention_thd.kernels_hopper_work import blocks_met, take

# --- the way through a tile's blocks ---------------------------------------------------------------------------------------------


@gluon.jit
def first_step(first, blocks, BLOCK_Q: gl.constexpr, ORDERED: gl.constexpr):
    """(query head of the group, first row of the block) that a tile begins with."""
    return first * 0, first + (blocks - 1) * BLOCK_Q if ORDERED else first


@gluon.jit
def next_step(g, i, group, first, blocks, BLOCK_Q: gl.constexpr, ORDERED: gl.constexpr):
    """Where it goes from there. One loop with this in it is faster than two nested ones."""
    if ORDERED:
        last = g + 1 == group
        return gl.where(last, 0, g + 1), gl.where(last, i - BLOCK_Q, i)
    else:
        last = i + BLOCK_Q == first + blocks * BLOCK_Q
        return gl.where(last, g + 1, g), gl.where(last, first, i + BLOCK_Q)


# --- consumers -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def make_shares(dq_desc, k, q, REDUCE: gl.constexpr, ORDERED: gl.constexpr):
    """A consumer's: descriptor of the sums, two shares, dS^T [ROWS, BLOCK_Q] (two of it with an adder), barriers for shares that
    the adder has read.
    """
    if REDUCE:
        shape: gl.constexpr = [k[0].shape[1], q[0].shape[1]]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, k[0].dtype)
        SLOTS: gl.constexpr = 2 if ORDERED else 1
        ds_s = gl.allocate_shared_memory(k[0].dtype, [SLOTS, k[0].shape[1], q[0].shape[1]], layout)
        empty = barriers(2, 1) if ORDERED else ()
        return dq_desc, buffer(dq_desc, 2), ds_s, empty
    else:
        return ()


@gluon.jit
def start_share(ds_s, k):
    """Start dS K [BLOCK_Q, D] of one tile of keys; shared memory holds dS^T."""
    rows: gl.constexpr = ds_s.shape[1]
    columns: gl.constexpr = k.shape[1]
    ALONG: gl.constexpr = gl.num_warps() if rows >= 16 * gl.num_warps() else rows // 16
    ACROSS: gl.constexpr = gl.num_warps() // ALONG
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ALONG, ACROSS], [16, columns // ACROSS, 16])
    zero = gl.zeros([rows, columns], gl.float32, layout)
    return warpgroup_mma(ds_s.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def hand_over(dq, valid, shares, n, row, column, FULL: gl.constexpr, THREADS: gl.constexpr, ORDERED: gl.constexpr):
    """Start adding a consumer's n-th share to the sums from (row, column) on, or leave it to the adder, at the barriers FULL and
    FULL + 1. Rows from `valid` on are another sequence's and get zeros.
    """
    dq_desc, dq_s, ds_s, empty = shares
    if valid < dq.shape[0]:
        r = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout))
        dq = gl.where((r < valid)[:, None], dq, 0.0)
    slot = n % 2
    if ORDERED:
        mbarrier.wait(empty.index(slot), ((n // 2) & 1) ^ 1)
    dq_s.index(slot).store(dq)
    fence_async_shared()
    if ORDERED:
        release(FULL + slot, THREADS)
    else:
        barrier()
        async_atomic_add(dq_desc, [row, column], dq_s.index(slot))


# --- the adder -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def add_in_order(
    shares, turns, turns_a_head, begins, work, heads, window,
    D: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """One warp, which takes the same items and steps as the consumer. turns: int32 [Hq, turns_a_head], how many tiles have added to
    each block; zeros at first. begins: not 0 if the first tile to meet a block stores its share, but for the last block of a
    sequence, which reaches into the next, and for the first, into which the last one before reaches.
    """
    dq_desc, dq_s, ds_s, empty = shares
    tiles, counts, mail, mail_full, mail_empty = work
    kv_heads, near, group = heads
    left, right = window
    BLOCK_Q: gl.constexpr = dq_s.shape[1]
    items = 0
    n = 0
    index, head, row, rows, valid, other_row, others, position = take(work, items)
    while index >= 0:
        items += 1
        first, blocks = blocks_met(position, valid, others, right, left, BLOCK_Q, RIGHT, LEFT, True)
        if blocks > 0:
            entry = tiles + index.to(gl.int64) * 8
            preceding, segment = gl.load(entry + 6), gl.load(entry + 7)
            # Every block of every sequence has a number of its own: sequences need not begin at multiples of BLOCK_Q.
            turns_here = turns + other_row // BLOCK_Q + segment
            g, i = first_step(first, blocks, BLOCK_Q, True)
            turn = turns_here + (head * group + g).to(gl.int64) * turns_a_head + i // BLOCK_Q
            taken = _taken(turn)
            for _ in range(group * blocks):
                before = preceding
                if LEFT:  # each tile meets rows up to ROWS behind those of the one before it
                    before = gl.minimum(preceding, (position + ROWS + left - 1 - i) // ROWS)
                slot = n % 2
                await_release(FULL + slot, threads_of(ROWS), n >= 0)  # always
                while taken < before:
                    taken = _taken(turn)
                _follow()
                at = [other_row + i, (head * group + g) * D]
                if (begins != 0) & (before == 0) & (i > 0) & (i + BLOCK_Q <= others):
                    async_store(dq_desc, at, dq_s.index(slot))
                else:
                    async_atomic_add(dq_desc, at, dq_s.index(slot))
                added = turn
                g, i = next_step(g, i, group, first, blocks, BLOCK_Q, True)
                turn = turns_here + (head * group + g).to(gl.int64) * turns_a_head + i // BLOCK_Q
                taken = _taken(turn)  # of the next block, while the addition is under way; behind the last one of any
                _settle()
                gl.atomic_add(added, 1, sem="release")
                mbarrier.arrive(empty.index(slot), count=1)
                n += 1
        index, head, row, rows, valid, other_row, others, position = take(work, items)


@gluon.jit
def _taken(turn):
    return gl.atomic_add(turn, 0, sem="acquire")


@gluon.jit
def _follow():
    """Order what TMA adds from here on behind what was acquired: to memory it is a proxy of its own."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)


@gluon.jit
def _settle():
    """Wait until what this warp had added is in memory; Gluon's `store_wait` only waits until shared memory has been read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, False, 1)
    barrier()
