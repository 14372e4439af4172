"""Contracts of the attention ops.

T rows (Tq of queries, Tk of keys and values), B sequences, Hq and Hkv heads, Dqk and Dv head dims.
q [Tq, Hq, Dqk], k [Tk, Hkv, Dqk], v [Tk, Hkv, Dv] -> out [Tq, Hq, Dv], lse [Hq, Tq], max_logit [Hq] (size 0 unless asked for).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.contract import (
    accumulation_dtype,
    check_choice,
    check_count,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_float,
    check_rank,
    contiguous,
    dtype_of,
    refusal,
    shape_of,
    takes,
)

SOFTMAX_KINDS = ("vanilla", "off_by_one", "learnable")
BACKENDS = ("native", "fa4", "cudnn", "torch", "reference")
"""Every name that `backend` may have, fastest first."""

_HEAD_DIM_RULE = "have a head dim that is a multiple of 8 from 16 to 256"


class Call(NamedTuple):
    """The arguments of the op `attention`, in the order of its schema.

    `cu_seqlens_kv` None says that keys and values have the query's metadata (self-attention): then both causal alignments are
    the same, and a kernel may use that. Equal values in two tensors say nothing: nobody reads them on the host.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    sink: Tensor | None
    causal: bool
    bottom_right: bool
    window_left: int  # keys to the left of the diagonal that are visible; -1 = all
    window_right: int
    scale: float
    softmax: str
    softcap: float  # 0 = none
    max_seqlen_q: int  # 0 = not known, at most Tq
    max_seqlen_kv: int
    deterministic: bool
    backend: str  # one of BACKENDS; "" where no fast backend serves the call
    return_max_logit: bool


class GradCall(NamedTuple):
    """The arguments of the op `attention_grad`: incoming gradients (None = zero), then the forward's tensors and its metadata."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    sink: Tensor | None
    causal: bool
    bottom_right: bool
    window_left: int
    window_right: int
    scale: float
    softmax: str
    softcap: float
    max_seqlen_q: int
    max_seqlen_kv: int
    deterministic: bool
    backend: str


def key_metadata(call: Call | GradCall) -> tuple[Tensor, Tensor | None]:
    """cu_seqlens of keys and values and their padded offsets: the query's where they have none of their own."""
    if call.cu_seqlens_kv is None:
        return call.cu_seqlens_q, call.cu_seqlens_q_padded
    return call.cu_seqlens_kv, call.cu_seqlens_kv_padded


# --- checks and fakes ----------------------------------------------------------------------------------------------------------


@takes(Call)
def check_attention(call: Call) -> None:
    check_call("attention", call)
    check_backend("attention", call, call.return_max_logit)


@takes(Call)
def fake_attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, _ = call.q.shape
    device, statistics = call.q.device, statistics_dtype(call.q)
    return (
        contiguous(rows, heads, call.v.shape[2], dtype=call.q.dtype, device=device),
        contiguous(heads, rows, dtype=statistics, device=device),
        contiguous(heads if call.return_max_logit else 0, dtype=statistics, device=device),
    )


@takes(GradCall)
def check_attention_grad(call: GradCall) -> None:
    op = "attention_grad"
    check_call(op, call)
    rows, heads, _ = call.q.shape
    out_shape, lse_shape = (rows, heads, call.v.shape[2]), (heads, rows)
    for name, tensor, shape, dtype in (
        ("out", call.out, out_shape, call.q.dtype),
        ("lse", call.lse, lse_shape, statistics_dtype(call.q)),
        ("grad_out", call.grad_out, out_shape, call.q.dtype),
        ("grad_lse", call.grad_lse, lse_shape, statistics_dtype(call.q)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            wanted = f"[{', '.join(map(str, shape))}]"
            raise refusal(op, name, f"have the forward's shape {wanted}", shape_of(tensor), "pass the forward's")
        check_dtype(op, name, tensor, (dtype,))
        check_device(op, name, tensor, call.q.device, "q")
    check_backend(op, call, False)


@takes(GradCall)
def fake_attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (contiguous(*x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    if call.sink is None:
        return dq, dk, dv, contiguous(0, dtype=torch.float32, device=call.q.device)
    return dq, dk, dv, contiguous(*call.sink.shape, dtype=call.sink.dtype, device=call.q.device)


def statistics_dtype(q: Tensor) -> torch.dtype:
    """LSE and max_logit are fp32; fp64 for fp64 inputs."""
    return accumulation_dtype(q.dtype)


def check_call(op: str, call: Call | GradCall) -> None:
    _check_qkv(op, call.q, call.k, call.v)
    _check_metadata(op, call)
    for name, value in (("window_left", call.window_left), ("window_right", call.window_right)):
        if value < -1:
            raise refusal(op, name, "be at least -1 (-1 = unbounded)", value, "pass how many keys beside the diagonal are visible")
    for name, value in (("max_seqlen_q", call.max_seqlen_q), ("max_seqlen_kv", call.max_seqlen_kv)):
        check_count(op, name, value, 0)
    if not math.isfinite(call.scale):
        raise refusal(op, "scale", "be finite", call.scale, "pass a number, or None for Dqk**-0.5")
    if not 0 <= call.softcap < math.inf:
        raise refusal(op, "softcap", "be 0 (none) or positive and finite", call.softcap, "pass another")
    _check_softmax(op, call)


def _check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x, layout in (("q", q, "[Tq, Hq, Dqk]"), ("k", k, "[Tk, Hkv, Dqk]"), ("v", v, "[Tk, Hkv, Dv]")):
        check_rank(op, name, x, 3, layout)
    check_float(op, "q", q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise refusal(op, name, f"have the dtype of q ({dtype_of(q)})", dtype_of(x), "cast one of them", TypeError)
        check_device(op, name, x, q.device, "q")
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1]:
        raise refusal(op, "v", f"have the rows and heads of k ({shape_of(k)})", shape_of(v), "pass values of the same keys")
    for name, x in (("q", q), ("v", v)):
        if x.shape[2] % 8 != 0 or not 16 <= x.shape[2] <= 256:
            raise refusal(op, name, _HEAD_DIM_RULE, x.shape[2], "pad the head dim with zeros")
    if k.shape[2] != q.shape[2]:
        raise refusal(op, "k", f"have the head dim of q ({q.shape[2]})", k.shape[2], "pass keys of the same width")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise refusal(
            op,
            "q",
            f"have a positive multiple of k's heads ({k.shape[1]})",
            q.shape[1],
            "each key head serves Hq / Hkv query heads",
        )


def _check_metadata(op: str, call: Call | GradCall) -> None:
    device = call.q.device
    check_cu_seqlens(op, call.cu_seqlens_q, call.cu_seqlens_q_padded, device, "q", "cu_seqlens_q")
    kv = call.cu_seqlens_kv
    if kv is None:
        if call.cu_seqlens_kv_padded is not None:
            raise refusal(
                op, "cu_seqlens_kv_padded", "come with cu_seqlens_kv", "it alone", "pass both, or neither for the query's metadata"
            )
        if call.k.shape[0] != call.q.shape[0]:
            raise refusal(
                op, "k", f"have the rows of q ({call.q.shape[0]}) without cu_seqlens_kv", call.k.shape[0], "pass cu_seqlens_kv"
            )
        return
    check_cu_seqlens(op, kv, call.cu_seqlens_kv_padded, device, "q", "cu_seqlens_kv")
    if kv.shape[0] != call.cu_seqlens_q.shape[0]:
        raise refusal(
            op,
            "cu_seqlens_kv",
            f"have as many entries as cu_seqlens_q ({call.cu_seqlens_q.shape[0]})",
            kv.shape[0],
            "pass B+1 offsets in both; a sequence without keys has length 0",
        )
    if kv.dtype != call.cu_seqlens_q.dtype:
        raise refusal(
            op,
            "cu_seqlens_kv",
            f"have the dtype of cu_seqlens_q ({dtype_of(call.cu_seqlens_q)})",
            dtype_of(kv),
            "cast one of them",
            TypeError,
        )


def _check_softmax(op: str, call: Call | GradCall) -> None:
    sink = call.sink
    check_choice(op, "softmax", call.softmax, SOFTMAX_KINDS)
    if sink is None:
        if call.softmax == "learnable":
            raise refusal(op, "sink", "be given with softmax='learnable'", "None", "pass a float32 [Hq], or another softmax")
        return
    if call.softmax != "learnable":
        raise refusal(
            op,
            "sink",
            "come with softmax='learnable'",
            f"a sink with softmax={call.softmax!r}",
            "leave it out, or pass softmax='learnable'",
        )
    fp64_too = call.q.dtype == torch.float64
    check_dtype(op, "sink", sink, (torch.float32, torch.float64) if fp64_too else (torch.float32,))
    if sink.dim() != 1 or sink.shape[0] != call.q.shape[1]:
        raise refusal(op, "sink", f"have one entry per query head [{call.q.shape[1]}]", shape_of(sink), "reshape it")
    check_device(op, "sink", sink, call.q.device, "q")


# --- which backend serves which call -------------------------------------------------------------------------------------------

PEERS = {"fa4": "flash_attn.cute", "cudnn": "cudnn.sdpa"}
"""Backends in packages of their own: the module that each needs. Its extra has the backend's name."""

HINTED = ("fa4", "cudnn", "torch")
"""Backends that size their work by max_seqlen_q and max_seqlen_kv. The others never see them: a compiler would guard on values."""

_FEW_SEQUENCES = 16
_NARROWEST_OF_FA4 = 64
_WORKSPACE = 2**34  # bytes that a backend may ask for beyond its results


def unserved(name: str, call: Call | GradCall, wants_max_logit: bool) -> str:
    """Why backend `name` does not serve a legal call, or ""."""
    if name == "reference":
        return ""
    if call.q.device.type != "cuda":
        return "runs on CUDA only"
    if name == "native":
        return "" if installed("triton.language") else "needs Triton (pip install 'thdops[kernels]')"
    if name in PEERS and not installed(PEERS[name]):
        return f"is not installed (pip install 'thdops[{name}]')"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return "serves bfloat16 and float16 only"
    if wants_max_logit:
        return "cannot return max_logit"
    return _UNSERVED[name](call)


def default_backend(call: Call, order: Sequence[str] = BACKENDS[:-1]) -> str:
    """The first of `order` that serves the call; "" if only the reference does, which nobody should get unasked on a GPU."""
    if call.q.device.type != "cuda":
        return "reference"
    if not call.q.dim() == call.k.dim() == call.v.dim() == 3:
        return "native"  # not a legal call: the op's own check says so
    for name in order:
        if not unserved(name, call, call.return_max_logit):
            return name
    return ""


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.assume_constant_result` does, which imports the whole compiler, and Triton with it.

    A tracer looks through a cache: what is constant for it is one function, and what is cached another.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@_constant
def installed(module: str) -> bool:
    """Whether `package.module` can be imported, without importing either: looked up once."""
    return _find(module)


@cache
def _find(module: str) -> bool:
    package, _, _ = module.partition(".")
    found = importlib.util.find_spec(package)
    places = None if found is None else found.submodule_search_locations
    return places is not None and importlib.machinery.PathFinder.find_spec(module, list(places)) is not None


@_constant
def capability(index: int | None) -> tuple[int, int]:
    """The compute capability of a GPU (None: the first); (0, 0) where there is none to ask."""
    return _ask_capability(index or 0)


@cache
def _ask_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (0, 0)


def _unserved_by_torch(call: Call | GradCall) -> str:
    """FlashAttention-2 as torch carries it: what it cannot do."""
    if call.q.shape[2] != call.v.shape[2]:
        return "needs values as wide as keys (no MLA)"
    if call.softmax != "vanilla":
        return "has no sink (softmax='vanilla' only)"
    if call.softcap != 0:
        return "has no softcap"
    if call.scale < 0:
        return "needs a scale of at least 0"
    return _aligned_left(call)


def _unserved_by_fa4(call: Call | GradCall) -> str:
    """flash-attn-4: what its kernels cannot do, forward or backward."""
    major, _ = capability(call.q.device.index)
    if major not in (9, 10):
        return "needs a GPU of compute capability 9 or 10"
    if major == 10 and not _narrow(call):
        return "serves head dims up to 128, or 192 for keys and 128 for values, on this GPU"
    if min(call.q.shape[2], call.v.shape[2]) < _NARROWEST_OF_FA4:
        return f"is wrong with head dims below {_NARROWEST_OF_FA4} (seen in 4.0.0b36 on an H200)"
    if major == 9 and call.q.shape[2] != call.v.shape[2] and call.q.shape[1] != call.k.shape[1]:
        return "has no backward for grouped heads with values of another width than keys on this GPU"
    if call.scale <= 0:
        return "needs a scale above 0"
    return _aligned_left(call)


def _unserved_by_cudnn(call: Call | GradCall) -> str:
    """cuDNN through its frontend: what its torch ops cannot do, forward or backward."""
    major, _ = capability(call.q.device.index)
    if major not in (9, 10):
        return "needs a GPU of compute capability 9 or 10"
    if major == 10 and not _narrow(call):
        return "serves head dims up to 128, or 192 for keys and 128 for values, on this GPU"
    if call.softmax != "vanilla":
        return "has no gradient of a sink (softmax='vanilla' only)"
    if call.softcap != 0:
        return "has no softcap"
    if call.scale <= 0:
        return "needs a scale above 0"
    if call.max_seqlen_q == 0 and call.cu_seqlens_q.shape[0] > _FEW_SEQUENCES + 1:
        return f"needs max_seqlen_q beyond {_FEW_SEQUENCES} sequences (its LSE takes it for each, or else Tq)"
    longest_q, longest_kv = call.max_seqlen_q or call.q.shape[0], call.max_seqlen_kv or call.max_seqlen_q or call.k.shape[0]
    if call.deterministic and 2 * (call.cu_seqlens_q.shape[0] - 1) * call.q.shape[1] * longest_q * longest_kv > _WORKSPACE:
        return "needs 2 * B * Hq * max_seqlen_q * max_seqlen_kv bytes, over 16 GiB here, for a deterministic backward"
    return ""


_UNSERVED = {"torch": _unserved_by_torch, "fa4": _unserved_by_fa4, "cudnn": _unserved_by_cudnn}


def _narrow(call: Call | GradCall) -> bool:
    """Head dims that Blackwell kernels of both peers have."""
    widths = call.q.shape[2], call.v.shape[2]
    return max(widths) <= 128 or widths == (192, 128)


def _aligned_left(call: Call | GradCall) -> str:
    """Flash attention measures from the bottom right; in self-attention that is the same."""
    bounded = call.causal or call.window_left >= 0 or call.window_right >= 0
    if bounded and not call.bottom_right and call.cu_seqlens_kv is not None:
        return "aligns causal masks and windows bottom-right where keys have a cu_seqlens of their own"
    return ""


def check_backend(op: str, call: Call | GradCall, wants_max_logit: bool) -> None:
    slow = "change the call, or pass backend='reference' (every feature, slow)"
    if call.backend == "":
        reasons = "; ".join(f"{name} {unserved(name, call, wants_max_logit)}" for name in BACKENDS[:-1])
        raise refusal(op, "backend", "serve the call", f"None, and no fast backend does ({reasons})", slow)
    if call.backend not in BACKENDS:
        raise refusal(op, "backend", f"be one of {', '.join(BACKENDS)}", repr(call.backend), "choose one, or None for the fastest")
    reason = unserved(call.backend, call, wants_max_logit)
    if reason:
        raise refusal(op, "backend", "serve the call", f"{call.backend!r}, which {reason}", slow)
