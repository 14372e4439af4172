"""Ops that are wrong on purpose, one for each thing that conformance must see: the third-party op with one piece exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import third_party_op as good
import torch
from torch import Tensor

from thdops.registry import Cost, OpSpec, Padding, PadRows, Refusal, Registry, Sample, register

REGISTRY = Registry("thdops_broken")
_bypass = torch.library.Library("thdops_broken", "IMPL")  # past what register() binds, as a careless project would


def _broken(name: str, base: OpSpec = good.GOOD, **changes: Any) -> None:
    register(replace(base, name=name, **changes), REGISTRY)


def _no_gradient(name: str, **changes: Any) -> None:
    """A broken op whose backward does not matter."""
    _broken(name, setup_context=None, backward=None, **changes)


# --- declarations ----------------------------------------------------------------------------------------------------------------


def _without_replays(device: torch.device) -> Iterator[Sample]:
    for sample in good.samples(device):
        yield replace(sample, replays=())


def _check_that_sees_fakes(x: Tensor, cu_seqlens: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"double_rows: x must have 2 dimensions [T, D], got a {type(x).__name__}; reshape it")


def _refusals_of_tensor(device: torch.device) -> Iterator[Refusal]:
    for refusal in good.refusals(device):
        yield replace(refusal, text="double_rows: x must have 2 dimensions [T, D], got a Tensor; reshape it")


_broken("without_replays", samples=_without_replays, setup_context=good.setup_context, backward=good.backward)
_broken("other_error_from_fake", check=_check_that_sees_fakes, refusals=_refusals_of_tensor)


# --- values ----------------------------------------------------------------------------------------------------------------------


def _rounded(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Computes fp32 in bf16."""
    y, squares = good.reference(x.bfloat16() if x.dtype == torch.float32 else x, cu_seqlens)
    return y.to(x.dtype), squares


_calls = count()


def _jittering(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    y, squares = good.reference(x, cu_seqlens)
    return y, squares * (1 + 1e-6 * (next(_calls) % 2))


def _transposed(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], x.shape[0]).t(), x.new_empty(x.shape[0], dtype=torch.float32)


_no_gradient("rounded", reference=_rounded)
_no_gradient("wrong_kernel", cuda="kernels_third_party:wrong_factor")
_no_gradient("does_not_compile", cuda="kernels_third_party:does_not_compile")
_no_gradient("jittering", reference=_jittering)
_no_gradient("wrong_fake_strides", fake=_transposed)
_no_gradient("ignores_strides", cuda="kernels_third_party:ignores_strides")


# --- memory ----------------------------------------------------------------------------------------------------------------------


def _returns_its_input(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return x, good.reference(x, cu_seqlens)[1]


def _writes_its_input(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    results = good.reference(x, cu_seqlens)
    x.data[cu_seqlens[-1] :] = 0
    return results


def _two_views_of_one_buffer(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    y, squares = good.reference(x.float(), cu_seqlens)
    buffer = torch.cat((y.flatten(), squares))
    return buffer[: y.numel()].view(y.shape).to(x.dtype), buffer[y.numel() :]


def _leaves_a_row_unwritten(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    y, squares = good.reference(x, cu_seqlens)
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out, squares


_no_gradient("returns_its_input", reference=_returns_its_input)
_no_gradient("writes_its_input", reference=_writes_its_input)
_no_gradient("two_views_of_one_buffer", reference=_two_views_of_one_buffer)
_no_gradient("leaves_a_row_unwritten", reference=_leaves_a_row_unwritten)
_no_gradient("reads_beyond", cuda="kernels_third_party:reads_beyond")
_no_gradient("writes_beyond", cuda="kernels_third_party:writes_beyond")


def _raises_on_malformed(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("decreasing")
    return good.reference(x, cu_seqlens)


_no_gradient("raises_on_malformed", reference=_raises_on_malformed)


def _zero_tail_(x: Tensor, cu_seqlens: Tensor) -> None:
    x.data[cu_seqlens[-1] :] = 0  # .data: no version


_IN_PLACE: dict[str, Any] = {
    "schema": "(Tensor(a!) x, Tensor cu_seqlens) -> ()",
    "fake": lambda x, cu_seqlens: None,
    "reference": _zero_tail_,
    "mutates": ("x",),
    "padding": lambda x, cu_seqlens: Padding({"x": PadRows(~good._valid(x, cu_seqlens))}, (PadRows(~good._valid(x, cu_seqlens)),)),
    "cost": lambda x, cu_seqlens: Cost(),
}
_no_gradient("without_version_bump", **_IN_PLACE)
_bypass.impl("without_version_bump", _zero_tail_, "AutogradCPU")
_bypass.impl("without_version_bump", _zero_tail_, "AutogradCUDA")


# --- padding ---------------------------------------------------------------------------------------------------------------------


def _minus_zero(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    y, squares = good.reference(x, cu_seqlens)
    return torch.where(good._valid(x, cu_seqlens)[:, None], y, -0.0), squares


def _multiplies(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    kept = x * good._valid(x, cu_seqlens)[:, None]
    return (2 * kept).contiguous(), (kept.float() ** 2).sum(-1)


_no_gradient("minus_zero", reference=_minus_zero)
_no_gradient("multiplies", reference=_multiplies)


# --- gradients -------------------------------------------------------------------------------------------------------------------


def _drops_squares(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor | None, None]:
    return (None if g is None else torch.ops.third_party.double_rows_grad(g, None, *ctx.saved_tensors)), None


def _assumes_contiguous(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor, None]:
    if g is not None and not g.is_contiguous():
        flat = torch.empty(0, dtype=g.dtype, device=g.device).set_(g.untyped_storage())
        g = flat.repeat(1 + g.numel() // flat.numel())[: g.numel()].view(g.shape)
    return torch.ops.third_party.double_rows_grad(g, s, *ctx.saved_tensors), None


def _silent_second(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor, None]:
    x, cu = ctx.saved_tensors
    with torch.no_grad():
        constant = torch.ops.third_party.double_rows_grad(None, torch.ones_like(x[:, 0]).float() if s is None else s, x, cu)
    linear = 0.0 if g is None else 2 * torch.where(good._valid(x, cu)[:, None], g, 0.0)
    return constant * (s is not None) + linear, None


def _unpacks_twice(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor | None, None]:
    x, _ = ctx.saved_tensors
    return (None if x is None else torch.ops.third_party.double_rows_grad(g, s, *ctx.saved_tensors)), None


_broken("unpacks_twice", backward=_unpacks_twice)
_broken("drops_squares", backward=_drops_squares)
_broken("assumes_contiguous", backward=_assumes_contiguous)
_broken("silent_second", backward=_silent_second)


def _drops_tangents(x: Tensor, cu_seqlens: Tensor) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.thdops_broken.drops_tangents(x, cu_seqlens)


_IN_PLACE_OF_AUTOGRAD = ("AutogradCPU", "AutogradCUDA")
_no_gradient("drops_tangents")
for _key in _IN_PLACE_OF_AUTOGRAD:
    _bypass.impl("drops_tangents", _drops_tangents, _key)


# --- compilation -----------------------------------------------------------------------------------------------------------------


def _fake_that_reads(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    if cu_seqlens[-1] > x.shape[0]:
        raise ValueError("too long")
    return good.fake(x, cu_seqlens)


def _fake_with_sizes_baked_in(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    rows = int(x.shape[0])
    return x.new_empty(rows, x.shape[1]), x.new_empty(rows, dtype=torch.float32)


_no_gradient("fake_reads_values", fake=_fake_that_reads)
_no_gradient("sizes_baked_in", fake=_fake_with_sizes_baked_in)


def _with_count(function: Callable[..., Any]) -> Callable[..., Any]:
    def taking_count(x: Tensor, cu_seqlens: Tensor, count: int) -> Any:
        return function(x, cu_seqlens)

    return taking_count


def _samples_with_count(device: torch.device) -> Iterator[Sample]:
    for sample in good.samples(device):
        yield replace(sample, args=(*sample.args, 7), replays=({"count": 9},))


_no_gradient(
    "count_on_the_host",
    schema="(Tensor x, Tensor cu_seqlens, int count) -> (Tensor y, Tensor squares)",
    samples=_samples_with_count,
    **{piece: _with_count(getattr(good, piece)) for piece in ("check", "fake", "reference", "cost", "padding")},
)
_no_gradient("skips_cuda_graphs", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
_no_gradient("reads_on_the_host", cuda="kernels_third_party:reads_on_the_host")


# --- transforms ------------------------------------------------------------------------------------------------------------------


def _first_of_the_batch(info: Any, in_dims: Any, x: Tensor, cu_seqlens: Tensor) -> Any:
    y, squares = torch.ops.thdops_broken.wrong_vmap(x[0], cu_seqlens[0])
    return (y.expand(info.batch_size, *y.shape), squares.expand(info.batch_size, *squares.shape)), (0, 0)


_no_gradient("wrong_vmap")
torch.library.register_vmap("thdops_broken::wrong_vmap", _first_of_the_batch, lib=_bypass)


def shard_wrongly() -> None:
    """Tell DTensor that `wrong_sharding` gives row shards of what are whole tensors. Once only."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.thdops_broken.wrong_sharding.default)
    def _rule(x: Any, cu_seqlens: Any) -> Any:
        return [([Shard(0), Shard(0)], [Replicate(), Replicate()])]


_no_gradient("wrong_sharding")
