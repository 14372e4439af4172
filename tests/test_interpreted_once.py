"""Checks share interpreted calls: of one launcher on one content of memory, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import third_party_op
import torch
from torch import Tensor

from thdops.conformance import OpUnderTest, interpreter
from thdops.conformance.case import copied
from thdops.conformance.interpreter import interpreted, once

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel of an op, and a list that grows with every call of its launcher."""
    case = OpUnderTest(third_party_op.REGISTRY, third_party_op.REGISTRY["double_rows"], torch.device("cpu"))
    monkeypatch.setattr(interpreter, "_runs", {})
    launcher, calls = case.launcher(), []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return launcher(*args)

    monkeypatch.setattr(OpUnderTest, "launcher", lambda self: counted)
    return case, interpreted(case), calls


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(x.shape[0], 2)], 1)[:, : x.shape[1]]


def _farther(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros(x.shape[0], 2)], 1)[:, : x.shape[1]]


def _transposed(x: Tensor) -> Tensor:
    return x.t()


def _negated(x: Tensor) -> Tensor:
    return -x


@pytest.mark.parametrize("change", [None, _negated, _padded, _transposed])
def test_what_is_the_same_call(kernel: Any, change: Callable[[Tensor], Tensor] | None) -> None:
    """Other values are another call, and so are other strides; where they stand in memory is not."""
    case, function, calls = kernel
    x, cu_seqlens = torch.zeros(5, 5).normal_(), torch.tensor([0, 2, 4], dtype=torch.int32)
    first = once(case, function, (x, cu_seqlens))
    again = once(case, function, (x if change is None else change(x), *copied((cu_seqlens,))))
    assert len(calls) == (1 if change is None else 2)
    assert (again is first) == (change is None)


def test_memory_beside_the_numbers_counts(kernel: Any) -> None:
    """A kernel that reads beyond its rows is not given the answer of a call where something else stood there."""
    case, function, calls = kernel
    x, cu_seqlens = torch.zeros(5, 3).normal_(), torch.tensor([0, 2, 4], dtype=torch.int32)
    for view in (_padded(x), _farther(x), _padded(x)):
        once(case, function, (view, cu_seqlens))
    assert len(calls) == 2


def test_another_launcher_is_asked_anew(kernel: Any) -> None:
    case, function, calls = kernel
    args = case.samples()[0].args
    once(case, function, args)
    other = interpreter._Interpreted(case, lambda *given: function.launcher(*given))
    once(case, other, args)
    once(case, function, args)
    assert len(calls) == 3


def test_samples_are_the_same_and_not_the_numbers_of_a_check(kernel: Any) -> None:
    case, _, _ = kernel
    torch.manual_seed(0)
    once_asked, number = case.samples()[0].args[0], torch.randn(())
    torch.manual_seed(0)
    assert torch.equal(number, torch.randn(()))
    assert torch.equal(once_asked, case.samples()[0].args[0])
    torch.manual_seed(0)
    assert not torch.equal(once_asked, torch.randn(once_asked.shape))
