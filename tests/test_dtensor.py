"""Attention on DTensors that are cut by heads, on two Gloo processes: values, gradients and placements, without communication."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_oracle import GAPS, KEYS, QUERIES, Case, compare, computed, numbers
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import thdops

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without torch.distributed or Gloo"
)

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=120)
SINK = {"softmax": "learnable", "causal": True}
CASES = {
    "groups": Case(GAPS, heads=(8, 4), options={"causal": True}),
    "sink": Case(GAPS, heads=(4, 2), options=SINK),
    "cross": Case(QUERIES, KEYS, heads=(2, 2), options={"causal_alignment": "bottom_right", "causal": True}),
    "MQA": Case(GAPS, heads=(4, 1), options=SINK),
    "gathered": Case(GAPS, heads=(6, 3)),  # two ranks cannot share three key heads
}


# --- one rank ------------------------------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str) -> None:
    """Every case on one rank; results go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    try:
        torch.save({name: _on_rank(case) for name, case in CASES.items()}, f"{folder}/{rank}.pt")
        dist.barrier()  # a rank that leaves early takes its end of the others' connections with it
    finally:
        dist.destroy_process_group()


def _on_rank(case: Case) -> dict[str, Any]:
    """Results and gradients put together, the placements they came with, and the communication that they took."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    from thdops.integrations import dtensor

    dtensor.register_shardings()
    dtensor.register_shardings()  # once is enough, twice is allowed
    mesh = init_device_mesh("cpu", (RANKS,))

    def spread(x: Tensor, dim: int | None) -> Any:
        return distribute_tensor(x, mesh, [Replicate() if dim is None or x.shape[dim] % RANKS else Shard(dim)])

    given = numbers(case)
    arguments, options = case.arguments("cpu")
    options = {name: spread(x, None) if isinstance(x, Tensor) else x for name, x in options.items()}
    leaves = [spread(x, dim).requires_grad_() for x, dim in zip(given[:4], (1, 1, 1, 0), strict=True) if x is not None]
    upstream = (spread(given.grad_out, 1), spread(given.grad_lse, 0))
    metadata = [spread(x, None) for x in arguments]
    with CommDebugMode() as communication:
        sink = leaves[3] if len(leaves) > 3 else None
        results = thdops.attention(*leaves[:3], *metadata, sink=sink, return_lse=True, return_max_logit=True, **options)
        gradients = torch.autograd.grad(results[:2], leaves, upstream)
    everything: list[Any] = [*results, *gradients]
    return {
        "placements": [str(x.placements[0]) for x in everything],
        "communication": communication.get_total_counts(),
        "values": [x.full_tensor().detach() for x in everything],
    }


# --- against one process -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    context = spawn(run_rank, (str(folder),), RANKS, join=False, daemon=True)
    assert context is not None
    deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
    while not context.join(timeout=max(deadline - time.monotonic(), 0)):
        assert time.monotonic() < deadline, "the processes did not end in time"
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_what_one_process_finds(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = computed(CASES[name], numbers(CASES[name]))
    for found in ranks:
        out, lse, max_logit, *gradients = found[name]["values"]
        compare(type(expected)(out, lse, max_logit, tuple(gradients)), expected)


@pytest.mark.parametrize("name", [name for name in CASES if name != "gathered"])
def test_heads_stay_where_they_are(name: str, ranks: list[dict[str, Any]]) -> None:
    """Every result and gradient is cut as what it belongs to, and no rank tells another anything."""
    keys = "P(sum)" if name == "MQA" else "S(1)"
    expected = ["S(1)", "S(0)", "S(0)", "S(1)", keys, keys, "S(0)"]
    for found in ranks:
        assert found[name]["placements"] == expected[: len(found[name]["placements"])]
        assert found[name]["communication"] == 0


def test_what_cannot_be_cut_is_gathered(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["gathered"]["placements"][:3] == ["R", "R", "R"]
        assert found["gathered"]["communication"] > 0
