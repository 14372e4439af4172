"""The registry that `torch.ops.thdops` lives in. It stands alone so that op families can share it without a cycle."""

from __future__ import annotations

from thdops.registry import Registry

REGISTRY = Registry("thdops")
