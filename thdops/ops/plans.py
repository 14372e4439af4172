"""What follows from the kind of a call, found once for all calls of that kind.

Imports no Triton: an op that may run on another library plans, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Blank", "Plans", "meta", "number"]

_KEPT = 1024  # callers whose every batch has another shape must not fill the memory: attention's plans take up to 27 KB each

number: Callable[[], int] = itertools.count().__next__
"""A number that nobody else has: a plan's, or a planned launch's."""


class Plans:
    """What a launcher derives from a call, made once for every kind of call and found again for little.

    A kind is the dtype, device, shape, strides and 16-byte alignment of each tensor, inside tuples too, and every other argument as
    it is. `make` takes the arguments; it may check them, too. A plan comes with a number that no other plan has, which serves
    `launch_as` for a key: all that specialises a kernel follows from the kind, if what the launcher allocates is always aligned
    alike.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._known: dict[Any, tuple[int, Any]] = {}

    def __call__(self, *args: Any) -> tuple[int, Any]:
        kind = _kind(args)
        plan = self._known.get(kind)
        if plan is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            plan = self._known[kind] = (number(), self._make(*args))
        return plan


def _kind(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([_described(a) if isinstance(a, Tensor) else _kind(a) if isinstance(a, tuple) else a for a in args])


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0


class Blank:
    """Tensors to allocate in every call of a kind: as `tensors` are, which may be meta. (`empty` costs half as much again.)"""

    def __init__(self, *tensors: Tensor) -> None:
        self._kinds = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]

    def __call__(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple([torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._kinds])


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor without memory, for `Blank`."""
    return torch.empty(shape, dtype=dtype, device="meta")
