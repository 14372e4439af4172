"""Native attention on a GPU gives the same bits again, whatever work comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import Batch, forget_plans
from capturing import captured
from torch import Tensor

import thdops
from thdops.ops.layouts import prefix_sums


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_deterministic_gradients_repeat_and_captured_ones_are_eager_s(dims: tuple[int, int]) -> None:
    device = torch.device("cuda")
    q, k = (torch.randn(3000, heads, dims[0], device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
    v = torch.randn(3000, 2, dims[1], device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(3000, 8, dims[1], device=device, dtype=torch.bfloat16)
    layouts = [prefix_sums(lengths, device) for lengths in ([1500, 0, 1400], [100, 2000, 1], [0, 0, 0])]
    cu = layouts[0].clone()

    def step() -> tuple[Tensor, ...]:
        out = thdops.attention(q, k, v, cu, causal=True, deterministic=True, backend="native")
        return (out, *torch.autograd.grad(out, (q, k, v), grad))

    graph, results = captured(step)
    for layout in (*layouts[1:], layouts[0]):
        cu.copy_(layout)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


_IN_ORDER: dict[str, dict[str, Any]] = {  # what reaches far enough for sums
    "full": {},
    "causal": {"causal": True},
    "bottom-right": {"causal": True, "causal_alignment": "bottom_right"},
    "causal, window": {"causal": True, "window": (1100, -1)},
    "bottom-right, window": {"causal": True, "causal_alignment": "bottom_right", "window": (1030, -1)},
    "window": {"window": (700, 430)},
}


@pytest.mark.gpu
@pytest.mark.parametrize("mask", _IN_ORDER)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("keyed", [False, True], ids=["self", "other keys"])
def test_sums_in_a_fixed_order_repeat_and_are_those_of_a_kernel_for_dq(
    keyed: bool, heads: tuple[int, int], mask: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Sequences that begin anywhere, end in parts of blocks, are longer or shorter than their keys or have none; asked or not."""
    from thdops.ops.attention_thd import kernels, kernels_hopper_backward

    x = Batch([1300, 0, 63, 130, 1, 2111, 64], [1301, 7, 70, 130, 3, 2111, 65], 3800, before=5)
    y = Batch([900, 12, 0, 1700, 200, 2500, 65], None, 5400, before=3) if keyed else x
    device = torch.device("cuda")
    new = lambda rows, some: torch.randn(rows, some, 128, device=device, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    q, k, v, grad = new(x.total, heads[0]), new(y.total, heads[1]), new(y.total, heads[1]), new(x.total, heads[0]).detach()
    cu, padded = x.metadata(device)
    offsets = dict(zip(("cu_seqlens_kv", "cu_seqlens_kv_padded"), y.metadata(device), strict=True)) if keyed else {}

    def gradients(deterministic: bool = True) -> tuple[Tensor, ...]:
        forget_plans(monkeypatch)
        torch.use_deterministic_algorithms(True)  # what is allocated holds NaN
        out = thdops.attention(
            q, k, v, cu, cu_seqlens_q_padded=padded, **offsets, **_IN_ORDER[mask], deterministic=deterministic, backend="native"
        )
        return torch.autograd.grad(out, (q, k, v), grad)

    monkeypatch.setattr(kernels, "_lengths", lambda call: ("long",))
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    found = gradients()
    for n in range(10):
        for a, b in zip(found, gradients(n % 2 == 0), strict=True):
            assert torch.equal(a, b)
    monkeypatch.setattr(kernels_hopper_backward, "reduces", lambda *_: False)
    for a, b in zip(found, gradients(), strict=True):
        size = b.float().square().mean((1, 2), keepdim=True).sqrt() + b.float().square().mean().sqrt()
        assert bool(((a.float() - b.float()).abs() <= 2**-6 * (b.float().abs() + size)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", [(6, 6), (12, 4)], ids=str)
def test_the_order_of_heads_changes_no_result(
    heads: tuple[int, int], dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head after the other, some together, or all of them; whether sequences are short or long."""
    from thdops.ops.attention_thd import kernels_hopper_common

    device = torch.device("cuda")
    q, k = (torch.randn(4200, h, dims[0], device=device, dtype=torch.bfloat16, requires_grad=True) for h in heads)
    v = torch.randn(4200, heads[1], dims[1], device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4200, heads[0], dims[1], device=device, dtype=torch.bfloat16)

    def results(cu: Tensor, near: int) -> tuple[Tensor, ...]:
        forget_plans(monkeypatch)
        monkeypatch.setattr(kernels_hopper_common, "near_heads", lambda heads, size: min(near, heads))
        out, lse = thdops.attention(q, k, v, cu, causal=True, deterministic=True, return_lse=True, backend="native")
        return (out, lse, *torch.autograd.grad(out, (q, k, v), grad))

    for lengths in ([4100], [1500, 0, 2600], [70] * 60):
        cu = prefix_sums(lengths, device)
        expected = results(cu, heads[1])
        for near in (1, 2):
            for a, b in zip(results(cu, near), expected, strict=True):
                assert torch.equal(a, b)
