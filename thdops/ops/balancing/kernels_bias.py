"""Triton kernel and launcher of `expert_bias_update`. E experts, L layers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from meta_kernels import balancing as contract
from thdops.ops.balancing.tiling import power_of_two
from thdops.ops.launch import launch

_WIDEST = 1024  # experts that a program looks at together


@triton.jit(
    do_not_specialize=["experts", "bias_layer", "bias_stride", "tokens_layer", "tokens_stride"],
)
def update_bias(
    out, bias, tokens_per_expert, rate_tensor, experts, bias_layer, bias_stride, tokens_layer, tokens_stride, rate,
    COUNT: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out = bias + rate * sign(mean - tokens) of one layer; the sign is that of sum - E * tokens, counted in COUNT."""
    layer = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E).to(tl.int64)
    total = tl.zeros([BLOCK_E], COUNT)
    for first in range(0, experts, BLOCK_E):
        expert = first + lanes
        at = tokens_per_expert + layer * tokens_layer + expert * tokens_stride
        total += tl.load(at, mask=expert < experts, other=0).to(COUNT)
    everything = tl.sum(total)
    step = tl.load(rate_tensor).to(tl.float32) if rate_tensor is not None else rate
    for first in range(0, experts, BLOCK_E):
        expert = first + lanes
        exists = expert < experts
        tokens = tl.load(tokens_per_expert + layer * tokens_layer + expert * tokens_stride, mask=exists, other=0).to(COUNT)
        old = tl.load(bias + layer * bias_layer + expert * bias_stride, mask=exists, other=0.0).to(tl.float32)
        scaled = tokens * experts
        sign = (scaled < everything).to(tl.float32) - (scaled > everything).to(tl.float32)
        tl.store(out + layer * experts + expert, old + step * sign, mask=exists)


def expert_bias_update(bias: Tensor, tokens_per_expert: Tensor, rate_tensor: Tensor | None, rate: float | None = None) -> Tensor:
    out = contract.fake_expert_bias_update(bias, tokens_per_expert, rate_tensor, rate)
    layers, experts = bias.shape if bias.dim() == 2 else (1, bias.shape[0])
    bias_layer, tokens_layer = (t.stride(0) if t.dim() == 2 else 0 for t in (bias, tokens_per_expert))
    strides = (bias_layer, bias.stride(-1), tokens_layer, tokens_per_expert.stride(-1))
    count = tl.float64 if tokens_per_expert.is_floating_point() else tl.int64
    args = (out, bias, tokens_per_expert, rate_tensor, experts, *strides, rate or 0.0)
    launch(update_bias, (layers, 1, 1), args, (count, min(power_of_two(experts), _WIDEST)))
    return out
