"""The aux-loss ops in eager PyTorch: the specification.

T rows (tokens), E experts, K top-k, N counted tokens, M sequences folded into columns: probs is `[T, M*E]`, n = tokens_per_expert.

    C = E * coeff / K / N / N, and 0 where N is not above 0
    loss = C * sum_c n[c] * sum_t probs[t, c]
    dloss/dprobs[t, c] = C * n[c]

Where C is 0 the loss and its gradient are exactly 0, whatever the sums hold. Padding rows add nothing and get gradient 0.
Source: the load-balancing loss of the Switch Transformer (Fedus et al., 2021, equations 4 to 6), on sums instead of means.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from meta_kernels.contract import accumulation_dtype


def _padding(padding_mask: Tensor, columns: int) -> Tensor:
    """`[T]` or `[T, M]` as what broadcasts against `[T, columns]`: column c belongs to sequence c // E."""
    if padding_mask.dim() == 1:
        return padding_mask[:, None]
    rows, folds = padding_mask.shape
    return padding_mask[:, :, None].expand(rows, folds, columns // folds).reshape(rows, columns)


def scalar(value: float | None, tensor: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one of the two that was given, 0-d."""
    if tensor is not None:
        return tensor.detach().to(dtype).reshape(())
    return torch.full((), cast(float, value), dtype=dtype, device=device)


def moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens_tensor: Tensor | None,
    coeff_tensor: Tensor | None,
    padding_mask: Tensor | None,
    num_experts: int,
    topk: int,
    total_num_tokens: int | None = None,
    coeff: float | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(probs.dtype)
    count = scalar(total_num_tokens, total_num_tokens_tensor, dtype, probs.device)
    scale = scalar(coeff, coeff_tensor, dtype, probs.device)
    # Left to right: N * N, which may not fit, is never formed.
    coefficient = torch.where(count > 0, scale * num_experts / topk / count / count, 0.0)
    values = probs.to(dtype)
    if padding_mask is not None:
        # Select, never multiply: padding may hold NaN.
        values = torch.where(_padding(padding_mask, probs.shape[1]), 0.0, values)
    balance = (values.sum(0) * tokens_per_expert.detach().to(dtype)).sum()
    return torch.where(coefficient == 0, 0.0, coefficient * balance), coefficient


def moe_aux_loss_grad(
    grad_loss: Tensor,
    coefficient: Tensor,
    tokens_per_expert: Tensor,
    padding_mask: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    factor = coefficient.reshape(())
    row = factor * tokens_per_expert.to(factor.dtype) * grad_loss.reshape(())
    grad = torch.where(factor == 0, 0.0, row).to(dtype).expand(rows, -1)
    if padding_mask is not None:
        grad = torch.where(_padding(padding_mask, grad.shape[1]), 0.0, grad)
    # A row of stride 0 would break hooks that change a gradient in place.
    return grad.clone(memory_format=torch.contiguous_format)
