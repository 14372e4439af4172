"""Backend "torch": FlashAttention-2 as `torch.nn.attention.varlen` carries it.

T rows, B sequences, H heads, D head dim. One cu_seqlens: gaps are gathered away (adapter.py). FA2's loads are predicated on each
sequence's own length, and what a tile has beyond it is masked by selection (scores) or cleared (values, and everything in the
backward), so garbage on other rows is not seen and inputs go in as they are.

FA2 reports LSE = +inf for a row that sees no key, and wants it back like that in the backward, where e^(S - inf) = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd import adapter
from thdops.ops.attention_thd.adapter import Gradients, Peer, Plan, Side, loadable

_deterministic: Any = torch.utils.deterministic  # its one attribute is a property of the module, which type checkers do not see


class FlashAttention2(Peer):
    keyless = math.inf

    def side(self, cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
        return adapter.gapless(cu_seqlens, padded, rows)

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(plan, loadable(q), loadable(k), loadable(v))

    def backward(self, plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        with _repeatable(plan.call.deterministic):
            return *_backward(plan, loadable(grad), loadable(q), loadable(k), loadable(v), loadable(out), lse), None


PEER = FlashAttention2()


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, D], lse fp32 [Hq, Tq], empty). Padding rows: out 0, lse -inf."""
    return adapter.attention(PEER, call)


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, empty). Padding rows: 0."""
    return adapter.attention_grad(PEER, call)


# --- FA2 -----------------------------------------------------------------------------------------------------------------------


def _forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    longest_kv, left, right = _bounds(plan)
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        plan.queries.ends,
        plan.keys.ends,
        plan.longest_q,
        longest_kv,
        0.0,  # dropout
        plan.call.causal,
        False,  # no debug mask
        scale=plan.call.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def _backward(plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    longest_kv, left, right = _bounds(plan)
    return torch.ops.aten._flash_attention_backward.default(
        grad,
        q,
        k,
        v,
        out,
        lse,
        plan.queries.ends,
        plan.keys.ends,
        plan.longest_q,
        longest_kv,
        0.0,  # dropout
        plan.call.causal,
        torch.empty(2, dtype=torch.uint64, device=q.device),  # random state, not read without dropout
        torch.empty(0, device=q.device),
        scale=plan.call.scale,
        window_size_left=left,
        window_size_right=right,
    )


def _bounds(plan: Plan) -> tuple[int, int, int]:
    """(longest_kv, left, right) as FA2 is told.

    It takes a bound of longest_kv or more as none, and an absent bound beside a given one as longest_kv. Measured from a diagonal
    that bottom-right alignment moves to the left of key 0, only longest_q and more is really none.
    """
    longest_kv, left, right = plan.longest_kv, plan.call.window_left, plan.right
    if not plan.shared and (left >= 0 or right > 0):
        longest_kv = max(plan.longest_q, longest_kv)
    return longest_kv, -1 if left >= longest_kv else left, -1 if right >= longest_kv else right


@contextmanager
def _repeatable(wanted: bool) -> Iterator[None]:
    """FA2's backward repeats bitwise only in torch's deterministic mode: set it for the call and put everything back.

    The mode is global to the process: another thread may see it meanwhile. Turning it on would also fill every fresh tensor with
    NaN; that stays off unless it was on.
    """
    was_on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (was_on and not warn_only):
        yield
        return
    fill = _deterministic.fill_uninitialized_memory
    if not was_on:
        _deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warn_only)
        _deterministic.fill_uninitialized_memory = fill
