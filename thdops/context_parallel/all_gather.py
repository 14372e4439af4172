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
from thdops.context_parallel.sections import Attended, Gradients, Section, Whole, adding, attending, from_row, up_to


def forward(call: Call, whole: Whole, place: Place, into: Attended | None = None) -> Steps[Attended]:
    k, v = yield from _gathered(call, whole, place)
    found = attending(call, into)
    for sections in _sections(call, whole, place):
        for section in sections:
            found.add(call._replace(k=k, v=v), section, last=section is sections[-1])
    if call.return_max_logit:
        return found.result._replace(max_logit=(yield AllReduceMax(found.result.max_logit)))
    return found.result


def backward(call: GradCall, whole: Whole, place: Place, into: Gradients | None = None) -> Steps[Gradients]:
    k, v = yield from _gathered(call, whole, place)
    held, dkv = call._replace(k=k, v=v), None
    sums = adding(held, whole.share(place.sizes[0], place.ranks[0], call.partition), into, hides=False)
    for sections in _sections(call, whole, place):
        for section in sections:
            sums.add_queries(held, section)
            dkv = sums.add_keys(held, section, dkv)
    dk, dv = (torch.ops.thdops.to_rank_order(x, whole.rows.padded, place.sizes[0], call.partition) for x in dkv or ())
    dk, dv = (yield ReduceScatter(dk)), (yield ReduceScatter(dv))
    dq, dsink = sums.result()
    return Gradients(dq, dk, dv, dsink)


def _gathered(call: Call | GradCall, whole: Whole, place: Place) -> Steps[list[Tensor]]:
    """Keys and values of the whole batch, in its order."""
    gathered = []
    for x in (call.k, call.v):
        by_rank = yield AllGather(x)
        gathered.append(torch.ops.thdops.from_rank_order(by_rank, whole.rows.padded, place.sizes[0], call.partition))
    return gathered


def _sections(call: Call | GradCall, whole: Whole, place: Place) -> list[list[Section]]:
    """For each chunk of the queries, or all of them, its sections."""
    size, rank, partition = place.sizes[0], place.ranks[0], call.partition
    right = 0 if call.causal else call.window_right
    if call.window_left < 0 and right < 0:
        return [[Section(whole.share(size, rank, partition), whole.rows)]]
    if partition == "contiguous":
        pieces, chunks = size, {rank: whole.share(size, rank, partition)}
    else:
        numbers = {"first": rank, "second": 2 * size - 1 - rank}
        pieces, chunks = 2 * size, {number: whole.share(size, rank, partition, half) for half, number in numbers.items()}
    chunk = whole.rows.padded.diff() // pieces
    by_chunk = []
    for number, queries in chunks.items():
        keys = up_to(whole.rows, (number + 1) * chunk)
        sections = [Section(queries, keys, causal=True, bottom_right=True, window=(call.window_left, 0))]
        if right != 0:
            keys = from_row(whole.rows, number * chunk + 1)
            sections.append(Section(queries, keys, window=(0, max(right - 1, -1)), has_sink=False))
        by_chunk.append(sections)
    return by_chunk
