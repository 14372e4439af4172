"""comm="all_gather": every rank gathers all keys and values and attends with its own queries; gradients are reduce-scattered.

W ranks, B sequences, T rows of the whole batch, c[b] rows of a chunk of sequence b. Gathered keys are put in the order of the
batch. Chunk g of the queries starts at row g c of its sequence. Where the keys end with the chunk, a bottom-right mask has its
diagonal at the right place, and keys behind are not even looked at: so causal attention, with a window or without, is one section
per chunk.

Without causal, a window to the right sees keys behind the chunk, and where a sequence ends early the diagonal would slip. So keys
up to the diagonal are one section as before, and those behind it another: keys from g c + 1 on, aligned top-left, of which query i
sees those from i on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.context_attention import Call, GradCall
from thdops.context_parallel.communicator import AllGather, AllReduceMax, Place, ReduceScatter, Steps
from thdops.context_parallel.ring import joined, parted
from thdops.context_parallel.sections import (
    Attended,
    Gradients,
    Rows,
    Section,
    attend_all,
    from_row,
    gradients_of_all,
    rows_of,
    up_to,
)


def forward(call: Call, whole: Rows, place: Place) -> Steps[Attended]:
    k, v = yield from _gathered(call, whole, place)
    result = attend_all(call._replace(k=k, v=v), _sections(call, whole, place))
    if call.return_max_logit:
        result = result._replace(max_logit=(yield AllReduceMax(result.max_logit)))
    return result


def backward(call: GradCall, whole: Rows, place: Place) -> Steps[Gradients]:
    k, v = yield from _gathered(call, whole, place)
    dq, dk, dv, dsink = gradients_of_all(call._replace(k=k, v=v), _sections(call, whole, place))
    by_rank = torch.ops.thdops.to_rank_order(joined(dk, dv), whole.padded, place.sizes[0], call.partition)
    dkv = yield ReduceScatter(by_rank)
    return Gradients(dq, *parted(dkv, call.k.shape[2]), dsink)


def _gathered(call: Call | GradCall, whole: Rows, place: Place) -> Steps[tuple[Tensor, Tensor]]:
    """Keys and values of the whole batch, in its order."""
    by_rank = yield AllGather(joined(call.k, call.v))
    return parted(torch.ops.thdops.from_rank_order(by_rank, whole.padded, place.sizes[0], call.partition), call.k.shape[2])


def _sections(call: Call | GradCall, whole: Rows, place: Place) -> list[Section]:
    size, rank, partition = place.sizes[0], place.ranks[0], call.partition
    right = 0 if call.causal else call.window_right
    if call.window_left < 0 and right < 0:
        return [Section(rows_of(whole, size, rank, partition), whole)]
    if partition == "contiguous":
        pieces, chunks = size, {rank: rows_of(whole, size, rank, partition)}
    else:
        numbers = {"first": rank, "second": 2 * size - 1 - rank}
        pieces, chunks = 2 * size, {number: rows_of(whole, size, rank, partition, half) for half, number in numbers.items()}
    chunk = whole.padded.diff() // pieces
    sections = []
    for number, queries in chunks.items():
        keys = up_to(whole, (number + 1) * chunk)
        sections.append(Section(queries, keys, causal=True, bottom_right=True, window=(call.window_left, 0)))
        if right != 0:
            keys = from_row(whole, number * chunk + 1)
            sections.append(Section(queries, keys, window=(0, max(right - 1, -1)), has_sink=False))
    return sections
