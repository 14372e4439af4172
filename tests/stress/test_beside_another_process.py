"""Kernels that hand out work at run time, while another process takes the GPU away from them at any moment.

A multiprocessor's state is put aside then, with what programs keep in shared memory. A work item that is lost is not seen where
results of the same call stood in that memory before: so memory holds NaN until it is written.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import thdops
from thdops.conformance.memory import poisoned_allocations
from thdops.ops.layouts import prefix_sums

pytestmark = [pytest.mark.stress, pytest.mark.gpu]
SECONDS = 4  # of calls; while barriers without a use lent their memory, an item was lost about every three
ROUNDING = 2**-6  # of what is added up in another order


def _keep_busy(started: Any, ended: Any) -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    started.set()
    while not ended.is_set():
        for _ in range(20):
            x = (x @ x).tanh()
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def busy_gpu() -> Iterator[None]:
    """Two other processes on the GPU."""
    context = multiprocessing.get_context("spawn")
    started, ended = [context.Event() for _ in range(2)], context.Event()
    others = [context.Process(target=_keep_busy, args=(event, ended), daemon=True) for event in started]
    for other in others:
        other.start()
    try:
        assert all(event.wait(60) for event in started)
        yield
    finally:
        ended.set()
        for other in others:
            other.join(30)


@pytest.mark.usefixtures("busy_gpu")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("heads", "dim", "dim_v"), [((32, 8), 128, 128), ((16, 4), 64, 64), ((8, 8), 192, 128), ((8, 2), 80, 80)])
def test_no_work_item_is_lost_or_counted_twice(heads: tuple[int, int], dim: int, dim_v: int, deterministic: bool) -> None:
    device, rows = torch.device("cuda"), 8 * 4096
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((heads[0], dim), (heads[1], dim), (heads[1], dim_v), (heads[0], dim_v))
    q, k, v, grad = (torch.randn(rows, h, d, device=device, dtype=torch.bfloat16, generator=generator) for h, d in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = prefix_sums([4096] * 8, device)

    def results() -> list[Tensor]:
        with poisoned_allocations():
            out = thdops.attention(q, k, v, cu, causal=True, backend="native", deterministic=deterministic)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    # An item that is lost is another one every time: the median of three is right.
    first = [
        torch.stack(tensors).nan_to_num(torch.inf).median(0).values for tensors in zip(*(results() for _ in range(3)), strict=True)
    ]
    end, turn = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        turn += 1
        for name, got, expected in zip(("out", "dq", "dk", "dv"), results(), first, strict=True):
            if deterministic or name == "out":
                wrong = got != expected
            else:
                size = expected.float().square().mean().sqrt()
                wrong = ~((got.float() - expected.float()).abs() <= ROUNDING * (expected.float().abs() + size))
            assert not bool(wrong.any()), f"{name} in turn {turn}: {int(wrong.sum())} elements"
