"""The example's training killed at its worst moments, and its checkpoint damaged at every place."""

from __future__ import annotations

import os
import random
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import get_context

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from packed_moe import checkpoint, data, loop, report
from packed_moe.config import UserError, make_config

pytestmark = pytest.mark.stress

SIZES = {"steps": 9, "max_tokens": 96, "max_seqs": 6, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "experts": 3, "ffn": 16}
EVERY = 2


def train(folder: Path, resume: bool = False) -> loop.Result:
    """The example's loop at test size, a checkpoint every second step."""
    config = make_config("cpu", 0, **SIZES)
    documents = data.load_documents(str(Path(sysconfig.get_paths()["stdlib"]) / "json"), config.max_tokens // 2)
    return loop.run_mode("eager", config, documents, loop.Schedule(folder, resume, EVERY), report.Progress())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_step() -> None:
    """Between the backward of step 5 and its update, a checkpoint of step 4 behind."""
    real, steps = torch.nn.utils.clip_grad_norm_, 0

    def clip(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            _die()
        return real(*args)

    torch.nn.utils.clip_grad_norm_ = clip


def _in_a_write() -> None:
    """While the checkpoint of step 6 is half written."""
    writes = 0

    def sync(file: int) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            os.ftruncate(file, os.fstat(file).st_size // 2)
            _die()

    os.fsync = sync


def run_killed(folder: str, prepare: Callable[[], None]) -> None:
    """In a process of its own: train until the signal."""
    torch.set_num_threads(1)
    prepare()
    train(Path(folder))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A sum over two threads rounds otherwise than one over one, and the killed processes have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, loop.Result]:
    """A run that nobody killed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(folder)


@pytest.mark.parametrize(("moment", "saved"), [(_in_a_step, 4), (_in_a_write, 4)])
def test_a_killed_run_goes_on_bit_for_bit(
    moment: Callable[[], None], saved: int, finished: tuple[Path, loop.Result], tmp_path: Path
) -> None:
    context: Any = get_context("forkserver")  # never forked from this process, which may have used a GPU
    context.set_forkserver_preload(["torch"])
    process = context.Process(target=run_killed, args=(str(tmp_path), moment), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    resumed = train(tmp_path, resume=True)
    assert resumed.resumed_at == saved
    assert torch.equal(resumed.history, finished[1].history)
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in finished[1].weights.items())


def test_a_checkpoint_damaged_anywhere_is_refused(finished: tuple[Path, loop.Result], tmp_path: Path) -> None:
    """One bit flipped, or the end missing, at the first and last byte and at random ones."""
    whole = (finished[0] / "checkpoint-eager.pt").read_bytes()
    chance, path = random.Random(0), tmp_path / "damaged.pt"
    for place in (0, len(whole) - 1, *chance.sample(range(len(whole)), 50)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        for damaged in (flipped, whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match="is corrupt or no checkpoint of this example"):
                checkpoint.load(path, {})
