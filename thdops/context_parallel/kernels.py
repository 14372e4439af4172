"""Sections by the native kernels, which merge and add on their way out: nothing is read or written for that alone.

T rows, H heads, D head dims. Between sections, out and dq are held in fp32, as dk and dv are where the algorithm has them; rows
that a section does not meet are not touched. The last section of some queries writes their out in its final dtype.

The registry imports this file for its launchers, on the first CUDA call; then `sections.py` has it, too.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.context_attention import Call, GradCall
from thdops.context_parallel import sections
from thdops.context_parallel.run import context_attention, context_attention_grad
from thdops.context_parallel.sections import Adding, Attended, Attending, Gradients, Rows, Section, how
from thdops.ops.attention_thd import kernels
from thdops.ops.context.kernels import all_local_cu_seqlens

__all__ = ["AddingInPlace", "AttendingInPlace", "all_local_cu_seqlens", "context_attention", "context_attention_grad"]


class AttendingInPlace(Attending):
    """Each section begins with what the sections before it left."""

    def __init__(self, call: Call, into: Attended | None) -> None:
        q, dim = call.q, call.v.shape[2]
        rows, heads, _ = q.shape
        out, lse = into[:2] if into else (q.new_empty(rows, heads, dim), q.new_empty(heads, rows, dtype=torch.float32))
        max_logit = q.new_full((heads if call.return_max_logit else 0,), -math.inf, dtype=torch.float32)
        self.result = Attended(out, lse, max_logit)
        self._sums: Tensor | None = None
        self._unit: Tensor | None = None
        self._begun = False  # for the queries of the section to come, by others of theirs
        self._kept = False  # other queries have their results already

    def add(self, call: Call, section: Section, last: bool) -> None:
        """One more section. `last`: of those that its queries are in."""
        out, lse, max_logit = self.result
        if self._sums is None and not last:
            self._sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self._unit = torch.empty_strided(lse.shape, lse.stride(), dtype=lse.dtype, device=lse.device)
        # The first section of a call clears what is padding for it, and its last converts what it does not meet.
        owned = "met" if self._begun and not last else "valid" if self._kept else "all"
        to = out if last or self._sums is None else self._sums
        before = self._sums if self._begun else None
        found = kernels.Found(to, lse, max_logit, before, None if to is out and before is None else self._unit, owned)
        args: tuple[Any, ...] = (call.q, call.k, call.v, *how(call, section), call.return_max_logit)
        kernels.attention_into(contract.Call(*args), found)
        self._begun, self._kept = not last, self._kept or last


class AddingInPlace(Adding):
    """delta and dsink are those of all sections, and computed once."""

    def __init__(self, call: GradCall, own: Rows, into: Gradients | None, hides: bool) -> None:
        q, device = call.q, call.q.device
        self._dsink = torch.empty(0 if call.sink is None else call.sink.shape, dtype=torch.float32, device=device)
        self._whole = _grad_call(call, Section(own))
        self._upstream = kernels.attention_upstream(self._whole, self._dsink, reduces=not hides)
        self._dq = torch.empty(q.shape, dtype=torch.float32, device=device) if self._upstream.sums is None else None
        self._into = torch.empty(q.shape, dtype=q.dtype, device=device) if into is None else into.q
        self._own, self._begun = own, False

    def add_queries(self, call: GradCall, section: Section) -> None:
        """dq of one more section."""
        if self._dq is not None:
            tiles = self._upstream.tiles if section.queries is self._own and section.keys is None else None
            kernels.attention_grad_queries(_grad_call(call, section), self._upstream, self._dq, self._begun, tiles)
            self._begun = True

    def add_keys(self, call: GradCall, section: Section, sums: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """dk and dv of the same section, added to `sums` in place; None: there are none yet."""
        dk, dv = sums or (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (call.k, call.v))
        kernels.attention_grad_keys(_grad_call(call, section), self._upstream, dk, dv, sums is not None)
        return dk, dv

    def result(self) -> tuple[Tensor, Tensor]:
        """dq and dsink."""
        if self._upstream.sums is not None:
            kernels.rounded(self._whole, self._upstream.sums, self._into, self._upstream.tiles, self._whole.scale)
        elif self._dq is not None:
            kernels.rounded(self._whole, self._dq, self._into, self._upstream.tiles)
        return self._into, self._dsink


def _grad_call(call: GradCall, section: Section) -> contract.GradCall:
    tensors = (call.grad_out, call.grad_lse, call.q, call.k, call.v, call.out, call.lse)
    return contract.GradCall(*tensors, *how(call, section))


sections.kernels = sys.modules[__name__]
