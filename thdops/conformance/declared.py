"""Checks of what a spec declares: that its pieces are there, and that what it refuses is refused in the words it states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thdops.conformance.case import Arguments, CheckFailed, OpUnderTest, as_tuple, describe, map_tensors, naming
from thdops.registry import Refusal


def check_pieces(case: OpUnderTest) -> None:
    """Summary, samples, a compile sample, replays, refusals and benches are there and agree with the schema."""
    spec = case.spec
    samples = case.samples()
    names = [s.name for s in samples]
    missing = [
        what
        for what, there in (
            ("a summary", bool(spec.summary.strip())),
            ("samples", bool(samples)),
            ("samples of different names", len(set(names)) == len(names)),
            ("a sample with compile=True", any(s.compile for s in samples)),
            ("a sample with replays (it reads cu_seqlens)", not case.has_metadata() or any(s.replays for s in samples)),
            ("refusals", any(True for _ in spec.refusals(case.device))),
            ("benches", any(True for _ in spec.benches(torch.device("cpu")))),
        )
        if not there
    ]
    if missing:
        raise CheckFailed(f"the spec lacks {', '.join(missing)}")
    for sample in case.samples():
        with naming(sample.name):
            if len(sample.args) != len(case.argument_names):
                raise CheckFailed(f"{len(sample.args)} arguments, the schema has {len(case.argument_names)}")
            for replay in sample.replays:
                _check_replay(case, sample.args, replay)
            cost = spec.cost(*sample.args)
            if not all(math.isfinite(x) and x >= 0 for x in (cost.read, cost.written, cost.flops)):
                raise CheckFailed(f"the cost of one call must be finite and at least 0, got {cost}")
            _check_padding(case, sample.args)


def _check_replay(case: OpUnderTest, args: Arguments, replay: Mapping[str, Any]) -> None:
    for name, value in replay.items():
        if name not in case.argument_names:
            raise CheckFailed(f"a replay changes {name!r}, which is no argument")
        before = as_tuple(args[case.argument_names.index(name)])
        after = as_tuple(value)
        if [(t.shape, t.dtype, t.device) for t in before] != [(t.shape, t.dtype, t.device) for t in after]:
            raise CheckFailed(f"a replay of {name!r} has another shape, dtype or device than the sample")


def _check_padding(case: OpUnderTest, args: Arguments) -> None:
    padding = case.padding(args)
    unknown = set(padding.inputs) - set(case.argument_names)
    if unknown:
        raise CheckFailed(f"padding names {sorted(unknown)}, which are no arguments")
    outputs = len(case.written(args)) if case.spec.mutates else len(case.schema.returns)
    if case.spec.padding is not None and len(padding.outputs) != outputs:
        raise CheckFailed(f"padding describes {len(padding.outputs)} outputs, the op has {outputs}")
    if case.spec.pads_zeroed and not any(rows is not None for rows in padding.outputs):
        raise CheckFailed("pads_zeroed is promised but no output has padding rows")


def check_refusals(case: OpUnderTest) -> None:
    """Every refusal raises its error with its text, in eager mode and under a fake tensor mode; a compiled call quotes the text."""
    for number, refusal in enumerate(case.spec.refusals(case.device)):
        for mode, args in (("eager", refusal.args), ("a fake tensor mode", None)):
            _check_refusal(case, refusal, mode, args)
        if number == 0:
            _check_compiled_refusal(case, refusal)


def _check_refusal(case: OpUnderTest, refusal: Refusal, mode: str, args: Arguments | None) -> None:
    where = f"refusal {refusal.name!r} in {mode}"
    try:
        if args is None:
            with FakeTensorMode(allow_non_fake_inputs=False) as fake:
                case.op(*faked(fake, refusal.args))
        else:
            case.op(*args)
    except Exception as error:
        if type(error) is not refusal.error:
            raise CheckFailed(f"{where}: raises {describe(error)}; should be {refusal.error.__name__}: {refusal.text}") from error
        if str(error) != refusal.text:
            raise CheckFailed(f"{where}: says {str(error)!r}; should be {refusal.text!r}") from error
    else:
        raise CheckFailed(f"{where}: accepted; should raise {refusal.error.__name__}: {refusal.text}")


def _check_compiled_refusal(case: OpUnderTest, refusal: Refusal) -> None:
    torch._dynamo.reset()
    try:
        torch.compile(lambda *args: case.op(*args), backend="eager", fullgraph=True)(*refusal.args)
    except Exception as error:
        if refusal.text not in str(error):
            raise CheckFailed(f"refusal {refusal.name!r} compiled: the error does not quote the text: {describe(error)}") from error
    else:
        raise CheckFailed(f"refusal {refusal.name!r} compiled: accepted")
    finally:
        torch._dynamo.reset()


def faked(mode: FakeTensorMode, args: Arguments) -> Arguments:
    """Fake versions of all tensors; tensors that share memory still do not know of each other."""

    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor)

    return map_tensors(fake, args)
