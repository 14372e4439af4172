"""Context parallelism: every sequence of a packed batch is shared out among W ranks.

    from thdops import context_parallel as cp

    mine = cp.partition_indices(padded, total, world, rank)  # the rows of this rank, to slice token-like tensors with
    valid, local = cp.local_cu_seqlens(valid, padded, world, rank)  # its metadata: all other ops serve a rank unchanged

All of it on the device: no host sync, capturable, and every replay sees the offsets that are there by then.
"""

from __future__ import annotations

from thdops.context_parallel.op import attention, simulate
from thdops.ops.context.op import from_half, from_rank_order, half, local_cu_seqlens, partition_indices, to_rank_order

__all__ = [
    "attention",
    "from_half",
    "from_rank_order",
    "half",
    "local_cu_seqlens",
    "partition_indices",
    "simulate",
    "to_rank_order",
]
