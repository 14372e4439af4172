"""Workers of a DataLoader that pack their share of a corpus and call ops on the packs, forked from a process in use or spawned."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from packed_step import Step, random_documents
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import thdops
from thdops.packing import PackedSequences, PackSpec

pytestmark = pytest.mark.stress

SPEC = PackSpec(96, 12, pad_multiple=4)


class _Packs(IterableDataset[tuple[PackedSequences, Tensor]]):
    """Every n-th document of a corpus in packs, with each row's place in its document, of n workers."""

    def __init__(self, corpus: list[Tensor]) -> None:
        self.corpus = corpus

    def __iter__(self) -> Iterator[tuple[PackedSequences, Tensor]]:
        worker = get_worker_info()
        assert worker is not None
        for documents in SPEC.pack(self.corpus[worker.id :: worker.num_workers], split=True):
            pack = PackedSequences.collate(documents, SPEC)
            place = thdops.positions(pack.cu_seqlens, pack.cu_seqlens_padded, SPEC.max_tokens)
            yield pack, thdops.zero_fill(place, pack.cu_seqlens, pack.cu_seqlens_padded)


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_pack_and_call_ops(start: str, workers: int) -> None:
    chance = random.Random(0)
    corpus = [torch.randint(1 << 30, (chance.randint(0, 120),)) for _ in range(40)]
    batch = PackedSequences.allocate(96, 12, pad_multiple=4)
    Step(96, "cpu")(batch.load_(random_documents(chance, 96)))  # what a worker inherits has been used, backward included
    loader = DataLoader(_Packs(corpus), batch_size=None, num_workers=workers, multiprocessing_context=start, timeout=120)
    seen: list[Tensor] = []
    for pack, place in loader:
        batch.load_(pack)
        batch.validate()
        assert torch.equal(place, batch.positions)
        seen += [rows.clone() for rows in batch.unpack(batch.tokens)]
    assert torch.equal(torch.cat(seen).sort().values, torch.cat(corpus).sort().values)
