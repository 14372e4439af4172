"""The op that a check looks at, and how its arguments are taken apart.

A check is a function of an `OpUnderTest`. It returns when the op holds, raises `CheckFailed(reason)` when it does not, and
`NotRun(reason)` when it cannot tell on this machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thdops.registry import OpSpec, Padding, PadRows, Registry, Sample, load_launcher

_SEED = 1  # not that of a check, whose own numbers, such as incoming gradients, would be those of the samples


class CheckFailed(Exception):
    """The op does not hold what it promises; the reason is for a person."""


class NotRun(Exception):
    """This machine cannot tell: no GPU, or a package that is missing."""


Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Slot:
    """One tensor among the arguments of a call: an argument, or an item of a `Tensor[]` argument."""

    argument: str
    position: int
    item: int | None
    tensor: Tensor

    @property
    def label(self) -> str:
        """How a message names it: `x`, `tensors[1]`."""
        return self.argument if self.item is None else f"{self.argument}[{self.item}]"

    def replaced(self, args: Arguments, tensor: Tensor) -> Arguments:
        """`args` with another tensor in this slot."""
        new: Any = tensor
        if self.item is not None:
            new = list(args[self.position])
            new[self.item] = tensor
        return (*args[: self.position], new, *args[self.position + 1 :])


@dataclass(frozen=True)
class OpUnderTest:
    """An op of a registry, on a device."""

    registry: Registry
    spec: OpSpec
    device: torch.device

    @property
    def op(self) -> torch._ops.OpOverload:
        """`torch.ops.<namespace>.<name>.default`."""
        return self.registry.op(self.spec.name)

    @property
    def schema(self) -> torch._C.FunctionSchema:
        """The parsed schema."""
        return self.registry.schema(self.spec.name)

    @property
    def argument_names(self) -> list[str]:
        """In the schema's order."""
        return [a.name for a in self.schema.arguments]

    def samples(self) -> list[Sample]:
        """Fresh sample calls on the device, the same whenever they are asked for."""
        with torch.random.fork_rng():
            torch.manual_seed(_SEED)
            return list(self.spec.samples(self.device))

    def compile_samples(self) -> list[Sample]:
        """The samples that are worth a compilation."""
        return [s for s in self.samples() if s.compile]

    def launcher(self) -> Callable[..., Any]:
        """The function behind the CUDA kernel; also serves CPU tensors when Triton interprets."""
        return load_launcher(self.spec, self.schema)

    def slots(self, args: Arguments) -> list[Slot]:
        """Every tensor of a call."""
        found: list[Slot] = []
        for position, (name, arg) in enumerate(zip(self.argument_names, args, strict=False)):
            if isinstance(arg, Tensor):
                found.append(Slot(name, position, None, arg))
            elif isinstance(arg, (list, tuple)):
                found += [Slot(name, position, i, t) for i, t in enumerate(arg) if isinstance(t, Tensor)]
        return found

    def written(self, args: Arguments) -> list[Tensor]:
        """The tensors that the op mutates."""
        return [s.tensor for s in self.slots(args) if s.argument in self.spec.mutates]

    def call(self, function: Callable[..., Any], args: Arguments) -> tuple[Tensor, ...]:
        """What `function` computes: its results, or, if the op mutates, what it wrote into copies."""
        if not self.spec.mutates:
            return as_tuple(function(*args))
        args = copied(args)
        function(*args)
        return tuple(self.written(args))

    def truth(self, args: Arguments) -> tuple[Tensor, ...]:
        """The reference in fp64 on CPU."""
        with torch.no_grad():
            return self.call(self.spec.reference, in_fp64(args))

    @property
    def eager(self) -> Callable[..., Any]:
        """What a kernel's error is measured against."""
        return self.spec.eager or self.spec.reference

    def padding(self, args: Arguments) -> Padding:
        """Where padding stands in a call; nowhere if the spec has none."""
        return Padding() if self.spec.padding is None else self.spec.padding(*args)

    def padding_slots(self, args: Arguments) -> list[tuple[Slot, PadRows]]:
        """The tensors among the arguments that have padding rows, with the rows."""
        inputs = self.padding(args).inputs
        found = []
        for slot in self.slots(args):
            rows = inputs.get(slot.argument)
            if isinstance(rows, list):
                rows = rows[slot.item or 0]
            if rows is not None:
                found.append((slot, rows))
        return found

    def padding_of_outputs(self, args: Arguments, outputs: int) -> list[PadRows | None]:
        """The padding rows of each output, None where it has none."""
        rows = list(self.padding(args).outputs)
        return rows + [None] * (outputs - len(rows))

    def output_label(self, index: int) -> str:
        """How a message names an output: the schema's name, `output 1`, or the tensor that is written."""
        if self.spec.mutates:
            return f"written tensor {index}"
        returns = self.schema.returns
        name = returns[index].name if index < len(returns) else ""
        return name or (f"output {index}" if len(returns) > 1 else "the output")

    def rounded_to(self, name: str, dtype: torch.dtype, args: Arguments) -> torch.dtype:
        """What dtype a result, or the gradient of an argument, is rounded to in effect: its own, or the coarsest of the call."""
        if name not in self.spec.coarse:
            return dtype
        floats = [s.tensor.dtype for s in self.slots(args) if s.tensor.is_floating_point()]
        return max(floats, key=lambda d: torch.finfo(d).eps, default=dtype)

    def has_metadata(self) -> bool:
        """Whether an argument is a `cu_seqlens`."""
        return any(is_metadata(name) for name in self.argument_names)


def is_metadata(argument: str) -> bool:
    """Whether an argument of this name is a `cu_seqlens`."""
    return argument.startswith("cu_seqlens")


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """The tensors that an op returned."""
    if result is None:
        return ()
    if isinstance(result, Tensor):
        return (result,)
    return tuple(result)


def map_tensors(function: Callable[[Tensor], Tensor], args: Arguments) -> Arguments:
    """`args` with `function` applied to every tensor."""
    return tuple(
        function(a)
        if isinstance(a, Tensor)
        else [function(t) if isinstance(t, Tensor) else t for t in a]
        if isinstance(a, (list, tuple))
        else a
        for a in args
    )


def copied(args: Arguments) -> Arguments:
    """Copies that keep strides, offsets and which tensors share memory."""
    return copy.deepcopy(args)


def in_fp64(args: Arguments) -> Arguments:
    """Every floating-point tensor as fp64, everything on CPU."""
    return map_tensors(lambda t: t.detach().cpu().double() if t.is_floating_point() else t.cpu(), copied(args))


def with_contents(case: OpUnderTest, args: Arguments, contents: Mapping[str, Any]) -> Arguments:
    """`args` with other contents for some arguments, as a replay has them."""
    new = list(args)
    for name, value in contents.items():
        new[case.argument_names.index(name)] = value
    return copied(tuple(new))


def row_mask(rows: PadRows, tensor: Tensor) -> Tensor:
    """True on the padding rows, in the shape of `tensor`."""
    shape = [1] * tensor.dim()
    shape[rows.dim] = -1
    return rows.mask.to(tensor.device).view(shape).expand(tensor.shape)


class naming:
    """Puts the sample's name before the reason of a `CheckFailed`. Any other exception becomes one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CheckFailed):
            raise CheckFailed(f"sample {self.name!r}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, NotRun):
            raise CheckFailed(f"sample {self.name!r}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An exception on one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else '(no text)'}"
