"""What is special to the balancing ops: what is counted, what a loss is of, padding, masked experts, one loss per packed sequence.

T rows (tokens), E experts, K top-k, B sequences, L layers. Conformance covers what every op shares; kernels have their own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import captured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops.namespace import REGISTRY
from thdops.ops.balancing.samples import as_bitmap, as_indices, as_mask, normal, uniform
from thdops.ops.layouts import NAMES, layout, others, prefix_sums

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN, INF = float("nan"), float("inf")
FORMATS: dict[str, Callable[..., Tensor]] = {"mask": as_mask, "indices": as_indices, "bitmap": as_bitmap}
FUZZ = settings(max_examples=15, deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")


def tensor(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def close(actual: Tensor, expected: Tensor, ulps: float = 8.0) -> None:
    tolerance = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=0.0)


def is_zero(x: Tensor) -> bool:
    """+0.0 everywhere, to the bit."""
    return bool((x == 0).all() and not x.signbit().any())


# --- tokens_per_expert ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 7, 8, 60, 256])
def test_every_format_counts_the_same(experts: int) -> None:
    topk = min(experts, 3)
    mask = as_mask(50, experts, topk, DEVICE)
    expected = tensor([int(column.sum()) for column in mask.unbind(1)])
    assert expected.sum() > 100 or experts == 1
    assert torch.equal(thdops.tokens_per_expert(mask), expected)
    assert torch.equal(thdops.tokens_per_expert(mask, num_experts=experts), expected)
    assert torch.equal(thdops.tokens_per_expert(as_bitmap(50, experts, topk, DEVICE), num_experts=experts), expected)
    for dtype in (torch.int16, torch.int32, torch.int64):
        indices = as_indices(50, experts, topk, DEVICE, dtype)
        assert torch.equal(thdops.tokens_per_expert(indices, num_experts=experts), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_leading_dimensions_and_padding(form: str) -> None:
    routing = FORMATS[form](30, 12, 3, DEVICE)
    padding = torch.arange(30, device=DEVICE) % 4 == 1
    expected = thdops.tokens_per_expert(routing[~padding], num_experts=12)
    assert expected.sum() == thdops.tokens_per_expert(as_mask(30, 12, 3, DEVICE)[~padding]).sum() > 0
    for lead in ((30,), (5, 6), (2, 3, 5)):
        shaped, mask = routing.view(*lead, -1), padding.view(lead)
        assert torch.equal(thdops.tokens_per_expert(shaped, mask, 12), expected)
    one_row = thdops.tokens_per_expert(routing[0], padding[0], 12)
    assert torch.equal(one_row, thdops.tokens_per_expert(routing[:1], num_experts=12))


def test_counts_are_what_the_aux_loss_takes() -> None:
    mask, scores = as_mask(20, 8, 2, DEVICE), uniform(20, 8, DEVICE)
    counts = thdops.tokens_per_expert(mask)
    loss = thdops.moe_aux_loss(scores, counts, 20, num_experts=8, topk=2, coeff=0.5)
    close(loss, 0.5 * 8 / 2 / 20 / 20 * (scores.double().sum(0) * mask.double().sum(0)).sum())


# --- moe_z_loss -------------------------------------------------------------------------------------------------------------------


def true_z_loss(logits: Tensor, coeff: float, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The formula and its derivative in fp64, written out once more."""
    x = torch.where(valid[:, None], logits.double(), 0.0)
    mass = x.exp()
    lse = mass.sum(1).log()
    factor = coeff / max(int(valid.sum()), 1)
    grad = 2 * factor * (lse / mass.sum(1))[:, None] * mass
    return factor * torch.where(valid, lse, 0.0).square().sum(), torch.where(valid[:, None], grad, 0.0)


def z_loss_and_grad(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = thdops.moe_z_loss(leaf, *args)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [1, 60, 2304])  # TransformerEngine PR#2821: E above 2048
def test_z_loss_and_its_gradient(experts: int, dtype: torch.dtype) -> None:
    logits = normal(24, experts, DEVICE, dtype)
    padding = torch.arange(24, device=DEVICE) % 5 == 2
    for mask in (None, padding):
        valid = ~padding if mask is not None else torch.ones_like(padding)
        expected, expected_grad = true_z_loss(logits, 2.0, valid)
        loss, grad = z_loss_and_grad(logits, 2.0, mask)
        assert loss.dtype == torch.float32
        assert (grad.dtype, grad.stride()) == (dtype, (experts, 1))
        close(loss, expected)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=16 * torch.finfo(dtype).eps, atol=1e-7)
        again, grad_again = z_loss_and_grad(logits.view(2, 3, 4, experts), 2.0, None if mask is None else mask.view(2, 3, 4))
        assert torch.equal(again, loss)
        assert torch.equal(grad_again, grad.view(2, 3, 4, experts))


def test_z_loss_in_fp64_on_cpu() -> None:
    logits = normal(9, 4, torch.device("cpu"), torch.float64)
    loss, grad = z_loss_and_grad(logits, 0.1)
    expected, expected_grad = true_z_loss(logits, 0.1, torch.ones(9, dtype=torch.bool))
    assert loss.dtype == grad.dtype == torch.float64
    close(loss, expected)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_padding_rows_add_nothing_to_the_z_loss(poison: float) -> None:
    logits, padding = normal(12, 8, DEVICE), torch.arange(12, device=DEVICE) % 3 == 0
    loss, grad = z_loss_and_grad(torch.where(padding[:, None], poison, logits), 0.5, padding)
    alone, grad_alone = z_loss_and_grad(logits[~padding], 0.5)
    close(loss, alone)
    close(grad[~padding], grad_alone)
    assert is_zero(grad[padding])


def test_no_valid_row_gives_z_loss_zero() -> None:
    for logits in (torch.full((5, 4), NAN, device=DEVICE), torch.empty(0, 4, device=DEVICE)):
        loss, grad = z_loss_and_grad(logits, 1.0, torch.ones(len(logits), dtype=torch.bool, device=DEVICE))
        assert is_zero(loss)
        assert is_zero(grad)


def test_experts_out_of_reach_get_no_gradient() -> None:
    logits = normal(6, 8, DEVICE)
    masked = logits.clone()
    masked[:, 2::3] = -INF
    reach = torch.isfinite(masked[0])
    loss, grad = z_loss_and_grad(masked, 0.5)
    alone, grad_alone = z_loss_and_grad(logits[:, reach], 0.5)
    close(loss, alone)
    close(grad[:, reach], grad_alone)
    assert (grad[:, ~reach] == 0).all()


def test_a_row_without_any_expert_makes_the_loss_infinite_and_no_gradient_nan() -> None:
    logits = normal(6, 8, DEVICE)
    _, clean = z_loss_and_grad(logits, 0.5)
    logits[2] = -INF
    loss, grad = z_loss_and_grad(logits, 0.5)
    assert loss == INF
    assert is_zero(grad[2])
    rest = torch.arange(6, device=DEVICE) != 2
    assert torch.equal(grad[rest], clean[rest])


@pytest.mark.parametrize("content", [NAN, INF])
def test_a_row_that_is_not_finite_spoils_its_own_gradient_only(content: float) -> None:
    logits = normal(6, 8, DEVICE)
    _, clean = z_loss_and_grad(logits, 0.5)
    logits[2, 3] = content
    loss, grad = z_loss_and_grad(logits, 0.5)
    assert not loss.isfinite()
    rest = torch.arange(6, device=DEVICE) != 2
    assert torch.equal(grad[rest], clean[rest])


@pytest.mark.parametrize("content", [1.0, NAN, INF, -INF])
def test_coefficient_zero_gives_exactly_zero(content: float) -> None:
    logits = torch.full((6, 4), content, device=DEVICE)
    cu_seqlens = prefix_sums([2, 4], DEVICE)
    for coeff in (0.0, tensor(0.0), tensor([0.0])):
        loss, grad = z_loss_and_grad(logits, coeff)
        assert is_zero(loss)
        assert is_zero(grad)
        loss, grad = seq_loss_and_grad(logits, as_mask(6, 4, 2, DEVICE), cu_seqlens, topk=2, coeff=coeff)
        assert is_zero(loss)
        assert is_zero(grad)


def test_coefficients_of_every_form_agree() -> None:
    logits = normal(9, 8, DEVICE)
    loss, grad = z_loss_and_grad(logits, 0.01)
    for coeff in (tensor(0.01), tensor([0.01])):
        again, grad_again = z_loss_and_grad(logits, coeff)
        assert torch.equal(again, loss)
        assert torch.equal(grad_again, grad)
        assert coeff.flatten().tolist() == tensor([0.01]).tolist()


# --- moe_seq_aux_loss -------------------------------------------------------------------------------------------------------------


def seq_loss_and_grad(scores: Tensor, routing: Tensor, cu_seqlens: Tensor, *padded: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The gradient is that of the sum of the losses."""
    leaf = scores.detach().requires_grad_()
    loss = thdops.moe_seq_aux_loss(leaf, routing, cu_seqlens, *padded, num_experts=scores.shape[1], **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), grad


def unpacked(
    scores: Tensor, routing: Tensor, cu_seqlens: Tensor, padded: Tensor | None, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """(a loss each, the gradient of their sum): every sequence by itself, through the aux loss of one sequence."""
    starts = (cu_seqlens if padded is None else padded).tolist()
    losses, grad = [], torch.zeros_like(scores)
    for start, tokens in zip(starts, cu_seqlens.diff().tolist(), strict=False):
        rows = slice(start, start + tokens)
        leaf = scores[rows].detach().requires_grad_()
        counts = thdops.tokens_per_expert(routing[rows], num_experts=scores.shape[1])
        loss = thdops.moe_aux_loss(leaf, counts, tokens, num_experts=scores.shape[1], topk=topk, coeff=coeff)
        (grad[rows],) = torch.autograd.grad(loss, leaf)
        losses.append(loss.detach())
    return torch.stack(losses) if losses else scores.new_zeros(0), grad


def hold_against_unpacked(form: str, cu_seqlens: Tensor, padded: Tensor | None, rows: int, experts: int = 12) -> None:
    scores, routing = uniform(rows, experts, DEVICE), FORMATS[form](rows, experts, 3, DEVICE)
    losses, grads = unpacked(scores, routing, cu_seqlens, padded, 3, 0.1)
    valid = ~thdops.padding_mask(cu_seqlens, padded, rows)
    poisoned = torch.where(valid[:, None], scores, NAN)
    some = max(int((cu_seqlens.diff() > 0).sum()), 1)
    expected = {"none": (losses, 1.0), "sum": (losses.sum(), 1.0), "mean": (losses.sum() / some, 1 / some)}
    for reduction, (result, share) in expected.items():
        loss, grad = seq_loss_and_grad(poisoned, routing, cu_seqlens, padded, topk=3, coeff=0.1, reduction=reduction)
        close(loss, result, 16)
        close(grad, grads * share, 4)
        assert is_zero(grad[~valid])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_sequence_losses_are_those_of_the_sequences_unpacked(name: str, form: str) -> None:
    hold_against_unpacked(form, *layout(name, DEVICE))


@FUZZ
@given(st.data())
def test_sequence_losses_of_any_packing(data: st.DataObject) -> None:
    """One giant sequence among many short ones, empty ones, gaps, rows in front and behind."""
    lengths = data.draw(st.lists(st.integers(0, 3), max_size=40))
    lengths.insert(data.draw(st.integers(0, len(lengths))), data.draw(st.sampled_from((0, 1, 200))))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    owned = prefix_sums([n + gap for n, gap in zip(lengths, gaps, strict=True)], DEVICE, first=data.draw(st.integers(0, 3)))
    rows = int(owned[-1]) + data.draw(st.integers(0, 4))
    hold_against_unpacked(data.draw(st.sampled_from(list(FORMATS))), prefix_sums(lengths, DEVICE), owned, rows)


def test_the_mean_is_over_sequences_that_have_a_token() -> None:
    scores, routing = uniform(10, 8, DEVICE), as_mask(10, 8, 2, DEVICE)
    valid, padded = prefix_sums([4, 0, 0, 2, 0], DEVICE), prefix_sums([5, 2, 0, 3, 0], DEVICE)
    each, _ = seq_loss_and_grad(scores, routing, valid, padded, topk=2, coeff=1.0, reduction="none")
    mean, _ = seq_loss_and_grad(scores, routing, valid, padded, topk=2, coeff=1.0)
    assert is_zero(each[[1, 2, 4]])
    assert (each[[0, 3]] > 0).all()
    close(mean, (each[0] + each[3]) / 2)


def test_each_loss_has_a_gradient_of_its_own() -> None:
    scores, routing = uniform(9, 8, DEVICE).requires_grad_(), as_mask(9, 8, 2, DEVICE)
    cu_seqlens = prefix_sums([4, 0, 3], DEVICE)
    losses = thdops.moe_seq_aux_loss(scores, routing, cu_seqlens, num_experts=8, topk=2, coeff=1.0, reduction="none")
    weights = tensor([2.0, NAN, -3.0])  # what a sequence without a token is given does not matter
    (grad,) = torch.autograd.grad(losses, scores, weights, retain_graph=True)
    _, plain = seq_loss_and_grad(scores, routing, cu_seqlens, topk=2, coeff=1.0, reduction="sum")
    close(grad[:4], 2 * plain[:4])
    close(grad[4:7], -3 * plain[4:7])
    assert is_zero(grad[7:])
    (grad,) = torch.autograd.grad(losses, scores, tensor([INF, 0.0, 0.0]))
    chosen = routing[:4].any(0)
    assert not chosen.all()
    assert grad[:4, chosen].eq(INF).all()
    assert is_zero(grad[:4, ~chosen])


def test_folded_sequences_of_one_length_give_the_same() -> None:
    """TransformerEngine PR#3018: probs [S, B*E], the coefficient uses E. The same tokens, packed instead of folded."""
    length, batch, experts, topk = 12, 3, 8, 2
    scores, mask = uniform(batch * length, experts, DEVICE), as_mask(batch * length, experts, topk, DEVICE)
    folded = scores.view(batch, length, experts).transpose(0, 1).reshape(length, batch * experts)
    counts = torch.cat([thdops.tokens_per_expert(part) for part in mask.split(length)])
    expected = thdops.moe_aux_loss(folded, counts, length, num_experts=experts, topk=topk, coeff=0.1)
    loss, _ = seq_loss_and_grad(scores, mask, prefix_sums([length] * batch, DEVICE), topk=topk, coeff=0.1, reduction="sum")
    close(loss, expected)


@pytest.mark.parametrize("split", [(2, 2), (1, 3), (3, 1)])
def test_gradients_do_not_depend_on_how_sequences_fall_into_micro_batches(split: tuple[int, int]) -> None:
    """Megatron-LM#7213: what a loss is divided by covers the tokens it sums."""
    lengths = [4, 6, 2, 4]
    scores, mask = uniform(16, 8, DEVICE), as_mask(16, 8, 2, DEVICE)
    options = {"topk": 2, "coeff": 0.1, "reduction": "sum"}
    whole, whole_grad = seq_loss_and_grad(scores, mask, prefix_sums(lengths, DEVICE), **options)
    loss, grads, first = torch.zeros((), device=DEVICE), [], 0
    for part in (lengths[: split[0]], lengths[split[0] :]):
        rows = slice(first, first := first + sum(part))
        part_loss, grad = seq_loss_and_grad(scores[rows], mask[rows], prefix_sums(part, DEVICE), **options)
        loss += part_loss
        grads.append(grad)
    close(loss, whole)
    assert torch.equal(torch.cat(grads), whole_grad)


# --- the references ---------------------------------------------------------------------------------------------------------------


def test_references_are_differentiable_whatever_padding_holds() -> None:
    """Kernels are judged by autograd through them: NaN on padding, and a row without any expert, must not reach a gradient."""
    base = layout("gaps and tail", DEVICE)
    padding = thdops.padding_mask(*base)
    logits = torch.where(padding[:, None], NAN, normal(base.total, 8, DEVICE))
    logits[0] = -INF
    routing = as_mask(base.total, 8, 2, DEVICE)
    calls: dict[str, tuple[Any, ...]] = {
        "moe_z_loss": (logits, None, padding, 1.0),
        "moe_seq_aux_loss": (logits.exp(), routing, base.cu_seqlens, base.padded, None, 8, 2, "sum", 1.0),
    }
    for name, (x, *args) in calls.items():
        gradients = []
        for function in (REGISTRY[name].reference, REGISTRY.op(name)):
            leaf = x.requires_grad_()
            loss, *_ = function(leaf, *args)
            gradients += torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(*gradients)
        assert is_zero(gradients[0][padding])


# --- expert_bias_update -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_bias_moves_towards_the_mean(dtype: torch.dtype) -> None:
    """Megatron-LM PR#7183, #7481: counts of these dtypes are taken, and never written to."""
    bias, tokens = tensor([0.5, -1.0, 0.0, 2.0]), tensor([1, 3, 2, 2], dtype)
    expected = tensor([0.75, -1.25, 0.0, 2.0])
    for rate in (0.25, tensor(0.25), tensor([0.25])):
        assert torch.equal(thdops.expert_bias_update(bias, tokens, rate), expected)
    assert bias.tolist() == [0.5, -1.0, 0.0, 2.0]
    assert tokens.tolist() == [1, 3, 2, 2]
    bias.copy_(thdops.expert_bias_update(bias, tokens, 0.25))
    assert torch.equal(bias, expected)


def test_layers_are_updated_each_by_its_own_mean() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = (torch.randint(0, 9, (3, 6), generator=generator) * tensor([1, 100, 10000], torch.int64).cpu()[:, None]).to(DEVICE)
    bias = normal(3, 6, DEVICE)
    each = [thdops.expert_bias_update(b, t, 0.5) for b, t in zip(bias, tokens, strict=True)]
    assert torch.equal(thdops.expert_bias_update(bias, tokens, 0.5), torch.stack(each))


@pytest.mark.parametrize(
    ("tokens", "signs"),
    [
        (tensor([2**60, 2**60 + 1, 2**60 - 1]), [0, -1, 1]),  # a mean in floating point cannot tell them apart
        (tensor([2.0**24, 2.0**24, 2.0**24 + 2]), [1, 1, -1]),  # nor can a sum in fp32
        (tensor([2**31 - 1] * 3, torch.int32), [0, 0, 0]),  # a sum in int32 wraps around
        (tensor([NAN, 1.0, 2.0]), [0, 0, 0]),
    ],
    ids=["int64", "float32", "int32", "NaN"],
)
def test_the_sign_is_exact(tokens: Tensor, signs: list[int]) -> None:
    assert thdops.expert_bias_update(torch.zeros(3, device=DEVICE), tokens, 1.0).tolist() == signs


def test_a_bias_that_is_a_parameter_gets_no_graph() -> None:
    bias = torch.nn.Parameter(torch.zeros(4, device=DEVICE))
    assert not thdops.expert_bias_update(bias, tensor([1, 2, 3, 4]), 0.1).requires_grad


# --- errors of the public functions -----------------------------------------------------------------------------------------------

MASK, INDICES = as_mask(8, 4, 2, DEVICE), as_indices(8, 4, 2, DEVICE)
LOGITS, ENDS = normal(8, 4, DEVICE), prefix_sums([3, 5], DEVICE)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "counts without experts": (
        lambda: thdops.tokens_per_expert(INDICES),
        ValueError,
        r"tokens_per_expert: num_experts must be given for indices and bitmaps, got None with routing int64\[8, 2\];",
    ),
    "experts as a tensor": (
        lambda: thdops.tokens_per_expert(INDICES, num_experts=tensor(4)),  # pyright: ignore[reportArgumentType]
        TypeError,
        "tokens_per_expert: num_experts must be a Python number, got a tensor; pass a static value",
    ),
    "a list": (
        lambda: thdops.tokens_per_expert([[True]]),  # pyright: ignore[reportArgumentType]
        TypeError,
        "tokens_per_expert: routing must be a tensor, got a list;",
    ),
    "padding of other leading dimensions": (
        lambda: thdops.tokens_per_expert(MASK.view(2, 4, 4), MASK[:, 0].view(4, 2)),
        ValueError,
        r"tokens_per_expert: padding_mask must have the leading dimensions of routing, \[2, 4\], got shape \[4, 2\];",
    ),
    "a scalar": (
        lambda: thdops.moe_z_loss(LOGITS[0, 0], 1.0),
        ValueError,
        r"moe_z_loss: logits must have 2 dimensions \[T, E\], got shape \[1\];",
    ),
    "a coefficient that is no number": (
        lambda: thdops.moe_z_loss(LOGITS, "0.1"),  # pyright: ignore[reportArgumentType]
        TypeError,
        "moe_z_loss: coeff must be a float or a one-element fp32 tensor, got str;",
    ),
    "top-k as a tensor": (
        lambda: thdops.moe_seq_aux_loss(
            LOGITS,
            MASK,
            ENDS,
            num_experts=4,
            topk=tensor(2),  # pyright: ignore[reportArgumentType]
            coeff=1.0,
        ),
        TypeError,
        "moe_seq_aux_loss: topk must be a Python number, got a tensor; pass a static value",
    ),
    "an unknown reduction": (
        lambda: thdops.moe_seq_aux_loss(LOGITS, MASK, ENDS, num_experts=4, topk=2, coeff=1.0, reduction="max"),
        ValueError,
        "moe_seq_aux_loss: reduction must be one of mean, sum, none, got 'max'; choose one",
    ),
    "a rate that is no number": (
        lambda: thdops.expert_bias_update(LOGITS[0], INDICES[:4, 0], None),  # pyright: ignore[reportArgumentType]
        TypeError,
        "expert_bias_update: rate must be a float or a one-element fp32 tensor, got NoneType;",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=f"^{text}"):
        call()


# --- compiled, and in a graph -----------------------------------------------------------------------------------------------------


def step(
    logits: Tensor, mask: Tensor, indices: Tensor, padding: Tensor, cu: Tensor, padded: Tensor, bias: Tensor, coeff: Tensor
) -> tuple[Tensor, ...]:
    """Everything that a training step does with these ops."""
    experts, topk = logits.shape[-1], indices.shape[-1]
    z_loss = thdops.moe_z_loss(logits[None], coeff, padding[None])
    scores = logits.softmax(-1)
    options: dict[str, Any] = {"num_experts": experts, "topk": topk, "coeff": coeff}
    mean = thdops.moe_seq_aux_loss(scores, mask, cu, padded, **options)
    each = thdops.moe_seq_aux_loss(scores, indices, cu, padded, **options, reduction="none")
    counts = thdops.tokens_per_expert(mask[None], padding[None])
    counts = counts + thdops.tokens_per_expert(indices, padding, experts)
    (grad,) = torch.autograd.grad(z_loss + mean + each.sum(), logits)
    return z_loss, mean, each, counts, thdops.expert_bias_update(bias, counts, coeff), grad


def step_arguments(rows: int, sequences: int, seed: int) -> tuple[Tensor, ...]:
    owned = rows // sequences
    cu, padded = prefix_sums([max(owned - 1 - seed % 2, 0)] * sequences, DEVICE), prefix_sums([owned] * sequences, DEVICE)
    choices = as_mask(rows, 8, 2, DEVICE, seed=seed), as_indices(rows, 8, 2, DEVICE, seed=seed)
    padding = thdops.padding_mask(cu, padded, rows)
    return normal(rows, 8, DEVICE, seed=seed), *choices, padding, cu, padded, torch.zeros(8, device=DEVICE), tensor(0.1 * seed)


def test_one_graph_for_all_sizes_and_contents() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def losses(logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        z_loss = thdops.moe_z_loss(logits[None], others[6], others[2][None])
        options: dict[str, Any] = {"num_experts": logits.shape[-1], "topk": others[1].shape[-1], "coeff": others[6]}
        loss = thdops.moe_seq_aux_loss(logits.softmax(-1), others[0], *others[3:5], **options)
        counts = thdops.tokens_per_expert(others[0][None], others[2][None])
        return z_loss + loss, thdops.expert_bias_update(others[5], counts, others[6])

    compiled = torch.compile(losses, backend=counter, fullgraph=True, dynamic=True)
    for rows, sequences, seed in ((16, 4, 1), (17, 4, 2), (40, 5, 3), (9, 3, 4)):
        results = []
        for run in (losses, compiled):
            logits, *others = step_arguments(rows, sequences, seed)
            logits.requires_grad_()
            loss, bias = run(logits, *others)
            results.append((loss.detach(), bias, *torch.autograd.grad(loss, logits)))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.gpu
def test_replays_follow_every_tensor() -> None:
    """torchtitan#3709: capture with one layout, replay with another; here with other masks, choices and coefficients, too."""
    base = layout("gaps and tail", DEVICE)
    static = [x.clone() for x in step_arguments(base.total, 4, 1)]
    static[4], static[5] = base.cu_seqlens.clone(), base.padded.clone() if base.padded is not None else base.cu_seqlens.clone()
    static[0].requires_grad_()
    graph, results = captured(lambda: step(*static))
    for seed, other in enumerate([*others(base), base], start=2):
        fresh = list(step_arguments(base.total, 4, seed))
        assert other.padded is not None
        fresh[3] = thdops.padding_mask(other.cu_seqlens, other.padded, base.total)
        fresh[4], fresh[5] = other.cu_seqlens, other.padded
        with torch.no_grad():
            for old, new in zip(static, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        for actual, expected in zip(results, step(fresh[0].requires_grad_(), *fresh[1:]), strict=True):
            assert torch.equal(actual, expected)
