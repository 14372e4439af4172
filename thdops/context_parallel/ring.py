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

from meta_kernels.context_attention import Call, GradCall
from thdops.context_parallel.communicator import AllReduceMax, Place, Shift, Steps, Wait
from thdops.context_parallel.sections import Attended, Gradients, Section, Whole, adding, attending


def forward(call: Call, whole: Whole, place: Place, into: Attended | None = None) -> Steps[Attended]:
    diagonal, others = _sections(call, whole, place)
    last = max((i for i, section in enumerate(others) if section is not None), default=-1)
    coming: Any = (yield Shift((call.k, call.v))) if others else None
    found = attending(call, into)
    found.add(call, diagonal, last=last < 0)
    for i, section in enumerate(others):
        k, v = yield Wait(coming)
        coming = (yield Shift((k, v))) if i < len(others) - 1 else None
        if section is not None:
            found.add(call._replace(k=k, v=v), section, last=i == last)
    if call.return_max_logit:
        return found.result._replace(max_logit=(yield AllReduceMax(found.result.max_logit)))
    return found.result


def backward(call: GradCall, whole: Whole, place: Place, into: Gradients | None = None) -> Steps[Gradients]:
    diagonal, others = _sections(call, whole, place)
    coming: Any = (yield Shift((call.k, call.v))) if others else None
    sums = adding(call, diagonal.queries, into, hides=place.remote)
    sums.add_queries(call, diagonal)
    dkv: Any = sums.add_keys(call, diagonal, None)
    for i, section in enumerate(others):
        following = yield Shift(dkv)
        k, v = yield Wait(coming)
        coming = (yield Shift((k, v))) if i < len(others) - 1 else None
        held = call._replace(k=k, v=v)
        if section is not None:
            sums.add_queries(held, section)
        dkv = yield Wait(following)
        if section is not None:
            dkv = sums.add_keys(held, section, dkv)
    if others:
        dkv = yield Wait((yield Shift(dkv)))
    dq, dsink = sums.result()
    dk, dv = dkv
    return Gradients(dq, dk, dv, dsink)


def _sections(call: Call | GradCall, whole: Whole, place: Place) -> tuple[Section, list[Section | None]]:
    """The diagonal, and what to do with the block of each step after it; None where its keys are all hidden."""
    size, rank, partition = place.sizes[0], place.ranks[0], call.partition
    own = whole.share(size, rank, partition)
    sections: list[Section | None] = []
    for step in range(1, size):
        source = (rank - step) % size
        if not call.causal:
            section = Section(own, whole.share(size, source, partition), has_sink=False)
        elif partition == "contiguous":
            section = Section(own, whole.share(size, source, partition), has_sink=False) if source < rank else None
        elif source < rank:
            section = Section(own, whole.share(size, source, partition, "first"), has_sink=False)
        else:
            queries = whole.share(size, rank, partition, "second")
            section = Section(queries, whole.share(size, source, partition), has_sink=False)
        sections.append(section)
    return Section(own, causal=call.causal), sections
