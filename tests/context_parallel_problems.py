"""Problems for context-parallel attention and what one device makes of them: for tests on virtual ranks and on processes.

T rows of the whole batch, H heads, D head dims, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attention_oracle import Batch
from torch import Tensor

import thdops

# Every layout is for up to 4 ranks: T and all offsets are multiples of 8.
LAYOUTS = {
    "gaps": Batch([3, 20, 0, 8], [8, 24, 8, 16], 64),  # of the first sequence, most chunks hold no token
    "before and behind": Batch([13, 0, 5], [16, 0, 8], 40, before=8),
    "back to back": Batch([16, 8], None, 24),
    "no token": Batch([0, 0], [8, 16], 32),
}

WINDOWS: dict[str, dict[str, Any]] = {
    "causal window": {"causal": True, "window": (5, 3)},
    "window": {"window": (5, 3), "softmax": "learnable"},
    "left": {"window": (4, -1)},
    "right": {"window": (-1, 3)},
    "diagonal": {"window": (0, 0)},
    "wide": {"window": (2**40, 2**40)},
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, sink": {"causal": True, "softmax": "learnable"},
    "off by one, softcap": {"softmax": "off_by_one", "softcap": 0.8, "scale": 0.5},
    "causal, contiguous": {"causal": True, "partition": "contiguous"},
    "contiguous": {"partition": "contiguous", "softmax": "learnable"},
}


class Problem(NamedTuple):
    """What every rank knows, and everything that the ranks share out among themselves; NaN on padding rows."""

    batch: Batch
    cu_seqlens: Tensor
    padded: Tensor | None
    qkv: tuple[Tensor, Tensor, Tensor]
    sink: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor
    options: dict[str, Any]

    @property
    def offsets(self) -> Tensor:
        return self.cu_seqlens if self.padded is None else self.padded


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor
    gradients: tuple[Tensor, ...]  # of q, k, v, and the sink


def problem(
    batch: Batch,
    options: dict[str, Any],
    heads: tuple[int, int] = (8, 4),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    poison: float = torch.nan,
) -> Problem:
    generator = torch.Generator().manual_seed(batch.total)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    rows, padding = batch.total, batch.padding()
    q, k, v = (new(rows, h, d).to(dtype) for h, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])))
    grad_out, grad_lse = new(rows, heads[0], dims[1]).to(dtype), new(heads[0], rows).to(statistics)
    for x in (q, k, v, grad_out):
        x[padding] = poison
    grad_lse[:, padding] = poison
    sink = new(heads[0]).to(statistics) if options.get("softmax") == "learnable" else None
    return Problem(batch, *batch.metadata("cpu"), (q, k, v), sink, grad_out, grad_lse, options)


def one_device(given: Problem) -> Results:
    """By the single-device op."""
    options = {name: value for name, value in given.options.items() if name != "partition"}

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return thdops.attention(q, k, v, given.cu_seqlens, cu_seqlens_q_padded=given.padded, **options, **more)

    return results(attend, given.qkv, given.sink, given.grad_out, given.grad_lse)


def results(
    attend: Callable[..., Any], qkv: tuple[Tensor, ...], sink: Tensor | None, grad_out: Tensor, grad_lse: Tensor
) -> Results:
    leaves = [x.clone().requires_grad_() for x in (*qkv, *(() if sink is None else (sink,)))]
    out, lse, max_logit = attend(*leaves[:3], sink=None if sink is None else leaves[3], return_lse=True, return_max_logit=True)
    gradients = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    return Results(out.detach(), lse.detach(), max_logit.detach(), gradients)


def rows_of(given: Results, rows: Tensor) -> Results:
    """Some rows of everything that has rows."""
    gradients = (*(x[rows] for x in given.gradients[:3]), *given.gradients[3:])
    return Results(given.out[rows], given.lse[:, rows], given.max_logit, gradients)


def compare(actual: Results, expected: Results, padding: Tensor, tolerance: float) -> None:
    """Valid rows to `tolerance`, padding rows exactly; there is no NaN in what is expected, so none may be in what was found."""
    for found, wanted in zip((*actual[:3], *actual.gradients), (*expected[:3], *expected.gradients), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert not found.isnan().any()
    for x in (actual.out, *actual.gradients[:3]):
        assert (x[padding] == 0).all()
        assert not x[padding].signbit().any()
    assert (actual.lse[:, padding] == -torch.inf).all()
