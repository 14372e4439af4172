"""Packs in the hands of others: pytrees, compilers, exports, worker processes, pinned staging, captured graphs."""

from __future__ import annotations

import functools
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import thdops
from thdops import packing
from thdops.packing import Extra, PackedSequences, PackedSlots, PackSpec


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens differ from each other and from padding."""
    first = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(first, lengths, strict=True)]


SPEC = PackSpec(16, 4, pad_multiple=2, extras=(Extra("weight", torch.float32, (2,)),))


def weighted(lengths: list[int]) -> list[dict[str, object]]:
    return [{"tokens": d, "weight": torch.ones(len(d), 2)} for d in documents_of(lengths)]


def same(a: PackedSequences, b: PackedSequences) -> bool:
    return a.spec == b.spec and all(map(torch.equal, a.tensors(), b.tensors()))


def test_pytree_round_trip() -> None:
    pack = PackedSequences.collate(weighted([3, 5]), SPEC)
    leaves, spec = pytree.tree_flatten(pack)
    assert all(a is b for a, b in zip(leaves, pack.tensors(), strict=True))
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, PackedSequences)
    assert again.extras["weight"] is pack.extras["weight"]
    assert same(pytree.tree_map(torch.clone, pack), pack)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_tensors_round_trip() -> None:
    pack = PackedSequences.collate(weighted([3, 5]), SPEC)
    again = PackedSequences.from_tensors(pack.tensors(), pack.spec)
    assert all(a is b for a, b in zip(again.tensors(), pack.tensors(), strict=True))
    again.validate()
    with pytest.raises(ValueError, match=r"tensors must be 9 \(tokens, .*weight\), got 8"):
        PackedSequences.from_tensors(pack.tensors()[:-1], pack.spec)


def test_compiles_once_for_all_loads() -> None:
    pack = PackedSequences.collate([], SPEC)
    frames = CompileCounterWithBackend("aot_eager")

    def step(pack: PackedSequences) -> tuple[Tensor, PackedSequences]:
        x = thdops.zero_fill(pack.extras["weight"] * pack.tokens[:, None], pack.cu_seqlens, pack.cu_seqlens_padded)
        return x.sum() / pack.num_tokens + pack.spec.max_tokens, pack

    compiled = torch.compile(step, backend=frames, fullgraph=True)
    for lengths in ([3], [3, 5], [1, 2, 3, 4], [16]):
        pack.load_(weighted(lengths))
        value, same_pack = compiled(pack)
        assert torch.equal(value, step(pack)[0])
        assert same_pack.tokens is pack.tokens
    fresh = PackedSequences.collate(weighted([2, 2]), SPEC)
    assert torch.equal(compiled(fresh)[0], step(fresh)[0])
    assert frames.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exports_saves_and_loads(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, pack: PackedSequences) -> Tensor:
            return thdops.zero_fill(pack.extras["weight"] * 2, pack.cu_seqlens, pack.cu_seqlens_padded)

    pack = PackedSequences.collate(weighted([3]), SPEC)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (pack,), strict=strict), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    pack.load_(weighted([1, 6]))
    assert torch.equal(loaded(pack), Model()(pack))


def test_pickles_and_saves() -> None:
    pack = PackedSequences.collate(weighted([3, 5]), SPEC)
    assert same(pickle.loads(pickle.dumps(pack)), pack)
    buffer = io.BytesIO()
    torch.save(pack, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True), pack)
    moved = pack.to("cpu")
    assert same(moved, pack)
    assert repr(pack).startswith("PackedSequences(PackSpec(max_tokens=16")


def test_collates_in_data_loader_workers() -> None:
    """Forked ones; `stress/test_data_loaders.py` spawns some, too."""
    documents = documents_of([3, 1, 4, 1, 5, 2])
    spec = PackSpec(16, 4, pad_multiple=2)
    loader = torch.utils.data.DataLoader(
        documents,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        collate_fn=functools.partial(PackedSequences.collate, spec=spec),
        multiprocessing_context="fork",
        timeout=120,
    )
    batch = PackedSequences.collate([], spec)
    seen = []
    for pack in loader:
        batch.load_(pack)
        batch.validate()
        seen += [rows.tolist() for rows in batch.unpack(batch.tokens)]
    assert seen == documents


def test_staging_is_not_written_before_its_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol, with events that only note when they are waited for."""
    log: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            log.append(f"wait {self.number}")

    numbers = iter(range(9))
    monkeypatch.setattr(packing, "_recorded", lambda device: Event(next(numbers)))
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, empty=torch.empty, **k: empty(*a, **k))
    staging = packing._Staging(PackSpec(8, 2), torch.device("cpu"))
    taken = []
    for load in range(4):
        taken.append(staging.take())
        log.append(f"write {load}")
        staging.sent()
    assert log == ["write 0", "write 1", "wait 0", "write 2", "wait 1", "write 3"]
    assert taken[0] is taken[2]
    assert taken[1] is taken[3]
    assert taken[0] is not taken[1]
    assert staging.take() is taken[0]
    assert staging.take() is taken[0], "a set that sent nothing keeps its turn"


# --- on a GPU ---------------------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned staging and graphs need a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
def test_loads_in_flight_do_not_overwrite_each_other() -> None:
    """The stream is kept busy, so the copies of every load are still pending when the next one is staged."""
    batch = PackedSequences.allocate(1 << 16, 4, device="cuda")
    seen = []
    for value in range(1, 9):
        torch.cuda._sleep(20_000_000)
        batch.load_([np.full(50_000 + value, value)])
        seen.append([t.clone() for t in batch.tensors()])
    for value, tensors in enumerate(seen, start=1):
        expected = PackedSequences.collate([np.full(50_000 + value, value)], batch.spec)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, expected.tensors(), strict=True))


@pytest.mark.gpu
@needs_gpu
def test_loading_does_not_wait_for_the_stream() -> None:
    batch = PackedSequences.allocate(256, 4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        batch.load_([[1, 2, 3]])
        batch.load_([[4, 5]])
        busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert busy
    assert batch.tokens[:3].tolist() == [4, 5, 0]


@pytest.mark.gpu
@needs_gpu
def test_a_graph_reads_what_was_loaded_last() -> None:
    batch = PackedSequences.allocate(64, 8, pad_multiple=4, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        x = batch.tokens.float().masked_fill(batch.padding_mask, float("nan"))
        filled = thdops.zero_fill(x, batch.cu_seqlens, batch.cu_seqlens_padded)
        return filled, filled.sum() / batch.num_tokens

    batch.load_(documents_of([64]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
        with pytest.raises(RuntimeError, match="must not be capturing a CUDA graph"):
            batch.load_([[1]])
    for lengths in ([64], [1], [5, 0, 7, 30], [4] * 8, [3, 2]):
        batch.load_(documents_of(lengths))
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            assert torch.equal(replayed, eager)
        assert [rows.tolist() for rows in batch.unpack(captured[0])] == documents_of(lengths)


@pytest.mark.gpu
@needs_gpu
def test_a_released_slot_is_reloaded_behind_its_readers_on_another_stream() -> None:
    slots = PackedSlots(PackSpec(1024, 4), slots=1, device="cuda")
    reader, loader = torch.cuda.Stream(), torch.cuda.Stream()
    slots.load_([[1] * 1000], 0)
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(100_000_000)
        read = slots[0].tokens.clone()
        slots.release(0)
    with torch.cuda.stream(loader):
        slots.load_([[2] * 1000], 0)
    torch.cuda.synchronize()
    assert read[:1000].eq(1).all()
    assert slots[0].tokens[:1000].eq(2).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_packs_of_a_data_loader_are_loaded_on_the_gpu(pinned: bool) -> None:
    documents = documents_of([3, 1, 4, 1, 5, 2])
    batch = PackedSequences.allocate(16, 4, device="cuda")
    loader = torch.utils.data.DataLoader(
        documents,  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=functools.partial(PackedSequences.collate, spec=batch.spec),
        pin_memory=pinned,
    )
    seen = []
    for pack in loader:
        assert pack.tokens.is_pinned() == pinned
        batch.load_(pack)
        seen += [rows.tolist() for rows in batch.unpack(batch.tokens)]
    assert seen == documents
    batch.validate()
    assert pickle.loads(pickle.dumps(batch)).tokens.is_cuda
