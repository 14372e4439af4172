"""Hugging Face transformers (5.x) on thdops: attention, masks, experts and routers under the name "thdops".

    from thdops.integrations.transformers import patch_router, register

    register()                                              # once, before a model asks for "thdops"
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="thdops")
    patch_router(model)                                     # mixtures of experts only; weights stay where they are
    loss = model(**batch, use_cache=False).loss             # batch: see `register`

Nothing here reads a device value on the host, so a step compiles with `fullgraph=True` and can be captured in a CUDA graph.
"""

from __future__ import annotations

from thdops.integrations.transformers.registration import register
from thdops.integrations.transformers.routing import PatchedRouter, patch_router

__all__ = ["PatchedRouter", "patch_router", "register"]
