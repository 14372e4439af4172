"""Inputs on which other projects failed, with the right answers; the number is the row of the list of cases."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from attention_oracle import (
    BACKENDS,
    CPU,
    DETERMINISTIC,
    DEVICES,
    FEWER_KEYS,
    GAPS,
    KEYS,
    QUERIES,
    TAIL,
    Batch,
    Case,
    check,
    computed,
    from_offsets,
    numbers,
    poisoned,
)
from capturing import captured
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import thdops
from meta_kernels.attention_thd import Call
from thdops.namespace import REGISTRY
from thdops.ops.layouts import prefix_sums


@pytest.mark.parametrize("device", DEVICES)
def test_equal_offsets_in_one_tensor_or_several_case_2(device: str) -> None:
    case = Case(Batch([5, 9, 2], None, 16))
    given = numbers(case, torch.bfloat16)
    q, k, v = (x.to(device) for x in given[:3])
    cu = prefix_sums([5, 9, 2], torch.device(device))
    both = torch.stack((cu, cu))

    def step(padded: Tensor | None) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        settings: dict[str, Any] = {"causal": True, "deterministic": True, "backend": BACKENDS[device]}
        out = thdops.attention(leaves[0], leaves[1], leaves[2], cu, cu_seqlens_q_padded=padded, **settings)
        return [out, *torch.autograd.grad(out.float().sum(), leaves)]

    plain = step(None)
    for padded in (cu, cu.clone(), both[1], cu.view(-1)):
        for actual, expected in zip(step(padded), plain, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_and_tail_alike_case_3(device: str) -> None:
    batch = from_offsets([0, 1, 2, 3, 7, 10, 12, 13, 14], [0, 1, 2, 4, 8, 12, 14, 15, 16], 16)
    assert batch.padding().nonzero().flatten().tolist() == [3, 11]
    check(Case(batch, options={"causal": True}), device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_offset_with_poisoned_memory_case_5(device: str) -> None:
    batch = from_offsets([0, 144, 432, 944], None, 946)
    case = Case(batch, heads=(16, 16), dims=(64, 64), options={"causal": True})
    given = numbers(case, torch.bfloat16)
    flags = torch.are_deterministic_algorithms_enabled(), DETERMINISTIC.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    DETERMINISTIC.fill_uninitialized_memory = True
    try:
        assert torch.empty(4, device=device).isnan().all()  # negative control: fresh memory is poisoned
        answers = computed(case, given, device)
    finally:
        torch.use_deterministic_algorithms(flags[0])
        DETERMINISTIC.fill_uninitialized_memory = flags[1]
    assert all(x.isfinite().all() for x in (answers.out, *answers.gradients))
    assert answers.out[944:].abs().max() == 0
    assert all(g[944:].abs().max() == 0 for g in answers.gradients)
    q, k, v = (x.float().cpu().transpose(0, 1) for x in given[:3])
    for start, end in ((0, 144), (144, 432), (432, 944)):
        rows = slice(start, end)
        expected = torch.nn.functional.scaled_dot_product_attention(q[:, rows], k[:, rows], v[:, rows], is_causal=True)
        torch.testing.assert_close(answers.out[rows].float().cpu(), expected.transpose(0, 1), atol=1.5e-2, rtol=1.5e-2)


def test_one_program_small_large_small_cases_6_and_15() -> None:
    """One compiled graph serves every layout of the same buffers, and each gives what eager gives."""
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        return thdops.attention(q, k, v, cu, cu_seqlens_q_padded=padded, causal=True, return_lse=True)

    for lengths in ([3, 2, 0], [9, 7, 4], [1, 0, 2], [3, 2, 0]):
        case = Case(Batch(lengths, [10, 8, 6], 26), options={"causal": True})
        given = poisoned(case, numbers(case, torch.float32, seed=sum(lengths)))
        (cu,), options = case.arguments(CPU)
        out, lse = step(*given[:3], cu, options["cu_seqlens_q_padded"])
        expected = thdops.attention(*given[:3], cu, **options, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    assert counter.frame_count == 1


def _train(leaves: list[Tensor], grad: Tensor, cu: Tensor, padded: Tensor) -> tuple[Tensor, ...]:
    q, k, v = leaves
    out = thdops.attention(q, k, v, cu, cu_seqlens_q_padded=padded, causal=True, deterministic=True, backend="native")
    return out, *torch.autograd.grad(out, leaves, grad)


@pytest.mark.gpu
def test_two_graphs_in_one_pool_replayed_with_other_layouts_cases_6_and_15() -> None:
    device = torch.device("cuda")
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for capacity in (512, 2048):
        q, k, v, grad = (torch.randn(capacity, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
        cu, padded = torch.zeros(5, dtype=torch.int32, device=device), torch.zeros(5, dtype=torch.int32, device=device)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        graph, results = captured(partial(_train, leaves, grad, cu, padded), pool)
        graphs[capacity] = (graph, results, leaves, grad, cu, padded)
    for capacity, lengths in ((512, [100, 0, 30, 7]), (2048, [1196, 0, 0, 0]), (2048, [500, 400, 300, 200]), (512, [1, 2, 3, 4])):
        graph, results, leaves, grad, cu, padded = graphs[capacity]
        cu.copy_(prefix_sums(lengths, device))
        padded.copy_(prefix_sums([n + 8 for n in lengths], device))
        graph.replay()
        replayed = [x.clone() for x in results]
        mask = thdops.padding_mask(cu, padded, capacity)
        assert int(mask.sum()) == capacity - sum(lengths)
        for a, b in zip(replayed, _train(leaves, grad, cu, padded), strict=True):
            assert torch.equal(a, b)
            assert a[mask].abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_of_length_zero_case_7(device: str) -> None:
    answers = check(Case(Batch([4, 6, 2, 0], [4, 8, 2, 6], 20)), device)
    assert answers.out.abs().amax().isfinite()
    assert (answers.lse[:, 14:] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_garbage_on_padding_is_selected_away_case_8(device: str) -> None:
    check(Case(Batch([4, 6, 3], [7, 6, 5], 21), options={"causal": True}), device)
    check(Case(TAIL), device)
    check(Case(QUERIES, KEYS), device)


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_from_padded_offsets_lengths_from_cu_seqlens_case_9(device: str) -> None:
    batch = from_offsets([0, 3, 5, 9], [0, 4, 8, 13], 13)
    assert batch.padding().nonzero().flatten().tolist() == [3, 6, 7, 12]
    check(Case(batch, options={"causal": True}), device)


@pytest.mark.parametrize("device", DEVICES)
def test_one_query_row_a_sequence_case_11(device: str) -> None:
    queries, keys = from_offsets([0, 1, 1, 2], None, 2), from_offsets([0, 3, 3, 8], None, 8)
    options = {"causal": True, "causal_alignment": "bottom_right"}
    case = Case(queries, keys, heads=(9, 3), dims=(64, 64), options=options)
    check(case, device, max_seqlen_q=1, max_seqlen_kv=5)
    given = numbers(case, torch.bfloat16)
    k = given.k.to(device)
    ones = torch.ones(8, 3, 64, device=device, dtype=torch.bfloat16)
    q, (cu, padded, *keyed) = torch.zeros(2, 9, 64, device=device, dtype=torch.bfloat16), case.arguments(device)[0]
    _, lse = thdops.attention(q, k, ones, cu, padded, *keyed, return_lse=True, backend=BACKENDS[device], **options)
    torch.testing.assert_close(lse.cpu(), torch.tensor([3.0, 5.0]).log().expand(9, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_visible_key_case_12(device: str) -> None:
    case = Case(*FEWER_KEYS, options={"causal": True, "causal_alignment": "bottom_right"})
    answers = check(case, device)
    blind = [0, 1, 2, 3, 6, 7, 8, 9]
    assert (answers.lse[:, blind] == -torch.inf).all()
    assert (answers.out[blind] == 0).all()
    assert (answers.gradients[0][blind] == 0).all()


def test_sinks_of_rows_without_a_visible_key() -> None:
    for softmax in ("off_by_one", "learnable"):
        case = Case(QUERIES, KEYS, options={"softmax": softmax})
        given = numbers(case)
        answers = check(case, "cpu")
        blind = list(QUERIES.rows()[2])
        expected = torch.zeros(4, dtype=torch.float64) if given.sink is None else given.sink
        assert torch.equal(answers.lse[:, blind], expected[:, None].expand(4, len(blind)))
        assert (answers.gradients[0][blind] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logit", [-(2.0**16), -(2.0**20)])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_logits_far_below_zero_case_12(dim: int, logit: float, device: str) -> None:
    """Masking is by -inf, not by a large number: keys with logits below it still get their share, and gradients, as exactly as fp32
    has an LSE of that size.
    """
    batch = Batch([4, 3], [5, 4], 10)
    dtype = torch.bfloat16
    q = torch.full((10, 2, dim), (-logit / dim) ** 0.5, dtype=dtype, device=device).requires_grad_()
    k = (-q.detach()).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    v, grad = (torch.randn(10, 2, dim, generator=generator).to(device, dtype) for _ in range(2))
    v.requires_grad_()
    cu, padded = batch.metadata(device)
    settings: dict[str, Any] = {"causal": True, "scale": 1.0, "return_lse": True, "backend": BACKENDS[device]}
    out, lse = thdops.attention(q, k, v, cu, cu_seqlens_q_padded=padded, **settings)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    assert (lse[:, 0] < -5e4).all()
    assert bool(dq.isfinite().all() & dk.isfinite().all())
    for rows in batch.rows():
        here, seen = slice(rows.start, rows.stop), torch.arange(1, len(rows) + 1, device=device)[:, None, None]
        mean = v[here].detach().float().cumsum(0) / seen
        torch.testing.assert_close(out[here].detach().float(), mean, rtol=0, atol=0.02)
        shares = (grad[here].float() / seen).flip(0).cumsum(0).flip(0)
        near = max(0.02, -logit * 2**-24)  # bf16, or e^(half a unit of such an LSE)
        torch.testing.assert_close(dv[here].float(), shares, rtol=near, atol=near)


def test_rows_beyond_two_to_the_31_elements_of_a_view_case_13() -> None:
    """Four rows of a buffer so wide that the last stands past 2^31 elements; only those rows are ever touched."""
    wide = torch.empty(3 * 2**30 + 64, dtype=torch.bfloat16)
    rows = wide.as_strided((4, 2, 16), (2**30, 16, 1))
    case = Case(Batch([2, 2], None, 4), heads=(2, 2))
    given = numbers(case, torch.bfloat16)
    rows.copy_(given.q)
    (cu,), _ = case.arguments(CPU)
    assert torch.equal(thdops.attention(rows, given.k, given.v, cu), thdops.attention(given.q, given.k, given.v, cu))


# Heads and head dim of q, rows of a sequence, and how many rows there are beyond 2^31 elements.
_LARGE = [(32, 256, 64, -64), (32, 256, 64, 64), (64, 128, 64, 64), (64, 128, 2048, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "length", "more"), _LARGE)
def test_two_to_the_31_elements_case_13(heads: int, dim: int, length: int, more: int) -> None:
    """Long sequences at head dim 128: the fp32 sums of dq are as large."""
    rows = 262_144 + more
    device = torch.device("cuda")
    q = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(rows, 4, dim, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    cu = torch.arange(0, rows + 1, length, device=device, dtype=torch.int32)
    out = thdops.attention(q, k, v, cu, causal=True, backend="native")
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    last = slice(rows - length, rows)
    few = [x.detach()[last].clone().requires_grad_() for x in (q, k, v)]
    found, upstream = [x[last].clone() for x in (out, *gradients)], grad[last].clone()
    del q, k, v, out, grad, gradients
    torch.cuda.empty_cache()  # other processes test on this GPU, too
    expected = thdops.attention(few[0], few[1], few[2], cu[:2], causal=True, backend="native")
    for a, b in zip(found, (expected, *torch.autograd.grad(expected, few, upstream)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_many_empty_sequences_change_nothing_case_16(device: str) -> None:
    few, many = Case(Batch([7, 2, 5], None, 18)), Case(Batch([7, 2, 5] + [0] * 4000, None, 18))
    given = numbers(few, torch.bfloat16)
    for a, b in zip(computed(few, given, device).gradients, computed(many, given, device).gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_any_strides_case_26(device: str) -> None:
    """Through `cat`, expanded, transposed and sliced: what comes back is the gradient of the same loss."""
    case = Case(GAPS, options={"causal": True})
    given = numbers(case, torch.float32 if device == "cpu" else torch.bfloat16)
    q, k, v = (x.to(device).requires_grad_() for x in given[:3])
    (cu,), options = case.arguments(device)

    def gradients(loss: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(thdops.attention(q, k, v, cu, deterministic=True, **options)), (q, k, v))

    weights = given.grad_out.to(device)
    plain = gradients(lambda out: (out * weights).sum())
    by_cat = gradients(lambda out: (torch.cat((torch.zeros_like(out), out), 2)[..., 16:] * weights).sum())
    turned = gradients(lambda out: (out.permute(2, 0, 1) * weights.permute(2, 0, 1)).sum())
    expanded, ones = gradients(torch.sum), gradients(lambda out: (out * torch.ones_like(out)).sum())
    for a, b in (*zip(plain, by_cat, strict=True), *zip(plain, turned, strict=True), *zip(expanded, ones, strict=True)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_fake_and_real_results_case_27(device: str) -> None:
    """Transposed, sliced and fused inputs: results are contiguous, as the fake says."""
    base = torch.randn(25, 8, 32, device=device, dtype=torch.bfloat16)
    views = {
        "fused": base.split((4, 2, 2), 1),
        "heads first": (base[:, :4].transpose(0, 1).contiguous().transpose(0, 1), base[:, 4:6], base[:, 6:]),
        "every second column": (base[:, :4, ::2], base[:, 4:6, ::2], base[:, 6:, ::2]),
        "not on a 16-byte boundary": (base[:, :4, 4:28], base[:, 4:6, 4:28], base[:, 6:, 4:28]),
    }
    cu, padded = GAPS.metadata(device)
    spec = REGISTRY["attention"]
    backends = ["reference"] if device == "cpu" else ["native", "torch"]
    for (q, k, v), backend in itertools.product(views.values(), backends):
        args = Call(q, k, v, cu, padded, None, None, None, True, False, -1, -1, 0.25, "vanilla", 0.0, 0, 0, False, backend, False)
        real, fake = torch.ops.thdops.attention(*args), spec.fake(*args)
        assert [x.stride() for x in real] == [x.stride() for x in fake]
        contiguous = torch.ops.thdops.attention(*(x.contiguous() for x in args[:3]), *args[3:])
        for a, b in zip(real, contiguous, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_longer_hint_is_no_new_program_case_29() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return thdops.attention(q, k, v, cu, causal=True, max_seqlen_q=longest, max_seqlen_kv=longest)

    case = Case(TAIL)
    given = numbers(case, torch.float32)
    (cu,), _ = case.arguments(CPU)
    for longest in (128, 129, 130):
        step(*given[:3], cu, longest)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_the_adapter_needs_the_hint_and_compiles_once_more_for_all_its_values_case_29() -> None:
    """FA2 sizes its grid by the longest sequence: at its second value the hint becomes a symbol, and one program serves all."""
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return thdops.attention(q, k, v, cu, causal=True, max_seqlen_q=longest, max_seqlen_kv=longest, backend="torch")

    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = prefix_sums([100, 128, 50], torch.device("cuda"))
    outs = [step(q, k, v, cu, longest) for longest in (128, 129, 130, 200, 300)]
    assert counter.frame_count == 2
    assert all(torch.equal(out, outs[0]) for out in outs)
