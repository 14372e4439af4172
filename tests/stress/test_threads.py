"""Two threads that call ops at the same time, on a GPU each on a stream of its own: each finds what it finds alone."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from packed_step import Step, allocate, differs, random_documents
from torch import Tensor

pytestmark = pytest.mark.stress

LAYOUTS, THREADS = 4, 2


@pytest.fixture
def _restless() -> Iterator[None]:
    """The interpreter changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class _Worker:
    """A thread's own tensors and packs, and what each layout gives while nobody else runs."""

    def __init__(self, number: int, rows: int, device: str) -> None:
        chance = random.Random(number)
        self.device, self.step, self.pack = device, Step(rows, device), allocate(rows, device)
        self.layouts = [random_documents(chance, rows) for _ in range(LAYOUTS)]
        self.alone = [self.step(self.pack.load_(documents)) for documents in self.layouts]

    def run(self, barrier: threading.Barrier, turns: int) -> Tensor:
        """bool [turns]: which turns went wrong."""
        wrong = torch.ones(turns, dtype=torch.bool, device=self.device)
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            for turn in range(turns):
                layout = turn % LAYOUTS
                wrong[turn].copy_(differs(self.step(self.pack.load_(self.layouts[layout])), self.alone[layout]))
            if on_gpu:
                torch.cuda.current_stream().synchronize()
        return wrong


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize(("device", "rows", "turns"), [("cpu", 48, 40), pytest.param("cuda", 1024, 200, marks=pytest.mark.gpu)])
def test_two_threads_call_ops_at_once(device: str, rows: int, turns: int) -> None:
    workers = [_Worker(number, rows // (1 + number), device) for number in range(THREADS)]
    if device == "cuda" and importlib.util.find_spec("triton"):
        from thdops.ops import launch

        launch._compiled.clear()  # both threads fill it again
    barrier = threading.Barrier(THREADS, timeout=60)
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [future.result() for future in [pool.submit(worker.run, barrier, turns) for worker in workers]]
    assert [turns.nonzero().flatten().tolist() for turns in wrong] == [[]] * THREADS
