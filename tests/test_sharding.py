"""A pack shared out among context-parallel ranks: every row has one owner, and what a rank holds describes itself.

T rows of the pack, W ranks. Groups are tested where there are processes: `test_context_parallel_distributed.py`.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import thdops
from thdops import graphs
from thdops.packing import Extra, PackedSequences, PackSpec
from thdops.sharding import ShardedSequences

W = 2
SPEC = PackSpec(48, 5, pad_multiple=2 * W, extras=(Extra("weight", torch.float32, (2,)),))
LENGTHS = ([3, 11, 0, 8], [], [48], [1, 1, 1, 1, 1])


def weighted(lengths: list[int]) -> list[dict[str, object]]:
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    tokens = [list(range(1 + start, 1 + start + length)) for start, length in zip(first, lengths, strict=True)]
    return [{"tokens": document, "weight": torch.rand(len(document), 2) + 1} for document in tokens]


@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("tail", ["padding", "sequence"])
@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
def test_every_row_has_one_owner(lengths: list[int], tail: str, partition: str) -> None:
    pack = PackedSequences.allocate(48, 5, pad_multiple=2 * W, tail=tail, extras=SPEC.extras)  # type: ignore[arg-type]
    pack.load_(weighted(lengths))
    shards = [ShardedSequences.of(pack, W, rank, partition) for rank in range(W)]
    owned = torch.cat([shard.indices for shard in shards]).long()
    assert owned.sort().values.tolist() == list(range(48))
    for name, whole in pack.token_like().items():
        parts = [shard.token_like()[name] for shard in shards]
        assert all(part.shape[0] == 48 // W for part in parts)
        assert torch.equal(torch.cat(parts), whole[owned]), name
    assert sum(shard.local_num_tokens for shard in shards) == pack.num_tokens
    for shard in shards:
        assert shard.num_tokens is pack.num_tokens
        assert shard.cu_seqlens is pack.cu_seqlens
        assert shard.cu_seqlens_padded is pack.cu_seqlens_padded
        own = thdops.padding_mask(shard.local_cu_seqlens, shard.local_cu_seqlens_padded, 48 // W)
        assert torch.equal(own, shard.padding_mask) or tail == "sequence"  # whose tail cu_seqlens counts as valid
        if partition == "zigzag":
            place = {"cp_size": W, "cp_rank": shard.share.cp_rank}
            assert torch.equal(shard.positions, thdops.positions(pack.cu_seqlens, pack.cu_seqlens_padded, 48 // W, **place))


def test_compiles_once_for_all_loads_and_follows_them() -> None:
    pack = PackedSequences.collate([], SPEC)
    frames = CompileCounterWithBackend("aot_eager")

    def step(pack: PackedSequences) -> tuple[Tensor, ShardedSequences]:
        mine = ShardedSequences.of(pack, W, 1)
        x = thdops.zero_fill(mine.extras["weight"], mine.local_cu_seqlens, mine.local_cu_seqlens_padded)
        return x.sum() / mine.local_num_tokens.clamp(min=1), mine

    compiled = torch.compile(step, backend=frames, fullgraph=True)
    for lengths in LENGTHS:
        pack.load_(weighted(lengths))
        (value, mine), (expected, eager) = compiled(pack), step(pack)
        assert torch.equal(value, expected)
        assert all(map(torch.equal, mine.tensors(), eager.tensors()))
    assert frames.frame_count == 1


def test_is_a_pytree_of_its_tensors() -> None:
    shard = ShardedSequences.of(PackedSequences.collate(weighted([3, 5]), SPEC), W, 0)
    leaves, static = pytree.tree_flatten(shard)
    assert all(a is b for a, b in zip(leaves, shard.tensors(), strict=True))
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(static)))
    for other in (again, pickle.loads(pickle.dumps(shard)), pytree.tree_map(torch.clone, shard)):
        assert (other.spec, other.share) == (shard.spec, shard.share)
        assert all(map(torch.equal, other.tensors(), shard.tensors()))
    with pytest.raises(ValueError, match=r"tensors must be 13 \(tokens, .*indices, weight\), got 12"):
        ShardedSequences.from_tensors(leaves[:-1], shard.spec, shard.share)


@pytest.mark.parametrize(
    ("max_tokens", "pad_multiple", "text"),
    [
        (10, 1, "max_tokens must be a multiple of 2 * cp_size (4), got 10; allocate the pack with such a capacity"),
        (
            12,
            6,
            "pad_multiple must be a multiple of 2 * cp_size (4), got 6; allocate the pack with pad_multiple=4: every sequence is"
            " cut into 2 * cp_size chunks",
        ),
    ],
)
def test_a_pack_that_cannot_be_shared_out_is_refused(max_tokens: int, pad_multiple: int, text: str) -> None:
    pack = PackedSequences.allocate(max_tokens, 2, pad_multiple=pad_multiple)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        ShardedSequences.of(pack, W, 0)
    assert str(refused.value) == f"PackedSequences.shard: {text}"


@pytest.mark.parametrize(
    ("cp_size", "error", "text"),
    [(0, ValueError, "cp_size must be at least 1, got 0"), ("2", TypeError, "cp_size must be a Python number, got a str")],
)
def test_a_number_of_ranks_that_is_none_is_refused(cp_size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"PackedSequences.shard: {text}"):
        ShardedSequences.of(PackedSequences.allocate(8, 1, pad_multiple=4), cp_size, 0)


@pytest.mark.parametrize("group", [[], None, "nobody's"])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ValueError, match=r"PackedSequences\.shard: group must be a process group"):
        PackedSequences.allocate(8, 1, pad_multiple=4).shard(group)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA GPU")
def test_a_graph_shares_out_what_was_loaded_last() -> None:
    pack = PackedSequences.allocate(48, 5, pad_multiple=2 * W, extras=SPEC.extras, device="cuda")
    pack.load_(weighted([3, 11]))
    step = graphs.capture(lambda pack: ShardedSequences.of(pack, W, 1).tensors(), pack)
    for lengths in LENGTHS:
        pack.load_(weighted(lengths))
        torch.cuda.set_sync_debug_mode("error")
        try:
            replayed = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, replayed, ShardedSequences.of(pack, W, 1).tensors()))
