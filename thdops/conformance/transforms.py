"""Checks of function transforms and distributed tensors: they work, or refuse in words that say what refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thdops.conformance.case import Arguments, CheckFailed, NotRun, OpUnderTest, as_tuple, copied, describe, map_tensors, naming
from thdops.conformance.tensors import close

_RANKS = 2


def check_vmap(case: OpUnderTest) -> None:
    """`torch.func.vmap` over every tensor argument gives what a loop gives, or raises an error that speaks of vmap or the op."""
    for sample in case.compile_samples()[:1]:
        with naming(sample.name), _no_fallback_warning():
            _vmap_is_loop(case, sample.args)


@contextlib.contextmanager
def _no_fallback_warning() -> Iterator[None]:
    """A loop is what is wanted; torch would print that it is slow."""
    core: Any = torch._C
    core._functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        core._functorch._set_vmap_fallback_warning_enabled(True)


def _vmap_is_loop(case: OpUnderTest, args: Arguments) -> None:
    slots = case.slots(args)
    dims = tuple(0 if isinstance(a, (Tensor, list, tuple)) else None for a in args)
    stacked = map_tensors(lambda t: torch.stack([t, t.flip(0) if t.is_floating_point() and t.dim() else t]), args)
    each = [map_tensors(lambda t, i=i: t[i].clone(), stacked) for i in range(2)]
    try:
        if case.spec.mutates:
            torch.func.vmap(case.op, in_dims=dims)(*stacked)
            results = tuple(s.tensor for s in case.slots(stacked) if s.argument in case.spec.mutates)
        else:
            results = as_tuple(torch.func.vmap(case.op, in_dims=dims)(*stacked))
    except Exception as error:
        _clear(case, "vmap", error)
        return
    loops = [case.call(case.op, a) for a in each]
    for i, result in enumerate(results):
        expected = torch.stack([loop[i] for loop in loops])
        close(f"{case.output_label(i)} under vmap over {len(slots)} tensors", result, expected, 0.0, 1.0)


def _clear(case: OpUnderTest, what: str, error: Exception) -> None:
    text = str(error)
    if not (what.lower() in text.lower() or case.spec.name in text):
        raise CheckFailed(f"{what} refuses without saying what: {describe(error)}") from error


def check_dtensor(case: OpUnderTest) -> None:
    """Distributed tensors, replicated or cut along rows: the right result, or an error that names the op. Two pretended ranks."""
    for sample in case.compile_samples()[:1]:
        with naming(sample.name), _pretended_mesh(case.device.type) as mesh:
            for cut in (False, True):
                _distributed(case, sample.args, mesh, cut)


def _distributed(case: OpUnderTest, args: Arguments, mesh: Any, cut: bool) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def spread(tensor: Tensor) -> Tensor:
        rows = cut and tensor.dim() > 0 and tensor.is_floating_point() and tensor.shape[0] % _RANKS == 0
        local = tensor.chunk(_RANKS)[0] if rows else tensor
        return DTensor.from_local(local, mesh, [Shard(0) if rows else Replicate()], run_check=False)

    expected = case.call(case.op, args)
    spread_args = map_tensors(spread, copied(args))
    spread_tensors: list[Any] = [s.tensor for s in case.slots(spread_args)]
    if cut and not any(p.is_shard() for t in spread_tensors for p in t.placements):
        return
    try:
        results = as_tuple(case.op(*spread_args))
        results = tuple(case.written(spread_args)) if case.spec.mutates else results
    except Exception as error:
        _clear(case, "DTensor", error)
        return
    for i, (result, plain) in enumerate(zip(results, expected, strict=True)):
        label = f"{case.output_label(i)} of {'row-cut' if cut else 'replicated'} DTensors"
        if not isinstance(result, DTensor) or result.shape != plain.shape:
            raise CheckFailed(f"{label}: {type(result).__name__} {list(result.shape)}, should be a DTensor {list(plain.shape)}")
        local = _first_part(plain, result.placements)
        if local is not None:
            if result.to_local().shape != local.shape:
                raise CheckFailed(f"{label}: this rank holds {list(result.to_local().shape)}, should hold {list(local.shape)}")
            if not cut:  # what other ranks hold is pretended, so values can be told only where none is needed
                close(label, result.to_local(), local, 0.0, 1.0)


def _first_part(tensor: Tensor, placements: Sequence[Any]) -> Tensor | None:
    """What rank 0 holds of a tensor; None where it is a partial sum."""
    for placement in placements:
        if placement.is_partial():
            return None
        if placement.is_shard():
            tensor = tensor.chunk(_RANKS, placement.dim)[0]
    return tensor


@contextlib.contextmanager
def _pretended_mesh(device_type: str) -> Iterator[Any]:
    """A mesh of two ranks of which only this one exists: enough to see how an op takes a DTensor."""
    import torch.distributed as dist

    if not dist.is_available():
        raise NotRun("torch.distributed is not available")
    if dist.is_initialized():
        raise NotRun("a process group is already in use")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    try:
        yield init_device_mesh(device_type, (_RANKS,))
    finally:
        dist.destroy_process_group()
