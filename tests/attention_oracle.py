"""Attention problems and their answers from a loop over rows, shared by the tests of attention.

The oracle shares nothing with the reference: it takes one query row at a time, in fp64.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import thdops
from meta_kernels.attention_thd import HINTED
from thdops.ops.attention_thd import backends
from thdops.ops.layouts import prefix_sums

CPU = torch.device("cpu")
DETERMINISTIC: Any = torch.utils.deterministic  # `fill_uninitialized_memory` is a property of the module: unknown to type checkers
BACKENDS = {"cpu": None, "cuda": "native"}  # not what a table of times names first
DEVICES = [pytest.param("cpu", id="reference"), pytest.param("cuda", id="native", marks=pytest.mark.gpu)]


def forget_plans(patch: pytest.MonkeyPatch) -> None:
    """Those of the op, which hold blocks, the choice of kernels and the order of heads."""
    for plans in (backends._plans, backends._grad_plans):
        patch.setattr(plans, "_known", {})


class Batch(NamedTuple):
    """Lengths and padded lengths (None = no gaps) of one side, rows before the first sequence, and T."""

    lengths: list[int]
    padded: list[int] | None
    total: int
    before: int = 0

    def rows(self) -> list[range]:
        """The valid rows of each sequence."""
        ends = itertools.accumulate(self.padded or self.lengths, initial=self.before)
        return [range(start, start + length) for start, length in zip(ends, self.lengths, strict=False)]

    def metadata(self, device: torch.device | str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor | None]:
        device = torch.device(device)
        padded = None if self.padded is None else prefix_sums(self.padded, device, dtype, self.before)
        return prefix_sums(self.lengths, device, dtype), padded

    def padding(self) -> Tensor:
        mask = torch.ones(self.total, dtype=torch.bool)
        for rows in self.rows():
            mask[rows.start : rows.stop] = False
        return mask


def from_offsets(cu: list[int], padded: list[int] | None, total: int) -> Batch:
    def lengths(ends: list[int]) -> list[int]:
        return [b - a for a, b in itertools.pairwise(ends)]

    return Batch(lengths(cu), None if padded is None else lengths(padded), total)


class Case(NamedTuple):
    """One attention problem without its numbers; `keys` None is self-attention."""

    queries: Batch
    keys: Batch | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def keyed(self) -> Batch:
        return self.keys or self.queries

    def arguments(self, device: torch.device | str, index: torch.dtype = torch.int32) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        cu, padded = self.queries.metadata(device, index)
        if self.keys is None:
            return (cu,), {"cu_seqlens_q_padded": padded, **self.options}
        cu_kv, padded_kv = self.keys.metadata(device, index)
        return (cu, cu_kv), {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded_kv, **self.options}


class Numbers(NamedTuple):
    """Inputs and incoming gradients; finite on padding rows too."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Any  # None without one
    grad_out: Any  # a tensor; None in the tests that leave a gradient out
    grad_lse: Any


class Answers(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor | None
    gradients: tuple[Tensor, ...]


def numbers(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Numbers:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

    (heads, heads_kv), (dim_qk, dim_v) = case.heads, case.dims
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    learnable = case.options.get("softmax") == "learnable"
    rows, rows_kv = case.queries.total, case.keyed().total
    return Numbers(
        new(rows, heads, dim_qk),
        new(rows_kv, heads_kv, dim_qk),
        new(rows_kv, heads_kv, dim_v),
        new(heads, like=statistics) if learnable else None,
        new(rows, heads, dim_v),
        new(heads, rows, like=statistics),
    )


def oracle(case: Case, given: Numbers) -> Answers:
    """Row by row in fp64, gradients by autograd."""
    options = case.options
    left, right = options.get("window", (-1, -1))
    softmax, softcap = options.get("softmax", "vanilla"), options.get("softcap", 0.0)
    inputs = [x.double().requires_grad_() for x in given[:4] if x is not None]
    q, k, v = inputs[:3]
    heads, (dim_qk, dim_v) = case.heads[0], case.dims
    sink = {"vanilla": None, "off_by_one": torch.zeros(heads, dtype=torch.float64), "learnable": inputs[-1]}[softmax]
    scale = options.get("scale", None) or dim_qk**-0.5
    group = heads // case.heads[1]
    out = [torch.zeros(heads, dim_v, dtype=torch.float64) for _ in range(case.queries.total)]
    lse = [torch.full((heads,), -torch.inf, dtype=torch.float64) for _ in range(case.queries.total)]
    largest = torch.full((heads,), -torch.inf, dtype=torch.float64)
    for rows, keys in zip(case.queries.rows(), case.keyed().rows(), strict=True):
        for i, row in enumerate(rows):
            d = i + len(keys) - len(rows) if options.get("causal_alignment") == "bottom_right" else i
            seen = [
                keys[j]
                for j in range(len(keys))
                if (left < 0 or j >= d - left) and (right < 0 or j <= d + right) and not (options.get("causal") and j > d)
            ]
            logits = scale * (q[row][None] * k[seen].repeat_interleave(group, 1)).sum(-1)  # [keys, heads]
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            terms = logits if sink is None else torch.cat((logits, sink[None]))
            if len(terms) == 0:
                continue
            lse[row] = terms.logsumexp(0)
            out[row] = ((logits - lse[row]).exp()[..., None] * v[seen].repeat_interleave(group, 1)).sum(0)
            if seen:
                largest = torch.maximum(largest, logits.detach().amax(0))
    none = torch.zeros(0, heads, dim_v, dtype=torch.float64)
    stacked = torch.cat((none, *(row[None] for row in out)))
    stacked_lse = torch.cat((none[..., 0], *(row[None] for row in lse))).t()
    finite = torch.where(stacked_lse.isfinite(), stacked_lse, 0)
    loss = (stacked * given.grad_out).sum() + (finite * given.grad_lse).sum()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True) if loss.requires_grad else None
    return Answers(stacked.detach(), stacked_lse.detach(), largest, gradients or tuple(map(torch.zeros_like, inputs)))


def poisoned(case: Case, given: Numbers, value: float = torch.nan) -> Numbers:
    """The same numbers with `value` on every padding row, gradients included."""
    rows, keys = case.queries.padding(), case.keyed().padding()
    changed = given._replace(**{name: x.clone() for name, x in given._asdict().items() if x is not None})
    changed.q[rows], changed.k[keys], changed.v[keys], changed.grad_out[rows], changed.grad_lse[:, rows] = (value,) * 5
    return changed


def computed(case: Case, given: Numbers, device: str = "cpu", **more: Any) -> Answers:
    """What the op gives, on the host; padding rows are checked to be exact on the way."""
    inputs: list[Any] = [None if x is None else x.detach().to(device).requires_grad_() for x in given[:4]]
    q, k, v, sink = inputs
    metadata, options = case.arguments(device)
    options = {"backend": BACKENDS[device], **options, **more}
    max_logit = options["backend"] not in HINTED  # which have none
    results = thdops.attention(q, k, v, *metadata, sink=sink, return_lse=True, return_max_logit=max_logit, **options)
    out, lse = results[:2]
    leaves = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad((out, lse), leaves, (given.grad_out.to(device), given.grad_lse.to(device)))
    answers = Answers(out.cpu(), lse.cpu(), results[2].cpu() if max_logit else None, tuple(x.cpu() for x in gradients))
    check_padding(case, answers)
    return answers


def check_padding(case: Case, answers: Answers) -> None:
    rows, keys = case.queries.padding(), case.keyed().padding()
    dq, dk, dv = answers.gradients[:3]
    for x, mask in ((answers.out, rows), (dq, rows), (dk, keys), (dv, keys)):
        assert (x[mask] == 0).all()
        assert not x[mask].signbit().any()
    assert (answers.lse[:, rows] == -torch.inf).all()


def compare(actual: Answers, expected: Answers, dtype: torch.dtype = torch.float64, units: int = 4) -> None:
    """fp64: to rounding. Low precision: within a few units of the dtype at the tensor's own size."""
    pairs: list[tuple[Any, Any]] = [
        (actual.out, expected.out),
        (actual.lse, expected.lse),
        *zip(actual.gradients, expected.gradients, strict=True),
    ]
    if actual.max_logit is not None:
        pairs.append((actual.max_logit, expected.max_logit))
    for a, b in pairs:
        size = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
        unit = 1e-13 if dtype == torch.float64 else units * torch.finfo(dtype).eps
        torch.testing.assert_close(a.double(), b, rtol=0, atol=unit * max(1.0, size))


def check(case: Case, device: str, **more: Any) -> Answers:
    """Values and gradients against the oracle, with clean and with poisoned padding: the two must be the same bits."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    given = numbers(case, dtype)
    answers = computed(case, given, device, **more)
    compare(answers, oracle(case, given), dtype)
    for value in (torch.nan, torch.inf):
        again = computed(case, poisoned(case, given, value), device, deterministic=True, **more)
        clean = computed(case, given, device, deterministic=True, **more)
        for a, b in zip((again.out, again.lse, *again.gradients), (clean.out, clean.lse, *clean.gradients), strict=True):
            assert torch.equal(a, b)
    return answers


GAPS = Batch([3, 5, 0, 4], [4, 8, 2, 8], 25)
TAIL = Batch([5, 9, 2], None, 20)
BEFORE = Batch([4, 3], [5, 4], 14, before=3)
QUERIES, KEYS = Batch([3, 5, 2, 0], [4, 6, 2, 1], 15), Batch([5, 2, 0, 4], [6, 2, 3, 4], 18)
FEWER_KEYS = Batch([6, 7], None, 15), Batch([2, 3], None, 5)

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (2, -1)},
    "right": {"window": (-1, 1)},
    "both": {"window": (1, 2)},
    "causal window": {"causal": True, "window": (1, 3)},
    "diagonal": {"window": (0, 0)},
    "wide": {"window": (2**40, 2**40)},
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "off by one": {"softmax": "off_by_one"},
    "sink": {"softmax": "learnable"},
    "softcap": {"softcap": 0.8},
    "sink, softcap": {"softmax": "learnable", "softcap": 0.8, "scale": 0.5},
}
