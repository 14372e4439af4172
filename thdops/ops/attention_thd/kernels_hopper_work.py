"""What the backward kernels for Hopper work on: items, in turn; the blocks of the other side that a tile meets; hidden pairs.

A kernel owns tiles of one side, keys or queries, and walks over blocks of the other side; an item is a tile of one head. A row at
position p of the other side's axis meets the rows [p - before, p + after] of it.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from thdops.ops.attention_thd.kernels_hopper_common import packed, place_of, unpacked
from thdops.ops.attention_thd.kernels_hopper_names import barrier

# --- items -----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def post(work, turn, values):
    """Tell the consumers which item comes next: the integers of `take`, the first one -1 behind the last item. Two may be on their
    way.
    """
    tiles, counts, mail, full, empty = work
    slot = turn % 2
    content = packed(values)
    mbarrier.wait(empty.index(slot), ((turn // 2) & 1) ^ 1)
    mail.index(slot).store(content)
    barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def take(work, turn) -> Any:
    """The next item: (index of its tile, head, and what `tile_at` gives)."""
    tiles, counts, mail, full, empty = work
    slot = turn % 2
    mbarrier.wait(full.index(slot), (turn // 2) & 1)
    values = unpacked(mail.index(slot))
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return values


@gluon.jit
def key_place(item, entries, heads):
    """`place_of` for tiles of keys: from the end of the table, for under a causal mask a sequence's last keys are seen by few, and
    light work should come last.
    """
    index, head = place_of(item, entries, heads)
    return entries - 1 - index, head


@gluon.jit
def tile_at(tiles, index):
    """(row, rows, valid, other_row, others, position) of a tile; `kernels_tiles.py` says what they are."""
    entry = tiles + index.to(gl.int64) * 8
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)


# --- what a tile meets -----------------------------------------------------------------------------------------------------------


@gluon.jit
def blocks_met(
    position, valid, others, before, after, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr,
    ALIGNED: gl.constexpr = False,
):  # fmt: skip
    """First row and number of the blocks of the other side that any row of a tile meets; ALIGNED: blocks that all tiles share."""
    first = gl.maximum(position - before, 0) if BEFORE else position * 0
    if ALIGNED:
        first = first // BLOCK * BLOCK
    last = gl.minimum(position + valid + after, others) if AFTER else others
    return first, gl.where(valid > 0, (gl.maximum(last - first, 0) + BLOCK - 1) // BLOCK, 0)


@gluon.jit
def is_cut(
    i, position, valid, others, before, after, ROWS: gl.constexpr, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr
):
    """Whether any pair of a tile and the block from i on is hidden."""
    cut = (valid < ROWS) | (i + BLOCK > others)
    if BEFORE:
        cut = cut | (i < position + ROWS - 1 - before)
    if AFTER:
        cut = cut | (i + BLOCK - 1 > position + after)
    return cut


@gluon.jit
def is_hidden(
    i, position, valid, before, after, ROWS: gl.constexpr, BLOCK: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr
):
    """Whether every pair is: a consumer's rows may be, where the tile's are not."""
    hidden = valid <= 0
    if BEFORE:
        hidden = hidden | (i + BLOCK - 1 < position - before)
    if AFTER:
        hidden = hidden | (i > position + ROWS - 1 + after)
    return hidden


@gluon.jit
def zero_hidden(x, i, position, valid, others, before, after, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """Zero for the hidden pairs of [ROWS, BLOCK]; by selection, for what stands there may be NaN."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = i + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    seen = (r < valid)[:, None] & (c < others)[None, :]
    if BEFORE:
        seen = seen & (c[None, :] >= (position + r - before)[:, None])
    if AFTER:
        seen = seen & (c[None, :] <= (position + r + after)[:, None])
    return gl.where(seen, x, 0.0)
