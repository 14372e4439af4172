"""An op of somebody else's project: own namespace, own registry, everything in one file but the kernels.

`double_rows(x [T, D], cu_seqlens [B+1]) -> (y [T, D], squares [T])`: y is 2x and squares the sum of x^2 of each row; both are 0
on padding rows, which are those from cu_seqlens[B] on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thdops.registry import Bench, Cost, OpSpec, Padding, PadRows, Refusal, Registry, Sample, register

REGISTRY = Registry("third_party")


def check(x: Tensor, cu_seqlens: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"double_rows: x must have 2 dimensions [T, D], got {x.dim()}; reshape it")


def fake(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _valid(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) < cu_seqlens[-1]


def reference(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    kept = torch.where(_valid(x, cu_seqlens)[:, None], wide, 0.0)
    return (2 * kept).to(x.dtype).contiguous(), (kept * kept).sum(-1)


def samples(device: torch.device) -> Iterator[Sample]:
    for name, rows, columns, dtype, ends, compiled in (
        ("fp32", 6, 5, torch.float32, [0, 2, 4], True),
        ("fp32, longer", 9, 8, torch.float32, [0, 3, 3, 7], False),
        ("bf16, int64 metadata", 8, 16, torch.bfloat16, [0, 5], True),
        ("no valid row", 4, 3, torch.float32, [0, 0], False),
    ):
        integer = torch.int64 if "int64" in name else torch.int32
        cu = torch.tensor(ends, dtype=integer, device=device)
        x = torch.randn(rows, columns, device=device).to(dtype)
        replays = ({"cu_seqlens": torch.full_like(cu, rows)}, {"cu_seqlens": torch.zeros_like(cu)}) if ends[-1] else ()
        yield Sample(name, (x, cu), replays, compile=compiled)


def refusals(device: torch.device) -> Iterator[Refusal]:
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    text = "double_rows: x must have 2 dimensions [T, D], got 1; reshape it"
    yield Refusal("one dimension", (torch.zeros(4, device=device), cu), ValueError, text)


def cost(x: Tensor, cu_seqlens: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes + 4 * x.shape[0], flops=3 * x.numel())


def benches(device: torch.device) -> Iterator[Bench]:
    cu = torch.tensor([0, 4096], dtype=torch.int32, device=device)
    yield Bench("8192 x 256", lambda: (torch.randn(8192, 256, device=device), cu), reference)


def padding(x: Tensor, cu_seqlens: Tensor) -> Padding:
    rows = PadRows(~_valid(x, cu_seqlens))
    return Padding({"x": rows}, (rows, rows))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor, None]:
    return torch.ops.third_party.double_rows_grad(g, s, *ctx.saved_tensors), None


GOOD = OpSpec(
    name="double_rows",
    schema="(Tensor x, Tensor cu_seqlens) -> (Tensor y, Tensor squares)",
    check=check,
    fake=fake,
    reference=reference,
    cuda="kernels_third_party:double_rows",
    samples=samples,
    refusals=refusals,
    cost=cost,
    benches=benches,
    summary="twice each row and its sum of squares",
    setup_context=setup_context,
    backward=backward,
    padding=padding,
    pads_zeroed=True,
)


# --- its backward, an op as well -------------------------------------------------------------------------------------------------


def check_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> None:
    if g is None and s is None:
        raise ValueError("double_rows_grad: g or s must be given, got neither; leave the call out")


def fake_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def reference_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    if g is not None:
        total = total + 2 * g.to(wide)
    if s is not None:
        total = total + 2 * s[:, None] * x.to(wide)
    return torch.where(_valid(x, cu_seqlens)[:, None], total, 0.0).to(x.dtype).contiguous()


def samples_grad(device: torch.device) -> Iterator[Sample]:
    for sample in samples(device):
        x, cu = sample.args
        g, s = torch.randn_like(x), torch.randn(x.shape[0], device=device)
        yield Sample(sample.name, (g, s, x, cu), sample.replays, sample.compile)
        if sample.name == "fp32":
            yield Sample("only y", (g, None, x, cu))
            yield Sample("only squares", (None, s, x, cu))


def refusals_grad(device: torch.device) -> Iterator[Refusal]:
    x, cu = torch.zeros(4, 2, device=device), torch.tensor([0, 2], dtype=torch.int32, device=device)
    text = "double_rows_grad: g or s must be given, got neither; leave the call out"
    yield Refusal("no gradient", (None, None, x, cu), ValueError, text)


def cost_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes)


def benches_grad(device: torch.device) -> Iterator[Bench]:
    def make() -> tuple[Any, ...]:
        x = torch.randn(8192, 256, device=device)
        return torch.randn_like(x), None, x, torch.tensor([0, 4096], dtype=torch.int32, device=device)

    yield Bench("8192 x 256", make, reference_grad)


def padding_grad(g: Tensor | None, s: Tensor | None, x: Tensor, cu_seqlens: Tensor) -> Padding:
    rows = PadRows(~_valid(x, cu_seqlens))
    given = {name: rows for name, tensor in (("g", g), ("s", s), ("x", x)) if tensor is not None}
    return Padding(given, (rows,))


GOOD_GRAD = OpSpec(
    name="double_rows_grad",
    schema="(Tensor? g, Tensor? s, Tensor x, Tensor cu_seqlens) -> Tensor",
    check=check_grad,
    fake=fake_grad,
    reference=reference_grad,
    cuda="kernels_third_party:double_rows_grad",
    samples=samples_grad,
    refusals=refusals_grad,
    cost=cost_grad,
    benches=benches_grad,
    summary="gradient of double_rows",
    padding=padding_grad,
    pads_zeroed=True,
)

register(GOOD_GRAD, REGISTRY)
register(GOOD, REGISTRY)
