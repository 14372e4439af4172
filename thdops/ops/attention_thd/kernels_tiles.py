"""The tile table: which block of rows of which sequence a work item of an attention kernel is, made on the device.

B sequences; x is the side that is cut into tiles of BX rows (queries for out and dQ, keys for dK and dV), y the other side.
Segments are what rows belong to: number 0 lies before the first sequence, 1 to B are the sequences (valid rows, then their gap),
B + 1 is the tail. A tile is a block of rows of one segment, so that every row of x has exactly one tile, padding rows too.
Offsets are clamped into the tensor and never decrease here, whatever the metadata hold.

A tile is 8 integers:
    0 row        its first row in x
    1 rows       how many rows it owns, 1 to BX
    2 valid      how many of them are valid: they come first
    3 other_row  the first row of its sequence in y
    4 others     valid rows of its sequence in y
    5 position   where its first row stands among y's rows: row r sees j with position + r - left <= j <= position + r + right
A table may be of fewer rows of x: of valid ones alone, or of valid ones of sequences that have valid rows in y too. Then a kernel
leaves all other rows as they are. And it may be for batches of short sequences or of long ones, and be empty for the other kind: a
call that has a kernel for each launches both, and no length has to be known on the host.
Within a sequence tiles come last block first: under a causal mask those are the heavy ones, and light ones fill up the end. SPREAD:
so they do across all sequences, where there are so few tiles that the last sequence's heavy ones would come too late. Otherwise one
sequence after the other keeps what they read in the cache.
`counts` is two integers: the number of tiles, and 0, from which the programs of a kernel count the work items they take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thdops.ops.launch import Launch
from thdops.ops.plans import Blank, meta

SHORT = 1024  # rows of a sequence, below which all are short if they are of a length
# Rows that a row's own sequence has on the average (sum n^2 / sum n), below which a batch of any lengths is of short ones.
MIXED = 2048
_TILES = 16  # of one program
_FIELDS = 8


def capacity(rows: int, sequences: int, block: int) -> int:
    """How many tiles there can be: every segment may end in a partial one."""
    return triton.cdiv(rows, block) + sequences + 2


class TileTable:
    """(tiles int32 [capacity, 8], counts int32 [2]) of side x against side y, planned for the rows of both and the sequences.

    Called with the offsets of x, valid and padded, and those of y; `shared`: y is x.
    """

    def __init__(
        self,
        x_rows: int,
        y_rows: int,
        sequences: int,
        shared: bool,
        bottom_right: bool,
        block: int,
        owned: str = "all",
        spread: bool = False,
        lengths: str = "any",
    ) -> None:
        """`owned`: which rows of x have a tile, "all", "valid" or "met" (those that have valid rows in y). `spread`: the last
        blocks of all sequences come first, not those of the first sequence. `lengths`: of which batches it has tiles, "any",
        "short" or "long"; either side's table tells them alike.
        """
        self.capacity = capacity(x_rows, sequences, block)
        self._blank = Blank(meta(self.capacity, _FIELDS, dtype=torch.int32), meta(2, dtype=torch.int32))
        chunk = min(256, max(16, triton.next_power_of_2(sequences + 2)))
        self._launch = Launch(
            tile_table_kernel,
            (triton.cdiv(self.capacity, _TILES), 1, 1),
            (x_rows, y_rows, sequences, self.capacity),
            (shared, bottom_right, owned, spread, lengths, MIXED, block, _TILES, chunk),
        )

    def __call__(self, cu_x: Tensor, padded_x: Tensor, cu_y: Tensor, padded_y: Tensor) -> tuple[Tensor, Tensor]:
        tiles, counts = self._blank(cu_x.device)
        self._launch(cu_x, padded_x, cu_y, padded_y, tiles, counts)
        return tiles, counts


@triton.jit
def read_tile(tiles, index):
    """(row, rows, valid, other_row, others, position) of a tile; rows as int64, since offsets follow from them."""
    entry = tiles + index.to(tl.int64) * 8
    row = tl.load(entry).to(tl.int64)
    other_row = tl.load(entry + 3).to(tl.int64)
    return row, tl.load(entry + 1), tl.load(entry + 2), other_row, tl.load(entry + 4), tl.load(entry + 5)


@triton.jit(do_not_specialize=["rows_x", "rows_y", "sequences", "capacity"])
def tile_table_kernel(
    cu_x,
    padded_x,
    cu_y,
    padded_y,
    tiles,
    counts,
    rows_x,
    rows_y,
    sequences,
    capacity,
    SHARED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    OWNED: tl.constexpr,
    SPREAD: tl.constexpr,
    LENGTHS: tl.constexpr,
    MIXED: tl.constexpr,
    BX: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[TILES] entries: every program counts all tiles (there are few sequences) and keeps the segments of its own."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    start = tl.zeros([TILES], tl.int32)  # of the segment of each tile
    end = tl.zeros([TILES], tl.int32)
    valid = tl.zeros([TILES], tl.int32)
    last = tl.zeros([TILES], tl.int32)  # the number behind the segment's tiles
    other_row = tl.zeros([TILES], tl.int32)
    others = tl.zeros([TILES], tl.int32)

    total = tl.zeros([1], tl.int32)
    reached_x = tl.zeros([1], tl.int32)  # the largest offset so far
    reached_y = tl.zeros([1], tl.int32)
    rows = tl.zeros([1], tl.int64)  # valid ones, of both sides
    squares = tl.zeros([1], tl.int64)  # of their number in each sequence
    for first in range(0, sequences + 2, CHUNK):
        segment = first + tl.arange(0, CHUNK)
        starts, ends, valids, starts_y, valids_y, reached_x, reached_y = _both(
            cu_x, padded_x, rows_x, cu_y, padded_y, rows_y, sequences, segment, reached_x, reached_y, SHARED, OWNED
        )
        blocks = (ends - starts + BX - 1) // BX
        behind = total + tl.cumsum(blocks, 0)
        before = behind - blocks
        own = (before[None, :] <= tile[:, None]) & (tile[:, None] < behind[None, :])  # [TILES, CHUNK], one True a row in all
        start += tl.sum(tl.where(own, starts[None, :], 0), 1)
        end += tl.sum(tl.where(own, ends[None, :], 0), 1)
        valid += tl.sum(tl.where(own, valids[None, :], 0), 1)
        last += tl.sum(tl.where(own, behind[None, :], 0), 1)
        other_row += tl.sum(tl.where(own, starts_y[None, :], 0), 1)
        others += tl.sum(tl.where(own, valids_y[None, :], 0), 1)
        total = tl.maximum(total, tl.max(behind, 0))
        if LENGTHS != "any":
            rows += tl.sum(valids.to(tl.int64) + valids_y, 0)
            squares += tl.sum(valids.to(tl.int64) * valids + valids_y.to(tl.int64) * valids_y, 0)

    block = last - 1 - tile
    row = start + block * BX
    position = block * BX
    if BOTTOM_RIGHT:
        position += others - valid
    kept = tile < total
    place = tile
    if SPREAD:
        place = tl.zeros([TILES], tl.int32)
        total = tl.zeros([1], tl.int32)
        reached_x = tl.zeros([1], tl.int32)
        reached_y = tl.zeros([1], tl.int32)
        for first in range(0, sequences + 2, CHUNK):
            segment = first + tl.arange(0, CHUNK)
            starts, ends, _, _, _, reached_x, reached_y = _both(
                cu_x, padded_x, rows_x, cu_y, padded_y, rows_y, sequences, segment, reached_x, reached_y, SHARED, OWNED
            )
            blocks = (ends - starts + BX - 1) // BX
            behind = total + tl.cumsum(blocks, 0)
            ahead = (blocks[None, :] > block[:, None]) & (behind[None, :] < last[:, None])  # tiles of this number before
            place += tl.sum(tl.maximum(blocks[None, :] - 1 - block[:, None], 0) + ahead.to(tl.int32), 1)
            total = tl.maximum(total, tl.max(behind, 0))
    entry = tiles + place.to(tl.int64) * 8
    tl.store(entry + 0, row, mask=kept)
    tl.store(entry + 1, tl.minimum(end - row, BX), mask=kept)
    tl.store(entry + 2, tl.minimum(tl.maximum(valid - block * BX, 0), BX), mask=kept)
    tl.store(entry + 3, other_row, mask=kept)
    tl.store(entry + 4, others, mask=kept)
    tl.store(entry + 5, position, mask=kept)
    two = tl.arange(0, 2)
    if LENGTHS != "any":
        total = tl.where((squares < MIXED * rows) == (LENGTHS == "short"), total, 0)
    tl.store(counts + two, tl.where(two == 0, total, 0), mask=two >= tl.program_id(0) * 2)  # the first program's alone


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _both(
    cu_x, padded_x, rows_x, cu_y, padded_y, rows_y, sequences, segment, reached_x, reached_y, SHARED: tl.constexpr,
    OWNED: tl.constexpr,
):  # fmt: skip
    """Of [CHUNK] segments: first row, row behind the last that is owned, valid rows in x; first row, valid rows in y; and what was
    reached in each.
    """
    starts, ends, valids, reached_x = _extents(cu_x, padded_x, rows_x, sequences, segment, reached_x)
    starts_y = starts
    valids_y = valids
    if not SHARED:
        starts_y, _, valids_y, reached_y = _extents(cu_y, padded_y, rows_y, sequences, segment, reached_y)
    if OWNED == "valid":
        ends = starts + valids
    elif OWNED == "met":
        ends = starts + tl.where(valids_y > 0, valids, 0)
    return starts, ends, valids, starts_y, valids_y, reached_x, reached_y


@triton.jit
def _extents(cu_seqlens, padded, rows, sequences, segment, reached):
    """(first row, row behind the last, valid rows) of [CHUNK] segments, and the largest offset met, given the one before."""
    before = tl.load(padded + segment - 1, mask=(segment >= 1) & (segment <= sequences + 1), other=0)
    starts = tl.associative_scan(_within(before, rows), 0, _largest)
    starts = tl.maximum(starts, reached)
    ends = _within(tl.load(padded + segment, mask=segment <= sequences, other=0), rows)
    ends = tl.where(segment <= sequences, tl.maximum(starts, ends), rows)
    ends = tl.where(segment <= sequences + 1, ends, starts)  # behind the tail there is nothing
    real = (segment >= 1) & (segment <= sequences)
    low = tl.load(cu_seqlens + segment - 1, mask=real, other=0).to(tl.int64)
    high = tl.load(cu_seqlens + segment, mask=real, other=0).to(tl.int64)
    valids = tl.minimum(tl.maximum(high - low, 0), (ends - starts).to(tl.int64)).to(tl.int32)
    return starts, ends, valids, tl.maximum(reached, tl.max(starts, 0))


@triton.jit
def _within(offset, rows):
    """`offset` clamped to [0, rows], as int32."""
    return tl.minimum(tl.maximum(offset.to(tl.int64), 0), rows).to(tl.int32)
