"""Backend "torch": FlashAttention-2 as `torch.nn.attention.varlen` carries it, held to the padding contract.

T rows, B sequences, H heads, D head dim. FA2 knows one cu_seqlens for address and length, so it cannot see gaps:
- with padded offsets, valid rows are gathered to the front, FA2 runs on the gapless batch, and rows are put back;
- without, cu_seqlens is the address already. Tail rows stay where they are.
In both cases FA2 reads and writes rows of sequences only: its loads are predicated on each sequence's own length, and what a tile
has beyond it is masked by selection (scores) or cleared (values, and everything in the backward). So garbage on other rows is
neither seen nor overwritten, and they are zero-filled before rows are put back: the gaps are the rows behind the gapless batch.

FA2 reports LSE = +inf for a row that sees no key, and wants it back like that in the backward, where e^(S - inf) = 0; we keep -inf.
Its backward takes no gradient of LSE. With g = dLSE the missing parts are dq_i = scale * g_i * sum_j P_ij k_j, an attention whose
values are the keys, and dk_j = scale * sum_i P_ij g_i q_i, the dv of a backward whose dout is scale * g * q.

Nothing here is read on the host. FA2 and the zero-fill see the same cu_seqlens, clamped into [0, T] and never decreasing, so that
every row is written by one of them, whatever the caller's hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall, key_metadata

_deterministic: Any = torch.utils.deterministic  # its one attribute is a property of the module, which type checkers do not see


class _Side(NamedTuple):
    """Queries or keys as FA2 sees them."""

    cu_seqlens: Tensor  # int32 [B+1], of the gapless batch
    gather: Tensor | None  # valid rows first; None where there are no gaps
    scatter: Tensor | None  # its inverse

    def packed(self, x: Tensor, dim: int = 0) -> Tensor:
        """`x` as FA2 wants it."""
        return x if self.gather is None else x.index_select(dim, self.gather)

    def unpacked(self, x: Tensor, dim: int = 0) -> Tensor:
        """A result of FA2 in our rows."""
        return x.contiguous() if self.scatter is None else x.index_select(dim, self.scatter)

    def unseen(self, lse: Tensor, mark: float) -> Tensor:
        """bool [H, T] over FA2's rows: those of no sequence, whatever they hold, and those whose LSE is `mark`: they see no key."""
        return torch.ops.thdops.padding_mask(self.cu_seqlens, None, lse.shape[1]) | (lse == mark)


class _Plan(NamedTuple):
    """What every FA2 call of one op call shares."""

    queries: _Side
    keys: _Side
    longest_q: int
    longest_kv: int
    causal: bool
    window: tuple[int, int]
    scale: float


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, D], lse fp32 [Hq, Tq], empty). Padding rows: out 0, lse -inf."""
    nothing = call.q.new_empty(0, dtype=torch.float32)
    if _is_empty(call):
        rows, heads, _ = call.q.shape
        return _zeros(call.q), nothing.new_full((heads, rows), -math.inf), nothing
    plan = _plan(call)
    out, lse = _forward(plan, *_packed(plan, call))
    _zero_fill([out], [plan.queries])
    lse = lse.masked_fill(plan.queries.unseen(lse, math.inf), -math.inf)
    return plan.queries.unpacked(out), plan.queries.unpacked(lse, 1), nothing


def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, empty). Padding rows: 0."""
    no_sink = call.q.new_empty(0, dtype=torch.float32)
    if _is_empty(call):
        return _zeros(call.q), _zeros(call.k), _zeros(call.v), no_sink
    plan = _plan(call)
    queries, keys = plan.queries, plan.keys
    q, k, v = _packed(plan, call)
    lse = queries.packed(call.lse, 1)
    unseen = queries.unseen(lse, -math.inf)
    saved = (_loadable(queries.packed(call.out)), lse.masked_fill(unseen, math.inf).contiguous())
    with _repeatable(call.deterministic):
        if call.grad_out is None:
            dq, dk, dv = _zeros(q), _zeros(k), _zeros(v)
        else:
            dq, dk, dv = _backward(plan, _loadable(queries.packed(call.grad_out)), q, k, v, *saved)
        if call.grad_lse is not None:
            weight = (queries.packed(call.grad_lse, 1).masked_fill(unseen, 0) * call.scale).t().unsqueeze(-1)  # [Tq, Hq, 1]
            mean_key, _ = _forward(plan, q, k, k)
            dq = (dq + weight * mean_key).to(q.dtype)
            _, _, dk_lse = _backward(plan, (weight * q).to(q.dtype), q, k, v, *saved)
            dk = dk + dk_lse
    _zero_fill([dq, dk, dv], [queries, keys, keys])
    return queries.unpacked(dq), keys.unpacked(dk), keys.unpacked(dv), no_sink


# --- FA2 -----------------------------------------------------------------------------------------------------------------------


def _forward(plan: _Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        plan.queries.cu_seqlens,
        plan.keys.cu_seqlens,
        plan.longest_q,
        plan.longest_kv,
        0.0,  # dropout
        plan.causal,
        False,  # no debug mask
        scale=plan.scale,
        window_size_left=plan.window[0],
        window_size_right=plan.window[1],
    )
    return out, lse


def _backward(
    plan: _Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward.default(
        grad,
        q,
        k,
        v,
        out,
        lse,
        plan.queries.cu_seqlens,
        plan.keys.cu_seqlens,
        plan.longest_q,
        plan.longest_kv,
        0.0,  # dropout
        plan.causal,
        torch.empty(2, dtype=torch.uint64, device=q.device),  # random state, not read without dropout
        torch.empty(0, device=q.device),
        scale=plan.scale,
        window_size_left=plan.window[0],
        window_size_right=plan.window[1],
    )


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


# --- rows ----------------------------------------------------------------------------------------------------------------------


def _is_empty(call: Call | GradCall) -> bool:
    """No query, no key, or no sequence: FA2 refuses these, and every row is out of sight."""
    return call.q.shape[0] == 0 or call.k.shape[0] == 0 or call.cu_seqlens_q.shape[0] == 1


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _plan(call: Call | GradCall) -> _Plan:
    shared = call.cu_seqlens_kv is None
    queries = _side(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    keys = queries if shared else _side(*key_metadata(call), call.k.shape[0])
    longest_q = _longest(call.max_seqlen_q, call.q.shape[0])
    longest_kv = _longest(call.max_seqlen_kv or (call.max_seqlen_q if shared else 0), call.k.shape[0])
    left, right = call.window_left, 0 if call.causal else call.window_right
    if not shared and (left >= 0 or right > 0):
        # FA2 takes a bound of longest_kv or more as none, and an absent bound beside a given one as longest_kv. Measured from
        # a diagonal that bottom-right alignment moves to the left of key 0, only longest_q and more is really none.
        longest_kv = max(longest_q, longest_kv)
    window = (-1 if left >= longest_kv else left, -1 if right >= longest_kv else right)
    return _Plan(queries, keys, longest_q, longest_kv, call.causal, window, call.scale)


def _longest(hint: int, rows: int) -> int:
    """At least 2: with 1, FA2 takes the batch for a decoding step and folds heads into rows, which needs one row per sequence."""
    return max(2, min(hint or rows, rows))


def _side(cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> _Side:
    if padded is None:
        ends = cu_seqlens.clamp(0, rows).cummax(0).values
        return _Side(ends.int(), None, None)
    lengths = torch.minimum(cu_seqlens.diff(), padded.diff()).clamp(min=0)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).clamp(max=rows)
    gather, scatter = torch.ops.thdops.compact_rows(cu_seqlens, padded, rows)
    return _Side(ends.int(), gather, scatter)


def _packed(plan: _Plan, call: Call | GradCall) -> tuple[Tensor, Tensor, Tensor]:
    return _loadable(plan.queries.packed(call.q)), _loadable(plan.keys.packed(call.k)), _loadable(plan.keys.packed(call.v))


def _loadable(x: Tensor) -> Tensor:
    """FA2 loads 16 bytes at a time along the last dimension: a view that does not start every head on such a boundary is copied."""
    rows, heads, last = x.stride()
    if last == 1 and rows % 8 == 0 and heads % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _zero_fill(tensors: list[Tensor], sides: list[_Side]) -> None:
    torch.ops.thdops.zero_fill_(tensors, [side.cu_seqlens for side in sides], [])
