"""comm="p2p": keys and values travel round the ring; each rank attends to every block while the next one is on its way.

W ranks, r this one. At step i rank r holds the block of rank s = r - i (modulo W). With causal attention and the zigzag partition
(chunks r and 2W-1-r of every sequence) nothing that the mask hides is computed, and every rank has the same work:

    s == r  diagonal  all own queries, own keys, causal: chunks stand in the order of the sequence, so local order is the mask's
    s < r   lower     all own queries, the first half of the keys (chunk s): the second half is in the future of all of them
    s > r   upper     the second half of the queries (chunk 2W-1-r), all keys: they are in the future of the first half

The contiguous partition knows all or nothing: the block of s < r lies before every own query, that of s > r behind.

Every valid row takes part in the diagonal section, so what a sink adds to the softmax is added there, once.

Backward: gradients of keys and values, in fp32, follow their block one step behind, and one step more brings them home.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels.context_attention import Call, GradCall
from thdops.context_parallel.communicator import AllReduceMax, Place, Shift, Steps, Wait
from thdops.context_parallel.sections import (
    Attended,
    Gradients,
    Rows,
    Section,
    attend,
    gradients,
    in_accumulation_dtype,
    merged,
    rows_of,
)


def forward(call: Call, whole: Rows, place: Place) -> Steps[Attended]:
    diagonal, others = _sections(call, whole, place)
    last = max((i for i, section in enumerate(others) if section is not None), default=-1)
    coming: Any = (yield Shift(joined(call.k, call.v))) if others else None
    result = attend(call, diagonal)
    for i, section in enumerate(others):
        block = yield Wait(coming)
        coming = (yield Shift(block)) if i < len(others) - 1 else None
        if section is not None:
            k, v = parted(block, call.k.shape[2])
            result = merged(result, attend(call._replace(k=k, v=v), section), last=i == last)
    if call.return_max_logit:
        result = result._replace(max_logit=(yield AllReduceMax(result.max_logit)))
    return result


def backward(call: GradCall, whole: Rows, place: Place) -> Steps[Gradients]:
    diagonal, others = _sections(call, whole, place)
    coming: Any = (yield Shift(joined(call.k, call.v))) if others else None
    dq, dk, dv, dsink = gradients(call, diagonal)
    dq, dkv = in_accumulation_dtype(dq), in_accumulation_dtype(joined(dk, dv))
    for i, section in enumerate(others):
        following = yield Shift(dkv)
        block = yield Wait(coming)
        coming = (yield Shift(block)) if i < len(others) - 1 else None
        part = None
        if section is not None:
            k, v = parted(block, call.k.shape[2])
            part = gradients(call._replace(k=k, v=v), section)
            dq.add_(part.q)
        dkv = yield Wait(following)
        if part is not None:
            dkv = dkv + joined(part.k, part.v)
    if others:
        dkv = yield Wait((yield Shift(dkv)))
    return Gradients(dq, *parted(dkv, call.k.shape[2]), dsink)


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values side by side, [n, Hkv, Dqk + Dv]: one message."""
    return torch.cat((k, v), -1)


def parted(block: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of the two parts, the first `width` wide."""
    return block[..., :width], block[..., width:]


def _sections(call: Call | GradCall, whole: Rows, place: Place) -> tuple[Section, list[Section | None]]:
    """The diagonal, and what to do with the block of each step after it; None where its keys are all hidden."""
    size, rank, partition = place.sizes[0], place.ranks[0], call.partition
    own = rows_of(whole, size, rank, partition)
    sections: list[Section | None] = []
    for step in range(1, size):
        source = (rank - step) % size
        if not call.causal:
            section = Section(own, rows_of(whole, size, source, partition), has_sink=False)
        elif partition == "contiguous":
            section = Section(own, rows_of(whole, size, source, partition), has_sink=False) if source < rank else None
        elif source < rank:
            section = Section(own, rows_of(whole, size, source, partition, "first"), has_sink=False)
        else:
            queries = rows_of(whole, size, rank, partition, "second")
            section = Section(queries, rows_of(whole, size, source, partition), has_sink=False)
        sections.append(section)
    return Section(own, causal=call.causal), sections
