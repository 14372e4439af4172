"""Gradients that are added up in memory, in no fixed order, while another process takes the GPU away at any moment."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

import thdops
from thdops.ops.layouts import prefix_sums

pytestmark = [pytest.mark.stress, pytest.mark.gpu]
ROUNDS = 60


def _keep_busy(started: Any, ended: Any) -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    started.set()
    while not ended.is_set():
        for _ in range(20):
            x = (x @ x).tanh()
        torch.cuda.synchronize()


@pytest.mark.parametrize("heads", [(16, 4), (32, 8)], ids=["few tiles", "many tiles"])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_share_of_a_gradient_is_lost_or_counted_twice(dim: int, heads: tuple[int, int]) -> None:
    device, rows = torch.device("cuda"), 8 * 4096
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, h, dim, device=device, dtype=torch.bfloat16, generator=generator) for h in (*heads, heads[1], heads[0])
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = prefix_sums([4096] * 8, device)

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        out = thdops.attention(leaves[0], leaves[1], leaves[2], cu, causal=True, backend="native", deterministic=deterministic)
        return torch.autograd.grad(out, leaves, grad)

    expected = [x.float() for x in gradients(True)]
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    other = context.Process(target=_keep_busy, args=(started, ended), daemon=True)
    other.start()
    try:
        assert started.wait(60)
        for turn in range(ROUNDS):
            for name, a, b in zip(("dq", "dk", "dv"), gradients(False), expected, strict=True):
                row = b.flatten(1).square().mean(1).sqrt().clamp(min=1e-3)[:, None, None]
                off = (a.float() - b).abs() / (b.abs() + row)
                assert float(off.max()) < 0.1, f"{name} in round {turn}: {int((off >= 0.1).sum())} elements"
    finally:
        ended.set()
        other.join(30)
