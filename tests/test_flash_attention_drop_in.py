"""`thdops.integrations.flash_attention`: flash-attn 2.8's signature, results in its order, bottom-right alignment, refusals."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from attention_oracle import FEWER_KEYS, KEYS, MASKS, QUERIES, TAIL, Batch, Case, Numbers, compare, numbers, oracle
from torch import Tensor

from thdops.integrations.flash_attention import flash_attn_varlen_func

# Its parameters in order, with defaults, as flash-attn 2.8.3 has them.
SIGNATURE = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "cu_seqlens_q": inspect.Parameter.empty,
    "cu_seqlens_k": inspect.Parameter.empty,
    "max_seqlen_q": inspect.Parameter.empty,
    "max_seqlen_k": inspect.Parameter.empty,
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
    "block_table": None,
}


def test_the_signature() -> None:
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == SIGNATURE
    assert list(parameters) == list(SIGNATURE)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def _leaves(given: Numbers) -> tuple[Any, Any, Any]:
    return given.q.clone().requires_grad_(), given.k.clone().requires_grad_(), given.v.clone().requires_grad_()


def _metadata(case: Case) -> tuple[Any, Any, Any, Any]:
    cu, _ = case.queries.metadata("cpu")
    cu_k = cu if case.keys is None else case.keys.metadata("cpu")[0]
    return cu, cu_k, max(case.queries.lengths), max(case.keyed().lengths)


_SELF = Case(TAIL)
_CROSS = Case(QUERIES._replace(padded=None), KEYS._replace(padded=None))
_FEWER = Case(*FEWER_KEYS)  # of which some queries see none
_AS_MANY = Case(Batch([6, 2, 0], None, 8), Batch([3, 4, 1], None, 8))  # rows, but of other sequences


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", [_SELF, _CROSS, _FEWER, _AS_MANY], ids=["self", "cross", "fewer keys", "as many keys"])
def test_values_and_gradients(case: Case, mask: str) -> None:
    options = dict(MASKS[mask])
    case = case._replace(options={**options, "causal_alignment": "bottom_right", "softcap": 0.8, "scale": 0.3})
    given = numbers(case)
    leaves = _leaves(given)
    causal, window = options.get("causal", False), options.get("window", (-1, -1))
    out, lse, nothing = flash_attn_varlen_func(
        *leaves, *_metadata(case), 0.0, 0.3, causal, window, 0.8, None, True, return_attn_probs=True
    )
    assert nothing is None
    gradients = torch.autograd.grad((out, lse), leaves, (given.grad_out, given.grad_lse))
    expected = oracle(case, given)._replace(max_logit=None)
    compare(type(expected)(out.detach(), lse.detach(), None, gradients), expected)


@pytest.mark.parametrize("dims", [(8, 8), (20, 20), (17, 5), (32, 24)], ids=str)
def test_any_head_dim_is_padded_and_scaled_by_what_it_was(dims: tuple[int, int]) -> None:
    case = Case(TAIL, dims=dims, options={"causal": True})
    given = numbers(case)
    leaves = _leaves(given)
    out = flash_attn_varlen_func(*leaves, *_metadata(case), causal=True)
    assert out.shape == given.grad_out.shape
    gradients = torch.autograd.grad(out, leaves, given.grad_out)
    expected = oracle(case, given._replace(grad_lse=torch.zeros_like(given.grad_lse)))
    compare(expected._replace(out=out.detach(), max_logit=None, gradients=gradients), expected)


def test_one_tensor_for_both_sides_is_self_attention() -> None:
    """Also where keys have more rows behind the last sequence; and compiled, in one graph."""
    case = Case(Batch([5, 9, 2], None, 20))
    given = numbers(case, torch.float32)
    cu, *_ = _metadata(case)
    q, k, v = given[:3]

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu_k, 9, 9, causal=True)

    expected = call(q, k, v, cu, cu.clone())
    longer_k, longer_v = (torch.cat((x, torch.full_like(x[:3], torch.nan))) for x in (k, v))
    for function in (call, torch.compile(call, backend="eager", fullgraph=True)):
        torch.testing.assert_close(function(q, k, v, cu, cu), expected)
        torch.testing.assert_close(function(q, longer_k, longer_v, cu, cu), expected)


def test_deterministic_reaches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """False leaves it to torch's own mode."""
    from thdops.integrations import bottom_right

    seen = []
    monkeypatch.setattr(bottom_right, "attention", lambda *args, **options: seen.append(options["deterministic"]) or args[:2])
    given = numbers(_SELF)
    for wanted in (True, False):
        flash_attn_varlen_func(*given[:3], *_metadata(_SELF), deterministic=wanted)
    assert seen == [True, None]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p must be 0.0, got 0.1; dropout in attention is not served"),
        ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes must be None, got a Tensor; neither ALiBi nor paged caches"),
        ({"block_table": torch.ones(1, 1)}, ValueError, "block_table must be None, got a Tensor"),
        ({"max_seqlen_k": torch.tensor(9)}, TypeError, "max_seqlen_k must be a Python number, got a tensor"),
        ({"cu_seqlens_k": [0, 5]}, TypeError, "cu_seqlens_k must be a tensor, got a list"),
        ({"causal": None}, TypeError, "causal must be a bool, got None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    given = dict(zip(SIGNATURE, (*numbers(_SELF)[:3], *_metadata(_SELF)), strict=False))
    with pytest.raises(error, match=re.escape(f"flash_attn_varlen_func: {text}")):
        flash_attn_varlen_func(**{**given, **changed})
