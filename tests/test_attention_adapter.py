"""The adapter to FlashAttention-2: its logic on a stand-in for FA2 (CPU, fp64), and itself on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_oracle import (
    BEFORE,
    CPU,
    DETERMINISTIC,
    FEWER_KEYS,
    GAPS,
    KEYS,
    MASKS,
    QUERIES,
    TAIL,
    Answers,
    Batch,
    Case,
    Numbers,
    check,
    check_padding,
    compare,
    computed,
    numbers,
    oracle,
    poisoned,
)
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from thdops.ops.attention_thd import torch_backend

ADAPTER_CASES = [
    *(Case(batch, options=mask) for batch in (GAPS, TAIL, BEFORE) for mask in MASKS.values()),
    *(
        Case(*pair, options={**mask, "causal_alignment": "bottom_right"})
        for pair in ((QUERIES, KEYS), FEWER_KEYS)
        for mask in MASKS.values()
    ),
    Case(QUERIES, KEYS),
    Case(GAPS, heads=(4, 1), dims=(40, 40), options={"causal": True, "scale": 0.4}),
    Case(Batch([0, 0], [4, 3], 8), options={"causal": True}),
    Case(Batch([1, 0, 1], None, 3), options={"causal": True}),
    Case(Batch([300, 0, 171], [310, 5, 180], 500), heads=(2, 1), dims=(64, 64), options={"causal": True}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ADAPTER_CASES, ids=map(str, range(len(ADAPTER_CASES))))
def test_adapter_values_and_gradients_with_poisoned_padding(case: Case) -> None:
    check(case, "cuda", backend="torch")


class _StandIn:
    """FA2 as its sources have it: one cu_seqlens, bottom-right, +inf without keys, other rows left as they came, odd bounds."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _each(self, plan: Any, q: Tensor, k: Tensor) -> Any:
        assert plan.longest_q >= 2
        for x in (q, k):
            assert x.stride(-1) == 1
            assert x.data_ptr() % 16 == 0
        longest_kv, left, right = torch_backend._bounds(plan)
        if plan.call.causal:
            right = 0
        left, right = (-1 if bound >= longest_kv else bound for bound in (left, right))
        if left < 0 and right >= 0:
            left = longest_kv
        if right < 0 and left >= 0:
            right = longest_kv
        ends_q, ends_k = plan.queries.ends, plan.keys.ends
        assert ends_q.dtype == ends_k.dtype == torch.int32
        for (a, b), (c, d) in zip(itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()), strict=True):
            assert b - a <= plan.longest_q
            assert d - c <= longest_kv
            diagonal = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            keys = torch.arange(d - c)[None]
            hidden = (
                ((keys > diagonal + right) | (keys < diagonal - left)) if left >= 0 else torch.zeros(b - a, d - c, dtype=torch.bool)
            )
            group = q.shape[1] // k.shape[1]
            scores = plan.call.scale * torch.einsum("ihd,jhd->hij", q[a:b], k[c:d].repeat_interleave(group, 1))
            yield slice(a, b), slice(c, d), scores.masked_fill(hidden, -torch.inf), group

    def forward(self, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
        for rows, keys, scores, group in self._each(plan, q, k):
            total = scores.logsumexp(2)
            lse[:, rows] = torch.where(total == -torch.inf, torch.inf, total)
            p = (scores - lse[:, rows, None]).exp()
            out[rows] = torch.einsum("hij,jhd->ihd", p, v[keys].repeat_interleave(group, 1))
        return out, lse

    def backward(
        self, plan: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.deterministic.append(torch.are_deterministic_algorithms_enabled())
        assert lse.is_contiguous()
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        for rows, keys, scores, group in self._each(plan, q, k):
            p = (scores - lse[:, rows, None]).exp()
            dp = torch.einsum("ihd,jhd->hij", grad[rows], v[keys].repeat_interleave(group, 1))
            ds = p * (dp - (grad[rows] * out[rows]).sum(-1).t()[..., None]) * plan.call.scale
            dq[rows] = torch.einsum("hij,jhd->ihd", ds, k[keys].repeat_interleave(group, 1))
            dk[keys] = torch.einsum("hij,ihd->jhd", ds, q[rows]).unflatten(1, (-1, group)).sum(2)
            dv[keys] = torch.einsum("hij,ihd->jhd", p, grad[rows]).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> _StandIn:
    flash = _StandIn()
    monkeypatch.setattr(torch_backend, "_forward", flash.forward)
    monkeypatch.setattr(torch_backend, "_backward", flash.backward)
    return flash


def adapted(case: Case, given: Numbers, deterministic: bool = False, hint: int = 0) -> Answers:
    """The adapter called as the op calls it, on CPU tensors of fp64."""
    (left, right), options = case.options.get("window", (-1, -1)), case.options
    cu, padded = case.queries.metadata(CPU)
    cu_kv, padded_kv = (None, None) if case.keys is None else case.keys.metadata(CPU)
    settings = (
        *(cu, padded, cu_kv, padded_kv, None, options.get("causal", False), options.get("causal_alignment") == "bottom_right"),
        *(left, right, options.get("scale") or case.dims[0] ** -0.5, "vanilla", 0.0, hint, 0, deterministic, "torch"),
    )
    out, lse, _ = torch_backend.attention(Call(*given[:3], *settings, False))
    *gradients, _ = torch_backend.attention_grad(GradCall(given.grad_out, given.grad_lse, *given[:3], out, lse, *settings))
    answers = Answers(out, lse, None, tuple(gradients))
    check_padding(case, answers)
    return answers


@pytest.mark.parametrize("case", ADAPTER_CASES, ids=map(str, range(len(ADAPTER_CASES))))
def test_adapter_logic(case: Case, stand_in: _StandIn) -> None:
    """Gather, bounds, LSE signs, the gradient of LSE by linearity, and zeroing; NaN on every padding row."""
    given = numbers(case)
    hint = max(case.queries.lengths, default=0) if case.keys is None else 0
    answers = adapted(case, poisoned(case, given), hint=hint)
    compare(answers, oracle(case, given) if case.queries.total < 100 else computed(case, given)._replace(max_logit=None))


def test_adapter_takes_either_gradient_alone(stand_in: _StandIn) -> None:
    case = Case(GAPS, options={"causal": True})
    given = numbers(case)
    whole = adapted(case, given).gradients
    only_out = adapted(case, given._replace(grad_lse=None)).gradients
    only_lse = adapted(case, given._replace(grad_out=None)).gradients
    neither = adapted(case, given._replace(grad_out=None, grad_lse=None)).gradients
    for a, b, c, d in zip(whole, only_out, only_lse, neither, strict=True):
        torch.testing.assert_close(a, b + c)
        assert (d == 0).all()


@pytest.mark.parametrize(("was_on", "warn_only"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_mode_is_set_for_the_call_and_put_back(
    wanted: bool, was_on: bool, warn_only: bool, stand_in: _StandIn
) -> None:
    fill = DETERMINISTIC.fill_uninitialized_memory
    torch.use_deterministic_algorithms(was_on, warn_only=warn_only)
    try:
        adapted(Case(GAPS), numbers(Case(GAPS)), deterministic=wanted)
        assert torch.are_deterministic_algorithms_enabled() == was_on
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert DETERMINISTIC.fill_uninitialized_memory == fill
        assert set(stand_in.deterministic) == {wanted or was_on}
        with torch_backend._repeatable(wanted):
            assert torch.is_deterministic_algorithms_warn_only_enabled() == (warn_only and not wanted)
            assert DETERMINISTIC.fill_uninitialized_memory == (fill and (was_on or not wanted))
    finally:
        torch.use_deterministic_algorithms(False)
        DETERMINISTIC.fill_uninitialized_memory = fill


def test_deterministic_mode_is_put_back_after_an_error() -> None:
    def stop() -> None:
        with torch_backend._repeatable(True):
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_deterministic_backward_repeats_bitwise() -> None:
    case = Case(Batch([900, 500], None, 1400), heads=(8, 2), dims=(64, 64), options={"causal": True})
    given = numbers(case, torch.bfloat16)
    first, second = (computed(case, given, "cuda", deterministic=True) for _ in range(2))
    for a, b in zip(first.gradients, second.gradients, strict=True):
        assert torch.equal(a, b)
