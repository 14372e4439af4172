"""Packed variable-length (THD) training ops for PyTorch that work under torch.compile and CUDA graphs.

Importing this registers every op as `torch.ops.thdops.<name>`. It needs neither triton nor a GPU: kernels are imported when an
op is first called on CUDA.
"""

from __future__ import annotations

from thdops import context_parallel
from thdops._version import __version__
from thdops.checkpointing import save_ops
from thdops.ops.attach.op import attach_loss
from thdops.ops.attention_thd.op import attention, attention_backends
from thdops.ops.aux_loss.op import moe_aux_loss
from thdops.ops.balancing.op import expert_bias_update, moe_seq_aux_loss, moe_z_loss, tokens_per_expert
from thdops.ops.dispatch.op import permute_tokens, unpermute_tokens
from thdops.ops.merge.op import merge_attention
from thdops.ops.padding.op import (
    compact_rows,
    cu_seqlens_from_lengths,
    cu_seqlens_from_positions,
    padding_mask,
    positions,
    sequence_ids,
    slice_cu_seqlens,
    zero_fill,
    zero_fill_,
    zero_fill_grad,
)
from thdops.ops.router.losses import aux_loss_from_sums, z_loss_from_sums
from thdops.ops.router.op import RouterOutput, RouterSums, router, router_scores, router_topk
from thdops.packing import PackedSequences

__all__ = [
    "PackedSequences",
    "RouterOutput",
    "RouterSums",
    "__version__",
    "attach_loss",
    "attention",
    "attention_backends",
    "aux_loss_from_sums",
    "compact_rows",
    "context_parallel",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_positions",
    "expert_bias_update",
    "merge_attention",
    "moe_aux_loss",
    "moe_seq_aux_loss",
    "moe_z_loss",
    "padding_mask",
    "permute_tokens",
    "positions",
    "router",
    "router_scores",
    "router_topk",
    "save_ops",
    "sequence_ids",
    "slice_cu_seqlens",
    "tokens_per_expert",
    "unpermute_tokens",
    "z_loss_from_sums",
    "zero_fill",
    "zero_fill_",
    "zero_fill_grad",
]
