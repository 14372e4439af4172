"""Public functions and specs of the context-parallel attention ops.

W ranks, T rows of the whole batch, n = T / W rows of a rank, B sequences, Hq and Hkv heads, Dqk and Dv head dims.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meta_kernels import context_attention as contract
from meta_kernels.context_attention import Call
from meta_kernels.contract import check_integers, check_kinds, check_static, check_tensors, refusal
from thdops.context_parallel import contests, run, samples
from thdops.context_parallel.groups import names_of
from thdops.namespace import REGISTRY
from thdops.ops.attention_thd.op import autocast, default_scale
from thdops.ops.context.op import from_rank_order, to_rank_order
from thdops.registry import OpSpec, register

if TYPE_CHECKING:
    from thdops.context_parallel.groups import Group


# --- public functions ----------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    group: Group,
    comm: str = "p2p",
    partition: str = "zigzag",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    softcap: float = 0.0,
    total_tokens: int | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Any:
    """Self-attention within each sequence of a packed batch whose rows are shared out among the ranks of a group.

        mine = context_parallel.partition_indices(padded, total, world, rank)
        q, k, v = project(x[mine])  # n = T / W rows
        out = context_parallel.attention(q, k, v, valid, padded, group=group, causal=True)

    Every rank of the group calls it with its own rows and the whole batch's metadata, and gets its rows of what `thdops.attention`
    would give one device for the whole batch, in forward and backward: keys and values that other ranks' queries saw get their
    gradient from there. Communication is inside the op, in both directions, so every rank must go through the same calls, and
    through their backward if one does. No host sync; capturable in a CUDA graph with NCCL.

    | comm | what travels, forward | and backward | takes |
    |---|---|---|---|
    | "p2p" | k, v round the ring, W - 1 steps behind the computation | k, v again; their gradients in fp32 | any head count |
    | "all_gather" | k, v, before the computation | k, v again; their gradients reduced in fp32 | windows; any head count |
    | "a2a" | q, k, v, out, from rows to heads and back | those, and all gradients | windows; W divides Hq and Hkv |
    | "a2a+p2p" | "a2a" among neighbours, then their keys round a ring | likewise | heads ranks divide Hq and Hkv |

    Results of several sets of keys are merged by their LSE and rounded once; gradients are added up in fp32.

    Args:
        q: `[n, Hq, Dqk]`, this rank's rows in the order of `partition_indices`; any strides; bf16, fp16 or fp32 (fp64 on CPU).
            Under autocast q, k and v are cast to its dtype.
        k: `[n, Hkv, Dqk]`, q's dtype. Hq is a multiple of Hkv.
        v: `[n, Hkv, Dv]`, q's dtype.
        cu_seqlens: int32 or int64 `[B+1]` on q's device, of the whole batch: valid rows per sequence as prefix sums.
        cu_seqlens_padded: physical offsets in the whole batch, every one a multiple of 2W; None where sequences stand back to back.
        group: a process group, its name, or a `DeviceMesh` of one dimension; the rank in it is `cp_rank` in `partition_indices`.
            For "a2a+p2p" a mesh of two dimensions, ring first, or a pair (ring group, heads group); then `cp_rank` is
            ring rank * heads ranks + heads rank.
        comm: see the table; every rank the same, as everything that follows.
        partition: "zigzag", which gives every rank the same work under a causal mask, or "contiguous".
        causal, window, scale, softmax, softcap: as in `thdops.attention`; windows with "all_gather" and "a2a" only.
        sink: float32 `[Hq]` with softmax="learnable", the same on every rank. Its gradient on a rank is that rank's share, as that
            of every weight: reduce it as weights are reduced, and it is the whole.
        total_tokens: T, if it is at hand: then a group whose size does not fit the rows is refused before anything is sent.
        deterministic: the backward repeats bitwise; None follows `torch.are_deterministic_algorithms_enabled()`.
        backend: of the single attention calls; None takes native kernels on CUDA and the reference on CPU.
        return_lse: also return the log-sum-exp of this rank's rows, float32 `[Hq, n]`, differentiable.
        return_max_logit: also return each head's largest logit of the whole batch, float32 `[Hq]`, the same on every rank.

    Returns:
        out `[n, Hq, Dv]`, or a tuple (out, lse), (out, max_logit) or (out, lse, max_logit). On padding rows out and all gradients
        are +0.0 and lse is -inf, whatever stands there in any rank's tensors. LSE and max_logit are float64 for float64 inputs.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value; rows that are no multiple of 2; a group that
            this process is not in or of the wrong number of dimensions; heads or windows that the comm cannot serve.
        RuntimeError: an exchange failed: a rank died or called it otherwise, and the group's backend noticed (at the latest after
            the timeout that the group was made with).
    """
    op = "context_attention"
    _check_arguments(op, q, k, v, cu_seqlens, cu_seqlens_padded, sink, window, scale, softcap)
    names = names_of(op, group)
    if total_tokens is not None:
        check_integers(op, total_tokens=total_tokens)
    return _attention(
        names,
        (q, k, v, cu_seqlens, cu_seqlens_padded, sink),
        (comm, partition, causal, window, scale, softmax, softcap, deterministic, backend),
        return_lse,
        return_max_logit,
        total_tokens or 0,
    )


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    cp_size: int | tuple[int, int],
    comm: str = "p2p",
    partition: str = "zigzag",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Any:
    """`context_parallel.attention` of W ranks on one device: the whole batch in, the whole batch out, no process group.

        out = context_parallel.simulate(q, k, v, valid, padded, cp_size=4, causal=True)
        torch.testing.assert_close(out, thdops.attention(q, k, v, valid, cu_seqlens_q_padded=padded, causal=True))

    Rows are shared out as `partition_indices` does, W virtual ranks run the very code that real ones run, step by step in turn, and
    their rows are put together again. For tests, for teaching, for a look at a ring's arithmetic on one GPU.

    Args:
        q, k, v: `[T, H, D]`, the whole batch in its own order; T and every offset are multiples of 2W.
        cp_size: W; a pair (ring, heads) with comm="a2a+p2p".
        cu_seqlens, cu_seqlens_padded, and all that follow: as in `attention`. The gradient of a sink is the whole one.

    Returns:
        As `attention`, for all T rows.

    Raises:
        ValueError, TypeError: as `attention`; T no multiple of 2W.
    """
    op = "context_attention"
    _check_arguments(op, q, k, v, cu_seqlens, cu_seqlens_padded, sink, window, scale, softcap)
    sizes = cp_size if isinstance(cp_size, (tuple, list)) else (cp_size,)
    for size in sizes:
        check_integers("simulate", cp_size=size)
    ranks = math.prod(sizes)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    by_rank = [to_rank_order(x, padded, ranks, partition=partition) for x in (q, k, v)]
    out, lse, *rest = _attention(
        [f"{contract.VIRTUAL}{size}" for size in sizes],
        (*by_rank, cu_seqlens, cu_seqlens_padded, sink),
        (comm, partition, causal, window, scale, softmax, softcap, deterministic, backend),
        True,
        return_max_logit,
        0,
    )
    out = from_rank_order(out, padded, ranks, partition=partition)
    results = [out]
    if return_lse:
        results.append(from_rank_order(lse.t(), padded, ranks, partition=partition).t().contiguous())
    results += rest
    return tuple(results) if len(results) > 1 else out


def _attention(
    names: list[str], tensors: tuple[Any, ...], settings: tuple[Any, ...], return_lse: bool, return_max_logit: bool, total: int
) -> Any:
    q, k, v, *metadata = tensors
    q, k, v = autocast(q, k, v)
    comm, partition, causal, window, scale, softmax, softcap, deterministic, backend = settings
    check_kinds("context_attention", str, comm=comm, partition=partition, softmax=softmax)
    out, lse, max_logit = torch.ops.thdops.context_attention(
        q,
        k,
        v,
        *metadata,
        names,
        comm,
        partition,
        causal,
        *window,
        default_scale(q) if scale is None else scale,
        softmax,
        softcap,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        ("reference" if q.device.type == "cpu" else "native") if backend is None else backend,
        return_max_logit,
        total,
    )
    results = (out, *((lse,) if return_lse else ()), *((max_logit,) if return_max_logit else ()))
    return results if len(results) > 1 else out


# --- arguments -----------------------------------------------------------------------------------------------------------------


def _check_arguments(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    sink: Tensor | None,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
) -> None:
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded, "sink": sink}
    check_tensors(op, ("cu_seqlens_padded", "sink"), **tensors)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise refusal(op, "window", "be a pair of integers (left, right)", window, "pass -1 for an unbounded side")
    check_integers(op, window_left=window[0], window_right=window[1])
    check_static(op, scale=scale, softcap=softcap)


# --- autograd ------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = Call(*inputs)
    out, lse, max_logit = output
    ctx.save_for_backward(*call[:3], out, lse, *call[3:6])
    ctx.settings = call[6:17]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """Without any gradient a rank still takes part in the exchanges of the others."""
    settings: list[None] = [None] * len(ctx.settings)
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them once
    dq, dk, dv, dsink = torch.ops.thdops.context_attention_grad(grad_out, grad_lse, *saved, *ctx.settings)
    has_sink = saved[-1] is not None
    return (dq, dk, dv, None, None, dsink if has_sink else None, *settings, None, None)


# --- specs ---------------------------------------------------------------------------------------------------------------------

_METADATA = (
    "Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? sink, str[] groups, str comm, str partition, bool causal,"
    " SymInt window_left, SymInt window_right, float scale, str softmax, float softcap, bool deterministic, str backend"
)


def _spec(name: str, schema: str, summary: str, **rest: Any) -> None:
    pieces = {piece: getattr(contract, f"{piece}_{name}") for piece in ("check", "fake")}
    pieces |= {piece: getattr(samples, f"{name}_{piece}") for piece in ("samples", "refusals", "padding", "cost", "benches")}
    pieces["contests"] = contests.forward if name == "context_attention" else contests.backward
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            reference=getattr(run, name),
            eager=getattr(run, f"{name}_eager"),
            cuda=f"thdops.context_parallel.kernels:{name}",
            pads_zeroed=True,
            backends=("attention",),  # nothing of its own: the steps are ops
            roundings=5.0,  # attention's, and one for what is merged or added up
            **pieces,
            **rest,
        ),
        REGISTRY,
    )


_spec(
    "context_attention",
    f"(Tensor q, Tensor k, Tensor v, {_METADATA}, bool return_max_logit, SymInt total_tokens)"
    " -> (Tensor out, Tensor lse, Tensor max_logit)",
    "attention within each packed sequence, rows shared out among the ranks of a group",
    setup_context=_save,
    backward=_backward,
    no_gradient=("max_logit",),
    save=True,
)
_spec(
    "context_attention_grad",
    "(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {_METADATA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    "the backward of context_attention: dq, dk, dv of this rank's rows, its share of dsink",
)
