"""A context-parallel rank's share of a pack: its rows of every token-like tensor, and the metadata of both.

    mine = batch.shard(mesh)  # inside the step, eager, compiled or captured: of what batch.load_ put there last
    q, k, v = project(embed(mine.tokens), mine.positions)  # n rows
    out = thdops.context_parallel.attention(q, k, v, mine.cu_seqlens, mine.cu_seqlens_padded, group=mesh, causal=True)
    routed = thdops.router(logits(out), topk, padding_mask=mine.padding_mask)  # its sums are added up over the ranks

T rows of the pack, W ranks (cp_size), n = T / W rows of a rank, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meta_kernels.contract import check_count, check_integers, refusal
from thdops._documents import ROW_FIELDS, PackSpec, spec_from_json, spec_to_json
from thdops.ops.context.op import local_cu_seqlens, partition_indices

if TYPE_CHECKING:
    from thdops.packing import PackedSequences

__all__ = ["ShardedSequences", "Share"]

_SHARED = ("cu_seqlens", "cu_seqlens_padded", "num_tokens", "num_seqs")
_LOCAL = ("local_cu_seqlens", "local_cu_seqlens_padded", "local_num_tokens", "indices")
_FIELDS = (*ROW_FIELDS, *_SHARED, *_LOCAL)


class Share(NamedTuple):
    """Which rows of a pack: those of rank `cp_rank` of `cp_size`, by `partition`. Static."""

    cp_size: int
    cp_rank: int
    partition: str


@dataclass(eq=False, repr=False)
class ShardedSequences:
    """What a rank has of a `PackedSequences`. A pytree whose leaves are the tensors; `PackedSequences.shard` makes it.

    Token-like tensors hold the rank's n = T / W rows, in the order of `context_parallel.partition_indices`. Metadata and counts
    without a prefix are the whole pack's, and are its very tensors: what `context_parallel.attention` and losses over the whole
    batch take. Those that begin with `local_` describe the rank's own rows, which are a packed batch like any other: what every
    op that works row by row takes (`zero_fill`, `router`, `moe_aux_loss`).

    Attributes:
        tokens, labels: int64 `[n]`; a label is the next token of the document, wherever that stands.
        positions: int32 `[n]`, the row's place in its whole sequence: for RoPE. 0 on padding.
        padding_mask: bool `[n]`, True on rows that hold no document token.
        cu_seqlens, cu_seqlens_padded: int32 `[B+1]` of the whole pack.
        num_tokens, num_seqs: 0-d int64 of the whole pack.
        local_cu_seqlens, local_cu_seqlens_padded: int32 `[B+1]`, exact for the rank's rows (`context_parallel.local_cu_seqlens`).
        local_num_tokens: 0-d int64, how many of the rank's rows hold a document token.
        indices: int32 `[n]`, the rows of the pack that the rank has.
        extras: the pack's further token-like tensors, `[n, ...]` by name.
        spec: the capacity of the whole pack.
        share: which rank's rows these are.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    padding_mask: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    num_tokens: Tensor
    num_seqs: Tensor
    local_cu_seqlens: Tensor
    local_cu_seqlens_padded: Tensor
    local_num_tokens: Tensor
    indices: Tensor
    extras: dict[str, Tensor]
    spec: PackSpec
    share: Share

    @classmethod
    def of(cls, pack: PackedSequences, cp_size: int, cp_rank: int, partition: str = "zigzag") -> ShardedSequences:
        """As `PackedSequences.shard`, of a rank that is told by number: needs no process group."""
        op = "PackedSequences.shard"
        check_integers(op, cp_size=cp_size, cp_rank=cp_rank)
        check_count(op, "cp_size", cp_size, 1)
        unit = 2 * cp_size
        for name, fix in (
            ("max_tokens", "allocate the pack with such a capacity"),
            ("pad_multiple", f"allocate the pack with pad_multiple={unit}: every sequence is cut into 2 * cp_size chunks"),
        ):
            if getattr(pack.spec, name) % unit:
                raise refusal(op, name, f"be a multiple of 2 * cp_size ({unit})", getattr(pack.spec, name), fix)
        indices = partition_indices(pack.cu_seqlens_padded, pack.spec.max_tokens, cp_size, cp_rank, partition=partition)
        valid, padded = local_cu_seqlens(pack.cu_seqlens, pack.cu_seqlens_padded, cp_size, cp_rank, partition=partition)
        rows = {name: tensor.index_select(0, indices) for name, tensor in pack.token_like().items()}
        shared = (getattr(pack, name) for name in _SHARED)
        local = (valid, padded, (~rows["padding_mask"]).sum(), indices)
        tensors = (*(rows.pop(name) for name in ROW_FIELDS), *shared, *local)
        return cls(*tensors, extras=rows, spec=pack.spec, share=Share(cp_size, cp_rank, partition))

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], spec: PackSpec, share: Share) -> ShardedSequences:
        """The inverse of `tensors()`; no copy. `spec` and `share` are static: take them from where the tensors came from."""
        names = [*_FIELDS, *(extra.name for extra in spec.extras)]
        if len(tensors) != len(names):
            fix = "pass what tensors() gave"
            raise refusal("ShardedSequences.from_tensors", "tensors", f"be {len(names)} ({', '.join(names)})", len(tensors), fix)
        extras = dict(zip(names[len(_FIELDS) :], tensors[len(_FIELDS) :], strict=True))
        return cls(*tensors[: len(_FIELDS)], extras=extras, spec=spec, share=share)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in a fixed order: what a graphed callable takes. `from_tensors` puts them back together."""
        return (*(getattr(self, name) for name in _FIELDS), *self.extras.values())

    def token_like(self) -> dict[str, Tensor]:
        """Every tensor that has a row per token, by name: tokens, labels, positions, padding_mask and the extras."""
        return {name: getattr(self, name) for name in ROW_FIELDS} | self.extras

    def __repr__(self) -> str:
        return f"ShardedSequences({self.share}, {self.spec}, device={getattr(self.tokens, 'device', None)})"


_Static = tuple[PackSpec, Share]


def _flatten(shard: ShardedSequences) -> tuple[list[Any], _Static]:
    return list(shard.tensors()), (shard.spec, shard.share)


def _flatten_with_keys(shard: ShardedSequences) -> tuple[list[tuple[Any, Any]], _Static]:
    keys = [pytree.MappingKey(name) for name in (*_FIELDS, *shard.extras)]  # in brackets, as those of a pack
    return list(zip(keys, shard.tensors(), strict=True)), (shard.spec, shard.share)


def _unflatten(leaves: Iterable[Any], static: _Static) -> ShardedSequences:
    return ShardedSequences.from_tensors(list(leaves), *static)


pytree.register_pytree_node(
    ShardedSequences,
    _flatten,
    _unflatten,
    serialized_type_name="thdops.sharding.ShardedSequences",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda static: {"spec": spec_to_json(static[0]), "share": list(static[1])},
    from_dumpable_context=lambda values: (spec_from_json(values["spec"]), Share(*values["share"])),
)
torch.serialization.add_safe_globals([ShardedSequences, Share])
