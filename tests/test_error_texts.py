# ruff: noqa: E501  (pinned texts are as long as they are)
"""What people read, pinned: every schema, every refusal's text, and what every fake returns, over the whole registry.

After a change that is meant: `EXPECTTEST_ACCEPT=1 pytest tests/test_error_texts.py` rewrites the blocks; read the difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import thdops  # noqa: F401  (registers the ops)
from thdops.namespace import REGISTRY

CPU = torch.device("cpu")


def kind(tensor: Tensor) -> str:
    """`bfloat16[25, 2, 8] strides (16, 8, 1)`; strides only where they are not the contiguous ones."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return f"{dtype}{list(tensor.shape)}" + ("" if contiguous else f" strides {tensor.stride()}")


def refused(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        op(*args)
    return f"{caught.type.__name__}: {caught.value}"


def refusals() -> str:
    lines: list[str] = []
    for spec in REGISTRY:
        lines.append(str(REGISTRY.schema(spec.name)))
        lines += [f"  {refusal.name}\n    {refused(REGISTRY.op(spec.name), refusal.args)}" for refusal in spec.refusals(CPU)]
    return "\n".join(lines) + "\n"


def fakes() -> str:
    lines: list[str] = []
    for spec in REGISTRY:
        lines.append(spec.name)
        for sample in spec.samples(CPU):
            with FakeTensorMode() as mode:
                result = REGISTRY.op(spec.name)(*tree_map_only(Tensor, mode.from_tensor, sample.args))
            lines.append(f"  {sample.name}: " + (", ".join(kind(t) for t in tree_leaves(result) if t is not None) or "nothing"))
    return "\n".join(lines) + "\n"


def test_schemas_and_refusals() -> None:
    assert_expected_inline(
        refusals(),
        """\
thdops::attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_kv, Tensor? cu_seqlens_kv_padded, Tensor? sink, bool causal, bool bottom_right, SymInt window_left, SymInt window_right, float scale, str softmax, float softcap, SymInt max_seqlen_q, SymInt max_seqlen_kv, bool deterministic, str backend, bool return_max_logit) -> (Tensor out, Tensor lse, Tensor max_logit)
  q of two dimensions
    ValueError: attention: q must have 3 dimensions [Tq, Hq, Dqk], got shape [25, 64]; reshape it
  integer q
    TypeError: attention: q must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  k of another dtype
    TypeError: attention: k must have the dtype of q (float32), got bfloat16; cast one of them
  v of fewer rows
    ValueError: attention: v must have the rows and heads of k ([25, 2, 16]), got [24, 2, 16]; pass values of the same keys
  head dim too small
    ValueError: attention: q must have a head dim that is a multiple of 8 from 16 to 256, got 8; pad the head dim with zeros
  odd head dim
    ValueError: attention: v must have a head dim that is a multiple of 8 from 16 to 256, got 15; pad the head dim with zeros
  head dim too large
    ValueError: attention: v must have a head dim that is a multiple of 8 from 16 to 256, got 264; pad the head dim with zeros
  k of another head dim
    ValueError: attention: k must have the head dim of q (16), got 24; pass keys of the same width
  heads that do not divide
    ValueError: attention: q must have a positive multiple of k's heads (3), got 4; each key head serves Hq / Hkv query heads
  float cu_seqlens_q
    TypeError: attention: cu_seqlens_q must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  padded offsets of another length
    ValueError: attention: cu_seqlens_q_padded must have as many entries as cu_seqlens_q (5), got 4; pass B+1 offsets in both
  padded offsets of keys alone
    ValueError: attention: cu_seqlens_kv_padded must come with cu_seqlens_kv, got it alone; pass both, or neither for the query's metadata
  keys of other rows without cu_seqlens_kv
    ValueError: attention: k must have the rows of q (25) without cu_seqlens_kv, got 24; pass cu_seqlens_kv
  another number of sequences of keys
    ValueError: attention: cu_seqlens_kv must have as many entries as cu_seqlens_q (5), got 4; pass B+1 offsets in both; a sequence without keys has length 0
  two dtypes of metadata
    TypeError: attention: cu_seqlens_kv must have the dtype of cu_seqlens_q (int32), got int64; cast one of them
  left bound
    ValueError: attention: window_left must be at least -1 (-1 = unbounded), got -2; pass how many keys beside the diagonal are visible
  right bound
    ValueError: attention: window_right must be at least -1 (-1 = unbounded), got -3; pass how many keys beside the diagonal are visible
  negative hint
    ValueError: attention: max_seqlen_q must be at least 0, got -1; pass a larger one
  infinite scale
    ValueError: attention: scale must be finite, got inf; pass a number, or None for Dqk**-0.5
  negative softcap
    ValueError: attention: softcap must be 0 (none) or positive and finite, got -1.0; pass another
  unknown softmax
    ValueError: attention: softmax must be one of vanilla, off_by_one, learnable, got 'quiet'; choose one
  learnable without a sink
    ValueError: attention: sink must be given with softmax='learnable', got None; pass a float32 [Hq], or another softmax
  a sink without learnable
    ValueError: attention: sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'
  sink of the wrong size
    ValueError: attention: sink must have one entry per query head [4], got [3]; reshape it
  bf16 sink
    TypeError: attention: sink must be float32, got bfloat16; cast it
  unknown backend
    ValueError: attention: backend must be one of native, fa4, cudnn, torch, reference, got 'magic'; choose one, or None for the fastest
  fp32 for torch
    ValueError: attention: backend must serve the call, got 'torch', which runs on CUDA only; change the call, or pass backend='reference' (every feature, slow)
  no fast backend
    ValueError: attention: backend must serve the call, got None, and no fast backend does (native runs on CUDA only; fa4 runs on CUDA only; cudnn runs on CUDA only; torch runs on CUDA only); change the call, or pass backend='reference' (every feature, slow)
thdops::attention_grad(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_kv, Tensor? cu_seqlens_kv_padded, Tensor? sink, bool causal, bool bottom_right, SymInt window_left, SymInt window_right, float scale, str softmax, float softcap, SymInt max_seqlen_q, SymInt max_seqlen_kv, bool deterministic, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)
  q of two dimensions
    ValueError: attention_grad: q must have 3 dimensions [Tq, Hq, Dqk], got shape [25, 64]; reshape it
  integer q
    TypeError: attention_grad: q must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  k of another dtype
    TypeError: attention_grad: k must have the dtype of q (float32), got bfloat16; cast one of them
  v of fewer rows
    ValueError: attention_grad: v must have the rows and heads of k ([25, 2, 16]), got [24, 2, 16]; pass values of the same keys
  head dim too small
    ValueError: attention_grad: q must have a head dim that is a multiple of 8 from 16 to 256, got 8; pad the head dim with zeros
  odd head dim
    ValueError: attention_grad: v must have a head dim that is a multiple of 8 from 16 to 256, got 15; pad the head dim with zeros
  head dim too large
    ValueError: attention_grad: v must have a head dim that is a multiple of 8 from 16 to 256, got 264; pad the head dim with zeros
  k of another head dim
    ValueError: attention_grad: k must have the head dim of q (16), got 24; pass keys of the same width
  heads that do not divide
    ValueError: attention_grad: q must have a positive multiple of k's heads (3), got 4; each key head serves Hq / Hkv query heads
  float cu_seqlens_q
    TypeError: attention_grad: cu_seqlens_q must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  padded offsets of another length
    ValueError: attention_grad: cu_seqlens_q_padded must have as many entries as cu_seqlens_q (5), got 4; pass B+1 offsets in both
  padded offsets of keys alone
    ValueError: attention_grad: cu_seqlens_kv_padded must come with cu_seqlens_kv, got it alone; pass both, or neither for the query's metadata
  keys of other rows without cu_seqlens_kv
    ValueError: attention_grad: k must have the rows of q (25) without cu_seqlens_kv, got 24; pass cu_seqlens_kv
  another number of sequences of keys
    ValueError: attention_grad: cu_seqlens_kv must have as many entries as cu_seqlens_q (5), got 4; pass B+1 offsets in both; a sequence without keys has length 0
  two dtypes of metadata
    TypeError: attention_grad: cu_seqlens_kv must have the dtype of cu_seqlens_q (int32), got int64; cast one of them
  left bound
    ValueError: attention_grad: window_left must be at least -1 (-1 = unbounded), got -2; pass how many keys beside the diagonal are visible
  right bound
    ValueError: attention_grad: window_right must be at least -1 (-1 = unbounded), got -3; pass how many keys beside the diagonal are visible
  negative hint
    ValueError: attention_grad: max_seqlen_q must be at least 0, got -1; pass a larger one
  infinite scale
    ValueError: attention_grad: scale must be finite, got inf; pass a number, or None for Dqk**-0.5
  negative softcap
    ValueError: attention_grad: softcap must be 0 (none) or positive and finite, got -1.0; pass another
  unknown softmax
    ValueError: attention_grad: softmax must be one of vanilla, off_by_one, learnable, got 'quiet'; choose one
  learnable without a sink
    ValueError: attention_grad: sink must be given with softmax='learnable', got None; pass a float32 [Hq], or another softmax
  a sink without learnable
    ValueError: attention_grad: sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'
  sink of the wrong size
    ValueError: attention_grad: sink must have one entry per query head [4], got [3]; reshape it
  bf16 sink
    TypeError: attention_grad: sink must be float32, got bfloat16; cast it
  unknown backend
    ValueError: attention_grad: backend must be one of native, fa4, cudnn, torch, reference, got 'magic'; choose one, or None for the fastest
  fp32 for torch
    ValueError: attention_grad: backend must serve the call, got 'torch', which runs on CUDA only; change the call, or pass backend='reference' (every feature, slow)
  out of another shape
    ValueError: attention_grad: out must have the forward's shape [23, 4, 16], got [22, 4, 16]; pass the forward's
  lse of another dtype
    TypeError: attention_grad: lse must be float32, got bfloat16; cast it
  grad_out of another shape
    ValueError: attention_grad: grad_out must have the forward's shape [23, 4, 16], got [4, 23, 16]; pass the forward's
  grad_lse of another dtype
    TypeError: attention_grad: grad_lse must be float32, got float16; cast it
thdops::partition_indices(Tensor cu_seqlens_padded, SymInt total_tokens, SymInt cp_size, SymInt cp_rank, str partition="zigzag") -> Tensor
  float offsets
    TypeError: partition_indices: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: partition_indices: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: partition_indices: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  no rank
    ValueError: partition_indices: cp_size must be at least 1, got 0; pass a larger one
  a rank past the group
    ValueError: partition_indices: cp_rank must be from 0 to cp_size - 1 (1), got 2; pass this rank's number in its group
  a rank below 0
    ValueError: partition_indices: cp_rank must be from 0 to cp_size - 1 (1), got -1; pass this rank's number in its group
  another partition
    ValueError: partition_indices: partition must be one of zigzag, contiguous, got 'striped'; choose one
  total_tokens below 0
    ValueError: partition_indices: total_tokens must be at least 0, got -4; pass a larger one
  rows that chunks do not divide
    ValueError: partition_indices: total_tokens must be a multiple of 2 * cp_size (4), got 10; pad the batch, and every sequence, to such multiples
  more rows than int32 can number
    ValueError: partition_indices: total_tokens must be below 2**31, got 2147483648; split the batch
thdops::local_cu_seqlens(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt cp_size, SymInt cp_rank, str? half=None, str partition="zigzag") -> (Tensor valid, Tensor padded)
  float offsets
    TypeError: local_cu_seqlens: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: local_cu_seqlens: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: local_cu_seqlens: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  no rank
    ValueError: local_cu_seqlens: cp_size must be at least 1, got 0; pass a larger one
  a rank past the group
    ValueError: local_cu_seqlens: cp_rank must be from 0 to cp_size - 1 (1), got 2; pass this rank's number in its group
  a rank below 0
    ValueError: local_cu_seqlens: cp_rank must be from 0 to cp_size - 1 (1), got -1; pass this rank's number in its group
  another partition
    ValueError: local_cu_seqlens: partition must be one of zigzag, contiguous, got 'striped'; choose one
  an offset less
    ValueError: local_cu_seqlens: cu_seqlens_padded must have as many entries as cu_seqlens (3), got 2; pass B+1 offsets in both
  another half
    ValueError: local_cu_seqlens: half must be one of first, second, got 'both'; choose one
thdops::to_rank_order(Tensor x, Tensor cu_seqlens_padded, SymInt cp_size, str partition="zigzag") -> Tensor
  float offsets
    TypeError: to_rank_order: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: to_rank_order: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: to_rank_order: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  a scalar
    ValueError: to_rank_order: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  no rank
    ValueError: to_rank_order: cp_size must be at least 1, got 0; pass a larger one
  another partition
    ValueError: to_rank_order: partition must be one of zigzag, contiguous, got 'striped'; choose one
  rows that chunks do not divide
    ValueError: to_rank_order: x must have a multiple of 2 * cp_size (4) rows, got 10; pad the batch, and every sequence, to such multiples
thdops::from_rank_order(Tensor x, Tensor cu_seqlens_padded, SymInt cp_size, str partition="zigzag") -> Tensor
  float offsets
    TypeError: from_rank_order: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: from_rank_order: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: from_rank_order: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  a scalar
    ValueError: from_rank_order: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  no rank
    ValueError: from_rank_order: cp_size must be at least 1, got 0; pass a larger one
  another partition
    ValueError: from_rank_order: partition must be one of zigzag, contiguous, got 'striped'; choose one
  rows that chunks do not divide
    ValueError: from_rank_order: x must have a multiple of 2 * cp_size (4) rows, got 10; pad the batch, and every sequence, to such multiples
thdops::half(Tensor x, Tensor cu_seqlens_padded, str which, int dim=0) -> Tensor
  float offsets
    TypeError: half: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: half: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: half: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  a scalar
    ValueError: half: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  another half
    ValueError: half: which must be one of first, second, got 'both'; choose one
  a dimension past the last
    ValueError: half: dim must name a dimension of x [16, 4], got 2; pass 0, or -1 for [H, T]
  an odd number of rows
    ValueError: half: x must have an even number of rows, got 15; pass all rows of the rank
thdops::from_half(Tensor x, Tensor cu_seqlens_padded, str which, int dim=0) -> Tensor
  float offsets
    TypeError: from_half: cu_seqlens_padded must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  no offset
    ValueError: from_half: cu_seqlens_padded must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  every other offset
    ValueError: from_half: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  a scalar
    ValueError: from_half: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  another half
    ValueError: from_half: which must be one of first, second, got 'both'; choose one
  a dimension past the last
    ValueError: from_half: dim must name a dimension of x [16, 4], got 2; pass 0, or -1 for [H, T]
  a dtype without a zero
    TypeError: from_half: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only
thdops::context_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? sink, str[] groups, str comm, str partition, bool causal, SymInt window_left, SymInt window_right, float scale, str softmax, float softcap, bool deterministic, str backend, bool return_max_logit, SymInt total_tokens) -> (Tensor out, Tensor lse, Tensor max_logit)
  q of two dimensions
    ValueError: context_attention: q must have 3 dimensions [T / W, Hq, Dqk], got shape [64, 64]; reshape it
  k of fewer rows
    ValueError: context_attention: k must have the rows of q (64), got 56; pass the same rows of the batch
  float cu_seqlens
    TypeError: context_attention: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  v of another dtype
    TypeError: context_attention: v must have the dtype of q (float32), got bfloat16; cast one of them
  a sink without its softmax
    ValueError: context_attention: sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'
  unknown comm
    ValueError: context_attention: comm must be one of p2p, all_gather, a2a, a2a+p2p, got 'ring'; choose one
  unknown partition
    ValueError: context_attention: partition must be one of zigzag, contiguous, got 'blocks'; choose one
  one group for two dimensions
    ValueError: context_attention: group must be a mesh of two dimensions or a pair of groups with comm='a2a+p2p', got 1; pass (ring group, heads group)
  two groups for one dimension
    ValueError: context_attention: group must be one group with comm='p2p', got 2; pass one dimension of the mesh, or comm='a2a+p2p'
  no such group
    ValueError: context_attention: group must be a process group of this process, got 'nobody'; pass a group of this process; torch.distributed must be initialised
  no virtual rank
    ValueError: context_attention: group must name a positive number of virtual ranks, got ['virtual:0']; pass 'virtual:4'
  rows that do not divide
    ValueError: context_attention: q must have T / W rows, T a multiple of 2 * W (W = 4 here), got 60 rows of all ranks; pad the batch, and every sequence, to multiples of 2 * W rows
  a window round the ring
    ValueError: context_attention: window must be (-1, -1) with comm='p2p', got (3, 0); pass comm='all_gather' or 'a2a': a ring would send keys that no query of the next ranks sees
  key heads that do not divide
    ValueError: context_attention: heads of q and k must be multiples of the 4 ranks that share them, got 4 and 2; pass comm='p2p' or 'all_gather', or split heads over fewer ranks with 'a2a+p2p'
  a backend that is not there
    ValueError: context_attention: backend must serve the call, got 'native', which runs on CUDA only; change the call, or pass backend='reference' (every feature, slow)
  a group of the wrong size
    ValueError: context_attention: group must have total_tokens / n ranks, got 1 for 64 of 128 rows; pass the group that rows were partitioned for
thdops::context_attention_grad(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? sink, str[] groups, str comm, str partition, bool causal, SymInt window_left, SymInt window_right, float scale, str softmax, float softcap, bool deterministic, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)
  q of two dimensions
    ValueError: context_attention_grad: q must have 3 dimensions [T / W, Hq, Dqk], got shape [64, 64]; reshape it
  k of fewer rows
    ValueError: context_attention_grad: k must have the rows of q (64), got 56; pass the same rows of the batch
  float cu_seqlens
    TypeError: context_attention_grad: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  v of another dtype
    TypeError: context_attention_grad: v must have the dtype of q (float32), got bfloat16; cast one of them
  a sink without its softmax
    ValueError: context_attention_grad: sink must come with softmax='learnable', got a sink with softmax='vanilla'; leave it out, or pass softmax='learnable'
  unknown comm
    ValueError: context_attention_grad: comm must be one of p2p, all_gather, a2a, a2a+p2p, got 'ring'; choose one
  unknown partition
    ValueError: context_attention_grad: partition must be one of zigzag, contiguous, got 'blocks'; choose one
  one group for two dimensions
    ValueError: context_attention_grad: group must be a mesh of two dimensions or a pair of groups with comm='a2a+p2p', got 1; pass (ring group, heads group)
  two groups for one dimension
    ValueError: context_attention_grad: group must be one group with comm='p2p', got 2; pass one dimension of the mesh, or comm='a2a+p2p'
  no such group
    ValueError: context_attention_grad: group must be a process group of this process, got 'nobody'; pass a group of this process; torch.distributed must be initialised
  no virtual rank
    ValueError: context_attention_grad: group must name a positive number of virtual ranks, got ['virtual:0']; pass 'virtual:4'
  rows that do not divide
    ValueError: context_attention_grad: q must have T / W rows, T a multiple of 2 * W (W = 4 here), got 60 rows of all ranks; pad the batch, and every sequence, to multiples of 2 * W rows
  a window round the ring
    ValueError: context_attention_grad: window must be (-1, -1) with comm='p2p', got (3, 0); pass comm='all_gather' or 'a2a': a ring would send keys that no query of the next ranks sees
  key heads that do not divide
    ValueError: context_attention_grad: heads of q and k must be multiples of the 4 ranks that share them, got 4 and 2; pass comm='p2p' or 'all_gather', or split heads over fewer ranks with 'a2a+p2p'
  a backend that is not there
    ValueError: context_attention_grad: backend must serve the call, got 'native', which runs on CUDA only; change the call, or pass backend='reference' (every feature, slow)
  out of another shape
    ValueError: context_attention_grad: out must have the forward's shape [64, 4, 16], got [63, 4, 16]; pass the forward's
  grad_lse of another dtype
    TypeError: context_attention_grad: grad_lse must be float32, got float16; cast it
thdops::attach_loss_grad(Tensor grad, Tensor scale, ScalarType dtype) -> Tensor
  several scales
    ValueError: attach_loss_grad: scale must have one element, got shape [2]; pass a 0-d tensor
  integer scale
    TypeError: attach_loss_grad: scale must be float32 or bfloat16 or float16, got int64 on cpu; cast it
  integer dtype
    TypeError: attach_loss_grad: dtype must be float32 or bfloat16 or float16, got int32 on cpu; pass the dtype of the loss
thdops::moe_aux_loss(Tensor probs, Tensor tokens_per_expert, Tensor? total_num_tokens_tensor, Tensor? coeff_tensor, Tensor? padding_mask, SymInt num_experts, SymInt topk, SymInt? total_num_tokens=None, float? coeff=None) -> (Tensor loss, Tensor coefficient)
  probs of rank 3
    ValueError: moe_aux_loss: probs must have 2 dimensions [T, M*E], got shape [1, 6, 8]; reshape it
  integer probs
    TypeError: moe_aux_loss: probs must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: moe_aux_loss: num_experts must be at least 1, got 0; pass a larger one
  topk 0
    ValueError: moe_aux_loss: topk must be from 1 to num_experts (8), got 0; pass the router's top-k
  topk 9
    ValueError: moe_aux_loss: topk must be from 1 to num_experts (8), got 9; pass the router's top-k
  columns no multiple of experts
    ValueError: moe_aux_loss: probs must have a multiple of num_experts (3) columns, got shape [6, 8]; fold whole sequences into columns: [T, M*E]
  no column
    ValueError: moe_aux_loss: probs must have a multiple of num_experts (8) columns, got shape [6, 0]; fold whole sequences into columns: [T, M*E]
  tokens of another length
    ValueError: moe_aux_loss: tokens_per_expert must be [M*E] with one entry per column of probs (8), got shape [4]; flatten it like the columns of probs
  tokens of a bad dtype
    TypeError: moe_aux_loss: tokens_per_expert must be int16 or int32 or int64 or float32 or bfloat16 or float16, got bool; cast it
  negative count
    ValueError: moe_aux_loss: total_num_tokens must be at least 0, got -1; pass a larger one
  no count
    ValueError: moe_aux_loss: total_num_tokens must be given either as total_num_tokens (an int) or as total_num_tokens_tensor, got neither; pass exactly one and None for the other
  two coefficients
    ValueError: moe_aux_loss: coeff must be given either as coeff (a float) or as coeff_tensor, got both; pass exactly one and None for the other
  count of a bad dtype
    TypeError: moe_aux_loss: total_num_tokens must be int32 or int64 or float32, got int16; cast it
  several counts
    ValueError: moe_aux_loss: total_num_tokens must have one element, got shape [8]; pass a 0-d tensor
  coefficient of a bad dtype
    TypeError: moe_aux_loss: coeff must be float32, got bfloat16; cast it
  mask of a bad dtype
    TypeError: moe_aux_loss: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of another length
    ValueError: moe_aux_loss: padding_mask must be [T] or [T, M] with T = 6 rows and M = 1 folded sequences, got shape [5]; flatten it like the rows of probs
  mask of other sequences
    ValueError: moe_aux_loss: padding_mask must be [T] or [T, M] with T = 6 rows and M = 1 folded sequences, got shape [6, 2]; flatten it like the rows of probs
thdops::moe_aux_loss_grad(Tensor grad_loss, Tensor coefficient, Tensor tokens_per_expert, Tensor? padding_mask, SymInt rows, ScalarType dtype) -> Tensor
  gradient of several elements
    ValueError: moe_aux_loss_grad: grad_loss must have one element, got shape [2]; pass a 0-d tensor
  coefficient of a bad dtype
    TypeError: moe_aux_loss_grad: coefficient must be float32, got bfloat16; cast it
  tokens of rank 2
    ValueError: moe_aux_loss_grad: tokens_per_expert must have 1 dimension [M*E], got shape [1, 8]; reshape it
  integer dtype
    TypeError: moe_aux_loss_grad: dtype must be float32 or bfloat16 or float16, got int32 on cpu; pass the dtype of probs
  negative rows
    ValueError: moe_aux_loss_grad: rows must be at least 0, got -1; pass a larger one
  mask of other sequences
    ValueError: moe_aux_loss_grad: padding_mask must be [T, M] with M a divisor of the 8 columns, got shape [6, 3]; pass the mask of the forward
thdops::tokens_per_expert(Tensor routing, Tensor? padding_mask=None, SymInt? num_experts=None) -> Tensor
  a float mask
    TypeError: tokens_per_expert: routing must be bool (a mask), int16 or int32 or int64 (indices) or uint8 (a bitmap), got float32; pass what the router returned
  one dimension
    ValueError: tokens_per_expert: routing must have 2 dimensions [T, E], [T, K] or [T, ceil(E/8)], got shape [12]; reshape it
  a mask of no expert
    ValueError: tokens_per_expert: routing must have a column per expert, got shape [6, 0]; pass the mask [T, E], and E or None as num_experts
  a mask of other experts
    ValueError: tokens_per_expert: routing must have a column per expert (8), got shape [6, 12]; pass the mask [T, E], and E or None as num_experts
  indices alone
    ValueError: tokens_per_expert: num_experts must be given for indices and bitmaps, got None with routing int64[6, 2]; only a mask tells the number of experts
  a bitmap alone
    ValueError: tokens_per_expert: num_experts must be given for indices and bitmaps, got None with routing uint8[6, 2]; only a mask tells the number of experts
  no expert
    ValueError: tokens_per_expert: num_experts must be at least 1, got 0; pass a larger one
  a mask of bytes
    ValueError: tokens_per_expert: routing must have a bit per expert, ceil(12/8) bytes a row, where it is uint8, got shape [6, 12]; pass the bitmap, or a mask as bool
  padding of a bad dtype
    TypeError: tokens_per_expert: padding_mask must be bool, True on padding rows, got int32; cast it with .bool()
  padding of other rows
    ValueError: tokens_per_expert: padding_mask must be [T] with one entry per row of routing (6), got shape [5]; flatten it like the rows of routing
thdops::moe_z_loss(Tensor logits, Tensor? coeff_tensor, Tensor? padding_mask, float? coeff=None) -> (Tensor loss, Tensor factor, Tensor lse)
  integers
    TypeError: moe_z_loss: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  rank 3
    ValueError: moe_z_loss: logits must have 2 dimensions [T, E], got shape [1, 6, 8]; reshape it
  no expert
    ValueError: moe_z_loss: logits must have at least one expert, got shape [6, 0]; pass [T, E]
  no coefficient
    ValueError: moe_z_loss: coeff must be given either as coeff (a float) or as coeff_tensor, got neither; pass exactly one and None for the other
  coefficient of a bad dtype
    TypeError: moe_z_loss: coeff must be float32, got float16; cast it
  mask of other rows
    ValueError: moe_z_loss: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
thdops::moe_z_loss_grad(Tensor grad_loss, Tensor factor, Tensor logits, Tensor lse) -> Tensor
  integers
    TypeError: moe_z_loss_grad: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  gradient of several elements
    ValueError: moe_z_loss_grad: grad_loss must have one element, got shape [2]; pass a 0-d tensor
  factor of a bad dtype
    TypeError: moe_z_loss_grad: factor must be float32, got bfloat16; cast it
  lse of other rows
    ValueError: moe_z_loss_grad: lse must be [T] with one entry per row of logits (6), got shape [5]; pass what the forward returned
thdops::moe_seq_aux_loss(Tensor scores, Tensor routing, Tensor cu_seqlens, Tensor? cu_seqlens_padded, Tensor? coeff_tensor, SymInt num_experts, SymInt topk, str reduction, float? coeff=None) -> (Tensor loss, Tensor slopes, Tensor share)
  other experts
    ValueError: moe_seq_aux_loss: scores must have a column per expert (4), got shape [25, 8]; pass the scores over all experts: [T, E]
  topk 0
    ValueError: moe_seq_aux_loss: topk must be from 1 to num_experts (8), got 0; pass the router's top-k
  topk 9
    ValueError: moe_seq_aux_loss: topk must be from 1 to num_experts (8), got 9; pass the router's top-k
  integer scores
    TypeError: moe_seq_aux_loss: scores must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  routing of other rows
    ValueError: moe_seq_aux_loss: routing must have the rows of scores (25), got shape [24, 8]; pass both of the same tokens
  a mask of other experts
    ValueError: moe_seq_aux_loss: routing must have a column per expert (8), got shape [25, 7]; pass the mask [T, E], and E or None as num_experts
  unknown reduction
    ValueError: moe_seq_aux_loss: reduction must be one of mean, sum, none, got 'max'; choose one
  two coefficients
    ValueError: moe_seq_aux_loss: coeff must be given either as coeff (a float) or as coeff_tensor, got both; pass exactly one and None for the other
  cu_seqlens of a float dtype
    TypeError: moe_seq_aux_loss: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: moe_seq_aux_loss: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: moe_seq_aux_loss: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: moe_seq_aux_loss: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: moe_seq_aux_loss: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: moe_seq_aux_loss: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: moe_seq_aux_loss: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: moe_seq_aux_loss: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
thdops::moe_seq_aux_loss_grad(Tensor grad_loss, Tensor slopes, Tensor share, Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt rows, ScalarType dtype) -> Tensor
  slopes of other sequences
    ValueError: moe_seq_aux_loss_grad: slopes must be [B, E] with B = 4 sequences, got shape [3, 8]; pass what the forward returned
  gradient of other sequences
    ValueError: moe_seq_aux_loss_grad: grad_loss must be 0-d or [B] with B = 4 sequences, got shape [3]; pass the gradient of the loss
  share of a bad dtype
    TypeError: moe_seq_aux_loss_grad: share must be float32, got float16; cast it
  negative rows
    ValueError: moe_seq_aux_loss_grad: rows must be at least 0, got -1; pass a larger one
  integer dtype
    TypeError: moe_seq_aux_loss_grad: dtype must be float32 or bfloat16 or float16, got int32 on cpu; pass the dtype of scores
  cu_seqlens of a float dtype
    TypeError: moe_seq_aux_loss_grad: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: moe_seq_aux_loss_grad: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: moe_seq_aux_loss_grad: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: moe_seq_aux_loss_grad: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: moe_seq_aux_loss_grad: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: moe_seq_aux_loss_grad: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: moe_seq_aux_loss_grad: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: moe_seq_aux_loss_grad: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
thdops::expert_bias_update(Tensor bias, Tensor tokens_per_expert, Tensor? rate_tensor, float? rate=None) -> Tensor
  an integer bias
    TypeError: expert_bias_update: bias must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  rank 3
    ValueError: expert_bias_update: bias must be [E] or [L, E] with at least one expert, got shape [1, 2, 8]; pass the biases of one layer, or of several stacked
  counts of a bad dtype
    TypeError: expert_bias_update: tokens_per_expert must be int32 or int64 or float32, got bfloat16; cast it
  counts of another shape
    ValueError: expert_bias_update: tokens_per_expert must have the shape of bias [2, 8], got shape [8]; pass one count per bias
  two rates
    ValueError: expert_bias_update: rate must be given either as rate (a float) or as rate_tensor, got both; pass exactly one and None for the other
  several rates
    ValueError: expert_bias_update: rate must have one element, got shape [2]; pass a 0-d tensor
thdops::permute_tokens(Tensor x, Tensor indices, SymInt num_experts) -> (Tensor rows, Tensor offsets, Tensor map)
  a scalar
    ValueError: permute_tokens: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  a dtype without a zero
    TypeError: permute_tokens: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only
  float ids
    TypeError: permute_tokens: indices must be int16 or int32 or int64, got float32; pass expert ids [T, K], from router_topk(..., routing='indices')
  a mask for ids
    TypeError: permute_tokens: indices must be int16 or int32 or int64, got bool; pass expert ids [T, K], from router_topk(..., routing='indices')
  ids of rank 1
    ValueError: permute_tokens: indices must have 2 dimensions [T, K], got shape [6]; reshape it
  no choice
    ValueError: permute_tokens: indices must have at least one column [T, K], got shape [6, 0]; pass the router's top-k
  2**31 pairs
    ValueError: permute_tokens: indices must have fewer than 2**31 elements, got 2147483648; dispatch fewer tokens at a time
  fewer ids
    ValueError: permute_tokens: indices must have one row per row of x (6), got 5; pass [T, K]
  no expert
    ValueError: permute_tokens: num_experts must be at least 1, got 0; pass a larger one
thdops::unpermute_tokens(Tensor rows, Tensor map, Tensor? weights=None) -> Tensor
  a scalar
    ValueError: unpermute_tokens: rows must have at least one dimension [T*K, ...], got a 0-d tensor; rows are dimension 0
  integer rows
    TypeError: unpermute_tokens: rows must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  ids for a map
    TypeError: unpermute_tokens: map must be int32, got int64; pass the map that permute_tokens returned
  a flat map
    ValueError: unpermute_tokens: map must have 2 dimensions [T, K], got shape [12]; reshape it
  rows left out
    ValueError: unpermute_tokens: rows must have one row per element of map (12), got 10; pass all rows that permute_tokens made
  weights of another shape
    ValueError: unpermute_tokens: weights must have the shape of map [6, 2], got [6, 1]; pass one per pair, [T, K]
  integer weights
    TypeError: unpermute_tokens: weights must be float32 or bfloat16 or float16, got int32 on cpu; cast it
thdops::unpermute_tokens_grad(Tensor grad, Tensor? rows, Tensor map, Tensor? weights=None) -> (Tensor grad_rows, Tensor grad_weights)
  a short gradient
    ValueError: unpermute_tokens_grad: grad must have one row per row of map (6), got 5; pass out's gradient
  rows without weights
    ValueError: unpermute_tokens_grad: rows must be None where weights is None, got shape [12, 8]; only weights' gradient reads rows
  narrow rows
    ValueError: unpermute_tokens_grad: rows must have the shape [12, 8], got [12, 7]; pass the rows of the forward
  rows of another dtype
    TypeError: unpermute_tokens_grad: rows must be float32, got bfloat16; out has the dtype of rows
  weights of another shape
    ValueError: unpermute_tokens_grad: weights must have the shape of map [6, 2], got [5, 2]; pass one per pair, [T, K]
thdops::merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, ScalarType? dtype=None) -> (Tensor out, Tensor lse)
  out_a of two dimensions
    ValueError: merge_attention: out_a must have 3 dimensions [T, H, D], got shape [6, 16]; reshape it
  integer out_b
    TypeError: merge_attention: out_b must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  out_b of fewer rows
    ValueError: merge_attention: out_b must have the shape of out_a [6, 2, 8], got [5, 2, 8]; pass two results for the same queries
  bf16 lse_a
    TypeError: merge_attention: lse_a must be float32, got bfloat16; cast it
  lse_b as [T, H]
    ValueError: merge_attention: lse_b must have one entry per head and row, [H, T] = [2, 6], got [6, 2]; transpose it where it is [T, H]
  integer dtype
    TypeError: merge_attention: dtype must be float32 or bfloat16 or float16, got int64 on cpu; pass another, or None
thdops::merge_attention_grad(Tensor? grad_out, Tensor? grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor grad_a, Tensor grad_lse_a, Tensor grad_b, Tensor grad_lse_b)
  out_a of two dimensions
    ValueError: merge_attention_grad: out_a must have 3 dimensions [T, H, D], got shape [6, 16]; reshape it
  integer out_b
    TypeError: merge_attention_grad: out_b must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  out_b of fewer rows
    ValueError: merge_attention_grad: out_b must have the shape of out_a [6, 2, 8], got [5, 2, 8]; pass two results for the same queries
  bf16 lse_a
    TypeError: merge_attention_grad: lse_a must be float32, got bfloat16; cast it
  lse_b as [T, H]
    ValueError: merge_attention_grad: lse_b must have one entry per head and row, [H, T] = [2, 6], got [6, 2]; transpose it where it is [T, H]
  grad_out of another width
    ValueError: merge_attention_grad: grad_out must have the shape of out_a [6, 2, 8], got [6, 2, 7]; pass out's gradient
  grad_lse as [T, H]
    ValueError: merge_attention_grad: grad_lse must have one entry per head and row, [H, T] = [2, 6], got [6, 2]; transpose it where it is [T, H]
thdops::zero_fill(Tensor x, Tensor cu_seqlens, Tensor? cu_seqlens_padded=None) -> Tensor
  cu_seqlens of a float dtype
    TypeError: zero_fill: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: zero_fill: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: zero_fill: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: zero_fill: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: zero_fill: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: zero_fill: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: zero_fill: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: zero_fill: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  a scalar
    ValueError: zero_fill: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  a dtype without a zero
    TypeError: zero_fill: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only
thdops::zero_fill_(Tensor(a!)[] tensors, Tensor[] cu_seqlens, Tensor[] cu_seqlens_padded) -> ()
  cu_seqlens of a float dtype
    TypeError: zero_fill_: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: zero_fill_: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: zero_fill_: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: zero_fill_: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: zero_fill_: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: zero_fill_: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: zero_fill_: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: zero_fill_: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  no tensor
    ValueError: zero_fill_: tensors must hold at least one tensor, got an empty list; leave the call out
  two cu_seqlens for three tensors
    ValueError: zero_fill_: cu_seqlens must be one tensor or one per tensor (3), got 2; pass one of the two
  fewer padded offsets than cu_seqlens
    ValueError: zero_fill_: cu_seqlens_padded must be None or as many as cu_seqlens (2), got 1; pass one of the two
  a scalar
    ValueError: zero_fill_: tensors[1] must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  an expanded tensor
    ValueError: zero_fill_: tensors[0] must have a place in memory for each element, got shape [25, 4] with strides [0, 1]; clone the expanded tensor
  a dtype without a zero
    TypeError: zero_fill_: tensors[0] must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only
  a tensor that requires grad
    ValueError: thdops::zero_fill_: tensors must not require grad in grad mode, got a tensor that does; call it under torch.no_grad(), or use the functional zero_fill, which has a gradient
thdops::padding_mask(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt total_tokens) -> Tensor
  cu_seqlens of a float dtype
    TypeError: padding_mask: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: padding_mask: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: padding_mask: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: padding_mask: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: padding_mask: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: padding_mask: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: padding_mask: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: padding_mask: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  total_tokens below 0
    ValueError: padding_mask: total_tokens must be at least 0, got -1; pass a larger one
thdops::sequence_ids(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt total_tokens) -> Tensor
  cu_seqlens of a float dtype
    TypeError: sequence_ids: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: sequence_ids: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: sequence_ids: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: sequence_ids: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: sequence_ids: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: sequence_ids: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: sequence_ids: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: sequence_ids: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  total_tokens below 0
    ValueError: sequence_ids: total_tokens must be at least 0, got -1; pass a larger one
thdops::positions(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt total_tokens, SymInt cp_size=1, SymInt cp_rank=0) -> Tensor
  cu_seqlens of a float dtype
    TypeError: positions: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: positions: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: positions: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: positions: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: positions: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: positions: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: positions: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: positions: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  total_tokens below 0
    ValueError: positions: total_tokens must be at least 0, got -1; pass a larger one
  cp_size 0
    ValueError: positions: cp_size must be at least 1, got 0; pass a larger one
  cp_rank past the group
    ValueError: positions: cp_rank must be from 0 to cp_size - 1 (1), got 2; pass this rank's number in its group
thdops::compact_rows(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt total_tokens) -> (Tensor, Tensor)
  cu_seqlens of a float dtype
    TypeError: compact_rows: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: compact_rows: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: compact_rows: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: compact_rows: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: compact_rows: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: compact_rows: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: compact_rows: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: compact_rows: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  total_tokens below 0
    ValueError: compact_rows: total_tokens must be at least 0, got -1; pass a larger one
  more rows than int32 can number
    ValueError: compact_rows: total_tokens must be below 2**31, got 2147483648; split the batch
thdops::cu_seqlens_from_positions(Tensor position_ids, SymInt max_seqs) -> Tensor
  two dimensions
    ValueError: cu_seqlens_from_positions: position_ids must have 1 dimension [T], got shape [1, 4]; reshape it
  a float dtype
    TypeError: cu_seqlens_from_positions: position_ids must be int32 or int64, got float32; cast it
  no room
    ValueError: cu_seqlens_from_positions: max_seqs must be at least 1, got 0; pass a larger one
thdops::cu_seqlens_from_lengths(Tensor lengths, SymInt max_seqs) -> Tensor
  two dimensions
    ValueError: cu_seqlens_from_lengths: lengths must have 1 dimension [number of sequences], got shape [1, 4]; reshape it
  a float dtype
    TypeError: cu_seqlens_from_lengths: lengths must be int32 or int64, got float32; cast it
  more lengths than fit
    ValueError: cu_seqlens_from_lengths: max_seqs must be at least the number of lengths (4), got 3; raise it or pass fewer
thdops::slice_cu_seqlens(Tensor cu_seqlens, Tensor? cu_seqlens_padded, SymInt start, SymInt length) -> (Tensor, Tensor)
  cu_seqlens of a float dtype
    TypeError: slice_cu_seqlens: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  cu_seqlens of two dimensions
    ValueError: slice_cu_seqlens: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [1, 5]; pass B+1 offsets
  cu_seqlens without an entry
    ValueError: slice_cu_seqlens: cu_seqlens must be 1-D [B+1] with at least one entry, got shape [0]; pass B+1 offsets
  cu_seqlens that is a column
    ValueError: slice_cu_seqlens: cu_seqlens must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded that is a column
    ValueError: slice_cu_seqlens: cu_seqlens_padded must be contiguous, got stride 2; call .contiguous()
  cu_seqlens_padded of a small integer dtype
    TypeError: slice_cu_seqlens: cu_seqlens_padded must be int32 or int64, got int16; cast it, for example with .to(torch.int32)
  cu_seqlens_padded of another length
    ValueError: slice_cu_seqlens: cu_seqlens_padded must have as many entries as cu_seqlens (5), got 4; pass B+1 offsets in both
  cu_seqlens_padded of another dtype
    TypeError: slice_cu_seqlens: cu_seqlens_padded must have the dtype of cu_seqlens (int32), got int64; cast one of them
  start below 0
    ValueError: slice_cu_seqlens: start must be at least 0, got -1; pass a larger one
  length below 0
    ValueError: slice_cu_seqlens: length must be at least 0, got -8; pass a larger one
thdops::router_topk(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, SymInt topk, str score_function, bool pre_softmax, bool normalize, SymInt? num_groups, SymInt? group_topk, float? scaling_factor, str probs_format, str routing_format, ScalarType index_dtype, str pad_routing, SymInt pad_index) -> (Tensor probs, Tensor routing, Tensor chosen)
  logits of rank 3
    ValueError: router_topk: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router_topk: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router_topk: logits must have at least one column, got shape [6, 0]; pass one column per expert
  topk 0
    ValueError: router_topk: topk must be from 1 to the number of experts (8), got 0; pass another
  topk 9
    ValueError: router_topk: topk must be from 1 to the number of experts (8), got 9; pass another
  unknown score_function
    ValueError: router_topk: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  pre_softmax of sigmoid scores
    ValueError: router_topk: pre_softmax must be False unless score_function is softmax, got True with 'sigmoid'; pass normalize=False for scores that are not renormalised
  softmax that is not normalised
    ValueError: router_topk: normalize must be True for a softmax over the chosen logits, got False; pass pre_softmax=True for the softmax over all experts
  bias of a softmax
    ValueError: router_topk: expert_bias must be None with score_function 'softmax', got a tensor; a bias is added to sigmoid or sqrtsoftplus scores
  bias of another length
    ValueError: router_topk: expert_bias must be [E] with one entry per expert (8), got shape [4]; pass one number per column of logits
  bias of integers
    TypeError: router_topk: expert_bias must be float32 or bfloat16 or float16, got int64 on cpu; cast it
  groups without group_topk
    ValueError: router_topk: group_topk must be given where num_groups is, got None; pass both or neither
  group_topk without groups
    ValueError: router_topk: num_groups must be given where group_topk is, got None; pass both or neither
  groups that do not divide the experts
    ValueError: router_topk: num_groups must divide the number of experts (8), got 3; groups are equally large
  more groups chosen than there are
    ValueError: router_topk: group_topk must be from 1 to num_groups (4), got 5; pass another
  topk that groups do not divide
    ValueError: router_topk: topk must be a multiple of group_topk (2), got 3; a group is ranked by its topk / group_topk best experts
  more experts than the groups hold
    ValueError: router_topk: topk must be at most the experts of 2 groups (4), got 6; choose more groups
  unknown probs
    ValueError: router_topk: probs must be one of dense, topk, got 'list'; choose one
  unknown routing
    ValueError: router_topk: routing must be one of mask, indices, bitmap, got 'list'; choose one
  unknown pad_routing
    ValueError: router_topk: pad_routing must be one of nowhere, keep, got 'list'; choose one
  bitmap beside probs in order
    ValueError: router_topk: routing must have an order with probs='topk', got 'bitmap'; pass routing='indices', or probs='dense'
  index_dtype uint8
    TypeError: router_topk: index_dtype must be int16 or int32 or int64, got uint8; pass one of these
  more experts than int16 holds
    ValueError: router_topk: index_dtype must hold 32768 experts, got int16; pass torch.int32
  pad_index that is an expert
    ValueError: router_topk: pad_index must be -1 or the number of experts (8), got 7; choose one
  mask of integers
    TypeError: router_topk: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of shape [5]
    ValueError: router_topk: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
  mask of shape [6, 1]
    ValueError: router_topk: padding_mask must be [T] with one entry per row of logits (6), got shape [6, 1]; flatten it like the rows of logits
thdops::router_topk_grad(Tensor grad_probs, Tensor logits, Tensor chosen, str score_function, bool pre_softmax, bool normalize, float? scaling_factor, str probs_format) -> Tensor
  logits of rank 3
    ValueError: router_topk_grad: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router_topk_grad: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router_topk_grad: logits must have at least one column, got shape [6, 0]; pass one column per expert
  unknown score_function
    ValueError: router_topk_grad: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  pre_softmax of sigmoid scores
    ValueError: router_topk_grad: pre_softmax must be False unless score_function is softmax, got True with 'sigmoid'; pass normalize=False for scores that are not renormalised
  softmax that is not normalised
    ValueError: router_topk_grad: normalize must be True for a softmax over the chosen logits, got False; pass pre_softmax=True for the softmax over all experts
  unknown probs
    ValueError: router_topk_grad: probs must be one of dense, topk, got 'list'; choose one
  chosen of a bad dtype
    TypeError: router_topk_grad: chosen must be int32, got int64; pass the forward's
  chosen of other rows
    ValueError: router_topk_grad: chosen must be [T, K] with T = 6 rows and K from 1 to 8, got shape [5, 2]; pass the forward's
  chosen, transposed
    ValueError: router_topk_grad: chosen must be contiguous, got strides [1, 6]; pass the forward's
  gradient of other probs
    ValueError: router_topk_grad: grad_probs must have shape [6, 8], got [6, 2]; pass the forward's, or its gradient
  gradient of a bad dtype
    TypeError: router_topk_grad: grad_probs must be float32, got bfloat16; pass the forward's, or its gradient
thdops::router_scores(Tensor logits, Tensor? padding_mask, SymInt topk, str score_function, str routing_format="mask") -> (Tensor scores, Tensor routing)
  logits of rank 3
    ValueError: router_scores: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router_scores: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router_scores: logits must have at least one column, got shape [6, 0]; pass one column per expert
  topk 0
    ValueError: router_scores: topk must be from 1 to the number of experts (8), got 0; pass another
  topk 9
    ValueError: router_scores: topk must be from 1 to the number of experts (8), got 9; pass another
  unknown score_function
    ValueError: router_scores: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  indices
    ValueError: router_scores: routing must be mask or bitmap, got 'indices'; call router_topk, which orders them
  unknown routing
    ValueError: router_scores: routing must be one of mask, indices, bitmap, got 'list'; choose one
  mask of integers
    TypeError: router_scores: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of shape [5]
    ValueError: router_scores: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
  mask of shape [6, 1]
    ValueError: router_scores: padding_mask must be [T] with one entry per row of logits (6), got shape [6, 1]; flatten it like the rows of logits
thdops::router_scores_grad(Tensor grad_scores, Tensor logits, Tensor? padding_mask, str score_function) -> Tensor
  logits of rank 3
    ValueError: router_scores_grad: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router_scores_grad: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router_scores_grad: logits must have at least one column, got shape [6, 0]; pass one column per expert
  unknown score_function
    ValueError: router_scores_grad: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  gradient of other scores
    ValueError: router_scores_grad: grad_scores must have shape [6, 8], got [6, 7]; pass the forward's, or its gradient
  gradient of a bad dtype
    TypeError: router_scores_grad: grad_scores must be float32, got float16; pass the forward's, or its gradient
  mask of integers
    TypeError: router_scores_grad: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of shape [5]
    ValueError: router_scores_grad: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
  mask of shape [6, 1]
    ValueError: router_scores_grad: padding_mask must be [T] with one entry per row of logits (6), got shape [6, 1]; flatten it like the rows of logits
thdops::router(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, Tensor? cu_seqlens, Tensor? cu_seqlens_padded, Tensor? total_num_tokens_tensor, Tensor? aux_coeff_tensor, Tensor? z_coeff_tensor, SymInt topk, str score_function, bool pre_softmax, bool normalize, SymInt? num_groups, SymInt? group_topk, float? scaling_factor, str probs_format, str routing_format, ScalarType index_dtype, str pad_routing, SymInt pad_index, str aux_score_function, str reduction, SymInt? total_num_tokens=None, float? aux_coeff=None, float? z_coeff=None) -> (Tensor probs, Tensor routing, Tensor chosen, Tensor tokens_per_expert, Tensor aux_loss, Tensor z_loss, Tensor score_sums, Tensor counts, Tensor z_sum, Tensor num_tokens, Tensor coefficients)
  logits of rank 3
    ValueError: router: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router: logits must have at least one column, got shape [6, 0]; pass one column per expert
  topk 0
    ValueError: router: topk must be from 1 to the number of experts (8), got 0; pass another
  topk 9
    ValueError: router: topk must be from 1 to the number of experts (8), got 9; pass another
  unknown score_function
    ValueError: router: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  pre_softmax of sigmoid scores
    ValueError: router: pre_softmax must be False unless score_function is softmax, got True with 'sigmoid'; pass normalize=False for scores that are not renormalised
  softmax that is not normalised
    ValueError: router: normalize must be True for a softmax over the chosen logits, got False; pass pre_softmax=True for the softmax over all experts
  bias of a softmax
    ValueError: router: expert_bias must be None with score_function 'softmax', got a tensor; a bias is added to sigmoid or sqrtsoftplus scores
  bias of another length
    ValueError: router: expert_bias must be [E] with one entry per expert (8), got shape [4]; pass one number per column of logits
  bias of integers
    TypeError: router: expert_bias must be float32 or bfloat16 or float16, got int64 on cpu; cast it
  groups without group_topk
    ValueError: router: group_topk must be given where num_groups is, got None; pass both or neither
  group_topk without groups
    ValueError: router: num_groups must be given where group_topk is, got None; pass both or neither
  groups that do not divide the experts
    ValueError: router: num_groups must divide the number of experts (8), got 3; groups are equally large
  more groups chosen than there are
    ValueError: router: group_topk must be from 1 to num_groups (4), got 5; pass another
  topk that groups do not divide
    ValueError: router: topk must be a multiple of group_topk (2), got 3; a group is ranked by its topk / group_topk best experts
  more experts than the groups hold
    ValueError: router: topk must be at most the experts of 2 groups (4), got 6; choose more groups
  unknown probs
    ValueError: router: probs must be one of dense, topk, got 'list'; choose one
  unknown routing
    ValueError: router: routing must be one of mask, indices, bitmap, got 'list'; choose one
  unknown pad_routing
    ValueError: router: pad_routing must be one of nowhere, keep, got 'list'; choose one
  bitmap beside probs in order
    ValueError: router: routing must have an order with probs='topk', got 'bitmap'; pass routing='indices', or probs='dense'
  index_dtype uint8
    TypeError: router: index_dtype must be int16 or int32 or int64, got uint8; pass one of these
  more experts than int16 holds
    ValueError: router: index_dtype must hold 32768 experts, got int16; pass torch.int32
  pad_index that is an expert
    ValueError: router: pad_index must be -1 or the number of experts (8), got 7; choose one
  mask of integers
    TypeError: router: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of shape [5]
    ValueError: router: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
  mask of shape [6, 1]
    ValueError: router: padding_mask must be [T] with one entry per row of logits (6), got shape [6, 1]; flatten it like the rows of logits
  unknown aux_score_function
    ValueError: router: aux_score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  unknown reduction
    ValueError: router: reduction must be one of mean, sum, got 'none'; choose one
  padded offsets alone
    ValueError: router: cu_seqlens_padded must come with cu_seqlens, got it alone; pass both or neither
  float cu_seqlens
    TypeError: router: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  padded offsets of another length
    ValueError: router: cu_seqlens_padded must have as many entries as cu_seqlens (3), got 2; pass B+1 offsets in both
  a count of the batch and sequences
    ValueError: router: total_num_tokens must be None where cu_seqlens is given, got both; leave it out: each sequence counts its own rows
  negative count
    ValueError: router: total_num_tokens must be at least 0, got -1; pass a larger one
  count of a bad dtype
    TypeError: router: total_num_tokens must be int32 or int64 or float32, got bool; cast it
  aux_coeff of a bad dtype
    TypeError: router: aux_coeff must be float32, got bfloat16; cast it
  several aux_coeff
    ValueError: router: aux_coeff must have one element, got shape [2]; pass a 0-d tensor
  two of aux_coeff
    ValueError: router: aux_coeff must be given either as aux_coeff (a float) or as aux_coeff_tensor, got both; pass exactly one and None for the other
  z_coeff of a bad dtype
    TypeError: router: z_coeff must be float32, got bfloat16; cast it
  several z_coeff
    ValueError: router: z_coeff must have one element, got shape [2]; pass a 0-d tensor
  two of z_coeff
    ValueError: router: z_coeff must be given either as z_coeff (a float) or as z_coeff_tensor, got both; pass exactly one and None for the other
thdops::router_grad(Tensor logits, Tensor chosen, Tensor? grad_probs, Tensor? grad_aux, Tensor? grad_z, Tensor? grad_score_sums, Tensor? grad_z_sum, Tensor counts, Tensor coefficients, Tensor? padding_mask, Tensor? cu_seqlens, Tensor? cu_seqlens_padded, str score_function, bool pre_softmax, bool normalize, float? scaling_factor, str probs_format, str aux_score_function) -> Tensor
  logits of rank 3
    ValueError: router_grad: logits must have 2 dimensions [T, E], got shape [2, 3, 8]; reshape it
  integer logits
    TypeError: router_grad: logits must be float32 or bfloat16 or float16, got int32 on cpu; cast it
  no expert
    ValueError: router_grad: logits must have at least one column, got shape [6, 0]; pass one column per expert
  unknown score_function
    ValueError: router_grad: score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  pre_softmax of sigmoid scores
    ValueError: router_grad: pre_softmax must be False unless score_function is softmax, got True with 'sigmoid'; pass normalize=False for scores that are not renormalised
  softmax that is not normalised
    ValueError: router_grad: normalize must be True for a softmax over the chosen logits, got False; pass pre_softmax=True for the softmax over all experts
  unknown aux_score_function
    ValueError: router_grad: aux_score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'; choose one
  unknown probs
    ValueError: router_grad: probs must be one of dense, topk, got 'list'; choose one
  chosen of a bad dtype
    TypeError: router_grad: chosen must be int32, got int64; pass the forward's
  chosen of other rows
    ValueError: router_grad: chosen must be [T, K] with T = 6 rows and K from 1 to 8, got shape [5, 2]; pass the forward's
  chosen, transposed
    ValueError: router_grad: chosen must be contiguous, got strides [1, 6]; pass the forward's
  mask of integers
    TypeError: router_grad: padding_mask must be bool, True on padding rows, got int64; cast it with .bool()
  mask of shape [5]
    ValueError: router_grad: padding_mask must be [T] with one entry per row of logits (6), got shape [5]; flatten it like the rows of logits
  mask of shape [6, 1]
    ValueError: router_grad: padding_mask must be [T] with one entry per row of logits (6), got shape [6, 1]; flatten it like the rows of logits
  padded offsets alone
    ValueError: router_grad: cu_seqlens_padded must come with cu_seqlens, got it alone; pass both or neither
  float cu_seqlens
    TypeError: router_grad: cu_seqlens must be int32 or int64, got float32; cast it, for example with .to(torch.int32)
  padded offsets of another length
    ValueError: router_grad: cu_seqlens_padded must have as many entries as cu_seqlens (3), got 2; pass B+1 offsets in both
  gradient of other probs
    ValueError: router_grad: grad_probs must have shape [6, 8], got [6, 2]; pass the forward's, or its gradient
  gradient of a bad dtype
    TypeError: router_grad: grad_probs must be float32, got bfloat16; pass the forward's, or its gradient
  gradient of another loss
    ValueError: router_grad: grad_aux must have shape [], got [1]; pass the forward's, or its gradient
  coefficients of sequences
    ValueError: router_grad: coefficients must have shape [2], got [3]; pass the forward's, or its gradient
  counts of a bad dtype
    TypeError: router_grad: counts must be int64, got int32; pass the forward's, or its gradient
""",
    )


def test_fakes() -> None:
    assert_expected_inline(
        fakes(),
        """\
attention
  causal, tail: float32[23, 4, 16], float32[4, 23], float32[0]
  every row valid: float32[16, 4, 16], float32[4, 16], float32[0]
  MQA, gaps and tail, int64: float32[25, 4, 16], float32[4, 25], float32[0]
  one head per key head, empty sequences: float32[17, 2, 16], float32[2, 17], float32[0]
  slices of one fused buffer: float32[25, 4, 16], float32[4, 25], float32[0]
  sliding window, rows before the first: float32[14, 4, 16], float32[4, 14], float32[0]
  window on both sides, fp16: float16[25, 4, 16], float32[4, 25], float32[0]
  no valid row: float32[8, 4, 16], float32[4, 8], float32[0]
  sentinels: float32[16, 4, 16], float32[4, 16], float32[0]
  no sequence: float32[5, 4, 16], float32[4, 5], float32[0]
  bf16, own scale: bfloat16[25, 4, 16], float32[4, 25], float32[0]
  cross attention: float32[15, 4, 16], float32[4, 15], float32[0]
  cross attention, bottom-right causal: float32[15, 4, 16], float32[4, 15], float32[0]
  cross attention, bottom-right window: float32[15, 4, 16], float32[4, 15], float32[0]
  cross attention, bottom-right, bounded on the left: float32[15, 4, 16], float32[4, 15], float32[0]
  cross attention, top-left causal, off by one: float32[15, 4, 16], float32[4, 15], float32[0]
  off by one, no valid row: float32[8, 4, 16], float32[4, 8], float32[0]
  learnable sink, window, bottom-right: float32[15, 4, 16], float32[4, 15], float32[0]
  learnable sink, bf16: bfloat16[25, 4, 16], float32[4, 25], float32[0]
  MLA 24/16: float32[25, 4, 16], float32[4, 25], float32[0]
  MLA 16/24, softcap: float32[17, 4, 24], float32[4, 17], float32[0]
  softcap, max_logit, fp16: float16[23, 4, 16], float32[4, 23], float32[4]
  max_logit, bottom-right: float32[15, 4, 16], float32[4, 15], float32[4]
  max_logit, no valid row: float32[8, 4, 16], float32[4, 8], float32[4]
  fp32, sink, softcap, window: float32[16, 4, 16], float32[4, 16], float32[0]
attention_grad
  causal, tail: float32[23, 4, 16], float32[23, 2, 16], float32[23, 2, 16], float32[0]
  every row valid: float32[16, 4, 16], float32[16, 2, 16], float32[16, 2, 16], float32[0]
  MQA, gaps and tail, int64: float32[25, 4, 16], float32[25, 1, 16], float32[25, 1, 16], float32[0]
  one head per key head, empty sequences: float32[17, 2, 16], float32[17, 2, 16], float32[17, 2, 16], float32[0]
  slices of one fused buffer: float32[25, 4, 16], float32[25, 2, 16], float32[25, 2, 16], float32[0]
  sliding window, rows before the first: float32[14, 4, 16], float32[14, 2, 16], float32[14, 2, 16], float32[0]
  window on both sides, fp16: float16[25, 4, 16], float16[25, 2, 16], float16[25, 2, 16], float32[0]
  no valid row: float32[8, 4, 16], float32[8, 2, 16], float32[8, 2, 16], float32[0]
  sentinels: float32[16, 4, 16], float32[16, 2, 16], float32[16, 2, 16], float32[0]
  no sequence: float32[5, 4, 16], float32[5, 2, 16], float32[5, 2, 16], float32[0]
  bf16, own scale: bfloat16[25, 4, 16], bfloat16[25, 2, 16], bfloat16[25, 2, 16], float32[0]
  cross attention: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  cross attention, bottom-right causal: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  cross attention, bottom-right window: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  cross attention, bottom-right, bounded on the left: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  cross attention, top-left causal, off by one: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  off by one, no valid row: float32[8, 4, 16], float32[8, 2, 16], float32[8, 2, 16], float32[0]
  learnable sink, window, bottom-right: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[4]
  learnable sink, bf16: bfloat16[25, 4, 16], bfloat16[25, 2, 16], bfloat16[25, 2, 16], float32[4]
  MLA 24/16: float32[25, 4, 24], float32[25, 2, 24], float32[25, 2, 16], float32[0]
  MLA 16/24, softcap: float32[17, 4, 16], float32[17, 2, 16], float32[17, 2, 24], float32[0]
  fp32, sink, softcap, window: float32[16, 4, 16], float32[16, 2, 16], float32[16, 2, 16], float32[4]
partition_indices
  rows of no sequence on both sides, rank 1 of 2, zigzag, torch.int32: int32[18]
  back to back, rank 0 of 2, zigzag, torch.int64: int32[12]
  empty sequences, rank 2 of 4, zigzag, torch.int64: int32[8]
  empty sequences, rank 2 of 3, contiguous, torch.int32: int32[8]
  one sequence, rank 0 of 1, zigzag, torch.int32: int32[14]
  nothing but a tail, rank 1 of 2, zigzag, torch.int32: int32[6]
  no sequence, rank 1 of 2, contiguous, torch.int32: int32[6]
  no row: int32[0]
local_cu_seqlens
  rows of no sequence on both sides, rank 1 of 2, both, zigzag, torch.int32: int32[5], int32[5]
  rows of no sequence on both sides, rank 1 of 2, second, zigzag, torch.int64: int64[5], int64[5]
  back to back, rank 0 of 2, first, zigzag, torch.int32: int32[4], int32[4]
  empty sequences, rank 3 of 4, both, contiguous, torch.int64: int64[7], int64[7]
  empty sequences, rank 0 of 4, second, contiguous, torch.int32: int32[7], int32[7]
  one sequence, rank 0 of 1, second, zigzag, torch.int32: int32[2], int32[2]
  nothing but a tail, rank 1 of 2, both, zigzag, torch.int32: int32[3], int32[3]
  no sequence, rank 0 of 2, first, zigzag, torch.int32: int32[1], int32[1]
  no padded offsets, first above 0: int32[3], int32[3]
to_rank_order
  fp32 [T, D], rows of no sequence on both sides, W = 2, zigzag: float32[36, 16]
  fp32 [T, D], other sizes, back to back, W = 3, zigzag: float32[36, 24]
  bf16 slice of a fused [T, 3, H, D], rows of no sequence on both sides, W = 2, contiguous: bfloat16[36, 2, 8]
  fp16, columns of a wider tensor, empty sequences, W = 4, zigzag: float16[32, 7]
  fp32 transposed, empty sequences, W = 2, contiguous: float32[16, 5]
  bf16, every other row, one sequence, W = 2, zigzag: bfloat16[28, 3]
  fp32 expanded, nothing but a tail, W = 2, zigzag: float32[12, 4]
  fp8 e4m3fn, width 5, rows of no sequence on both sides, W = 1, zigzag: float8_e4m3fn[18, 5]
  int64 [T], no sequence, W = 2, zigzag: int64[12]
  bool, rows of no sequence on both sides, W = 2, zigzag: bool[36, 7]
  zero width, rows of no sequence on both sides, W = 2, zigzag: float32[36, 0]
  no row: float32[0, 4]
from_rank_order
  fp32 [T, D], rows of no sequence on both sides, W = 2, zigzag: float32[36, 16]
  fp32 [T, D], other sizes, back to back, W = 3, zigzag: float32[36, 24]
  bf16 slice of a fused [T, 3, H, D], rows of no sequence on both sides, W = 2, contiguous: bfloat16[36, 2, 8]
  fp16, columns of a wider tensor, empty sequences, W = 4, zigzag: float16[32, 7]
  fp32 transposed, empty sequences, W = 2, contiguous: float32[16, 5]
  bf16, every other row, one sequence, W = 2, zigzag: bfloat16[28, 3]
  fp32 expanded, nothing but a tail, W = 2, zigzag: float32[12, 4]
  fp8 e4m3fn, width 5, rows of no sequence on both sides, W = 1, zigzag: float8_e4m3fn[18, 5]
  int64 [T], no sequence, W = 2, zigzag: int64[12]
  bool, rows of no sequence on both sides, W = 2, zigzag: bool[36, 7]
  zero width, rows of no sequence on both sides, W = 2, zigzag: float32[36, 0]
  no row: float32[0, 4]
half
  fp32 [T, H, D], rows of no sequence on both sides, second: float32[9, 4, 8]
  fp32 [T, H, D], other sizes, back to back, second: float32[18, 3, 16]
  LSE, rows of no sequence on both sides, second: float32[3, 9]
  LSE, from [T, H], empty sequences, first: float32[3, 4]
  fp16 [2, T, D], odd halves, empty sequences, second: float16[2, 4, 5]
  bf16 slice of a fused [T, H, 3, D], rows of no sequence on both sides, first: bfloat16[9, 2, 8]
  fp32 expanded, one sequence, first: float32[7, 4]
  fp8 e5m2, width 5, nothing but a tail, second: float8_e5m2[3, 5]
  int32 [T], no sequence, second: int32[6]
  bool, rows of no sequence on both sides, second: bool[9, 3]
  zero width, rows of no sequence on both sides, first: float32[9, 0]
  no row: float32[0, 4]
from_half
  fp32 [T, H, D], rows of no sequence on both sides, second: float32[18, 4, 8]
  fp32 [T, H, D], other sizes, back to back, second: float32[36, 3, 16]
  LSE, rows of no sequence on both sides, second: float32[3, 18]
  LSE, from [T, H], empty sequences, first: float32[3, 8]
  fp16 [2, T, D], odd halves, empty sequences, second: float16[2, 8, 5]
  bf16 slice of a fused [T, H, 3, D], rows of no sequence on both sides, first: bfloat16[18, 2, 8]
  fp32 expanded, one sequence, first: float32[14, 4]
  fp8 e5m2, width 5, nothing but a tail, second: float8_e5m2[6, 5]
  int32 [T], no sequence, second: int32[12]
  bool, rows of no sequence on both sides, second: bool[18, 3]
  zero width, rows of no sequence on both sides, first: float32[18, 0]
  no row: float32[0, 4]
context_attention
  ring, causal: float32[64, 4, 16], float32[4, 64], float32[4]
  ring, full: float16[40, 4, 16], float32[4, 40], float32[0]
  ring, causal, other sizes: float32[40, 4, 16], float32[4, 40], float32[4]
  ring, contiguous, sink: float32[64, 4, 16], float32[4, 64], float32[0]
  ring, MLA: bfloat16[32, 4, 16], float32[4, 32], float32[0]
  ring of one: float32[64, 4, 16], float32[4, 64], float32[0]
  gathered, causal: float32[64, 4, 16], float32[4, 64], float32[0]
  gathered, window: float32[40, 4, 16], float32[4, 40], float32[4]
  gathered, full: bfloat16[24, 4, 16], float32[4, 24], float32[0]
  heads, sink: float32[64, 4, 16], float32[4, 64], float32[4]
  heads, window, softcap: float32[40, 4, 16], float32[4, 40], float32[0]
  heads and ring: float32[64, 4, 16], float32[4, 64], float32[4]
  no valid row: float32[32, 4, 16], float32[4, 32], float32[0]
  no sequence: float32[8, 4, 16], float32[4, 8], float32[0]
  no row: float32[0, 4, 16], float32[4, 0], float32[0]
  fp64: float64[64, 4, 16], float64[4, 64], float64[4]
context_attention_grad
  ring, causal: float32[64, 4, 16], float32[64, 2, 16], float32[64, 2, 16], float32[0]
  ring, full: float16[40, 4, 16], float16[40, 4, 16], float16[40, 4, 16], float32[0]
  ring, causal, other sizes: float32[40, 4, 16], float32[40, 2, 16], float32[40, 2, 16], float32[0]
  ring, contiguous, sink: float32[64, 4, 16], float32[64, 4, 16], float32[64, 4, 16], float32[4]
  ring, MLA: bfloat16[32, 4, 24], bfloat16[32, 4, 24], bfloat16[32, 4, 16], float32[0]
  ring of one: float32[64, 4, 16], float32[64, 4, 16], float32[64, 4, 16], float32[0]
  gathered, causal: float32[64, 4, 16], float32[64, 2, 16], float32[64, 2, 16], float32[0]
  gathered, window: float32[40, 4, 16], float32[40, 4, 16], float32[40, 4, 16], float32[0]
  gathered, full: bfloat16[24, 4, 16], bfloat16[24, 4, 16], bfloat16[24, 4, 16], float32[0]
  heads, sink: float32[64, 4, 16], float32[64, 4, 16], float32[64, 4, 16], float32[4]
  heads, window, softcap: float32[40, 4, 16], float32[40, 4, 16], float32[40, 4, 16], float32[0]
  heads and ring: float32[64, 4, 16], float32[64, 4, 16], float32[64, 4, 16], float32[4]
  no valid row: float32[32, 4, 16], float32[32, 4, 16], float32[32, 4, 16], float32[0]
  no sequence: float32[8, 4, 16], float32[8, 4, 16], float32[8, 4, 16], float32[0]
  no row: float32[0, 4, 16], float32[0, 4, 16], float32[0, 4, 16], float32[0]
  fp64: float64[64, 4, 16], float64[64, 2, 16], float64[64, 2, 16], float32[0]
attach_loss_grad
  fp32: float32[]
  bfloat16 scale, float32 loss: float32[]
  float16 scale, bfloat16 loss: bfloat16[]
  float32 scale, float16 loss: float16[]
  one element: float32[]
  the third of several scales: float32[]
  more rows: float32[]
  no row: float32[]
moe_aux_loss
  int count: float32[], float32[]
  int64 count, coefficient and mask on the device: float32[], float32[]
  int32 count, int32 tokens: float32[], float32[]
  float32 count of one element, float tokens: float32[], float32[]
  bfloat16, strided tokens per expert: float32[], float32[]
  float16, strided tokens per expert: float32[], float32[]
  float32, strided tokens per expert: float32[], float32[]
  folded sequences, one mask for all: float32[], float32[]
  folded sequences, a mask each: float32[], float32[]
  transposed probs, transposed mask: float32[], float32[]
  sliced columns: float32[], float32[]
  every second row and column: float32[], float32[]
  expanded row: float32[], float32[]
  count 0: float32[], float32[]
  no row: float32[], float32[]
  one expert: float32[], float32[]
  wider than a block: float32[], float32[]
  columns no power of two: float32[], float32[]
moe_aux_loss_grad
  no mask: float32[37, 8]
  mask: float32[13, 8]
  folded sequences, a mask each: float32[13, 12]
  bfloat16, strided tokens per expert: bfloat16[13, 8]
  float16, strided tokens per expert: float16[13, 8]
  one element each: float32[3, 8]
  coefficient 0: float32[9, 8]
  no row: float32[0, 8]
  one expert: float32[5, 1]
  wider than a block: float32[3, 1536]
tokens_per_expert
  mask, padding: int64[16]
  mask, padding, other sizes: int64[8]
  mask, num_experts given: int64[16]
  mask, columns no multiple of four: int64[10]
  transposed mask, strided padding: int64[16]
  every second column of a mask: int64[16]
  indices, torch.int16: int64[16]
  indices, torch.int32: int64[16]
  indices, torch.int64: int64[16]
  transposed indices: int64[16]
  an id twice in a row: int64[16]
  bitmap of 16 experts: int64[16]
  bitmap of 20 experts: int64[20]
  bitmap of 32 experts: int64[32]
  bitmap whose spare bits are set: int64[12]
  transposed bitmap: int64[20]
  nothing but padding: int64[16]
  no row: int64[16]
  one expert: int64[1]
  wider than a block: int64[600]
  indices of more experts than a block: int64[600]
moe_z_loss
  float coefficient: float32[], float32[], float32[40]
  float coefficient, other sizes: float32[], float32[], float32[21]
  coefficient and mask on the device, experts out of reach: float32[], float32[], float32[19]
  torch.bfloat16, strided mask: float32[], float32[], float32[19]
  torch.float16, strided mask: float32[], float32[], float32[19]
  transposed: float32[], float32[], float32[19]
  sliced columns: float32[], float32[], float32[19]
  every second row and column: float32[], float32[], float32[19]
  expanded row: float32[], float32[], float32[9]
  large logits: float32[], float32[], float32[9]
  coefficient 0: float32[], float32[], float32[9]
  nothing but padding: float32[], float32[], float32[5]
  no row: float32[], float32[], float32[0]
  one expert: float32[], float32[], float32[5]
  wider than a block: float32[], float32[], float32[2]
moe_z_loss_grad
  no padding: float32[40, 8]
  padding, experts out of reach: float32[19, 12]
  torch.bfloat16: bfloat16[19, 12]
  torch.float16: float16[19, 12]
  transposed, strided lse, one element each: float32[19, 12]
  sliced columns: float32[19, 12]
  expanded row: float32[9, 8]
  factor 0: float32[9, 8]
  no row: float32[0, 8]
  one expert: float32[5, 1]
  wider than a block: float32[2, 4100]
moe_seq_aux_loss
  mask, gaps and tail: float32[], float32[4, 8], float32[]
  mask, empty sequences: float32[], float32[6, 12], float32[]
  indices, sentinels, coefficient on the device, a loss each: float32[32], float32[32, 8], float32[]
  bitmap, tail, torch.bfloat16: float32[], float32[3, 20], float32[]
  bitmap, tail, torch.float16: float32[], float32[3, 20], float32[]
  transposed: float32[], float32[4, 8], float32[]
  sliced columns: float32[4], float32[4, 12], float32[]
  rows before the first: float32[], float32[2, 8], float32[]
  no valid row: float32[], float32[2, 8], float32[]
  no sequence: float32[], float32[0, 8], float32[]
  coefficient 0: float32[], float32[4, 8], float32[]
  no row: float32[], float32[4, 8], float32[]
  one expert: float32[], float32[4, 1], float32[]
  wider than a block: float32[], float32[4, 300], float32[]
moe_seq_aux_loss_grad
  mask, gaps and tail: float32[25, 8]
  mask, empty sequences: float32[17, 12]
  indices, sentinels, coefficient on the device, a loss each: float32[16, 8]
  bitmap, tail, torch.bfloat16: bfloat16[23, 20]
  bitmap, tail, torch.float16: float16[23, 20]
  rows before the first: float32[14, 8]
  no valid row: float32[8, 8]
  no sequence: float32[5, 8]
  coefficient 0: float32[25, 8]
  no row: float32[0, 8]
  one expert: float32[25, 1]
  wider than a block: float32[25, 300]
  strided gradient, transposed slopes: float32[25, 8]
  a gradient of 0: float32[25, 8]
expert_bias_update
  one layer, float rate: float32[12]
  one layer, other sizes: float32[8]
  layers, int32 counts, rate on the device: float32[3, 8]
  torch.bfloat16, float counts: bfloat16[2, 12]
  torch.float16, float counts: float16[2, 12]
  transposed: float32[6, 8]
  every second expert: float32[2, 8]
  no layer: float32[0, 8]
  one expert: float32[1, 1]
  wider than a block: float32[2, 1100]
permute_tokens
  fp32: float32[48, 24], int32[6], int32[16, 3]
  fp32, other sizes: float32[26, 20], int32[5], int32[13, 2]
  bf16 [T, H, D], int32: bfloat16[40, 2, 8], int32[8], int32[10, 4]
  fp16 slice, int16, one choice: float16[12, 5], int32[3], int32[12, 1]
  fp32 transposed, one expert: float32[22, 8], int32[1], int32[11, 2]
  fp32 expanded, more experts than pairs: float32[10, 6], int32[40], int32[5, 2]
  several chunks of pairs: float32[1080, 4], int32[7], int32[270, 4]
  every pair has an expert: float32[18, 130], int32[4], int32[9, 2]
  every other row and column: float32[14, 6], int32[4], int32[7, 2]
  float8_e4m3fn, width 5: float8_e4m3fn[14, 5], int32[4], int32[7, 2]
  int8, width 5: int8[14, 5], int32[4], int32[7, 2]
  bool, width 5: bool[14, 5], int32[4], int32[7, 2]
  int64 [T]: int64[33], int32[4], int32[11, 3]
  zero width: float32[10, 0], int32[4], int32[5, 2]
  no token: float32[0, 8], int32[4], int32[0, 2]
unpermute_tokens
  fp32: float32[16, 24]
  fp32, other sizes: float32[13, 20]
  bf16 [T, H, D], no weights: bfloat16[10, 2, 8]
  bf16, fp32 weights: bfloat16[10, 130]
  fp32, bf16 weights, transposed: float32[11, 6]
  fp16 slice, one choice: float16[12, 5]
  more choices than are in flight: float32[5, 7]
  every pair has an expert: float32[9, 16]
  [T*K], every other element: float32[7]
  expanded rows and weights: float32[5, 6]
  zero width: float32[5, 0]
  no row: float32[0, 8]
unpermute_tokens_grad
  fp32: float32[48, 24], float32[16, 3]
  fp32, other sizes: float32[26, 20], float32[13, 2]
  bf16 [T, H, D], no weights: bfloat16[40, 2, 8], bfloat16[0]
  bf16, fp32 weights: bfloat16[30, 130], float32[10, 3]
  fp32, bf16 weights, transposed: float32[22, 6], bfloat16[11, 2]
  fp16 slice, one choice: float16[12, 5], float16[12, 1]
  more choices than are in flight: float32[60, 7], float32[5, 12]
  every pair has an expert: float32[18, 16], float32[9, 2]
  [T*K], every other element: float32[28], float32[7, 4]
  expanded rows and weights: float32[10, 6], float32[5, 2]
  zero width: float32[10, 0], float32[5, 2]
  weights without a gradient: float32[18, 16], float32[0]
  transposed gradient: float32[18, 5], float32[9, 2]
  expanded gradient: float32[18, 5], float32[9, 2]
  no row: float32[0, 8], float32[0, 2]
merge_attention
  fp32: float32[19, 3, 16], float32[3, 19]
  bf16, other sizes: bfloat16[22, 4, 24], float32[4, 22]
  fp16, odd head dim: float16[9, 2, 5], float32[2, 9]
  fp32 so far, bf16 added: float32[19, 2, 16], float32[2, 19]
  fp32 so far, bf16 added and wanted: bfloat16[19, 2, 16], float32[2, 19]
  bf16 parts, fp32 wanted: float32[19, 2, 16], float32[2, 19]
  wider than a block: float32[5, 2, 264], float32[2, 5]
  many rows, one head: float32[300, 1, 8], float32[1, 300]
  no row: float32[0, 2, 16], float32[2, 0]
  no head: float32[6, 0, 16], float32[0, 6]
  sliced rows and heads, an LSE stored [T, H]: float32[9, 3, 16], float32[3, 9]
  slices of one buffer: float32[18, 4, 16], float32[4, 18]
  expanded: float32[18, 4, 16], float32[4, 18]
  fp64: float64[7, 2, 16], float64[2, 7]
merge_attention_grad
  fp32: float32[19, 3, 16], float32[3, 19], float32[19, 3, 16], float32[3, 19]
  bf16, other sizes: bfloat16[22, 4, 24], float32[4, 22], bfloat16[22, 4, 24], float32[4, 22]
  fp16, odd head dim: float16[9, 2, 5], float32[2, 9], float16[9, 2, 5], float32[2, 9]
  fp32 so far, bf16 added: float32[19, 2, 16], float32[2, 19], bfloat16[19, 2, 16], float32[2, 19]
  fp32 so far, bf16 added and wanted: float32[19, 2, 16], float32[2, 19], bfloat16[19, 2, 16], float32[2, 19]
  bf16 parts, fp32 wanted: bfloat16[19, 2, 16], float32[2, 19], bfloat16[19, 2, 16], float32[2, 19]
  wider than a block: float32[5, 2, 264], float32[2, 5], float32[5, 2, 264], float32[2, 5]
  many rows, one head: float32[300, 1, 8], float32[1, 300], float32[300, 1, 8], float32[1, 300]
  no row: float32[0, 2, 16], float32[2, 0], float32[0, 2, 16], float32[2, 0]
  no head: float32[6, 0, 16], float32[0, 6], float32[6, 0, 16], float32[0, 6]
  sliced rows and heads, an LSE stored [T, H]: float32[9, 3, 16], float32[3, 9], float32[9, 3, 16], float32[3, 9]
  slices of one buffer: float32[18, 4, 16], float32[4, 18], float32[18, 4, 16], float32[4, 18]
  expanded: float32[18, 4, 16], float32[4, 18], float32[18, 4, 16], float32[4, 18]
zero_fill
  fp32 [T], no padding: float32[16]
  fp32 [T, D], tail: float32[23, 16]
  fp32 [T, D], tail, other sizes: float32[31, 24]
  bf16 slice of a fused [T, 3, H, D]: bfloat16[25, 2, 8]
  fp32 slice of a fused [T, H, 3, D]: float32[25, 2, 8]
  fp32 transposed: float32[25, 5]
  fp16, columns of a wider tensor: float16[17, 7]
  bf16, every other row: bfloat16[14, 3]
  fp32 expanded, no valid row: float32[8, 4]
  fp8 e4m3fn, width 5: float8_e4m3fn[16, 5]
  fp8 e5m2 [T, H, D]: float8_e5m2[16, 2, 16]
  int8, width 3: int8[16, 3]
  int64 [T], no sequence: int64[5]
  bool: bool[23, 7]
  zero width: float32[23, 0]
  no row: float32[0, 4]
zero_fill_
  one fp32 [T, D], tail: nothing
  one fp32 [T, D], tail, other sizes: nothing
  dQ, dK, dV, one cu_seqlens for all: nothing
  slices of one fused [T, 3, H, D]: nothing
  slices of one fused [T, H, 3, D]: nothing
  one cu_seqlens per tensor: nothing
  every width and dtype: nothing
  transposed, every other row, columns of a wider tensor: nothing
  nothing to write: nothing
  no valid row: nothing
  no sequence: nothing
  no row: nothing
padding_mask
  full, torch.int32: bool[16]
  tail, torch.int64: bool[23]
  gaps and tail, torch.int32: bool[25]
  empty sequences, torch.int64: bool[17]
  rows before the first, torch.int32: bool[14]
  no valid row, torch.int32: bool[8]
  sentinels, torch.int64: bool[16]
  no sequence, torch.int32: bool[5]
  first offset above 0, no padded offsets: bool[12]
  no row: bool[0]
sequence_ids
  full, torch.int32: int32[16]
  tail, torch.int64: int32[23]
  gaps and tail, torch.int32: int32[25]
  empty sequences, torch.int64: int32[17]
  rows before the first, torch.int32: int32[14]
  no valid row, torch.int32: int32[8]
  sentinels, torch.int64: int32[16]
  no sequence, torch.int32: int32[5]
  first offset above 0, no padded offsets: int32[12]
  no row: int32[0]
positions
  full, torch.int32: int32[16]
  tail, torch.int64: int32[23]
  gaps and tail, torch.int32: int32[25]
  empty sequences, torch.int64: int32[17]
  rows before the first, torch.int32: int32[14]
  no valid row, torch.int32: int32[8]
  sentinels, torch.int64: int32[16]
  no sequence, torch.int32: int32[5]
  first offset above 0, no padded offsets: int32[12]
  no row: int32[0]
  rank 0 of 2: int32[12]
  rank 1 of 2: int32[12]
  rank 2 of 4: int32[12]
compact_rows
  full, torch.int32: int32[16], int32[16]
  tail, torch.int64: int32[23], int32[23]
  gaps and tail, torch.int32: int32[25], int32[25]
  empty sequences, torch.int64: int32[17], int32[17]
  rows before the first, torch.int32: int32[14], int32[14]
  no valid row, torch.int32: int32[8], int32[8]
  sentinels, torch.int64: int32[16], int32[16]
  no sequence, torch.int32: int32[5], int32[5]
  first offset above 0, no padded offsets: int32[12], int32[12]
  no row: int32[0], int32[0]
cu_seqlens_from_positions
  three sequences and a tail: int32[5]
  as many sequences as fit, int64: int32[4]
  more sequences than fit: int32[3]
  first row continues a sequence: int32[9]
  no valid row: int32[3]
  no row: int32[3]
  every other position: int32[4]
  a thousand short sequences: int32[1201]
cu_seqlens_from_lengths
  sentinels: int32[9]
  as many as fit, int64: int32[4]
  negative counts as 0: int32[5]
  no length: int32[4]
  every other length: int32[6]
  more than one block: int32[1601]
slice_cu_seqlens
  gaps and tail, rows 5 to 14: int32[5], int32[5]
  gaps and tail, rows 0 to 25: int32[5], int32[5]
  gaps and tail, rows 2 to 2: int32[5], int32[5]
  gaps and tail, rows 20 to 60: int32[5], int32[5]
  no padded offsets, rows 6 to 14: int64[4], int64[4]
  empty sequences, rows 3 to 9: int64[7], int64[7]
  rows before the first, rows 1 to 7: int32[3], int32[3]
  sentinels, rows 4 to 16: int32[33], int32[33]
  no sequence, rows 1 to 4: int32[1], int32[1]
router_topk
  softmax, dense, mask: float32[16, 8], bool[16, 8], int32[16, 2]
  softmax, dense, mask, other sizes: float32[24, 40], bool[24, 40], int32[24, 3]
  sigmoid, bias, groups, in order, int32: float32[19, 4], int32[19, 4], int32[19, 4]
  sqrtsoftplus, bf16 bias, scaled, bitmap: float32[19, 12], uint8[19, 2], int32[19, 3]
  softmax over all experts, scaled: float32[11, 44], bool[11, 44], int32[11, 6]
  softmax over all experts, in order, int16: float32[19, 3], int16[19, 3], int32[19, 3]
  softmax, groups, bitmap of eighths: float32[9, 16], uint8[9, 2], int32[9, 4]
  sigmoid, not normalised: float32[9, 12], bool[9, 12], int32[9, 3]
  sigmoid, K = 1, fp16 bias: float32[9, 12], bool[9, 12], int32[9, 1]
  sqrtsoftplus, K = 1, fp16 bias: float32[9, 12], bool[9, 12], int32[9, 1]
  groups of one expert: float32[9, 8], bool[9, 8], int32[9, 2]
  one group: float32[9, 8], bool[9, 8], int32[9, 2]
  all experts: float32[7, 5], int64[7, 5], int32[7, 5]
  one expert: float32[5, 1], bool[5, 1], int32[5, 1]
  no row: float32[0, 8], bool[0, 8], int32[0, 2]
  no row, groups, bitmap: float32[0, 12], uint8[0, 2], int32[0, 4]
  scaled by 0: float32[5, 8], bool[5, 8], int32[5, 2]
  many experts, large K: float32[3, 36], int64[3, 36], int32[3, 36]
  bf16, ties: bfloat16[13, 6], int64[13, 6], int32[13, 6]
  bf16, ties of scores and of groups: bfloat16[13, 4], int64[13, 4], int32[13, 4]
  fp32, ties: float32[8, 12], bool[8, 12], int32[8, 5]
  NaN and -inf, softmax: float32[9, 3], int64[9, 3], int32[9, 3]
  NaN and -inf, sigmoid: float32[9, 3], int64[9, 3], int32[9, 3]
  NaN and -inf, sqrtsoftplus: float32[9, 3], int64[9, 3], int32[9, 3]
  NaN and -inf, softmax over all experts: float32[9, 12], bool[9, 12], int32[9, 3]
  NaN and -inf, groups: float32[9, 4], int64[9, 4], int32[9, 4]
  padding is routed: float32[19, 12], int64[19, 3], int32[19, 3]
  fp16, transposed: float16[10, 12], bool[10, 12], int32[10, 3]
  sliced columns, strided bias: float32[10, 12], bool[10, 12], int32[10, 2]
  every second row and column: float32[9, 12], bool[9, 12], int32[9, 3]
  expanded row: float32[6, 8], bool[6, 8], int32[6, 3]
router_topk_grad
  softmax, dense, mask: float32[16, 8]
  softmax, dense, mask, other sizes: float32[24, 40]
  sigmoid, bias, groups, in order, int32: float32[19, 12]
  sqrtsoftplus, bf16 bias, scaled, bitmap: float32[19, 12]
  softmax over all experts, scaled: float32[11, 44]
  softmax over all experts, in order, int16: float32[19, 12]
  softmax, groups, bitmap of eighths: float32[9, 16]
  sigmoid, not normalised: float32[9, 12]
  sigmoid, K = 1, fp16 bias: float32[9, 12]
  sqrtsoftplus, K = 1, fp16 bias: float32[9, 12]
  groups of one expert: float32[9, 8]
  one group: float32[9, 8]
  all experts: float32[7, 5]
  one expert: float32[5, 1]
  no row: float32[0, 8]
  no row, groups, bitmap: float32[0, 12]
  scaled by 0: float32[5, 8]
  many experts, large K: float32[3, 300]
  bf16, ties: bfloat16[13, 20]
  bf16, ties of scores and of groups: bfloat16[13, 24]
  fp32, ties: float32[8, 12]
  NaN and -inf, softmax: float32[9, 12]
  NaN and -inf, sigmoid: float32[9, 12]
  NaN and -inf, sqrtsoftplus: float32[9, 12]
  NaN and -inf, softmax over all experts: float32[9, 12]
  NaN and -inf, groups: float32[9, 12]
  padding is routed: float32[19, 12]
  fp16, transposed: float16[10, 12]
  sliced columns, strided bias: float32[10, 12]
  every second row and column: float32[9, 12]
  expanded row: float32[6, 8]
router_scores
  softmax, mask: float32[16, 8], bool[16, 8]
  softmax, mask, other sizes: float32[24, 40], bool[24, 40]
  sigmoid, bitmap: float32[19, 12], uint8[19, 2]
  sqrtsoftplus, bitmap: float32[9, 44], uint8[9, 6]
  K = 1, softmax: float32[9, 12], bool[9, 12]
  NaN and -inf, softmax: float32[8, 12], bool[8, 12]
  bf16, ties, softmax: float32[13, 20], bool[13, 20]
  K = 1, sigmoid: float32[9, 12], bool[9, 12]
  NaN and -inf, sigmoid: float32[8, 12], bool[8, 12]
  bf16, ties, sigmoid: float32[13, 20], bool[13, 20]
  K = 1, sqrtsoftplus: float32[9, 12], bool[9, 12]
  NaN and -inf, sqrtsoftplus: float32[8, 12], bool[8, 12]
  bf16, ties, sqrtsoftplus: float32[13, 20], bool[13, 20]
  all experts: float32[7, 5], bool[7, 5]
  one expert: float32[5, 1], bool[5, 1]
  no row: float32[0, 8], uint8[0, 1]
  many experts, large K: float32[3, 300], bool[3, 300]
  fp16, transposed: float32[10, 12], bool[10, 12]
  sliced columns, strided mask: float32[10, 12], uint8[10, 2]
  expanded row: float32[6, 8], bool[6, 8]
router_scores_grad
  softmax, mask: float32[16, 8]
  softmax, mask, other sizes: float32[24, 40]
  sigmoid, bitmap: float32[19, 12]
  sqrtsoftplus, bitmap: float32[9, 44]
  K = 1, softmax: float32[9, 12]
  NaN and -inf, softmax: float32[8, 12]
  bf16, ties, softmax: bfloat16[13, 20]
  K = 1, sigmoid: float32[9, 12]
  NaN and -inf, sigmoid: float32[8, 12]
  bf16, ties, sigmoid: bfloat16[13, 20]
  K = 1, sqrtsoftplus: float32[9, 12]
  NaN and -inf, sqrtsoftplus: float32[8, 12]
  bf16, ties, sqrtsoftplus: bfloat16[13, 20]
  all experts: float32[7, 5]
  one expert: float32[5, 1]
  no row: float32[0, 8]
  many experts, large K: float32[3, 300]
  fp16, transposed: float16[10, 12]
  sliced columns, strided mask: float32[10, 12]
  expanded row: float32[6, 8]
router
  softmax, mask: float32[16, 8], bool[16, 8], int32[16, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  softmax, mask, other sizes: float32[24, 40], bool[24, 40], int32[24, 3], int64[40], float32[], float32[], float32[1, 40], int64[1, 40], float32[], int64[1], float32[2]
  sigmoid, bias, sequences and a mask, coefficients on the device: float32[25, 3], int64[25, 3], int32[25, 3], int64[12], float32[], float32[], float32[4, 12], int64[4, 12], float32[], int64[4], float32[5]
  empty sequences, mean: float32[17, 12], bool[17, 12], int32[17, 3], int64[12], float32[], float32[], float32[6, 12], int64[6, 12], float32[], int64[6], float32[7]
  tail, sum: float32[23, 12], bool[23, 12], int32[23, 3], int64[12], float32[], float32[], float32[3, 12], int64[3, 12], float32[], int64[3], float32[4]
  rows before the first, mean: float32[14, 12], bool[14, 12], int32[14, 3], int64[12], float32[], float32[], float32[2, 12], int64[2, 12], float32[], int64[2], float32[3]
  no valid row, mean: float32[8, 12], bool[8, 12], int32[8, 3], int64[12], float32[], float32[], float32[2, 12], int64[2, 12], float32[], int64[2], float32[3]
  sentinels, sum: float32[16, 12], bool[16, 12], int32[16, 3], int64[12], float32[], float32[], float32[32, 12], int64[32, 12], float32[], int64[32], float32[33]
  no sequence, mean: float32[5, 12], bool[5, 12], int32[5, 3], int64[12], float32[], float32[], float32[0, 12], int64[0, 12], float32[], int64[0], float32[1]
  int count: float32[9, 12], bool[9, 12], int32[9, 3], int64[12], float32[], float32[], float32[1, 12], int64[1, 12], float32[], int64[1], float32[2]
  int32 count on the device: float32[16, 8], bool[16, 8], int32[16, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  int64 count on the device: float32[16, 8], bool[16, 8], int32[16, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  float32 count on the device: float32[16, 8], bool[16, 8], int32[16, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  count 0: float32[9, 8], bool[9, 8], int32[9, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  no coefficient: float32[9, 8], bool[9, 8], int32[9, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  sqrtsoftplus, groups, scaled, bitmap: float32[19, 12], uint8[19, 2], int32[19, 4], int64[12], float32[], float32[], float32[1, 12], int64[1, 12], float32[], int64[1], float32[2]
  padding is routed: float32[25, 3], int64[25, 3], int32[25, 3], int64[12], float32[], float32[], float32[4, 12], int64[4, 12], float32[], int64[4], float32[5]
  NaN and -inf: float32[9, 12], bool[9, 12], int32[9, 3], int64[12], float32[], float32[], float32[1, 12], int64[1, 12], float32[], int64[1], float32[2]
  bf16, ties: bfloat16[13, 20], bool[13, 20], int32[13, 6], int64[20], float32[], float32[], float32[1, 20], int64[1, 20], float32[], int64[1], float32[2]
  fp16, K = 1, not normalised: float16[13, 20], bool[13, 20], int32[13, 1], int64[20], float32[], float32[], float32[1, 20], int64[1, 20], float32[], int64[1], float32[2]
  all experts: float32[7, 5], int64[7, 5], int32[7, 5], int64[5], float32[], float32[], float32[1, 5], int64[1, 5], float32[], int64[1], float32[2]
  one expert: float32[5, 1], bool[5, 1], int32[5, 1], int64[1], float32[], float32[], float32[1, 1], int64[1, 1], float32[], int64[1], float32[2]
  no row: float32[0, 8], bool[0, 8], int32[0, 2], int64[8], float32[], float32[], float32[1, 8], int64[1, 8], float32[], int64[1], float32[2]
  many experts, large K: float32[3, 300], bool[3, 300], int32[3, 36], int64[300], float32[], float32[], float32[1, 300], int64[1, 300], float32[], int64[1], float32[2]
  transposed: float32[10, 12], bool[10, 12], int32[10, 3], int64[12], float32[], float32[], float32[1, 12], int64[1, 12], float32[], int64[1], float32[2]
  sliced columns, strided bias: float32[10, 12], bool[10, 12], int32[10, 2], int64[12], float32[], float32[], float32[1, 12], int64[1, 12], float32[], int64[1], float32[2]
router_grad
  softmax, mask: float32[16, 8]
  softmax, mask, other sizes: float32[24, 40]
  sigmoid, bias, sequences and a mask, coefficients on the device: float32[25, 12]
  empty sequences, mean: float32[17, 12]
  tail, sum: float32[23, 12]
  rows before the first, mean: float32[14, 12]
  no valid row, mean: float32[8, 12]
  sentinels, sum: float32[16, 12]
  no sequence, mean: float32[5, 12]
  int count: float32[9, 12]
  int32 count on the device: float32[16, 8]
  int64 count on the device: float32[16, 8]
  float32 count on the device: float32[16, 8]
  count 0: float32[9, 8]
  no coefficient: float32[9, 8]
  sqrtsoftplus, groups, scaled, bitmap: float32[19, 12]
  padding is routed: float32[25, 12]
  NaN and -inf: float32[9, 12]
  bf16, ties: bfloat16[13, 20]
  fp16, K = 1, not normalised: float16[13, 20]
  all experts: float32[7, 5]
  one expert: float32[5, 1]
  no row: float32[0, 8]
  many experts, large K: float32[3, 300]
  transposed: float32[10, 12]
  sliced columns, strided bias: float32[10, 12]
""",
    )
