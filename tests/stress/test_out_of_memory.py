"""Memory that runs out in the middle of a call: an error, after which every call gives what it gave before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from packed_step import Step, allocate, differs, random_documents
from torch.overrides import TorchFunctionMode

from thdops.conformance.case import OpUnderTest, as_tuple, copied
from thdops.conformance.interpreter import interpretable, why_not
from thdops.namespace import REGISTRY

pytestmark = pytest.mark.stress


class _Memory(TorchFunctionMode):
    """Lets `room` tensors be allocated; the next one is too many."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.Tensor.new_empty):
            self.room -= 1
            if self.room < 0:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["attention", "router", "router_grad", "permute_tokens", "zero_fill"])
def test_a_launcher_may_fail_at_every_allocation(name: str) -> None:
    """Interpreted, as there is no GPU: nothing that a launcher remembers between calls is half made."""
    if why_not():
        pytest.skip(why_not())
    case = OpUnderTest(REGISTRY, REGISTRY[name], torch.device("cpu"))
    args = next(fit for sample in case.samples() if (fit := interpretable(sample.args)) is not None)
    launcher, failures = case.launcher(), 0
    while True:
        try:
            with _Memory(failures):
                launcher(*copied(args))
        except torch.OutOfMemoryError:
            failures += 1
        else:
            break
    assert failures > 0
    for actual, expected in zip(as_tuple(launcher(*copied(args))), as_tuple(case.truth(args)), strict=True):
        torch.testing.assert_close(actual, expected, check_dtype=False, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_step_that_does_not_fit() -> None:
    """Under a limit that is raised little by little, the step fails at one allocation after the other, then not at all."""
    rows, small_rows, megabytes = 32768, 512, 4
    chance = random.Random(0)
    step, pack, small_step, small_pack = (
        Step(rows, "cuda"),
        allocate(rows, "cuda"),
        Step(small_rows, "cuda"),
        allocate(small_rows, "cuda"),
    )
    pack.load_(random_documents(chance, rows))
    small_pack.load_(random_documents(chance, small_rows))
    expected, small = step(pack), small_step(small_pack)
    total, wrong = torch.cuda.get_device_properties(0).total_memory, []
    for limit in range(0, 1024, megabytes):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (limit << 20)) / total)
        try:
            result = step(pack)
            break
        except torch.OutOfMemoryError:
            pass
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        wrong.append(differs(small_step(small_pack), small))
    else:
        pytest.fail("the step never fitted")
    assert len(wrong) > 5
    assert not torch.stack([*wrong, differs(result, expected)]).any()
