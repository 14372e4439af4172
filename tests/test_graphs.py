"""Capture with buckets: which one a batch goes to, what a step sees there, what the report says. Graphs themselves need a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thdops
from thdops import graphs
from thdops.packing import Extra, PackedSequences, PackSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import graph_buckets  # a script, found beside its modules

SIZES = (8, 16, 32)


def allocate(max_tokens: int = 32, device: str = "cpu", **options: Any) -> PackedSequences:
    return PackedSequences.allocate(max_tokens, 4, pad_multiple=4, device=device, **options)


def documents(*lengths: int) -> list[list[int]]:
    return [list(range(1, length + 1)) for length in lengths]


def summed(pack: PackedSequences) -> Tensor:
    """Rows of the pack, sum of the tokens of valid rows, valid rows: by the row maps, as a model would find them."""
    padding = thdops.padding_mask(pack.cu_seqlens, pack.cu_seqlens_padded, pack.tokens.shape[0])
    total = torch.where(padding, 0, pack.tokens).sum()
    return torch.stack([torch.full_like(total, len(padding)), total, (~padding).sum()])


@pytest.mark.parametrize(
    ("lengths", "rows"), [((), 8), ((8,), 8), ((5,), 8), ((5, 1), 16), ((3, 0, 9), 16), ((13, 3), 32), ((29,), 32)]
)
def test_the_smallest_bucket_that_fits(lengths: tuple[int, ...], rows: int) -> None:
    batch = allocate()
    run = graphs.capture(summed, batch, SIZES)
    batch.load_(documents(*lengths))
    assert run.bucket == rows
    assert run().tolist() == [rows, sum(sum(document) for document in documents(*lengths)), sum(lengths)]


def test_eager_on_the_whole_batch_where_no_bucket_fits_and_the_report() -> None:
    batch = allocate()
    run = graphs.capture(summed, batch, (16, 8, 8))
    for lengths in ((5,), (9,), (17,), (3,), (28, 2)):
        batch.load_(documents(*lengths))
        rows = int(run()[0])
        assert rows == (8 if sum(lengths) <= 8 else 16 if sum(lengths) <= 16 else 32)
    assert run.report == graphs.Report(captures=0, runs={8: 2, 16: 1}, eager=2, pool_bytes=0)
    assert run.report.replays == 0
    runs = "eager calls, for want of a GPU: 2 of 8 rows, 1 of 16 rows"
    assert str(run.report) == f"graphs captured: 0, 0.0 MiB in their pool; {runs}; eager, no bucket fits: 2"
    assert graphs.Report(2, {8: 2, 16: 1}, 0, 0).replays == 3


def test_one_bucket_is_the_batch_itself() -> None:
    batch = allocate(tail="sequence")
    seen: list[PackedSequences] = []
    graphs.capture(seen.append, batch)()
    assert seen == [batch]


def test_a_bucket_is_a_view() -> None:
    batch = allocate(extras=(Extra("score", torch.float32, (3,)),))
    packs: list[PackedSequences] = []
    run = graphs.capture(packs.append, batch, SIZES)
    batch.load_([{"tokens": [5, 6, 7], "score": torch.ones(3, 3)}])
    run()
    (pack,) = packs
    assert pack.spec == PackSpec(8, 4, pad_multiple=4, extras=batch.spec.extras)
    pack.validate()
    for name, tensor in pack.token_like().items():
        assert tensor.shape[0] == 8
        assert tensor.data_ptr() == batch.token_like()[name].data_ptr()
    assert pack.cu_seqlens is batch.cu_seqlens
    assert pack.num_tokens is batch.num_tokens


def test_the_host_knows_the_rows() -> None:
    batch = allocate()
    assert batch.loaded_rows == 0
    assert batch.load_(documents(5, 0, 3)).loaded_rows == 12
    collated = PackedSequences.collate(documents(2), batch.spec)
    assert collated.loaded_rows == 4
    assert collated.to("cpu").loaded_rows == 4
    with pytest.raises(ValueError, match="fit max_tokens"):
        batch.load_(documents(33))
    assert batch.loaded_rows == 12
    assert batch.load_(collated).loaded_rows == 4
    run = graphs.capture(summed, batch, SIZES)
    batch.load_(PackedSequences.from_tensors(collated.tensors(), batch.spec))
    assert batch.loaded_rows is None
    assert run.bucket == 32  # filled in a way that the host does not know: all rows


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, pack: PackedSequences) -> Tensor:
        return self.weight * torch.where(pack.padding_mask, 0, pack.tokens).sum()


def test_differentiable_results() -> None:
    batch, module = allocate(), Doubled()
    run = graphs.capture(module, batch, SIZES, differentiable=True)
    for lengths, expected in (((3,), 6.0), ((4, 10), 10.0 + 55.0)):
        batch.load_(documents(*lengths))
        module.weight.grad = None
        run().backward()
        assert module.weight.grad is not None
        assert float(module.weight.grad) == expected


REFUSALS = [
    ({"buckets": ()}, ValueError, "buckets must hold a capacity, got none; pass None for one bucket of all rows"),
    ({"buckets": (0,)}, ValueError, "buckets must be at least 1, got 0; pass a larger one"),
    ({"buckets": (64,)}, ValueError, "buckets must be at most the batch's max_tokens (32), got 64; allocate a larger batch"),
    (
        {"buckets": (10,)},
        ValueError,
        "buckets must be multiples of pad_multiple (4), got 10; a document's rows are rounded up to it",
    ),
    (
        {"buckets": (8, 32), "tail": "sequence"},
        ValueError,
        "buckets must be max_tokens (32) alone with tail='sequence', got 8; that tail ends at the capacity; use tail='padding'",
    ),
    (
        {"differentiable": True},
        TypeError,
        "step must be a torch.nn.Module with differentiable=True, got a function; its parameters must be known to get gradients",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSALS)
def test_refusals(options: dict[str, Any], error: type[Exception], text: str) -> None:
    batch = allocate(tail=options.pop("tail", "padding"))
    with pytest.raises(error, match=f"^graphs.capture: {re.escape(text)}$"):
        graphs.capture(summed, batch, **options)


# --- the order of things, on a stand-in for CUDA ----------------------------------------------------------------------------------


class _Graph:
    def replay(self) -> None: ...


class _Stream:
    def wait_stream(self, other: _Stream) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was begun, in order."""
    events: list[str] = []

    @contextmanager
    def graph(graph: _Graph, pool: Any, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        events.append(f"{capture_error_mode} capture in {pool}")
        yield

    @contextmanager
    def stream(stream: _Stream) -> Iterator[None]:
        events.append("side stream")
        yield

    stand_ins = {
        "CUDAGraph": _Graph,
        "Stream": _Stream,
        "current_stream": _Stream,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 7),
        "graph": graph,
        "stream": stream,
        "memory_snapshot": lambda: [{"segment_pool_id": (0, p), "total_size": 2**p} for p in (5, 7, 7)],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    return events


def _captured(step: graphs.Step, batch: PackedSequences, state: tuple[Tensor, ...]) -> graphs.Captured:
    packs = {capacity: graphs._first_rows(batch, capacity) for capacity in reversed(SIZES)}
    return graphs._captured(step, batch, packs, state, graphs._capture_whole)


def test_warm_up_leaves_no_trace(cuda: list[str]) -> None:
    """Largest first, in one pool; each on the loaded documents cut to its rows; batch and state as before."""
    batch, state = allocate(), torch.zeros((), requires_grad=True)
    batch.load_(documents(6, 3, 10))
    before = [tensor.clone() for tensor in batch.tensors()]
    seen: list[list[int]] = []

    def step(pack: PackedSequences) -> Tensor:
        seen.append([pack.spec.max_tokens, int(pack.cu_seqlens_padded.max()), int(pack.num_tokens)])
        with torch.no_grad():
            return state.add_(1)

    run = _captured(step, batch, (state,))
    assert seen == [[32, 24, 19]] * 4 + [[16, 16, 13]] * 4 + [[8, 8, 6]] * 4
    assert cuda == ["side stream", "global capture in (0, 7)"] * 3
    assert float(state.detach()) == 0
    assert all(torch.equal(now, then) for now, then in zip(batch.tensors(), before, strict=True))
    assert batch.loaded_rows == 24
    for lengths in ((6, 3, 10), (1,), (2,)):
        batch.load_(documents(*lengths))
        assert run() is state  # the graph's own result
    assert len(seen) == 12  # replays call no Python
    assert run.report == graphs.Report(captures=3, runs={8: 2, 16: 0, 32: 1}, eager=0, pool_bytes=256)
    assert run.report.replays == 3


def test_threads_of_process_groups_do_not_end_a_capture(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    _captured(lambda pack: None, allocate(), ())
    assert cuda == ["side stream", "thread_local capture in (0, 7)"] * 3


def test_a_step_that_cannot_be_captured(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, state = allocate(), torch.zeros(())
    calls = 0

    def step(pack: PackedSequences) -> None:
        nonlocal calls
        calls += 1
        state.add_(1)
        if calls == 4:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    text = "step must be capturable: no host read of a device value, nothing created lazily, got operation not permitted"
    with pytest.raises(RuntimeError, match=f"^graphs.capture: {text} when stream is capturing; the error above says where$"):
        _captured(step, batch, (state,))
    assert float(state.detach()) == 0
    assert int(batch.cu_seqlens_padded.max()) == 0


# --- GPU --------------------------------------------------------------------------------------------------------------------------


def _attended(pack: PackedSequences, table: Tensor) -> Tensor:
    """Token embeddings attending to each other, and their squares summed."""
    q = thdops.zero_fill(table[pack.tokens], pack.cu_seqlens, pack.cu_seqlens_padded).view(-1, 2, 32)
    out = thdops.attention(q, q, q, pack.cu_seqlens, cu_seqlens_q_padded=pack.cu_seqlens_padded, causal=True)
    return out.float().square().sum()


LAYOUTS = ((200, 30), (1,), (512, 500), (), (100, 3, 90), (257,), (1000,), (2, 0, 2))


@pytest.mark.gpu
def test_replays_equal_eager_in_one_pool() -> None:
    """A whole step with backward and update; state lists the table, so warm-ups do not count."""
    losses = {}
    for way in ("eager", "graphs"):
        torch.manual_seed(0)
        batch = PackedSequences.allocate(1024, 4, device="cuda")
        table = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        table.grad = torch.zeros_like(table)

        def step(pack: PackedSequences, table: Tensor = table) -> Tensor:
            assert table.grad is not None
            table.grad.zero_()
            loss = _attended(pack, table)
            loss.backward()
            with torch.no_grad():
                table.sub_(table.grad, alpha=1e-2)
            return loss.detach()

        batch.load_(documents(300, 20))
        run = graphs.capture(step, batch, (256, 512, 1024), state=[table])
        packs = {capacity: graphs._first_rows(batch, capacity) for capacity in (256, 512, 1024)}
        losses[way] = []
        for lengths in LAYOUTS:
            batch.load_(documents(*lengths))
            result = run() if way == "graphs" else step(packs[run.bucket or 1024])
            losses[way].append(result.clone())
        if way == "graphs":
            assert run.report.captures == 3
            assert run.report.replays == len(LAYOUTS)
            assert run.report.eager == 0
            assert run.report.pool_bytes > 0
    assert torch.stack(losses["eager"]).isfinite().all()
    torch.testing.assert_close(torch.stack(losses["graphs"]), torch.stack(losses["eager"]), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_forward_and_backward_as_two_graphs() -> None:
    batch = PackedSequences.allocate(1024, 4, device="cuda")
    batch.load_(documents(300, 20))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16))

        def forward(self, pack: PackedSequences) -> Tensor:
            return _attended(pack, self.table)

    model = Model()
    run = graphs.capture(model, batch, (256, 1024), differentiable=True)
    for lengths in LAYOUTS:
        batch.load_(documents(*lengths))
        grads = []
        for call in (run, lambda: model(batch)):
            model.table.grad = None
            (call() * 0.5).backward()
            assert model.table.grad is not None
            grads.append(model.table.grad.clone())
        torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-2)
    assert run.report.replays == len(LAYOUTS)


# --- the benchmark ----------------------------------------------------------------------------------------------------------------


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pictures" / "graph_buckets.svg"
    options = ["--max-tokens", "128", "--steps", "1", "--out", str(tmp_path), "--picture", str(picture)]
    assert graph_buckets.main(options) == 0
    found = json.loads((tmp_path / "buckets.json").read_text())
    assert {way: len(times) for way, times in found["ms"].items()} == dict.fromkeys(("exact", "one graph", "4 buckets"), 9)
    out = capsys.readouterr().out
    table = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert table[0] == ["tokens", "exact", "one graph", "4 buckets", "4 buckets / exact"]
    assert [row[0] for row in table[2:]] == [f"{share:.1%}" for share in graph_buckets.SHARES]
    ratios = [buckets / exact for buckets, exact in zip(found["ms"]["4 buckets"], found["ms"]["exact"], strict=True)]
    assert [row[-1] for row in table[2:]] == [f"{ratio:.2f}" for ratio in ratios]
    assert f"4 buckets take at most {max(ratios):.2f} times as long as the exact size; on a CPU, which captures nothing," in out
    if importlib.util.find_spec("matplotlib"):
        texts = re.findall("<!-- (.*?) -->", picture.read_text())
        assert {"eager, exact size", "one graph, pool of 0.00 GiB", "4 buckets, pool of 0.00 GiB"} <= set(texts)
    calls = 1 + graph_buckets._LOTS
    assert found["graphs"]["one graph"]["runs"] == {"128": 9 * calls}
    # shares of 5, 12.5 and 25 % stand in the first bucket, then two in each
    assert found["graphs"]["4 buckets"]["runs"] == {"32": 3 * calls, "64": 2 * calls, "96": 2 * calls, "128": 2 * calls}
