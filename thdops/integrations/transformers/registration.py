"""Entering the library's interfaces. The library itself is imported by `register`, not with this module."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from meta_kernels.contract import refusal
from thdops.integrations.transformers.attention import attention_forward
from thdops.integrations.transformers.experts import experts_forward
from thdops.integrations.transformers.rows import sequences_of_mask

NAME = "thdops"


def register() -> None:
    """Add "thdops" to transformers' attention, mask and experts interfaces; calling it again changes nothing.

    A model takes it with `attn_implementation="thdops"` (or `model.set_attn_implementation("thdops")`) and, for experts alone,
    `experts_implementation="thdops"`. Then its forward takes, T rows in all:

    - a packed batch as `DataCollatorWithFlattening` makes it: `input_ids` `[1, T]` with `cu_seq_lens_q`, `cu_seq_lens_k`,
      `max_length_q`, `max_length_k`, or with `position_ids` alone, which start anew with every sequence (negative: tail padding);
    - further, by keyword: `cu_seqlens_padded` int32 `[B+1]`, the physical offsets where sequences have gaps behind them; and
      `max_seqs`, at least the number of sequences that `position_ids` tell, where T, the default, is far too many;
    - a padded batch `[B, S]` with a 2-D `attention_mask`: padding right, left or on both sides, without unpacking or copies;
    - a batch `[B, S]` without padding, each row of it packed or not as its `position_ids` `[B, S]` tell.

    Where `cu_seq_lens_q` is given, it says who sees whom, and `attention_mask` only which tokens a loss counts. Attention's out and
    its gradients are +0.0 on padding rows. Sliding windows, softcap and sinks are served as models pass them.

    Refused by name: KV caches with anything in them, masks of four dimensions, with holes, or with a pattern of their own (blocks,
    chunks), position biases, dropout. A hole in a mask on a GPU cannot be refused without a host sync: all rows then count as
    padding, and attention's out is 0. In eager mode on a GPU the library itself reads `position_ids` on the host once a forward
    unless an `attention_mask` is given.

    Raises:
        ImportError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise refusal("register", "transformers", "be installed", "none", "pip install 'thdops[transformers]'", ImportError)
    import_module("transformers.modeling_utils").AttentionInterface.register(NAME, attention_forward)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, sequences_of_mask)
    import_module("transformers.integrations.moe").ExpertsInterface.register(NAME, experts_forward)
