"""Selective activation checkpointing with `save_ops`: attention and routing are not computed again, gradients stay the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import thdops
from thdops.ops.attention_thd import reference as attention_reference
from thdops.ops.router import reference as router_reference

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")

VALID, PADDED = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 10], dtype=torch.int32)


def _attend(x: Tensor) -> Tensor:
    q, k, v = (x.sin().view(12, 4, 16), x.cos().view(12, 4, 16), x.tanh().view(12, 4, 16))
    out, lse = thdops.attention(q, k, v, VALID, cu_seqlens_q_padded=PADDED, causal=True, return_lse=True)
    return out.flatten(1) * torch.where(lse.isfinite(), lse, 0).sum(0)[:, None]


def _route(x: Tensor) -> Tensor:
    routed = thdops.router(x.sin(), 2, cu_seqlens=VALID, cu_seqlens_padded=PADDED, aux_coeff=0.1)
    return routed.probs.sin() * routed.aux_loss


def _choose(x: Tensor) -> Tensor:
    return thdops.router_topk(x.sin(), 2)[0].sin()


def _score(x: Tensor) -> Tensor:
    return thdops.router_scores(x.sin(), 2, "softmax")[1].sin()


def test_the_list() -> None:
    names = {op.name() for op in thdops.save_ops()}
    assert names == {f"thdops::{name}" for name in ("attention", "context_attention", "router", "router_scores", "router_topk")}
    thdops.save_ops().clear()
    assert len(thdops.save_ops()) == 5


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("block", "module", "inner"),
    [
        pytest.param(_attend, attention_reference, "_attention", id="attention"),
        pytest.param(_route, router_reference, "_route", id="router"),
        pytest.param(_choose, router_reference, "_route", id="router_topk"),
        pytest.param(_score, router_reference, "_score", id="router_scores"),
    ],
)
def test_forwards_are_not_run_again(
    block: Callable[[Tensor], Tensor], module: ModuleType, inner: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    run = getattr(module, inner)

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*args)

    monkeypatch.setattr(module, inner, counted)
    x = torch.randn(12, 64)
    kept = functools.partial(create_selective_checkpoint_contexts, thdops.save_ops())
    found = {}
    for name, options in (("plain", None), ("checkpointed", {}), ("selective", {"context_fn": kept})):

        def step(leaf: Tensor, options: Any = options) -> Tensor:
            return block(leaf) if options is None else checkpoint(block, leaf, use_reentrant=False, **options)

        if mode == "compiled":
            torch._dynamo.reset()
            step = torch.compile(step, backend="aot_eager_decomp_partition", fullgraph=True)
        leaf, calls = x.clone().requires_grad_(), 0
        step(leaf).sum().backward()
        found[name] = (calls, leaf.grad)
    assert [found[name][0] for name in found] == [1, 2, 1]
    for _, grad in found.values():
        torch.testing.assert_close(grad, found["plain"][1], rtol=0, atol=0 if mode == "eager" else 1e-6)
