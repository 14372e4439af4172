"""The merge ops in eager PyTorch: the specification.

T rows, H heads, D head dim. With w_a = e^(lse_a - lse) and w_b = e^(lse_b - lse), which add up to 1:

    lse = log(e^lse_a + e^lse_b)
    out = w_a out_a + w_b out_b

and with g = dout, x = <g, out_a - out_b>:

    dout_a = w_a g          dlse_a = w_a (dlse + w_b x)
    dout_b = w_b g          dlse_b = w_b (dlse - w_a x)

An LSE of -inf says that its part saw no key. Then the result is the other part, bit for bit, and so is its gradient; of two such
parts it is out 0 and lse -inf with gradients 0. What stands in an out whose LSE is -inf is never looked at.
Source: the running rescale of the online softmax (Milakov and Gimelshein, 2018), between two finished parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.merge import statistics_dtype


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    precision = statistics_dtype(out_a, out_b)
    seen_a, seen_b = lse_a != -torch.inf, lse_b != -torch.inf  # [H, T]
    both = seen_a & seen_b
    # Selected before anything is computed: a NaN that is selected away afterwards comes back in the gradient.
    above, below = torch.where(both, lse_a, 0), torch.where(both, lse_b, 0)
    lse = torch.where(both, torch.logaddexp(above, below), torch.where(seen_a, lse_a, torch.where(seen_b, lse_b, -torch.inf)))
    a = torch.where(_over_heads(seen_a), out_a, 0).to(precision)
    b = torch.where(_over_heads(seen_b), out_b, 0).to(precision)
    mixed = _over_heads((above - below).sigmoid()) * a + _over_heads((below - above).sigmoid()) * b
    out = torch.where(_over_heads(both), mixed, torch.where(_over_heads(seen_a), a, b))
    result = torch.promote_types(out_a.dtype, out_b.dtype) if dtype is None else dtype
    return _stored(out, result), _stored(lse, lse.dtype)


def merge_attention_grad(
    grad_out: Tensor | None, grad_lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precision = statistics_dtype(out_a, out_b)
    g = torch.zeros_like(out_a, dtype=precision) if grad_out is None else grad_out.to(precision)
    g_lse = torch.zeros_like(lse_a) if grad_lse is None else grad_lse
    seen_a, seen_b = lse_a != -torch.inf, lse_b != -torch.inf
    both = seen_a & seen_b
    gap = torch.where(both, lse_a - lse_b, 0)
    weight_a, weight_b = gap.sigmoid(), (-gap).sigmoid()
    across = (g * (out_a.to(precision) - out_b.to(precision))).sum(-1).t()  # [H, T]
    parts = []
    for out, lse, seen, weight, other, sign in (
        (out_a, lse_a, seen_a, weight_a, weight_b, 1),
        (out_b, lse_b, seen_b, weight_b, weight_a, -1),
    ):
        alone = torch.where(_over_heads(seen), g, 0)
        parts.append(_stored(torch.where(_over_heads(both), _over_heads(weight) * g, alone), out.dtype))
        alone = torch.where(seen, g_lse, 0)
        parts.append(_stored(torch.where(both, weight * (g_lse + sign * other * across), alone), lse.dtype))
    grad_a, grad_lse_a, grad_b, grad_lse_b = parts
    return grad_a, grad_lse_a, grad_b, grad_lse_b


def _over_heads(x: Tensor) -> Tensor:
    """[H, T] as what broadcasts against [T, H, D]."""
    return x.t().unsqueeze(-1)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the strides of a fresh tensor; `contiguous()` would leave those of dimensions of one element as they are."""
    return x.to(dtype).clone(memory_format=torch.contiguous_format)
