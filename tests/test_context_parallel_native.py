"""Context parallelism by the native kernels, which merge sections and add their gradients up on their way out.

On CPU they run in Triton's interpreter in fp32, against one device in fp64, and every address is held against the tensors' memory;
on a GPU in bf16 in full sizes, against one device and fp32.
T rows of the whole batch, W ranks, H heads, D head dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_oracle import Batch, from_offsets
from context_parallel_problems import LAYOUTS, Problem, Results, compare, one_device, problem
from torch import Tensor

import thdops
from meta_kernels.context_attention import VIRTUAL, Call
from thdops import context_parallel
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.context_parallel import run, sections
from thdops.ops.context.reference import from_rank_order, to_rank_order

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
interpreted = pytest.mark.skipif(CUDA or why_not() != "", reason=why_not() or "interpreted where there is no GPU")
CAUSAL: dict[str, Any] = {"causal": True}
BATCHES = {  # the last three failed in other projects; the number is the row of the list of cases
    **LAYOUTS,
    "case 1": from_offsets([0, 9, 17, 25, 37, 45, 57], [0, 12, 20, 28, 40, 48, 60], 60),
    "case 4": from_offsets([0, 3, 8], [0, 4, 12], 16),
    "case 10": Batch([4, 3], [4, 4], 8),
}


@pytest.fixture(autouse=True)
def _in_place_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not() == "" and not CUDA:
        from thdops.context_parallel import kernels as in_place
        from thdops.ops.attention_thd import kernels

        monkeypatch.setattr(sections, "kernels", in_place)
        monkeypatch.setattr(sections, "_in_place", lambda call: True)
        monkeypatch.setattr(kernels, "_BLOCKS_FP32", kernels.Blocks(16, 16, 4, 1))
        for plans in (kernels._attends, kernels._upstreams, kernels._queries_grads, kernels._keys_grads):
            monkeypatch.setattr(plans, "_known", {})


@interpreted
@pytest.mark.parametrize(
    ("comm", "cp_size", "layout", "heads", "dims", "options"),
    [
        ("p2p", 2, "gaps", (2, 1), (24, 16), {"softmax": "learnable", **CAUSAL}),
        ("p2p", 4, "back to back", (1, 1), (16, 16), CAUSAL),
        ("p2p", 2, "before and behind", (2, 2), (16, 16), {"softmax": "off_by_one", "softcap": 0.8, "scale": 0.5}),
        ("p2p", 2, "no token", (2, 2), (16, 16), {"partition": "contiguous", **CAUSAL}),
        ("all_gather", 2, "back to back", (1, 1), (16, 16), {"window": (5, 3), "softmax": "learnable"}),
        ("p2p", 2, "case 1", (1, 1), (16, 16), CAUSAL),
        ("p2p", 2, "case 4", (1, 1), (16, 16), CAUSAL),
        ("all_gather", 2, "case 4", (1, 1), (16, 16), CAUSAL),
        ("p2p", 2, "case 10", (2, 1), (24, 16), CAUSAL),
    ],
)
def test_kernels_merge_and_add_in_place(
    comm: str, cp_size: Any, layout: str, heads: tuple[int, int], dims: tuple[int, int], options: dict[str, Any]
) -> None:
    given = problem(BATCHES[layout], options, heads, dims, torch.float32)
    sizes = cp_size if isinstance(cp_size, tuple) else (cp_size,)
    partition = options.get("partition", "zigzag")

    def by_rank(x: Tensor) -> Tensor:
        return to_rank_order(x, given.offsets, math.prod(sizes), partition)

    def in_order(x: Tensor) -> Tensor:
        return from_rank_order(x, given.offsets, math.prod(sizes), partition)

    q, k, v = map(by_rank, given.qkv)
    left, right = options.get("window", (-1, -1))
    call = Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens=given.cu_seqlens,
        cu_seqlens_padded=given.padded,
        sink=given.sink,
        groups=[f"{VIRTUAL}{size}" for size in sizes],
        comm=comm,
        partition=partition,
        causal=options.get("causal", False),
        window_left=left,
        window_right=right,
        scale=options.get("scale", dims[0] ** -0.5),
        softmax=options.get("softmax", "vanilla"),
        softcap=options.get("softcap", 0.0),
        deterministic=True,
        backend="native",
        return_max_logit=True,
        total_tokens=0,
    )
    upstream = by_rank(given.grad_out), by_rank(given.grad_lse.t()).t()
    with guarded_memory([x for x in (*call, *upstream) if isinstance(x, Tensor)]):
        out, lse, max_logit = run.context_attention(*call)
        dq, dk, dv, dsink = run.context_attention_grad(*upstream, *call[:3], out, lse, *call[3:17])
    gradients = (*map(in_order, (dq, dk, dv)), *(() if given.sink is None else (dsink,)))
    found = Results(in_order(out), in_order(lse.t()).t(), max_logit, gradients)
    out, lse, max_logit, gradients = one_device(problem(BATCHES[layout], options, heads, dims))
    expected = Results(out.float(), lse.float(), max_logit.float(), tuple(x.float() for x in gradients))
    compare(found, expected, given.batch.padding(), 1e-5)


# --- full sizes on a GPU --------------------------------------------------------------------------------------------------------

_LONG = Batch([4001, 2560, 0, 777], [4096, 2560, 64, 1536], 8320)  # of the last sequence, most chunks hold no token


def _answers(how: Callable[..., Any], given: Problem, dtype: torch.dtype, **more: Any) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv)."""
    metadata = given.cu_seqlens.to(DEVICE), None if given.padded is None else given.padded.to(DEVICE)
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in given.qkv]
    out, lse = how(*leaves, *metadata, **given.options, return_lse=True, **more)
    upstream = given.grad_out.to(DEVICE, dtype), given.grad_lse.to(DEVICE, lse.dtype)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, upstream)


def _alone(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, padded: Tensor | None, **options: Any) -> Any:
    return thdops.attention(q, k, v, cu_seqlens, cu_seqlens_q_padded=padded, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("heavier", [1.0, 40.0], ids=["alike", "some keys far heavier"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["repeats", "any order"])
@pytest.mark.parametrize(
    ("comm", "options"),
    [("p2p", {"causal": True}), ("p2p", {}), ("all_gather", {"window": (700, 0)}), ("all_gather", {"window": (700, 300)})],
    ids=str,
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_full_size(dims: tuple[int, int], comm: str, options: dict[str, Any], deterministic: bool, heavier: float) -> None:
    """bf16: as near to fp32 as one device, whatever W; with heavier keys the scale of sums has to move in the middle of a ring."""
    given = problem(_LONG, options, (4, 2), dims, torch.bfloat16)
    given.qkv[1][:1024] *= heavier
    more = {"deterministic": deterministic}
    exact = _answers(_alone, given, torch.float32, backend="reference")
    alone = _answers(_alone, given, torch.bfloat16, **more)
    padding = _LONG.padding().to(DEVICE)
    for cp_size in (2, 4):
        ring = partial(context_parallel.simulate, cp_size=cp_size, comm=comm)
        found = _answers(ring, given, torch.bfloat16, **more)
        for got, one, true in zip(found, alone, exact, strict=True):
            rows = (slice(None), ~padding) if got.dim() == 2 else (~padding,)
            error, unavoidable = ((x[rows].float() - true[rows]).square().mean().sqrt() for x in (got, one))
            assert error <= 1.1 * unavoidable + 1e-6 * (1 + true[rows].abs().amax())
            hidden = got[:, padding] if got.dim() == 2 else got[padding]
            assert (hidden == (-torch.inf if got.dim() == 2 else 0)).all()
        if deterministic:
            assert all(torch.equal(x, y) for x, y in zip(found, _answers(ring, given, torch.bfloat16, **more), strict=True))
