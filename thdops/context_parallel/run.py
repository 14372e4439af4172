"""What the context-parallel ops run, on CPU and CUDA alike: the algorithm of a comm, driven on its group or on virtual ranks.

W ranks, n rows of a rank, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meta_kernels.context_attention import (
    Call,
    GradCall,
    fake_context_attention,
    fake_context_attention_grad,
    group_of,
    is_virtual,
    sizes_of,
)
from meta_kernels.contract import takes
from thdops.context_parallel import all_gather, all_to_all, ring
from thdops.context_parallel.communicator import Place, Steps, places, run, run_together
from thdops.context_parallel.sections import Attended, Gradients, Whole


@takes(Call)
def context_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [n, Hq, Dv], lse [Hq, n], max_logit [Hq] or [0]). Padding rows: out 0, lse -inf."""
    results = room_for(call)
    return attended(results, _of_ranks("context_attention", call, results))


@takes(GradCall)
def context_attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink [Hq] or [0]), dsink this rank's share. Padding rows: 0."""
    results = room_for(call)
    return gradients(results, _of_ranks("context_attention_grad", call, results))


@takes(Call)
def context_attention_eager(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """`context_attention` by sections in eager PyTorch, on CUDA too: autograd follows these, not kernels that write in place."""
    return context_attention(*call._replace(backend="reference"))


@takes(GradCall)
def context_attention_grad_eager(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise."""
    return context_attention_grad(*call._replace(backend="reference"))


def room_for(call: Call | GradCall) -> Any:
    """What the op returns, to be filled."""
    return Attended(*fake_context_attention(*call)) if isinstance(call, Call) else Gradients(*fake_context_attention_grad(*call))


def attended(results: Attended, found: list[Attended]) -> tuple[Tensor, Tensor, Tensor]:
    """`results`, of what ranks found: one, or all virtual ones."""
    _fill(results, found, _OF_ATTENDED)
    results.max_logit.copy_(found[0].max_logit)
    return results


def gradients(results: Gradients, found: list[Gradients]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise."""
    _fill(results, found, _OF_GRADIENTS)
    results.sink.copy_(torch.stack([own.sink for own in found]).sum(0))
    return results


def _fill(results: Any, found: list[Any], along: dict[str, int]) -> None:
    """What is not in its place yet is put there."""
    for rank, own in enumerate(found):
        here = _share(results, along, len(found), rank)  # anew: autograd loses track of views that are older than a write
        for name in along:
            if getattr(own, name).data_ptr() != getattr(here, name).data_ptr():
                getattr(here, name).copy_(getattr(own, name))


def _of_ranks(op: str, call: Any, results: Any) -> list[Any]:
    """This rank's result, or those of all virtual ranks; they may lie in `results`."""
    if not is_virtual(call.groups):
        return [run(op, *of_this_rank(op, call, results))]
    sizes = sizes_of(op, call.groups)
    everyone = places(sizes)
    along = _OF_ATTENDED if isinstance(call, Call) else _OF_GRADIENTS
    whole = _whole(call)
    steps = []
    for rank, place in enumerate(everyone):
        own, into = _share(call, _OF_CALL, len(everyone), rank), _share(results, along, len(everyone), rank)
        steps.append(_algorithm(own, whole, place, into))
    return run_together(steps, sizes)


def of_this_rank(op: str, call: Any, results: Any) -> tuple[Steps[Any], list[dist.ProcessGroup]]:
    """What a rank of real groups runs, and the groups."""
    groups = [group_of(op, name) for name in call.groups]
    place = Place(tuple(map(dist.get_rank, groups)), tuple(map(dist.get_world_size, groups)), remote=True)
    return _algorithm(call, _whole(call), place, results), groups


def _whole(call: Call | GradCall) -> Whole:
    return Whole(call.cu_seqlens, call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded)


def _algorithm(call: Any, whole: Whole, place: Place, into: Any) -> Steps[Any]:
    """What a rank runs. Where its results need not travel any more, it may write them into their places."""
    forward = isinstance(call, Call)
    if call.comm == "p2p":
        return (ring.forward if forward else ring.backward)(call, whole, place, into)
    if call.comm == "all_gather":
        return (all_gather.forward if forward else all_gather.backward)(call, whole, place, into)
    if forward:
        return all_to_all.forward(call, whole, place, all_to_all.attend_alone if call.comm == "a2a" else ring.forward)
    return all_to_all.backward(call, whole, place, all_to_all.gradients_alone if call.comm == "a2a" else ring.backward)


# The dimension along which rows lie.
_OF_CALL = {"grad_out": 0, "grad_lse": 1, "q": 0, "k": 0, "v": 0, "out": 0, "lse": 1}
_OF_ATTENDED = {"out": 0, "lse": 1}
_OF_GRADIENTS = {"q": 0, "k": 0, "v": 0}


def _share(tensors: Any, along: dict[str, int], size: int, rank: int) -> Any:
    """A virtual rank's rows of tensors that hold the rows of all ranks, one rank after the other."""
    given = {name: getattr(tensors, name) for name in along if getattr(tensors, name, None) is not None}
    rows = {name: x.shape[along[name]] // size for name, x in given.items()}
    return tensors._replace(**{name: x.narrow(along[name], rank * rows[name], rows[name]) for name, x in given.items()})
