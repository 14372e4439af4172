"""Graphs that are replayed for long, over packs of random layout: every bit of every result is eager mode's."""

from __future__ import annotations

import random

import pytest
import torch
from packed_step import Step, allocate, differs, random_documents

from thdops import graphs
from thdops.conformance.graphs import syncs_are_errors

pytestmark = [pytest.mark.stress, pytest.mark.gpu]

ROWS = 1024
SIZES = (64, 128, 256, 512, ROWS)


def test_two_thousand_replays_of_one_graph() -> None:
    chance, step, pack = random.Random(0), Step(ROWS, "cuda"), allocate(ROWS, "cuda")
    pack.load_(random_documents(chance, ROWS))
    run = graphs.capture(step, pack)
    wrong = torch.ones(2000, dtype=torch.bool, device="cuda")
    with syncs_are_errors():
        for seen in wrong:
            pack.load_(random_documents(chance, ROWS))
            seen.copy_(differs(run(), step(pack)))
    assert wrong.nonzero().flatten().tolist() == []
    assert run.report.replays == len(wrong)


def test_graphs_of_five_sizes_share_a_pool() -> None:
    """Whichever graph ran before, and whatever eager calls allocated in between."""
    chance, step, pack = random.Random(1), Step(ROWS, "cuda"), allocate(ROWS, "cuda")
    pack.load_(random_documents(chance, ROWS))
    run = graphs.capture(step, pack, SIZES)
    views = {size: graphs._first_rows(pack, size) for size in SIZES}
    wrong = torch.ones(500, dtype=torch.bool, device="cuda")
    with syncs_are_errors():
        for seen in wrong:
            pack.load_(random_documents(chance, chance.choice(SIZES)))
            seen.copy_(differs(run(), step(views[run.bucket or ROWS])))
    assert wrong.nonzero().flatten().tolist() == []
    assert run.report.captures == len(SIZES)
    assert run.report.eager == 0
    assert min(run.report.runs.values()) > len(wrong) // 20
