"""The graph check: one captured CUDA graph, replayed with other contents, equals eager mode every time. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, as_tuple, copied, describe, naming, with_contents
from thdops.conformance.gradients import differentiable, grad_slots, upstream_for, with_grad
from thdops.conformance.tensors import bits, close, same_bits

_WARM_UPS = 3


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    """A call that makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_graph_replay(case: OpUnderTest) -> None:
    """No host sync, eager or captured; each replay, forward and backward, equals eager mode on the same contents."""
    for sample in case.samples():
        with naming(sample.name):
            contents = [{}, *sample.replays, {}]  # the first once more at the end: what shrank must grow again
            calls = [with_contents(case, sample.args, c) for c in contents]
            _replay(case, calls, _forward(case), backward=False)
            if differentiable(case) and grad_slots(case, sample.args):
                _replay(case, calls, _backward(case, sample.args), backward=True)


def _forward(case: OpUnderTest) -> Callable[[Arguments], tuple[Tensor, ...]]:
    def run(args: Arguments) -> tuple[Tensor, ...]:
        result = as_tuple(case.op(*args))
        return tuple(case.written(args)) if case.spec.mutates else result

    return run


def _backward(case: OpUnderTest, args: Arguments) -> Callable[[Arguments], tuple[Tensor, ...]]:
    upstream = upstream_for(case, args)

    def run(args: Arguments) -> tuple[Tensor, ...]:
        inputs = [s.tensor for s in grad_slots(case, args)]
        outputs = as_tuple(case.op(*args))
        grads = torch.autograd.grad([outputs[i] for i in upstream], inputs, list(upstream.values()), allow_unused=True)
        return tuple(g for g in grads if g is not None)

    return run


def _replay(case: OpUnderTest, calls: list[Arguments], run: Callable[[Arguments], tuple[Tensor, ...]], backward: bool) -> None:
    def prepared(args: Arguments) -> Arguments:
        return with_grad(case, args)[0] if backward else copied(args)

    static = prepared(calls[0])
    _warm_up(lambda: run(prepared(calls[0])), lambda: run(static))
    torch.cuda.synchronize()
    for slot, fresh in zip(case.slots(static), case.slots(calls[0]), strict=True):
        _refill(slot.tensor, fresh.tensor)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph), _no_sync_inside():
            results = run(static)
    except RuntimeError as error:
        raise CheckFailed(f"cannot be captured: {describe(error)}") from error

    for number, args in enumerate(calls):
        expected = run(prepared(args))
        for slot, fresh in zip(case.slots(static), case.slots(args), strict=True):
            _refill(slot.tensor, fresh.tensor)
        if not case.spec.mutates:
            for result in results:
                _poison(result)
        graph.replay()
        torch.cuda.synchronize()
        for i, (actual, e) in enumerate(zip(results, expected, strict=True)):
            what = f"replay {number} of a captured {'backward' if backward else 'forward'}, result {i}"
            if case.spec.deterministic:
                same_bits(what, actual, e)
            else:
                close(what, actual, e, 0.0, case.spec.roundings)


def _refill(static: Tensor, fresh: Tensor) -> None:
    """Other contents in the same memory. An expanded tensor has no place of its own for each element; replays leave it alone."""
    if 0 not in static.stride():
        static.detach().copy_(fresh)


def _warm_up(*calls: Callable[[], Any]) -> None:
    """Compile every kernel on a side stream, then let one call fail if it makes the host wait."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with _no_sync_inside():
        calls[-1]()


@contextmanager
def _no_sync_inside() -> Iterator[None]:
    try:
        with syncs_are_errors():
            yield
    except RuntimeError as error:
        raise CheckFailed(f"the host waits for the device: {describe(error)}") from error


def _poison(result: Tensor) -> None:
    """What a replay does not write must be seen."""
    detached = result.detach()
    if detached.dtype == torch.bool:
        detached.logical_not_()
    elif detached.is_floating_point() and detached.element_size() > 1:
        detached.fill_(float("nan"))
    else:
        bits(detached).fill_(0x5A)
