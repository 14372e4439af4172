"""Every op of the registry against every check; and what the registry as a whole must have."""

from __future__ import annotations

import inspect

import pytest
import torch

import thdops
from thdops.conformance import CHECKS, Check, OpUnderTest, outcome
from thdops.namespace import REGISTRY
from thdops.registry import OpSpec


def _cases() -> list[object]:
    """(op, check, device) for everything that applies; on a GPU all of it once more, except compiling for absent GPUs."""
    cases = []
    for spec in REGISTRY:
        on_cpu = OpUnderTest(REGISTRY, spec, torch.device("cpu"))
        for check in CHECKS:
            if not check.gpu and check.applies(on_cpu):
                cases.append(pytest.param(spec, check, "cpu", id=f"{spec.name}-{check.name}-cpu"))
            on_gpu = check.gpu or check.name == "kernel" or (check.name != "ahead of time" and check.applies(on_cpu))
            if on_gpu:
                cases.append(pytest.param(spec, check, "cuda", id=f"{spec.name}-{check.name}-cuda", marks=pytest.mark.gpu))
    return cases


@pytest.mark.parametrize(("spec", "check", "device"), _cases())
def test_op_holds(spec: OpSpec, check: Check, device: str) -> None:
    found = outcome(check, OpUnderTest(REGISTRY, spec, torch.device(device)))
    if found.startswith("not run"):
        pytest.skip(found)
    assert found in ("pass", "n/a"), f"{spec.name}: {check.promise}\n{found}"


def test_every_public_function_is_documented() -> None:
    undocumented = [
        name
        for name in thdops.__all__
        if callable(getattr(thdops, name)) and len((inspect.getdoc(getattr(thdops, name)) or "").split()) < 5
    ]
    assert undocumented == []


def test_every_check_says_what_holds() -> None:
    assert [check.name for check in CHECKS if len(check.promise.split()) < 5] == []
    assert len({check.name for check in CHECKS}) == len(CHECKS)
