"""Sample calls, refusals, padding, cost and benches of the merge ops. T rows, H heads, D head dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thdops.ops.padding.samples import size_of
from thdops.registry import Bench, Cost, Padding, PadRows, Refusal, Sample

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- pieces of a call ----------------------------------------------------------------------------------------------------------


def _parts(
    shape: tuple[int, int, int], device: torch.device, dtypes: tuple[torch.dtype, torch.dtype] = (_FP32, _FP32), seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out_a, lse_a, out_b, lse_b) from the CPU's generator, so that all devices see the same. The last two rows are padding of
    both, row 1 of a alone, row 3 of b alone, and single heads of single rows saw no key in either. Weights go from nothing to
    everything."""
    generator = torch.Generator().manual_seed(seed)
    rows, heads, _ = shape
    statistics = _FP64 if _FP64 in dtypes else _FP32
    outs = [torch.randn(shape, generator=generator).to(device, dtype) for dtype in dtypes]
    lses = [9 * torch.randn(heads, rows, generator=generator) for _ in dtypes]
    for lse, alone in zip(lses, (1, 3), strict=True):
        lse[torch.rand(heads, rows, generator=generator) < 0.2] = -torch.inf
        lse[:, alone : alone + 1] = -torch.inf
        lse[:, -2:] = -torch.inf
    lse_a, lse_b = (lse.to(device, statistics) for lse in lses)
    return outs[0], lse_a, outs[1], lse_b


def _replays(shape: tuple[int, int, int], device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Any, ...]:
    """Other numbers; then no row seen by a, every row seen by b."""
    names = ("out_a", "lse_a", "out_b", "lse_b")
    other = dict(zip(names, _parts(shape, device, dtypes, seed=1), strict=True))
    unseen = torch.full_like(other["lse_a"], -torch.inf)
    return other, {"lse_a": unseen, "lse_b": torch.zeros_like(unseen)}, {"lse_a": unseen, "lse_b": unseen.clone()}


_Case = tuple[str, tuple[Tensor, Tensor, Tensor, Tensor], torch.dtype | None, tuple[Any, ...], bool]


def _cases(device: torch.device) -> Iterator[_Case]:
    """(name, parts, dtype, replays, whether worth a compilation)."""

    def one(
        name: str,
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype] = (_FP32, _FP32),
        dtype: torch.dtype | None = None,
        compiled: bool = False,
    ) -> _Case:
        return name, _parts(shape, device, dtypes), dtype, _replays(shape, device, dtypes), compiled

    yield one("fp32", (19, 3, 16), compiled=True)
    yield one("bf16, other sizes", (22, 4, 24), (_BF16, _BF16), compiled=True)
    yield one("fp16, odd head dim", (9, 2, 5), (_FP16, _FP16))
    yield one("fp32 so far, bf16 added", (19, 2, 16), (_FP32, _BF16))
    yield one("fp32 so far, bf16 added and wanted", (19, 2, 16), (_FP32, _BF16), _BF16)
    yield one("bf16 parts, fp32 wanted", (19, 2, 16), (_BF16, _BF16), _FP32)
    yield one("wider than a block", (5, 2, 264))
    yield one("many rows, one head", (300, 1, 8))
    yield one("no row", (0, 2, 16))
    yield one("no head", (6, 0, 16))
    out_a, lse_a, out_b, lse_b = _parts((18, 4, 16), device)
    strided = (out_a[::2, 1:], lse_a[1:, ::2], out_b[::2, :-1], lse_b[:-1, ::2].t().contiguous().t())
    yield "sliced rows and heads, an LSE stored [T, H]", strided, None, (), False
    fused = torch.cat((out_a, out_b), 2)
    yield "slices of one buffer", (fused[..., :16], lse_a, fused[..., 16:], lse_b), None, (), False
    yield "expanded", (out_a[:1].expand(18, 4, 16), lse_a, out_b, lse_b[:, :1].expand(4, 18)), None, (), False


# --- merge_attention -----------------------------------------------------------------------------------------------------------


def merge_attention_samples(device: torch.device) -> Iterator[Sample]:
    for name, parts, dtype, replays, compiled in _cases(device):
        yield Sample(name, (*parts, dtype), replays, compiled)
    if device.type == "cpu":
        yield Sample("fp64", (*_parts((7, 2, 16), device, (_FP64, _FP64)), None))


def _part_refusals(op: str, device: torch.device, call: Callable[..., tuple[Any, ...]]) -> Iterator[Refusal]:
    parts = _parts((6, 2, 8), device)
    out_a, lse_a, out_b, lse_b = parts

    def no(name: str, text: str, error: type[Exception] = ValueError, **changed: Tensor) -> Refusal:
        given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True)) | changed
        return Refusal(name, call(*given.values()), error, f"{op}: {text}")

    floats = f"must be float32 or bfloat16 or float16, got int32 on {device.type}; cast it"
    yield no(
        "out_a of two dimensions", "out_a must have 3 dimensions [T, H, D], got shape [6, 16]; reshape it", out_a=out_a.flatten(1)
    )
    yield no("integer out_b", f"out_b {floats}", TypeError, out_b=out_b.int())
    text = "out_b must have the shape of out_a [6, 2, 8], got [5, 2, 8]; pass two results for the same queries"
    yield no("out_b of fewer rows", text, out_b=out_b[1:])
    yield no("bf16 lse_a", "lse_a must be float32, got bfloat16; cast it", TypeError, lse_a=lse_a.to(_BF16))
    text = "lse_b must have one entry per head and row, [H, T] = [2, 6], got [6, 2]; transpose it where it is [T, H]"
    yield no("lse_b as [T, H]", text, lse_b=lse_b.t())


def merge_attention_refusals(device: torch.device) -> Iterator[Refusal]:
    yield from _part_refusals("merge_attention", device, lambda *parts: (*parts, None))
    text = f"merge_attention: dtype must be float32 or bfloat16 or float16, got int64 on {device.type}; pass another, or None"
    yield Refusal("integer dtype", (*_parts((6, 2, 8), device), torch.int64), TypeError, text)


def _unseen(lse: Tensor) -> Tensor:
    """bool [T]: rows that are padding, or saw no key, in all heads."""
    return (lse == -torch.inf).all(0)


def _pads(lse_a: Tensor, lse_b: Tensor) -> tuple[PadRows, PadRows, Tensor]:
    unseen_a, unseen_b = _unseen(lse_a), _unseen(lse_b)
    return PadRows(unseen_a), PadRows(unseen_b), unseen_a & unseen_b


def merge_attention_padding(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None) -> Padding:
    of_a, of_b, of_both = _pads(lse_a, lse_b)
    return Padding({"out_a": of_a, "out_b": of_b}, (PadRows(of_both), PadRows(of_both, dim=1, value=-torch.inf)))


def merge_attention_cost(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None) -> Cost:
    result = torch.promote_types(out_a.dtype, out_b.dtype) if dtype is None else dtype
    written = out_a.numel() * result.itemsize + size_of(lse_a)
    return Cost(size_of(out_a, lse_a, out_b, lse_b), written, 3.0 * out_a.numel())


# name -> (shape, dtypes of the parts, dtype wanted)
_GPU_BENCHES = {
    "[65536, 32, 128] bf16": ((65536, 32, 128), (_BF16, _BF16), None),
    "[65536, 32, 128] fp32 so far, bf16 added": ((65536, 32, 128), (_FP32, _BF16), None),
    "[8192, 128, 128] bf16": ((8192, 128, 128), (_BF16, _BF16), None),
}
_CPU_BENCHES = {"[256, 4, 32] fp32": ((256, 4, 32), (_FP32, _FP32), None)}


def _bench_parts(
    device: torch.device, shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """Without padding: every byte is moved."""
    outs = [torch.randn(shape, device=device, dtype=kind) for kind in dtypes]
    lse_a, lse_b = torch.randn(2, shape[1], shape[0], device=device).unbind()
    return outs[0], lse_a, outs[1], lse_b, dtype


def _shapes(device: torch.device) -> dict[str, Any]:
    return _GPU_BENCHES if device.type == "cuda" else _CPU_BENCHES


def merge_attention_benches(device: torch.device) -> Iterator[Bench]:
    for name, shape in _shapes(device).items():
        yield Bench(name, partial(_bench_parts, device, *shape), _merged_by_hand)


def _merged_by_hand(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """What context-parallel code does: in fp32, -inf not looked at."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((x - lse).exp().t().unsqueeze(-1) for x in (lse_a, lse_b))
    result = torch.promote_types(out_a.dtype, out_b.dtype) if dtype is None else dtype
    return (weight_a * out_a + weight_b * out_b).to(result), lse


# --- merge_attention_grad ------------------------------------------------------------------------------------------------------


def merge_attention_grad_samples(device: torch.device) -> Iterator[Sample]:
    for i, (name, parts, dtype, replays, compiled) in enumerate(_cases(device)):
        out_a, lse_a, out_b, _ = parts
        result = torch.promote_types(out_a.dtype, out_b.dtype) if dtype is None else dtype
        generator = torch.Generator().manual_seed(5)
        grad_out = torch.randn(out_a.shape, generator=generator).to(device, result)
        grad_lse = torch.randn(lse_a.shape, generator=generator).to(device)
        if i % 3 == 1:  # as gradients come through a transpose
            grad_out, grad_lse = grad_out.transpose(0, 1).contiguous().transpose(0, 1), grad_lse.t().contiguous().t()
        # Some without one of the two, as autograd leaves them out.
        given = (None if i % 6 == 4 else grad_out, None if i % 6 == 5 else grad_lse, *parts)
        yield Sample(name, given, replays, compiled)


def merge_attention_grad_refusals(device: torch.device) -> Iterator[Refusal]:
    op = "merge_attention_grad"
    yield from _part_refusals(op, device, lambda *parts: (None, None, *parts))
    parts = _parts((6, 2, 8), device)
    text = f"{op}: grad_out must have the shape of out_a [6, 2, 8], got [6, 2, 7]; pass out's gradient"
    yield Refusal("grad_out of another width", (parts[0][..., 1:], None, *parts), ValueError, text)
    text = f"{op}: grad_lse must have one entry per head and row, [H, T] = [2, 6], got [6, 2]; transpose it where it is [T, H]"
    yield Refusal("grad_lse as [T, H]", (None, parts[1].t(), *parts), ValueError, text)


def merge_attention_grad_padding(*args: Any) -> Padding:
    grad_out, grad_lse, _, lse_a, _, lse_b = args
    of_a, of_b, of_both = _pads(lse_a, lse_b)
    inputs = {"out_a": of_a, "out_b": of_b}
    if grad_out is not None:
        inputs["grad_out"] = PadRows(of_both)
    if grad_lse is not None:
        inputs["grad_lse"] = PadRows(of_both, dim=1)
    return Padding(inputs, (of_a, PadRows(of_a.mask, dim=1), of_b, PadRows(of_b.mask, dim=1)))


def merge_attention_grad_cost(*args: Any) -> Cost:
    grad_out, grad_lse, out_a, lse_a, out_b, lse_b = args
    parts = size_of(out_a, lse_a, out_b, lse_b)
    return Cost(parts + size_of(grad_out, grad_lse), parts, 5.0 * out_a.numel())


def merge_attention_grad_benches(device: torch.device) -> Iterator[Bench]:
    def make(*shape: Any) -> tuple[Any, ...]:
        *parts, _ = _bench_parts(device, *shape)
        grad_out = torch.randn_like(parts[0])
        return grad_out, torch.randn_like(parts[1]), *parts

    for name, shape in _shapes(device).items():
        yield Bench(name, partial(make, *shape), _gradients_by_hand)


def _gradients_by_hand(
    grad_out: Tensor, grad_lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp(), (lse_b - lse).exp()
    across = (grad_out.float() * (out_a.float() - out_b.float())).sum(-1).t()
    return (
        (weight_a.t().unsqueeze(-1) * grad_out).to(out_a.dtype),
        weight_a * (grad_lse + weight_b * across),
        (weight_b.t().unsqueeze(-1) * grad_out).to(out_b.dtype),
        weight_b * (grad_lse - weight_a * across),
    )
