"""Sample calls, refusals, cost and benches of the context-parallel row ops.

T rows, B sequences, W ranks. A layout here is in units of 2W rows, so that one list of lengths serves every W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thdops.ops.context import reference
from thdops.ops.layouts import prefix_sums
from thdops.registry import Bench, Cost, Refusal, Sample

_INT32, _INT64 = torch.int32, torch.int64


class _Batch(NamedTuple):
    """Valid rows of each sequence, offsets of all, and T."""

    cu_seqlens: Tensor
    padded: Tensor
    total: int


# name -> (padded lengths, rows before the first sequence, rows behind the last), in units of 2W rows
_LAYOUTS: dict[str, tuple[list[int], int, int]] = {
    "back to back": ([2, 1, 3], 0, 0),
    "rows of no sequence on both sides": ([2, 1, 0, 3], 1, 2),
    "empty sequences": ([0, 2, 0, 0, 1, 0], 0, 1),
    "one sequence": ([7], 0, 0),
    "nothing but a tail": ([0, 0], 0, 3),
    "no sequence": ([], 1, 2),
}


def _batch(name: str, unit: int, device: torch.device, dtype: torch.dtype = _INT32) -> _Batch:
    """The last sequence is full, the others miss up to a whole unit and more: their last chunks hold no valid row."""
    lengths, before, behind = _LAYOUTS[name]
    owned = [unit * length for length in lengths]
    valid = [max(rows - (0 if b == len(owned) - 1 else 1 + b * (unit // 2)), 0) for b, rows in enumerate(owned)]
    total = sum(owned) + unit * (before + behind)
    return _Batch(prefix_sums(valid, device, dtype), prefix_sums(owned, device, dtype, unit * before), total)


def _others(base: _Batch, unit: int) -> tuple[Tensor, ...]:
    """Other offsets for the same buffers: one long sequence, none at all, a short one at the very end."""
    sequences, device, dtype = base.padded.shape[0] - 1, base.padded.device, base.padded.dtype
    if sequences == 0:
        return ()
    empty = [0] * (sequences - 1)
    return (
        prefix_sums([base.total, *empty], device, dtype),
        prefix_sums([0, *empty], device, dtype),
        prefix_sums([*empty, unit], device, dtype, base.total - unit),
    )


def _size_of(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _offset_refusals(op: str, device: torch.device, call: Callable[[Tensor], tuple[Any, ...]]) -> Iterator[Refusal]:
    padded = prefix_sums([8, 4], device, first=4)
    name = f"{op}: cu_seqlens_padded must be"
    text = f"{name} int32 or int64, got float32; cast it, for example with .to(torch.int32)"
    yield Refusal("float offsets", call(padded.float()), TypeError, text)
    text = f"{name} 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets"
    yield Refusal("no offset", call(padded[:0]), ValueError, text)
    text = f"{name} contiguous, got stride 2; call .contiguous()"
    yield Refusal("every other offset", call(padded.repeat(2)[::2]), ValueError, text)


def _group_refusals(op: str, call: Callable[[int, int, str], tuple[Any, ...]], ranked: bool = True) -> Iterator[Refusal]:
    """`call(cp_size, cp_rank, partition)` gives the arguments; `ranked`: cp_rank is one of them."""
    text = f"{op}: cp_size must be at least 1, got 0; pass a larger one"
    yield Refusal("no rank", call(0, 0, "zigzag"), ValueError, text)
    if ranked:
        text = f"{op}: cp_rank must be from 0 to cp_size - 1 (1), got {{}}; pass this rank's number in its group"
        yield Refusal("a rank past the group", call(2, 2, "zigzag"), ValueError, text.format(2))
        yield Refusal("a rank below 0", call(2, -1, "zigzag"), ValueError, text.format(-1))
    text = f"{op}: partition must be one of zigzag, contiguous, got 'striped'; choose one"
    yield Refusal("another partition", call(2, 0, "striped"), ValueError, text)


# --- partition_indices ---------------------------------------------------------------------------------------------------------


def partition_indices_samples(device: torch.device) -> Iterator[Sample]:
    for name, world, rank, partition, dtype in (
        ("rows of no sequence on both sides", 2, 1, "zigzag", _INT32),
        ("back to back", 2, 0, "zigzag", _INT64),
        ("empty sequences", 4, 2, "zigzag", _INT64),
        ("empty sequences", 3, 2, "contiguous", _INT32),
        ("one sequence", 1, 0, "zigzag", _INT32),
        ("nothing but a tail", 2, 1, "zigzag", _INT32),
        ("no sequence", 2, 1, "contiguous", _INT32),
    ):
        base = _batch(name, 2 * world, device, dtype)
        args = (base.padded, base.total, world, rank, partition)
        replays = tuple({"cu_seqlens_padded": other} for other in _others(base, 2 * world))
        first = name == "rows of no sequence on both sides"
        yield Sample(f"{name}, rank {rank} of {world}, {partition}, {dtype}", args, replays, compile=first)
    yield Sample("no row", (prefix_sums([0], device), 0, 2, 1, "zigzag"))


def partition_indices_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "partition_indices"
    padded = prefix_sums([8, 4], device, first=4)
    yield from _offset_refusals(op, device, lambda offsets: (offsets, 16, 2, 0, "zigzag"))
    yield from _group_refusals(op, lambda world, rank, partition: (padded, 16, world, rank, partition))
    text = f"{op}: total_tokens must be at least 0, got -4; pass a larger one"
    yield Refusal("total_tokens below 0", (padded, -4, 2, 0, "zigzag"), ValueError, text)
    fix = "pad the batch, and every sequence, to such multiples"
    text = f"{op}: total_tokens must be a multiple of 2 * cp_size (4), got 10; {fix}"
    yield Refusal("rows that chunks do not divide", (prefix_sums([5, 5], device), 10, 2, 0, "zigzag"), ValueError, text)
    text = f"{op}: total_tokens must be below 2**31, got 2147483648; split the batch"
    yield Refusal("more rows than int32 can number", (padded, 2**31, 2, 0, "zigzag"), ValueError, text)


def partition_indices_cost(
    cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int, partition: str = "zigzag"
) -> Cost:
    return Cost(read=_size_of(cu_seqlens_padded), written=4 * (total_tokens // cp_size))


def partition_indices_benches(device: torch.device) -> Iterator[Bench]:
    for partition in ("zigzag", "contiguous"):

        def make(partition: str = partition) -> tuple[Any, ...]:
            return _bench_offsets(_BENCH_T, device), _BENCH_T, _BENCH_W, 1, partition

        yield Bench(f"T = {_BENCH_T}, B = 512, W = {_BENCH_W}, {partition}", make, reference.partition_indices)


_BENCH_T, _BENCH_W = 65536, 4


def _bench_offsets(total: int, device: torch.device, sequences: int = 512) -> Tensor:
    return torch.arange(sequences + 1, device=device, dtype=_INT32) * (total // sequences)


# --- local_cu_seqlens ----------------------------------------------------------------------------------------------------------


def local_cu_seqlens_samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, world: int, rank: int, half: str | None, partition: str, dtype: torch.dtype = _INT32) -> Sample:
        base = _batch(name, 2 * world, device, dtype)
        args = (base.cu_seqlens, base.padded, world, rank, half, partition)
        replays = tuple({"cu_seqlens": other - other[0], "cu_seqlens_padded": other} for other in _others(base, 2 * world))
        compiled = half is None and name == "rows of no sequence on both sides"
        label = f"{name}, rank {rank} of {world}, {half or 'both'}, {partition}, {dtype}"
        return Sample(label, args, replays, compile=compiled)

    yield sample("rows of no sequence on both sides", 2, 1, None, "zigzag")
    yield sample("rows of no sequence on both sides", 2, 1, "second", "zigzag", _INT64)
    yield sample("back to back", 2, 0, "first", "zigzag")
    yield sample("empty sequences", 4, 3, None, "contiguous", _INT64)
    yield sample("empty sequences", 4, 0, "second", "contiguous")
    yield sample("one sequence", 1, 0, "second", "zigzag")
    yield sample("nothing but a tail", 2, 1, None, "zigzag")
    yield sample("no sequence", 2, 0, "first", "zigzag")
    late = prefix_sums([8, 4], device, first=4)
    yield Sample("no padded offsets, first above 0", (late, None, 2, 1, None, "zigzag"), ({"cu_seqlens": late + 4},))


def local_cu_seqlens_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "local_cu_seqlens"
    cu, padded = prefix_sums([7, 2], device), prefix_sums([8, 4], device, first=4)
    yield from _offset_refusals(op, device, lambda offsets: (cu, offsets, 2, 0, None, "zigzag"))
    yield from _group_refusals(op, lambda world, rank, partition: (cu, padded, world, rank, None, partition))
    text = f"{op}: cu_seqlens_padded must have as many entries as cu_seqlens (3), got 2; pass B+1 offsets in both"
    yield Refusal("an offset less", (cu, padded[:2], 2, 0, None, "zigzag"), ValueError, text)
    text = f"{op}: half must be one of first, second, got 'both'; choose one"
    yield Refusal("another half", (cu, padded, 2, 0, "both", "zigzag"), ValueError, text)


def local_cu_seqlens_cost(
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    cp_size: int,
    cp_rank: int,
    half: str | None = None,
    partition: str = "zigzag",
) -> Cost:
    return Cost(read=_size_of(cu_seqlens, cu_seqlens_padded), written=2 * _size_of(cu_seqlens))


def local_cu_seqlens_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        padded = _bench_offsets(_BENCH_T, device)
        return padded - padded // 20, padded, _BENCH_W, 1, None, "zigzag"

    yield Bench(f"B = 512, W = {_BENCH_W}", make, reference.local_cu_seqlens)


# --- to_rank_order, from_rank_order --------------------------------------------------------------------------------------------


def _values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers without a zero among them, exact in every dtype."""
    counted = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device) % 7 + 1
    return counted.reshape(tuple(shape)).to(dtype)


def _order_samples(device: torch.device) -> Iterator[Sample]:
    new = partial(_values, device=device)
    fp32, bf16 = torch.float32, torch.bfloat16

    def sample(
        name: str, x: Callable[[int], Tensor], kind: str, world: int, partition: str = "zigzag", *, dtype: torch.dtype = _INT32
    ) -> Sample:
        base = _batch(kind, 2 * world, device, dtype)
        replays = tuple({"cu_seqlens_padded": other} for other in _others(base, 2 * world))
        args = (x(base.total), base.padded, world, partition)
        return Sample(f"{name}, {kind}, W = {world}, {partition}", args, replays, compile=name in _COMPILED)

    both = "rows of no sequence on both sides"
    yield sample(_COMPILED[0], lambda t: new([t, 16], fp32), both, 2)
    yield sample("fp32 [T, D], other sizes", lambda t: new([t, 24], fp32), "back to back", 3)
    yield sample(_COMPILED[1], lambda t: new([t, 3, 2, 8], bf16)[:, 1], both, 2, "contiguous", dtype=_INT64)
    yield sample(
        "fp16, columns of a wider tensor", lambda t: new([t, 12], torch.float16)[:, 3:10], "empty sequences", 4, dtype=_INT64
    )
    yield sample("fp32 transposed", lambda t: new([5, t], fp32).t(), "empty sequences", 2, "contiguous")
    yield sample("bf16, every other row", lambda t: new([2 * t, 3], bf16)[::2], "one sequence", 2)
    yield sample("fp32 expanded", lambda t: new([4], fp32).expand(t, 4), "nothing but a tail", 2)
    yield sample("fp8 e4m3fn, width 5", lambda t: new([t, 5], torch.float8_e4m3fn), both, 1)
    yield sample("int64 [T]", lambda t: new([t], _INT64), "no sequence", 2)
    yield sample("bool", lambda t: new([t, 7], torch.bool), both, 2)
    yield sample("zero width", lambda t: new([t, 0], fp32), both, 2)
    yield Sample("no row", (new([0, 4], fp32), prefix_sums([0], device), 2, "zigzag"))


_COMPILED = ("fp32 [T, D]", "bf16 slice of a fused [T, 3, H, D]")


def _row_refusals(op: str, device: torch.device, call: Callable[[Tensor, Tensor], tuple[Any, ...]]) -> Iterator[Refusal]:
    x, padded = _values([16, 4], torch.float32, device), prefix_sums([8, 4], device, first=4)
    yield from _offset_refusals(op, device, lambda offsets: call(x, offsets))
    text = f"{op}: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0"
    yield Refusal("a scalar", call(x[0, 0], padded), ValueError, text)
    if device.type == "cuda":
        text = f"{op}: cu_seqlens_padded must be on the device of x ({x.device}), got cpu; move it"
        yield Refusal("offsets on another device", call(x, padded.cpu()), ValueError, text)


def _order_refusals(op: str, device: torch.device) -> Iterator[Refusal]:
    x, padded = _values([16, 4], torch.float32, device), prefix_sums([8, 4], device, first=4)
    yield from _row_refusals(op, device, lambda x, offsets: (x, offsets, 2, "zigzag"))
    yield from _group_refusals(op, lambda world, _, partition: (x, padded, world, partition), ranked=False)
    fix = "pad the batch, and every sequence, to such multiples"
    text = f"{op}: x must have a multiple of 2 * cp_size (4) rows, got 10; {fix}"
    yield Refusal("rows that chunks do not divide", (x[:10], padded, 2, "zigzag"), ValueError, text)


def _order_cost(x: Tensor, cu_seqlens_padded: Tensor, cp_size: int, partition: str = "zigzag") -> Cost:
    return Cost(read=_size_of(x, cu_seqlens_padded), written=_size_of(x))


def _order_benches(device: torch.device, baseline: Callable[..., Any]) -> Iterator[Bench]:
    for total in (65536, 8192):

        def make(total: int = total) -> tuple[Any, ...]:
            x = torch.randn(total, 2, 8, 128, device=device, dtype=torch.bfloat16)
            return x, _bench_offsets(total, device), _BENCH_W, "zigzag"

        yield Bench(f"K and V [{total}, 2, 8, 128] bf16, B = 512, W = {_BENCH_W}", make, baseline)


def to_rank_order_samples(device: torch.device) -> Iterator[Sample]:
    yield from _order_samples(device)


def to_rank_order_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _order_refusals("to_rank_order", device)


def to_rank_order_benches(device: torch.device) -> Iterator[Bench]:
    yield from _order_benches(device, reference.to_rank_order)


def from_rank_order_samples(device: torch.device) -> Iterator[Sample]:
    yield from _order_samples(device)


def from_rank_order_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _order_refusals("from_rank_order", device)


def from_rank_order_benches(device: torch.device) -> Iterator[Bench]:
    yield from _order_benches(device, reference.from_rank_order)


to_rank_order_cost = from_rank_order_cost = _order_cost


# --- half, from_half -----------------------------------------------------------------------------------------------------------


def _half_samples(device: torch.device, share: int) -> Iterator[Sample]:
    """x has 1 / share of the rank's rows."""
    new = partial(_values, device=device)
    fp32, bf16 = torch.float32, torch.bfloat16

    def sample(
        name: str, x: Callable[[int], Tensor], kind: str, which: str, dim: int = 0, *, unit: int = 2, dtype: torch.dtype = _INT32
    ) -> Sample:
        base = _batch(kind, unit, device, dtype)
        replays = tuple({"cu_seqlens_padded": other} for other in _others(base, unit))
        args = (x(base.total // share), base.padded, which, dim)
        return Sample(f"{name}, {kind}, {which}", args, replays, compile=name in _COMPILED_HALVES)

    both = "rows of no sequence on both sides"
    yield sample(_COMPILED_HALVES[0], lambda t: new([t, 4, 8], fp32), both, "second")
    yield sample("fp32 [T, H, D], other sizes", lambda t: new([t, 3, 16], fp32), "back to back", "second", unit=6)
    yield sample(_COMPILED_HALVES[1], lambda t: new([3, t], fp32), both, "second", -1, dtype=_INT64)
    yield sample("LSE, from [T, H]", lambda t: new([t, 3], fp32).t(), "empty sequences", "first", 1)
    yield sample("fp16 [2, T, D], odd halves", lambda t: new([2, t, 5], torch.float16), "empty sequences", "second", 1)
    yield sample("bf16 slice of a fused [T, H, 3, D]", lambda t: new([t, 2, 3, 8], bf16)[:, :, 2], both, "first", dtype=_INT64)
    yield sample("fp32 expanded", lambda t: new([4], fp32).expand(t, 4), "one sequence", "first", -2, dtype=_INT64)
    yield sample("fp8 e5m2, width 5", lambda t: new([t, 5], torch.float8_e5m2), "nothing but a tail", "second")
    yield sample("int32 [T]", lambda t: new([t], _INT32), "no sequence", "second", unit=4)
    yield sample("bool", lambda t: new([t, 3], torch.bool), both, "second")
    yield sample("zero width", lambda t: new([t, 0], fp32), both, "first")
    yield Sample("no row", (new([0, 4], fp32), prefix_sums([0], device), "first", 0))


_COMPILED_HALVES = ("fp32 [T, H, D]", "LSE")


def _half_refusals(op: str, device: torch.device) -> Iterator[Refusal]:
    x, padded = _values([16, 4], torch.float32, device), prefix_sums([8, 4], device, first=4)
    yield from _row_refusals(op, device, lambda x, offsets: (x, offsets, "first", 0))
    text = f"{op}: which must be one of first, second, got 'both'; choose one"
    yield Refusal("another half", (x, padded, "both", 0), ValueError, text)
    text = f"{op}: dim must name a dimension of x [16, 4], got 2; pass 0, or -1 for [H, T]"
    yield Refusal("a dimension past the last", (x, padded, "first", 2), ValueError, text)


def _half_cost(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Cost:
    return Cost(read=_size_of(x) / 2 + _size_of(cu_seqlens_padded), written=_size_of(x) / 2)


def _half_benches(device: torch.device, share: int, baseline: Callable[..., Any]) -> Iterator[Bench]:
    total = 16384

    def rows() -> tuple[Any, ...]:
        x = torch.randn(total // share, 32, 128, device=device, dtype=torch.bfloat16)
        return x, _bench_offsets(total, device), "second", 0

    def lse() -> tuple[Any, ...]:
        return torch.randn(32, total // share, device=device), _bench_offsets(total, device), "second", -1

    yield Bench(f"n = {total}, [.., 32, 128] bf16, B = 512", rows, baseline)
    yield Bench(f"n = {total}, LSE [32, ..], B = 512", lse, baseline)


def half_samples(device: torch.device) -> Iterator[Sample]:
    yield from _half_samples(device, 1)


def half_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _half_refusals("half", device)
    x, padded = _values([15, 4], torch.float32, device), prefix_sums([8, 4], device)
    text = "half: x must have an even number of rows, got 15; pass all rows of the rank"
    yield Refusal("an odd number of rows", (x, padded, "first", 0), ValueError, text)


def half_benches(device: torch.device) -> Iterator[Bench]:
    yield from _half_benches(device, 1, reference.half)


def from_half_samples(device: torch.device) -> Iterator[Sample]:
    yield from _half_samples(device, 2)


def from_half_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _half_refusals("from_half", device)
    if hasattr(torch, "float8_e8m0fnu"):
        x, padded = torch.ones(8, 4, device=device).to(torch.float8_e8m0fnu), prefix_sums([8, 4], device, first=4)
        text = "from_half: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only"
        yield Refusal("a dtype without a zero", (x, padded, "first", 0), TypeError, text)


def from_half_benches(device: torch.device) -> Iterator[Bench]:
    yield from _half_benches(device, 2, reference.from_half)


half_cost = _half_cost


def from_half_cost(x: Tensor, cu_seqlens_padded: Tensor, which: str, dim: int = 0) -> Cost:
    return Cost(read=_size_of(x, cu_seqlens_padded), written=2 * _size_of(x))
