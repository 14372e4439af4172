"""What the adapters to other libraries' attention share: where rows stand, what comes back on padding, the gradient of LSE.

T rows, B sequences, H heads, D head dim. A peer learns of sequences in one of two ways, and `Peer.side` says which:
- `gapless`: one cu_seqlens is address and length, so it cannot see gaps. With padded offsets, valid rows are gathered to the
  front, the peer runs on the gapless batch, and rows are put back; without, cu_seqlens is the address already and no row moves.
- `in_place`: it takes addresses beside lengths, and no row moves.
Either way it writes rows of sequences only; all others are zero-filled before rows are put back, in one launch.

What a peer reads is another matter. Where whole tiles are loaded and masked scores multiply them, 0 * NaN from rows behind a
sequence reaches the sequence: such a peer asks for `clean` inputs, copies with zeros on padding rows.

Nothing here is read on the host. Peer and zero-fill see the same offsets, clamped into [0, T] and never decreasing, so that every
row is written by one of them, whatever the caller's hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall, key_metadata

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""dq, dk, dv, and dsink of a peer that has sinks."""


class Side(NamedTuple):
    """Queries or keys as a peer sees them."""

    ends: Tensor  # int32 [B+1], prefix sums of valid rows
    starts: Tensor | None = None  # int32 [B+1], addresses; None where `ends` are these too
    gather: Tensor | None = None  # valid rows first; None where no row moves
    scatter: Tensor | None = None  # its inverse

    def packed(self, x: Tensor, dim: int = 0) -> Tensor:
        """`x` in the peer's rows."""
        return x if self.gather is None else x.index_select(dim, self.gather)

    def unpacked(self, x: Tensor, dim: int = 0) -> Tensor:
        """A result of the peer in our rows."""
        return x.contiguous() if self.scatter is None else x.index_select(dim, self.scatter)

    def clean(self, x: Tensor) -> Tensor:
        """A copy of `x` [T, ...] of the peer's rows, +0.0 on those of no sequence."""
        return torch.ops.thdops.zero_fill(x, self.ends, self.starts)

    def padding(self, rows: int) -> Tensor:
        """bool [T] over the peer's rows: those of no sequence."""
        return torch.ops.thdops.padding_mask(self.ends, self.starts, rows)


def gapless(cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
    """For a peer with one cu_seqlens."""
    if padded is None:
        return Side(_addresses(cu_seqlens, rows))
    return Side(_valid_ends(cu_seqlens, padded, rows), None, *torch.ops.thdops.compact_rows(cu_seqlens, padded, rows))


def in_place(cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
    """For a peer that takes addresses and lengths."""
    if padded is None:
        return Side(_addresses(cu_seqlens, rows))
    starts = _addresses(padded, rows)
    return Side(_valid_ends(cu_seqlens, starts, rows), starts)


def _addresses(offsets: Tensor, rows: int) -> Tensor:
    return offsets.clamp(0, rows).cummax(0).values.int()


def _valid_ends(cu_seqlens: Tensor, padded: Tensor, rows: int) -> Tensor:
    lengths = torch.minimum(cu_seqlens.diff(), padded.diff()).clamp(min=0)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).clamp(max=rows).int()


class Plan(NamedTuple):
    """What every use of a peer in one call of the op shares."""

    call: Call | GradCall
    queries: Side
    keys: Side
    longest_q: int
    longest_kv: int

    @property
    def shared(self) -> bool:
        """Self-attention: keys have the query's metadata, and every valid row sees itself."""
        return self.call.cu_seqlens_kv is None

    @property
    def right(self) -> int:
        """How many keys right of the diagonal are visible, causal counted in; -1 = all."""
        return 0 if self.call.causal else self.call.window_right


class Peer(ABC):
    """Another library's attention."""

    keyless: ClassVar[float] = -math.inf
    """Its LSE of a row that sees no key; what it wants back in the backward too."""

    @abstractmethod
    def side(self, cu_seqlens: Tensor, padded: Tensor | None, rows: int) -> Side:
        """`gapless` or `in_place`."""

    @abstractmethod
    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq]) in the peer's rows; anything on rows of no sequence."""

    @abstractmethod
    def backward(self, plan: Plan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """What `grad` [Tq, Hq, Dv] gives. `out` and `lse` are the forward's, LSE `keyless` on every row that sees no key."""

    def backward_of_lse(
        self, plan: Plan, grad: Tensor | None, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Gradients:
        """`backward` with a gradient of LSE, zero on rows that see no key: for a peer that takes none, by linearity.

        With g = dLSE the missing parts are dq_i = scale * g_i * sum_j P_ij k_j, an attention whose values are the keys, and
        dk_j = scale * sum_i P_ij g_i q_i, the dv of its backward with dout = scale * g * q.
        """
        weight = (grad_lse * plan.call.scale).t().unsqueeze(-1)  # [Tq, Hq, 1]
        mean_key, _ = self.forward(plan, q, k, k)
        _, _, dk, _ = self.backward(plan, (weight * q).to(q.dtype), q, k, k, mean_key, lse)
        dq = weight * mean_key
        if grad is None:
            return dq.to(q.dtype), dk, torch.zeros_like(v), None
        more_q, more_k, dv, _ = self.backward(plan, grad, q, k, v, out, lse)
        return (dq + more_q).to(q.dtype), dk + more_k, dv, None


# --- the ops -------------------------------------------------------------------------------------------------------------------


def attention(peer: Peer, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse fp32 [Hq, Tq], empty). Padding rows: out 0, lse -inf."""
    nothing = call.q.new_empty(0, dtype=torch.float32)
    if _is_empty(call):
        return _zeros(call.q, call.v.shape[2]), _keyless_lse(call), nothing
    plan = make_plan(peer, call)
    queries, keys = plan.queries, plan.keys
    out, lse = peer.forward(plan, queries.packed(call.q), keys.packed(call.k), keys.packed(call.v))
    zero_fill([out], [queries])
    lse = lse.masked_fill(_unseen(queries, lse, peer.keyless), -math.inf)
    return queries.unpacked(out), queries.unpacked(lse, 1), nothing


def attention_grad(peer: Peer, call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink [Hq] or [0]). Padding rows: 0."""
    no_sink = call.q.new_empty(0, dtype=torch.float32)
    if _is_empty(call):
        return _zeros(call.q), _zeros(call.k), _zeros(call.v), no_sink if call.sink is None else _keyless_dsink(call, call.sink)
    plan = make_plan(peer, call)
    queries, keys = plan.queries, plan.keys
    q, k, v, out = queries.packed(call.q), keys.packed(call.k), keys.packed(call.v), queries.packed(call.out)
    grad = None if call.grad_out is None else queries.packed(call.grad_out)
    lse = queries.packed(call.lse, 1)
    unseen = _unseen(queries, lse, -math.inf)
    lse = lse.masked_fill(unseen, peer.keyless).contiguous()
    if call.grad_lse is not None:
        grad_lse = queries.packed(call.grad_lse, 1).masked_fill(unseen, 0).contiguous()
        dq, dk, dv, dsink = peer.backward_of_lse(plan, grad, grad_lse, q, k, v, out, lse)
    elif grad is not None:
        dq, dk, dv, dsink = peer.backward(plan, grad, q, k, v, out, lse)
    else:
        dq, dk, dv, dsink = _zeros(q), _zeros(k), _zeros(v), None if call.sink is None else torch.zeros_like(call.sink)
    zero_fill([dq, dk, dv], [queries, keys, keys])
    dsink = no_sink if call.sink is None or dsink is None else dsink
    return queries.unpacked(dq), keys.unpacked(dk), keys.unpacked(dv), dsink


# --- rows ----------------------------------------------------------------------------------------------------------------------


def zero_fill(tensors: list[Tensor], sides: list[Side]) -> None:
    """+0.0 on the rows of no sequence of each tensor, in place."""
    starts = [side.ends if side.starts is None else side.starts for side in sides]
    gaps = any(side.starts is not None for side in sides)
    torch.ops.thdops.zero_fill_(tensors, [side.ends for side in sides], starts if gaps else [])


def loadable(x: Tensor) -> Tensor:
    """Peers load 16 bytes at a time along the last dimension: a view whose heads do not start on such boundaries is copied."""
    rows, heads, last = x.stride()
    if last == 1 and rows % 8 == 0 and heads % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def make_plan(peer: Peer, call: Call | GradCall) -> Plan:
    shared = call.cu_seqlens_kv is None
    queries = peer.side(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    keys = queries if shared else peer.side(*key_metadata(call), call.k.shape[0])
    longest_q = _longest(call.max_seqlen_q, call.q.shape[0])
    longest_kv = _longest(call.max_seqlen_kv or (call.max_seqlen_q if shared else 0), call.k.shape[0])
    return Plan(call, queries, keys, longest_q, longest_kv)


def _longest(hint: int, rows: int) -> int:
    """At least 2: with 1, FA2 takes the batch for a decoding step and folds heads into rows, and cuDNN refuses 1 beside 1."""
    return max(2, min(hint or rows, rows))


def _unseen(side: Side, lse: Tensor, keyless: float) -> Tensor:
    """bool [H, T] over the peer's rows: those of no sequence, whatever they hold, and those that see no key by their LSE."""
    return side.padding(lse.shape[1]) | (lse == keyless)


# --- where there is nothing to compute -----------------------------------------------------------------------------------------


def _is_empty(call: Call | GradCall) -> bool:
    """No query, no key, or no sequence: peers refuse some of these, and no row sees a key."""
    return call.q.shape[0] == 0 or call.k.shape[0] == 0 or call.cu_seqlens_q.shape[0] == 1


def _zeros(like: Tensor, width: int = -1) -> Tensor:
    rows, heads, own = like.shape
    return like.new_zeros(rows, heads, own if width < 0 else width)


def _padding(call: Call | GradCall) -> Tensor:
    return torch.ops.thdops.padding_mask(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])


def _keyless_lse(call: Call) -> Tensor:
    """Log of what the softmax adds to an empty sum: nothing, 1, or e^sink."""
    rows, heads, _ = call.q.shape
    logit = call.q.new_full((heads,), 0.0 if call.softmax == "off_by_one" else -math.inf, dtype=torch.float32)
    logit = logit if call.sink is None else call.sink
    return logit[:, None].expand(heads, rows).masked_fill(_padding(call), -math.inf).contiguous()


def _keyless_dsink(call: GradCall, sink: Tensor) -> Tensor:
    """Where no row sees a key, LSE is the sink in every valid row, and so is its gradient."""
    if call.grad_lse is None:
        return torch.zeros_like(sink)
    return call.grad_lse.masked_fill(_padding(call), 0).sum(1)
