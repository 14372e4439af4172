"""Which backend is fastest for which kind of call on which GPU, by measurement.

The table is data: `measured.json` beside this file, rewritten by `python -m thdops bench attention --peers --write-table` on the
GPU that it is about. {architecture: {"measured": circumstances, "fastest": {kind: [backend, ...]}}}, fastest first, by the time of
a forward and its backward through the op, whose adapters hold the padding contract. What was not measured gets native.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meta_kernels.attention_thd import BACKENDS, Call, capability, default_backend

_FILE = Path(__file__).with_name("measured.json")
_TABLE: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
_SHORT = 1024  # mean rows of a sequence below which the tiles at its ends count
_ANY = "any length"


class Kind(NamedTuple):
    """What calls have in common as far as shapes and flags tell."""

    dim_qk: int
    dim_v: int
    mask: str
    length: str

    def __str__(self) -> str:
        return f"{self.dim_qk}/{self.dim_v}, {self.mask}, {self.length}"


def kind(dims: tuple[int, int], causal: bool, window: tuple[int, int], rows: int, sequences: int) -> Kind:
    """`dims` are (Dqk, Dv), `window` (left, right) with -1 for an unbounded side, `rows` all of the buffer's."""
    mask = "window" if window[0] >= 0 or window[1] > 0 else "causal" if causal else "full"
    return Kind(*dims, mask, "short" if rows < _SHORT * sequences else "long")


def choose(call: Call) -> str:
    """The backend that `backend=None` stands for: the first of `order` that serves the call."""
    return default_backend(call, order(call))


def order(call: Call) -> tuple[str, ...]:
    """All fast backends, the fastest for this kind of call first."""
    usual = BACKENDS[:-1]
    if call.q.device.type != "cuda" or not _TABLE or call.q.dim() != 3 or call.v.dim() != 3:
        return usual
    fastest = _TABLE.get(_architecture(call.q.device), {}).get("fastest", {})
    # A tracer would build the class of the mean length into its program, and make another for another T or B.
    traced = torch.compiler.is_compiling()
    rows, sequences = (0, 1) if traced else (call.q.shape[0], max(1, call.cu_seqlens_q.shape[0] - 1))
    of = kind((call.q.shape[2], call.v.shape[2]), call.causal, (call.window_left, call.window_right), rows, sequences)
    first = fastest.get(str(of._replace(length=_ANY) if traced else of), ())
    return (*first, *(name for name in usual if name not in first))


def write(device: torch.device, times: Iterable[tuple[Kind, str, float]], circumstances: Mapping[str, str]) -> Path:
    """Replace this GPU's part of the table. `times`: backends and the microseconds of a forward and its backward."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for of, backend, us in times:
        for same in (of, of._replace(length=_ANY)):
            kinds.setdefault(str(same), {}).setdefault(backend, []).append(math.log(us))
    fastest = {name: _sorted(of_backend) for name, of_backend in kinds.items()}
    table = {**_TABLE, _architecture(device): {"measured": dict(circumstances), "fastest": fastest}}
    _FILE.write_text(json.dumps(table, indent=1) + "\n")
    return _FILE


def _sorted(times: Mapping[str, Sequence[float]]) -> list[str]:
    """By geometric mean; a backend that serves fewer calls of the kind than the others comes after those that serve them all."""
    return sorted(times, key=lambda name: (-len(times[name]), sum(times[name]) / len(times[name])))


def _architecture(device: torch.device) -> str:
    major, minor = capability(device.index)
    return f"sm_{major}{minor}"
