"""Declare an op once: `OpSpec`, `Registry` and `register()`.

This is the only file that defines, implements or registers anything through `torch.library`. What every op needs is built in
here, once:

- the arguments are checked before anything is written, by the same function in eager mode and while tracing;
- the CPU kernel (the reference) runs under `no_grad` and outside autocast, so it neither records a graph nor casts where the CUDA
  kernel would not;
- the CUDA launcher is imported on first use and runs on the device of its first tensor;
- an op that mutates refuses tensors that require grad (in grad mode) and bumps the version of what it wrote;
- an op without a backward formula raises when a gradient reaches it: an opaque op would return zeros silently, which is how a
  second derivative of a backward op goes wrong unseen;
- forward-mode AD is refused: the dispatcher would drop the tangent silently.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import supports_tensorlist
from torch._library.utils import is_tensorlist_like_type
from torch.autograd import forward_ad

from thdops.flop_counter import register_formula

__all__ = [
    "Bench",
    "Contest",
    "Cost",
    "OpSpec",
    "Outcome",
    "PadRows",
    "Padding",
    "Refusal",
    "Registry",
    "Sample",
    "Unserved",
    "register",
]

_LAUNCHER = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


@dataclass(frozen=True)
class PadRows:
    """The padding rows of one tensor: `mask` (bool, [T], True = padding) runs along `dim`; an output holds `value` there."""

    mask: Tensor
    dim: int = 0
    value: float = 0.0


@dataclass(frozen=True)
class Padding:
    """Where padding stands in one call.

    `inputs` maps an argument's name to its padding rows (a list of them for a `Tensor[]` argument); what stands there must not
    matter. `outputs` holds one entry per output, None where it has no padding rows; for an op that mutates, one entry per tensor
    that it writes.
    """

    inputs: Mapping[str, PadRows | list[PadRows]] = field(default_factory=dict)
    outputs: tuple[PadRows | None, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One legal call.

    `args` are positional, in the order of the schema, defaults included. `replays` are other contents for some arguments
    (by name; a list for a `Tensor[]` argument), same shapes and dtypes: what a captured graph is replayed with.
    `compile` marks the few samples that are worth a compilation.
    """

    name: str
    args: tuple[Any, ...]
    replays: tuple[Mapping[str, Any], ...] = ()
    compile: bool = False


@dataclass(frozen=True)
class Refusal:
    """One illegal call: the exception it must raise, in eager mode and under a fake tensor mode alike, and the whole text."""

    name: str
    args: tuple[Any, ...]
    error: type[Exception]
    text: str


@dataclass(frozen=True)
class Cost:
    """What one call must do at least: bytes read and written (each once) and floating-point operations."""

    read: float = 0.0
    written: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Bench:
    """One call worth timing.

    `make` builds the arguments (on the device it was asked for). `baseline` takes the same arguments and does what people write
    without thdops; it is timed eagerly and under `torch.compile`, and its result is what the op's is held against first.
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    baseline: Callable[..., Any]


class Unserved(Exception):
    """A provider of a contest cannot serve its call, or is not installed; the text says why."""


@dataclass(frozen=True)
class Contest:
    """One call worth timing beside other implementations of it, installed or not.

    `make` builds the arguments. A provider prepares a call of them that is timed alone, or raises `Unserved`; the first one is
    what the others are compared with. `held_against` gives (got, expected) of a provider's results, all of them or a sample: a
    time counts only where they agree. `subject` is for the op's own use in `write_table`.
    """

    name: str
    subject: Any
    make: Callable[[], tuple[Any, ...]]
    providers: Mapping[str, Callable[..., Callable[[], Any]]]
    held_against: Callable[[tuple[Any, ...], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
    cost: Callable[..., Cost]


@dataclass(frozen=True)
class Outcome:
    """What a provider of a contest took, in microseconds."""

    contest: Contest
    provider: str
    us: float


@dataclass(frozen=True)
class OpSpec:
    """Everything about one op. Pieces that disagree are refused by `register()`.

    `check`, `fake`, `reference`, `eager`, `traced`, `flops` and the CUDA launcher all take exactly the schema's arguments, by the
    same names, in the same order, with the same defaults. `check` raises `TypeError` or `ValueError`; `fake` allocates what the
    launcher allocates. `reference` is eager PyTorch on any device and dtype (fp64 included), differentiable by autograd, and the
    specification. `cuda` is "module:function", imported when it is first called.
    """

    name: str
    schema: str
    check: Callable[..., None]
    fake: Callable[..., Any]
    reference: Callable[..., Any]
    cuda: str
    samples: Callable[[torch.device], Iterable[Sample]]
    refusals: Callable[[torch.device], Iterable[Refusal]]
    cost: Callable[..., Cost]
    """The cost of one call, from its arguments. Runs on the host, outside any timed region; may read metadata."""
    benches: Callable[[torch.device], Iterable[Bench]]
    summary: str = ""
    eager: Callable[..., Any] | None = None
    """What ordinary code in the op's own dtype computes, where `reference` keeps more precision in between than that. The error
    of a kernel is measured against its error; None: against the reference's."""
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    traced: Callable[..., None] | None = None
    """Sees the arguments of every call as autograd does, before functionalization unwraps those of a traced one; may refuse."""
    padding: Callable[..., Padding] | None = None
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)
    roundings: float = 1.0
    """How many roundings of the output's dtype the kernel may be off, beyond the error of the low-precision reference."""
    coarse: tuple[str, ...] = ()
    """Results, and arguments whose gradients, are sums over what was rounded to the operands' dtype, whatever dtype they have
    themselves (a sink's gradient in fp32, from bf16 rows): their roundings are those of the coarsest operand."""
    mutates: tuple[str, ...] = ()
    no_gradient: tuple[str, ...] = ()
    """Floating-point arguments and (named in the schema) results that have no gradient by contract, such as a token count."""
    contests: Callable[[torch.device], Iterable[Contest]] | None = None
    """For `bench --peers`: the op beside other implementations of it."""
    write_table: Callable[[torch.device, Sequence[Outcome], Mapping[str, str]], Path] | None = None
    """For `bench --peers --write-table`: keep what the contests found, with its circumstances, where the op chooses by it."""
    launcher_checks: bool = False
    """The CUDA launcher calls `check` itself, once per kind of arguments, where checking at every call would cost too much."""
    flops: Callable[..., int] | None = None
    """What `torch.utils.flop_counter` counts for a call, from its arguments; it may be counted under fake tensors and capture."""
    save: bool = False
    """Selective activation checkpointing should keep the results: they take long to compute and little to hold."""
    deterministic: bool = True
    graph_safe: bool = True
    pads_zeroed: bool = False
    backends: tuple[str, ...] = ("triton",)
    architectures: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities (sm_XX) that every Triton kernel of this op compiles for ahead of time."""


class Registry:
    """An ordered set of registered ops in one namespace. It lives as long as any of its ops can be called."""

    def __init__(self, namespace: str) -> None:
        if not namespace.isidentifier():
            raise ValueError(f"Registry: namespace must be a Python identifier, got {namespace!r}; use a name such as 'my_ops'")
        self.namespace = namespace
        self.library = torch.library.Library(namespace, "FRAGMENT")
        self._specs: dict[str, OpSpec] = {}

    def __iter__(self) -> Iterator[OpSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __getitem__(self, name: str) -> OpSpec:
        if name not in self._specs:
            known = ", ".join(self._specs) or "none"
            raise KeyError(f"no op named {name!r} in registry {self.namespace!r}; registered: {known}")
        return self._specs[name]

    def op(self, name: str) -> torch._ops.OpOverload:
        """The callable `torch.ops.<namespace>.<name>.default`."""
        return getattr(getattr(torch.ops, self.namespace), self[name].name).default

    def schema(self, name: str) -> torch._C.FunctionSchema:
        """The parsed schema of an op."""
        return self.op(name)._schema


def register(spec: OpSpec, registry: Registry) -> torch._ops.OpOverload:
    """Define `spec` in `registry` and bind its CPU, CUDA, fake and autograd kernels.

    Raises `ValueError` and registers nothing when the pieces of the spec disagree. Returns the op.
    """
    qualified = f"{registry.namespace}::{spec.name}"
    schema = _checked_schema(qualified, spec, registry)
    library = registry.library
    try:
        library.define(f"{spec.name}{spec.schema}", tags=spec.tags)
    except RuntimeError as error:  # another registry, or another library, has an op of this name
        raise ValueError(f"register({qualified}): torch refuses the definition: {str(error).strip().splitlines()[0]}") from error
    library.impl(spec.name, _cpu_kernel(spec, schema), "CPU")
    library.impl(spec.name, _cuda_kernel(spec, schema), "CUDA")
    torch.library.register_fake(qualified, _fake_kernel(spec, schema), lib=library)
    registry._specs[spec.name] = spec
    op = registry.op(spec.name)
    if not spec.mutates:
        library.impl(spec.name, _autograd_kernel(spec, op), "Autograd", with_keyset=True)
    if spec.flops is not None:
        register_formula(op._overloadpacket, spec.flops)
    # torch.ops keeps the op, so the op keeps its registry: calling an op whose library is gone would crash the process.
    vars(op)["thdops_registry"] = registry
    return op


# --- agreement of the pieces ----------------------------------------------------------------------


def _checked_schema(qualified: str, spec: OpSpec, registry: Registry) -> torch._C.FunctionSchema:
    def disagree(what: str) -> ValueError:
        return ValueError(f"register({qualified}): {what}")

    if spec.name in registry:
        raise disagree("the name is taken; registering twice is an error, choose another name")
    if not spec.name.isidentifier():
        raise disagree("the name must be a Python identifier without an overload; choose another name")
    try:
        schema = torch._C.parse_schema(qualified + spec.schema)
    except RuntimeError as error:
        raise disagree(f"schema {spec.schema!r} does not parse: {str(error).strip().splitlines()[0]}") from error

    if schema.overload_name:
        raise disagree(f"the schema must have no overload, got {schema.overload_name!r}; register one op per signature")
    keyword_only = [a.name for a in schema.arguments if a.kwarg_only]
    if keyword_only:
        raise disagree(f"arguments must be positional in the schema, {keyword_only} are keyword-only; leave out the '*'")
    if not any(str(a.type) in ("Tensor", "List[Tensor]") for a in schema.arguments):
        raise disagree("a schema needs a tensor that is always given, or no call of it has a device; add one")
    maybe_written = [a.name for a in schema.arguments if a.alias_info is not None and "Optional" in str(a.type)]
    if maybe_written:
        raise disagree(f"tensors that are written must always be given, {maybe_written} are optional; leave out the '?'")
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if written != tuple(spec.mutates):
        raise disagree(f"the schema writes {list(written)} but the spec says mutates={list(spec.mutates)}; make them equal")
    if written and schema.returns:
        raise disagree("an op that mutates must return (), else functionalization copies what it returns")
    if any(r.alias_info is not None for r in schema.returns):
        raise disagree("an op must not return an alias of its input; use an autograd.Function around an op instead")
    if (spec.backward is None) != (spec.setup_context is None):
        raise disagree("backward and setup_context come together; give both or neither")
    if written and spec.backward is not None:
        raise disagree("an op that mutates cannot have a backward formula; offer a functional op beside it")
    if written and spec.traced is not None:
        raise disagree("traced is not called for an op that mutates; leave it out")
    unknown = sorted(set(spec.no_gradient) - {a.name for a in (*schema.arguments, *schema.returns)})
    if unknown:
        raise disagree(f"no_gradient names {unknown}, which the schema has neither as an argument nor as a result")
    if spec.pads_zeroed and spec.padding is None:
        raise disagree("pads_zeroed is promised but the spec has no padding function, so nothing could check it")
    if not _LAUNCHER.match(spec.cuda):
        raise disagree(f"cuda must read 'module:function', got {spec.cuda!r}")
    optional = [piece for piece in ("eager", "traced", "flops") if getattr(spec, piece)]
    for piece in ("check", "fake", "reference", *optional):
        difference = _signature_difference(schema, getattr(spec, piece))
        if difference:
            raise disagree(f"{piece} and schema disagree: {difference}")
    return schema


def _signature_difference(schema: torch._C.FunctionSchema, function: Callable[..., Any]) -> str:
    """Why `function` cannot take the schema's arguments, or "".

    The dispatcher leaves out trailing arguments that equal their default, so defaults must agree too.
    """
    parameters = inspect.signature(function).parameters
    wanted = [a.name for a in schema.arguments]
    if list(parameters) != wanted:
        return f"arguments are {list(parameters)}, the schema has {wanted}"
    for argument in schema.arguments:
        if parameters[argument.name].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            return f"argument {argument.name!r} cannot be given by position here"
        default = parameters[argument.name].default
        has_default = default is not inspect.Parameter.empty
        if has_default != argument.has_default_value() or (has_default and default != argument.default_value):
            stated = repr(argument.default_value) if argument.has_default_value() else "no default"
            here = repr(default) if has_default else "no default"
            return f"argument {argument.name!r} has {stated} in the schema and {here} here"
    return ""


# --- kernels --------------------------------------------------------------------------------------


def _cpu_kernel(spec: OpSpec, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    guard, bump = _mutation_hooks(spec, schema)

    def kernel(*args: Any) -> Any:
        spec.check(*args)
        guard(args)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            result = spec.reference(*args)
        bump(args)
        return result

    return kernel


def _cuda_kernel(spec: OpSpec, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    guard, bump = _mutation_hooks(spec, schema)
    check = _unchecked if spec.launcher_checks else spec.check
    launcher: Callable[..., Any] | None = None

    def kernel(*args: Any) -> Any:
        nonlocal launcher
        check(*args)
        guard(args)
        if launcher is None:
            launcher = load_launcher(spec, schema)
        index = _first_tensor(args).get_device()
        if index == torch._C._cuda_getDevice():
            result = launcher(*args)
        else:
            with torch.cuda.device(index):
                result = launcher(*args)
        bump(args)
        return result

    return kernel


def load_launcher(spec: OpSpec, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    """Import the launcher of an op and hold it against the schema."""
    module, function = spec.cuda.split(":")
    launcher = getattr(importlib.import_module(module), function)
    difference = _signature_difference(schema, launcher)
    if difference:
        raise ValueError(f"{spec.cuda} and the schema of {schema.name} disagree: {difference}")
    return launcher


def _fake_kernel(spec: OpSpec, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    guard, _ = _mutation_hooks(spec, schema)

    def kernel(*args: Any) -> Any:
        spec.check(*args)
        guard(args)
        return spec.fake(*args)

    return kernel


def _autograd_kernel(spec: OpSpec, op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of a functional op under the Autograd key; eager and traced calls both pass through it first."""
    differentiable = _differentiable(spec, op)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        if spec.traced is not None:
            spec.traced(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return differentiable.apply(*args, keyset)
        return _below_autograd(op, keyset, args)

    return kernel


def _below_autograd(op: torch._ops.OpOverload, keyset: torch._C.DispatchKeySet, args: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _differentiable(spec: OpSpec, op: torch._ops.OpOverload) -> Any:
    """The op and its backward formula as an autograd function, which takes a set of dispatch keys behind the op's arguments.

    What `torch.library.register_autograd` makes asks the schema for its arguments once an argument and call, which is most of
    what a call of many arguments then costs the host.
    """
    formula = spec.backward or _no_formula(op)
    setup_context = spec.setup_context or _nothing_to_save
    defaults = [argument.default_value for argument in op._schema.arguments]

    def forward(ctx: Any, *args: Any) -> Any:
        *given, keyset = args
        result = _below_autograd(op, keyset, tuple(given))
        setup_context(ctx, (*given, *defaults[len(given) :]), result)  # the dispatcher left out what equals its default
        return result

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = needed[:-1]  # as many as the op has arguments
        try:
            found = formula(ctx, *grads)
        finally:
            ctx.needs_input_grad = needed
        return (*found, None) if isinstance(found, tuple) else (found, None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(op._opname, (torch.autograd.Function,), members)
    lists = any(is_tensorlist_like_type(a.type) for a in (*op._schema.arguments, *op._schema.returns))
    return supports_tensorlist(function) if lists else function


def _nothing_to_save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _no_formula(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(
            f"{op.name()}: this op has no gradient; it is a backward op or its result is not differentiable, and double backward"
            " is not supported. Detach its inputs, or drop create_graph=True if the second derivative was not wanted."
        )

    return backward


# --- refusals and versions ------------------------------------------------------------------------


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    for arg in args:
        if isinstance(arg, Tensor):
            return arg
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
            return arg[0]
    raise TypeError("no tensor among the arguments: an op needs at least one to know its device")


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _refuse_tangents(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    for tensor in _tensors(args):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{op.name()}: forward-mode AD is not supported, got a tensor with a tangent;"
                " use reverse mode (backward, torch.autograd.grad)"
            )


def _mutation_hooks(
    spec: OpSpec, schema: torch._C.FunctionSchema
) -> tuple[Callable[[tuple[Any, ...]], None], Callable[[tuple[Any, ...]], None]]:
    """(before, after) the writing of an op that mutates; nothing for a functional op.

    `Library.impl` does neither by itself, and without them a gradient is silently wrong. They stand in the backend kernels and
    not under the Autograd key, where a second pass through the dispatcher would double the host cost of an eager call.
    """
    if not spec.mutates:
        return _nothing, _nothing
    order = [a.name for a in schema.arguments]
    positions = tuple(order.index(name) for name in spec.mutates)
    functional = spec.name.rstrip("_")

    def written(args: tuple[Any, ...]) -> list[Tensor]:
        return [t for i in positions for t in ((args[i],) if isinstance(args[i], Tensor) else args[i])]

    def before(args: tuple[Any, ...]) -> None:
        if forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{schema.name}: forward-mode AD is not supported, got a call inside a forward-mode level; use reverse mode"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in written(args)):
            raise ValueError(
                f"{schema.name}: {spec.mutates[0]} must not require grad in grad mode, got a tensor that does;"
                f" call it under torch.no_grad(), or use the functional {functional}, which has a gradient"
            )

    def after(args: tuple[Any, ...]) -> None:
        # A tensor that was saved for backward must be seen as changed. Inference tensors have no version.
        tensors = written(args)
        if torch.is_inference_mode_enabled():
            tensors = [t for t in tensors if not t.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    return before, after


def _nothing(args: tuple[Any, ...]) -> None:
    return None


def _unchecked(*args: Any) -> None:
    return None
