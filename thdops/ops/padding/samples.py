"""Sample calls, refusals, padding, cost and benches of the padding ops that make metadata and row maps, and what both files share.

T rows, B sequences. Samples are tiny: conformance runs dozens of checks on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thdops.ops.layouts import Layout, layout, others, prefix_sums
from thdops.ops.padding import reference
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_INT32, _INT64 = torch.int32, torch.int64


# --- pieces of samples ------------------------------------------------------------------------------------------------------------


def metadata_replays(base: Layout) -> tuple[dict[str, Tensor], ...]:
    def contents(one: Layout) -> dict[str, Tensor]:
        padded = {} if one.padded is None else {"cu_seqlens_padded": one.padded}
        return {"cu_seqlens": one.cu_seqlens, **padded}

    return tuple(map(contents, others(base)))


def size_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def metadata(device: torch.device) -> tuple[Tensor, Tensor]:
    """The layout "gaps and tail", T = 25."""
    return prefix_sums([3, 5, 1, 4], device), prefix_sums([4, 8, 2, 8], device)


def cu_refusals(op: str, device: torch.device, call: Callable[[Any, Any], tuple[Any, ...]]) -> Iterator[Refusal]:
    """Everything that is wrong with a pair of metadata tensors; `call(cu_seqlens, cu_seqlens_padded)` gives the arguments."""
    cu, padded = metadata(device)
    yield Refusal(
        "cu_seqlens of a float dtype",
        call(cu.float(), None),
        TypeError,
        f"{op}: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)",
    )
    yield Refusal(
        "cu_seqlens of two dimensions",
        call(cu.unsqueeze(0), None),
        ValueError,
        f"{op}: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets",
    )
    yield Refusal(
        "cu_seqlens without an entry",
        call(cu[:0], None),
        ValueError,
        f"{op}: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets",
    )
    columns = torch.stack((cu, padded), dim=1)
    yield Refusal(
        "cu_seqlens that is a column",
        call(columns[:, 0], None),
        ValueError,
        f"{op}: cu_seqlens must be contiguous, got stride 2; call .contiguous()",
    )
    yield Refusal(
        "cu_seqlens_padded that is a column",
        call(cu, columns[:, 1]),
        ValueError,
        f"{op}: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()",
    )
    yield Refusal(
        "cu_seqlens_padded of a small integer dtype",
        call(cu, padded.to(torch.int16)),
        TypeError,
        f"{op}: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)",
    )
    yield Refusal(
        "cu_seqlens_padded of another length",
        call(cu, padded[:-1]),
        ValueError,
        f"{op}: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both",
    )
    yield Refusal(
        "cu_seqlens_padded of another dtype",
        call(cu, padded.long()),
        TypeError,
        f"{op}: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them",
    )


def _row_map_samples(device: torch.device, *more: int) -> Iterator[Sample]:
    """Calls of an op that maps rows: (cu_seqlens, cu_seqlens_padded, total_tokens, *more)."""
    kinds = (
        ("full", _INT32, False),
        ("tail", _INT64, True),
        ("gaps and tail", _INT32, True),
        ("empty sequences", _INT64, False),
        ("rows before the first", _INT32, False),
        ("no valid row", _INT32, False),
        ("sentinels", _INT64, False),
        ("no sequence", _INT32, False),
    )
    for name, dtype, compiled in kinds:
        base = layout(name, device, dtype)
        yield Sample(f"{name}, {dtype}", (*base, *more), metadata_replays(base), compile=compiled)
    late = Layout(prefix_sums([4, 2], device, first=3), None, 12)
    yield Sample("first offset above 0, no padded offsets", (*late, *more), metadata_replays(late))
    none = Layout(prefix_sums([0, 0], device), None, 0)
    yield Sample("no row", (*none, *more), metadata_replays(none))


def _row_map_refusals(op: str, device: torch.device, *more: int) -> Iterator[Refusal]:
    cu, padded = metadata(device)
    yield from cu_refusals(op, device, lambda c, p: (c, p, 25, *more))
    yield Refusal(
        "total_tokens below 0",
        (cu, padded, -1, *more),
        ValueError,
        f"{op}: total_tokens must be at least 0, got -1; pass a larger one",
    )
    if device.type == "cuda":
        yield Refusal(
            "cu_seqlens_padded on another device",
            (cu, padded.cpu(), 25, *more),
            ValueError,
            f"{op}: cu_seqlens_padded must be on the device of cu_seqlens ({cu.device}), got cpu; move it",
        )


def _row_map_padding(value: float, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Padding:
    mask = reference.padding_mask(cu_seqlens, cu_seqlens_padded, total_tokens)
    return Padding(outputs=(PadRows(mask, value=value),))


# --- layouts of benches -----------------------------------------------------------------------------------------------------------


def tail_layout(total: int, share: float, device: torch.device, sequences: int = 2) -> Layout:
    """Sequences back to back, padding behind them."""
    valid = int(total * (1 - share))
    ends = [valid * b // sequences for b in range(sequences + 1)]
    return Layout(torch.tensor(ends, dtype=_INT32, device=device), None, total)


def gaps_layout(total: int, share: float, device: torch.device, sequences: int = 512) -> Layout:
    """Padding behind each of many sequences."""
    padded = [total * b // sequences for b in range(sequences + 1)]
    valid = [int(end * (1 - share)) for end in padded]
    return Layout(torch.tensor(valid, dtype=_INT32, device=device), torch.tensor(padded, dtype=_INT32, device=device), total)


def right_padded_layout(total: int, device: torch.device, batch: int = 8) -> Layout:
    """A [batch, S] batch whose rows are half full to full: a quarter is padding."""
    size = total // batch
    lengths = [size // 2 + (size // 2) * b // (batch - 1) for b in range(batch)]
    return Layout(prefix_sums(lengths, device), prefix_sums([size] * batch, device), total)


def people_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    """The padding mask as people write it: one comparison where padding is a tail, a search where there are gaps."""
    rows = torch.arange(total_tokens, device=cu_seqlens.device)
    if cu_seqlens_padded is None:
        return rows >= cu_seqlens[-1]
    # bucketize, not searchsorted: Inductor of torch 2.11 compiles the latter wrong on CUDA for int32 boundaries and int64 rows.
    sequence = torch.bucketize(rows, cu_seqlens_padded[1:], right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return rows >= cu_seqlens_padded[sequence] + cu_seqlens.diff()[sequence]


# --- padding_mask, sequence_ids ---------------------------------------------------------------------------------------------------


def _row_map_benches(device: torch.device, baseline: Callable[..., Any], *more: int) -> Iterator[Bench]:
    total = 65536
    tail, gaps = partial(tail_layout, total, 0.05, device, 512), partial(gaps_layout, total, 0.05, device)
    for name, place in (("5 % tail", tail), ("5 % gaps", gaps)):
        yield Bench(f"T = {total}, B = 512, {name}", lambda place=place: (*place(), *more), baseline)


def padding_mask_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def padding_mask_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("padding_mask", device)


def padding_mask_padding(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Padding:
    return _row_map_padding(1.0, cu_seqlens, cu_seqlens_padded, total_tokens)


def padding_mask_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=size_of(cu_seqlens, cu_seqlens_padded), written=total_tokens)


def padding_mask_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, people_mask)


def sequence_ids_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def sequence_ids_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("sequence_ids", device)


def sequence_ids_padding(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Padding:
    return _row_map_padding(-1.0, cu_seqlens, cu_seqlens_padded, total_tokens)


def sequence_ids_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=size_of(cu_seqlens, cu_seqlens_padded), written=4 * total_tokens)


def sequence_ids_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, reference.sequence_ids)


# --- positions --------------------------------------------------------------------------------------------------------------------


def positions_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device, 1, 0)
    for cp_size, cp_rank in ((2, 0), (2, 1), (4, 2)):
        # Context parallelism wants every padded offset, and T, to be a multiple of 2W.
        unit = 2 * cp_size
        padded = prefix_sums([2 * unit, unit, 0, unit], device, first=unit)
        base = Layout(prefix_sums([unit + 3, 1, 0, unit], device), padded, 6 * unit)
        contents = (([0, 0, 2 * unit, 0], [0, 0, 2 * unit, unit]), ([unit, 0, 0, 0], [6 * unit, 0, 0, 0]))
        replays = tuple(
            {"cu_seqlens": prefix_sums(valid, device), "cu_seqlens_padded": prefix_sums(owned, device)} for valid, owned in contents
        )
        args = (base.cu_seqlens, base.padded, base.total // cp_size, cp_size, cp_rank)
        yield Sample(f"rank {cp_rank} of {cp_size}", args, replays)


def positions_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("positions", device, 1, 0)
    cu, padded = metadata(device)
    yield Refusal(
        "cp_size 0",
        (cu, padded, 25, 0, 0),
        ValueError,
        "positions: cp_size must be at least 1, got 0; pass a larger one",
    )
    yield Refusal(
        "cp_rank past the group",
        (cu, padded, 25, 2, 2),
        ValueError,
        "positions: cp_rank must be from 0 to cp_size - 1 (1), got 2; pass this rank's number in its group",
    )


def positions_padding(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> Padding:
    valid, _ = reference.locate_positions(cu_seqlens, cu_seqlens_padded, total_tokens, cp_size, cp_rank)
    return Padding(outputs=(PadRows(~valid),))


def positions_cost(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int, cp_size: int = 1, cp_rank: int = 0
) -> Cost:
    return Cost(read=size_of(cu_seqlens, cu_seqlens_padded), written=4 * total_tokens)


def positions_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, reference.positions, 1, 0)


# --- compact_rows -----------------------------------------------------------------------------------------------------------------


def compact_rows_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def compact_rows_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("compact_rows", device)
    cu, padded = metadata(device)
    yield Refusal(
        "more rows than int32 can number",
        (cu, padded, 2**31),
        ValueError,
        "compact_rows: total_tokens must be below 2**31, got 2147483648; split the batch",
    )


def compact_rows_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=size_of(cu_seqlens, cu_seqlens_padded), written=8 * total_tokens)


def compact_rows_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, reference.compact_rows)


# --- cu_seqlens_from_positions ----------------------------------------------------------------------------------------------------


def cu_seqlens_from_positions_samples(device: torch.device) -> Iterator[Sample]:
    def positions(values: Sequence[int], dtype: torch.dtype = _INT32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    tail = [0, 1, 2, 0, 1, 0, -1, -1]
    replays = tuple(
        {"position_ids": positions(other)} for other in ([0] * 8, list(range(8)), [-1] * 8, [3, 4, 0, 1, 2, 3, 0, -1], [0, 1] * 4)
    )
    yield Sample("three sequences and a tail", (positions(tail), 4), replays, compile=True)
    yield Sample("as many sequences as fit, int64", (positions(tail, _INT64), 3))
    yield Sample("more sequences than fit", (positions(tail), 2), replays)
    yield Sample("first row continues a sequence", (positions([5, 6, 0, 1, 1, 2]), 8))
    yield Sample("no valid row", (positions([-1, -1, -1]), 2))
    yield Sample("no row", (positions([]), 2))
    yield Sample("every other position", (positions([0, 9, 1, 9, 0, 9])[::2], 3))
    yield Sample("a thousand short sequences", (torch.arange(3000, device=device) % 3, 1200))


def cu_seqlens_from_positions_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "cu_seqlens_from_positions"
    ids = torch.arange(4, device=device)
    yield Refusal(
        "two dimensions",
        (ids.unsqueeze(0), 4),
        ValueError,
        f"{op}: position_ids must have 1 dimension [T], got shape [1, 4]; reshape it",
    )
    yield Refusal("a float dtype", (ids.float(), 4), TypeError, f"{op}: position_ids must be int32 or int64, got float32; cast it")
    yield Refusal("no room", (ids, 0), ValueError, f"{op}: max_seqs must be at least 1, got 0; pass a larger one")


def cu_seqlens_from_positions_cost(position_ids: Tensor, max_seqs: int) -> Cost:
    return Cost(read=size_of(position_ids), written=4 * (max_seqs + 1))


def cu_seqlens_from_positions_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        return torch.arange(65536, device=device) % 128, 512

    yield Bench("T = 65536, B = 512", make, reference.cu_seqlens_from_positions)


# --- cu_seqlens_from_lengths ------------------------------------------------------------------------------------------------------


def cu_seqlens_from_lengths_samples(device: torch.device) -> Iterator[Sample]:
    def lengths(*values: int, dtype: torch.dtype = _INT32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    replays = ({"lengths": lengths(0, 0, 0)}, {"lengths": lengths(1, 2, 3)}, {"lengths": lengths(-5, 9, -1)})
    yield Sample("sentinels", (lengths(3, 0, 4), 8), replays, compile=True)
    yield Sample("as many as fit, int64", (lengths(3, 0, 4, dtype=_INT64), 3))
    yield Sample("negative counts as 0", (lengths(3, -2, 4), 4))
    yield Sample("no length", (lengths(), 3))
    yield Sample("every other length", (lengths(3, 9, 4, 9)[::2], 5))
    yield Sample("more than one block", (torch.arange(1500, device=device) % 5, 1600))


def cu_seqlens_from_lengths_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "cu_seqlens_from_lengths"
    lengths = torch.arange(4, device=device)
    yield Refusal(
        "two dimensions",
        (lengths.unsqueeze(0), 4),
        ValueError,
        f"{op}: lengths must have 1 dimension [number of sequences], got shape [1, 4]; reshape it",
    )
    yield Refusal("a float dtype", (lengths.float(), 4), TypeError, f"{op}: lengths must be int32 or int64, got float32; cast it")
    yield Refusal(
        "more lengths than fit",
        (lengths, 3),
        ValueError,
        f"{op}: max_seqs must be at least the number of lengths (4), got 3; raise it or pass fewer",
    )


def cu_seqlens_from_lengths_cost(lengths: Tensor, max_seqs: int) -> Cost:
    return Cost(read=size_of(lengths), written=4 * (max_seqs + 1))


def cu_seqlens_from_lengths_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        return torch.arange(500, device=device, dtype=_INT32), 512

    yield Bench("500 lengths, B = 512", make, reference.cu_seqlens_from_lengths)


# --- slice_cu_seqlens -------------------------------------------------------------------------------------------------------------


def slice_cu_seqlens_samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, base: Layout, start: int, length: int, *, compiled: bool = False) -> Sample:
        args = (base.cu_seqlens, base.padded, start, length)
        return Sample(f"{name}, rows {start} to {start + length}", args, metadata_replays(base), compile=compiled)

    base = layout("gaps and tail", device)
    yield sample("gaps and tail", base, 5, 9, compiled=True)
    yield sample("gaps and tail", base, 0, base.total)
    yield sample("gaps and tail", base, 2, 0)
    yield sample("gaps and tail", base, 20, 40)
    yield sample("no padded offsets", layout("tail", device, _INT64), 6, 8)
    yield sample("empty sequences", layout("empty sequences", device, _INT64), 3, 6)
    yield sample("rows before the first", layout("rows before the first", device), 1, 6)
    yield sample("sentinels", layout("sentinels", device), 4, 12)
    yield sample("no sequence", layout("no sequence", device), 1, 3)


def slice_cu_seqlens_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "slice_cu_seqlens"
    yield from cu_refusals(op, device, lambda c, p: (c, p, 0, 8))
    cu, padded = metadata(device)
    yield Refusal("start below 0", (cu, padded, -1, 8), ValueError, f"{op}: start must be at least 0, got -1; pass a larger one")
    yield Refusal("length below 0", (cu, padded, 0, -8), ValueError, f"{op}: length must be at least 0, got -8; pass a larger one")


def slice_cu_seqlens_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> Cost:
    return Cost(read=size_of(cu_seqlens, cu_seqlens_padded), written=2 * size_of(cu_seqlens))


def slice_cu_seqlens_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        base = gaps_layout(65536, 0.05, device)
        return base.cu_seqlens, base.padded, 16384, 16384

    yield Bench("B = 512", make, reference.slice_cu_seqlens)
