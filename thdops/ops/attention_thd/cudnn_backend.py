"""Backend "cudnn": cuDNN's attention through nvidia-cudnn-frontend (extra `thdops[cudnn]`), a plan a kind of call and size.

T rows, B sequences, H heads, D head dim, S the longest sequence. Its torch ops take one cu_seqlens: gaps are gathered away
(adapter.py). Garbage on rows of no sequence is not seen, so inputs go in as they are. Causal masks and windows go either way,
top-left or bottom-right. It has no gradient of LSE, nor one of sinks.

Where queries and keys have metadata of their own, it leaves out and LSE of rows without a key unwritten (cuDNN 9.19, H200). No
value marks them, so what sees nothing, or is seen by nothing, is zeroed by what the metadata says.

Its backward wants LSE as [B, Hq, S], so memory grows with the hint max_seqlen_q (default T), not with the batch's own lengths; a
deterministic one takes a workspace of 2 B Hq S^2 bytes as well.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd import adapter
from thdops.ops.attention_thd.adapter import Gradients, Peer, Plan, Side, loadable


class CuDNN(Peer):
    def side(self, cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
        return adapter.gapless(cu_seqlens, padded, rows)

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ops().sdpa_fwd(loadable(q), loadable(k), loadable(v), **told(plan), return_lse=True)
        lse = lse.squeeze(2).t()
        if plan.shared:
            return out, lse
        blind = ~_reached(plan, len(q), of_queries=True)
        return out.masked_fill(blind[:, None, None], 0), lse.masked_fill(blind, -torch.inf)

    def backward(self, plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        given = (loadable(x) for x in (grad, q, k, v, out))
        by_row = by_sequence(lse, plan.queries.ends, plan.longest_q)
        dq, dk, dv = ops().sdpa_bwd(*given, by_row, **told(plan), is_deterministic=plan.call.deterministic)
        if plan.shared:
            return dq, dk, dv, None
        blind, unseen = ((~_reached(plan, len(x), side))[:, None, None] for x, side in ((q, True), (k, False)))
        return dq.masked_fill(blind, 0), dk.masked_fill(unseen, 0), dv.masked_fill(unseen, 0), None


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
    left, right = _bounds(plan)
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


def _bounds(plan: Plan) -> tuple[int, int]:
    """(left, right) around the diagonal, -1 where nothing is excluded; larger ones would leave 32 bits."""
    beyond = plan.longest_q + plan.longest_kv
    left, right = plan.call.window_left, plan.right
    return -1 if left >= beyond else left, -1 if right >= beyond else right


def by_sequence(lse: Tensor, ends: Tensor, longest: int) -> Tensor:
    """[H, T] of gapless rows -> [B, H, S], 0 beyond a sequence and where a row sees no key: there e^(-inf - 0) is 0 as well."""
    offset = torch.arange(longest, device=lse.device)
    rows = ends[:-1, None].long() + offset  # [B, S]
    values = lse[:, rows.clamp(max=lse.shape[1] - 1)]
    inside = (rows < ends[1:, None]) & (values != -torch.inf)
    return torch.where(inside, values, 0).transpose(0, 1).contiguous()


def _reached(plan: Plan, rows: int, of_queries: bool) -> Tensor:
    """bool [T]: queries that see a key, or keys that a query sees."""
    lengths_q, lengths_kv = plan.queries.ends.diff(), plan.keys.ends.diff()
    before, after = _bounds(plan)
    shift = lengths_kv - lengths_q if plan.call.bottom_right else torch.zeros_like(lengths_q)
    own, others = plan.queries, lengths_kv
    if not of_queries:
        own, others, shift, before, after = plan.keys, lengths_q, -shift, after, before
    sequence = torch.ops.thdops.sequence_ids(own.ends, None, rows)
    inside, sequence = sequence >= 0, sequence.clamp(min=0)
    diagonal = torch.ops.thdops.positions(own.ends, None, rows, 1, 0) + shift[sequence]
    last = others[sequence] - 1  # of the other side's rows in the same sequence
    lowest = diagonal - before if before >= 0 else torch.zeros_like(diagonal)
    highest = torch.minimum(last, diagonal + after) if after >= 0 else last
    return inside & (lowest.clamp(min=0) <= highest)
