"""Under which key a compiled kernel is found again: what compiles to other code must not share one, and keys must not pile up.

The kernels here are stand-ins that note what they were compiled for: the key is made on the host, a GPU is not needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from thdops.ops import launch as launching
from thdops.ops import plans as planning

GRID = (1, 1, 1)


class Compiled:
    """A compiled kernel that is launched directly."""

    function, packed_metadata = None, None

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name, self.launched = name, launched

    def run(self, *_: Any) -> None:
        self.launched.append(self.name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


class Kernel:
    """A kernel that compiles at every call of its own."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.params = [SimpleNamespace(name=f"p{i}", do_not_specialize=True) for i in range(8)]
        self.compiled: list[str] = []
        self.launched: list[str] = []

    def __getitem__(self, grid: Any) -> Callable[..., Compiled]:
        def compile_and_run(*args: Any, num_warps: int, maxnreg: int | None = None) -> Compiled:
            self.compiled.append(f"{args} {num_warps} {maxnreg}")
            return Compiled(self.compiled[-1], self.launched)

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_kinds", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return Kernel()


def aligned() -> Tensor:
    return torch.zeros(16)


def described(dtype: torch.dtype) -> Any:
    return SimpleNamespace(base=torch.zeros(16, dtype=dtype), block_shape=[4, 4], layout="swizzled")


DIFFERENT: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = {
    # arguments, constants; arguments, constants
    "where a tuple ends": (((aligned(), aligned()), (aligned(),)), (), ((aligned(),), (aligned(), aligned())), ()),
    "which argument is the tuple": (((5,), 5), (), (5, (5,)), ()),
    "a bool and an int": ((True,), (), (1,), ()),
    "what a descriptor is of": ((described(torch.float16),), (), (described(torch.bfloat16),), ()),
    "a constant bool and a constant int": ((), (True,), (), (1,)),
    "a constant int and a constant float": ((), (2,), (), (2.0,)),
    "32 and 64 bits": ((2**31 - 1,), (), (2**31,), ()),
    "an int and a float": ((1,), (), (1.0,), ()),
    "none": ((None,), (), (aligned(),), ()),
    "alignment": ((aligned(),), (), (aligned()[1:],), ()),
    "dtype": ((aligned(),), (), (aligned().int(),), ()),
    "1 in a tuple": (((1,),), (), ((2,),), ()),
    "16 in a tuple": (((16,),), (), ((17,),), ()),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_compiles_to_other_code_has_another_key(what: str, kernel: Kernel) -> None:
    args, constants, other_args, other_constants = DIFFERENT[what]
    for _ in range(2):
        launching.launch(kernel, GRID, args, constants)
        launching.launch(kernel, GRID, other_args, other_constants)
    assert len(kernel.compiled) == 2
    assert kernel.launched == kernel.compiled


def test_what_compiles_to_the_same_code_has_the_same_key(kernel: Kernel) -> None:
    for rows, x in ((3, aligned()), (2**30, torch.ones(4, 4)), (-1, aligned()[4:])):
        launching.launch(kernel, GRID, (rows, 0.5, x, (x, 3), None), (16, True))
    assert len(kernel.compiled) == 1


def test_keys_do_not_pile_up(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that plans one launch per shape, over a run in which every batch has another."""
    monkeypatch.setattr(launching, "_COMPILED_KEPT", 4)
    for shape in range(50):
        for _ in range(2):
            launching.launch_as(("plan", shape), kernel, GRID, (shape,), ())
        assert len(launching._compiled) <= 4
    assert len(kernel.compiled) == 1
    assert len(kernel.launched) == 99


def test_a_bound_on_registers_is_part_of_the_key(kernel: Kernel) -> None:
    for _ in range(2):
        for registers in (None, 64, 128):
            launching.launch(kernel, GRID, (1,), (), registers=registers)
    assert kernel.compiled == ["(1,) 4 None", "(1,) 4 64", "(1,) 4 128"]


def test_planned_launches_of_a_kind_share_a_compiled_kernel(kernel: Kernel) -> None:
    """Batches of many shapes have a plan each, and nothing more."""
    x = aligned()
    how = ((3, None), (3, 64), (4, None), (4, 64))
    planned = [launching.Launch(kernel, GRID, (rows, 0.5), (16,), registers=registers) for rows, registers in how]
    for _ in range(3):
        for launch in planned:
            launch(x, None)
    assert kernel.compiled == [f"({x}, None, 3, 0.5, 16) 4 {registers}" for registers in (None, 64)]
    assert kernel.launched == kernel.compiled * 5


# --- plans ------------------------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once_for_every_kind_of_call() -> None:
    made: list[int] = []
    plans = planning.Plans(lambda x, rows: made.append(rows) or rows)
    x = torch.zeros(64, 4)
    number, plan = plans(x, 3)
    assert plan == 3
    assert plans(torch.ones(64, 4), 3) == (number, 3)  # other contents
    others = [plans(x, 4), plans(x[::2], 3), plans(x.t(), 3), plans(x.int(), 3), plans(x.flatten()[1:61].view(15, 4), 3)]
    assert len({number, *(other for other, _ in others)}) == 6
    assert made == [3, 4, 3, 3, 3, 3]


def test_tensors_inside_a_record_are_of_a_kind_too() -> None:
    plans = planning.Plans(lambda call, rows: call)
    x = torch.zeros(64, 4)
    number, _ = plans((x, (x, None)), 3)
    assert plans((torch.ones(64, 4), (torch.ones(64, 4), None)), 3)[0] == number
    assert len({number, *(plans(call, 3)[0] for call in ((x, (x.int(), None)), (x, x, None), (x.t(), (x, None))))}) == 4


def test_a_call_that_is_refused_leaves_no_plan() -> None:
    def make(rows: int) -> int:
        if rows < 0:
            raise ValueError("rows must be at least 0")
        return rows

    plans = planning.Plans(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="at least 0"):
            plans(-1)


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_KEPT", 4)
    plans = planning.Plans(lambda rows: rows)
    numbers = [plans(rows)[0] for rows in range(50)]
    assert len(plans._known) <= 4
    assert len(set(numbers)) == 50
