"""FLOP formulas of ops for `torch.utils.flop_counter`, handed over when somebody imports that module.

Importing it from here would bring triton along wherever it is installed, and `import thdops` must not. Its counters copy the table
of formulas when they are made, so the hand-over cannot wait any longer than that import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch._ops import OpOverloadPacket

_MODULE = "torch.utils.flop_counter"


def register_formula(op: OpOverloadPacket, formula: Callable[..., int]) -> None:
    """Count a call of `op` as `formula` of its arguments."""

    def counted(*args: Any, out_val: Any = None) -> int:
        return formula(*args)

    if _MODULE in sys.modules:
        _hand_over(sys.modules[_MODULE], op, counted)
    else:
        _waiting[op] = counted


def _hand_over(module: ModuleType, op: OpOverloadPacket, counted: Callable[..., int]) -> None:
    module.register_flop_formula(op, get_raw=True)(counted)


class _AtImport(MetaPathFinder):
    """Finds the one module as Python would, and runs on after it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            while _waiting:
                _hand_over(module, *_waiting.popitem())

        spec.loader.exec_module = exec_module
        return spec


_waiting: dict[OpOverloadPacket, Callable[..., int]] = {}
sys.meta_path.insert(0, _AtImport())
