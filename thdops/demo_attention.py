"""The attention functions that `python -m thdops demo` holds side by side: all that are installed, called as well as they can be.

T rows, B sequences, H heads, D head dim. Each is causal, takes q, k, v `[T, H, D]`, cu_seqlens and cu_seqlens_padded `[B+1]`, and
gives out `[T, H, D]` and, if it has one, the LSE `[H, T]`. One that takes a single cu_seqlens gets the padded offsets, since they
say where rows stand; its lengths then count the padding behind each sequence, which a causal mask keeps from valid queries. One
that wants the longest length as a Python number gets T, so that no layout needs another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import thdops

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, "Tensor | None"]]


@dataclass(frozen=True)
class Attention:
    """One row. `run` is how it is used, `function` what a compiler is given; `ours` says whether the promises are.

    `compiled`: `run` is compiled by torch when first called, which takes long, and again in every other setting of torch.
    """

    name: str
    function: Attend
    run: Attend
    ours: bool = False
    gradients: bool = True
    compiled: bool = False


def installed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Iterator[Attention]:
    """Every one that serves calls like this one on this machine, ours last."""
    gpu = q.is_cuda
    yield Attention("SDPA with a mask", _sdpa, _sdpa)
    yield Attention("FlexAttention", _flex, torch.compile(_flex) if gpu else _flex, gradients=gpu, compiled=gpu)
    if gpu:
        yield Attention("torch varlen_attn", _varlen, _varlen)
    if gpu and _found("flash_attn.flash_attn_interface"):
        yield Attention("flash-attn 2", _flash2, _flash2)
    if gpu and _found("flash_attn.cute.interface"):
        yield Attention("flash-attn 4", _flash4, _flash4)
    backends = thdops.attention_backends(q, k, v, cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded, causal=True)
    for backend, state in backends.items():
        if state in ("chosen", "serves") and not (gpu and backend == "reference"):
            attend = _ours(backend)
            yield Attention(f"thdops {backend}", attend, attend, ours=True)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[T, H, D] as [1, H, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, None]:
    document = thdops.sequence_ids(cu_seqlens, cu_seqlens_padded, q.shape[0])
    row = torch.arange(q.shape[0], device=q.device)
    seen = (document[:, None] == document) & (document >= 0) & (row <= row[:, None])
    return F.scaled_dot_product_attention(*_batched(q, k, v), attn_mask=seen)[0].transpose(0, 1), None


def _flex(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    document = thdops.sequence_ids(cu_seqlens, cu_seqlens_padded, q.shape[0])

    def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (document[i] >= 0) & (j <= i)

    mask = create_block_mask(seen, None, None, q.shape[0], q.shape[0], device=q.device)
    function: Any = flex_attention  # its overloads know no unpacked arguments
    out, aux = function(*_batched(q, k, v), block_mask=mask, return_aux=AuxRequest(lse=True))
    return out[0].transpose(0, 1), aux.lse[0]


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    offsets, longest = (cu_seqlens_padded, cu_seqlens_padded), (q.shape[0], q.shape[0])
    result: Any = varlen_attn(q, k, v, *offsets, *longest, return_aux=AuxRequest(lse=True), window_size=(-1, 0))
    return result


def _flash2(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
    function: Any = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    offsets, longest = (cu_seqlens_padded, cu_seqlens_padded), (q.shape[0], q.shape[0])
    out, lse, _ = function(q, k, v, *offsets, *longest, causal=True, return_attn_probs=True)
    return out, lse


def _flash4(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
    function: Any = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    offsets = {"cu_seqlens_q": cu_seqlens_padded, "cu_seqlens_k": cu_seqlens_padded}
    used = {"seqused_q": cu_seqlens.diff(), "seqused_k": cu_seqlens.diff()}
    out, lse = function(q, k, v, **offsets, **used, causal=True, return_lse=True)
    return out, lse


def _ours(backend: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"causal": True, "deterministic": False, "backend": backend, "return_lse": True}
        found: Any = thdops.attention(q, k, v, cu_seqlens, cu_seqlens_q_padded=cu_seqlens_padded, **options)
        return found

    return attend
