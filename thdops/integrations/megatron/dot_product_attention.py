"""The module that stands where a Megatron layer has `TEDotProductAttention`.

T rows, B sequences, S rows of each, Hq and Hkv heads of a tensor-parallel rank, Dqk and Dv head dims.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from meta_kernels.context_attention import COMMS
from meta_kernels.contract import check_choice, kind_of, refusal
from thdops import context_parallel
from thdops.context_parallel.groups import place_in
from thdops.integrations.megatron.layouts import OP, Mask, Rows, check_shapes, mask_of, rows_of
from thdops.ops.attention_thd.op import attention

_SOFTMAX = {"vanilla": "vanilla", "off-by-one": "off_by_one", "learnable": "learnable"}


class DotProductAttention(nn.Module):
    """`thdops.attention` behind the constructor and the forward of Megatron-Core's `TEDotProductAttention`.

    Served: packed and padded batches, self- and cross-attention, GQA, MLA (Dqk and Dv may differ), windows, softmax with a sink,
    tensor parallelism by heads, context parallelism, the largest logits that QK-clip asks for, `torch.compile` and CUDA graphs.
    Padding rows come back 0, in gradients too.

    Args:
        config: has the fields of `TransformerConfig`. Read are num_attention_heads, num_query_groups, attention_dropout,
            window_size, window_attn_skip_freq, softmax_type, tensor_model_parallel_size, context_parallel_size,
            deterministic_mode, qk_clip, log_max_attention_logit, fp8_dot_product_attention and fp8_multi_head_attention; but for
            the first, one may be missing: it is then off. Logits are fp32 in any case, and keys are never split by what else is in
            the batch: apply_query_key_layer_scaling, attention_softmax_in_fp32 and batch_invariant_mode change nothing.
        layer_number: from 1; says whether `window_attn_skip_freq` leaves this layer without a window.
        attn_mask_type: an `AttnMaskType`, or TransformerEngine's string, for calls that bring none.
        attention_type: "self" or "cross".
        attention_dropout: 0.0, or None where the configuration says 0.0.
        softmax_scale: None is Dqk**-0.5.
        k_channels, v_channels, num_splits: of no effect: Dqk and Dv are those of the tensors.
        cp_comm_type: "p2p" (None too), "all_gather", "a2a" or "a2a+p2p": see `thdops.context_parallel.attention`.
        pg_collection: has the groups `tp`, `cp`, and for "a2a+p2p" `hcp`, the pair (group of "a2a", group of "p2p"). May be None:
            then context parallelism needs `set_context_parallel_group`, or groups in `packed_seq_params`.
        model_comm_pgs: the name that `pg_collection` had in older releases.

    Attributes:
        softmax_offset: the parameter of softmax_type="learnable", `[Hq]`, from 0; None otherwise.
        current_max_attn_logits: float32 `[Hq]`, with `qk_clip` or `log_max_attention_logit`: the largest logit of each head since
            it was None. Updated in place, so a captured graph goes on updating what was there at its capture.

    Raises:
        ValueError: dropout, FP8 attention, an unknown type of attention, mask, softmax or communication; heads that the
            tensor-parallel ranks do not divide.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
        model_comm_pgs: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        groups = model_comm_pgs if pg_collection is None else pg_collection
        dropout = getattr(config, "attention_dropout", 0.0) if attention_dropout is None else attention_dropout
        if dropout != 0:
            fix = "set it to 0.0 in the configuration: dropout in attention is not served"
            raise refusal(OP, "attention_dropout", "be 0.0", dropout, fix)
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name, False):
                raise refusal(OP, f"config.{name}", "be False", True, "attention in FP8 is not served; FP8 linear layers may stay")
        check_choice(OP, "attention_type", attention_type, ("self", "cross"))
        softmax = getattr(config, "softmax_type", "vanilla")
        check_choice(OP, "config.softmax_type", softmax, tuple(_SOFTMAX))

        self.attention_type = attention_type
        self.mask = mask_of(attn_mask_type)
        self.softmax, self.softmax_scale = _SOFTMAX[softmax], softmax_scale
        self.window_size = _window_of(config, layer_number)
        self.deterministic = getattr(config, "deterministic_mode", False) or None
        self.max_logits_wanted = bool(getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False))
        self.current_max_attn_logits: Tensor | None = None

        tensor_ranks = getattr(config, "tensor_model_parallel_size", 1)
        self.heads = _share("num_attention_heads", config.num_attention_heads, tensor_ranks)
        query_groups = getattr(config, "num_query_groups", None) or config.num_attention_heads
        self.kv_heads = _share("num_query_groups", query_groups, tensor_ranks)

        self.tp_group = getattr(groups, "tp", None)
        self.cp_size = getattr(config, "context_parallel_size", 1)
        self.cp_comm_type = cp_comm_type or "p2p"
        check_choice(OP, "cp_comm_type", self.cp_comm_type, COMMS)
        hierarchical = self.cp_comm_type == "a2a+p2p"
        self.cp_group = getattr(groups, "hcp" if hierarchical else "cp", None) if self.cp_size > 1 else None
        self.softmax_offset = nn.Parameter(torch.zeros(self.heads)) if softmax == "learnable" else None
        if self.softmax_offset is not None:
            # Every tensor-parallel rank has heads of its own: Megatron's norm of gradients must count all of them.
            vars(self.softmax_offset).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str | None = "p2p"
    ) -> None:
        """Share sequences out among the ranks of `cp_group`, or among none (None). Global ranks and stream are of no effect."""
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type or "p2p"
        check_choice(OP, "cp_comm_type", self.cp_comm_type, COMMS)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention within each sequence of the batch.

        `packed_seq_params` has the fields of `PackedSeqParams`: qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, local_cp_size, cp_group. Others are not looked at.

        | qkv_format | query | rows of attention |
        |---|---|---|
        | "thd" | `[T, Hq, Dqk]` | as they are; sequences by cu_seqlens_q, gaps by cu_seqlens_q_padded |
        | "sbhd" (None) | `[S, B, Hq, Dqk]` | a view: B * Hq heads of one sequence; with padding and B > 1, copies of q, k, v, out |
        | "bshd" | `[B, S, Hq, Dqk]` | a view, B sequences of S rows, of which some may be padding |

        Args:
            query, key, value: bf16, fp16 or fp32 (fp64 on CPU); of keys Hkv heads, of values Dv wide. In self-attention with as
                many keys as queries, the metadata of queries hold for keys too.
            attention_mask: bool `[B, 1, 1, S]`, True on padding, which stands left or right of the tokens; a pair (of queries, of
                keys) in cross-attention. Looked at with a mask type that has padding, not with "thd", and only where
                `packed_seq_params` has no cu_seqlens_q. A hole among the tokens is refused where that can be seen without a sync
                (eagerly, on a CPU); elsewhere it makes all rows padding.
            attn_mask_type: no_mask, padding, causal, padding_causal, causal_bottom_right or padding_causal_bottom_right, by the
                name of an enum's member or as a string; None is the constructor's. Windows are aligned as TransformerEngine aligns
                them: top left with "causal" and "padding_causal", else bottom right.
            attention_bias: None.
            num_splits: of no effect.

        Under context parallelism cu_seqlens are the whole batch's and tensors one rank's rows, in zigzag order as Megatron
        partitions a batch. A `cp_group` in `packed_seq_params` takes the place of the module's for this call; `local_cp_size=1`
        without one turns context parallelism off.

        Returns:
            `[T, Hq * Dv]`, `[S, B, Hq * Dv]` or `[B, S, Hq * Dv]`, +0.0 on padding rows.

        Raises:
            ValueError, TypeError: a bias, a mask "arbitrary", shapes that contradict the configuration or the layout,
                cross-attention or padding by a mask under context parallelism, and everything that `thdops.attention` refuses.
        """
        if attention_bias is not None:
            fix = "biases are not served; say who sees whom with cu_seqlens or a window"
            raise refusal(OP, "attention_bias", "be None", kind_of(attention_bias), fix)
        mask = self.mask if attn_mask_type is None else mask_of(attn_mask_type)
        layout = getattr(packed_seq_params, "qkv_format", None) or "sbhd"
        check_choice(OP, "qkv_format", layout, ("thd", "sbhd", "bshd"))
        check_shapes(layout, query, key, value, self.heads, self.kv_heads)
        group = self._group(packed_seq_params)
        ranks = 1 if group is None or layout == "thd" else place_in(OP, group)[0]
        self_attention = self.attention_type == "self"
        rows = rows_of(layout, query, key, value, mask, attention_mask, packed_seq_params, self_attention, ranks)
        out = self._attend(rows, mask, group)
        if self.max_logits_wanted:
            out, largest = out
            self._count(largest.detach().view(rows.folded, -1).amax(0))
        return rows.restore(out)

    def _group(self, params: Any) -> Any:
        """The group, or pair of groups, of a call; None without context parallelism."""
        group, size = getattr(params, "cp_group", None), getattr(params, "local_cp_size", None)
        if group is not None:
            return self._checked(group)
        if size == 1 or (size is None and self.cp_size == 1 and self.cp_group is None):
            return None
        if size is not None or self.cp_group is None:
            where = "pg_collection" if size is None else "packed_seq_params.cp_group"
            fix = "pass it, call set_context_parallel_group, or set packed_seq_params.cp_group"
            raise refusal(OP, where, "name the context-parallel ranks", "none", fix)
        return self._checked(self.cp_group)

    def _checked(self, group: Any) -> Any:
        if self.cp_comm_type == "a2a+p2p" and not (isinstance(group, (tuple, list)) and len(group) == 2):
            fix = "pass both, or choose another cp_comm_type"
            raise refusal(OP, "group", "be a pair (of 'a2a', of 'p2p') with 'a2a+p2p'", repr(group), fix)
        return group

    def _attend(self, rows: Rows, mask: Mask, group: Any) -> Any:
        sink = None if self.softmax_offset is None else self.softmax_offset.float().repeat(rows.folded)
        window = self.window_size
        options: dict[str, Any] = {
            "causal": mask.causal,
            # Without a causal mask TransformerEngine takes (-1, 0) for no window.
            "window": (-1, -1) if window == (-1, 0) and not mask.causal else window,
            "scale": self.softmax_scale,
            "softmax": self.softmax,
            "sink": sink,
            "deterministic": self.deterministic,
            "return_max_logit": self.max_logits_wanted,
        }
        if group is None:
            return attention(
                *rows[:3],
                rows.cu_seqlens,
                rows.cu_seqlens_kv,
                cu_seqlens_q_padded=rows.cu_seqlens_padded,
                cu_seqlens_kv_padded=rows.cu_seqlens_kv_padded,
                causal_alignment=mask.alignment,
                max_seqlen_q=rows.max_seqlen[0],
                max_seqlen_kv=rows.max_seqlen[1],
                **options,
            )
        if rows.cu_seqlens_kv is not None or self.attention_type == "cross":
            fix = "leave it to layers without context parallelism"
            raise refusal(OP, "attention_type", "be 'self' under context parallelism", "keys of their own", fix)
        if self.cp_comm_type == "a2a+p2p":
            heads_group, ring_group = group
            group = (ring_group, heads_group)
        return context_parallel.attention(
            *rows[:3], rows.cu_seqlens, rows.cu_seqlens_padded, group=group, comm=self.cp_comm_type, **options
        )

    def _count(self, largest: Tensor) -> None:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be updated outside
            if self.current_max_attn_logits is None:
                self.current_max_attn_logits = largest.clone()
            else:
                self.current_max_attn_logits.copy_(torch.maximum(self.current_max_attn_logits, largest))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron's distributed checkpoints: `softmax_offset`, cut by heads. Megatron alone calls it, so it is installed."""
        state = self.state_dict(keep_vars=True)
        if not state:
            return {}
        make = import_module("megatron.core.transformer.utils").make_sharded_tensors_for_checkpoint
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
        return make(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def _window_of(config: Any, layer_number: int) -> tuple[int, int]:
    """The window of a layer, counted from 1: every N-th has none, or those where the pattern says 0."""
    window, skip = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if not window:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise refusal(OP, "config.window_size", "be a pair of integers (left, right)", window, "pass -1 for an unbounded side")
    if isinstance(skip, (tuple, list)) and len(skip) >= layer_number:
        windowed = skip[layer_number - 1]
    elif isinstance(skip, int) and skip > 0:
        windowed = layer_number % skip
    elif skip is None:
        windowed = True
    else:
        fix = "pass N for a layer without a window after N - 1 with one"
        raise refusal(OP, "config.window_attn_skip_freq", f"be a number or reach layer {layer_number}", repr(skip), fix)
    return tuple(window) if windowed else (-1, -1)


def _share(name: str, heads: int, ranks: int) -> int:
    """One tensor-parallel rank's heads."""
    if heads % ranks != 0:
        fix = "choose a size that divides both heads and query groups"
        raise refusal(OP, f"config.{name}", f"be a multiple of tensor_model_parallel_size ({ranks})", heads, fix)
    return heads // ranks
