"""Backend "fa4": the kernels of flash-attn-4 (extra `thdops[fa4]`), compiled when a kind of call is first seen.

T rows, B sequences, H heads, D head dim. It takes addresses beside lengths (seqused), so no row moves, and it has what the others
lack: sinks with their gradient, softcap, values of another width, the gradient of LSE. Off-by-one is a sink of zeros.

Its tiles load the rows behind a sequence and weigh them with P = 0 or dS = 0: NaN there would come through. Scores are masked by
selection, so the forward needs clean values only; the backward multiplies by q, k, v and dout.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd import adapter
from thdops.ops.attention_thd.adapter import Gradients, Peer, Plan, Side, loadable


class FlashAttention4(Peer):
    def side(self, cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
        return adapter.in_place(cu_seqlens, padded, rows)

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = interface()._flash_attn_fwd(loadable(q), loadable(k), plan.keys.clean(v), return_lse=True, **told(plan))
        return out, lse

    def backward(self, plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return self._gradients(plan, grad, None, q, k, v, out, lse)

    def backward_of_lse(
        self, plan: Plan, grad: Tensor | None, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        return self._gradients(plan, torch.zeros_like(out) if grad is None else grad, grad_lse, q, k, v, out, lse)

    def _gradients(
        self, plan: Plan, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        queries, keys = plan.queries, plan.keys
        dq, dk, dv, *dsink = interface()._flash_attn_bwd(
            queries.clean(q),
            keys.clean(k),
            keys.clean(v),
            loadable(out),
            queries.clean(grad),
            lse,
            dlse=grad_lse,
            deterministic=plan.call.deterministic,
            **told(plan),
        )
        return dq, dk, dv, dsink[0] if dsink else None


PEER = FlashAttention4()


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], empty). Padding rows: out 0, lse -inf."""
    return adapter.attention(PEER, call)


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink [Hq] or [0]). Padding rows: 0."""
    return adapter.attention_grad(PEER, call)


def interface() -> Any:
    """Its functions below autograd: an op has a backward of its own."""
    return importlib.import_module("flash_attn.cute.interface")


def told(plan: Plan) -> dict[str, Any]:
    """What forward and backward are told alike."""
    call, queries, keys = plan.call, plan.queries, plan.keys
    left, right = _bound(plan, call.window_left), _bound(plan, plan.right)
    return {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "softcap": call.softcap,
        "window_size_left": left,
        "window_size_right": right,
        "learnable_sink": _sink(call),
        "cu_seqlens_q": queries.ends if queries.starts is None else queries.starts,
        "cu_seqlens_k": keys.ends if keys.starts is None else keys.starts,
        "seqused_q": None if queries.starts is None else queries.ends.diff(),
        "seqused_k": None if keys.starts is None else keys.ends.diff(),
        "max_seqlen_q": plan.longest_q,
        "max_seqlen_k": plan.longest_kv,
    }


def _bound(plan: Plan, bound: int) -> int | None:
    """None where nothing is excluded; its bounds are 32-bit."""
    return None if bound < 0 or bound >= plan.longest_q + plan.longest_kv else bound


def _sink(call: Call | GradCall) -> Tensor | None:
    if call.softmax == "off_by_one":
        return call.q.new_zeros(call.q.shape[1], dtype=torch.float32)
    return call.sink
