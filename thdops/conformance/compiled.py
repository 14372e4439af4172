"""Checks of `torch.compile` and `torch.export`: one graph, the right values, no recompile, CUDA graphs used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental import _config

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, as_tuple, copied, naming, with_contents
from thdops.conformance.gradients import differentiable, grad_slots, upstream_for, with_grad
from thdops.conformance.tensors import close, same_kind

_REPLAYS = 4  # of a CUDA graph: warm-up, recording, replays


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, before and after."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()


def program(case: OpUnderTest) -> Callable[..., tuple[Tensor, ...]]:
    """A functional program around the op: its results, or what it writes into clones."""
    if not case.spec.mutates:
        return lambda *args: as_tuple(case.op(*args))
    positions = [case.argument_names.index(name) for name in case.spec.mutates]

    def function(*args: Any) -> tuple[Tensor, ...]:
        work = list(args)
        for p in positions:
            work[p] = [t.clone() for t in args[p]] if isinstance(args[p], (list, tuple)) else args[p].clone()
        case.op(*work)
        return tuple(t for p in positions for t in (work[p] if isinstance(work[p], list) else (work[p],)))

    return function


def check_compile(case: OpUnderTest) -> None:
    """Compiles as one graph (aot_eager); results, what is written, and gradients equal eager ones."""
    for sample in case.compile_samples():
        with naming(sample.name), fresh_compiler():
            _compiled_is_eager(case, sample.args, backend="aot_eager")
        if case.spec.mutates:
            with naming(f"{sample.name}, written in place"), fresh_compiler():
                _mutates_compiled(case, sample.args)


def check_inductor(case: OpUnderTest) -> None:
    """The first compile sample compiles with Inductor and gives what eager mode does."""
    for sample in case.compile_samples()[:1]:
        with naming(sample.name), fresh_compiler():
            _compiled_is_eager(case, sample.args, backend="inductor")
        if case.spec.mutates:
            with naming(f"{sample.name}, written in place"), fresh_compiler():
                _mutates_compiled(case, sample.args, backend="inductor")


def _compiled_is_eager(case: OpUnderTest, args: Arguments, backend: str) -> None:
    function = program(case)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    _equal(case, "compiled", compiled(*copied(args)), function(*copied(args)))
    if not differentiable(case) or not grad_slots(case, args):
        return
    upstream = upstream_for(case, args)
    actual, expected = (_gradients_of(case, f, args, upstream) for f in (compiled, function))
    for label, grad in actual.items():
        close(f"compiled gradient of {label}", grad, expected[label], 0.0, 1.0)


def _gradients_of(
    case: OpUnderTest, function: Callable[..., tuple[Tensor, ...]], args: Arguments, upstream: dict[int, Tensor]
) -> dict[str, Tensor]:
    args, slots = with_grad(case, args)
    outputs = function(*args)
    grads = torch.autograd.grad(
        [outputs[i] for i in upstream], [s.tensor for s in slots], list(upstream.values()), allow_unused=True
    )
    return {s.label: torch.zeros_like(s.tensor) if g is None else g for s, g in zip(slots, grads, strict=True)}


def _mutates_compiled(case: OpUnderTest, args: Arguments, backend: str = "aot_eager") -> None:
    work, expected = copied(args), copied(args)
    torch.compile(lambda *a: case.op(*a), backend=backend, fullgraph=True)(*work)
    case.op(*expected)
    _equal(case, "compiled", tuple(case.written(work)), tuple(case.written(expected)))


def _equal(case: OpUnderTest, what: str, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        label = f"{case.output_label(i)}, {what}"
        same_kind(label, a, e)
        close(label, a, e, 0.0, 1.0)


# --- one graph for many calls ----------------------------------------------------------------------------------------------------


def check_dynamic_sizes(case: OpUnderTest) -> None:
    """With dynamic=True one graph serves all samples that differ in sizes only."""
    groups: dict[Any, list[Any]] = {}
    for sample in case.samples():
        groups.setdefault(_compile_class(sample.args), []).append(sample)
    several = [g for g in groups.values() if len({_sizes(s.args) for s in g}) > 1]
    if not several:
        raise CheckFailed("no two samples differ in sizes only, so nothing shows that one graph serves all sizes: give two")
    group = max(several, key=len)
    # Equal sizes must not be taken for one size: two samples may differ there.
    symbolic_shapes: Any = _config
    with symbolic_shapes.patch(use_duck_shape=False), fresh_compiler():
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        function = program(case)
        compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
        first = 0
        for sample in group:
            with naming(sample.name):
                _equal(case, "compiled with dynamic=True", compiled(*copied(sample.args)), function(*copied(sample.args)))
                # The first call may compile more than once: dynamo starts over when it finds that a float is a constant.
                first = counter.frame_count if sample is group[0] else first
                if counter.frame_count > first:
                    raise CheckFailed(f"recompiled for other sizes: the graph of {group[0].name!r} does not serve this one")


def _compile_class(args: Arguments) -> Any:
    """What may differ between two calls of one dynamic graph is left out; sizes 0 and 1 and Python constants are not."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            strides = None if arg.is_contiguous() else (arg.shape, arg.stride())
            found.append((arg.dtype, strides, tuple(n if n < 2 else "n" for n in arg.shape)))
        elif isinstance(arg, (list, tuple)):
            found.append(_compile_class(tuple(arg)))
        elif type(arg) is int:
            found.append(arg if arg < 2 else "n")
        else:
            found.append(arg)
    return tuple(found)


def _sizes(args: Arguments) -> Any:
    return tuple(
        tuple(a.shape)
        if isinstance(a, Tensor)
        else _sizes(tuple(a))
        if isinstance(a, (list, tuple))
        else a
        if type(a) is int
        else None
        for a in args
    )


def check_no_recompile(case: OpUnderTest) -> None:
    """One graph serves all contents of the metadata: every replay of every compile sample."""
    for sample in case.compile_samples():
        with naming(sample.name), fresh_compiler():
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            function = program(case)
            compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
            for number, contents in enumerate(({}, *sample.replays)):
                args = with_contents(case, sample.args, contents)
                _equal(case, f"compiled, replay {number}", compiled(*copied(args)), function(*copied(args)))
                if counter.frame_count > 1:
                    raise CheckFailed(f"recompiled for the contents of replay {number}")


def check_cuda_graphs_used(case: OpUnderTest) -> None:
    """`mode="reduce-overhead"` records a CUDA graph and does not skip it."""
    for sample in case.compile_samples()[:1]:
        with naming(sample.name), fresh_compiler():
            function = program(case)
            compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
            args = copied(sample.args)
            expected = function(*copied(sample.args))
            for _ in range(_REPLAYS):
                torch.compiler.cudagraph_mark_step_begin()
                _equal(case, 'mode="reduce-overhead"', tuple(t.clone() for t in compiled(*args)), expected)
            skips = counters["inductor"]["cudagraph_skips"]
            if skips:
                raise CheckFailed(f"CUDA graphs were skipped {skips} times")
            if _recorded_graphs(case.device) == 0:
                raise CheckFailed("no CUDA graph was recorded")


def _recorded_graphs(device: torch.device) -> int:
    from torch._inductor import cudagraph_trees

    index = device.index if device.index is not None else torch.cuda.current_device()
    manager = cudagraph_trees.get_container(index).tree_manager
    return 0 if manager is None else sum(len(roots) for roots in manager.roots.values())


def check_export(case: OpUnderTest) -> None:
    """`torch.export` keeps the op as one node."""
    for sample in case.compile_samples()[:1]:
        with naming(sample.name):
            module = _Module(program(case), copied(sample.args))
            exported = torch.export.export(module, tuple(module.tensors()))
            targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
            if str(case.op) not in targets:
                raise CheckFailed(f"the exported graph does not hold {case.op}, it holds {sorted(set(targets))}")


class _Module(torch.nn.Module):
    """A program as `torch.export` wants it: tensors are inputs, whatever else there is (a dtype, say) is a constant."""

    def __init__(self, function: Callable[..., Any], args: Arguments) -> None:
        super().__init__()
        self.function = function
        self.args = args

    def tensors(self) -> Iterator[Any]:
        return (a for a in self.args if isinstance(a, (Tensor, list, tuple)))

    def forward(self, *tensors: Any) -> Any:
        remaining = iter(tensors)
        return self.function(*(next(remaining) if isinstance(a, (Tensor, list, tuple)) else a for a in self.args))
