"""Contracts of the context-parallel attention ops.

W ranks, T rows of the whole batch, n = T / W rows of a rank, B sequences, Hq and Hkv heads, Dqk and Dv head dims.
q [n, Hq, Dqk], k [n, Hkv, Dqk], v [n, Hkv, Dv] -> out [n, Hq, Dv], lse [Hq, n], max_logit [Hq] (size 0 unless asked for);
cu_seqlens are the whole batch's.

`groups` says who the ranks are: the name of a process group; for "a2a+p2p" two of them, [ring, heads]. "virtual:4" is four ranks on
one device: then tensors hold the rows of all of them, one rank after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from meta_kernels import attention_thd
from meta_kernels.attention_thd import fake_attention, fake_attention_grad
from meta_kernels.context import PARTITIONS
from meta_kernels.contract import check_choice, check_cu_seqlens, check_device, check_dtype, check_rank, refusal, shape_of, takes

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")
VIRTUAL = "virtual:"


class Call(NamedTuple):
    """The arguments of the op `context_attention`, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    sink: Tensor | None
    groups: list[str]
    comm: str
    partition: str
    causal: bool
    window_left: int
    window_right: int
    scale: float
    softmax: str
    softcap: float
    deterministic: bool
    backend: str
    return_max_logit: bool
    total_tokens: int  # T; 0 = not known


class GradCall(NamedTuple):
    """The arguments of the op `context_attention_grad`: incoming gradients (None = zero), the forward's tensors, its settings."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor | None
    sink: Tensor | None
    groups: list[str]
    comm: str
    partition: str
    causal: bool
    window_left: int
    window_right: int
    scale: float
    softmax: str
    softcap: float
    deterministic: bool
    backend: str


# --- groups --------------------------------------------------------------------------------------------------------------------


def is_virtual(groups: Sequence[str]) -> bool:
    """Whether the ranks share one device."""
    return all(name.startswith(VIRTUAL) for name in groups)


def group_of(op: str, name: str) -> dist.ProcessGroup:
    """The process group of a name."""
    try:
        resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]  # what torch's own ops do with a name
        return resolve(name)
    except (AttributeError, LookupError, RuntimeError, ValueError) as error:
        fix = "pass a group of this process; torch.distributed must be initialised"
        raise refusal(op, "group", "be a process group of this process", repr(name), fix) from error


def sizes_of(op: str, groups: Sequence[str]) -> list[int]:
    """W along each axis."""
    if not is_virtual(groups):
        return [dist.get_world_size(group_of(op, name)) for name in groups]
    sizes = [name.removeprefix(VIRTUAL) for name in groups]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise refusal(op, "group", "name a positive number of virtual ranks", repr(groups), "pass 'virtual:4'")
    return [int(size) for size in sizes]


# --- checks and fakes ----------------------------------------------------------------------------------------------------------


@takes(Call)
def check_context_attention(call: Call) -> None:
    op = "context_attention"
    _check(op, call, call.return_max_logit)
    ranks = 1 if is_virtual(call.groups) else math.prod(sizes_of(op, call.groups))
    if call.total_tokens != 0 and call.q.shape[0] * ranks != call.total_tokens:
        got = f"{ranks} for {call.q.shape[0]} of {call.total_tokens} rows"
        raise refusal(op, "group", "have total_tokens / n ranks", got, "pass the group that rows were partitioned for")


@takes(Call)
def fake_context_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return fake_attention(*_alone(call, call.return_max_logit))


@takes(GradCall)
def check_context_attention_grad(call: GradCall) -> None:
    op = "context_attention_grad"
    _check(op, call, False)
    rows, heads, _ = call.q.shape
    out_shape, lse_shape = (rows, heads, call.v.shape[2]), (heads, rows)
    statistics = attention_thd.statistics_dtype(call.q)
    for name, tensor, shape, dtype in (
        ("out", call.out, out_shape, call.q.dtype),
        ("lse", call.lse, lse_shape, statistics),
        ("grad_out", call.grad_out, out_shape, call.q.dtype),
        ("grad_lse", call.grad_lse, lse_shape, statistics),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            wanted = f"[{', '.join(map(str, shape))}]"
            raise refusal(op, name, f"have the forward's shape {wanted}", shape_of(tensor), "pass the forward's")
        check_dtype(op, name, tensor, (dtype,))
        check_device(op, name, tensor, call.q.device, "q")


@takes(GradCall)
def fake_context_attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    forward = _alone(call, False)
    return fake_attention_grad(call.grad_out, call.grad_lse, *forward[:3], call.out, call.lse, *forward[3:19])


def _alone(call: Call | GradCall, wants_max_logit: bool) -> attention_thd.Call:
    """The call as one rank's own rows would make it: what a rank alone must be able to serve."""
    return attention_thd.Call(
        q=call.q,
        k=call.k,
        v=call.v,
        cu_seqlens_q=call.cu_seqlens,
        cu_seqlens_q_padded=call.cu_seqlens_padded,
        cu_seqlens_kv=None,
        cu_seqlens_kv_padded=None,
        sink=call.sink,
        causal=call.causal,
        bottom_right=False,
        window_left=call.window_left,
        window_right=call.window_right,
        scale=call.scale,
        softmax=call.softmax,
        softcap=call.softcap,
        max_seqlen_q=0,
        max_seqlen_kv=0,
        deterministic=call.deterministic,
        backend=call.backend,
        return_max_logit=wants_max_logit,
    )


def _check(op: str, call: Call | GradCall, wants_max_logit: bool) -> None:
    for name, x, layout in (("q", call.q, "[T / W, Hq, Dqk]"), ("k", call.k, "[T / W, Hkv, Dqk]")):
        check_rank(op, name, x, 3, layout)
    if call.k.shape[0] != call.q.shape[0]:
        raise refusal(op, "k", f"have the rows of q ({call.q.shape[0]})", call.k.shape[0], "pass the same rows of the batch")
    check_cu_seqlens(op, call.cu_seqlens, call.cu_seqlens_padded, call.q.device, "q")
    alone = _alone(call, wants_max_logit)
    attention_thd.check_call(op, alone)
    attention_thd.check_backend(op, alone, wants_max_logit)
    _check_group(op, call)


def _check_group(op: str, call: Call | GradCall) -> None:
    check_choice(op, "comm", call.comm, COMMS)
    check_choice(op, "partition", call.partition, PARTITIONS)
    wanted = 2 if call.comm == "a2a+p2p" else 1
    if len(call.groups) != wanted:
        rule = "be a mesh of two dimensions or a pair of groups" if wanted == 2 else "be one group"
        fix = "pass (ring group, heads group)" if wanted == 2 else "pass one dimension of the mesh, or comm='a2a+p2p'"
        raise refusal(op, "group", f"{rule} with comm={call.comm!r}", f"{len(call.groups)}", fix)
    sizes = sizes_of(op, call.groups)
    ranks = math.prod(sizes)
    rows, unit = call.q.shape[0], 2 * ranks if is_virtual(call.groups) else 2
    if rows % unit != 0:
        rule = f"have T / W rows, T a multiple of 2 * W (W = {ranks} here)"
        got = f"{rows} rows{' of all ranks' if unit > 2 else ''}"
        raise refusal(op, "q", rule, got, "pad the batch, and every sequence, to multiples of 2 * W rows")
    if "p2p" in call.comm and (call.window_left >= 0 or (call.window_right >= 0 and not call.causal)):
        got = f"({call.window_left}, {call.window_right})"
        fix = "pass comm='all_gather' or 'a2a': a ring would send keys that no query of the next ranks sees"
        raise refusal(op, "window", f"be (-1, -1) with comm={call.comm!r}", got, fix)
    if "a2a" in call.comm and (call.q.shape[1] % sizes[-1] != 0 or call.k.shape[1] % sizes[-1] != 0):
        got = f"{call.q.shape[1]} and {call.k.shape[1]}"
        fix = "pass comm='p2p' or 'all_gather', or split heads over fewer ranks with 'a2a+p2p'"
        raise refusal(op, "heads of q and k", f"be multiples of the {sizes[-1]} ranks that share them", got, fix)
