"""Attention on DTensors that are cut by heads: tensor parallelism without a word in the model.

    dtensor.register_shardings()
    q, k, v = ...  # DTensors [T, H, D], Shard(1); cu_seqlens a DTensor, Replicate(); a sink Shard(0)
    out = thdops.attention(q, k, v, cu_seqlens, causal=True)  # Shard(1); forward and backward communicate nothing

DTensor refuses an op that it has no sharding for, and thdops registers none by itself: that would import torch's distributed
tensors. `torch.distributed.tensor.experimental.implicit_replication()` lets plain tensors stand for replicated ones.

Hq and Hkv heads, W ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from meta_kernels.attention_thd import Call, GradCall

__all__ = ["register_shardings"]

_Rule = tuple[list[Placement], list[Placement | None]]  # placements of the results, and of the arguments

_HEADS, _HEADS_FIRST = Shard(1), Shard(0)  # of [T, H, D], and of [H, T] and [H]


@cache
def register_shardings() -> None:
    """Tell DTensor how attention and its backward may be cut, once per process: by heads, or not at all.

    Where W divides Hkv, each rank computes Hq / W query heads from the Hkv / W key heads that they share. Where Hkv is 1 (MQA) and
    W divides Hq, each rank holds the one key head, and gradients of k and v are partial sums. In all other cases, and for what is
    cut along rows, DTensor gathers first and every rank computes everything.
    """
    register_sharding(torch.ops.thdops.attention.default)(_attention_rules)
    register_sharding(torch.ops.thdops.attention_grad.default)(_attention_grad_rules)


def _attention_rules(*args: Any) -> list[_Rule]:
    call = Call(*args)
    rules: list[_Rule] = [([Replicate()] * 3, _placements(call))]
    for keys, _ in _cuts(call):
        max_logit = _HEADS_FIRST if call.return_max_logit else Replicate()  # empty unless asked for
        rules.append(([_HEADS, _HEADS_FIRST, max_logit], _placements(call, q=_HEADS, k=keys, v=keys, sink=_HEADS_FIRST)))
    return rules


def _attention_grad_rules(*args: Any) -> list[_Rule]:
    call = GradCall(*args)
    rules: list[_Rule] = [([Replicate()] * 4, _placements(call))]
    for keys, grad_keys in _cuts(call):
        cut = {"q": _HEADS, "k": keys, "v": keys, "out": _HEADS, "grad_out": _HEADS}
        cut |= dict.fromkeys(("lse", "grad_lse", "sink"), _HEADS_FIRST)
        grad_sink = Replicate() if call.sink is None else _HEADS_FIRST
        rules.append(([_HEADS, grad_keys, grad_keys, grad_sink], _placements(call, **cut)))
    return rules


def _cuts(call: Call | GradCall) -> Iterator[tuple[Placement, Placement]]:
    """Placements of keys and values, and of their gradients, that go with queries cut by heads."""
    q: Any = call.q
    ranks, heads, kv_heads = q.mesh.size(), call.q.shape[1], call.k.shape[1]
    if kv_heads % ranks == 0:
        yield _HEADS, _HEADS
    elif kv_heads == 1 and heads % ranks == 0:
        yield Replicate(), Partial()


def _placements(call: Call | GradCall, **cut: Placement) -> list[Placement | None]:
    """Of every argument: replicated unless it is in `cut`; None where it is no tensor."""
    return [
        cut.get(name, Replicate()) if hasattr(value, "placements") else None for name, value in zip(call._fields, call, strict=True)
    ]
