"""How native attention is planned and launched, on CPU tensors whose launches are intercepted: nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import forget_plans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thdops.conformance.interpreter import why_not
from thdops.ops.attention_thd import backends
from thdops.ops.attention_thd import op as attention_op
from thdops.ops.layouts import prefix_sums

# On a GPU launches are real.
pytestmark = pytest.mark.skipif(torch.cuda.is_available() or why_not() != "", reason=why_not() or "for CPU tensors")


@pytest.fixture(autouse=True)
def planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a GPU is a Hopper is no part of a plan's key."""
    forget_plans(monkeypatch)


def test_planning_copies_an_operand_no_more_than_a_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims that are strided: copied once for the plan of a backward, whichever kernels it has, and once a call."""
    from thdops.ops.attention_thd import kernels
    from thdops.ops.launch import intercept

    monkeypatch.setattr(kernels, "is_hopper", lambda device_index: True)
    copied: list[Tensor] = []
    contiguous = Tensor.contiguous
    monkeypatch.setattr(Tensor, "contiguous", lambda x: x if x.is_contiguous() else copied.append(x) or contiguous(x))
    q, k, v, out, grad_out = (torch.zeros(4096, 64, heads, dtype=torch.bfloat16).mT for heads in (4, 2, 2, 4, 4))
    call = attention_op._call(q, k, v, torch.zeros(9, dtype=torch.int32), causal=True, deterministic=False)
    with intercept(lambda *_: None):
        for copies in (2, 1):
            backends.attention_grad(grad_out, None, *call[:3], out, torch.zeros(4, 4096), *call[3:19])
            assert len(copied) == 5 * copies
            copied.clear()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_no_sequence_is_planned_on_hopper(dims: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are padding, and are launched as such: nothing is divided by the number of sequences."""
    from thdops.ops.attention_thd import kernels
    from thdops.ops.launch import intercept

    monkeypatch.setattr(kernels, "is_hopper", lambda device_index: True)
    q, k, v, out = (
        torch.zeros(128, heads, d, dtype=torch.bfloat16) for heads, d in ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    )
    call = attention_op._call(q, k, v, torch.zeros(1, dtype=torch.int32), causal=True, deterministic=deterministic)
    launched: list[str] = []
    with intercept(lambda kernel, *_: launched.append(kernel.__name__)):
        backends.attention(*call)
        backends.attention_grad(out, None, *call[:3], out, torch.zeros(4, 128), *call[3:19])
    assert {"attention_forward", "keys_kernel"} <= set(launched)
    assert ("delta_kernel" in launched) is (dims == (192, 128) or not (deterministic and dims == (64, 64)))


def test_one_kernel_or_another_makes_delta_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """That for dq, unless dq comes by reduction, `out` is not aligned to 16 bytes or heads are too wide; at D 128 in any order."""
    from thdops.ops.attention_thd import kernels
    from thdops.ops.launch import intercept

    monkeypatch.setattr(kernels, "is_hopper", lambda device_index: True)

    def launched(dim: int, dim_v: int, rows: int, sequences: int, first: int = 0, deterministic: bool = True) -> list[str]:
        q, k, v = (torch.zeros(rows, heads, d, dtype=torch.bfloat16) for heads, d in ((4, dim), (2, dim), (2, dim_v)))
        out = torch.zeros(first + rows * 4 * dim_v, dtype=torch.bfloat16)[first:].view(rows, 4, dim_v)
        cu = torch.zeros(sequences + 1, dtype=torch.int32)
        call = attention_op._call(q, k, v, cu, causal=True, deterministic=deterministic)
        names: list[str] = []

        def note(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> None:
            given = dict(zip(kernel.arg_names, (*args, *constexprs), strict=True))
            made = kernel.__name__ == "queries_kernel" and given["out"] is not None
            begun = given.get("begins") or given.get("BEGUN")
            names.append(kernel.__name__ + " of out" * made + " begun" * bool(begun))

        with intercept(note):
            backends.attention_grad(torch.zeros_like(out), None, *call[:3], out, torch.zeros(4, rows), *call[3:19])
        return [name for name in names if name != "tile_table_kernel"]

    by_two = ["queries_kernel of out", "keys_kernel"]
    by_three = ["delta_kernel", "queries_kernel", "keys_kernel"]
    reduced = ["delta_kernel begun", "keys_kernel begun", "convert_kernel"]
    for deterministic in (False, True):
        assert launched(128, 128, 512, 4, deterministic=deterministic) == by_two
        assert launched(128, 128, 4096, 64, deterministic=deterministic) == [reduced[0], *by_two, *reduced[1:]]
        assert launched(128, 128, 4096, 2, deterministic=deterministic) == reduced
    assert launched(128, 128, 512, 4, first=1) == by_three
    assert launched(192, 128, 512, 4) == by_three
    assert launched(64, 64, 4096, 2) == by_two
    assert launched(64, 64, 4096, 2, deterministic=False) == ["delta_kernel", "keys_kernel", "convert_kernel"]


class _Allocated(TorchDispatchMode):
    """Notes every tensor that brings memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type != "meta":
            known = [x for x in (*args, *self.tensors) if isinstance(x, Tensor)]
            if out.untyped_storage()._cdata not in {x.untyped_storage()._cdata for x in known}:
                self.tensors.append(out)
        return out


@pytest.mark.parametrize("hopper", [False, True], ids=["plain", "hopper"])
@pytest.mark.parametrize("sequences", [2, 512])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_memory_is_the_results_and_two_buffers(
    dims: tuple[int, int], sequences: int, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 [Hq, Tq], and where dq comes by reduction, fp32 [Tq, Hq, Dqk]; all else is small and of integers."""
    from thdops.ops.attention_thd import kernels
    from thdops.ops.launch import intercept

    monkeypatch.setattr(kernels, "is_hopper", lambda device_index: hopper)
    rows = 8192
    q, k, v, out = (
        torch.zeros(rows, h, d, dtype=torch.bfloat16) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    )
    call = attention_op._call(q, k, v, torch.zeros(sequences + 1, dtype=torch.int32), causal=True, deterministic=False)
    lse = torch.zeros(4, rows)
    with intercept(lambda *_: None):
        for launcher, args in ((backends.attention, call), (backends.attention_grad, (out, lse, *call[:3], out, lse, *call[3:19]))):
            launcher(*args)  # planned
            with _Allocated() as allocated:
                results = launcher(*args)
            kept = {x.untyped_storage()._cdata for x in results}
            more = [x for x in allocated.tensors if x.untyped_storage()._cdata not in kept]
            large = [x for x in more if x.is_floating_point()]
            assert all(x.dtype == torch.float32 for x in large)
            sums = [(rows, 4, dims[0])] if hopper and dims in ((64, 64), (128, 128)) else []
            assert [tuple(x.shape) for x in large] == ([] if launcher is backends.attention else [(4, rows), *sums])
            assert sum(x.nbytes for x in more if not x.is_floating_point()) <= 64 * 1024


def test_launches_depend_on_shapes_alone() -> None:
    """Cases 2 and 16: offsets in one tensor or in two, and hundreds of empty sequences, are launched as any others."""
    from thdops.ops.launch import intercept

    q, k, v, grad_out = (torch.zeros(512, heads, 16) for heads in (4, 2, 2, 4))

    def launches(cu: Tensor, padded: Tensor) -> list[Any]:
        seen: list[Any] = []

        def note(kernel: Any, grid: Any, args: Any, constexprs: Any, options: Any) -> None:
            seen.append((kernel, grid, [type(arg) for arg in args], constexprs, options))

        call = attention_op._call(q, k, v, cu, cu_seqlens_q_padded=padded, causal=True)
        with intercept(note):
            out, lse, _ = backends.attention(*call)
            backends.attention_grad(grad_out, None, *call[:3], out, lse, *call[3:19])
        return seen

    even = torch.arange(0, 513, 2, dtype=torch.int32)
    full = launches(even, even.clone())
    assert full
    assert launches(even, even) == full
    assert launches(even, even[:]) == full
    for lengths in ([5, *[0] * 254, 7], [0] * 256, [400, *[0] * 255]):
        cu = prefix_sums(lengths, torch.device("cpu"))
        assert launches(cu, cu.clone()) == full
