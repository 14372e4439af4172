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
  a backend without kernels
    ValueError: attention: backend must serve the call, got 'native', which has no kernels in this version of thdops; change the call, or pass backend='reference' (every feature, slow)
  fp32 for torch
    ValueError: attention: backend must serve the call, got 'torch', which runs on CUDA only; change the call, or pass backend='reference' (every feature, slow)
  no fast backend
    ValueError: attention: backend must serve the call, got None, and no fast backend does (native has no kernels in this version of thdops; fa4 has no kernels in this version of thdops; cudnn has no kernels in this version of thdops; torch runs on CUDA only); change the call, or pass backend='reference' (every feature, slow)
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
  a backend without kernels
    ValueError: attention_grad: backend must serve the call, got 'native', which has no kernels in this version of thdops; change the call, or pass backend='reference' (every feature, slow)
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
thdops::permute_tokens(Tensor x, Tensor indices, SymInt num_experts) -> (Tensor rows, Tensor offsets, Tensor map)
  a scalar
    ValueError: permute_tokens: x must have at least one dimension [T, ...], got a 0-d tensor; rows are dimension 0
  a dtype without a zero
    TypeError: permute_tokens: x must have a dtype that can hold 0, got float8_e8m0fnu; this format holds powers of two only
  float ids
    TypeError: permute_tokens: indices must be int16 or int32 or int64, got float32; cast it
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
  softcap, max_logit, fp16: float16[23, 4, 16], float16[23, 2, 16], float16[23, 2, 16], float32[0]
  max_logit, bottom-right: float32[15, 4, 16], float32[18, 2, 16], float32[18, 2, 16], float32[0]
  max_logit, no valid row: float32[8, 4, 16], float32[8, 2, 16], float32[8, 2, 16], float32[0]
  fp32, sink, softcap, window: float32[16, 4, 16], float32[16, 2, 16], float32[16, 2, 16], float32[4]
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
""",
    )
