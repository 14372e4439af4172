"""Sample calls, refusals, padding, cost and benches of the padding ops.

T rows, B sequences, H heads, D head dim. Samples are tiny: conformance runs dozens of checks on each. Between them the samples of
an op see every layout of `thdops.ops.layouts`, both metadata dtypes, and every kind of stride and width that kernels tell apart.
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


# --- helpers ----------------------------------------------------------------------------------------------------------------------


def _values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers without a zero among them, so that a row zeroed by mistake shows; exact in every dtype."""
    count = torch.Size(shape).numel()
    counted = torch.arange(count, dtype=torch.float32, device=device) % 7 + 1
    return counted.reshape(tuple(shape)).to(dtype)


def _metadata_replays(base: Layout) -> tuple[dict[str, Tensor], ...]:
    def contents(one: Layout) -> dict[str, Tensor]:
        padded = {} if one.padded is None else {"cu_seqlens_padded": one.padded}
        return {"cu_seqlens": one.cu_seqlens, **padded}

    return tuple(map(contents, others(base)))


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _metadata(device: torch.device) -> tuple[Tensor, Tensor]:
    base = layout("gaps and tail", device)
    assert base.padded is not None
    return base.cu_seqlens, base.padded


def _cu_refusals(op: str, device: torch.device, call: Callable[[Any, Any], tuple[Any, ...]]) -> Iterator[Refusal]:
    """Everything that is wrong with a pair of metadata tensors; `call(cu_seqlens, cu_seqlens_padded)` gives the arguments."""
    cu, padded = _metadata(device)
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
        yield Sample(f"{name}, {dtype}", (*base, *more), _metadata_replays(base), compile=compiled)
    late = Layout(prefix_sums([4, 2], device, first=3), None, 12)
    yield Sample("first offset above 0, no padded offsets", (*late, *more), _metadata_replays(late))
    columns = torch.stack(_metadata(device), dim=1)
    yield Sample("columns of one metadata buffer", (columns[:, 0], columns[:, 1], 25, *more))
    none = Layout(prefix_sums([0, 0], device), None, 0)
    yield Sample("no row", (*none, *more), _metadata_replays(none))


def _row_map_refusals(op: str, device: torch.device, *more: int) -> Iterator[Refusal]:
    cu, padded = _metadata(device)
    yield from _cu_refusals(op, device, lambda c, p: (c, p, 25, *more))
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


def _tail(total: int, share: float, device: torch.device, sequences: int = 2) -> Layout:
    """Sequences back to back, padding behind them."""
    valid = int(total * (1 - share))
    ends = [valid * b // sequences for b in range(sequences + 1)]
    return Layout(torch.tensor(ends, dtype=_INT32, device=device), None, total)


def _gaps(total: int, share: float, device: torch.device, sequences: int = 512) -> Layout:
    """Padding behind each of many sequences."""
    padded = [total * b // sequences for b in range(sequences + 1)]
    valid = [int(end * (1 - share)) for end in padded]
    return Layout(torch.tensor(valid, dtype=_INT32, device=device), torch.tensor(padded, dtype=_INT32, device=device), total)


def _right_padded(total: int, device: torch.device, batch: int = 8) -> Layout:
    """A [batch, S] batch whose rows are half full to full: a quarter is padding."""
    size = total // batch
    lengths = [size // 2 + (size // 2) * b // (batch - 1) for b in range(batch)]
    return Layout(prefix_sums(lengths, device), prefix_sums([size] * batch, device), total)


def _people_mask(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Tensor:
    """The padding mask as people write it: one comparison where padding is a tail, a search where there are gaps."""
    rows = torch.arange(total_tokens, device=cu_seqlens.device)
    if cu_seqlens_padded is None:
        return rows >= cu_seqlens[-1]
    sequence = torch.searchsorted(cu_seqlens_padded[1:], rows, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return rows >= cu_seqlens_padded[sequence] + cu_seqlens.diff()[sequence]


# --- zero_fill --------------------------------------------------------------------------------------------------------------------


def zero_fill_samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, base: Layout, x: Tensor, *, compiled: bool = False) -> Sample:
        return Sample(name, (x, base.cu_seqlens, base.padded), _metadata_replays(base), compile=compiled)

    new = partial(_values, device=device)
    base = layout("full", device)
    yield sample("fp32 [T], no padding", base, new([base.total], torch.float32))
    base = layout("tail", device)
    yield sample("fp32 [T, D], tail", base, new([base.total, 16], torch.float32), compiled=True)
    base = layout("gaps and tail", device)
    yield sample("bf16 slice of a fused [T, 3, H, D]", base, new([base.total, 3, 2, 8], torch.bfloat16)[:, 1], compiled=True)
    yield sample("fp32 slice of a fused [T, H, 3, D]", base, new([base.total, 2, 3, 8], torch.float32)[:, :, 2])
    yield sample("fp32 transposed", base, new([5, base.total], torch.float32).t())
    base = layout("empty sequences", device, _INT64)
    yield sample("fp16, columns of a wider tensor", base, new([base.total, 12], torch.float16)[:, 3:10])
    base = layout("rows before the first", device)
    yield sample("bf16, every other row", base, new([2 * base.total, 3], torch.bfloat16)[::2])
    base = layout("no valid row", device)
    yield sample("fp32 expanded, no valid row", base, new([4], torch.float32).expand(base.total, 4))
    base = layout("sentinels", device, _INT64)
    yield sample("fp8 e4m3fn, width 5", base, new([base.total, 5], torch.float8_e4m3fn))
    yield sample("fp8 e5m2 [T, H, D]", base, new([base.total, 2, 16], torch.float8_e5m2))
    yield sample("int8, width 3", base, new([base.total, 3], torch.int8))
    base = layout("no sequence", device)
    yield sample("int64 [T], no sequence", base, new([base.total], torch.int64))
    base = layout("tail", device, _INT64)
    yield sample("bool", base, new([base.total, 7], torch.bool))
    yield sample("zero width", base, new([base.total, 0], torch.float32))
    columns = torch.stack(_metadata(device), dim=1)
    yield Sample("columns of one metadata buffer", (new([25, 2], torch.float32), columns[:, 0], columns[:, 1]))
    base = Layout(prefix_sums([0], device), prefix_sums([0], device), 0)
    yield sample("no row", base, new([0, 4], torch.float32))


def zero_fill_refusals(device: torch.device) -> Iterator[Refusal]:
    cu, padded = _metadata(device)
    x = _values([25, 4], torch.float32, device)
    yield from _cu_refusals("zero_fill", device, lambda c, p: (x, c, p))
    yield Refusal(
        "a scalar",
        (x[0, 0], cu, padded),
        ValueError,
        "zero_fill: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0",
    )
    if hasattr(torch, "float8_e8m0fnu"):
        yield Refusal(
            "a dtype without a zero",
            (x.to(torch.float8_e8m0fnu), cu, padded),
            TypeError,
            "zero_fill: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only",
        )
    if device.type == "cuda":
        yield Refusal(
            "cu_seqlens on another device",
            (x, cu.cpu(), None),
            ValueError,
            f"zero_fill: cu_seqlens must be on the device of x ({x.device}), got cpu; move it",
        )


def zero_fill_padding(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Padding:
    rows = PadRows(reference.padding_mask(cu_seqlens, cu_seqlens_padded, x.shape[0]))
    return Padding(inputs={"x": rows}, outputs=(rows,))


def zero_fill_cost(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Cost:
    """Valid rows are read, all rows are written."""
    padding = reference.padding_mask(cu_seqlens, cu_seqlens_padded, x.shape[0])
    share = 1 - padding.float().mean().item() if x.shape[0] else 0.0
    return Cost(read=share * _bytes(x) + _bytes(cu_seqlens, cu_seqlens_padded), written=_bytes(x))


def zero_fill_benches(device: torch.device) -> Iterator[Bench]:
    def people(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
        return torch.where(_people_mask(cu_seqlens, cu_seqlens_padded, x.shape[0])[:, None, None], 0, x)

    def make(total: int, place: Callable[[], Layout]) -> tuple[Any, ...]:
        base = place()
        return torch.randn(total, 32, 128, device=device, dtype=torch.bfloat16), base.cu_seqlens, base.padded

    for total in (8192, 65536):
        for name, place in _bench_layouts(total, device).items():
            yield Bench(f"[{total}, 32, 128] bf16, {name}", partial(make, total, place), people)


def _bench_layouts(total: int, device: torch.device) -> dict[str, Callable[[], Layout]]:
    return {
        "no padding": partial(_tail, total, 0.0, device),
        "5 % tail": partial(_tail, total, 0.05, device),
        "25 % tail": partial(_tail, total, 0.25, device),
        "5 % gaps, B = 512": partial(_gaps, total, 0.05, device),
        "25 %, right-padded batch of 8": partial(_right_padded, total, device),
    }


# --- zero_fill_ -------------------------------------------------------------------------------------------------------------------


def zero_fill__samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, bases: Sequence[Layout], *tensors: Tensor, compiled: bool = False) -> Sample:
        def args(layouts: Sequence[Layout]) -> dict[str, list[Tensor]]:
            padded = [one.padded for one in layouts if one.padded is not None]
            return {"cu_seqlens": [one.cu_seqlens for one in layouts], "cu_seqlens_padded": padded}

        replays = tuple(args(other) for other in zip(*map(others, bases), strict=True))
        return Sample(name, (list(tensors), *args(bases).values()), replays, compile=compiled)

    new = partial(_values, device=device)
    fp32, bf16 = torch.float32, torch.bfloat16
    base = layout("tail", device)
    yield sample("one fp32 [T, D], tail", [base], new([base.total, 16], fp32), compiled=True)
    base = layout("gaps and tail", device)
    dq, dk, dv = new([base.total, 4, 8], bf16), new([base.total, 2, 8], bf16), new([base.total, 2, 8], bf16)
    yield sample("dQ, dK, dV, one cu_seqlens for all", [base], dq, dk, dv, compiled=True)
    fused = new([base.total, 3, 2, 8], bf16)
    yield sample("slices of one fused [T, 3, H, D]", [base], *fused.unbind(1))
    fused = new([base.total, 2, 3, 4], fp32)
    yield sample("slices of one fused [T, H, 3, D]", [base], *fused.unbind(2))
    query, key = layout("gaps and tail", device, _INT64), layout("empty sequences", device, _INT64)
    dq, dk, dv = new([query.total, 4, 8], bf16), new([key.total, 2, 8], bf16), new([key.total, 2, 6], bf16)
    yield sample("one cu_seqlens per tensor", [query, key, key], dq, dk, dv)
    base = layout("rows before the first", device)
    yield sample(
        "every width and dtype",
        [base],
        new([base.total], fp32),
        new([base.total, 3], torch.int8),
        new([base.total, 5], torch.float8_e4m3fn),
        new([base.total, 7], torch.float16),
        new([base.total, 2], torch.bool),
        new([base.total, 2, 3], torch.int64),
        new([base.total, 16], torch.float8_e5m2),
    )
    base = layout("sentinels", device, _INT64)
    yield sample(
        "transposed, every other row, columns of a wider tensor",
        [base],
        new([6, base.total], fp32).t(),
        new([2 * base.total, 8], bf16)[::2],
        new([base.total, 16], bf16)[:, 1:12],
    )
    base = layout("full", device)
    yield sample("nothing to write", [base], new([base.total, 4], fp32), new([base.total, 0], fp32))
    base = layout("no valid row", device)
    yield sample("no valid row", [base], new([base.total, 9], bf16))
    base = layout("no sequence", device)
    yield sample("no sequence", [base], new([base.total, 4], fp32))
    columns = torch.stack(_metadata(device), dim=1)
    yield Sample("columns of one metadata buffer", ([new([25, 2], fp32)], [columns[:, 0]], [columns[:, 1]]))
    base = Layout(prefix_sums([0], device), None, 0)
    yield sample("no row", [base], new([0, 4], fp32))


def zero_fill__refusals(device: torch.device) -> Iterator[Refusal]:
    op = "zero_fill_"
    cu, padded = _metadata(device)
    x = _values([25, 4], torch.float32, device)
    yield from _cu_refusals(op, device, lambda c, p: ([x], [c], [] if p is None else [p]))
    yield Refusal(
        "no tensor",
        ([], [cu], []),
        ValueError,
        f"{op}: tensors must hold at least one tensor, got an empty list; leave the call out",
    )
    yield Refusal(
        "two cu_seqlens for three tensors",
        ([x, x, x], [cu, cu], []),
        ValueError,
        f"{op}: cu_seqlens must be one tensor or one per tensor (3), got 2; pass one of the two",
    )
    yield Refusal(
        "fewer padded offsets than cu_seqlens",
        ([x, x], [cu, cu], [padded]),
        ValueError,
        f"{op}: cu_seqlens_padded must be None or as many as cu_seqlens (2), got 1; pass one of the two",
    )
    yield Refusal(
        "a scalar",
        ([x, x[0, 0]], [cu], [padded]),
        ValueError,
        f"{op}: tensors[1] must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0",
    )
    yield Refusal(
        "an expanded tensor",
        ([x[:1].expand(25, 4)], [cu], [padded]),
        ValueError,
        f"{op}: tensors[0] must have a place in memory for each element, got shape [25, 4] with strides [0, 1];"
        " clone the expanded tensor",
    )
    if hasattr(torch, "float8_e8m0fnu"):
        yield Refusal(
            "a dtype without a zero",
            ([x.to(torch.float8_e8m0fnu)], [cu], [padded]),
            TypeError,
            f"{op}: tensors[0] must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only",
        )
    yield Refusal(
        "a tensor that requires grad",
        ([x.detach().clone().requires_grad_()], [cu], [padded]),
        ValueError,
        "thdops::zero_fill_: tensors must not require grad in grad mode, got a tensor that does;"
        " call it under torch.no_grad(), or use the functional zero_fill, which has a gradient",
    )
    if device.type == "cuda":
        yield Refusal(
            "cu_seqlens on another device",
            ([x], [cu.cpu()], []),
            ValueError,
            f"{op}: cu_seqlens must be on the device of tensors[0] ({x.device}), got cpu; move it",
        )


def _per_tensor(
    tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """(tensor, its cu_seqlens, its padded offsets or None)."""
    for i, x in enumerate(tensors):
        j = i if len(cu_seqlens) > 1 else 0
        yield x, cu_seqlens[j], cu_seqlens_padded[j] if cu_seqlens_padded else None


def zero_fill__padding(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> Padding:
    rows = [
        PadRows(reference.padding_mask(cu, padded, x.shape[0]))
        for x, cu, padded in _per_tensor(tensors, cu_seqlens, cu_seqlens_padded)
    ]
    return Padding(inputs={"tensors": rows}, outputs=tuple(rows))


def zero_fill__cost(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> Cost:
    """Nothing of the tensors is read and only their padding rows are written."""
    written = 0.0
    for x, cu, padded in _per_tensor(tensors, cu_seqlens, cu_seqlens_padded):
        if x.numel():
            rows = reference.padding_mask(cu, padded, x.shape[0]).sum().item()
            written += rows * (_bytes(x) / x.shape[0])
    return Cost(read=_bytes(*cu_seqlens, *cu_seqlens_padded), written=written)


def zero_fill__benches(device: torch.device) -> Iterator[Bench]:
    def people(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
        for x, cu, padded in _per_tensor(tensors, cu_seqlens, cu_seqlens_padded):
            x[_people_mask(cu, padded, x.shape[0])] = 0

    def make(total: int, place: Callable[[], Layout]) -> tuple[Any, ...]:
        base = place()
        gradients = [torch.randn(total, heads, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8)]
        return gradients, [base.cu_seqlens], [] if base.padded is None else [base.padded]

    for total in (8192, 65536):
        for name, place in _bench_layouts(total, device).items():
            yield Bench(f"dQ [{total}, 32, 128], dK, dV [{total}, 8, 128] bf16, {name}", partial(make, total, place), people)


# --- padding_mask, sequence_ids ---------------------------------------------------------------------------------------------------


def _row_map_benches(device: torch.device, baseline: Callable[..., Any], *more: int) -> Iterator[Bench]:
    total = 65536
    for name, place in (("5 % tail", partial(_tail, total, 0.05, device, 512)), ("5 % gaps", partial(_gaps, total, 0.05, device))):
        yield Bench(f"T = {total}, B = 512, {name}", lambda place=place: (*place(), *more), baseline)


def padding_mask_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def padding_mask_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("padding_mask", device)


def padding_mask_padding(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Padding:
    return _row_map_padding(1.0, cu_seqlens, cu_seqlens_padded, total_tokens)


def padding_mask_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=_bytes(cu_seqlens, cu_seqlens_padded), written=total_tokens)


def padding_mask_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, _people_mask)


def sequence_ids_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def sequence_ids_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("sequence_ids", device)


def sequence_ids_padding(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Padding:
    return _row_map_padding(-1.0, cu_seqlens, cu_seqlens_padded, total_tokens)


def sequence_ids_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=_bytes(cu_seqlens, cu_seqlens_padded), written=4 * total_tokens)


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
    cu, padded = _metadata(device)
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
    return Cost(read=_bytes(cu_seqlens, cu_seqlens_padded), written=4 * total_tokens)


def positions_benches(device: torch.device) -> Iterator[Bench]:
    yield from _row_map_benches(device, reference.positions, 1, 0)


# --- compact_rows -----------------------------------------------------------------------------------------------------------------


def compact_rows_samples(device: torch.device) -> Iterator[Sample]:
    yield from _row_map_samples(device)


def compact_rows_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _row_map_refusals("compact_rows", device)
    cu, padded = _metadata(device)
    yield Refusal(
        "more rows than int32 can number",
        (cu, padded, 2**31),
        ValueError,
        "compact_rows: total_tokens must be below 2**31, got 2147483648; split the batch",
    )


def compact_rows_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, total_tokens: int) -> Cost:
    return Cost(read=_bytes(cu_seqlens, cu_seqlens_padded), written=8 * total_tokens)


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
    return Cost(read=_bytes(position_ids), written=4 * (max_seqs + 1))


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
    return Cost(read=_bytes(lengths), written=4 * (max_seqs + 1))


def cu_seqlens_from_lengths_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        return torch.arange(500, device=device, dtype=_INT32), 512

    yield Bench("500 lengths, B = 512", make, reference.cu_seqlens_from_lengths)


# --- slice_cu_seqlens -------------------------------------------------------------------------------------------------------------


def slice_cu_seqlens_samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, base: Layout, start: int, length: int, *, compiled: bool = False) -> Sample:
        args = (base.cu_seqlens, base.padded, start, length)
        return Sample(f"{name}, rows {start} to {start + length}", args, _metadata_replays(base), compile=compiled)

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
    columns = torch.stack(_metadata(device), dim=1)
    yield Sample("columns of one metadata buffer", (columns[:, 0], columns[:, 1], 5, 9))


def slice_cu_seqlens_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "slice_cu_seqlens"
    yield from _cu_refusals(op, device, lambda c, p: (c, p, 0, 8))
    cu, padded = _metadata(device)
    yield Refusal("start below 0", (cu, padded, -1, 8), ValueError, f"{op}: start must be at least 0, got -1; pass a larger one")
    yield Refusal("length below 0", (cu, padded, 0, -8), ValueError, f"{op}: length must be at least 0, got -8; pass a larger one")


def slice_cu_seqlens_cost(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, start: int, length: int) -> Cost:
    return Cost(read=_bytes(cu_seqlens, cu_seqlens_padded), written=2 * _bytes(cu_seqlens))


def slice_cu_seqlens_benches(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        base = _gaps(65536, 0.05, device)
        return base.cu_seqlens, base.padded, 16384, 16384

    yield Bench("B = 512", make, reference.slice_cu_seqlens)
