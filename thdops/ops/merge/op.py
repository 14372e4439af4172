"""Public function and specs of the merge ops. T rows, H heads, D head dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels import merge as contract
from meta_kernels.contract import check_kinds, check_tensors
from thdops.namespace import REGISTRY
from thdops.ops.merge import reference, samples
from thdops.registry import OpSpec, register


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each: what context parallelism and split-KV end with.

        out_a, lse_a = thdops.attention(q, k_a, v_a, cu_q, cu_a, return_lse=True)
        out_b, lse_b = thdops.attention(q, k_b, v_b, cu_q, cu_b, return_lse=True)
        out, lse = thdops.merge_attention(out_a, lse_a, out_b, lse_b)

    lse = log(e^lse_a + e^lse_b), out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b, in fp32, rounded once; bitwise repeatable.
    More parts are merged one after the other, in any order; keep the out in fp32 meanwhile, so that it is rounded once:
    `dtype=torch.float32`, and the dtype wanted at the last one.

    Args:
        out_a: `[T, H, D]` fp32, bf16 or fp16 (fp64 on CPU), any strides; normalised over its own keys, as attention returns it.
        lse_a: fp32 `[H, T]` (fp64 where an out is fp64), any strides; the natural log-sum-exp of the scaled logits. -inf marks a
            row that saw no key, or a padding row. (FlashAttention-2 writes +inf there: replace it first.)
        out_b: the shape of out_a; its dtype may be another.
        lse_b: as lse_a.
        dtype: of out; None is out_a's and out_b's, promoted where they differ.

    Returns:
        out: contiguous `[T, H, D]`.
        lse: contiguous `[H, T]`, differentiable.

        Where one LSE is -inf, out (in its own dtype) and lse are the other part's, bit for bit, and so are gradients; where both
        are, out is +0.0, lse -inf and gradients +0.0. What stands in an out whose LSE is -inf, NaN included, reaches nothing. So
        padding rows stay padding rows.

    A sink, learnable or off by one, adds to the denominator once: give it to the attention of one part only, any of them. Its row
    LSE is then never -inf.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or shape of an argument.
    """
    check_tensors("merge_attention", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if dtype is not None:
        check_kinds("merge_attention", torch.dtype, dtype=dtype)
    return torch.ops.thdops.merge_attention(out_a, lse_a, out_b, lse_b, dtype)


# --- autograd ------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 5
    return *torch.ops.thdops.merge_attention_grad(grad_out, grad_lse, *ctx.saved_tensors), None


# --- specs ---------------------------------------------------------------------------------------------------------------------


def _spec(name: str, schema: str, summary: str, **rest: Any) -> None:
    pieces = {piece: getattr(contract, f"{piece}_{name}") for piece in ("check", "fake")}
    pieces |= {piece: getattr(samples, f"{name}_{piece}") for piece in ("samples", "refusals", "padding", "cost", "benches")}
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            reference=getattr(reference, name),
            cuda=f"thdops.ops.merge.kernels:{name}",
            pads_zeroed=True,
            roundings=4.0,  # an exponential, a quotient, a logarithm
            **pieces,
            **rest,
        ),
        REGISTRY,
    )


_spec(
    "merge_attention",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, ScalarType? dtype=None) -> (Tensor out, Tensor lse)",
    "attention over two disjoint sets of keys from the attention over each; -inf safe",
    setup_context=_save,
    backward=_backward,
)
_spec(
    "merge_attention_grad",
    "(Tensor? grad_out, Tensor? grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)"
    " -> (Tensor grad_a, Tensor grad_lse_a, Tensor grad_b, Tensor grad_lse_b)",
    "gradients of merge_attention: of both parts and of both LSE, in one pass",
)
