"""Triton kernels and launcher of `tokens_per_expert`; `kernels_seq_aux.py` counts with the same two loops.

T rows, E experts, K ids a row. Each program counts its rows into one row of `partials [shares, E]`, a second launch adds those up:
no atomics, so nothing has to be zeroed first.

Masks and bitmaps are counted in the words they are stored in: a word holds BYTES bytes, a byte of a bitmap 8 flags ("planes"), one
of a mask 1. Added up, (word >> plane) & 0x01010101 counts one plane of four bytes at once, up to 255 rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import balancing as contract
from thdops.ops.balancing.tiling import power_of_two, rows_of
from thdops.ops.launch import launch, multiprocessors

MOST_TILES = 255
"""That one program may count: what a byte can hold."""

_TILES = {0: 2048, 1: 4096, 8: 2048}  # by planes (0: ids): a mask's is 16 KiB, so that few programs fill the memory's pipeline
_WIDEST = 128  # columns of a tile of flags
_BINS = 256  # of a histogram: a lane of a warp holds 8
_PROGRAMS = 4  # per multiprocessor
_PARTIALS = 512  # rows of partials that are added at a time
_COLUMNS = 8  # of partials in a program: 32 bytes


@triton.jit
def count_flags(
    out, routing, padding_mask, start, end, step, block, width, experts, row_stride, column_stride, mask_stride,
    PLANES: tl.constexpr, BYTES: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[e] = how many of the rows of tiles start, start + step, ... (below end) chose expert e, for one block of columns.

    A column is one plane of one word; `width` and `row_stride` in units of VECTOR words. Example: a bitmap of E = 40 experts has 5
    bytes a row, with BYTES = 1 that is 40 columns, expert 13 being plane 5 of word 1. A mask of them has 10 words of BYTES = 4,
    which is 10 columns, expert 13 being byte 1 of word 3.
    """
    column = block.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    word, plane = column // PLANES, (column % PLANES).to(tl.int32)
    exists = word < width * VECTOR  # [BLOCK_C]
    source = routing.to(tl.pointer_type(tl.int32 if BYTES == 4 else tl.int8))
    columns_at = source + (word if UNIT else word * column_stride)
    row_step = row_stride.to(tl.int64) * VECTOR
    count = tl.zeros([BLOCK_T, BLOCK_C], tl.int32)
    for first in range(start, end, step):
        row = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        wanted = row < end
        if padding_mask is not None:
            wanted = wanted & (tl.load(padding_mask + row * mask_stride, mask=wanted, other=1) == 0)
        at = columns_at[None, :] + (row * row_step)[:, None]
        flags = tl.load(at, mask=wanted[:, None] & exists[None, :], other=0).to(tl.int32)
        count += (flags >> plane[None, :]) & (0x01010101 if BYTES == 4 else 1)
    for byte in tl.static_range(BYTES):
        expert = (word * BYTES + byte) * PLANES + plane
        tl.store(out + expert, tl.sum((count >> 8 * byte) & 255, axis=0), mask=exists & (expert < experts))


@triton.jit
def count_ids(
    out, routing, padding_mask, start, end, step, block, width, experts, row_stride, column_stride, mask_stride,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[e] = how often the rows of tiles start, start + step, ... (below end) hold id e, for one block of experts."""
    lowest = block.to(tl.int64) * BLOCK_E
    bins = tl.minimum(experts - lowest, BLOCK_E)
    column = tl.arange(0, BLOCK_K).to(tl.int64)
    columns_at = routing + (column if UNIT else column * column_stride)
    row_step = row_stride.to(tl.int64) * VECTOR
    total = tl.zeros([BLOCK_E], tl.int32)
    for first in range(start, end, step):
        row = first + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        wanted = row < end
        if padding_mask is not None:
            wanted = wanted & (tl.load(padding_mask + row * mask_stride, mask=wanted, other=1) == 0)
        inside = wanted[:, None] & (column < width * VECTOR)[None, :]
        ids = tl.load(columns_at[None, :] + (row * row_step)[:, None], mask=inside, other=-1).to(tl.int64) - lowest
        counted = tl.reshape(inside & (ids >= 0) & (ids < bins), [BLOCK_T * BLOCK_K])
        ids = tl.where(counted, tl.reshape(ids, [BLOCK_T * BLOCK_K]), 0).to(tl.int32)
        total += tl.histogram(ids, BLOCK_E, mask=counted)
    number = tl.arange(0, BLOCK_E)
    tl.store(out + lowest + number, total, mask=number < bins)


@triton.jit
def count_choices(
    out, routing, padding_mask, start, end, stride, block, width, experts, row_stride, column_stride, mask_stride,
    PLANES: tl.constexpr, BYTES: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`count_flags`, or `count_ids` where PLANES is 0."""
    if PLANES == 0:
        count_ids(
            out, routing, padding_mask, start, end, stride, block, width, experts, row_stride, column_stride, mask_stride,
            VECTOR, UNIT, BLOCK_T, BLOCK_C, BLOCK_E,
        )  # fmt: skip
    else:
        count_flags(
            out, routing, padding_mask, start, end, stride, block, width, experts, row_stride, column_stride, mask_stride,
            PLANES, BYTES, VECTOR, UNIT, BLOCK_T, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "blocks", "width", "experts", "row_stride", "column_stride", "mask_stride"])
def count_rows(
    partials, routing, padding_mask, rows, blocks, width, experts, row_stride, column_stride, mask_stride,
    PLANES: tl.constexpr, BYTES: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """partials[share] = the choices counted over every `shares`-th tile of rows; a program has one block of experts of it."""
    share = (tl.program_id(0) // blocks).to(tl.int64)
    shares = (tl.num_programs(0) // blocks).to(tl.int64)
    count_choices(
        partials + share * experts, routing, padding_mask, share * BLOCK_T, rows.to(tl.int64), shares * BLOCK_T,
        tl.program_id(0) % blocks, width, experts, row_stride, column_stride, mask_stride,
        PLANES, BYTES, VECTOR, UNIT, BLOCK_T, BLOCK_C, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["shares", "experts"])
def add_partials(out, partials, shares, experts, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """out[e] = sum over shares of partials[share, e], for one block of experts."""
    expert = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int64)
    for start in range(0, shares, BLOCK_S):
        share = start + tl.arange(0, BLOCK_S)
        inside = (share < shares)[:, None] & (expert < experts)[None, :]
        at = partials + share.to(tl.int64)[:, None] * experts + expert[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0).to(tl.int64), axis=0)
    tl.store(out + expert, total, mask=expert < experts)


# --- launcher ---------------------------------------------------------------------------------------------------------------------


class Choices(NamedTuple):
    """How `count_choices` walks a routing tensor: in `blocks` blocks of experts, tiles of `block_t` rows; sizes, then constants."""

    blocks: int
    block_t: int
    sizes: tuple[int, int, int]  # width, row stride, column stride
    constants: tuple[Any, ...]


def choices_of(routing: Tensor, experts: int) -> Choices:
    planes = {"indices": 0, "mask": 1, "bitmap": 8}[contract.routing_format(routing)]
    width, row_stride, column_stride, vector, unit = rows_of(routing)
    word = 4 if planes and vector % 4 == 0 else 1
    vector //= word
    blocks, tile = _tile(width * vector, experts, planes)
    return Choices(blocks, tile[0], (width, row_stride, column_stride), (planes, word, vector, unit, *tile))


@lru_cache(maxsize=1024)
def _tile(columns: int, experts: int, planes: int) -> tuple[int, tuple[int, int, int]]:
    """(blocks, (BLOCK_T, BLOCK_C, BLOCK_E)); `columns` are words, or ids."""
    if planes == 0:
        block_c, block_e = power_of_two(columns), min(max(power_of_two(experts), 2), _BINS)
        return triton.cdiv(experts, block_e), (max(_TILES[0] // block_c, 1), block_c, block_e)
    block_c = min(power_of_two(columns * planes), _WIDEST)
    return triton.cdiv(columns * planes, block_c), (_TILES[planes] // block_c, block_c, 1)


def tokens_per_expert(routing: Tensor, padding_mask: Tensor | None = None, num_experts: int | None = None) -> Tensor:
    out = contract.fake_tokens_per_expert(routing, padding_mask, num_experts)
    rows, experts = routing.shape[0], out.shape[0]
    blocks, block_t, sizes, constants = choices_of(routing, experts)
    tiles = triton.cdiv(rows, block_t)
    programs = multiprocessors(routing.get_device()) * _PROGRAMS
    tiles_each = min(max(triton.cdiv(tiles * blocks, programs), 1), MOST_TILES)
    shares = triton.cdiv(tiles, tiles_each)
    partials = torch.empty((shares, experts), dtype=torch.int32, device=routing.device)
    mask_stride = 0 if padding_mask is None else padding_mask.stride(0)
    args = (partials, routing, padding_mask, rows, blocks, sizes[0], experts, *sizes[1:], mask_stride)
    launch(count_rows, (shares * blocks, 1, 1), args, constants)
    launch(add_partials, (triton.cdiv(experts, _COLUMNS), 1, 1), (out, partials, shares, experts), (_PARTIALS, _COLUMNS))
    return out
