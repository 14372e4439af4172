"""What is special to attention: every feature against a loop over rows, hints that cost nothing, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attention_oracle import (
    BEFORE,
    CPU,
    DEVICES,
    GAPS,
    KEYS,
    MASKS,
    QUERIES,
    SOFTMAX,
    TAIL,
    Batch,
    Case,
    check,
    compare,
    computed,
    numbers,
    oracle,
    poisoned,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import thdops
from thdops.ops.attention_thd import reference


@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("alignment", ["self", "top_left", "bottom_right"])
def test_values_and_gradients_of_every_feature(alignment: str, mask: str, softmax: str) -> None:
    options = {**MASKS[mask], **SOFTMAX[softmax]}
    if alignment == "self":
        case = Case(GAPS, options=options)
    else:
        case = Case(QUERIES, KEYS, options={**options, "causal_alignment": alignment})
    given = numbers(case)
    compare(computed(case, given), oracle(case, given))


@pytest.mark.parametrize("batch", [GAPS, TAIL, BEFORE], ids=["gaps", "tail", "before"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (16, 40)], ids=str)
def test_heads_and_widths_with_poisoned_padding(batch: Batch, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(Case(batch, heads=heads, dims=dims, options={"causal": True}), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_within_its_rounding(dtype: torch.dtype) -> None:
    case = Case(Batch([60, 0, 45], [64, 3, 50], 130), heads=(4, 2), options={"causal": True, "softmax": "learnable"})
    given = numbers(case, dtype)
    answers, expected = computed(case, given), oracle(case, given)
    compare(answers, expected, dtype)
    # Computed in fp32, rounded once: the out by half a unit of its dtype, the LSE not at all.
    torch.testing.assert_close(answers.out.double(), expected.out, rtol=0.51 * torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(answers.lse, expected.lse.float(), rtol=1e-6, atol=2e-6)


def test_blocks_of_queries_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks give what one gives: bounds on the keys of a block leave none out."""
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1)  # 16 rows a block
    for options in MASKS.values():
        for softmax in ({}, {"softmax": "learnable"}):
            case = Case(Batch([17, 0, 20], [19, 2, 25], 50, before=2), options={**options, **softmax})
            given = numbers(case)
            compare(computed(case, given), oracle(case, given))


# --- degenerate sizes, views, autocast, compile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_no_sequence_no_key(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for case in (
        Case(Batch([], None, 5)),
        Case(Batch([], None, 0)),
        Case(Batch([0, 0], None, 0), options={"causal": True}),
        Case(Batch([3], None, 3), Batch([0], None, 0)),
        Case(Batch([0], None, 0), Batch([3], None, 4)),
        Case(Batch([1], None, 1)),
    ):
        given = numbers(case, dtype)
        compare(computed(case, given, device), oracle(case, given), dtype)


def test_one_key_leaves_no_sign_on_padding() -> None:
    """A product over a single key is no sum: 0 times a negative number stays -0.0, where a sum would begin with +0.0."""
    q = torch.randn(32, 4, 64, requires_grad=True)
    k, v, cu, padded = -torch.ones(1, 1, 64), torch.randn(1, 1, 64), torch.tensor([0, 1]), torch.tensor([0, 32])
    out = thdops.attention(q, k, v, cu, cu, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=cu)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not dq[1:].any()
    assert not dq[1:].signbit().any()


def test_max_logit_ignores_padding_and_has_no_gradient() -> None:
    case = Case(GAPS, options={"causal": True})
    given = poisoned(case, numbers(case, torch.float32), torch.inf)
    (cu,), options = case.arguments(CPU)
    q = given.q.requires_grad_()
    _, max_logit = thdops.attention(q, given.k, given.v, cu, return_max_logit=True, **options)
    assert not max_logit.requires_grad
    torch.testing.assert_close(max_logit.double(), oracle(case, numbers(case, torch.float32)).max_logit)


def test_slices_of_one_fused_buffer_reach_the_op_uncopied() -> None:
    """t3hd and th3d views go in as they are: one call of the op, nothing before it."""
    (cu,), options = Case(GAPS).arguments(CPU)

    class Seen(TorchDispatchMode):
        calls: list[tuple[str, Any]] = []  # noqa: RUF012 - one list for the one use

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append((str(func), args))
            return func(*args, **(kwargs or {}))

    for fused in (torch.randn(25, 3, 4, 16), torch.randn(25, 4, 3, 16)):
        q, k, v = fused.unbind(fused.shape.index(3))
        expected = thdops.attention(q.clone(), k.clone(), v.clone(), cu, **options)
        Seen.calls.clear()
        with Seen():
            out = thdops.attention(q, k, v, cu, **options)
        assert [name for name, _ in Seen.calls] == ["thdops.attention.default"]
        assert [x.data_ptr() for x in Seen.calls[0][1][:3]] == [x.data_ptr() for x in (q, k, v)]
        assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_q_k_and_v_only(device: str) -> None:
    case = Case(GAPS, options={"causal": True})
    given = numbers(case, torch.float32)
    q, k, v = (x.to(device).requires_grad_() for x in given[:3])
    (cu,), options = case.arguments(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = thdops.attention(q, k, v, cu, return_lse=True, **options)
    expected = thdops.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu, return_lse=True, **options)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        assert thdops.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu, **options).dtype == torch.bfloat16


def test_autocast_under_compile_and_with_a_sink() -> None:
    case = Case(GAPS, options={"softmax": "learnable"})
    given = numbers(case, torch.float32)
    (cu,), options = case.arguments(CPU)

    def step(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return thdops.attention(q, k, v, cu, sink=sink, **options)

    compiled = torch.compile(step, backend="eager", fullgraph=True)(*given[:4])
    assert compiled.dtype == torch.bfloat16
    assert torch.equal(compiled, step(*given[:4]))


def test_training_step_compiles_once_for_every_number_of_rows() -> None:
    """fullgraph, forward and backward, dynamic T and B, sinks and LSE: one program after the second size."""
    counter = CompileCounter()

    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, cu: Tensor) -> Tensor:
        out, lse = thdops.attention(q, k, v, cu, causal=True, softmax="learnable", sink=sink, return_lse=True)
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()

    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    # The first size repeats no number of heads or dims: equal sizes would be taken for one symbol.
    for lengths, total in (([5, 9, 2, 0, 1], 20), ([4, 1], 9), ([8, 8, 3, 1, 0, 0], 33)):
        case = Case(Batch(lengths, None, total), options={"softmax": "learnable"})
        given = numbers(case, torch.float32)
        cu, _ = case.queries.metadata(CPU)
        results = []
        for function in (loss, compiled, traced):
            leaves = [x.clone().requires_grad_() for x in given[:4] if x is not None]
            q, k, v, sink = leaves
            value = function(q, k, v, sink, cu)
            results.append((value.detach(), *torch.autograd.grad(value, leaves)))
        for eager, *others in zip(*results, strict=True):
            for other in others:
                torch.testing.assert_close(other, eager)
    assert counter.frame_count == 1


# --- backends and refusals --------------------------------------------------------------------------------------------------------


def _small() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16), TAIL.metadata(CPU)[0]


def test_backends_on_cpu() -> None:
    table = thdops.attention_backends(*_small(), causal=True, max_seqlen_q=9, return_lse=True)
    assert list(table) == ["native", "fa4", "cudnn", "torch", "reference"]
    assert table["reference"] == "chosen"
    assert table["torch"] == "runs on CUDA only"
    q, k, v, cu = _small()
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        thdops.attention_backends(q, k.half(), v, cu)


@pytest.mark.gpu
def test_backends_on_cuda() -> None:
    q, k, v, cu = (x.cuda() for x in _small())
    low = [x.bfloat16() for x in (q, k, v)]
    sink = torch.zeros(4, device="cuda")
    chosen = thdops.attention_backends(*low, cu)
    assert chosen["torch"] in ("serves", "chosen")
    assert "chosen" in chosen.values()
    for args, options, reason in (
        ((q, k, v, cu), {}, "serves bfloat16 and float16 only"),
        ((*low, cu), {"softmax": "learnable", "sink": sink}, "has no sink"),
        ((*low, cu), {"softcap": 1.0}, "has no softcap"),
        ((*low, cu), {"return_max_logit": True}, "cannot return max_logit"),
        ((*low, cu, cu), {"causal": True}, "aligns causal masks and windows bottom-right"),
        ((*low[:2], torch.cat((low[2], low[2]), 2), cu), {}, "needs values as wide as keys"),
    ):
        table = thdops.attention_backends(*args, **options)
        assert table["torch"].startswith(reason)
        assert table["native"] == "chosen"
        with pytest.raises(ValueError, match=re.escape(reason)):
            thdops.attention(*args, **options, backend="torch")
        thdops.attention(*args, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal_alignment": "left"}, ValueError, "causal_alignment must be one of top_left, bottom_right, got 'left'"),
        ({"window": (1, 2, 3)}, ValueError, r"window must be a pair of integers \(left, right\), got \(1, 2, 3\)"),
        ({"dropout_p": 0.1}, ValueError, r"dropout_p must be 0.0 \(dropout in attention is not supported\), got 0.1"),
        ({"backend": "fa4"}, ValueError, "got 'fa4', which runs on CUDA only"),
        ({"softmax": "learnable"}, ValueError, "sink must be given with softmax='learnable', got None"),
    ],
    ids=["alignment", "window", "dropout", "backend", "sink"],
)
def test_refusals_in_eager_and_compiled(options: dict[str, Any], error: type[Exception], text: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return thdops.attention(q, k, v, cu, **options)

    with pytest.raises(error, match=text):
        call(*_small())
    with pytest.raises(Exception, match=text):
        torch.compile(call, backend="eager", fullgraph=True)(*_small())


def test_shapes_that_cannot_be_scaled_are_refused_by_name() -> None:
    q, k, v, cu = _small()
    with pytest.raises(ValueError, match="q must have 3 dimensions"):
        thdops.attention(torch.tensor(1.0), k, v, cu)
    with pytest.raises(ValueError, match="q must have a head dim that is a multiple of 8 from 16 to 256, got 0"):
        thdops.attention(q[..., :0], k[..., :0], v, cu)


def test_second_derivatives_are_refused() -> None:
    q, k, v, cu = _small()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(thdops.attention(q, k, v, cu).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"window": 4}, ValueError, "window must be a pair of integers (left, right), got 4; pass -1 for an unbounded side"),
        ({"window": (1.5, 0)}, ValueError, "window must be a pair of integers (left, right), got (1.5, 0); pass -1"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a number, got a tensor; it has no gradient; scale q to learn one"),
        ({"softcap": torch.ones(())}, TypeError, "softcap must be a number, got a tensor"),
        ({"scale": "0.5"}, TypeError, "scale must be a Python number, got a str; pass int(...) or float(...)"),
        ({"softmax": None}, TypeError, "softmax must be a string, got None; see the function's arguments"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(f"attention: {text}")):
        thdops.attention(*_small(), **options)


def test_attention_runs_on_meta_tensors() -> None:
    q, k, v, cu = (x.to("meta") for x in _small())
    assert thdops.attention(q, k, v, cu, causal=True).shape == q.shape


def test_devices_and_dtypes_that_differ_are_refused() -> None:
    q, k, v = (torch.zeros(4, 2, 16) for _ in range(3))
    cu, sink = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(2)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "sink": sink}
    for name in ("k", "v", "cu_seqlens_q", "sink"):
        moved = {**given, name: given[name].to("meta")}
        with pytest.raises(ValueError, match=rf"^attention: {name} must be on the device of q \(cpu\), got meta; move it$"):
            thdops.attention(**moved, softmax="learnable")
    for name in ("k", "v"):
        cast = {**given, name: given[name].half()}
        with pytest.raises(
            TypeError, match=rf"^attention: {name} must have the dtype of q \(float32\), got float16; cast one of them$"
        ):
            thdops.attention(**cast, softmax="learnable")
