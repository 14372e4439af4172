"""Adapters to libraries that may not be installed: their logic on stand-ins (CPU, fp64), what they refuse, who is chosen; and
themselves on a GPU that has them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attention_oracle import (
    BEFORE,
    CPU,
    FEWER_KEYS,
    GAPS,
    KEYS,
    MASKS,
    QUERIES,
    SOFTMAX,
    TAIL,
    Answers,
    Batch,
    Case,
    Numbers,
    check,
    check_padding,
    compare,
    numbers,
    oracle,
    poisoned,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import thdops
from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call, GradCall
from thdops.bench import difference
from thdops.ops.attention_thd import adapter, contests, cudnn_backend, fa4_backend, judge, measured, reference, samples

_TILE = 4
"""Rows behind a sequence that a stand-in loads with it, and weighs with zero."""


# --- stand-ins --------------------------------------------------------------------------------------------------------------------


class _Mask(NamedTuple):
    """Who sees whom, as a peer was told."""

    left: int | None
    right: int | None
    bottom_right: bool

    def hidden(self, n_q: int, n_k: int) -> Tensor:
        distance = torch.arange(n_k)[None] - torch.arange(n_q)[:, None] - (n_k - n_q if self.bottom_right else 0)
        hidden = torch.zeros(n_q, n_k, dtype=torch.bool)
        if self.left is not None:
            hidden |= distance < -self.left
        if self.right is not None:
            hidden |= distance > self.right
        return hidden


class _Sequences(NamedTuple):
    queries: list[slice]
    keys: list[slice]

    @classmethod
    def of(cls, told: dict[str, Any], q: Tensor, k: Tensor, names: tuple[str, str], used: tuple[str, str]) -> _Sequences:
        sides = []
        for x, name, lengths, longest in zip(
            (q, k), names, used, ("max_seqlen_q", names[1].replace("cu_seqlens", "max_seqlen")), strict=True
        ):
            starts = told[name]
            assert starts.dtype == torch.int32
            valid = told[lengths] if told.get(lengths) is not None else starts.diff()
            assert valid.dtype == torch.int32
            assert 0 <= starts.min() <= starts.max() <= len(x)
            assert (valid <= starts.diff()).all()
            assert valid.max() <= told[longest]
            sides.append([slice(a, a + n) for a, n in zip(starts.tolist(), valid.tolist(), strict=False)])
        return cls(*sides)


def _behind(x: Tensor, rows: slice) -> Tensor:
    """Zero, unless something is NaN or Inf in the rows that a tile loads beyond a sequence."""
    return 0 * x[rows.stop : rows.stop + _TILE].sum()


def _unwritten(where: _Sequences, mask: _Mask, queries: list[Tensor], keys: list[Tensor]) -> None:
    """NaN on every query that sees no key and every key that no query sees."""
    for rows, columns in zip(*where, strict=True):
        seen = ~mask.hidden(rows.stop - rows.start, columns.stop - columns.start)
        for x, ours, reached in (*((x, rows, seen.any(1)) for x in queries), *((x, columns, seen.any(0)) for x in keys)):
            x[ours][~reached] = torch.nan


def _terms(q: Tensor, k: Tensor, scale: float, softcap: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(S, dS/d logits) [H, n_q, n_k], -inf where hidden."""
    scores = scale * torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    slope = torch.ones_like(scores)
    if softcap:
        tanh = (scores / softcap).tanh()
        scores, slope = softcap * tanh, 1 - tanh * tanh
    return scores.masked_fill(hidden, -torch.inf), slope


def _forward(
    q: Tensor, k: Tensor, v: Tensor, where: _Sequences, mask: _Mask, scale: float, softcap: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan)
    for rows, keys in zip(*where, strict=True):
        s, _ = _terms(q[rows], k[keys], scale, softcap, mask.hidden(len(q[rows]), len(k[keys])))
        total = s if sink is None else torch.cat((s, sink.to(s)[:, None, None].expand(-1, s.shape[1], 1)), 2)
        lse[:, rows] = total.logsumexp(2)
        p = (s - torch.where(lse[:, rows] == -torch.inf, 0, lse[:, rows])[..., None]).exp()
        out[rows] = torch.einsum("hij,jhd->ihd", p, v[keys].repeat_interleave(group, 1)) + _behind(v, keys)
    return out, lse


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Callable[[int, slice], Tensor],
    where: _Sequences,
    mask: _Mask,
    scale: float,
    softcap: float,
    sink: Tensor | None,
) -> tuple[Tensor, ...]:
    """`lse(b, rows)` is [H, n_q] of sequence b, -inf or 0 where no key is seen."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    dsink = q.new_zeros(q.shape[1])
    for b, (rows, keys) in enumerate(zip(*where, strict=True)):
        s, slope = _terms(q[rows], k[keys], scale, softcap, mask.hidden(len(q[rows]), len(k[keys])))
        of_row = lse(b, rows)
        p = (s - torch.where(of_row == -torch.inf, 0, of_row)[..., None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).t() - (0 if grad_lse is None else grad_lse[:, rows])
        dp = torch.einsum("ihd,jhd->hij", grad[rows], v[keys].repeat_interleave(group, 1))
        ds = p * (dp - delta[..., None]) * slope * scale
        leak = sum(_behind(x, part) for x, part in ((q, rows), (grad, rows), (k, keys), (v, keys)))
        dq[rows] = torch.einsum("hij,jhd->ihd", ds, k[keys].repeat_interleave(group, 1)) + leak
        dk[keys] = torch.einsum("hij,ihd->jhd", ds, q[rows]).unflatten(1, (-1, group)).sum(2) + leak
        dv[keys] = torch.einsum("hij,ihd->jhd", p, grad[rows]).unflatten(1, (-1, group)).sum(2) + leak
        if sink is not None:
            dsink -= ((sink[:, None] - of_row).exp() * delta).sum(1)
    return (dq, dk, dv) if sink is None else (dq, dk, dv, dsink)


class _FlashAttention4:
    """The two functions of `flash_attn.cute.interface` that the adapter calls, by their arguments' names."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _told(self, q: Tensor, k: Tensor, told: dict[str, Any]) -> tuple[Any, ...]:
        where = _Sequences.of(told, q, k, ("cu_seqlens_q", "cu_seqlens_k"), ("seqused_q", "seqused_k"))
        left, right = told["window_size_left"], told["window_size_right"]
        assert all(bound is None or 0 <= bound < 2**31 for bound in (left, right))
        mask = _Mask(left, 0 if told["causal"] else right, True)
        return where, mask, told["softmax_scale"], told["softcap"], told["learnable_sink"]

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **told: Any) -> tuple[Any, ...]:
        assert return_lse
        return *_forward(q, k, v, *self._told(q, k, told)), None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        dlse: Tensor | None,
        deterministic: bool,
        **told: Any,
    ) -> tuple[Tensor, ...]:
        self.deterministic.append(deterministic)
        assert all(x.is_contiguous() for x in (dout, lse))
        return _backward(dout, dlse, q, k, v, out, lambda b, rows: lse[:, rows], *self._told(q, k, told))


class _CuDNN:
    """`torch.ops.cudnn` as the frontend defines it: one cu_seqlens, a left bound that counts the diagonal, LSE by sequence."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _told(self, q: Tensor, k: Tensor, told: dict[str, Any]) -> tuple[Any, ...]:
        where = _Sequences.of(told, q, k, ("cu_seqlens_q", "cu_seqlens_kv"), ("", ""))
        left, right = told["window_left"], told["window_right"]
        assert left != 0
        assert not (told["is_causal"] and right > 0)
        assert not (told["causal_bottom_right"] and not (told["is_causal"] or left >= 0 or right >= 0))
        right = right if right >= 0 else (0 if told["is_causal"] else None)
        return where, _Mask(left - 1 if left > 0 else None, right, told["causal_bottom_right"]), told["attn_scale"], 0.0, None

    def sdpa_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **told: Any) -> tuple[Tensor, Tensor]:
        assert return_lse
        where, mask, *rest = self._told(q, k, told)
        out, lse = _forward(q, torch.nan_to_num(k), torch.nan_to_num(v), where, mask, *rest)
        lse = lse.t().unsqueeze(2).contiguous()
        _unwritten(where, mask, [out, lse], [])
        return out, lse

    def sdpa_bwd(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, is_deterministic: bool, **told: Any
    ) -> tuple[Tensor, ...]:
        self.deterministic.append(is_deterministic)
        assert lse.shape == (len(told["cu_seqlens_q"]) - 1, q.shape[1], told["max_seqlen_q"])
        assert lse.isfinite().all()
        where, mask, *rest = self._told(q, k, told)
        grad, q, k, v = (torch.nan_to_num(x) for x in (grad_out, q, k, v))  # padding is not seen here, and no other NaN is given
        grads = _backward(grad, None, q, k, v, o, lambda b, rows: lse[b, :, : rows.stop - rows.start], where, mask, *rest)
        _unwritten(where, mask, [grads[0]], [*grads[1:]])
        return grads


_LIBRARIES = {"fa4": (fa4_backend, "interface", _FlashAttention4), "cudnn": (cudnn_backend, "ops", _CuDNN)}


@pytest.fixture(params=_LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """A backend's name, and the stand-in that answers for its library."""
    module, function, make = _LIBRARIES[request.param]
    stand_in = make()
    monkeypatch.setattr(module, function, lambda: stand_in)
    return request.param, stand_in


def _adapted(name: str, case: Case, given: Numbers, deterministic: bool = False, hint: int = 0) -> Answers:
    """The adapter called as the op calls it, on CPU tensors of fp64."""
    (left, right), options = case.options.get("window", (-1, -1)), case.options
    cu, padded = case.queries.metadata(CPU)
    cu_kv, padded_kv = (None, None) if case.keys is None else case.keys.metadata(CPU)
    settings = (
        *(cu, padded, cu_kv, padded_kv, given.sink, options.get("causal", False)),
        *(options.get("causal_alignment") == "bottom_right", left, right, options.get("scale") or case.dims[0] ** -0.5),
        *(options.get("softmax", "vanilla"), options.get("softcap", 0.0), hint, 0, deterministic, name),
    )
    module = _LIBRARIES[name][0]
    out, lse, _ = module.attention(Call(*given[:3], *settings, False))
    *gradients, dsink = module.attention_grad(GradCall(given.grad_out, given.grad_lse, *given[:3], out, lse, *settings))
    answers = Answers(out, lse, None, (*gradients, *(() if given.sink is None else (dsink,))))
    check_padding(case, answers)
    return answers


_ALIGNED = {
    f"{name}, {mask}": Case(*pair, options={**MASKS[mask], "causal_alignment": "bottom_right"})
    for name, pair in (("cross", (QUERIES, KEYS)), ("fewer keys", FEWER_KEYS))
    for mask in MASKS
}
_SERVED = {
    **{f"{i}, {mask}": Case(batch, options=MASKS[mask]) for i, batch in enumerate((GAPS, TAIL, BEFORE)) for mask in MASKS},
    **_ALIGNED,
    "MQA, MLA": Case(GAPS, heads=(4, 1), dims=(24, 16), options={"causal": True, "scale": 0.4}),
    "no valid row": Case(Batch([0, 0], [4, 3], 8), options={"causal": True}),
    "no sequence": Case(Batch([], None, 5)),
    "no key": Case(Batch([3, 2], None, 6), Batch([0, 0], None, 0)),
}
_SINKS = {
    f"{name}, {softmax}": Case(*pair, options={**SOFTMAX[softmax], "causal": True, "causal_alignment": "bottom_right"})
    for name, pair in {"self": (GAPS, None), "cross": (QUERIES, KEYS), "no key": (TAIL, Batch([0, 0, 0], None, 0))}.items()
    for softmax in SOFTMAX
}


@pytest.mark.parametrize("case", _SERVED.values(), ids=_SERVED)
def test_rows_bounds_and_gradients(case: Case, library: tuple[str, Any]) -> None:
    """Everything that both serve; NaN on every padding row, which the stand-ins load."""
    given = numbers(case)
    hint = max(case.queries.lengths, default=0) if case.keys is None else 0
    compare(_adapted(library[0], case, poisoned(case, given), hint=hint), oracle(case, given))


@pytest.mark.parametrize("case", _SINKS.values(), ids=_SINKS)
@pytest.mark.parametrize("library", ["fa4"], indirect=True)
def test_sinks_softcap_and_off_by_one(case: Case, library: tuple[str, Any]) -> None:
    given = numbers(case)
    compare(_adapted(library[0], case, poisoned(case, given)), oracle(case, given))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("library", ["cudnn"], indirect=True)
def test_top_left_alignment(mask: str, library: tuple[str, Any]) -> None:
    for pair in ((QUERIES, KEYS), FEWER_KEYS):
        case = Case(*pair, options=MASKS[mask])
        given = numbers(case)
        compare(_adapted(library[0], case, poisoned(case, given)), oracle(case, given))


def test_either_gradient_alone(library: tuple[str, Any]) -> None:
    case = Case(GAPS, options={"causal": True})
    given = numbers(case)
    whole, only_out, only_lse, neither = (
        _adapted(library[0], case, given._replace(**left_out)).gradients
        for left_out in ({}, {"grad_lse": None}, {"grad_out": None}, {"grad_out": None, "grad_lse": None})
    )
    for a, b, c, d in zip(whole, only_out, only_lse, neither, strict=True):
        torch.testing.assert_close(a, b + c)
        assert (d == 0).all()


def test_the_gradient_of_lse_is_not_used_where_no_key_is_seen(library: tuple[str, Any]) -> None:
    """Of a log-sum-exp of nothing it may be NaN."""
    case = _ALIGNED["cross, causal"]
    given, expected = numbers(case), oracle(case, numbers(case))
    nothing = expected.lse == -torch.inf
    assert nothing[:, ~case.queries.padding()].any()
    given.grad_lse[nothing] = torch.nan
    compare(_adapted(library[0], case, given), expected)


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_is_passed_on(wanted: bool, library: tuple[str, Any]) -> None:
    name, stand_in = library
    _adapted(name, Case(GAPS), numbers(Case(GAPS)), deterministic=wanted)
    assert set(stand_in.deterministic) == {wanted}


@pytest.mark.parametrize("side", [adapter.gapless, adapter.in_place])
def test_malformed_metadata_is_clamped(side: Callable[..., adapter.Side]) -> None:
    """Whatever cu_seqlens hold, a peer is given rows that exist, in order, and no more of a sequence than its slot has."""
    for offsets in ([0, 50, 60], [0, -5, 9], [0, 12, 4], [-3, 4, 99]):
        bad, good = torch.tensor(offsets), torch.tensor([0, 9, 18])
        for cu, padded in ((bad, None), (bad, good), (good, bad), (bad, bad)):
            made = side(cu, padded, 20)
            starts = made.ends if made.starts is None else made.starts
            for x in (made.ends, starts):
                assert 0 <= x.min() <= x.max() <= 20
                assert (x.diff() >= 0).all()
            assert (made.ends.diff() <= starts.diff()).all()


# --- refusals and choice ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has every library and a Hopper GPU, as far as the contract can tell."""
    monkeypatch.setattr(contract, "installed", lambda module: True)
    monkeypatch.setattr(contract, "capability", lambda index: (9, 0))
    monkeypatch.setattr(measured, "capability", lambda index: (9, 0))


def _on_cuda(
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (8, 2),
    sequences: int = 4,
    rows: int = 4096,
    **settings: Any,
) -> Call:
    """A legal call on a GPU that need not be there."""
    usual = {"causal": True, "bottom_right": False, "window_left": -1, "window_right": -1, "scale": 0.1, "softmax": "vanilla"}
    more = {"softcap": 0.0, "max_seqlen_q": 0, "max_seqlen_kv": 0, "deterministic": False, "backend": "", "return_max_logit": False}
    missing = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded", "sink"))
    with FakeTensorMode():
        q, k = (torch.empty(rows, n, dims[0], device="cuda", dtype=dtype) for n in heads)
        v, cu = (
            torch.empty(rows, heads[1], dims[1], device="cuda", dtype=dtype),
            torch.empty(sequences + 1, device="cuda", dtype=torch.int32),
        )
    given: dict[str, Any] = {**missing, **usual, **more, **settings}
    return Call(q=q, k=k, v=v, cu_seqlens_q=cu, **given)


_CU = torch.zeros(5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("fa4", {}, ""),
        ("fa4", {"softmax": "learnable", "softcap": 2.0, "dims": (192, 128), "heads": (8, 8)}, ""),
        ("fa4", {"dims": (192, 128)}, "has no backward for grouped heads with values of another width"),
        ("fa4", {"cu_seqlens_kv": _CU, "bottom_right": True}, ""),
        ("fa4", {"cu_seqlens_kv": _CU, "causal": False}, ""),
        ("fa4", {"cu_seqlens_kv": _CU}, "aligns causal masks and windows bottom-right"),
        ("fa4", {"cu_seqlens_kv": _CU, "causal": False, "window_right": 3}, "aligns causal masks and windows bottom-right"),
        ("fa4", {"dtype": torch.float32}, "serves bfloat16 and float16 only"),
        ("fa4", {"return_max_logit": True}, "cannot return max_logit"),
        ("fa4", {"scale": 0.0}, "needs a scale above 0"),
        ("fa4", {"dims": (56, 64)}, "is wrong with head dims below 64"),
        ("fa4", {"dims": (128, 32)}, "is wrong with head dims below 64"),
        ("cudnn", {}, ""),
        ("cudnn", {"cu_seqlens_kv": _CU, "dims": (192, 128)}, ""),
        ("cudnn", {"softmax": "learnable"}, "has no gradient of a sink"),
        ("cudnn", {"softmax": "off_by_one"}, "has no gradient of a sink"),
        ("cudnn", {"softcap": 2.0}, "has no softcap"),
        ("cudnn", {"scale": -1.0}, "needs a scale above 0"),
        (
            "cudnn",
            {"deterministic": True, "rows": 32_768},
            "needs 2 * B * Hq * max_seqlen_q * max_seqlen_kv bytes, over 16 GiB here",
        ),
        ("cudnn", {"deterministic": True, "rows": 32_768, "max_seqlen_q": 8192}, ""),
        ("cudnn", {"sequences": 17}, "needs max_seqlen_q beyond 16 sequences"),
        ("cudnn", {"sequences": 17, "max_seqlen_q": 512}, ""),
        ("torch", {"softcap": 2.0}, "has no softcap"),
    ],
)
def test_what_is_refused_and_why(name: str, settings: dict[str, Any], reason: str, hopper: None) -> None:
    call = _on_cuda(**settings)
    found = contract.unserved(name, call, call.return_max_logit)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_refusals_of_a_machine(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "capability", lambda index: (8, 0))
    assert contract.unserved("fa4", _on_cuda(), False) == "needs a GPU of compute capability 9 or 10"
    monkeypatch.setattr(contract, "capability", lambda index: (10, 0))
    for name in ("fa4", "cudnn"):
        assert contract.unserved(name, _on_cuda(dims=(192, 128)), False) == ""
        assert contract.unserved(name, _on_cuda(dims=(192, 192)), False).startswith("serves head dims up to 128")
    monkeypatch.setattr(contract, "installed", lambda module: False)
    for name in ("fa4", "cudnn"):
        assert contract.unserved(name, _on_cuda(), False) == f"is not installed (pip install 'thdops[{name}]')"


def test_installed_looks_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the package, whose parent may be another library's, nor the module."""
    for folder in ("loud_parent/quiet", "loud_parent/quiet/child"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "loud_parent" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert contract.installed("loud_parent.quiet")
    assert not contract.installed("loud_parent.absent")
    assert not contract.installed("no_such_package.quiet")
    assert (
        torch.compile(lambda x: x + contract.installed("loud_parent.quiet"), backend="eager", fullgraph=True)(torch.ones(())) == 2
    )


def test_native_first_where_nothing_was_measured(hopper: None) -> None:
    assert list(measured.order(_on_cuda(window_left=5))) == ["native", "fa4", "cudnn", "torch"]


def test_the_table_is_written_read_and_obeyed(hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind by its own times, all lengths of it together while a compiler traces, serving more before serving faster."""
    file = tmp_path / "measured.json"
    monkeypatch.setattr(measured, "_FILE", file)
    long, short = (measured.kind((128, 128), True, (-1, -1), rows, 4) for rows in (8192, 512))
    times = [(long, "fa4", 5.0), (long, "native", 6.0), (long, "cudnn", 9.0)]
    times += [(short, "cudnn", 2.0), (short, "native", 3.0), (short, "torch", 1.0), (short, "torch", 50.0)]
    assert measured.write(torch.device("cuda", 0), times, {"gpu": "a Hopper"}) == file
    table = json.loads(file.read_text())
    assert table["sm_90"]["measured"] == {"gpu": "a Hopper"}
    monkeypatch.setattr(measured, "_TABLE", table)
    assert list(measured.order(_on_cuda(sequences=2))) == ["fa4", "native", "cudnn", "torch"]
    assert list(measured.order(_on_cuda(sequences=16))) == ["torch", "cudnn", "native", "fa4"]
    assert measured.choose(_on_cuda(sequences=2)) == "fa4"
    assert measured.choose(_on_cuda(sequences=16)) == "torch"
    assert measured.choose(_on_cuda(sequences=2, return_max_logit=True)) == "native"
    assert measured.order(_on_cuda(dims=(64, 64)))[0] == "native"
    assert measured.order(_on_cuda(window_left=5))[0] == "native"
    monkeypatch.setattr(measured, "capability", lambda index: (10, 0))
    assert measured.order(_on_cuda())[0] == "native"
    monkeypatch.setattr(measured, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert list(measured.order(_on_cuda())) == ["native", "cudnn", "torch", "fa4"]


# --- contests ---------------------------------------------------------------------------------------------------------------------


def test_the_sample_of_a_judge_agrees_with_the_reference() -> None:
    for contest in contests.contests(CPU):
        args = contest.make()
        forward = contest.name.endswith("forward")
        results = list(reference.attention(*args) if forward else reference.attention_grad(*args))
        assert difference(*contest.held_against(args, results)) == ""
        for i, result in enumerate(results[: 2 if forward else 3]):
            wrong = [x.clone() for x in results]
            (wrong[i][:, 20] if result.dim() == 2 else wrong[i][20])[:] += 0.5  # a valid row of every shape
            assert difference(*contest.held_against(args, wrong)).startswith(f"result {i}"), contest.name


def test_a_row_is_judged_by_its_own_size() -> None:
    """The first row is large and rounded to 16 bits in the middle of its computation; the others are small."""
    torch.manual_seed(0)
    small = torch.full((48, 1, 1), 0.03).index_fill(0, torch.tensor([0]), 1.0)
    expected = torch.randn(48, 16, 128) * small
    got = (expected + 3e-3 * torch.randn(48, 16, 128) * small).bfloat16()
    judged = judge._in_units_of_rows([got], [expected])
    assert difference([got], [expected]).startswith("result 0")
    assert difference(*judged) == ""
    got[7, 3, 5] += 0.005
    assert difference(*judge._in_units_of_rows([got], [expected])).startswith("result 0")


def test_a_judge_wants_a_gradient() -> None:
    (sample, *_) = samples.attention_grad_samples(CPU)
    with pytest.raises(ValueError, match="grad_out must be given to be judged, got None"):
        judge.attention_grad(GradCall(*sample.args)._replace(grad_out=None), ())


def test_the_table_is_made_of_whole_pairs_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(measured, "write", lambda device, times, facts: kept.extend(times))
    forward, backward, deterministic = list(contests.contests(CPU))[:3]
    of = contests.Outcome
    outcomes = [of(forward, "native", 2.0), of(backward, "native", 5.0), of(deterministic, "native", 9.0), of(forward, "fa4", 1.0)]
    outcomes += [of(backward, "fa4", 1.0), of(forward, "op fa4", 3.0), of(backward, "op fa4", 4.5), of(forward, "op torch", 1.0)]
    contests.write_table(CPU, outcomes, {})
    kind = forward.subject.kind
    assert kept == [(kind, "native", 7.0), (kind, "fa4", 7.5)]


def test_shapes_are_what_their_names_say() -> None:
    shapes = list(contests._shapes(torch.device("cuda")))
    for shape in shapes:
        assert min(shape.lengths) >= 0
        if "rows empty" in shape.name:
            assert shape.rows == 65_536
            share = float(shape.name.split("%")[0]) / 100
            assert math.isclose(sum(shape.lengths), shape.rows * (1 - share), abs_tol=1)
            assert math.isclose(shape.tail, shape.rows * share / 2, abs_tol=len(shape.lengths))
    documents = next(s for s in shapes if s.name.startswith("documents"))
    assert sum(documents.lengths) == 65_536
    assert 500 < sum(documents.lengths) / len(documents.lengths) < 700


# --- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", _LIBRARIES)
@pytest.mark.parametrize("case", [*_SERVED.values()], ids=_SERVED)
def test_values_and_gradients_with_poisoned_padding(case: Case, name: str) -> None:
    if not contract.installed(contract.PEERS[name]):
        pytest.skip(f"{name} is not installed")
    if name == "fa4":  # which refuses narrower heads, and grouped ones of two widths
        case = case._replace(dims=(64, 64)) if case.dims[0] == case.dims[1] else case._replace(dims=(192, 128), heads=(4, 4))
    check(case, "cuda", backend=name)


@pytest.mark.gpu
def test_the_peers_stay_out_of_a_process_that_does_not_call_them() -> None:
    q, k, v = (torch.randn(20, 4, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    table = thdops.attention_backends(q, k, v, TAIL.metadata("cuda")[0])
    assert set(table) == set(contract.BACKENDS)
