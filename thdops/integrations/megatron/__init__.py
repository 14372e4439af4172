"""Attention of Megatron-Core on thdops: put `DotProductAttention` where a layer's spec has `TEDotProductAttention`.

    from thdops.integrations.megatron import DotProductAttention
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention

Neither Megatron-Core nor TransformerEngine is imported: configurations, masks and `PackedSeqParams` are read by field names.
"""

from __future__ import annotations

from thdops.integrations.megatron.dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
