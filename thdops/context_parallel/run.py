"""What the context-parallel ops run, on CPU and CUDA alike: the algorithm of a comm, driven on its group or on virtual ranks.

W ranks, n rows of a rank, H heads.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meta_kernels.context_attention import Call, GradCall, group_of, is_virtual, sizes_of
from meta_kernels.contract import takes
from thdops.context_parallel import all_gather, all_to_all, ring
from thdops.context_parallel.communicator import Place, Steps, places, run, run_together
from thdops.context_parallel.sections import Attended, Gradients, Rows

_T = TypeVar("_T", Attended, Gradients)


@takes(Call)
def context_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [n, Hq, Dv], lse [Hq, n], max_logit [Hq] or [0]). Padding rows: out 0, lse -inf."""
    return attended(call, _of_ranks("context_attention", call))


def attended(call: Call, results: list[Attended]) -> tuple[Tensor, Tensor, Tensor]:
    """What the op returns, from what its ranks found: one, or all virtual ones."""
    out, lse = _one([result.out for result in results]), _one([result.lse for result in results], 1)
    return _stored(out, call.q.dtype), _stored(lse, lse.dtype), results[0].max_logit.clone()


@takes(GradCall)
def context_attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink [Hq] or [0]), dsink this rank's share. Padding rows: 0."""
    return gradients(call, _of_ranks("context_attention_grad", call))


def gradients(call: GradCall, results: list[Gradients]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise."""
    dq, dk, dv = (_stored(_one([result[i] for result in results]), call.q.dtype) for i in range(3))
    dsink = torch.stack([result.sink for result in results]).sum(0)
    return dq, dk, dv, dsink if call.sink is None else dsink.to(call.sink.dtype)


def _of_ranks(op: str, call: Any) -> list[Any]:
    """This rank's result, or those of all virtual ranks."""
    if not is_virtual(call.groups):
        return [run(op, *of_this_rank(op, call))]
    sizes = sizes_of(op, call.groups)
    everyone = places(sizes)
    calls = [_share(call, len(everyone), rank) for rank in range(len(everyone))]
    return run_together([_algorithm(own, place) for own, place in zip(calls, everyone, strict=True)], sizes)


def of_this_rank(op: str, call: Any) -> tuple[Steps[Any], list[dist.ProcessGroup]]:
    """What a rank of real groups runs, and the groups."""
    groups = [group_of(op, name) for name in call.groups]
    place = Place(tuple(map(dist.get_rank, groups)), tuple(map(dist.get_world_size, groups)))
    return _algorithm(call, place), groups


def _algorithm(call: Any, place: Place) -> Steps[Any]:
    whole = Rows(call.cu_seqlens, call.cu_seqlens if call.cu_seqlens_padded is None else call.cu_seqlens_padded)
    forward = isinstance(call, Call)
    if call.comm == "p2p":
        return (ring.forward if forward else ring.backward)(call, whole, place)
    if call.comm == "all_gather":
        return (all_gather.forward if forward else all_gather.backward)(call, whole, place)
    if forward:
        return all_to_all.forward(call, whole, place, all_to_all.attend_alone if call.comm == "a2a" else ring.forward)
    return all_to_all.backward(call, whole, place, all_to_all.gradients_alone if call.comm == "a2a" else ring.backward)


def _share(call: Any, size: int, rank: int) -> Any:
    """A virtual rank's rows of tensors that hold the rows of all ranks, one rank after the other."""
    rows = call.q.shape[0] // size
    along = {"grad_out": 0, "grad_lse": 1, "q": 0, "k": 0, "v": 0, "out": 0, "lse": 1}
    given = {name: dim for name, dim in along.items() if getattr(call, name, None) is not None}
    return call._replace(**{name: getattr(call, name).narrow(dim, rank * rows, rows) for name, dim in given.items()})


def _one(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the strides of a fresh tensor."""
    x = x.to(dtype)
    return x if x.is_contiguous() and x.numel() > 1 else x.clone(memory_format=torch.contiguous_format)
