"""dQ by reduction on Hopper: the shares that tiles of keys have in it are added to fp32 sums, in any order or in a fixed one.

A consumer of `keys_kernel` leaves dS K of a block of queries in shared memory, two shares on their way; TMA adds it to the sums.
The order of additions decides a sum's last bits:
- Any order: consumers start the additions themselves.
- ORDERED: a warp does, the adder. Each block of queries counts the tiles that have added to it; the adder of a tile waits for all
  tiles before it in its sequence that meet the block. All tiles go through their queries from the last block to the first, and
  through the heads of a group at each: so they follow each other at a distance of one block, whatever the mask, and those with the
  most to do begin. A work item waits only for items that were taken before it, so that one of those being worked on waits for none,
  however many programs run at a time.

Measured on an H200 (Triton 3.6, D 128, bf16, causal, all of a backward, ms) in any order, in a fixed one, and with a kernel for dQ,
which repeats bitwise too:
- 8 x 4096 rows, 32/8 heads 6.3, 6.4, 6.8; 64/8 heads 13.6, 13.2, 14.3; 2 x 16384, 16/16 heads 11.1, 11.3, 12.8; documents of 600
  rows 8.3, 8.4, 9.0. In order, but last tile first and each from its diagonal on: 6.8, 15.4, 11.4; head after head of a group: 7.2,
  14.9, 11.1. Without an order, an adder is no faster (D 64: 3 % slower).
- 192/128, 16/16 heads, in blocks of 32 queries (K^T dS^T makes its transpose): 4.64 to 4.76, with a kernel for dQ 4.59.
- Products for dS K put off until the next block's have begun: 11.1 instead of 6.3, for ptxas has no registers left for them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from thdops.ops.attention_thd.kernels_hopper_memory import barriers, buffer
from thdops.ops.attention_thd.kernels_hopper_names import async_atomic_add, barrier
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
    """A consumer's: descriptor of the sums, two shares, dS^T [ROWS, BLOCK_Q], and for an adder which shares are full, and empty."""
    if REDUCE:
        shape: gl.constexpr = [k[0].shape[1], q[0].shape[1]]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, k[0].dtype)
        ds_s = gl.allocate_shared_memory(k[0].dtype, shape, layout)
        bars = (barriers(2, 1), barriers(2, 1)) if ORDERED else ((), ())
        return dq_desc, buffer(dq_desc, 2), ds_s, bars[0], bars[1]
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
def hand_over(dq, valid, shares, n, row, column, ORDERED: gl.constexpr):
    """Start adding a consumer's n-th share to the sums from (row, column) on, or leave it to the adder. Rows from `valid` on are
    another sequence's and get zeros.
    """
    dq_desc, dq_s, ds_s, full, empty = shares
    if valid < dq.shape[0]:
        r = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout))
        dq = gl.where((r < valid)[:, None], dq, 0.0)
    slot = n % 2
    if ORDERED:
        mbarrier.wait(empty.index(slot), ((n // 2) & 1) ^ 1)
    dq_s.index(slot).store(dq)
    fence_async_shared()
    barrier()
    if ORDERED:
        mbarrier.arrive(full.index(slot), count=1)
    else:
        async_atomic_add(dq_desc, [row, column], dq_s.index(slot))


# --- the adder -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def add_in_order(
    shares, turns, turns_a_head, work, heads, window,
    D: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """One warp, which takes the same items and steps as the consumer. turns: int32 [Hq, turns_a_head], how many tiles have added to
    each block; zeros at first.
    """
    dq_desc, dq_s, ds_s, full, empty = shares
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
                mbarrier.wait(full.index(slot), (n // 2) & 1)
                while taken < before:
                    taken = _taken(turn)
                _follow()
                async_atomic_add(dq_desc, [other_row + i, (head * group + g) * D], dq_s.index(slot))
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
