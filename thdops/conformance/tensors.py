"""Comparing tensors exactly and within a tolerance, and other tensors with the same values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thdops.conformance.case import CheckFailed

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, as integers: NaNs compare, and -0.0 is not +0.0."""
    return tensor.detach().view(_SAME_SIZE[tensor.element_size()])


def place(differs: Tensor) -> str:
    """The first True, as an index: `[3, 0]`."""
    return str(torch.nonzero(differs)[0].tolist())


def same_bits(what: str, actual: Tensor, expected: Tensor, ignore: Tensor | None = None) -> None:
    """Raise `CheckFailed` unless both have the same bits, except where `ignore` is True."""
    same_kind(what, actual, expected)
    differs = bits(actual) != bits(expected)
    if ignore is not None:
        differs = differs & ~ignore
    if differs.any():
        first = tuple(torch.nonzero(differs)[0].tolist())
        values = f"{_number(actual[first])} stands for {_number(expected[first])}"
        raise CheckFailed(f"{what}: {int(differs.sum())} elements differ, at {list(first)} {values}")


def same_kind(what: str, actual: Tensor, expected: Tensor) -> None:
    """Raise `CheckFailed` unless shape and dtype agree."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise CheckFailed(f"{what}: {kind(actual)}, should be {kind(expected)}")


def kind(tensor: Tensor) -> str:
    """`float32 [8, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def error_of(actual: Tensor, truth: Tensor) -> float:
    """The largest error where both are finite; 0 for integers."""
    if not actual.is_floating_point() or actual.numel() == 0:
        return 0.0
    a, t = actual.detach().double().cpu(), truth.detach().double().cpu()
    return float(torch.where(a.isfinite() & t.isfinite(), (a - t).abs(), 0.0).max())


def as_good_as(eager: Tensor, truth: Tensor) -> float:
    """The error that is allowed beside `eager`'s: twice its largest. Two codes of equal quality round in other places, and the
    largest of a few hundred rounding errors is itself a draw; a wrong term is orders of magnitude larger."""
    return 2 * error_of(eager, truth)


def close(
    what: str,
    actual: Tensor,
    truth: Tensor,
    error: float,
    roundings: float,
    across_rows: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise `CheckFailed` unless `actual` is `truth` up to `error` and `roundings` roundings of `dtype` (None: its own).

    A rounding is measured on the largest element of a row (the last dimension), since that is what a sum over it was rounded at;
    with `across_rows` on the largest of all, since a gradient sums over rows too. Integers and bools must be equal; so must
    infinities and NaNs.
    """
    if actual.shape != truth.shape:
        raise CheckFailed(f"{what}: shape {list(actual.shape)}, should be {list(truth.shape)}")
    if actual.numel() == 0:
        return
    if not actual.is_floating_point():
        off = actual.cpu() != truth.cpu()
        allowed = torch.zeros(())
    else:
        a, t = actual.detach().double().cpu(), truth.detach().double().cpu()
        finite = t.isfinite()
        size = torch.where(finite, t.abs(), 0.0)
        size = size.max() if across_rows or size.dim() == 0 else size.amax(-1, keepdim=True)
        allowed = error + roundings * torch.finfo(dtype or actual.dtype).eps * size
        same = torch.where(finite, (a - t).abs() <= allowed, (a == t) | (a.isnan() & t.isnan()))
        off = ~same
    if off.any():
        first = tuple(torch.nonzero(off)[0].tolist())
        allowance = float(allowed.expand(off.shape)[first])
        raise CheckFailed(
            f"{what}: {int(off.sum())} of {off.numel()} elements are off, at {list(first)} {_number(actual[first])} stands for"
            f" {_number(truth[first])} (allowed error {allowance:.2g})"
        )


def _number(scalar: Tensor) -> str:
    value = scalar.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def restrided(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values under other strides: dimensions reversed in memory, every second element, rows farther apart."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return
    detached = tensor.detach()
    if tensor.dim() > 1:
        order = list(reversed(range(tensor.dim())))
        yield "transposed", detached.permute(order).contiguous().permute(order)
        wider = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
        yield "stride-padded", _filled(wider[..., 1:-2], detached)
    doubled = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    yield "sliced", _filled(doubled[..., ::2], detached)


def _filled(view: Tensor, values: Tensor) -> Tensor:
    # copy_ serves every dtype, fp8 included, through the bit patterns.
    bits(view).copy_(bits(values))
    return view


def poisoned(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """`tensor` with `value` where `mask` is True; integers hold their largest value there, bools are flipped.

    Keeps strides and alignment: a kernel may sum in another order where it cannot load as wide.
    """
    if tensor.dtype == torch.bool:
        poison = ~tensor
    elif tensor.is_floating_point():
        poison = torch.full(tensor.shape, value, dtype=torch.float32, device=tensor.device).to(tensor.dtype)
    else:
        poison = torch.full_like(tensor, torch.iinfo(tensor.dtype).max)
    values = torch.where(mask, poison, tensor.detach())
    if 0 in tensor.stride():
        return values
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    buffer = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    return _filled(buffer.as_strided(tensor.shape, tensor.stride(), offset), values)
