"""Activation checkpointing: what is worth keeping."""

from __future__ import annotations

import torch

from thdops.namespace import REGISTRY


def save_ops() -> list[torch._ops.OpOverload]:
    """The ops whose results selective activation checkpointing should keep: they take long to compute and little to hold.

        context_fn = functools.partial(create_selective_checkpoint_contexts, thdops.save_ops())
        out = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

    Both are in `torch.utils.checkpoint`. Then the backward of a block computes attention and routing from what was kept, and
    neither again. Add ops of others to the list, or ask `op in thdops.save_ops()` in a policy function.

    Returns:
        A new list of overloads such as `torch.ops.thdops.attention.default`.
    """
    return [REGISTRY.op(spec.name) for spec in REGISTRY if spec.save]
