"""Native attention on a GPU at full size, values and gradients against the reference in fp32, over a generated grid.

T rows, H heads, D head dim. Masks x head shapes x gaps is a product; for each of these the rest is drawn: whether the kernels for
short or for long sequences are taken, or those that the shapes stand for, whether gradients repeat, whether LSE has one, and how q,
k and v are packed. Numbers are of unit size, and errors are held against sizes (`errors`), one by one and all together: of numbers
of a tenth, which TransformerEngine's tests have, most gradients are smaller than their tolerance (1.5e-2 for bf16). Padding
rows hold NaN, upstream gradients' too.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from attention_oracle import Batch, forget_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thdops


class Model(NamedTuple):
    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    longest: int
    keyed: bool = False  # keys have lengths of their own


MODELS = {
    "16 x 64": Model(16, 16, 64, 64, 2048),
    "64/8 x 64": Model(64, 8, 64, 64, 1024),
    "24/1 x 128": Model(24, 1, 128, 128, 2048),
    "12 x 128": Model(12, 12, 128, 128, 1500),
    "24/24 x 128, longer keys": Model(24, 24, 128, 128, 4096, keyed=True),
    "16 x 192/128": Model(16, 16, 192, 128, 2048),
    "8/4 x 64/128": Model(8, 4, 64, 128, 1024),
    "8/4 x 128/64": Model(8, 4, 128, 64, 1024),
    "4 x 160/128": Model(4, 4, 160, 128, 700),
    "8/2 x 96, other keys": Model(8, 2, 96, 96, 1024, keyed=True),
    "4/2 x 256": Model(4, 2, 256, 256, 1024),
    "4/2 x 40": Model(4, 2, 40, 40, 512),
}
BOTTOM_RIGHT = {"causal": True, "causal_alignment": "bottom_right"}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "bottom-right": BOTTOM_RIGHT,
    "window 2, 2": {"window": (2, 2)},
    "window 4, 4": {"window": (4, 4)},
    "causal, window 4": {"causal": True, "window": (4, 0)},
    "bottom-right, window 4": {**BOTTOM_RIGHT, "window": (4, 0)},
    "causal, window 128": {"causal": True, "window": (128, 0)},
    "causal, window 300": {"causal": True, "window": (300, -1)},
    "window 700, 430": {"window": (700, 430)},
    "bottom-right, window 1030": {**BOTTOM_RIGHT, "window": (1030, -1)},
}
# Of errors of an element of dK, of one elsewhere, and of a tensor's rms. On an H200 the grid reaches 2.2e-2, 8.8e-3 and 2.9e-3, in
# fp16 1.3e-3, 1.1e-3 and 3.1e-4.
TOLERANCE_DK = {torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
TOLERANCE = {torch.bfloat16: 1.25e-2, torch.float16: 1.5e-3}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Setting(NamedTuple):
    model: str
    mask: str
    gaps: bool
    dtype: torch.dtype = torch.bfloat16
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed
    lengths: str = "any"
    deterministic: bool = True
    lse_gradient: bool = True
    packing: str = "apart"

    def __str__(self) -> str:
        drawn = "repeats" if self.deterministic else "any order", "dLSE" if self.lse_gradient else "no dLSE", self.packing
        return ", ".join((self.model, self.mask, "gaps" if self.gaps else "tail", f"{self.lengths} lengths", *drawn))


def packings(model: Model) -> list[str]:
    """The ways to pack q, k and v: THD, T3HD, TH3D, T2HD, TH2D."""
    some = ["apart"]
    if model.dim == model.dim_v:
        some += ["k and v of a row", "k and v of a head"]
        if model.heads == model.heads_kv and not model.keyed:
            some += ["all of a row", "all of a head"]
    return some


def grid() -> list[Setting]:
    draw = random.Random(0)
    chosen = []
    for mask, model, gaps in itertools.product(MASKS, MODELS, (False, True)):
        lengths = draw.choice(("short", "long", "any"))
        rest = draw.random() < 0.5, draw.random() < 0.5, draw.choice(packings(MODELS[model]))
        chosen.append(Setting(model, mask, gaps, torch.bfloat16, {}, lengths, *rest))
    return chosen


# --- one problem -----------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    setting: Setting
    queries: Batch
    keys: Batch
    given: tuple[Tensor, ...]  # q, k, v, NaN on padding rows
    sink: Tensor | None
    upstream: tuple[Tensor, ...]  # of out, and perhaps of LSE; NaN on padding rows


def problem(setting: Setting, device: torch.device, batches: tuple[Batch, Batch] | None = None) -> Problem:
    """Of the model's usual batch, or of these, of queries and of keys."""
    heads, heads_kv, dim, dim_v, longest, keyed = MODELS[setting.model]
    x, y = batches or usual_batches(longest, setting.gaps, keyed)
    generator = torch.Generator(device).manual_seed(0)
    new = lambda *shape: torch.randn(shape, device=device, generator=generator)  # noqa: E731
    given = _packed(
        setting.packing, (x.total, heads, dim), (y.total, heads_kv, dim), (y.total, heads_kv, dim_v), setting.dtype, new
    )
    sink = new(heads) if setting.more.get("softmax") == "learnable" else None
    upstream = [new(x.total, heads, dim_v).to(setting.dtype)]
    if setting.lse_gradient:
        upstream.append(new(x.total, heads).T)
    padding, unseen = (side.padding().to(device) for side in (x, y))
    for tensor, mask in zip((*given, upstream[0]), (padding, unseen, unseen, padding), strict=True):
        tensor.masked_fill_(mask[:, None, None], torch.nan)
    for grad in upstream[1:]:
        grad.masked_fill_(padding, torch.nan)
    return Problem(setting, x, y, given, sink, tuple(upstream))


def usual_batches(longest: int, gaps: bool, keyed: bool) -> tuple[Batch, Batch]:
    """Long and short sequences, of one row and of none, the longest among them."""
    x = _batch(longest, gaps, 0)
    return x, _batch(longest, gaps, 1) if keyed else x


def _batch(longest: int, gaps: bool, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(1, longest, (2,), generator=generator).tolist()
    lengths = [0, some[0], 1, 63, longest, 0, some[1]]
    padded = [n + int(torch.randint(4, (1,), generator=generator)) for n in lengths] if gaps else None
    return Batch(lengths, padded, sum(padded or lengths) + 77)


def _packed(packing: str, q: Any, k: Any, v: Any, dtype: torch.dtype, new: Any) -> tuple[Tensor, ...]:
    """Views of one buffer, of two, or of three."""
    if packing == "all of a row":
        return new(q[0], 3, *q[1:]).to(dtype).unbind(1)
    if packing == "all of a head":
        return new(*q[:2], 3, q[2]).to(dtype).unbind(2)
    first = new(*q).to(dtype)
    if packing == "k and v of a row":
        return first, *new(k[0], 2, *k[1:]).to(dtype).unbind(1)
    if packing == "k and v of a head":
        return first, *new(*k[:2], 2, k[2]).to(dtype).unbind(2)
    return first, new(*k).to(dtype), new(*v).to(dtype)


def offsets(asked: Problem) -> dict[str, Any]:
    """Of queries, and of keys that have their own."""
    names = ("cu_seqlens_q", "cu_seqlens_q_padded"), ("cu_seqlens_kv", "cu_seqlens_kv_padded")
    sides = (asked.queries,) if asked.keys is asked.queries else (asked.queries, asked.keys)
    device = asked.given[0].device
    return {name: x for some, side in zip(names, sides, strict=False) for name, x in zip(some, side.metadata(device), strict=True)}


def answers(asked: Problem, backend: str) -> list[Tensor]:
    """(out, lse, dq, dk, dv, and dsink); the reference's in fp32, of numbers without NaN."""
    setting = asked.setting
    exact = backend == "reference"
    tensors = [x.nan_to_num().float() if exact else x for x in asked.given]
    leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in (*tensors, asked.sink)]
    options = {**offsets(asked), **MASKS[setting.mask], **setting.more, "deterministic": setting.deterministic, "return_lse": True}
    q, k, v, sink = leaves
    results = thdops.attention(q, k, v, sink=sink, backend=backend, **options)
    upstream = [g.nan_to_num().float() if exact else g for g in asked.upstream]
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [*(x.detach() for x in results[:2]), *torch.autograd.grad(results[: len(upstream)], wanted, upstream)]


def errors(asked: Problem, found: list[Tensor], expected: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Of out and each gradient, the largest error of an element and the rms of all, as parts of what they are held against.

    P, dS and the results are rounded to 16 bits, so that an error grows with its element and with all that stand in its row, its
    head's part of the row and, in long sums, the tensor. Where a row sees few keys, dP and delta cancel out, and what is left of
    them in dQ is delta's error, which comes of the rounding of out: s |out * dout| is held against, too (keys are of size 1). In dK
    it is left, too, of all rows that see a key: hence `TOLERANCE_DK`.
    """
    delta = (expected[0] * asked.upstream[0].nan_to_num()).norm(dim=2, keepdim=True) / asked.given[0].shape[2] ** 0.5
    parts = {}
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, expected, strict=False):
        if name == "lse":
            continue
        size = b.abs() + delta if name == "dq" else b.abs()
        scale = size + _rms(b) + (_rms(b, 1, 2) + _rms(b, 2) if b.dim() == 3 else 0)
        error = (a.float() - b).abs()
        parts[name] = float((error / scale.clamp(min=1e-30)).max()), float(_rms(error) / _rms(b).clamp(min=1e-30))
    return parts


def _rms(x: Tensor, *dims: int) -> Tensor:
    return x.square().mean(dims or None, keepdim=bool(dims)).sqrt()


def differences(asked: Problem, found: list[Tensor], expected: list[Tensor]) -> str:
    """What is wrong, or ""."""
    dtype = asked.setting.dtype
    for name, (largest, rms) in errors(asked, found, expected).items():
        if not largest <= (TOLERANCE_DK if name == "dk" else TOLERANCE)[dtype]:
            return f"{name}: an element is wrong by {largest:.3g} of its size and of those around it"
        if name != "dsink" and not rms <= ROUNDING[dtype]:
            return f"{name}: wrong by {rms:.3g} of its size, rms"
    if not bool(((found[1] == expected[1]) | ((found[1] - expected[1]).abs() <= 1e-3)).all()):
        return "lse: wrong by more than 1e-3"
    rows, keys = (side.padding().to(found[0].device) for side in (asked.queries, asked.keys))
    for name, x, mask in zip(("out", "dq", "dk", "dv"), (found[0], *found[2:5]), (rows, rows, keys, keys), strict=True):
        if bool((x[mask] != 0).any() | x[mask].signbit().any()):
            return f"{name}: not +0.0 on padding rows"
    return "" if bool((found[1][:, rows] == -torch.inf).all()) else "lse: not -inf on padding rows"


def holds(setting: Setting, monkeypatch: pytest.MonkeyPatch, batches: tuple[Batch, Batch] | None = None) -> None:
    from thdops.ops.attention_thd import kernels

    if setting.lengths != "any":
        forget_plans(monkeypatch)
        monkeypatch.setattr(kernels, "_lengths", lambda call: (setting.lengths,))
    asked = problem(setting, torch.device("cuda"), batches)
    found = answers(asked, "native")
    assert differences(asked, found, answers(asked, "reference")) == ""
    again = answers(asked, "native")
    repeated = range(len(found)) if setting.deterministic else (0, 1)
    assert all(torch.equal(found[i], again[i]) for i in repeated)


# --- the grid --------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("setting", grid(), ids=str)
def test_masks_by_head_shapes_by_gaps(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(setting, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["short", "long"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("model", ["16 x 64", "24/1 x 128", "16 x 192/128", "4/2 x 256", "4/2 x 40"])
def test_fp16(model: str, mask: str, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(Setting(model, mask, True, torch.float16, {}, lengths, deterministic=False), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["short", "long"])
@pytest.mark.parametrize("softmax", ["off_by_one", "learnable"])
@pytest.mark.parametrize("mask", ["full", "causal", "window 4, 4", "causal, window 128"])
@pytest.mark.parametrize("model", ["64/8 x 64", "24/1 x 128", "16 x 192/128", "4/2 x 256"])
def test_sinks(model: str, mask: str, softmax: str, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(Setting(model, mask, True, torch.bfloat16, {"softmax": softmax}, lengths), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["16 x 64", "24/1 x 128", "16 x 192/128"])
def test_softcap(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(Setting(model, "causal", True, torch.bfloat16, {"softcap": 2.0}), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "bottom-right, window 4"])
@pytest.mark.parametrize("model", ["16 x 64", "24/24 x 128, longer keys", "4/2 x 256"])
def test_max_logit(model: str, mask: str) -> None:
    asked = problem(Setting(model, mask, True), torch.device("cuda"))
    found = []
    for backend, (q, k, v) in (("native", asked.given), ("reference", tuple(x.nan_to_num().float() for x in asked.given))):
        found.append(thdops.attention(q, k, v, **offsets(asked), **MASKS[mask], return_max_logit=True, backend=backend))
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)


_LENGTHS = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 192, 256]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Batch, Batch]:
    """Any lengths with any gaps, rows before the first sequence and behind the last; keys of their own, or not."""
    sequences, keyed = draw(st.integers(0, 5)), draw(st.booleans())

    def side() -> Batch:
        lengths = [draw(_LENGTHS) for _ in range(sequences)]
        padded, before = [n + draw(st.integers(0, 70)) for n in lengths], draw(st.integers(0, 9))
        return Batch(lengths, padded, before + sum(padded) + draw(st.integers(1, 200)), before)

    x = side()
    return x, side() if keyed else x


@pytest.mark.gpu
@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches=layouts(), data=st.data())
def test_random_layouts(batches: tuple[Batch, Batch], data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(["16 x 64", "24/1 x 128", "16 x 192/128", "4/2 x 256"]))
    drawn = data.draw(st.sampled_from(list(MASKS))), True, torch.bfloat16, {}, data.draw(st.sampled_from(["short", "long"]))
    with pytest.MonkeyPatch.context() as patch:
        holds(Setting(model, *drawn, deterministic=data.draw(st.booleans())), patch, batches)


# --- the grid itself, on a CPU ---------------------------------------------------------------------------------------------------

_BROKEN = {
    "out": lambda results: results[0].mul_(1.1),
    "lse": lambda results: results[1].add_(0.002),
    "dq": lambda results: results[2].zero_(),
    "dk": lambda results: results[3].copy_(results[3].roll(1, 2)),
    "all of dk by little": lambda results: results[3].mul_(1.01),
    "dv": lambda results: results[4][-90:].mul_(1.1),
    "dsink": lambda results: results[5].mul_(0.95),
    "padding": lambda results: results[2].copy_(torch.where(results[2] == 0, -0.0, results[2])),
}


@pytest.mark.parametrize("broken", [None, *_BROKEN])
@pytest.mark.parametrize("model", ["12 x 128", "8/2 x 96, other keys", "16 x 192/128"])
def test_what_is_wrong_is_noticed(model: str, broken: str | None) -> None:
    """Tolerances of 16 bits let nothing through that matters: results of bf16 numbers, as they are and broken."""
    setting = Setting(model, "causal", True, torch.bfloat16, {"softmax": "learnable"}, packing=packings(MODELS[model])[-1])
    asked = problem(setting, torch.device("cpu"), usual_batches(90, True, MODELS[model].keyed))
    expected = answers(asked, "reference")
    found = [x.to(torch.bfloat16) if x.dim() == 3 else x.clone() for x in expected]
    if broken is not None:
        _BROKEN[broken](found)
    assert (differences(asked, found, expected) == "") is (broken is None)
