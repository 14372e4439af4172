"""Triton kernels and launchers of `zero_fill` and `zero_fill_`.

T rows, B sequences, C = cu_seqlens, P = cu_seqlens_padded (C where that is None). A row is bytes: both ops work on every dtype,
and a NaN that is copied keeps its payload. Padding row number k is row k + sum over b of (C[b+1] - C[b]) [P[b] - C[b] + C[0] <= k].

Measured on an H200 (dQ [T, 32, 128], dK, dV [T, 8, 128] bf16, times inside a graph):
- An empty kernel costs 1.25 us there, so a grid that outnumbers the multiprocessors 16 times costs 1.3 us more than one of 4.
- A chain of dependent loads costs about 0.5 us a link: comparing every row with up to 1024 sequences at once beats any search.
- Narrow programs (2 warps, 4 KiB of stores in flight) write 4.26 TB/s, wide ones (4 warps, 32 KiB) 3.9.
- Neighbouring programs must have neighbouring addresses: column blocks before rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import padding as contract
from thdops.ops.launch import launch_as, multiprocessors
from thdops.ops.padding.kernels import count_at_most, locate_rows

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_MAX_BLOCK_B = 1024  # sequences that one program compares with its rows at once; past that it searches


# --- a row as memory ------------------------------------------------------------------------------


class _Dims(NamedTuple):
    """One row as memory: `outer` x `middle` runs of `inner` bytes, each run contiguous. Strides in bytes."""

    outer: int
    outer_stride: int
    middle: int
    middle_stride: int
    inner: int


@lru_cache(maxsize=4096)
def _row_runs(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> list[tuple[int, _Dims]]:
    """The memory of a row whose trailing dimensions are `shape`, as (byte offset, dims); more than one entry only past two strides.

    Dimensions that are contiguous in memory are merged, so [H, D] of a fused QKV buffer is one run and [H, 3, D] slices are H.
    Of dimensions of one stride (the windows of `unfold` overlap) the last is the fastest, as in the order of elements.
    """
    merged: list[tuple[int, int]] = []  # (count, stride in bytes), fastest first
    inner = itemsize
    for count, step in sorted(zip(reversed(shape), reversed(stride), strict=True), key=lambda pair: abs(pair[1])):
        if count == 1:
            continue
        step *= itemsize
        if not merged and step == inner:
            inner *= count
        elif merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * count, merged[-1][1])
        else:
            merged.append((count, step))
    offsets = [0]
    while len(merged) > 2:
        count, step = merged.pop()
        offsets = [offset + i * step for offset in offsets for i in range(count)]
    merged += [(1, 0)] * (2 - len(merged))
    (middle, middle_stride), (outer, outer_stride) = merged
    return [(offset, _Dims(outer, outer_stride, middle, middle_stride, inner)) for offset in offsets]


def _alignment(address_bits: int, row_stride: int, dims: _Dims) -> int:
    """The widest access in bytes (1 to 16) that suits every run."""
    return gcd(16, address_bits, row_stride, dims.outer_stride, dims.middle_stride, dims.inner)


def _access(aligned: int) -> tuple[Any, int]:
    """(element type, elements per unit) of an access of `aligned` bytes.

    Kernels are given strides and widths in units and multiply them by the constant UNIT: that is how the compiler learns that
    two int64 are one aligned 16-byte access. (A hint on a kernel's argument does not reach it.)
    """
    return _INTEGERS[min(aligned, 8)], max(aligned // 8, 1)


def _in_units(row_stride: int, dims: _Dims, unit: int) -> tuple[int, ...]:
    """(row stride, width of a row; middle, middle stride, outer stride, inner: not needed for one run), bytes in units."""
    width = dims.outer * dims.middle * dims.inner
    return row_stride // unit, width // unit, dims.middle, dims.middle_stride // unit, dims.outer_stride // unit, dims.inner // unit


@triton.jit
def _column_offsets(columns, middle, middle_stride, outer_stride, inner):
    """Element offsets of [BLOCK_W] columns within a row that is not one run."""
    run = columns // inner
    return (run // middle) * outer_stride + (run % middle) * middle_stride + columns % inner


# --- in place -------------------------------------------------------------------------------------


@triton.jit
def _gap_starts(cu_seqlens, padded, sequences, first, BLOCK_B: tl.constexpr):
    """(valid rows, padding rows before the gap) of each sequence, [BLOCK_B] in the dtype of the metadata; no rows past the last."""
    b = tl.arange(0, BLOCK_B)
    inside = b < sequences
    start = tl.load(cu_seqlens + b, mask=inside, other=0)
    length = tl.load(cu_seqlens + b + 1, mask=inside, other=0) - start
    place = start if padded is None else tl.load(padded + b, mask=inside, other=0)
    return length, place - start + first


@triton.jit
def _zero_padding_rows(
    job, cu_seqlens, padded, sequences, share,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Zero this program's share of the padding rows of one tensor: every `shares`-th group of ROWS of them."""
    address, total, shares, row_stride, width = job[0], job[1], job[2], job[3] * UNIT, job[4] * UNIT
    kind: tl.constexpr = cu_seqlens.dtype.element_ty
    base = address.to(tl.int64).to(tl.pointer_type(DTYPE))
    if UNIT == 2:
        base = tl.multiple_of(base, 16)
    first = tl.load(cu_seqlens)
    valid_total = (tl.load(cu_seqlens + sequences) - first).to(tl.int64)
    # One round of independent loads serves every lookup of this program.
    length, gap = _gap_starts(cu_seqlens, padded, sequences, first, BLOCK_B) if BLOCK_B else (first, first)
    padding_total = tl.minimum(tl.maximum(total - valid_total, 0), total)
    start = share.to(tl.int64) * ROWS
    while start < padding_total:
        number = start + tl.arange(0, ROWS)
        if BLOCK_B:
            in_front = tl.sum(tl.where(gap[None, :] <= number.to(kind)[:, None], length[None, :], 0), axis=1)  # valid rows, [ROWS]
        else:
            sequence = count_at_most(cu_seqlens if padded is None else padded, cu_seqlens, first, sequences, number, ROWS, 32)
            in_front = tl.load(cu_seqlens + sequence) - first
        row = number + in_front.to(tl.int64)
        keep = (number < padding_total) & (row >= 0) & (row < total)
        for column in range(0, width, BLOCK_W):
            columns = column + tl.arange(0, BLOCK_W).to(tl.int64)
            places = columns if FLAT else _column_offsets(columns, job[5], job[6] * UNIT, job[7] * UNIT, job[8] * UNIT)
            target = base + row[:, None] * row_stride + places[None, :]  # [ROWS, BLOCK_W]
            tl.store(target, tl.zeros([ROWS, BLOCK_W], DTYPE), mask=keep[:, None] & (columns < width)[None, :])
        start += shares * ROWS


@triton.jit(do_not_specialize=["jobs", "cu_seqlens", "padded", "sequences"])
def zero_fill_inplace_kernel(
    jobs, cu_seqlens, padded, sequences,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One tensor is one job: (address, rows, programs, row stride, width, and the runs of a row unless FLAT).

    The programs are shared out among the jobs by bytes, so that wide and narrow tensors end together.
    """
    share = tl.program_id(0)
    shared: tl.constexpr = len(cu_seqlens) == 1
    for j in tl.static_range(len(jobs)):
        if (share >= 0) & (share < jobs[j][2]):
            m: tl.constexpr = 0 if shared else j
            _zero_padding_rows(
                jobs[j], cu_seqlens[m], None if padded is None else padded[m], sequences[m], share,
                DTYPE, UNIT, FLAT, ROWS, BLOCK_W, BLOCK_B,
            )  # fmt: skip
        share -= jobs[j][2]


_TILE = 512  # elements of at most 8 bytes that a program stores at a time
_BLOCK_W = 256
_WARPS = 2
_PROGRAMS_PER_SM = 6
_MAX_JOBS = 8  # tensors in one launch; each number of them is a kernel of its own


@dataclass(eq=False)  # hashed by identity: it is the key of its compiled kernel, and hashing shapes again would cost 2 us
class _Step:
    """One launch of `zero_fill_inplace_kernel` but for the tensors."""

    places: list[tuple[int, int]]  # (tensor, byte offset) of each job
    sizes: list[tuple[int, ...]]  # a job behind its address
    metadata: list[int]  # which cu_seqlens: one for all, or one per job
    sequences: tuple[int, ...]
    grid: tuple[int, int, int]
    constexprs: tuple[Any, ...]


def _zero_fill_plan(tensors: list[Tensor], sequences: list[int]) -> list[_Step]:
    """The launches that zero `tensors`; for tensors of the same shapes, strides and alignment the same ones."""
    runs = [
        (i, offset, dims)
        for i, x in enumerate(tensors)
        if x.numel()
        for offset, dims in _row_runs(x.shape[1:], x.stride()[1:], x.itemsize)
    ]
    parts = [runs[begin : begin + _MAX_JOBS] for begin in range(0, len(runs), _MAX_JOBS)]
    return [_zero_fill_step(tensors, sequences, part) for part in parts]


def _zero_fill_step(tensors: list[Tensor], sequences: list[int], runs: list[tuple[int, int, _Dims]]) -> _Step:
    rows = [tensors[i].shape[0] for i, _, _ in runs]
    strides = [tensors[i].stride(0) * tensors[i].itemsize for i, _, _ in runs]
    aligned = min(
        _alignment(tensors[i].data_ptr() + offset, stride, dims) for stride, (i, offset, dims) in zip(strides, runs, strict=True)
    )
    lengths = [max(dims.outer_stride, dims.middle_stride, dims.outer * dims.middle * dims.inner) for _, _, dims in runs]
    if max(*strides, *lengths) >= 2**34:  # what fits in 32 bits must still fit when the kernel has multiplied it by UNIT
        aligned = min(aligned, 8)
    widths = [dims.outer * dims.middle * dims.inner // min(aligned, 8) for _, _, dims in runs]
    block_w = min(triton.next_power_of_2(max(widths)), _BLOCK_W)
    block_t = min(_TILE // block_w, 128)
    programs = _PROGRAMS_PER_SM * multiprocessors(tensors[0].get_device())
    weights = [n * width for n, width in zip(rows, widths, strict=True)]
    shares = [
        min(max(programs * weight // sum(weights), 1), triton.cdiv(n, block_t)) for n, weight in zip(rows, weights, strict=True)
    ]
    flat = all(dims.middle == dims.outer == 1 for _, _, dims in runs)
    sizes = [
        (n, share, *_in_units(stride, dims, aligned)[: 2 if flat else 6])
        for n, share, stride, (_, _, dims) in zip(rows, shares, strides, runs, strict=True)
    ]
    per_job = len(sequences) > 1
    block_b = triton.next_power_of_2(max(*sequences, 16))
    return _Step(
        places=[(i, offset) for i, offset, _ in runs],
        sizes=sizes,
        metadata=[i for i, _, _ in runs] if per_job else [0],
        sequences=tuple(sequences[i] for i, _, _ in runs) if per_job else tuple(sequences),
        grid=(sum(shares), 1, 1),
        constexprs=(*_access(aligned), flat, block_t, block_w, block_b if block_b <= _MAX_BLOCK_B else 0),
    )


_plans: dict[Any, Any] = {}
_PLANS_KEPT = 4096


def _planned(key: Any, make: Any) -> Any:
    """The plan under `key`, made on first use. Shapes change at most from bucket to bucket: forgetting all at once is rare."""
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def _kind(x: Tensor) -> tuple[Any, ...]:
    """All of a tensor that the contract's check and a plan depend on."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15


def zero_fill_(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
    # The counts belong to the key: two metadata are one for each of two tensors, or one for both with its padded offsets.
    counts = (len(tensors), len(cu_seqlens))
    key = (counts, *map(_kind, tensors), *map(_kind, cu_seqlens), *map(_kind, cu_seqlens_padded))

    def make() -> list[_Step]:
        contract.check_zero_fill_(tensors, cu_seqlens, cu_seqlens_padded)
        return _zero_fill_plan(tensors, [cu.shape[0] - 1 for cu in cu_seqlens])

    for step in _planned(key, make):
        jobs = tuple([(tensors[i].data_ptr() + offset, *size) for (i, offset), size in zip(step.places, step.sizes, strict=True)])
        metadata = tuple([cu_seqlens[m] for m in step.metadata])
        padded = tuple([cu_seqlens_padded[m] for m in step.metadata]) if cu_seqlens_padded else None
        args = (jobs, metadata, padded, step.sequences)
        launch_as(step, zero_fill_inplace_kernel, step.grid, args, step.constexprs, _WARPS)


# --- copy -----------------------------------------------------------------------------------------


@triton.jit
def _valid_rows(cu_seqlens, padded, sequences, rows, ROWS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Which of [ROWS] rows are valid. Up to BLOCK_B sequences are compared with every row at once: one round of loads."""
    if BLOCK_B:
        b = tl.arange(0, BLOCK_B)
        inside = b < sequences
        start = tl.load(padded + b, mask=inside, other=0).to(tl.int64)
        room = tl.load(padded + b + 1, mask=inside, other=0).to(tl.int64) - start
        length = tl.load(cu_seqlens + b + 1, mask=inside, other=0).to(tl.int64) - tl.load(cu_seqlens + b, mask=inside, other=0)
        end = start + tl.minimum(length, room)  # [BLOCK_B]; start == end outside
        hits = (start[None, :] <= rows[:, None]) & (rows[:, None] < end[None, :])  # [ROWS, BLOCK_B]
        valid = tl.max(hits.to(tl.int32), axis=1) > 0
    else:
        valid, _, _, _ = locate_rows(cu_seqlens, padded, sequences, rows, ROWS, 32)
    return valid


@triton.jit(do_not_specialize=["source", "target", "total", "sequences", "row_stride", "width", "middle", "middle_stride",
                               "outer_stride", "inner"])  # fmt: skip
def zero_fill_copy_kernel(
    source, target, cu_seqlens, padded, total, sequences, row_stride, width, middle, middle_stride, outer_stride, inner,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Copy [ROWS, BLOCK_W] of one tensor, zero where a row is padding; padding rows are not read. The target is contiguous."""
    row_stride, width = row_stride.to(tl.int64) * UNIT, width.to(tl.int64) * UNIT
    column_blocks = tl.cdiv(width, BLOCK_W)
    block = tl.program_id(0).to(tl.int64)
    rows = block // column_blocks * ROWS + tl.arange(0, ROWS)
    columns = block % column_blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    read = source.to(tl.int64).to(tl.pointer_type(DTYPE))
    write = target.to(tl.int64).to(tl.pointer_type(DTYPE))
    if UNIT == 2:
        read, write = tl.multiple_of(read, 16), tl.multiple_of(write, 16)
    places = (
        columns
        if FLAT
        else _column_offsets(
            columns, middle, middle_stride.to(tl.int64) * UNIT, outer_stride.to(tl.int64) * UNIT, inner.to(tl.int64) * UNIT
        )
    )
    valid = _valid_rows(cu_seqlens, padded, sequences, rows, ROWS, BLOCK_B) & (rows < total)
    inside = (columns < width)[None, :]
    value = tl.load(read + rows[:, None] * row_stride + places[None, :], mask=valid[:, None] & inside, other=0)
    tl.store(write + rows[:, None] * width + columns[None, :], value, mask=(rows < total)[:, None] & inside)


_COPY_TILE = 512
_COPY_BLOCK_W = 512
_COPY_WARPS = 4
_COPY_BLOCK_B = 64  # a program copies little, so it compares fewer sequences than one that zeroes before it searches


@dataclass(eq=False)
class _Copy:
    """One launch of `zero_fill_copy_kernel` but for the tensors."""

    in_order: bool  # x is read as it stands
    sizes: tuple[int, ...]
    grid: tuple[int, int, int]
    constexprs: tuple[Any, ...]


def zero_fill(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    key = (_kind(x), _kind(cu_seqlens), None if cu_seqlens_padded is None else _kind(cu_seqlens_padded))

    def make() -> _Copy:
        contract.check_zero_fill(x, cu_seqlens, cu_seqlens_padded)
        return _copy_plan(x, cu_seqlens.shape[0] - 1)

    plan = _planned(key, make)
    out = contract.fake_zero_fill(x, cu_seqlens, cu_seqlens_padded)
    if not plan.in_order:
        x = x.contiguous()
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    args = (x.data_ptr(), out.data_ptr(), cu_seqlens, padded, *plan.sizes)
    launch_as(plan, zero_fill_copy_kernel, plan.grid, args, plan.constexprs, _COPY_WARPS)
    return out


def _copy_plan(x: Tensor, sequences: int) -> _Copy:
    in_order = _in_memory_order(x)
    if x.numel() == 0:
        return _Copy(True, (), (0, 1, 1), ())
    if not in_order:
        x = x.contiguous()
    (_, dims), *_ = _row_runs(x.shape[1:], x.stride()[1:], x.itemsize)
    row_stride = x.stride(0) * x.itemsize
    aligned = _alignment(x.data_ptr(), row_stride, dims)
    width = dims.outer * dims.middle * dims.inner // min(aligned, 8)
    block_w = min(triton.next_power_of_2(width), _COPY_BLOCK_W)
    rows = min(_COPY_TILE // block_w, 128)
    block_b = triton.next_power_of_2(max(sequences, 16))
    return _Copy(
        in_order=in_order,
        sizes=(x.shape[0], sequences, *_in_units(row_stride, dims, aligned)),
        grid=(triton.cdiv(x.shape[0], rows) * triton.cdiv(width, block_w), 1, 1),
        constexprs=(*_access(aligned), dims.outer == dims.middle == 1, rows, block_w, block_b if block_b <= _COPY_BLOCK_B else 0),
    )


def _in_memory_order(x: Tensor) -> bool:
    """Whether one set of runs describes a row, and in the order of its elements, which is the target's order."""
    strides = [step for count, step in zip(x.shape[1:], x.stride()[1:], strict=True) if count > 1]
    return len(_row_runs(x.shape[1:], x.stride()[1:], x.itemsize)) == 1 and strides == sorted(strides, reverse=True)
