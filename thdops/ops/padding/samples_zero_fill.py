"""Sample calls, refusals, padding, cost and benches of `zero_fill` and `zero_fill_`.

T rows, B sequences, H heads, D head dim. Between them the samples of an op see every layout of `thdops.ops.layouts`, both metadata
dtypes, and every kind of stride and width that kernels tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thdops.ops.layouts import Layout, layout, others, prefix_sums
from thdops.ops.padding import reference
from thdops.ops.padding.samples import (
    cu_refusals,
    gaps_layout,
    metadata,
    metadata_replays,
    people_mask,
    right_padded_layout,
    size_of,
    tail_layout,
)
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample


def _values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers without a zero among them, so that a row zeroed by mistake shows; exact in every dtype."""
    count = torch.Size(shape).numel()
    counted = torch.arange(count, dtype=torch.float32, device=device) % 7 + 1
    return counted.reshape(tuple(shape)).to(dtype)


# --- zero_fill --------------------------------------------------------------------------------------------------------------------


def zero_fill_samples(device: torch.device) -> Iterator[Sample]:
    def sample(name: str, base: Layout, x: Tensor, *, compiled: bool = False) -> Sample:
        return Sample(name, (x, base.cu_seqlens, base.padded), metadata_replays(base), compile=compiled)

    new = partial(_values, device=device)
    base = layout("full", device)
    yield sample("fp32 [T], no padding", base, new([base.total], torch.float32))
    base = layout("tail", device)
    yield sample("fp32 [T, D], tail", base, new([base.total, 16], torch.float32), compiled=True)
    other = Layout(prefix_sums([4, 0, 7, 2, 6], device), None, 31)
    yield sample("fp32 [T, D], tail, other sizes", other, new([other.total, 24], torch.float32))
    base = layout("gaps and tail", device)
    yield sample("bf16 slice of a fused [T, 3, H, D]", base, new([base.total, 3, 2, 8], torch.bfloat16)[:, 1], compiled=True)
    yield sample("fp32 slice of a fused [T, H, 3, D]", base, new([base.total, 2, 3, 8], torch.float32)[:, :, 2])
    yield sample("fp32 transposed", base, new([5, base.total], torch.float32).t())
    base = layout("empty sequences", device, torch.int64)
    yield sample("fp16, columns of a wider tensor", base, new([base.total, 12], torch.float16)[:, 3:10])
    base = layout("rows before the first", device)
    yield sample("bf16, every other row", base, new([2 * base.total, 3], torch.bfloat16)[::2])
    base = layout("no valid row", device)
    yield sample("fp32 expanded, no valid row", base, new([4], torch.float32).expand(base.total, 4))
    base = layout("sentinels", device, torch.int64)
    yield sample("fp8 e4m3fn, width 5", base, new([base.total, 5], torch.float8_e4m3fn))
    yield sample("fp8 e5m2 [T, H, D]", base, new([base.total, 2, 16], torch.float8_e5m2))
    yield sample("int8, width 3", base, new([base.total, 3], torch.int8))
    base = layout("no sequence", device)
    yield sample("int64 [T], no sequence", base, new([base.total], torch.int64))
    base = layout("tail", device, torch.int64)
    yield sample("bool", base, new([base.total, 7], torch.bool))
    yield sample("zero width", base, new([base.total, 0], torch.float32))
    base = Layout(prefix_sums([0], device), prefix_sums([0], device), 0)
    yield sample("no row", base, new([0, 4], torch.float32))


def zero_fill_refusals(device: torch.device) -> Iterator[Refusal]:
    cu, padded = metadata(device)
    x = _values([25, 4], torch.float32, device)
    yield from cu_refusals("zero_fill", device, lambda c, p: (x, c, p))
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
    return Cost(read=share * size_of(x) + size_of(cu_seqlens, cu_seqlens_padded), written=size_of(x))


def zero_fill_benches(device: torch.device) -> Iterator[Bench]:
    def people(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None = None) -> Tensor:
        return torch.where(people_mask(cu_seqlens, cu_seqlens_padded, x.shape[0])[:, None, None], 0, x)

    def make(total: int, place: Callable[[], Layout]) -> tuple[Any, ...]:
        base = place()
        return torch.randn(total, 32, 128, device=device, dtype=torch.bfloat16), base.cu_seqlens, base.padded

    for total in (8192, 65536):
        for name, place in _bench_layouts(total, device).items():
            yield Bench(f"[{total}, 32, 128] bf16, {name}", partial(make, total, place), people)


def _bench_layouts(total: int, device: torch.device) -> dict[str, Callable[[], Layout]]:
    return {
        "no padding": partial(tail_layout, total, 0.0, device),
        "5 % tail": partial(tail_layout, total, 0.05, device),
        "25 % tail": partial(tail_layout, total, 0.25, device),
        "5 % gaps, B = 512": partial(gaps_layout, total, 0.05, device),
        "25 %, right-padded batch of 8": partial(right_padded_layout, total, device),
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
    other = Layout(prefix_sums([4, 0, 7, 2, 6], device), None, 31)
    yield sample("one fp32 [T, D], tail, other sizes", [other], new([other.total, 24], fp32))
    base = layout("gaps and tail", device)
    dq, dk, dv = new([base.total, 4, 8], bf16), new([base.total, 2, 8], bf16), new([base.total, 2, 8], bf16)
    yield sample("dQ, dK, dV, one cu_seqlens for all", [base], dq, dk, dv, compiled=True)
    fused = new([base.total, 3, 2, 8], bf16)
    yield sample("slices of one fused [T, 3, H, D]", [base], *fused.unbind(1))
    fused = new([base.total, 2, 3, 4], fp32)
    yield sample("slices of one fused [T, H, 3, D]", [base], *fused.unbind(2))
    query, key = layout("gaps and tail", device, torch.int64), layout("empty sequences", device, torch.int64)
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
    base = layout("sentinels", device, torch.int64)
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
    base = Layout(prefix_sums([0], device), None, 0)
    yield sample("no row", [base], new([0, 4], fp32))


def zero_fill__refusals(device: torch.device) -> Iterator[Refusal]:
    op = "zero_fill_"
    cu, padded = metadata(device)
    x = _values([25, 4], torch.float32, device)
    yield from cu_refusals(op, device, lambda c, p: ([x], [c], [] if p is None else [p]))
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
            written += rows * (size_of(x) / x.shape[0])
    return Cost(read=size_of(*cu_seqlens, *cu_seqlens_padded), written=written)


def zero_fill__benches(device: torch.device) -> Iterator[Bench]:
    def people(tensors: list[Tensor], cu_seqlens: list[Tensor], cu_seqlens_padded: list[Tensor]) -> None:
        for x, cu, padded in _per_tensor(tensors, cu_seqlens, cu_seqlens_padded):
            x[people_mask(cu, padded, x.shape[0])] = 0

    def make(total: int, place: Callable[[], Layout]) -> tuple[Any, ...]:
        base = place()
        gradients = [torch.randn(total, heads, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8)]
        return gradients, [base.cu_seqlens], [] if base.padded is None else [base.padded]

    for total in (8192, 65536):
        for name, place in _bench_layouts(total, device).items():
            yield Bench(f"dQ [{total}, 32, 128], dK, dV [{total}, 8, 128] bf16, {name}", partial(make, total, place), people)
