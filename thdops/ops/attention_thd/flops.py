"""Floating-point operations of the attention ops, as `torch.utils.flop_counter` counts them for torch's own attention.

T rows (Tq of queries, Tk of keys), Hq heads, Dqk and Dv head dims. A product of width D costs 2 D operations for each pair of a
query and a key of one sequence, in each of the Hq heads. Masks are not deducted, neither causal ones nor windows: that is torch's
convention; `python -m thdops bench` deducts them.

Lengths are read where they stand on the host. Those on a device are not: reading them would wait for it, and cannot be captured.
Then, as for fake tensors, the count is the most that the shapes allow: every query meets the longest sequence of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall, key_metadata
from meta_kernels.contract import takes
from thdops.ops.attention_thd.reference import valid_lengths


@takes(Call)
def attention(call: Call) -> int:
    """Two products: scores, and the values they weigh."""
    return _operations(call, products_qk=1, products_v=1)


@takes(GradCall)
def attention_grad(call: GradCall) -> int:
    """Five products: scores again, dq and dk over Dqk; dP and dv over Dv."""
    return _operations(call, products_qk=3, products_v=2)


def _operations(call: Call | GradCall, products_qk: int, products_v: int) -> int:
    width = products_qk * call.q.shape[2] + products_v * call.v.shape[2]
    return 2 * width * call.q.shape[1] * _pairs(call)


def _pairs(call: Call | GradCall) -> int:
    keys, keys_padded = key_metadata(call)
    metadata = (call.cu_seqlens_q, call.cu_seqlens_q_padded, keys, keys_padded)
    if all(x is None or _on_host(x) for x in metadata):
        queries = valid_lengths(call.cu_seqlens_q, call.cu_seqlens_q_padded).clamp(min=0)
        return int((queries * valid_lengths(keys, keys_padded).clamp(min=0)).sum())
    rows_q, rows_kv = call.q.shape[0], call.k.shape[0]
    longest_q, longest_kv = (min(hint or rows, rows) for hint, rows in ((call.max_seqlen_q, rows_q), (call.max_seqlen_kv, rows_kv)))
    return min(rows_q * longest_kv, rows_kv * longest_q)


def _on_host(x: Tensor) -> bool:
    """Whether the numbers can be read: a fake or distributed tensor is of a class of its own."""
    return type(x) is torch.Tensor and x.device.type == "cpu"
