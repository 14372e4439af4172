"""FLOP counts of attention in `torch.utils.flop_counter`: torch's formulas, sequence by sequence; else what the shapes allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import BEFORE, GAPS, KEYS, QUERIES, TAIL, Batch, Case, numbers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import thdops

ROOT = Path(__file__).resolve().parent.parent


def _counted(case: Case, **more: Any) -> tuple[int, int]:
    """(forward, backward) of one call."""
    given = numbers(case, torch.float32)
    metadata, options = case.arguments("cpu")
    q, k, v = (x.requires_grad_() for x in given[:3])
    with FlopCounterMode(display=False) as forward:
        out = thdops.attention(q, k, v, *metadata, **options, **more)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    "case",
    [
        Case(TAIL),
        Case(GAPS, options={"causal": True, "window": (2, 0)}),
        Case(BEFORE, heads=(6, 2), dims=(24, 16)),
        Case(QUERIES, KEYS, dims=(16, 40), options={"causal": True}),
    ],
    ids=["tail", "gaps, masked", "MLA", "cross"],
)
def test_counts_are_torchs_for_each_sequence(case: Case) -> None:
    heads, (dim_qk, dim_v) = case.heads[0], case.dims
    forward = backward = 0
    for n_q, n_k in zip(case.queries.lengths, case.keyed().lengths, strict=True):
        q, k, v, out = ((1, heads, *size) for size in ((n_q, dim_qk), (n_k, dim_qk), (n_k, dim_v), (n_q, dim_v)))
        forward += sdpa_flop_count(q, k, v)
        backward += sdpa_backward_flop_count(out, q, k, v)
    assert forward > 0
    assert _counted(case) == (forward, backward)


@pytest.mark.parametrize(
    ("hints", "pairs"),
    [((0, 0), 25 * 40), ((5, 0), 5 * 40), ((0, 3), 25 * 3), ((5, 3), 25 * 3), ((99, 99), 25 * 40)],
    ids=str,
)
def test_lengths_that_cannot_be_read_count_as_long_as_they_may_be(hints: tuple[int, int], pairs: int) -> None:
    """Of 25 queries and 40 keys, in sequences of at most so many."""
    case = Case(GAPS, Batch([3, 5, 0, 4], None, 40))
    given = numbers(case, torch.float32)
    (cu_q, cu_kv), _ = case.arguments("cpu")
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        q, k, v, cu_q, cu_kv = (mode.from_tensor(x) for x in (*given[:3], cu_q, cu_kv))
        settings = (False, False, -1, -1, 0.25, "vanilla", 0.0, *hints, True, "reference", False)
        torch.ops.thdops.attention(q, k, v, cu_q, None, cu_kv, None, None, *settings)
    assert counter.get_total_flops() == 2 * (16 + 16) * 4 * pairs


def test_nothing_on_a_device_is_read() -> None:
    case = Case(TAIL)
    given = numbers(case, torch.float32)
    q, k, v = (x.to("meta") for x in given[:3])
    with FlopCounterMode(display=False) as counter:
        thdops.attention(q, k, v, case.arguments("meta")[0][0])
    assert counter.get_total_flops() == 2 * (16 + 16) * 4 * 20 * 20


@pytest.mark.parametrize("first", ["thdops", "torch.utils.flop_counter"])
def test_formulas_are_there_whichever_is_imported_first(first: str) -> None:
    """Without thdops importing the counter: it would bring triton along."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, {first}
before = "torch.utils.flop_counter" in sys.modules
import importlib.util, thdops
importlib.util.find_spec("torch.utils.flop_counter")  # to look for it is not to import it
from torch.utils.flop_counter import FlopCounterMode
q = torch.ones(6, 2, 16)
with FlopCounterMode(display=False) as counter:
    thdops.attention(q, q, q, torch.tensor([0, 2, 5], dtype=torch.int32))
print(before, counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(first != "thdops"), str(2 * 32 * 2 * (4 + 9))], done.stderr
