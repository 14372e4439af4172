"""Public functions and specs of the attention ops.

T rows (Tq of queries, Tk of keys and values), B sequences, Hq and Hkv heads, Dqk and Dv head dims.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call
from meta_kernels.contract import check_kinds, check_static, check_tensors, refusal
from thdops.namespace import REGISTRY
from thdops.ops.attention_thd import contests, flops, measured, reference, samples
from thdops.registry import OpSpec, register

_ALIGNMENTS = ("top_left", "bottom_right")


# --- public functions ----------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    softcap: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_p: float = 0.0,
) -> Any:
    """Attention within each sequence of a packed batch; no row sees another sequence or a padding row.

    Args:
        q: `[Tq, Hq, Dqk]`, any strides; bf16, fp16 or fp32 (fp64 on CPU). Under autocast q, k and v are cast to its dtype.
        k: `[Tk, Hkv, Dqk]`, q's dtype. Hq is a multiple of Hkv (GQA, MQA).
        v: `[Tk, Hkv, Dv]`, q's dtype. Dqk and Dv are multiples of 8 from 16 to 256 and may differ (MLA).
        cu_seqlens_q: int32 or int64 `[B+1]` on q's device: valid query rows per sequence as prefix sums.
        cu_seqlens_kv: the same for keys and values, same shape and dtype. None: keys and values have the query's metadata
            (self-attention), padded offsets included; then Tk is Tq. Not the place of padded offsets, which go by keyword.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: physical offsets; None where sequences stand back to back.
        causal: query i does not see keys behind its diagonal. With a window the right bound is min(r, 0).
        causal_alignment: where the diagonal of query i stands among the keys of its sequence: "top_left" at key i, "bottom_right"
            at key i + n_k - n_q (valid lengths). It holds for windows too.
        window: (left, right): how many keys on each side of the diagonal are visible; -1 is unbounded.
        scale: of the logits; None is Dqk**-0.5.
        softmax: "vanilla"; "off_by_one" adds 1 to the denominator; "learnable" adds e^sink.
        sink: float32 `[Hq]`, differentiable, with softmax="learnable".
        softcap: c > 0 replaces each logit s by c * tanh(s / c).
        max_seqlen_q, max_seqlen_kv: static hints, at least every length. Backends that need none never look at them.
        deterministic: the backward repeats bitwise; None follows `torch.are_deterministic_algorithms_enabled()`.
        backend: None takes the fastest that serves the call (on CPU the reference); see `attention_backends`.
        return_lse: also return the log-sum-exp of the logits (sink included), natural log, float32 `[Hq, Tq]`, differentiable.
        return_max_logit: also return each head's largest logit that a valid row sees, float32 `[Hq]`; -inf if there is none.
        dropout_p: 0.0 only.

    Returns:
        out `[Tq, Hq, Dv]`, or a tuple (out, lse), (out, max_logit) or (out, lse, max_logit). On padding rows out and all
        gradients are +0.0 and lse is -inf. A valid row that sees no key has out 0 and zero gradients; its lse is -inf (vanilla),
        0 (off_by_one) or the sink (learnable). LSE and max_logit are float64 for float64 inputs.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, dtype, device or value; a backend that does not serve the call.
    """
    call = _call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        causal,
        causal_alignment,
        window,
        scale,
        softmax,
        sink,
        softcap,
        deterministic,
        return_max_logit,
        dropout_p,
    )
    chosen = measured.choose(call) if backend is None else backend
    longest_q = longest_kv = 0
    if chosen in contract.HINTED:
        # No other backend needs them, and touching them would make a compiler guard on their values.
        longest_q, longest_kv = max_seqlen_q or 0, max_seqlen_kv or 0
    out, lse, max_logit = torch.ops.thdops.attention(
        *call[:15], longest_q, longest_kv, call.deterministic, chosen, return_max_logit
    )
    results = (out, *((lse,) if return_lse else ()), *((max_logit,) if return_max_logit else ()))
    return results if len(results) > 1 else out


def attention_backends(*args: Any, **kwargs: Any) -> dict[str, str]:
    """Which backend `attention` would take for these arguments, and why not the others; fastest first.

    Arguments and errors as `attention`, except that no fast backend serving the call is an answer here. Values are "chosen",
    "serves", or the reason for which a backend does not serve the call. Nothing is computed.

    The order is a measured one: of this kind of call (head dims, mask, rows a sequence) on this kind of GPU, as the table
    `measured.json` beside the code has it; where it has nothing, native comes first. The first that serves the call is taken.
    While a compiler traces, the rows of a sequence do not count: their number would be built into the program.
    """
    given = inspect.signature(attention).bind(*args, **kwargs).arguments
    wanted = given.get("backend")
    call = _call(**{name: value for name, value in given.items() if name in inspect.signature(_call).parameters})
    contract.check_attention(*call)
    chosen = measured.choose(call) if wanted is None else wanted
    hinted = call._replace(**{name: given.get(name) or 0 for name in ("max_seqlen_q", "max_seqlen_kv")})
    names = (*measured.order(call), "reference")
    table = {name: contract.unserved(name, hinted, call.return_max_logit) or "serves" for name in names}
    if table.get(chosen) == "serves":
        table[chosen] = "chosen"
    return table


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    causal: bool = False,
    causal_alignment: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    return_max_logit: bool = False,
    dropout_p: float = 0.0,
) -> Call:
    """The op's arguments, defaults resolved; without hints, with the one backend that serves everything."""
    optional = ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "sink")
    check_tensors(
        "attention",
        optional,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        sink=sink,
    )
    if causal_alignment not in _ALIGNMENTS:
        raise refusal("attention", "causal_alignment", f"be one of {', '.join(_ALIGNMENTS)}", repr(causal_alignment), "choose one")
    if dropout_p != 0:
        raise refusal(
            "attention", "dropout_p", "be 0.0 (dropout in attention is not supported)", dropout_p, "drop values elsewhere"
        )
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(isinstance(w, (int, torch.SymInt)) for w in window):
        raise refusal("attention", "window", "be a pair of integers (left, right)", window, "pass -1 for an unbounded side")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, Tensor):
            raise refusal("attention", name, "be a number", "a tensor", "it has no gradient; scale q to learn one", TypeError)
    check_static("attention", scale=scale, softcap=softcap)
    check_kinds("attention", str, softmax=softmax)
    q, k, v = autocast(q, k, v)
    return Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        sink=sink,
        causal=causal,
        bottom_right=causal_alignment == "bottom_right",
        window_left=window[0],
        window_right=window[1],
        scale=default_scale(q) if scale is None else scale,
        softmax=softmax,
        softcap=softcap,
        max_seqlen_q=0,
        max_seqlen_kv=0,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend="reference",
        return_max_logit=return_max_logit,
    )


def default_scale(q: Tensor) -> float:
    """Dqk**-0.5; of an illegal shape anything, since the op refuses that by name."""
    return int(q.shape[-1]) ** -0.5 if q.dim() == 3 and q.shape[-1] > 0 else 1.0


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast would: float tensors except fp64. By hand, because `register_autocast` would cast metadata and sink too."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast, and asking raises
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


# --- autograd ------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = Call(*inputs)
    out, lse, max_logit = output
    ctx.save_for_backward(*call[:3], out, lse, *call[3:8])
    ctx.settings = call[8:19]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    settings: list[None] = [None] * len(ctx.settings)
    if grad_out is None and grad_lse is None:
        return (None,) * 8 + tuple(settings) + (None,)
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them once
    dq, dk, dv, dsink = torch.ops.thdops.attention_grad(grad_out, grad_lse, *saved, *ctx.settings)
    has_sink = saved[-1] is not None
    return (dq, dk, dv, None, None, None, None, dsink if has_sink else None, *settings, None)


# --- specs ---------------------------------------------------------------------------------------------------------------------

_METADATA = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_kv, Tensor? cu_seqlens_kv_padded, Tensor? sink,"
    " bool causal, bool bottom_right, SymInt window_left, SymInt window_right, float scale, str softmax, float softcap,"
    " SymInt max_seqlen_q, SymInt max_seqlen_kv, bool deterministic, str backend"
)


def _spec(name: str, schema: str, summary: str, **rest: Any) -> None:
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            check=getattr(contract, f"check_{name}"),
            fake=getattr(contract, f"fake_{name}"),
            reference=getattr(reference, name),
            cuda=f"thdops.ops.attention_thd.backends:{name}",
            samples=getattr(samples, f"{name}_samples"),
            refusals=getattr(samples, f"{name}_refusals"),
            cost=getattr(samples, f"{name}_cost"),
            benches=getattr(samples, f"{name}_benches"),
            padding=getattr(samples, f"{name}_padding"),
            pads_zeroed=True,
            backends=("triton", "fa4", "cudnn", "torch", "reference"),
            eager=getattr(reference, f"{name}_eager"),
            flops=getattr(flops, name),
            # The backward computes P again as e^(S - LSE): what LSE was rounded by is a relative error of P.
            roundings=4.0,
            coarse=("sink",),
            launcher_checks=True,
            **rest,
        ),
        REGISTRY,
    )


_spec(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, {_METADATA}, bool return_max_logit) -> (Tensor out, Tensor lse, Tensor max_logit)",
    "attention within each packed sequence: out, log-sum-exp, largest logit per head",
    setup_context=_save,
    backward=_backward,
    no_gradient=("max_logit",),
    contests=contests.contests,
    write_table=contests.write_table,
    save=True,
)
_spec(
    "attention_grad",
    "(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {_METADATA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    "the backward of attention: dq, dk, dv, dsink",
)
