"""Public functions and specs of the dispatch ops.

T rows (tokens), E experts, K top-k; a pair (t, k) is token t at its k-th expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels import dispatch as contract
from meta_kernels.contract import check_tensors, refusal
from thdops.namespace import REGISTRY
from thdops.ops.dispatch import reference, samples
from thdops.registry import OpSpec, register

_KERNELS = "thdops.ops.dispatch.kernels"


def permute_tokens(x: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row per (token, expert) pair, sorted by expert: what a grouped GEMM reads. Sizes do not depend on the routing, no sync.

        rows, offsets, map = thdops.permute_tokens(x, indices, num_experts)
        hidden = torch.nn.functional.grouped_mm(rows, weight, offs=offsets)
        out = thdops.unpermute_tokens(hidden, map, probs)

    Args:
        x: `[T, ...]`, any strides, any dtype that has a zero (fp8 e4m3/e5m2, integers, bool included). Rows are copied as bytes.
        indices: int16, int32 or int64 `[T, K]`, K >= 1, T*K < 2**31; the experts of each token, as `router_topk` gives them. An
            id outside [0, E), -1 or E say, is no expert: that is how padding rows come. An expert may stand in a row twice.
        num_experts: E, at least 1, as a Python integer.

    Returns:
        rows: contiguous `[T*K, ...]` in x's dtype. Pairs (t, k) with an expert, sorted by (expert, t*K + k); then those without,
            by t*K + k, whose rows are +0.0, whatever x holds there.
        offsets: int32 `[E]`: how many rows the experts 0..e have, which is where expert e's rows end. From offsets[E-1] on
            rows belong to no expert.
        map: int32 `[T, K]`: the row of each pair, or `~row` (-1 - row, below 0) where it has no expert: nobody reads that row
            by mistake, and every row is still named once.

    The gradient of x is the sum over k of its rows' gradients, in fp32, rounded once; 0 for a token without an expert. Gradients
    of rows without an expert are not read. It is served for fp32, bf16 and fp16 (fp64 on CPU).

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or length of an argument; K or `num_experts` below 1; 2**31 pairs or more.
    """
    check_tensors("permute_tokens", x=x, indices=indices)
    if not isinstance(num_experts, (int, torch.SymInt)) or isinstance(num_experts, bool):
        got = "a tensor" if isinstance(num_experts, Tensor) else type(num_experts).__name__
        raise refusal("permute_tokens", "num_experts", "be a Python integer", got, "pass the static number of experts", TypeError)
    return torch.ops.thdops.permute_tokens(x, indices, num_experts)


def unpermute_tokens(rows: Tensor, map: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, weighted: `out[t] = sum_k weights[t, k] * rows[map[t, k]]` over pairs that have an expert.

    Rows of no expert, which a grouped GEMM leaves unwritten, are not read, nor are their pairs' weights.

    Args:
        rows: `[T*K, ...]` fp32, bf16 or fp16 (fp64 on CPU), any strides.
        map: int32 `[T, K]`, as `permute_tokens` returned it. Other contents touch nothing outside the tensors, but values are
            unspecified, and rows that no pair names get no gradient written.
        weights: `[T, K]` fp32, bf16 or fp16 (fp64 on CPU), of any dtype beside rows', any strides; None: all ones.

    Returns:
        Contiguous `[T, ...]` in the dtype of rows, summed in fp32 in the order of k and rounded once; bitwise repeatable. A token
        without an expert gets +0.0.

    Gradients: of rows, `weights[t, k] * grad[t]`, +0.0 where there is no expert; of weights, the dot product of grad[t] and the
    pair's row, in fp32, 0 where there is no expert. rows is kept for the backward only where weights require grad.

    Raises:
        ValueError, TypeError: wrong rank, dtype, device or length of an argument.
    """
    check_tensors("unpermute_tokens", ("weights",), rows=rows, map=map, weights=weights)
    return torch.ops.thdops.unpermute_tokens(rows, map, weights)


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def _save_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, offsets, map = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(offsets, map)
    ctx.save_for_backward(map)


def _permute_backward(ctx: Any, grad_rows: Tensor | None, grad_offsets: None, grad_map: None) -> tuple[Tensor | None, None, None]:
    if grad_rows is None:
        return None, None, None
    return torch.ops.thdops.unpermute_tokens(grad_rows, *ctx.saved_tensors), None, None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, map, weights = inputs
    ctx.set_materialize_grads(False)
    wanted = weights is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(rows if wanted else None, map, weights)


def _unpermute_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, Tensor | None]:
    if grad is None:
        return None, None, None
    rows, map, weights = ctx.saved_tensors
    grad_rows, grad_weights = torch.ops.thdops.unpermute_tokens_grad(grad, rows, map, weights)
    return grad_rows, None, None if rows is None else grad_weights


# --- specs ------------------------------------------------------------------------------------------------------------------------


def _spec(name: str, schema: str, summary: str, **rest: Any) -> None:
    pieces = {piece: getattr(contract, f"{piece}_{name}") for piece in ("check", "fake")}
    pieces |= {piece: getattr(samples, f"{name}_{piece}") for piece in ("samples", "refusals", "padding", "cost", "benches")}
    register(
        OpSpec(
            name=name,
            schema=schema,
            summary=summary,
            reference=getattr(reference, name),
            cuda=f"{_KERNELS}:{name}",
            pads_zeroed=True,
            **pieces,
            **rest,
        ),
        REGISTRY,
    )


_spec(
    "permute_tokens",
    "(Tensor x, Tensor indices, SymInt num_experts) -> (Tensor rows, Tensor offsets, Tensor map)",
    "one row per token and expert, sorted by expert; where each expert's rows end",
    setup_context=_save_map,
    backward=_permute_backward,
)
_spec(
    "unpermute_tokens",
    "(Tensor rows, Tensor map, Tensor? weights=None) -> Tensor",
    "the weighted sum of each token's rows",
    setup_context=_save_inputs,
    backward=_unpermute_backward,
)
_spec(
    "unpermute_tokens_grad",
    "(Tensor grad, Tensor? rows, Tensor map, Tensor? weights=None) -> (Tensor grad_rows, Tensor grad_weights)",
    "gradient of unpermute_tokens; that of the weights only where rows are given",
)
