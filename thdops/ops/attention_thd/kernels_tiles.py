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
    6 block      how many tiles of its segment come before it
    7 segment    the number of its segment
A table may be of fewer rows of x: of valid ones alone, or of valid ones of sequences that have valid rows in y too. Then a kernel
leaves all other rows as they are.
Within a sequence tiles come last block first: under a causal mask those are the heavy ones, and light ones fill up the end. `few`:
so they do across all sequences, where there are so few tiles that the last sequence's heavy ones would come too late. Otherwise one
sequence after the other keeps what they read in the cache.
A count is two integers: the number of tiles, and 0, from which the programs of a kernel count the work items they take. A call that
has a kernel for short sequences and one for long ones launches both, each with a count of its own, one of which says that there are
no tiles: so no length has to be known on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thdops.ops.launch import Launch
from thdops.ops.plans import Blank, meta

SHORT = 1024  # rows of a sequence, below which all are short if they are of a length
# Rows that a row's own sequence has on the average (sum n^2 / sum n), below which a batch of any lengths is of short ones.
MIXED = 2048
# A program makes 4 tiles and looks at all segments together, or, beyond that number, makes 16 and looks at 256 at a time.
# Measured on an H200, us: 8 sequences 2.3 (the other way 2.7); 128 3.4 (4.3); 520 4.4 (7.7); 4096 31 (18).
_TOGETHER = 1024
_FIELDS = 8


def narrow(left: int, right: int) -> bool:
    """Whether rows see about as few keys through a window as in short sequences, where a causal row sees half of them."""
    return left >= 0 and right >= 0 and left + right < SHORT // 2


def capacity(rows: int, sequences: int, block: int) -> int:
    """How many tiles there can be: every segment may end in a partial one."""
    return triton.cdiv(rows, block) + sequences + 2


class Tiles(NamedTuple):
    """A table and its counts, int32 [2]."""

    entries: Tensor  # int32 [capacity, 8]
    any: Tensor
    short: Tensor | None  # 0 unless sequences are short; None where nobody looks
    long: Tensor | None

    def of(self, lengths: str) -> tuple[Tensor, Tensor]:
        """(entries, count) for a kernel that serves "any", "short" or "long" sequences; the latter two if one `looks`."""
        return self.entries, getattr(self, lengths)


class TileTable:
    """The table of side x against side y, planned for the rows of both and the sequences.

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
        few: int = 0,
        looks: bool = False,
    ) -> None:
        """`owned`: which rows of x have a tile, "all", "valid" or "met" (those that have valid rows in y). `few`: if fewer tiles
        than that have valid rows, the last blocks of all sequences come first, not those of the first sequence. `looks`: whether
        sequences are short or long is wanted; either side's table tells it alike.
        """
        self.capacity = capacity(x_rows, sequences, block)
        counts = [meta(2, dtype=torch.int32)] * (3 if looks else 1)
        self._blank = Blank(meta(self.capacity, _FIELDS, dtype=torch.int32), *counts)
        self._unasked = () if looks else (None, None)
        segments = sequences + 2
        tiles, chunk = (4, max(16, triton.next_power_of_2(segments))) if segments <= _TOGETHER else (16, 256)
        self._launch = Launch(
            tile_table_kernel,
            (triton.cdiv(self.capacity, tiles), 1, 1),
            (x_rows, y_rows, sequences, few),
            (shared, bottom_right, owned, few > 0, MIXED, block, tiles, chunk),
        )

    def __call__(self, cu_x: Tensor, padded_x: Tensor, cu_y: Tensor, padded_y: Tensor) -> Tiles:
        tiles = Tiles(*self._blank(cu_x.device), *self._unasked)
        self._launch(cu_x, padded_x, cu_y, padded_y, *tiles)
        return tiles


@triton.jit
def read_tile(tiles, index):
    """(row, rows, valid, other_row, others, position) of a tile; rows as int64, since offsets follow from them."""
    entry = tiles + index.to(tl.int64) * 8
    row = tl.load(entry).to(tl.int64)
    other_row = tl.load(entry + 3).to(tl.int64)
    return row, tl.load(entry + 1), tl.load(entry + 2), other_row, tl.load(entry + 4), tl.load(entry + 5)


@triton.jit(do_not_specialize=["rows_x", "rows_y", "sequences", "few"])
def tile_table_kernel(
    cu_x,
    padded_x,
    cu_y,
    padded_y,
    tiles,
    count,
    count_short,  # None
    count_long,
    rows_x,
    rows_y,
    sequences,
    few,
    SHARED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    OWNED: tl.constexpr,
    SPREADS: tl.constexpr,
    MIXED: tl.constexpr,
    BX: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[TILES] entries: every program counts all tiles (there are few sequences) and keeps the segments of its own."""
    LOOKS: tl.constexpr = count_short is not None
    own_first = tl.program_id(0) * TILES
    tile = own_first + tl.arange(0, TILES)
    start = tl.zeros([TILES], tl.int32)  # of the segment of each tile
    end = tl.zeros([TILES], tl.int32)
    valid = tl.zeros([TILES], tl.int32)
    last = tl.zeros([TILES], tl.int32)  # the number behind the segment's tiles
    segments = tl.zeros([TILES], tl.int32)
    other_row = tl.zeros([TILES], tl.int32)
    others = tl.zeros([TILES], tl.int32)

    total = own_first * 0
    busy = own_first * 0  # tiles that have valid rows
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
        before_all = total
        total += tl.sum(blocks, 0)
        if (before_all < own_first + TILES) & (own_first < total):
            behind = before_all + tl.cumsum(blocks, 0)
            before = behind - blocks
            own = (before[None, :] <= tile[:, None]) & (tile[:, None] < behind[None, :])  # [TILES, CHUNK], one True a row in all
            start += tl.sum(tl.where(own, starts[None, :], 0), 1)
            end += tl.sum(tl.where(own, ends[None, :], 0), 1)
            valid += tl.sum(tl.where(own, valids[None, :], 0), 1)
            last += tl.sum(tl.where(own, behind[None, :], 0), 1)
            segments += tl.sum(tl.where(own, segment[None, :], 0), 1)
            other_row += tl.sum(tl.where(own, starts_y[None, :], 0), 1)
            others += tl.sum(tl.where(own, valids_y[None, :], 0), 1)
        if SPREADS:
            busy += tl.sum((valids + BX - 1) // BX, 0)
        if LOOKS:
            rows += tl.sum(valids.to(tl.int64) + valids_y, 0)
            squares += tl.sum(valids.to(tl.int64) * valids + valids_y.to(tl.int64) * valids_y, 0)

    block = last - 1 - tile
    row = start + block * BX
    position = block * BX
    if BOTTOM_RIGHT:
        position += others - valid
    kept = tile < total
    place = tile
    if SPREADS and busy < few:
        place = tl.zeros([TILES], tl.int32)
        counted = own_first * 0
        reached_x = tl.zeros([1], tl.int32)
        reached_y = tl.zeros([1], tl.int32)
        for first in range(0, sequences + 2, CHUNK):
            segment = first + tl.arange(0, CHUNK)
            starts, ends, _, _, _, reached_x, reached_y = _both(
                cu_x, padded_x, rows_x, cu_y, padded_y, rows_y, sequences, segment, reached_x, reached_y, SHARED, OWNED
            )
            blocks = (ends - starts + BX - 1) // BX
            behind = counted + tl.cumsum(blocks, 0)
            ahead = (blocks[None, :] > block[:, None]) & (behind[None, :] < last[:, None])  # tiles of this number before
            place += tl.sum(tl.maximum(blocks[None, :] - 1 - block[:, None], 0) + ahead.to(tl.int32), 1)
            counted += tl.sum(blocks, 0)
    entry = tiles + place.to(tl.int64) * 8
    tl.store(entry + 0, row, mask=kept)
    tl.store(entry + 1, tl.minimum(end - row, BX), mask=kept)
    tl.store(entry + 2, tl.minimum(tl.maximum(valid - block * BX, 0), BX), mask=kept)
    tl.store(entry + 3, other_row, mask=kept)
    tl.store(entry + 4, others, mask=kept)
    tl.store(entry + 5, position, mask=kept)
    tl.store(entry + 6, block, mask=kept)
    tl.store(entry + 7, segments, mask=kept)
    if tl.program_id(0) == 0:
        two = tl.arange(0, 2)
        totals = tl.where(two == 0, total, 0)
        tl.store(count + two, totals)
        if LOOKS:
            short = squares < MIXED * rows
            tl.store(count_short + two, tl.where(short, totals, 0))
            tl.store(count_long + two, tl.where(short, 0, totals))


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
