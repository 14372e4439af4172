"""What is special to `merge_attention`: it gives the attention over all keys, and a part that saw nothing is as if not there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_oracle import DEVICES
from torch import Tensor

import thdops
from thdops.conformance.tensors import same_bits
from thdops.ops.layouts import prefix_sums

CPU = torch.device("cpu")
_OP = torch.ops.thdops
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter subtracts before it selects


def _interpreted(name: str) -> Callable[..., Any]:
    """The launcher of an op, whose kernels Triton interprets on CPU tensors."""

    def call(*args: Any) -> Any:
        pytest.importorskip("triton", reason="Triton is not installed")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here, not interpreted")
        from thdops.ops.merge import kernels

        return getattr(kernels, name)(*args)

    return call


FORWARDS = [pytest.param(_OP.merge_attention, id="op"), pytest.param(_interpreted("merge_attention"), id="kernel")]
BACKWARDS = [pytest.param(_OP.merge_attention_grad, id="op"), pytest.param(_interpreted("merge_attention_grad"), id="kernel")]


# --- it is attention -----------------------------------------------------------------------------------------------------------


def _split(x: Tensor, keys: list[int], first: list[int]) -> tuple[Tensor, Tensor]:
    """The first so many rows of each sequence, and the others."""
    pieces = [piece.split((n, len(piece) - n)) for piece, n in zip(x.split(keys), first, strict=True)]
    return torch.cat([a for a, _ in pieces]), torch.cat([b for _, b in pieces])


@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
@pytest.mark.parametrize("sink_in", [0, 1])
def test_two_halves_of_the_keys_give_all_of_them(softmax: str, sink_in: int) -> None:
    """Values, and gradients of q, k, v and sink, which go through the gradients of both LSE. Some sequences have no key in a part,
    one has none at all, and there are gaps and a tail between queries."""
    queries, keys, first = [3, 4, 2, 1], [5, 3, 4, 0], [2, 0, 4, 0]
    cu_q, padded = prefix_sums(queries, CPU), prefix_sums([4, 4, 3, 1], CPU)
    q, k, v = (torch.randn(n, heads, 16, dtype=torch.float64, requires_grad=True) for n, heads in ((14, 4), (12, 2), (12, 2)))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [q, k, v, sink] if softmax == "learnable" else [q, k, v]

    def attend(k: Tensor, v: Tensor, lengths: list[int], with_sink: bool) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"softmax": softmax} if with_sink else {}
        if with_sink and softmax == "learnable":
            options["sink"] = sink
        return thdops.attention(q, k, v, cu_q, prefix_sums(lengths, CPU), cu_seqlens_q_padded=padded, return_lse=True, **options)

    whole = attend(k, v, keys, True)
    parts = [
        attend(key, value, lengths, with_sink=i == sink_in)
        for i, (key, value, lengths) in enumerate(
            zip(
                _split(k, keys, first),
                _split(v, keys, first),
                (first, [n - m for n, m in zip(keys, first, strict=True)]),
                strict=True,
            )
        )
    ]
    merged = thdops.merge_attention(*parts[0], *parts[1])
    upstream = [torch.randn_like(x) for x in whole]
    for actual, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    padding = thdops.padding_mask(cu_q, padded, 14)
    assert merged[0][padding].eq(0).all()
    assert merged[1][:, padding].eq(-torch.inf).all()
    for actual, expected in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (merged, whole)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_many_parts_in_any_order_are_rounded_once(device: str) -> None:
    """fp32 meanwhile, bf16 at the end: half a unit of bf16 from the truth, whatever the order."""
    outs = torch.randn(4, 20, 3, 16, device=device).bfloat16()
    lses = 4 * torch.randn(4, 3, 20, device=device)
    lses[torch.rand_like(lses) < 0.3] = -torch.inf
    lses[0, :, :2] = lses[1, :, :2] = 1.0
    weights = (lses - lses.logsumexp(0)).exp().nan_to_num(0)  # parts that saw nothing weigh nothing
    expected = (weights.double().transpose(1, 2).unsqueeze(-1) * outs.double()).sum(0)
    for order in itertools.permutations(range(4)):
        out, lse = outs[order[0]], lses[order[0]]
        for i in order[1:]:
            last = i == order[-1]
            out, lse = thdops.merge_attention(out, lse, outs[i], lses[i], dtype=torch.bfloat16 if last else torch.float32)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=3e-6)
        torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-6, atol=1e-6)


# --- parts that saw nothing ----------------------------------------------------------------------------------------------------


def _odd_parts(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row 0 seen by a alone, row 1 by b alone, row 2 by none; NaN wherever a part saw nothing, -0.0 among what it saw."""
    out_a, out_b = torch.randn(2, 3, 2, 16).to(dtype).unbind()
    lse_a, lse_b = torch.randn(2, 2, 3).unbind()
    out_a[0, :, :3] = out_b[1, :, :3] = -0.0
    out_a[0, 0, 4] = torch.finfo(dtype).max
    out_a[1:], out_b[::2] = torch.nan, torch.nan
    lse_a[:, 1:], lse_b[:, ::2] = -torch.inf, -torch.inf
    lse_a[0, 0] = 3e38
    return out_a, lse_a, out_b, lse_b


@pytest.mark.parametrize("merge", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_other_part_comes_back_bit_for_bit(merge: Callable[..., Any], dtype: torch.dtype) -> None:
    out_a, lse_a, out_b, lse_b = _odd_parts(dtype)
    out, lse = merge(out_a, lse_a, out_b, lse_b, None)
    same_bits("out", out, torch.stack((out_a[0], out_b[1], torch.zeros_like(out[2]))))
    same_bits("lse", lse, torch.stack((lse_a[:, 0], lse_b[:, 1], torch.full_like(lse[:, 2], -torch.inf)), 1))


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_do_its_gradients(backward: Callable[..., Any], dtype: torch.dtype) -> None:
    """NaN in the gradient of the row that nobody saw, Inf in another: neither meets what is not there."""
    parts = _odd_parts(dtype)
    grad_out, grad_lse = torch.randn(3, 2, 16).to(dtype), torch.randn(2, 3)
    grad_out[2], grad_lse[:, 2] = torch.nan, torch.nan
    grad_out[0, 0, 0], grad_lse[0, 1] = torch.inf, -torch.inf
    grad_a, grad_lse_a, grad_b, grad_lse_b = backward(grad_out, grad_lse, *parts)
    for i, (out, lse) in enumerate(((grad_a, grad_lse_a), (grad_b, grad_lse_b))):
        mine, row = [i], torch.arange(3) == i
        same_bits("gradient of the part seen", out[mine], grad_out[mine])
        same_bits("gradient of its LSE", lse[:, mine], grad_lse[:, mine])
        same_bits("gradient of the part not seen", out[~row], torch.zeros_like(out[~row]))
        same_bits("gradient of its LSE", lse[:, ~row], torch.zeros_like(lse[:, ~row]))


@pytest.mark.parametrize("merge", FORWARDS)
def test_weights_do_not_overflow(merge: Callable[..., Any]) -> None:
    """LSE of any size and as far apart as fp32 goes; equal ones halve."""
    lse_a = torch.tensor([[3e38, -3e38, 2e4, -2e4, 88.0, 0.0]])
    lse_b = torch.tensor([[-3e38, 3e38, 2e4, -2e4, -88.0, 1e-7]])
    out, lse = merge(torch.ones(6, 1, 1), lse_a, torch.zeros(6, 1, 1), lse_b, None)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, 0.5]))
    torch.testing.assert_close(lse, torch.logaddexp(lse_a.double(), lse_b.double()).float())


# --- calls -----------------------------------------------------------------------------------------------------------------------


def test_one_part_may_need_no_gradient() -> None:
    """A detached part, an LSE that nobody differentiates: the others' gradients are what they are."""
    out_a, lse_a, out_b, lse_b = torch.randn(5, 2, 8), torch.randn(2, 5), torch.randn(5, 2, 8), torch.randn(2, 5)
    out_a.requires_grad_()
    out, lse = thdops.merge_attention(out_a, lse_a, out_b, lse_b)
    (alone,) = torch.autograd.grad(out.sum(), out_a, retain_graph=True)
    torch.testing.assert_close(alone, (lse_a - lse.detach()).exp().t().unsqueeze(-1).expand(5, 2, 8))
    assert torch.autograd.grad(lse.sum(), out_a)[0].eq(0).all()


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"out_a": [1.0]}, TypeError, "out_a must be a tensor, got a list; pass torch.as_tensor(...) on the device of the others"),
        ({"lse_b": None}, TypeError, "lse_b must be a tensor, got None"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got a str"),
        ({"dtype": torch.bool}, TypeError, "dtype must be float32 or bfloat16 or float16, got bool on cpu"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    out, lse = torch.randn(5, 2, 8), torch.randn(2, 5)
    with pytest.raises(error, match=re.escape(f"merge_attention: {text}")):
        thdops.merge_attention(**{"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, **changed})
