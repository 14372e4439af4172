"""comm="a2a": a rank gives away its rows of most heads for all rows of a few heads, attends as one device would, and gives back.

W ranks that share heads, h = H / W heads of each, n rows of a rank before and W * n after. Rows that arrive stand rank by rank and
are put in order; the whole mesh's chunks of "a2a+p2p" are such that W ranks side by side own what one rank of the ring owns, so the
same reordering, by the ring rank's own offsets, serves both. What attends to the rows is handed in: one section, or the ring.

A sink is cut by heads like everything; its gradient on a rank is that of the rank's heads, zero for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meta_kernels.context_attention import Call, GradCall
from thdops.context_parallel.communicator import AllGather, AllToAll, Place, Steps
from thdops.context_parallel.sections import Attended, Gradients, Section, Whole, attend, gradients

_AXIS = -1  # heads are shared along the mesh's last axis


def forward(call: Call, whole: Whole, place: Place, within: Callable[..., Steps[Attended]]) -> Steps[Attended]:
    heads = _Heads(call, whole, place)
    q, k, v = yield from heads.scattered((call.q, call.k, call.v))
    out, lse, max_logit = yield from within(call._replace(q=q, k=k, v=v, sink=heads.own(call.sink)), whole, place)
    (out,) = yield from heads.gathered((out,))
    (lse,) = yield from heads.gathered((_rows_first(lse),))
    if call.return_max_logit:
        max_logit = yield AllGather(max_logit, _AXIS)
    return Attended(out, _heads_first(lse), max_logit)


def backward(call: GradCall, whole: Whole, place: Place, within: Callable[..., Steps[Gradients]]) -> Steps[Gradients]:
    heads = _Heads(call, whole, place)
    q, k, v, out, *grad_out = yield from heads.scattered((call.q, call.k, call.v, call.out, *_given(call.grad_out)))
    statistics = [_rows_first(x) for x in (call.lse, *_given(call.grad_lse))]
    lse, *grad_lse = (_heads_first(x) for x in (yield from heads.scattered(statistics)))
    inner = call._replace(q=q, k=k, v=v, out=out, lse=lse, sink=heads.own(call.sink))
    inner = inner._replace(grad_out=grad_out[0] if grad_out else None, grad_lse=grad_lse[0] if grad_lse else None)
    *grads, dsink = yield from within(inner, whole, place)
    # Nothing is added to them any more, so they are rounded before they travel.
    dq, dk, dv = yield from heads.gathered([grad.to(call.q.dtype) for grad in grads])
    return Gradients(dq, dk, dv, heads.among_zeros(call.sink, dsink))


class _Heads:
    """Moves tensors [n, H, D] between "own rows, all heads" and "all rows in order, own heads"."""

    def __init__(self, call: Call | GradCall, whole: Whole, place: Place) -> None:
        self.size, self.rank, self.partition = place.sizes[_AXIS], place.ranks[_AXIS], call.partition
        # The rows that this rank and those it shares heads with own together: a ring rank's, or all.
        ring, ring_rank = (place.sizes[0], place.ranks[0]) if len(place.sizes) > 1 else (1, 0)
        self.padded = whole.share(ring, ring_rank, call.partition).padded

    def scattered(self, tensors: Sequence[Tensor]) -> Steps[list[Tensor]]:
        """[n, H, D] -> [W * n, h, D] each, in one message; of one dtype."""
        blocks = [x.unflatten(1, (self.size, -1)).movedim(1, 0) for x in tensors]  # [W, n, h, D]
        arrived = yield from self._exchanged(blocks)
        return [torch.ops.thdops.from_rank_order(x.flatten(0, 1), self.padded, self.size, self.partition) for x in arrived]

    def gathered(self, tensors: Sequence[Tensor]) -> Steps[list[Tensor]]:
        """[W * n, h, D] -> [n, H, D] each, in one message; of one dtype."""
        by_rank = [torch.ops.thdops.to_rank_order(x, self.padded, self.size, self.partition) for x in tensors]
        arrived = yield from self._exchanged([x.unflatten(0, (self.size, -1)) for x in by_rank])
        return [x.movedim(0, 1).flatten(1, 2) for x in arrived]

    def own(self, per_head: Tensor | None) -> Tensor | None:
        """This rank's heads of [H]."""
        return None if per_head is None else per_head.chunk(self.size)[self.rank].contiguous()

    def among_zeros(self, per_head: Tensor | None, own: Tensor) -> Tensor:
        """[h] at its place in [H]; [0] where there is nothing per head."""
        if per_head is None:
            return own
        spread = torch.zeros_like(per_head)
        spread.chunk(self.size)[self.rank].copy_(own)
        return spread

    def _exchanged(self, blocks: list[Tensor]) -> Steps[list[Tensor]]:
        """Blocks [W, ...], one for each rank, all tensors in one message."""
        flat = [block.flatten(1) for block in blocks]
        arrived = yield AllToAll(torch.cat(flat, 1), _AXIS)
        parts = arrived.split([x.shape[1] for x in flat], 1)
        return [part.reshape(block.shape) for part, block in zip(parts, blocks, strict=True)]


def attend_alone(call: Call, whole: Whole, place: Place) -> Steps[Attended]:
    """What a rank does with all rows."""
    yield from ()
    return attend(call, _section(call, whole))


def gradients_alone(call: GradCall, whole: Whole, place: Place) -> Steps[Gradients]:
    yield from ()
    return gradients(call, _section(call, whole))


def _section(call: Call | GradCall, whole: Whole) -> Section:
    return Section(whole.rows, causal=call.causal, window=(call.window_left, call.window_right))


def _given(tensor: Tensor | None) -> list[Any]:
    return [] if tensor is None else [tensor]


def _rows_first(statistics: Tensor) -> Tensor:
    """[H, n] -> [n, H, 1]."""
    return statistics.t().unsqueeze(-1)


def _heads_first(x: Tensor) -> Tensor:
    """[n, H, 1] -> [H, n]."""
    return x.squeeze(-1).t().contiguous()
