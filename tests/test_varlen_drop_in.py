"""`thdops.integrations.varlen`: the signature of torch's `varlen_attn`, its results and alignment, refusals."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from attention_oracle import FEWER_KEYS, KEYS, MASKS, QUERIES, TAIL, Batch, Case, compare, numbers, oracle, poisoned
from torch import Tensor
from torch.nn.attention import varlen as torchs

from thdops.integrations.varlen import AuxRequest, varlen_attn

_FIRST = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
# Keyword-only, with defaults, as torch 2.13 has them.
_OPTIONS = {
    "return_aux": None,
    "scale": None,
    "window_size": (-1, -1),
    "enable_gqa": False,
    "seqused_k": None,
    "block_table": None,
    "num_splits": None,
}


def test_the_signature() -> None:
    parameters = inspect.signature(varlen_attn).parameters
    given = [p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    named = {p.name: p.default for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert given == list(_FIRST)
    assert all(parameters[name].default is inspect.Parameter.empty for name in _FIRST)
    assert named == _OPTIONS
    assert list(parameters) == [*_FIRST, *_OPTIONS]


def test_every_call_of_the_installed_torch_is_one_of_ours() -> None:
    """An older torch lacks some of the options; what it has stands at the same place with the same default."""
    ours, theirs = (inspect.signature(function).parameters for function in (varlen_attn, torchs.varlen_attn))
    described = {name: (p.kind, p.default) for name, p in ours.items()}
    assert described.items() >= {name: (p.kind, p.default) for name, p in theirs.items()}.items()
    assert [name for name in ours if name in theirs] == list(theirs)
    assert AuxRequest is torchs.AuxRequest
    if torch.__version__.startswith("2.13"):
        assert list(theirs) == list(ours)


def _metadata(case: Case) -> tuple[Any, Any, Any, Any]:
    cu, _ = case.queries.metadata("cpu")
    cu_k = cu if case.keys is None else case.keys.metadata("cpu")[0]
    return cu, cu_k, max(case.queries.lengths), max(case.keyed().lengths)


_SELF = Case(TAIL)
_CROSS = Case(QUERIES._replace(padded=None), KEYS._replace(padded=None))
_FEWER = Case(*FEWER_KEYS)  # of which some queries see none
_AS_MANY = Case(Batch([6, 2, 0], None, 8), Batch([3, 4, 1], None, 8))  # rows, but of other sequences


@pytest.mark.parametrize("window", sorted({m["window"] for m in MASKS.values() if "window" in m} | {(-1, -1), (-1, 0)}), ids=str)
@pytest.mark.parametrize("case", [_SELF, _CROSS, _FEWER, _AS_MANY], ids=["self", "cross", "fewer keys", "as many keys"])
def test_values_and_gradients(case: Case, window: tuple[int, int]) -> None:
    case = case._replace(options={"window": window, "causal_alignment": "bottom_right", "scale": 0.3})
    given = numbers(case)
    q, k, v = leaves = tuple(x.clone().requires_grad_() for x in given[:3])
    aux = AuxRequest(lse=True)
    out, lse = varlen_attn(q, k, v, *_metadata(case), return_aux=aux, scale=0.3, window_size=window, enable_gqa=True)
    gradients = torch.autograd.grad((out, lse), leaves, (given.grad_out, given.grad_lse))
    expected = oracle(case, given)._replace(max_logit=None)
    compare(type(expected)(out.detach(), lse.detach(), None, gradients), expected)
    for none in (None, AuxRequest()):
        alone = varlen_attn(q, k, v, *_metadata(case), return_aux=none, scale=0.3, window_size=window)
        assert isinstance(alone, Tensor)
        assert torch.equal(alone, out)


def test_no_offsets_of_keys_are_those_of_the_queries() -> None:
    given = numbers(_SELF)
    cu, _, longest, _ = _metadata(_SELF)
    expected = varlen_attn(*given[:3], cu, cu.clone(), longest, longest, window_size=(-1, 0))
    for keys in (None, cu):
        actual = varlen_attn(*given[:3], cu, keys, longest, longest, window_size=(-1, 0), num_splits=1)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    few = cu.diff() - 1
    expected, actual = (varlen_attn(*given[:3], cu, keys, longest, longest, seqused_k=few) for keys in (cu.clone(), None))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_only_the_keys_in_use_count(dtype: torch.dtype) -> None:
    """Gaps behind the keys of each sequence, with NaN in them; the diagonal ends at the last key in use. Differentiable."""
    case = Case(QUERIES._replace(padded=None), KEYS, options={"window": (-1, 0), "causal_alignment": "bottom_right"})
    given = numbers(case)
    q, k, v = (x.requires_grad_() for x in poisoned(case, given)[:3])
    q = given.q.clone().requires_grad_()
    cu = case.queries.metadata("cpu")[0]
    (used, slots), longest = KEYS.metadata("cpu"), max(KEYS.padded or [])
    out, lse = varlen_attn(
        q, k, v, cu, slots, 5, longest, return_aux=AuxRequest(lse=True), window_size=(-1, 0), seqused_k=used.diff().to(dtype)
    )
    gradients = torch.autograd.grad((out, lse), (q, k, v), (given.grad_out, given.grad_lse))
    expected = oracle(case, given)._replace(max_logit=None)
    compare(type(expected)(out.detach(), lse.detach(), None, gradients), expected)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"block_table": torch.ones(1, 1)}, ValueError, "block_table must be None, got a Tensor; paged caches are not served"),
        ({"max_q": None}, TypeError, "max_q must be an int, got None"),
        ({"num_splits": "one"}, TypeError, "num_splits must be a Python number, got a str"),
        ({"seqused_k": [5]}, TypeError, "seqused_k must be a tensor, got a list"),
        ({"cu_seq_q": None}, TypeError, "cu_seq_q must be a tensor, got None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    given = dict(zip(_FIRST, (*numbers(_SELF)[:3], *_metadata(_SELF)), strict=True))
    with pytest.raises(error, match=re.escape(f"varlen_attn: {text}")):
        varlen_attn(**{**given, **changed})


@pytest.mark.gpu
@pytest.mark.parametrize("case", [_SELF, _CROSS, _FEWER], ids=["self", "cross", "fewer keys"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)], ids=str)
def test_torchs_own_function_agrees(case: Case, window: tuple[int, int]) -> None:
    given = numbers(case, torch.bfloat16)
    q, k, v = (x.cuda() for x in given[:3])
    cu, cu_k, *longest = _metadata(case)
    cu, cu_k = cu.cuda(), cu_k.cuda()
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(torchs.varlen_attn).parameters else {}
    expected = torchs.varlen_attn(q, k, v, cu, cu_k, *longest, window_size=window, **grouped)
    actual = varlen_attn(q, k, v, cu, cu_k, *longest, window_size=window)
    rows = ~case.queries.padding()
    torch.testing.assert_close(actual[rows], expected[rows], rtol=2e-2, atol=2e-2)
