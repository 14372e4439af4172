"""What four ranks compute, one after the other on one device, beside that device alone: messages cost nothing here.

T rows, H heads, D head dims. The batch is put in the order of ranks outside the timed call, and what the ranks find is put in the
order of the batch before it is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meta_kernels import attention_thd
from meta_kernels.context_attention import VIRTUAL
from thdops.ops.attention_thd import judge
from thdops.ops.attention_thd.samples import attention_cost, attention_grad_cost
from thdops.ops.context import reference as rows
from thdops.ops.layouts import prefix_sums
from thdops.registry import Contest

_RANKS = 4
_COMMS = ("p2p", "all_gather", "a2a")


def forward(device: torch.device) -> Iterator[Contest]:
    providers = {"one device": _alone, **{f"{_RANKS} ranks, {comm}": partial(_by_ranks, comm) for comm in _COMMS}}
    yield Contest(_name(device), None, partial(_call, device), providers, _judged, attention_cost)


def backward(device: torch.device) -> Iterator[Contest]:
    providers = {"one device": _alone_grad, **{f"{_RANKS} ranks, {comm}": partial(_by_ranks_grad, comm) for comm in _COMMS}}
    for deterministic in (False, True):
        name = f"{_name(device)}{', deterministic' if deterministic else ''}"
        yield Contest(name, None, partial(_grad_call, device, deterministic), providers, _judged_grad, attention_grad_cost)


# --- arguments -----------------------------------------------------------------------------------------------------------------


def _name(device: torch.device) -> str:
    return "8 x 4096, 32/8, D 128, causal" if device.type == "cuda" else "4 x 96, 4/4, D 32, causal"


def _call(device: torch.device) -> attention_thd.Call:
    gpu = device.type == "cuda"
    sequences, length, (heads, kv_heads), dim = (8, 4096, (32, 8), 128) if gpu else (4, 96, (4, 4), 32)
    generator = torch.Generator(device).manual_seed(0)

    def new(h: int) -> Tensor:
        dtype = torch.bfloat16 if gpu else torch.float32
        return torch.randn(sequences * length, h, dim, device=device, dtype=dtype, generator=generator)

    metadata = (prefix_sums([length] * sequences, device), None, None, None, None)
    mask = (True, False, -1, -1, dim**-0.5, "vanilla", 0.0, length, length)
    args: tuple[Any, ...] = (new(heads), new(kv_heads), new(kv_heads), *metadata, *mask)
    return attention_thd.Call(*args, deterministic=False, backend="native" if gpu else "reference", return_max_logit=False)


def _grad_call(device: torch.device, deterministic: bool) -> attention_thd.GradCall:
    call = _call(device)._replace(deterministic=deterministic)
    out, lse, _ = torch.ops.thdops.attention(*call)
    grad = torch.randn(out.shape, device=device, dtype=out.dtype, generator=torch.Generator(device).manual_seed(1))
    args: tuple[Any, ...] = (grad, None, *call[:3], out, lse, *call[3:19])
    return attention_thd.GradCall(*args)


# --- providers -----------------------------------------------------------------------------------------------------------------


def _alone(*args: Any) -> Callable[[], Any]:
    return lambda: torch.ops.thdops.attention(*args)[:2]


def _alone_grad(*args: Any) -> Callable[[], Any]:
    return lambda: torch.ops.thdops.attention_grad(*args)[:3]


def _by_ranks(comm: str, *args: Any) -> Callable[[], Any]:
    call = attention_thd.Call(*args)
    owned, how = _owned(call), _how(comm, call)
    tensors = tuple(x[owned] for x in call[:3])
    return lambda: (*torch.ops.thdops.context_attention(*tensors, *how, False, 0)[:2], owned)


def _by_ranks_grad(comm: str, *args: Any) -> Callable[[], Any]:
    call = attention_thd.GradCall(*args)
    owned, how = _owned(call), _how(comm, call)
    grad_out, q, k, v, out = (x[owned] for x in (args[0], call.q, call.k, call.v, call.out))
    lse = call.lse[:, owned].contiguous()
    return lambda: (*torch.ops.thdops.context_attention_grad(grad_out, None, q, k, v, out, lse, *how)[:3], owned)


def _owned(call: attention_thd.Call | attention_thd.GradCall) -> Tensor:
    """The rows of all ranks [T], one rank after the other."""
    total = call.q.shape[0]
    by_rank = [rows.partition_indices(call.cu_seqlens_q, total, _RANKS, rank) for rank in range(_RANKS)]
    return torch.cat(by_rank).long()


def _how(comm: str, call: attention_thd.Call | attention_thd.GradCall) -> tuple[Any, ...]:
    mask = (call.causal, call.window_left, call.window_right, call.scale, call.softmax, call.softcap)
    return (call.cu_seqlens_q, None, None, [f"{VIRTUAL}{_RANKS}"], comm, "zigzag", *mask, call.deterministic, call.backend)


# --- judged --------------------------------------------------------------------------------------------------------------------


def _judged(args: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    out, lse, *owned = results
    if owned:
        out, lse = _in_order(out, *owned), _in_order(lse.t(), *owned).t()
    return judge.attention(attention_thd.Call(*args), (out, lse))


def _judged_grad(args: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    *grads, last = results
    grads = [_in_order(x, last) for x in grads] if len(results) == 4 else results
    return judge.attention_grad(attention_thd.GradCall(*args), grads)


def _in_order(x: Tensor, owned: Tensor) -> Tensor:
    return torch.empty_like(x).index_copy_(0, owned, x)
