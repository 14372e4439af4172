"""Attention over packed sequences in eager PyTorch: the specification.

T rows (Tq of queries, Tk of keys), B sequences, Hq and Hkv heads, G = Hq / Hkv query heads per key head, D head dims, R the rows
of one block of queries, N its keys.

Query i of a sequence with n_q queries and n_k keys (valid rows both) stands at d = i (top-left) or d = i + n_k - n_q
(bottom-right). It sees key j of the same sequence if d - window_left <= j <= d + window_right (-1 = unbounded); causal means
j <= d as well. S = scale * <q, k>, softcap: S = c * tanh(S / c);
LSE = log(sum over visible keys of e^S, plus 1 (off_by_one) or e^sink (learnable)); P = e^(S - LSE); out = P v.

Backward, with D = <dout, out> - dLSE of each row: dS = P * (<dout, v> - D), times 1 - tanh^2 under softcap; dq = scale * dS k;
dk = scale * dS^T q and dv = P^T dout, summed over the G heads of a group; dsink = -sum over valid rows of e^(sink - LSE) * D.
Out and LSE are the ones given. Those of a row's whole set of keys serve a call with some of the keys: gradients of all such calls
add up to those of the whole, which is what context parallelism is made of.

Scores are computed in fp32 (fp64 for fp64 inputs), a block of queries at a time against all keys that the block can see. What
stands on padding rows is replaced by zero first. A NaN or Inf in a valid value row may show in other sequences: 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall, key_metadata, statistics_dtype
from meta_kernels.contract import takes
from thdops.ops.padding.reference import Rows, locate_rows

# Scores of one block: small enough to stay in cache, large enough to keep the cores busy.
_BLOCK_ELEMENTS = 2**20


class _Block(NamedTuple):
    """Queries `rows` against keys `keys` (all others are out of sight); `hidden` bool [R, N] marks the pairs that do not match."""

    rows: slice
    keys: slice
    hidden: Tensor


class _Geometry(NamedTuple):
    """Where everything stands, per row."""

    valid_q: Tensor
    valid_kv: Tensor
    sequence_q: Tensor  # -1 on padding
    sequence_kv: Tensor  # -2 on padding, so that padding matches nothing
    diagonal: Tensor  # d of each query
    offset_kv: Tensor  # j of each key


@takes(Call)
def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [Tq, Hq, Dv], lse [Hq, Tq], max_logit [Hq] or [0]). Padding rows: out 0, lse -inf."""
    with torch.autocast(call.q.device.type, enabled=False):  # which would take the products out of fp32
        return _attention(call, statistics_dtype(call.q))


@takes(GradCall)
def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink [Hq] or [0]). Padding rows: 0."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _attention_grad(call, statistics_dtype(call.q))


@takes(Call)
def attention_eager(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` as code on matrix units computes it: P is an operand of the second product, so it has q's dtype."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _attention(call, call.q.dtype)


@takes(GradCall)
def attention_grad_eager(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_grad` likewise: P and dS have q's dtype when they are multiplied."""
    with torch.autocast(call.q.device.type, enabled=False):
        return _attention_grad(call, call.q.dtype)


def _attention(call: Call, operand: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`operand` is the dtype that P is rounded to before it is multiplied."""
    place = _geometry(call)
    dtype = statistics_dtype(call.q)
    q = _grouped(call.q, place.valid_q, call.k.shape[1], dtype) * call.scale
    k, v = (_by_head(x, place.valid_kv, dtype) for x in (call.k, call.v))
    sink = _sink(call, dtype)

    outs, lses, maxima = [], [], []
    for block in _blocks(call, place):
        scores = _scores(q[:, :, block.rows], k[:, block.keys], call.softcap)[0].masked_fill_(block.hidden, -torch.inf)
        largest = _row_max(scores.detach())  # [Hkv, G, R]
        maxima.append(largest)
        if sink is not None:
            largest = torch.maximum(largest, sink.detach())
        shift = torch.where(largest == -torch.inf, 0, largest)
        weights = scores.sub_(shift.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        if sink is not None:
            total = total + (sink - shift).exp()
        some = total > 0
        total = torch.where(some, total, 1)
        outs.append(_over_keys(weights.to(operand).to(dtype), v[:, block.keys]) / total.unsqueeze(-1))
        lses.append(torch.where(some, shift + total.log(), -torch.inf))

    rows, heads, _ = call.q.shape
    out = _joined(outs, call.q.new_zeros(0, heads, call.v.shape[2], dtype=dtype))
    out = torch.where(place.valid_q[:, None, None], out, 0).to(call.q.dtype)
    lse = torch.cat([x.flatten(0, 1) for x in lses], 1) if lses else q.new_zeros(heads, 0)
    lse = torch.where(place.valid_q, lse, -torch.inf)
    if not call.return_max_logit:
        return out, lse, lse.new_empty(0)
    if rows == 0:
        return out, lse, lse.new_full((heads,), -torch.inf)
    return out, lse, torch.cat([x.flatten(0, 1) for x in maxima], 1).amax(1)


def _attention_grad(call: GradCall, operand: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`operand` is the dtype that P and dS are rounded to before they are multiplied."""
    place = _geometry(call)
    dtype = statistics_dtype(call.q)
    kv_heads = call.k.shape[1]
    q = _grouped(call.q, place.valid_q, kv_heads, dtype) * call.scale
    k, v = (_by_head(x, place.valid_kv, dtype) for x in (call.k, call.v))
    grad_out = call.q.new_zeros(()).expand(call.out.shape) if call.grad_out is None else call.grad_out
    grad = _grouped(grad_out, place.valid_q, kv_heads, dtype)
    lse = torch.where(place.valid_q, call.lse, -torch.inf).unflatten(0, (kv_heads, -1))  # [Hkv, G, Tq]
    seen = lse > -torch.inf
    lse = torch.where(seen, lse, 0)
    sink = _sink(call, dtype)
    delta = (grad * _grouped(call.out, place.valid_q, kv_heads, dtype)).sum(-1)  # D of each row, [Hkv, G, Tq]
    if call.grad_lse is not None:
        delta -= torch.where(seen, call.grad_lse.to(dtype).unflatten(0, (kv_heads, -1)), 0)

    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dqs = []
    for block in _blocks(call, place):
        q_rows, grad_rows = q[:, :, block.rows], grad[:, :, block.rows]
        k_rows, v_rows = k[:, block.keys], v[:, block.keys]
        scores, tanh = _scores(q_rows, k_rows, call.softcap)
        p = scores.masked_fill_(block.hidden, -torch.inf).sub_(lse[:, :, block.rows, None]).exp_()
        dv[:, block.keys] += _over_rows(p.to(operand).to(dtype), grad_rows)
        ds = _against(grad_rows, v_rows).sub_(delta[:, :, block.rows, None]).mul_(p)
        if tanh is not None:
            ds.mul_(1 - tanh * tanh)
        ds = ds.to(operand).to(dtype)
        dk[:, block.keys] += _over_rows(ds, q_rows)  # q carries the scale
        dqs.append(_over_keys(ds, k_rows) * call.scale)

    dq = _joined(dqs, call.q.new_zeros(0, *call.q.shape[1:], dtype=dtype))
    dq = torch.where(place.valid_q[:, None, None], dq, 0)  # where there is one key, 0 * -k is -0.0
    return (
        dq.to(call.q.dtype),
        dk.transpose(0, 1).contiguous().to(call.k.dtype),
        dv.transpose(0, 1).contiguous().to(call.v.dtype),
        _sink_gradient(call, sink, lse, seen, delta),
    )


# --- who sees whom -------------------------------------------------------------------------------------------------------------


def _geometry(call: Call | GradCall) -> _Geometry:
    shared = call.cu_seqlens_kv is None
    rows = locate_rows(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    rows_kv = rows if shared else locate_rows(*key_metadata(call), call.k.shape[0])
    diagonal = rows.offset
    if call.bottom_right and not shared:
        more_keys = valid_lengths(*key_metadata(call)) - valid_lengths(call.cu_seqlens_q, call.cu_seqlens_q_padded)
        # One entry more, so that rows find something where there is no sequence.
        diagonal = diagonal + torch.nn.functional.pad(more_keys, (0, 1))[rows.sequence]
    return _Geometry(rows.valid, rows_kv.valid, _ids(rows, -1), _ids(rows_kv, -2), diagonal, rows_kv.offset)


def _ids(rows: Rows, padding: int) -> Tensor:
    return torch.where(rows.valid, rows.sequence, padding)


def valid_lengths(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> Tensor:
    """Valid rows of each sequence, int64 [B]."""
    lengths = cu_seqlens.long().diff()
    return lengths if cu_seqlens_padded is None else torch.minimum(lengths, cu_seqlens_padded.long().diff())


def _blocks(call: Call | GradCall, place: _Geometry) -> Iterator[_Block]:
    queries, heads, _ = call.q.shape
    keys = call.k.shape[0]
    beyond = queries + keys  # a bound this far excludes nothing; clipped here, adding it cannot overflow
    left, right = min(call.window_left, beyond), 0 if call.causal else min(call.window_right, beyond)
    step = max(16, _BLOCK_ELEMENTS // max(1, heads * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = slice(0, keys)
        if call.cu_seqlens_kv is None:
            # Queries and keys of a sequence stand in the same rows, so bounds on j - i are bounds on row numbers.
            seen = slice(max(0, start - left) if left >= 0 else 0, min(keys, rows.stop + right) if right >= 0 else keys)
        offset, diagonal = place.offset_kv[None, seen], place.diagonal[rows, None]
        hidden = place.sequence_q[rows, None] != place.sequence_kv[None, seen]
        if right >= 0:
            hidden |= offset > diagonal + right
        if left >= 0:
            hidden |= offset < diagonal - left
        yield _Block(rows, seen, hidden)


# --- shapes --------------------------------------------------------------------------------------------------------------------


def _by_head(x: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, D] -> [H, T, D] in `dtype`, contiguous; padding rows zero, by selection."""
    return torch.where(valid[:, None, None], x, 0).to(dtype).transpose(0, 1).contiguous()


def _grouped(x: Tensor, valid: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[T, Hq, D] -> [Hkv, G, T, D]: query heads beside the key head they share."""
    return _by_head(x, valid, dtype).unflatten(0, (kv_heads, -1))


def _joined(blocks: list[Tensor], none: Tensor) -> Tensor:
    """Blocks of rows [Hkv, G, R, D] -> [T, Hq, D], contiguous."""
    if not blocks:
        return none
    return torch.cat(blocks, 2).flatten(0, 1).transpose(0, 1).contiguous()


def _against(a: Tensor, b: Tensor) -> Tensor:
    """[Hkv, G, R, D] x [Hkv, N, D] -> [Hkv, G, R, N]."""
    return (a.flatten(1, 2) @ b.mT).unflatten(1, a.shape[1:3])


def _over_keys(weights: Tensor, x: Tensor) -> Tensor:
    """[Hkv, G, R, N] x [Hkv, N, D] -> [Hkv, G, R, D]."""
    return (weights.flatten(1, 2) @ x).unflatten(1, weights.shape[1:3])


def _over_rows(weights: Tensor, x: Tensor) -> Tensor:
    """[Hkv, G, R, N] x [Hkv, G, R, D] -> [Hkv, N, D], summed over the group."""
    return weights.flatten(1, 2).mT @ x.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """(S [Hkv, G, R, N], tanh or None); q carries the scale."""
    scores = _against(q, k)
    if softcap == 0:
        return scores, None
    tanh = (scores / softcap).tanh()
    return softcap * tanh, tanh


def _row_max(scores: Tensor) -> Tensor:
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


# --- sinks ---------------------------------------------------------------------------------------------------------------------


def _sink(call: Call | GradCall, dtype: torch.dtype) -> Tensor | None:
    """[Hkv, G, 1]: the logit that joins the sum without a value; None for the vanilla softmax."""
    if call.softmax == "vanilla":
        return None
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    logit = call.q.new_zeros(heads, dtype=dtype) if call.sink is None else call.sink.to(dtype)
    return logit.view(kv_heads, heads // kv_heads, 1)


def _sink_gradient(call: GradCall, sink: Tensor | None, lse: Tensor, seen: Tensor, delta: Tensor) -> Tensor:
    if call.sink is None or sink is None:
        return torch.empty(0, dtype=torch.float32, device=call.q.device)
    share = torch.where(seen, (sink - lse).exp(), 0)
    return -(share * delta).sum(-1).flatten().to(call.sink.dtype)
