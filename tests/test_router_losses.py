"""What is special to `router`: its sums and losses, equal to the ops that it replaces, and to losses from sums that were added up.

T rows (tokens), E experts, K top-k, B sequences, N rows that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from router_oracle import SCORE_FUNCTIONS, all_scores, mask_of, random_logits, random_mask, ranked
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops import RouterOutput, RouterSums
from thdops.ops.layouts import NAMES, layout, prefix_sums

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=DEVICE)


# Exponentials of a kernel are right to 2 ulp, and its sums have another order than PyTorch's.
TOLERANCE = 5e-6 if CUDA else 1e-6


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Within `tolerance` of the largest element."""
    size = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected.to(actual), rtol=0.0, atol=tolerance * size)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return found


def plain_z_loss(logits: Tensor, mask: Tensor | None, coeff: float | Tensor) -> Tensor:
    squares = logits.float().logsumexp(-1).square()
    if mask is None:
        return coeff * squares.mean()
    return coeff * torch.where(mask, 0.0, squares).sum() / (~mask).sum().clamp(min=1)


# --- equal to the ops that it replaces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("aux_score_function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_its_parts(score_function: str, aux_score_function: str, masked: bool) -> None:
    rows, experts, topk = 40, 24, 4
    logits = random_logits(rows, experts, DEVICE).requires_grad_()
    mask = random_mask(rows, DEVICE) if masked else None
    bias = None if score_function == "softmax" else 0.1 * random_logits(1, experts, DEVICE, seed=2)[0]
    options: dict[str, Any] = {
        "score_function": score_function,
        "expert_bias": bias,
        "num_groups": 8,
        "group_topk": 4,
        "scaling_factor": 1.5,
        "padding_mask": mask,
    }
    output = thdops.router(logits, topk, aux_score_function=aux_score_function, aux_coeff=0.3, z_coeff=0.02, **options)
    probs, routing = thdops.router_topk(logits, topk, **options)
    best, scores = thdops.router_scores(logits, topk, aux_score_function, mask)
    count = rows if mask is None else (~mask).sum()
    aux_loss = thdops.moe_aux_loss(scores, best.sum(0), count, num_experts=experts, topk=topk, coeff=0.3, padding_mask=mask)
    z_loss = plain_z_loss(logits, mask, 0.02)

    close(output.probs, probs)
    assert torch.equal(output.routing, routing)
    assert torch.equal(output.tokens_per_expert, routing.sum(0))
    close(output.sums.scores, scores.sum(0))
    assert torch.equal(output.sums.counts, best.sum(0))
    assert int(output.sums.num_tokens) == int(count)
    close(output.aux_loss, aux_loss)
    close(output.z_loss, z_loss)
    weights = random_logits(rows, experts, DEVICE, seed=3)
    for of_router, of_parts in (
        ((output.probs * weights).sum(), (probs * weights).sum()),
        (output.aux_loss, aux_loss),
        (output.z_loss, z_loss),
        (output.sums.scores @ weights[0], scores.sum(0) @ weights[0]),
        ((output.probs * weights).sum() + output.aux_loss + output.z_loss, (probs * weights).sum() + aux_loss + z_loss),
    ):
        close(gradient(of_router, logits), gradient(of_parts, logits))


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_sums_equal_the_oracle(score_function: str) -> None:
    logits, mask = random_logits(21, 12, DEVICE), random_mask(21, DEVICE)
    sums = thdops.router(logits, 3, aux_score_function=score_function, padding_mask=mask).sums
    valid = logits[~mask].cpu()
    chosen = torch.tensor([ranked(row)[:3] for row in valid.tolist()])
    close(sums.scores.cpu(), all_scores(valid, score_function).sum(0))
    assert torch.equal(sums.counts.cpu(), mask_of(chosen, 12).sum(0))
    close(sums.z.cpu(), valid.double().exp().sum(1).log().square().sum())
    assert int(sums.num_tokens) == len(valid)


def test_without_coefficients_losses_are_zero_and_add_nothing() -> None:
    logits = random_logits(6, 8, DEVICE)
    logits[2, 3] = NAN
    logits[4] = -INF
    logits.requires_grad_()
    probs, _ = thdops.router_topk(logits, 2, score_function="sigmoid")
    expected = gradient(probs[:, 0].sum(), logits)
    assert expected[2].isfinite().all()
    for coeff in (None, 0.0, one(0.0)):
        output = thdops.router(logits, 2, score_function="sigmoid", aux_coeff=coeff, z_coeff=coeff)
        assert output.sums.scores.isnan().all()
        assert output.sums.z.isnan()
        assert output.aux_loss == output.z_loss == 0
        assert torch.equal(gradient(output.probs[:, 0].sum() + output.aux_loss + output.z_loss, logits), expected)
        assert not gradient(output.aux_loss + output.z_loss, logits).any()


@pytest.mark.parametrize("pad_routing", ["nowhere", "keep"])
def test_an_all_padding_batch_is_zero(pad_routing: str) -> None:
    logits = torch.full((5, 8), NAN, device=DEVICE).requires_grad_()
    mask = torch.ones(5, dtype=torch.bool, device=DEVICE)
    output = thdops.router(logits, 2, padding_mask=mask, pad_routing=pad_routing, aux_coeff=1.0, z_coeff=1.0)
    for result in (output.aux_loss, output.z_loss, output.tokens_per_expert, *output.sums):
        assert not result.any()
    assert not gradient(output.aux_loss + output.z_loss + output.sums.scores.sum() + output.sums.z, logits).any()


def test_padding_that_is_kept_counts_nowhere() -> None:
    logits, mask = random_logits(20, 8, DEVICE), random_mask(20, DEVICE)
    options: dict[str, Any] = {"padding_mask": mask, "aux_coeff": 1.0, "z_coeff": 1.0, "routing": "indices"}
    kept = thdops.router(logits, 2, pad_routing="keep", **options)
    gone = thdops.router(logits, 2, **options)
    assert (kept.routing >= 0).all()
    assert torch.equal(kept.routing[~mask], gone.routing[~mask])
    assert kept.tokens_per_expert.sum() == 2 * (~mask).sum()
    for a, b in zip((*kept[2:5], *kept.sums), (*gone[2:5], *gone.sums), strict=True):
        assert torch.equal(a, b)


# --- the token count --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4096, 2048, 8175])
def test_counts_of_every_form_agree(count: int) -> None:
    logits = random_logits(20, 8, DEVICE).requires_grad_()
    plain = thdops.router(logits, 2, aux_coeff=0.1, total_num_tokens=count)
    loss, grad = plain.aux_loss, gradient(plain.aux_loss, logits)
    own = thdops.router(logits, 2, aux_coeff=0.1).aux_loss
    close(loss, own * (20 / count) ** 2)
    for dtype in (torch.float32, torch.int32, torch.int64):
        for shape in ((), (1,)):
            tensor = torch.full(shape, count, dtype=dtype, device=DEVICE)
            for coeff in (one(0.1), one(0.1).reshape(1)):
                again = thdops.router(logits, 2, aux_coeff=coeff, total_num_tokens=tensor).aux_loss
                assert torch.equal(again, loss)
                assert torch.equal(gradient(again, logits), grad)
            assert tensor.flatten().tolist() == [count]
    assert plain.sums.num_tokens == 20


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(-3), torch.tensor(NAN)])
def test_no_token_gives_loss_zero_and_zero_gradients(count: int | Tensor) -> None:
    logits = random_logits(6, 4, DEVICE).requires_grad_()
    count = count.to(DEVICE) if isinstance(count, Tensor) else count
    loss = thdops.router(logits, 2, aux_coeff=0.1, total_num_tokens=count).aux_loss
    assert torch.equal(loss, torch.zeros_like(loss))
    assert not gradient(loss, logits).any()


# --- sequences --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_equal_sequences_by_themselves(name: str, reduction: str, masked: bool) -> None:
    cu_seqlens, padded, total = layout(name, DEVICE, torch.int64)
    logits = random_logits(total, 12, DEVICE).requires_grad_()
    mask = random_mask(total, DEVICE) if masked else None
    options: dict[str, Any] = {"aux_coeff": 0.3, "z_coeff": 0.2}
    output = thdops.router(
        logits, 3, padding_mask=mask, cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, reduction=reduction, **options
    )
    starts = (cu_seqlens if padded is None else padded).tolist()
    alone: list[RouterOutput] = []
    for b, length in enumerate(cu_seqlens.diff().tolist()):
        rows = slice(starts[b], starts[b] + length)
        alone.append(thdops.router(logits[rows], 3, padding_mask=None if mask is None else mask[rows], **options))
        close(output.probs[rows], alone[b].probs)
        assert torch.equal(output.routing[rows], alone[b].routing)

    assert output.sums.scores.shape == output.sums.counts.shape == (len(alone), 12)
    for b, sequence in enumerate(alone):
        close(output.sums.scores[b], sequence.sums.scores)
        assert torch.equal(output.sums.counts[b], sequence.sums.counts)
        assert torch.equal(output.sums.num_tokens[b], sequence.sums.num_tokens)
    assert torch.equal(
        output.tokens_per_expert, sum((s.tokens_per_expert for s in alone), torch.zeros_like(output.tokens_per_expert))
    )
    pads = thdops.padding_mask(cu_seqlens, padded, total)
    assert not output.routing[pads].any()

    losses = [sequence.aux_loss for sequence in alone]
    number = len(losses) if reduction == "sum" else max(sum(int(s.sums.num_tokens) > 0 for s in alone), 1)
    aux_loss = torch.stack([*losses, one(0.0)]).sum() / (1 if reduction == "sum" else number)
    z_loss = plain_z_loss(logits, pads if mask is None else pads | mask, 0.2)
    close(output.aux_loss, aux_loss)
    close(output.z_loss, z_loss)
    close(gradient(output.aux_loss + output.z_loss, logits), gradient(aux_loss + z_loss, logits))


def test_equal_sequences_equal_folded_ones() -> None:
    """TransformerEngine PR#3018: probs [S, B*E]. The coefficient uses E, the reduction all B*E columns."""
    length, batch, experts, topk = 12, 3, 8, 2
    logits = random_logits(batch * length, experts, DEVICE).requires_grad_()
    cu_seqlens = prefix_sums([length] * batch, DEVICE)
    loss = thdops.router(logits, topk, aux_coeff=0.1, cu_seqlens=cu_seqlens, reduction="sum").aux_loss
    best, scores = thdops.router_scores(logits, topk, "softmax")
    folded = scores.view(batch, length, experts).transpose(0, 1).reshape(length, batch * experts)
    tokens = best.view(batch, length, experts).sum(1).flatten()
    expected = thdops.moe_aux_loss(folded, tokens, length, num_experts=experts, topk=topk, coeff=0.1)
    close(loss, expected)
    close(gradient(loss, logits), gradient(expected, logits))


# --- losses from sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("on_device", [False, True])
def test_losses_from_sums_equal_the_losses(packed: bool, reduction: str, on_device: bool) -> None:
    logits = random_logits(25, 12, DEVICE).requires_grad_()
    cu_seqlens, padded, _ = layout("gaps and tail", DEVICE)
    sequences = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": padded} if packed else {}
    aux, z = (one(0.3), one(0.2)) if on_device else (0.3, 0.2)
    output = thdops.router(logits, 3, aux_coeff=aux, z_coeff=z, reduction=reduction, **sequences)
    scores, counts, z_sum, num_tokens = output.sums
    aux_loss = thdops.aux_loss_from_sums(scores, counts, num_tokens, topk=3, coeff=aux, reduction=reduction)
    z_loss = thdops.z_loss_from_sums(z_sum, num_tokens, z)
    close(aux_loss, output.aux_loss)
    close(z_loss, output.z_loss)
    close(gradient(aux_loss, logits), gradient(output.aux_loss, logits))
    close(gradient(z_loss, logits), gradient(output.z_loss, logits))
    if not packed:
        assert torch.equal(aux_loss, thdops.aux_loss_from_sums(scores, counts, 25, topk=3, coeff=aux))
        assert torch.equal(z_loss, thdops.z_loss_from_sums(z_sum, 25, z))


@pytest.mark.parametrize("parts", [(7, 7, 7), (10, 1, 10), (0, 21)])
def test_sums_of_parts_give_the_loss_of_the_whole(parts: tuple[int, ...]) -> None:
    """Megatron-LM#7213: how rows fall into micro-batches, or onto ranks, changes neither the loss nor a gradient."""
    logits = random_logits(21, 8, DEVICE).requires_grad_()
    mask = random_mask(21, DEVICE)
    whole = thdops.router(logits, 2, padding_mask=mask, aux_coeff=0.3, z_coeff=0.2)
    pieces = [thdops.router(x, 2, padding_mask=m).sums for x, m in zip(logits.split(parts), mask.split(parts), strict=True)]
    total = RouterSums(*(torch.stack(each).sum(0) for each in zip(*pieces, strict=True)))
    aux_loss = thdops.aux_loss_from_sums(total.scores, total.counts, total.num_tokens, topk=2, coeff=0.3)
    z_loss = thdops.z_loss_from_sums(total.z, total.num_tokens, 0.2)
    close(aux_loss, whole.aux_loss)
    close(z_loss, whole.z_loss)
    close(gradient(aux_loss + z_loss, logits), gradient(whole.aux_loss + whole.z_loss, logits))


@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_losses_from_sums_are_zero_without_tokens_or_coefficient(coeff: float) -> None:
    scores = torch.full((8,), NAN if coeff == 0 else 1.0, device=DEVICE).requires_grad_()
    counts = torch.ones(8, dtype=torch.int64, device=DEVICE)
    for num_tokens in (0, one(0, torch.int64), one(0.0)) if coeff else (0, 5, one(5, torch.int64)):
        for amount in (coeff, one(coeff)):
            aux_loss = thdops.aux_loss_from_sums(scores, counts, num_tokens, topk=2, coeff=amount)
            z_loss = thdops.z_loss_from_sums(scores[0] * 0 if coeff else scores[0], num_tokens, amount)
            assert aux_loss == z_loss == 0
            assert not gradient(aux_loss, scores).any()


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"scores": [1.0]}, TypeError, "scores must be a tensor, got a list;"),
        ({"scores": torch.zeros(8, dtype=torch.int64)}, TypeError, "scores must be float32 or float64, got int64;"),
        ({"scores": torch.zeros(2, 2, 8)}, ValueError, r"scores must be \[E\] or \[B, E\], got shape \[2, 2, 8\];"),
        ({"counts": torch.zeros(7)}, ValueError, r"counts must have the shape of scores \[8\], got \[7\];"),
        ({"num_tokens": torch.zeros(2)}, ValueError, r"num_tokens must have one element, got shape \[2\];"),
        (
            {"scores": torch.zeros(2, 8), "counts": torch.zeros(2, 8)},
            ValueError,
            r"num_tokens must be \[B\] with one entry per sequence \(2\), got shape \[\];",
        ),
        ({"num_tokens": 2.0}, TypeError, "num_tokens must be an int or a one-element tensor, got float;"),
        ({"topk": 9}, ValueError, r"topk must be from 1 to the number of experts \(8\), got 9;"),
        ({"topk": torch.tensor(2)}, TypeError, "topk must be a Python number, got a tensor;"),
        ({"coeff": None}, TypeError, "coeff must be a float or a one-element fp32 tensor, got NoneType;"),
        ({"reduction": "none"}, ValueError, "reduction must be one of mean, sum, got 'none';"),
    ],
)
def test_errors_of_losses_from_sums(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"scores": torch.zeros(8), "counts": torch.zeros(8), "num_tokens": 4, "topk": 2, "coeff": 1.0}
    with pytest.raises(error, match=f"^aux_loss_from_sums: {text}"):
        thdops.aux_loss_from_sums(**(arguments | changed))


def test_errors_of_the_z_loss_from_sums() -> None:
    with pytest.raises(ValueError, match=r"^z_loss_from_sums: z must have one element, got shape \[2\];"):
        thdops.z_loss_from_sums(torch.zeros(2), 4, 1.0)
    with pytest.raises(TypeError, match=r"^z_loss_from_sums: coeff must be a float or a one-element fp32 tensor, got str;"):
        thdops.z_loss_from_sums(torch.zeros(()), 4, "1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"total_num_tokens": 8.0}, TypeError, "total_num_tokens must be an int or a one-element tensor, got float;"),
        ({"total_num_tokens": -1}, ValueError, "total_num_tokens must be at least 0, got -1;"),
        ({"total_num_tokens": torch.zeros(2)}, ValueError, r"total_num_tokens must have one element, got shape \[2\];"),
        ({"aux_coeff": "1"}, TypeError, "aux_coeff must be a float or a one-element fp32 tensor, got str;"),
        ({"z_coeff": torch.ones(2)}, ValueError, r"z_coeff must have one element, got shape \[2\];"),
        ({"z_coeff": torch.tensor(1)}, TypeError, "z_coeff must be float32, got int64;"),
        ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens must be a tensor, got a list;"),
        (
            {"cu_seqlens": torch.tensor([0, 4]), "total_num_tokens": 4},
            ValueError,
            "total_num_tokens must be None where cu_seqlens is given, got both;",
        ),
        ({"cu_seqlens_padded": torch.tensor([0, 4])}, ValueError, "cu_seqlens_padded must come with cu_seqlens, got it alone;"),
        (
            {"aux_score_function": "relu"},
            ValueError,
            "aux_score_function must be one of softmax, sigmoid, sqrtsoftplus, got 'relu';",
        ),
        ({"reduction": "none"}, ValueError, "reduction must be one of mean, sum, got 'none';"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    changed = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in changed.items()}
    with pytest.raises(error, match=f"^router: {text}"):
        thdops.router(random_logits(4, 8, DEVICE), 2, **changed)


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def test_every_result_that_should_has_a_gradient_and_no_other() -> None:
    logits = random_logits(6, 8, DEVICE).requires_grad_()
    coeff = one(0.1).requires_grad_()
    bias = torch.zeros(8, device=DEVICE, requires_grad=True)
    output = thdops.router(logits, 2, score_function="sigmoid", expert_bias=bias, aux_coeff=coeff, z_coeff=coeff)
    assert all(x.requires_grad for x in (output.probs, output.aux_loss, output.z_loss, output.sums.scores, output.sums.z))
    assert not any(x.requires_grad for x in (output.routing, output.tokens_per_expert, output.sums.counts, output.sums.num_tokens))
    (output.probs.square().sum() + output.aux_loss + output.z_loss).backward()
    assert logits.grad is not None
    assert coeff.grad is None
    assert bias.grad is None


def test_a_second_derivative_is_refused() -> None:
    logits = random_logits(6, 8, DEVICE).requires_grad_()
    output = thdops.router(logits, 2, aux_coeff=0.1)
    (grad,) = torch.autograd.grad(output.aux_loss**2, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_changing_the_mask_before_the_backward_raises() -> None:
    logits, mask = random_logits(6, 8, DEVICE).requires_grad_(), random_mask(6, DEVICE)
    loss = thdops.router(logits, 2, padding_mask=mask, aux_coeff=0.1).aux_loss
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(CUDA, reason="fp64 is served on CPU only")
def test_fp64_on_cpu() -> None:
    logits = random_logits(6, 8, DEVICE).double().requires_grad_()
    output = thdops.router(logits, 2, aux_coeff=0.1, z_coeff=0.1)
    for result in (output.probs, output.aux_loss, output.z_loss, output.sums.scores, output.sums.z):
        assert result.dtype == torch.float64


# --- compiled ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_for_all_masks_counts_coefficients_and_sequences(packed: bool) -> None:
    def step(logits: Tensor, bias: Tensor, mask: Tensor, count: Tensor, aux: Tensor, z: Tensor) -> tuple[RouterOutput, Tensor]:
        output = thdops.router(
            logits,
            2,
            score_function="sigmoid",
            expert_bias=bias,
            padding_mask=mask,
            aux_coeff=aux,
            z_coeff=z,
            total_num_tokens=None if packed else count,
            cu_seqlens=count if packed else None,
        )
        sums = output.sums
        again = thdops.aux_loss_from_sums(sums.scores, sums.counts, sums.num_tokens, topk=2, coeff=aux)
        return output, output.probs.square().sum() + output.aux_loss + output.z_loss + again

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    for seed, (count, lengths, aux, z) in enumerate(
        ((16, [5, 0, 9], 0.3, 0.2), (7, [16, 0, 0], 0.0, 0.5), (0, [0, 0, 0], 1.0, 0.0), (90, [1, 2, 3], 2.0, 1.0))
    ):
        logits, mask = random_logits(16, 8, DEVICE, seed).requires_grad_(), random_mask(16, DEVICE, seed)
        metadata = prefix_sums(lengths, DEVICE) if packed else one(count, torch.int64)
        args = (logits, random_logits(1, 8, DEVICE, seed)[0], mask, metadata, one(aux), one(z))
        (actual, loss), (expected, true_loss) = compiled(*args), step(*args)
        assert isinstance(actual, RouterOutput)
        for a, b in zip((*actual[:5], *actual.sums), (*expected[:5], *expected.sums), strict=True):
            assert torch.equal(a, b)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(true_loss, logits)[0])
    assert counter.frame_count == 1


# --- kernels ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "topk"), [(1024, 4), (256, 32), (128, 4), (32, 4)])
@pytest.mark.parametrize("rows", [2048, 7168, 14234])
def test_losses_at_full_size(rows: int, experts: int, topk: int) -> None:
    """Losses and their gradients against the parts in fp64; the same input eight times gives the same bits (Megatron-LM#6254)."""
    logits, mask = random_logits(rows, experts, DEVICE).requires_grad_(), random_mask(rows, DEVICE)
    # The aux loss counts by logits, which nobody rounds: scores closer than fp32 tells apart would be counted either way.
    options: dict[str, Any] = {"score_function": "sigmoid", "aux_score_function": "softmax", "padding_mask": mask}
    options |= {"aux_coeff": 0.01, "z_coeff": 0.01}
    output = thdops.router(logits, topk, **options)
    fp64 = logits.detach().double().cpu().requires_grad_()
    truth = thdops.router(fp64, topk, **{**options, "padding_mask": mask.cpu()})
    tolerance = max(1e-5, 4e-7 * experts)
    for actual, expected in ((output.aux_loss, truth.aux_loss), (output.z_loss, truth.z_loss)):
        close(actual.cpu(), expected, tolerance)
        close(gradient(actual, logits).cpu(), gradient(expected, fp64), tolerance)
    close(output.sums.scores.cpu(), truth.sums.scores, tolerance)
    assert torch.equal(output.sums.counts.cpu(), truth.sums.counts)
    grad = gradient(output.probs.square().sum() + output.aux_loss + output.z_loss, logits)
    for _ in range(7):
        again = thdops.router(logits, topk, **options)
        for a, b in zip((*again[:5], *again.sums), (*output[:5], *output.sums), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(gradient(again.probs.square().sum() + again.aux_loss + again.z_loss, logits), grad)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 64, 1024])
def test_packed_sequences_at_full_size(sequences: int) -> None:
    rows, experts = 8192, 128
    ends = torch.arange(sequences + 1, device=DEVICE) * (rows // sequences)
    valid = torch.arange(sequences + 1, device=DEVICE) * (rows // sequences * 7 // 8)
    logits = random_logits(rows, experts, DEVICE).requires_grad_()
    output = thdops.router(logits, 8, cu_seqlens=valid, cu_seqlens_padded=ends, aux_coeff=0.01)
    fp64 = logits.detach().double().cpu().requires_grad_()
    truth = thdops.router(fp64, 8, cu_seqlens=valid.cpu(), cu_seqlens_padded=ends.cpu(), aux_coeff=0.01)
    assert torch.equal(output.sums.counts.cpu(), truth.sums.counts)
    close(output.sums.scores.cpu(), truth.sums.scores, 1e-5)
    close(output.aux_loss.cpu(), truth.aux_loss, 1e-5)
    close(gradient(output.aux_loss, logits).cpu(), gradient(truth.aux_loss, fp64), 1e-5)
