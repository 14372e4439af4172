"""What is special to the aux loss: its value, which count goes into it, padding, repeatability, strides, one graph per program.

T rows (tokens), E experts, K top-k, N counted tokens, M sequences folded into columns. Conformance covers what every op shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops.conformance.interpreter import guarded_memory, why_not
from thdops.namespace import REGISTRY
from thdops.registry import load_launcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN = float("nan")
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated")
interpreted = pytest.mark.skipif(not CUDA and why_not() != "", reason=why_not() or "interpreted")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def random_probs(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator).to(DEVICE, dtype)


def random_tokens(columns: int, dtype: torch.dtype = torch.int32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 1000, (columns,), generator=generator).to(DEVICE, dtype)


def true_loss(probs: Tensor, tokens: Tensor, count: float, experts: int, topk: int, coeff: float) -> Tensor:
    """The formula in fp64, written out once more."""
    return experts * coeff / (topk * count**2) * (probs.double() * tokens.double()).sum()


def true_row(tokens: Tensor, count: float, experts: int, topk: int, coeff: float) -> Tensor:
    return experts * coeff / (topk * count**2) * tokens.double()


def loss_and_grad(probs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    leaf = probs.detach().requires_grad_()
    loss = thdops.moe_aux_loss(leaf, *args, **kwargs)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def close(actual: Tensor, expected: Tensor, ulps: float = 4.0) -> None:
    tolerance = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=0.0)


def kernel(name: str) -> Callable[..., Any]:
    """An op's launcher on `DEVICE`, in guarded memory where it is interpreted."""
    if CUDA:
        return REGISTRY.op(name)
    launcher = load_launcher(REGISTRY[name], REGISTRY.schema(name))

    def run(*args: Any) -> Any:
        with guarded_memory([a for a in args if isinstance(a, Tensor)]):
            return launcher(*args)

    return run


# --- value and gradient -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1024, 256, 128, 32])
@pytest.mark.parametrize("topk", [4, 32])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_value_and_gradient(experts: int, topk: int, multiplier: int) -> None:
    rows, columns = 2048, experts * multiplier
    probs, tokens = random_probs(rows, columns).softmax(-1), random_tokens(columns)
    loss, grad = loss_and_grad(probs, tokens, rows, num_experts=experts, topk=topk, coeff=0.01)
    close(loss, true_loss(probs, tokens, rows, experts, topk, 0.01), ulps=16)
    close(grad, true_row(tokens, rows, experts, topk, 0.01).expand(rows, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradient_is_an_ordinary_tensor_in_the_dtype_of_probs(dtype: torch.dtype) -> None:
    # Coefficient large enough that the gradient is no fp16 subnormal.
    probs, tokens = random_probs(64, 8, dtype), random_tokens(8)
    loss, grad = loss_and_grad(probs, tokens, 64, num_experts=8, topk=2, coeff=1.0)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert (grad.dtype, grad.stride(), grad.storage_offset()) == (dtype, (8, 1), 0)
    close(loss, true_loss(probs, tokens, 64, 8, 2, 1.0))
    close(grad, true_row(tokens, 64, 8, 2, 1.0).expand(64, -1), ulps=1)
    grad[3].zero_()  # as a hook would; the rows must not share memory
    assert grad[4].all()


def test_fp64_on_cpu() -> None:
    probs, tokens = random_probs(9, 4).cpu().double(), random_tokens(4).cpu()
    loss, grad = loss_and_grad(probs, tokens, 9, num_experts=4, topk=1, coeff=0.1)
    assert loss.dtype == grad.dtype == torch.float64
    close(loss, true_loss(probs, tokens, 9, 4, 1, 0.1))


@pytest.mark.parametrize("rows", [0, 1])
def test_degenerate_sizes(rows: int) -> None:
    probs = random_probs(rows, 1)
    loss, grad = loss_and_grad(probs, torch.tensor([3], device=DEVICE), 1, num_experts=1, topk=1, coeff=0.5)
    close(loss, 0.5 * 3 * probs.sum())
    assert grad.shape == (rows, 1)
    assert (grad == 1.5).all()


# --- counts -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", COUNT_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("count", [4096, 2048, 8175])
def test_counts_of_every_form_agree_and_are_not_mutated(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    """Megatron-LM PR#7183 and PR#7481: a count is accepted as float32, int32 and int64, and nothing is written to an input."""
    probs, tokens = random_probs(40, 16), random_tokens(16)
    kept = tokens.clone()
    device_count = torch.full(shape, count, dtype=dtype, device=DEVICE)
    options = {"num_experts": 16, "topk": 4}
    loss, grad = loss_and_grad(probs, tokens, count, coeff=0.01, **options)
    close(loss, true_loss(probs, tokens, count, 16, 4, 0.01))
    for coeff in (0.01, torch.tensor(0.01, device=DEVICE), torch.tensor([0.01], device=DEVICE)):
        again, grad_again = loss_and_grad(probs, tokens, device_count, coeff=coeff, **options)
        assert torch.equal(again, loss)
        assert torch.equal(grad_again, grad)
    assert device_count._version == tokens._version == 0
    assert torch.equal(device_count, torch.full_like(device_count, count))
    assert torch.equal(tokens, kept)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16])
def test_tokens_per_expert_of_every_dtype_agree(dtype: torch.dtype) -> None:
    probs = random_probs(40, 8)
    tokens = torch.tensor([0, 1, 2, 3, 100, 128, 250, 256], device=DEVICE)  # bf16 holds them
    options = {"num_experts": 8, "topk": 2, "coeff": 0.01}
    loss, grad = loss_and_grad(probs, tokens, 40, **options)
    again, grad_again = loss_and_grad(probs, tokens.to(dtype), 40, **options)
    assert torch.equal(again, loss)
    assert torch.equal(grad_again, grad)


def test_float_tokens_and_coefficients_get_no_gradient() -> None:
    probs = random_probs(8, 4).requires_grad_()
    tokens = random_tokens(4, torch.float32).requires_grad_()
    coeff = torch.tensor(0.1, device=DEVICE, requires_grad=True)
    thdops.moe_aux_loss(probs, tokens, 8, num_experts=4, topk=1, coeff=coeff).backward()
    assert probs.grad is not None
    assert tokens.grad is None
    assert coeff.grad is None


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(0.0), torch.tensor(-3), torch.tensor(NAN)])
@pytest.mark.parametrize("content", [1.0, NAN, float("inf")])
def test_no_token_gives_loss_zero_and_zero_gradients(count: int | Tensor, content: float) -> None:
    probs = torch.full((6, 4), content, device=DEVICE)
    count = count.to(DEVICE) if isinstance(count, Tensor) else count
    loss, grad = loss_and_grad(probs, random_tokens(4), count, num_experts=4, topk=1, coeff=0.1)
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(grad, torch.zeros_like(grad))


def test_large_counts_do_not_overflow() -> None:
    """N * N of 2**31 tokens fits neither int32 nor int64 times K; dividing twice does."""
    probs, tokens = random_probs(8, 4), torch.full((4,), 2**31, device=DEVICE)
    for count in (2**32, torch.tensor(2**32, device=DEVICE)):
        loss, grad = loss_and_grad(probs, tokens, count, num_experts=4, topk=2, coeff=1.0)
        close(loss, true_loss(probs, tokens, 2**32, 4, 2, 1.0))
        close(grad, true_row(tokens, 2**32, 4, 2, 1.0).expand(8, -1))


def test_folded_sequences_use_the_number_of_experts() -> None:
    """TransformerEngine PR#3018: probs [S, B*E]. The coefficient uses E, the reduction all B*E columns."""
    length, batch, experts, topk, coeff = 12, 3, 8, 2, 0.01
    probs, tokens = random_probs(length, batch * experts), random_tokens(batch * experts)
    options = {"num_experts": experts, "topk": topk, "coeff": coeff}
    loss, grad = loss_and_grad(probs, tokens, length, **options)
    each = [
        loss_and_grad(p.contiguous(), t, length, **options)
        for p, t in zip(probs.split(experts, 1), tokens.split(experts), strict=True)
    ]
    close(loss, true_loss(probs, tokens, length, experts, topk, coeff))
    close(loss, torch.stack([one for one, _ in each]).sum())
    assert torch.equal(grad, torch.cat([one for _, one in each], 1))


@pytest.mark.parametrize("valid", [(4, 4, 4), (6, 2, 4), (0, 6, 6)])
def test_gradients_do_not_depend_on_how_tokens_fall_into_micro_batches(valid: tuple[int, ...]) -> None:
    """Megatron-LM#7213: the same 12 tokens in micro-batches of capacity 6. Tokens per expert and N count all of them."""
    experts, topk, coeff, capacity = 4, 2, 0.1, 6
    rows, tokens = random_probs(12, experts), random_tokens(experts)
    options = {"num_experts": experts, "topk": topk, "coeff": coeff}
    whole, whole_grad = loss_and_grad(rows, tokens, 12, **options)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    batches = []
    for part in rows.split(valid):
        batch = torch.full((capacity, experts), NAN, device=DEVICE)
        batch[: len(part)] = part
        mask = torch.arange(capacity, device=DEVICE) >= len(part)
        count += (~mask).sum()
        batches.append((batch, mask))
    total = torch.zeros((), device=DEVICE)
    grads = []
    for (batch, mask), size in zip(batches, valid, strict=True):
        loss, grad = loss_and_grad(batch, tokens, count, padding_mask=mask, **options)
        total += loss
        grads.append(grad[:size])
        assert torch.equal(grad[size:], torch.zeros_like(grad[size:]))
    close(total, whole)
    close(total, true_loss(rows, tokens, 12, experts, topk, coeff))
    assert torch.equal(torch.cat(grads), whole_grad)


# --- padding ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("folds", [None, 3])
def test_padding_rows_add_nothing_and_get_no_gradient(poison: float, folds: int | None) -> None:
    probs, tokens = random_probs(20, 12), random_tokens(12)
    generator = torch.Generator().manual_seed(5)
    mask = (torch.rand((20,) if folds is None else (20, folds), generator=generator) < 0.4).to(DEVICE)
    wide = (mask if folds else mask[:, None].expand(20, 3)).repeat_interleave(4, 1)
    poisoned = torch.where(wide, poison, probs)
    loss, grad = loss_and_grad(poisoned, tokens, 13, num_experts=4, topk=2, coeff=0.1, padding_mask=mask)
    close(loss, true_loss(torch.where(wide, 0.0, probs), tokens, 13, 4, 2, 0.1))
    close(grad, torch.where(wide, 0.0, true_row(tokens, 13, 4, 2, 0.1)))
    assert not grad[wide].any()


def test_an_all_padding_batch_is_zero() -> None:
    probs = torch.full((5, 4), NAN, device=DEVICE)
    mask = torch.ones(5, dtype=torch.bool, device=DEVICE)
    loss, grad = loss_and_grad(probs, random_tokens(4), 5, num_experts=4, topk=1, coeff=1.0, padding_mask=mask)
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(grad, torch.zeros_like(grad))


# --- autograd ---------------------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_loss_scales_and_a_second_derivative_is_refused() -> None:
    probs = random_probs(8, 4).requires_grad_()
    tokens = random_tokens(4)
    loss = thdops.moe_aux_loss(probs, tokens, 8, num_experts=4, topk=1, coeff=0.1)
    (grad,) = torch.autograd.grad(loss**2 / 2, probs, create_graph=True)
    close(grad, loss.detach() * true_row(tokens, 8, 4, 1, 0.1).expand(8, -1))
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_the_coefficient_of_the_op_is_not_differentiable() -> None:
    probs = random_probs(8, 4).requires_grad_()
    loss, coefficient = torch.ops.thdops.moe_aux_loss(probs, random_tokens(4), None, None, None, 4, 1, 8, 0.1)
    assert loss.requires_grad
    assert not coefficient.requires_grad


def test_changing_the_tokens_before_the_backward_raises() -> None:
    probs, tokens = random_probs(8, 4).requires_grad_(), random_tokens(4)
    loss = thdops.moe_aux_loss(probs, tokens, 8, num_experts=4, topk=1, coeff=0.1)
    tokens.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- errors of the public function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"total_num_tokens": 8.0}, TypeError, "total_num_tokens must be an int or a one-element tensor, got float;"),
        ({"total_num_tokens": True}, TypeError, "total_num_tokens must be an int or a one-element tensor, got bool;"),
        ({"total_num_tokens": None}, TypeError, "total_num_tokens must be an int or a one-element tensor, got NoneType;"),
        ({"total_num_tokens": -1}, ValueError, "total_num_tokens must be at least 0, got -1;"),
        ({"total_num_tokens": torch.tensor(8, dtype=torch.uint8)}, TypeError, "must be int32 or int64 or float32, got uint8;"),
        ({"coeff": "0.1"}, TypeError, "coeff must be a float or a one-element fp32 tensor, got str;"),
        ({"coeff": torch.ones(2)}, ValueError, r"coeff must have one element, got shape \[2\];"),
        ({"topk": 5}, ValueError, r"topk must be from 1 to num_experts \(4\), got 5;"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"total_num_tokens": 8, "num_experts": 4, "topk": 1, "coeff": 0.1} | changed
    arguments = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=f"^moe_aux_loss: .*{text}"):
        thdops.moe_aux_loss(random_probs(8, 4), random_tokens(4), **arguments)


# --- compiled ---------------------------------------------------------------------------------------------------------------------


def compiled_step(backend: str, **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    def step(probs: Tensor, tokens: Tensor, count: int | Tensor, coeff: float | Tensor, mask: Tensor | None) -> Tensor:
        return thdops.moe_aux_loss(probs, tokens, count, num_experts=8, topk=2, coeff=coeff, padding_mask=mask)

    counter = CompileCounterWithBackend(backend)
    return torch.compile(step, backend=counter, fullgraph=True, **options), counter


def check_compiled(step: Callable[..., Any], rows: int, count: int | Tensor, coeff: float | Tensor, mask: Tensor | None) -> None:
    probs, tokens = random_probs(rows, 8).requires_grad_(), random_tokens(8)
    loss = step(probs, tokens, count, coeff, mask)
    (grad,) = torch.autograd.grad(loss, probs)
    expected, expected_grad = loss_and_grad(probs, tokens, count, num_experts=8, topk=2, coeff=coeff, padding_mask=mask)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert grad.stride() == (8, 1)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_all_int_counts_after_the_second(backend: str) -> None:
    step, counter = compiled_step(backend)
    for count in (16, 11):
        check_compiled(step, 16, count, 0.01, None)
    graphs = counter.frame_count
    assert graphs <= 2
    for count in (5, 7, 1000, 16):
        check_compiled(step, 16, count, 0.01, None)
    assert counter.frame_count == graphs


@pytest.mark.usefixtures("_fresh_compiler")
def test_one_graph_for_all_tensor_counts_and_coefficients() -> None:
    step, counter = compiled_step("aot_eager", dynamic=False)
    mask = torch.arange(16, device=DEVICE) > 12
    for count, coeff in ((16, 0.01), (0, 0.01), (5, 0.5), (1000, 0.0)):
        device_count, device_coeff = torch.tensor(count, device=DEVICE), torch.tensor(coeff, device=DEVICE)
        check_compiled(step, 16, device_count, device_coeff, mask)
        mask = ~mask
    assert counter.frame_count == 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_one_graph_for_all_row_counts() -> None:
    step, counter = compiled_step("aot_eager", dynamic=True)
    for rows in (16, 17, 40, 2):
        mask = torch.arange(rows, device=DEVICE) > rows // 2
        check_compiled(step, rows, torch.tensor(rows, device=DEVICE), torch.tensor(0.1, device=DEVICE), mask)
    assert counter.frame_count == 1


# --- kernels ----------------------------------------------------------------------------------------------------------------------

# (rows, columns, folds, multiprocessors): one block and many, rows and columns that do not fill a block, several passes per program
TILINGS = [
    (1, 1, 1, 132),
    (3, 5, 1, 132),
    (700, 64, 1, 1),
    (37, 132, 3, 1),
    (37, 130, 1, 1),
    (9, 1088, 1, 1),
    (5, 2560, 2, 1),
    (65, 24, 6, 2),
]
STRIDED_TILINGS = [(1, 1, 1, 132), (300, 48, 3, 1), (37, 130, 1, 1)]
LAYOUTS = ["transposed", "aligned slice", "odd slice", "every second column"]


@interpreted
@pytest.mark.parametrize(
    ("layout", "tiling"),
    [("contiguous", tiling) for tiling in TILINGS] + [(layout, tiling) for layout in LAYOUTS for tiling in STRIDED_TILINGS],
    ids=str,
)
@pytest.mark.parametrize("masked", ["no mask", "[T]", "[T, M]"])
def test_kernels_equal_the_reference_for_every_tiling(
    layout: str, tiling: tuple[int, int, int, int], masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thdops.ops.aux_loss import kernels

    rows, columns, folds, multiprocessors = tiling
    monkeypatch.setattr(kernels, "multiprocessors", lambda device_index: multiprocessors)
    probs = laid_out(random_probs(rows, columns), layout)
    tokens, experts = random_tokens(columns), columns // folds
    mask = None
    if masked != "no mask":
        generator = torch.Generator().manual_seed(3)
        mask = (torch.rand((rows,) if masked == "[T]" else (rows, folds), generator=generator) < 0.3).to(DEVICE)
        wide = (mask[:, None] if masked == "[T]" else mask.repeat_interleave(experts, 1)).expand(rows, columns)
        probs = laid_out(torch.where(wide, NAN, probs), layout)
    args = (probs, tokens, None, None, mask, experts, 1, rows, 0.01)
    loss, coefficient = kernel("moe_aux_loss")(*args)
    expected, expected_coefficient = REGISTRY["moe_aux_loss"].reference(*args)
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0.0)
    assert torch.equal(coefficient, expected_coefficient)
    if layout == "contiguous":
        grad_args = (torch.tensor(-2.0, device=DEVICE), coefficient, tokens, mask, rows, torch.float32)
        grad = kernel("moe_aux_loss_grad")(*grad_args)
        torch.testing.assert_close(grad, REGISTRY["moe_aux_loss_grad"].reference(*grad_args), rtol=5e-7, atol=0.0)


def laid_out(probs: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    rows, columns = probs.shape
    if layout == "transposed":
        return probs.t().contiguous().t()
    if layout == "contiguous":
        return probs
    offset, step, more = {"aligned slice": (4, 1, 8), "odd slice": (1, 1, 3), "every second column": (0, 2, columns)}[layout]
    buffer = torch.full((rows, columns + more), NAN, device=probs.device)
    view = buffer[:, offset::step][:, :columns]
    return view.copy_(probs)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens_dtype", [torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16])
def test_kernels_take_every_dtype(dtype: torch.dtype, tokens_dtype: torch.dtype) -> None:
    tokens = random_tokens(16).remainder(250).to(tokens_dtype)
    args = (random_probs(24, 16, dtype), tokens, None, torch.tensor(1.0, device=DEVICE), None, 8, 2, 24, None)
    loss, coefficient = kernel("moe_aux_loss")(*args)
    torch.testing.assert_close(loss, REGISTRY["moe_aux_loss"].reference(*args)[0], rtol=1e-6, atol=0.0)
    grad_args = (torch.ones((), device=DEVICE), coefficient, tokens, None, 24, dtype)
    grad = kernel("moe_aux_loss_grad")(*grad_args)
    close(grad, REGISTRY["moe_aux_loss_grad"].reference(*grad_args), ulps=1)


@interpreted
def test_the_loss_repeats_bitwise() -> None:
    """Megatron-LM#6254: the same input eight times."""
    rows = 65536 if CUDA else 700  # on a GPU enough programs that atomics would add them up in another order each time
    args = (random_probs(rows, 64), random_tokens(64), torch.tensor(rows, device=DEVICE), None, None, 64, 2, None, 0.01)
    first = kernel("moe_aux_loss")(*args)[0]
    close(first, true_loss(args[0], args[1], rows, 64, 2, 0.01), ulps=8)
    for _ in range(7):
        assert torch.equal(kernel("moe_aux_loss")(*args)[0], first)


@pytest.mark.skipif(CUDA, reason="launches are intercepted on CPU tensors")
@interpreted
@pytest.mark.parametrize("layout", ["transposed", "odd slice", "every second column"])
def test_strided_probs_reach_the_kernel_without_a_copy(layout: str) -> None:
    from thdops.ops.launch import intercept

    probs = laid_out(random_probs(8, 8), layout)
    launches: list[tuple[Any, ...]] = []
    launcher = load_launcher(REGISTRY["moe_aux_loss"], REGISTRY.schema("moe_aux_loss"))
    with intercept(lambda kernel, grid, args, constants, options: launches.append(args)):
        launcher(probs, random_tokens(8), None, None, None, 8, 2, 8, 0.01)
    assert len(launches) == 2
    assert launches[0][1].data_ptr() == probs.data_ptr()


@interpreted
def test_rows_far_apart_are_addressed_in_64_bits() -> None:
    """Three rows whose last starts 2**31 elements behind the first; the memory between them is never touched."""
    stride = 2**30
    buffer = torch.empty(2 * stride + 8, dtype=torch.bfloat16, device=DEVICE)
    probs = buffer.as_strided((3, 8), (stride, 1))
    probs.copy_(random_probs(3, 8, torch.bfloat16))
    args = (probs, random_tokens(8), None, None, None, 8, 2, 3, 0.01)
    loss, _ = kernel("moe_aux_loss")(*args)
    close(loss, true_loss(probs, args[1], 3, 8, 2, 0.01))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**20 + 3, 2048
    probs = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    probs[0], probs[-1] = 1.0, 2.0
    tokens = torch.ones(columns, dtype=torch.int64, device=DEVICE)
    loss, grad = loss_and_grad(probs, tokens, 1024, num_experts=columns, topk=8, coeff=1.0)
    factor = columns / 8 / 1024**2
    close(loss, torch.tensor(3.0 * columns * factor, device=DEVICE))
    assert (grad == factor).all()
