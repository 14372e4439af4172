"""A few rows of attention in fp32, however long its sequences: what a timed result is held against.

T rows, R sampled ones, Hq and Hkv heads, G = Hq / Hkv, D head dims. Self-attention with vanilla softmax or sinks. Rows are sampled
on the host, evenly over all valid ones, the first and the last included; each costs a pass over T, not T^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.padding.reference import locate_rows

_SAMPLES = 48


class _Sample(NamedTuple):
    """Sampled rows, and what they see as queries and are seen by as keys."""

    rows: Tensor  # int64 [R]
    seen: Tensor  # bool [R, T], the keys that a sampled query sees
    seeing: Tensor  # bool [R, T], the queries that see a sampled key


def attention(call: Call, results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(got, expected): out [R, Hq, Dv], and lse [Hq, R] where `results` have one."""
    sample = _sample(call)
    outs, lses = [], []
    for head in range(call.q.shape[1]):
        scores = _scores(call, call.q[sample.rows, head], call.k[:, _key_head(call, head)], sample.seen)
        lse = scores.logsumexp(1)
        if call.sink is not None:
            lse = torch.logaddexp(lse, call.sink[head].float())
        outs.append((scores - lse[:, None]).exp() @ call.v[:, _key_head(call, head)].float())
        lses.append(lse)
    expected = [torch.stack(outs, 1), torch.stack(lses)]
    got = [results[0][sample.rows], *(lse[:, sample.rows] for lse in results[1:2])]
    return got, expected[: len(got)]


def attention_grad(call: GradCall, results: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(got, expected): dq [R, Hq, Dqk], dk [R, Hkv, Dqk], dv [R, Hkv, Dv], from the call's own out and LSE."""
    if call.grad_out is None:
        raise ValueError("attention_grad: grad_out must be given to be judged, got None; pass one")
    sample = _sample(call)
    rows, heads, kv_heads = sample.rows, call.q.shape[1], call.k.shape[1]
    delta = (call.grad_out.float() * call.out.float()).sum(2)  # [T, Hq]
    dqs = []
    dk = call.k.new_zeros(len(rows), kv_heads, call.k.shape[2], dtype=torch.float32)
    dv = call.v.new_zeros(len(rows), kv_heads, call.v.shape[2], dtype=torch.float32)
    for head in range(heads):
        key_head = _key_head(call, head)
        q, grad = call.q[:, head].float(), call.grad_out[:, head].float()
        k, v = call.k[:, key_head].float(), call.v[:, key_head].float()
        p = (_scores(call, q[rows], k, sample.seen) - call.lse[head, rows, None]).exp()  # [R, T]
        dqs.append(call.scale * (p * (grad[rows] @ v.T - delta[rows, head, None])) @ k)
        p = (_scores(call, k[rows], q, sample.seeing) - _finite(call.lse[head])).exp()  # [R, T], transposed
        dv[:, key_head] += p @ grad
        dk[:, key_head] += call.scale * (p * (v[rows] @ grad.T - delta[:, head])) @ q
    return _in_units_of_rows([result[rows] for result in results[:3]], [torch.stack(dqs, 1), dk, dv])


def _in_units_of_rows(got: list[Tensor], expected: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Every row [H, D] over its own root mean square (the power of two below it), so that each is judged by its own size.

    Under a causal mask the gradients of a sequence's first rows are tens of times those of its last ones, and so are the errors of
    P and dS rounded to 16 bits: against the mean of all rows the former would seem wrong and errors of the latter would not show.
    Rows that are nearly zero (one visible key: dS = P (dP - delta) = 0) are rounding errors of fp32 and keep the tensor's unit.
    """
    scaled = []
    for ours, theirs in zip(got, expected, strict=True):
        rms = theirs.square().mean((1, 2), keepdim=True).sqrt()
        unit = torch.maximum(rms, rms.amax() / 64).clamp(min=torch.finfo(torch.float32).tiny).log2().floor().exp2()
        scaled.append(((ours.float() / unit).to(ours.dtype), theirs / unit))
    return [ours for ours, _ in scaled], [theirs for _, theirs in scaled]


def _sample(call: Call | GradCall) -> _Sample:
    place = locate_rows(call.cu_seqlens_q, call.cu_seqlens_q_padded, call.q.shape[0])
    valid = place.valid.nonzero().flatten()
    rows = valid[torch.linspace(0, len(valid) - 1, _SAMPLES, device=valid.device).long()]
    together = (place.sequence[rows, None] == place.sequence) & place.valid
    distance = place.offset - place.offset[rows, None]  # [R, T], to the right of the sampled row
    left, right = call.window_left, 0 if call.causal else call.window_right
    seen, seeing = together.clone(), together
    if right >= 0:
        seen &= distance <= right
        seeing = seeing & (-distance <= right)
    if left >= 0:
        seen &= -distance <= left
        seeing = seeing & (distance <= left)
    return _Sample(rows, seen, seeing)


def _key_head(call: Call | GradCall, head: int) -> int:
    return head * call.k.shape[1] // call.q.shape[1]


def _scores(call: Call | GradCall, some: Tensor, all_rows: Tensor, visible: Tensor) -> Tensor:
    """[R, T], -inf where nothing is seen."""
    return (call.scale * (some.float() @ all_rows.float().T)).masked_fill(~visible, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse.isfinite(), lse, 0)
