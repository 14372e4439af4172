"""Backend "cudnn": cuDNN's attention through nvidia-cudnn-frontend (extra `thdops[cudnn]`), a plan a kind of call and size.

T rows, B sequences, H heads, D head dim, S the longest sequence. Its torch ops take one cu_seqlens: gaps are gathered away
(adapter.py). Causal masks and windows go either way, top-left or bottom-right. It has no gradient of LSE, nor one of sinks.

Its backward wants LSE as [B, Hq, S], so memory grows with the hint max_seqlen_q (default T), not with the batch's own lengths.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd import adapter
from thdops.ops.attention_thd.adapter import Gradients, Peer, Plan, Side


class CuDNN(Peer):
    def side(self, cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
        return adapter.gapless(cu_seqlens, padded, rows)

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = plan.queries, plan.keys
        out, lse = ops().sdpa_fwd(queries.clean(q), keys.clean(k), keys.clean(v), **told(plan), return_lse=True)
        return out, lse.squeeze(2).t().contiguous()

    def backward(self, plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        queries, keys = plan.queries, plan.keys
        dq, dk, dv = ops().sdpa_bwd(
            queries.clean(grad),
            queries.clean(q),
            keys.clean(k),
            keys.clean(v),
            out,
            by_sequence(lse, queries.ends, plan.longest_q),
            **told(plan),
            is_deterministic=plan.call.deterministic,
        )
        return dq, dk, dv, None


PEER = CuDNN()


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], empty). Padding rows: out 0, lse -inf."""
    return adapter.attention(PEER, call)


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, empty). Padding rows: 0."""
    return adapter.attention_grad(PEER, call)


@cache
def ops() -> Any:
    importlib.import_module("cudnn.sdpa.fwd.torch_op")  # defines them
    return torch.ops.cudnn


def told(plan: Plan) -> dict[str, Any]:
    """What forward and backward are told alike."""
    call = plan.call
    beyond = plan.longest_q + plan.longest_kv  # a bound this far excludes nothing
    left, right = call.window_left, plan.right
    left, right = -1 if left >= beyond else left, -1 if right >= beyond else right
    return {
        "attn_scale": call.scale,
        "is_causal": call.causal,
        "causal_bottom_right": call.bottom_right and (left >= 0 or right >= 0),
        "window_left": left + 1 if left >= 0 else -1,  # it counts the key on the diagonal
        "window_right": -1 if call.causal else right,
        "cu_seqlens_q": plan.queries.ends,
        "cu_seqlens_kv": plan.keys.ends,
        "max_seqlen_q": plan.longest_q,
        "max_seqlen_kv": plan.longest_kv,
    }


def by_sequence(lse: Tensor, ends: Tensor, longest: int) -> Tensor:
    """[H, T] of gapless rows -> [B, H, S], 0 beyond a sequence and where a row sees no key: there e^(-inf - 0) is 0 as well."""
    offset = torch.arange(longest, device=lse.device)
    rows = ends[:-1, None].long() + offset  # [B, S]
    values = lse[:, rows.clamp(max=lse.shape[1] - 1)]
    inside = (rows < ends[1:, None]) & (values != -torch.inf)
    return torch.where(inside, values, 0).transpose(0, 1).contiguous()
