"""The router's kernels on contents that samples do not have: ties across the cut, NaN beside -inf, huge logits, far columns.

On CPU they run in Triton's interpreter, every address held against the tensors' memory; on a GPU they are called as ops. T rows
(tokens), E experts, K top-k.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meta_kernels.router import RouterCall, RouterGradCall, TopkCall
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN, INF = float("nan"), float("inf")
pytestmark = [] if CUDA else [pytest.mark.skipif(why_not() != "", reason=why_not() or "interpreted")]


def kernel(name: str, args: tuple[Any, ...]) -> Any:
    """What an op's kernel returns on `DEVICE`, in guarded memory where it is interpreted."""
    if CUDA:
        return REGISTRY.op(name)(*args)
    with guarded_memory([arg for arg in args if isinstance(arg, Tensor)]):
        return load_launcher(REGISTRY[name], REGISTRY.schema(name))(*args)


def topk_call(logits: Tensor, topk: int, score_function: str = "softmax", **changed: Any) -> TopkCall:
    settings = (score_function, False, True, None, None, None, "topk", "indices", torch.int64, "nowhere", -1)
    return TopkCall(logits, None, None, topk, *settings)._replace(**changed)


def router_call(logits: Tensor, topk: int, score_function: str = "softmax", **changed: Any) -> RouterCall:
    call = RouterCall(
        **topk_call(logits, topk, score_function)._asdict(),
        cu_seqlens=None,
        cu_seqlens_padded=None,
        total_num_tokens_tensor=None,
        aux_coeff_tensor=None,
        z_coeff_tensor=None,
        aux_score_function=score_function,
        reduction="mean",
        aux_coeff=1.0,
        z_coeff=1.0,
    )
    return call._replace(**changed)


def agree(name: str, call: TopkCall | RouterCall) -> tuple[Tensor, ...]:
    """The kernel's results, if they are the reference's."""
    actual, expected = kernel(name, call), REGISTRY[name].reference(*call)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True)
    return actual


# --- the choice -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [[-0.0, 0.0], [1.0, -0.0, -0.0, 0.0, -1.0], [-1e-45, -0.0, 0.0, 1e-45]])
def test_zeros_tie_across_the_cut(logits: list[float]) -> None:
    x = torch.tensor([logits], device=DEVICE)
    for topk in range(1, len(logits)):
        agree("router_topk", topk_call(x, topk))
        agree("router", router_call(x, topk))


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_of_minus_infinity_ranks_above_nan(score_function: str) -> None:
    logits = torch.tensor([[NAN, 1.0, 2.0, NAN], [1.0, NAN, 2.0, 3.0], [NAN, NAN, NAN, NAN]], device=DEVICE)
    bias = torch.tensor([0.0, -INF, -INF, 0.0], device=DEVICE)
    for topk in (1, 2, 3, 4):
        for infinite in (bias, -bias, torch.full_like(bias, -INF)):
            agree("router_topk", topk_call(logits, topk, score_function, expert_bias=infinite))


def test_rows_of_nan_lanes_of_no_expert_and_ties_go_as_in_the_reference() -> None:
    """vLLM#37758, PR#32058, PR#29439, PR#55514: what the tests of the public functions show on a GPU, for the kernel anywhere."""
    for experts in (12, 44):
        logits = torch.randn(6, experts, device=DEVICE).mul(4).round().div(4)  # ties in most rows
        logits[1], logits[2, ::2], logits[3] = NAN, NAN, -INF
        for dtype in (torch.float32, torch.bfloat16):
            for topk in (1, 4, experts):
                agree("router_topk", topk_call(logits.to(dtype), topk))
    groups = {"num_groups": 8, "group_topk": 2}
    agree("router_topk", topk_call(torch.randn(5, 8, device=DEVICE), 2, "sigmoid", **groups))


def test_many_experts_forward_and_backward() -> None:
    """TransformerEngine PR#2821, #2582: E = 2304, K = 36."""
    logits = torch.randn(2, 2304, device=DEVICE)
    probs, _, chosen = agree("router_topk", topk_call(logits, 36, "sigmoid"))
    agree("router", router_call(logits, 36))
    for name, args in (
        ("router_topk_grad", (torch.randn_like(probs), logits, chosen, "sigmoid", False, True, None, "topk")),
        ("router_scores_grad", (torch.randn_like(logits), logits, None, "softmax")),
    ):
        torch.testing.assert_close(kernel(name, args), REGISTRY[name].reference(*args))


# --- sums -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pad_routing", ["nowhere", "keep"])
def test_nan_stays_in_its_sequence(score_function: str, pad_routing: str) -> None:
    logits = torch.randn(9, 6, device=DEVICE)
    logits[[3, 5], 2], logits[8] = NAN, INF
    cu_seqlens = torch.tensor([0, 3, 4, 5, 8], device=DEVICE)  # sequences 1 and 3 have NaN; the last row is in none
    padding_mask = torch.arange(9, device=DEVICE) == 6
    call = router_call(logits, 2, score_function, cu_seqlens=cu_seqlens, padding_mask=padding_mask, pad_routing=pad_routing)
    sums = agree("router", call)[6]
    assert sums.isnan().any(1).tolist() == [False, True, False, True]


# --- numbers ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2.0**29, 2.0**30, 3e9, 1e30, 3.4e38])
def test_huge_logits_have_a_softmax(size: float) -> None:
    """A row masked with the least finite number is uniform: what it is by itself, and no NaN in the sums of all rows."""
    logits = torch.tensor([[-1.0] * 5, [1.0] * 5, [1.0, -1.0, 1.0, 0.0, 0.0], [0.0, -1.0, -1.0, -1.0, -1.0]], device=DEVICE)
    logits = (logits * size).requires_grad_()
    call = router_call(logits, 2, pre_softmax=True)
    probs, _, chosen, *_, score_sums, counts, _, _, coefficients = kernel("router", call)
    expected, grad = logits.detach().softmax(1), torch.randn(4, 2, device=DEVICE)
    torch.testing.assert_close(probs, expected.gather(1, chosen.long()))
    torch.testing.assert_close(score_sums[0], expected.sum(0))
    one, settings = torch.ones((), device=DEVICE), ("softmax", True, True, None, "topk", "softmax")
    back = RouterGradCall(logits.detach(), chosen, grad, one, None, None, None, counts, coefficients, None, None, None, *settings)
    torch.testing.assert_close(kernel("router_grad", back), REGISTRY["router_grad"].reference(*back))


# --- addresses --------------------------------------------------------------------------------------------------------------------


def far_columns(rows: int, columns: int) -> Tensor:
    """bf16 whose columns are 2**30 elements apart; on CPU nothing but its own pages is ever touched."""
    apart = 2**30
    return torch.empty((columns - 1) * apart + rows, dtype=torch.bfloat16, device=DEVICE).as_strided((rows, columns), (1, apart))


def test_columns_may_be_farther_apart_than_32_bits_say() -> None:
    """Logits and gradients that are transposed views: column times stride is 2**31 at E = 256 and 2**23 rows."""
    near = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 5.0]], dtype=torch.bfloat16, device=DEVICE)
    far = far_columns(2, 3)
    far.copy_(near)
    agree("router_topk", topk_call(far, 2))
    agree("router", router_call(far, 2, "sigmoid"))
    chosen = REGISTRY["router_topk"].reference(*topk_call(near, 2))[2]
    for pre_softmax in (False, True):
        settings = (chosen, "softmax", pre_softmax, True, None, "dense")
        expected = REGISTRY["router_topk_grad"].reference(near, near, *settings)
        torch.testing.assert_close(kernel("router_topk_grad", (far, far, *settings)), expected)
