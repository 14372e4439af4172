"""The experts of a mixture as transformers' experts interface calls them, over rows that `permute_tokens` has sorted.

T tokens, K experts a token, N = T * K rows, E experts, D model width, F expert width (2F where gate and up are one weight).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thdops.integrations.grouped import grouped_linear
from thdops.ops.dispatch.op import permute_tokens, unpermute_tokens


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, with the library's weights as they are stored, biases included.

    Args:
        experts: the library's module: its weights, `has_gate`, `has_bias`, `is_transposed` and its activation.
        hidden_states: `[T, D]`.
        top_k_index: `[T, K]`; what is outside [0, E) is no expert, as on padding rows.
        top_k_weights: `[T, K]`.

    Returns:
        `[T, D]` in the dtype of hidden_states; +0.0 for a token without an expert.
    """
    x = _autocast(hidden_states)
    rows, offsets, where = permute_tokens(x, top_k_index, experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _linear(experts, name, rows, offsets)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    out = unpermute_tokens(_linear(experts, "down_proj", hidden, offsets), where, top_k_weights)
    return out.to(hidden_states.dtype)


def _linear(experts: Any, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    """Each row times its expert's weight `[E, in, out]` (`[E, out, in]` unless transposed), plus its bias `[E, out]`."""
    weight = getattr(experts, name)
    out = grouped_linear(rows, weight if experts.is_transposed else weight.mT, offsets)
    if not experts.has_bias:
        return out
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = torch.searchsorted(offsets, row, right=True)
    bias = getattr(experts, f"{name}_bias")[expert.clamp(max=experts.num_experts - 1)].to(out.dtype)
    # Rows of no expert may hold NaN, and so may their gradients: they must not reach the bias.
    return out + torch.where((row < offsets[-1])[:, None], bias, 0)


def _autocast(x: Tensor) -> Tensor:
    """As autocast would for a matrix product."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
