"""attach_loss: its scale is read by the backward, in every mode, or compiling is refused; x and its gradient pass unchanged.

The step of most tests: y = 3 * attach_loss(2 * x, w * w, scale), so that dw = 2 * w * scale and dx = 6.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from capturing import captured
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import thdops
from thdops.conformance.tensors import bits

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAN = float("nan")
MODES = ["eager", "aot_eager", "inductor"]
pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:`torch.jit.script_method` is deprecated"),
]
gpu = pytest.mark.gpu

GLOBAL_SCALE = torch.ones((), device=DEVICE)
Function = Callable[..., Any]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(function: Function, mode: str) -> Function:
    if mode == "eager":
        return function
    if mode == "reduce-overhead":
        return torch.compile(function, mode=mode, fullgraph=True)
    return torch.compile(function, backend=mode, fullgraph=True)


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, dtype=dtype, device=DEVICE)


def step(x: Tensor, w: Tensor, scale: float | Tensor) -> Tensor:
    return 3 * thdops.attach_loss(2 * x, w * w, scale)


def global_step(x: Tensor, w: Tensor) -> Tensor:
    return step(x, w, GLOBAL_SCALE)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", number(1.0))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return step(x, w, self.get_buffer("scale"))


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(4, device=DEVICE).requires_grad_(), number(0.5).requires_grad_()  # dw is the scale


def check_rounds(run: Function, scale: Tensor, rounds: int = 3) -> None:
    """Forward with one scale, backward with another, several times: the scale of the backward is the gradient."""
    for k in range(rounds):
        x, w = leaves()
        scale.fill_(100.0 + k)
        y = run(x, w)
        scale.fill_(2.0 + k)
        y.sum().backward()
        assert w.grad == 2.0 + k
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 6.0))


# --- which value counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_the_backward_counts_where_it_is_an_argument(mode: str, dtype: torch.dtype) -> None:
    run, scale = compiled(step, mode), number(1.0, dtype)
    check_rounds(lambda x, w: run(x, w, scale), scale)


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_of_the_backward_counts_where_it_is_a_buffer(mode: str) -> None:
    layer = Layer()
    run = compiled(layer, mode)
    check_rounds(run, layer.get_buffer("scale"))


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_of_the_backward_counts_where_it_is_a_global(mode: str) -> None:
    check_rounds(compiled(global_step, mode), GLOBAL_SCALE)


@pytest.mark.parametrize("mode", MODES)
def test_an_element_of_a_larger_tensor_is_followed(mode: str) -> None:
    scales = torch.ones(3, device=DEVICE)
    run = compiled(lambda x, w: step(x, w, scales[1]), mode)
    check_rounds(run, scales)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_in_flight_each_read_the_scale_at_their_own_backward(mode: str) -> None:
    run, scale = compiled(step, mode), number(1.0)
    batches = [leaves() for _ in range(4)]
    outputs = [run(x, w, scale.fill_(-float(k))) for k, (x, w) in enumerate(batches)]
    for k, ((_, w), y) in enumerate(zip(batches, outputs, strict=True)):
        scale.fill_(10.0 + k)
        y.sum().backward(retain_graph=True)
        assert w.grad == 10.0 + k
        scale.fill_(20.0 + k)
        y.sum().backward()
        assert w.grad == 30.0 + 2 * k


@pytest.mark.parametrize("mode", MODES)
def test_a_change_by_another_compiled_function_counts(mode: str) -> None:
    run, scale = compiled(step, mode), number(1.0)
    change = compiled(lambda scale, value: scale.copy_(value), mode)
    x, w = leaves()
    y = run(x, w, scale)
    change(scale, number(7.0))
    y.sum().backward()
    assert w.grad == 7.0


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_made_by_the_function_keeps_its_value(mode: str) -> None:
    run, half = compiled(lambda x, w, half: step(x, w, half * 2), mode), number(4.0)
    x, w = leaves()
    y = run(x, w, half)
    half.fill_(NAN)
    y.sum().backward()
    assert w.grad == 8.0


@pytest.mark.parametrize("mode", MODES)
def test_a_float_is_taken_as_it_is(mode: str) -> None:
    run = compiled(step, mode)
    for scale in (1.5, 0.0, 3):
        x, w = leaves()
        run(x, w, scale).sum().backward()
        assert w.grad == scale


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_several_losses_hang_on_one_tensor(mode: str) -> None:
    def layers(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        for k in range(3):
            x = thdops.attach_loss(x, k * w, scale)
        return x * 1

    run, scale = compiled(layers, mode), number(1.0)
    x, w = leaves()
    y = run(x, w, scale)
    scale.fill_(5.0)
    y.sum().backward()
    assert w.grad == 15.0


def test_one_graph_serves_all_scales() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(step, backend=counter, fullgraph=True)
    for value in (1.0, 0.0, NAN, 2.0):
        x, w = leaves()
        run(x, w, number(value)).sum().backward()
    assert counter.frame_count == 1


# --- checkpointing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(mode: str, reentrant: bool) -> None:
    run = compiled(lambda x, w: checkpoint(global_step, x, w, use_reentrant=reentrant), mode)
    check_rounds(run, GLOBAL_SCALE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_changed_argument_of_a_checkpoint_raises(reentrant: bool) -> None:
    (x, w), scale = leaves(), number(1.0)
    y = checkpoint(lambda x, w, scale: step(x, w, scale).sin(), x, w, scale, use_reentrant=reentrant)
    scale.fill_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- what is refused while compiling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("before", [False, True])
def test_a_change_inside_the_compiled_function_is_refused(mode: str, before: bool) -> None:
    def change_and_step(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        if before:
            scale.fill_(2.0)
        y = step(x, w, scale)
        if not before:
            scale.fill_(2.0)
        return y

    text = (
        "attach_loss: scale must be left unchanged by the compiled function that attaches the loss, got an in-place change inside"
        " it; change it before or after the call"
    )
    with pytest.raises(Exception, match=text):
        compiled(change_and_step, mode)(*leaves(), number(1.0))


@pytest.mark.parametrize("mode", [*MODES[1:], "reduce-overhead"])
@pytest.mark.parametrize("what", ["scale", "clone", "view"])
def test_another_reader_in_the_compiled_function_is_refused(mode: str, what: str) -> None:
    """Its gradient would be computed from the changed scale; eager mode raises, or has kept a clone."""

    def read_and_step(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        other = {"scale": scales[0], "clone": scales[0].clone(), "view": scales[1:].sum()}[what]
        return step(x, w, scales[0]) + x * other

    text = (
        "attach_loss: scale must be read by nothing else in the compiled function that attaches the loss, got .* reading it;"
        " give that a clone made outside of the function"
    )
    (x, w), scales = leaves(), torch.ones(2, device=DEVICE)
    with pytest.raises(Exception, match=text):
        compiled(read_and_step, mode)(x, w, scales)


def test_cuda_graphs_of_whole_programs_are_refused() -> None:
    text = (
        "attach_loss: scale must not be an input of a CUDA graph, got CUDA graphs of whole programs; set"
        " torch._inductor.config.graph_partition = True, its default"
    )
    with inductor_config.patch(graph_partition=False), pytest.raises(Exception, match=text):
        compiled(step, "reduce-overhead")(*leaves(), number(1.0))


def test_several_losses_and_scales_of_one_tensor_are_served_with_cuda_graphs() -> None:
    def two_steps(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return step(step(x, w, scales[0]), w, scales[1])

    run, scales = compiled(two_steps, "reduce-overhead"), torch.ones(2, device=DEVICE)
    x, w = leaves()
    y = run(x, w, scales)
    scales.copy_(torch.tensor([2.0, 3.0]))
    y.sum().backward()
    assert w.grad == 5.0


@pytest.mark.parametrize("graph_partition", [False, True])
def test_a_scale_made_by_the_function_is_served_with_cuda_graphs(graph_partition: bool) -> None:
    with inductor_config.patch(graph_partition=graph_partition):
        run = compiled(lambda x, w, half: step(x, w, half * 2), "reduce-overhead")
        x, w = leaves()
        run(x, w, number(4.0)).sum().backward()
    assert w.grad == 8.0


# --- what passes, and what does not matter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x_and_its_gradient_pass_bit_by_bit(mode: str, dtype: torch.dtype) -> None:
    run = compiled(lambda x, w, scale: thdops.attach_loss(x, w, scale), mode)
    values = torch.tensor([NAN, -0.0, float("inf"), 1e-41, 1.0], device=DEVICE).to(dtype)
    x, w = values.clone().requires_grad_(), number(1.0).requires_grad_()
    y = run(x, w, number(NAN))
    assert torch.equal(bits(y), bits(values))
    y.backward(values.flip(0))
    assert x.grad is not None
    assert torch.equal(bits(x.grad), bits(values.flip(0)))


@pytest.mark.parametrize("strides", ["expanded", "transposed"])
def test_an_incoming_gradient_of_any_strides_passes(strides: str) -> None:
    x, w = torch.randn(3, 4, device=DEVICE).requires_grad_(), number(1.0).requires_grad_()
    grad = number(2.0).expand(3, 4) if strides == "expanded" else torch.randn(4, 3, device=DEVICE).t()
    thdops.attach_loss(x, w, number(5.0)).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad)
    assert w.grad == 5.0


def test_the_value_of_the_loss_does_not_matter() -> None:
    x, w = leaves()
    (thdops.attach_loss(x, w * 3 + NAN, number(2.0)) * 1).sum().backward()
    assert w.grad == 6.0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [number(0.1), number(0.1, torch.bfloat16).reshape(1), 0.1], ids=["fp32", "bf16", "float"])
def test_the_gradient_has_shape_and_dtype_of_the_loss(shape: tuple[int, ...], dtype: torch.dtype, scale: float | Tensor) -> None:
    loss = torch.zeros(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    thdops.attach_loss(torch.zeros(3, device=DEVICE), loss, scale).sum().backward()
    assert loss.grad is not None
    expected = torch.as_tensor(scale, device=DEVICE).to(dtype).reshape(shape)
    torch.testing.assert_close(loss.grad, expected, rtol=0, atol=0)


def test_fp64_on_cpu() -> None:
    x, loss = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64, requires_grad=True)
    thdops.attach_loss(x, loss, torch.tensor(0.1, dtype=torch.float64)).sum().backward()
    assert loss.grad == 0.1


def test_the_result_is_x_without_a_copy() -> None:
    x, w = leaves()
    y = thdops.attach_loss(x, w, 1.0)
    assert y.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.mul_(2)
    with torch.no_grad():
        assert not thdops.attach_loss(x, w, 1.0).requires_grad


def test_a_loss_alone_may_require_grad() -> None:
    _, w = leaves()
    thdops.attach_loss(torch.zeros(2, device=DEVICE), w, number(3.0)).sum().backward()
    assert w.grad == 3.0


def test_scale_gets_no_gradient() -> None:
    (x, w), scale = leaves(), number(3.0).requires_grad_()
    step(x, w, scale).sum().backward()
    assert w.grad == 3.0
    assert scale.grad is None


def test_second_derivatives_pass() -> None:
    (x, w), scale = leaves(), number(3.0)
    y = thdops.attach_loss(x, w**3, scale) ** 3  # its gradient depends on x
    dx, dw = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    (dx.sum() + dw).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6 * x.detach())
    torch.testing.assert_close(w.grad, 3 * 6 * w.detach() + 3 * 3 * w.detach() ** 2)  # dx passed through y once more


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_nothing_is_kept_once_the_graph_is_gone(mode: str) -> None:
    run = compiled(step, mode)
    run(*leaves(), number(1.0)).sum().backward()  # compiles, which makes garbage of its own
    gc.collect()
    gc.disable()  # no cycle either: without the collector, memory would grow
    try:
        (x, w), scale = leaves(), number(1.0)
        y = run(x, w, scale)
        kept = [weakref.ref(tensor) for tensor in (x, w, scale)]
        y.sum().backward()
        del x, w, scale, y
        assert [tensor() for tensor in kept] == [None, None, None]
    finally:
        gc.enable()


# --- errors -----------------------------------------------------------------------------------------------------------------------

_KINDS = "float32 or bfloat16 or float16"


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor, got a list;"),
        ({"x": torch.zeros(4, dtype=torch.int64)}, TypeError, "x must be a floating-point tensor, got int64;"),
        ({"loss": 1.0}, TypeError, "loss must be a tensor, got a float;"),
        ({"loss": torch.zeros(2)}, ValueError, r"loss must have one element, got shape \[2\];"),
        ({"loss": torch.tensor(1)}, TypeError, f"loss must be {_KINDS}, got int64 on {DEVICE.type};"),
        ({"loss": torch.zeros((), device="meta")}, ValueError, "loss must be on the device of x"),
        ({"scale": "1"}, TypeError, "scale must be a float or a one-element tensor, got str;"),
        ({"scale": True}, TypeError, "scale must be a float or a one-element tensor, got bool;"),
        ({"scale": None}, TypeError, "scale must be a float or a one-element tensor, got NoneType;"),
        ({"scale": torch.ones(2)}, ValueError, r"scale must have one element, got shape \[2\];"),
        ({"scale": torch.tensor(1)}, TypeError, f"scale must be {_KINDS}, got int64 on {DEVICE.type};"),
        ({"scale": torch.ones((), device="meta")}, ValueError, "scale must be on the device of x"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(4), "loss": torch.zeros(()), "scale": torch.ones(())} | changed
    arguments = {k: v.to(DEVICE) if isinstance(v, Tensor) and not v.is_meta else v for k, v in arguments.items()}
    with pytest.raises(error, match=f"^attach_loss: {text}"):
        thdops.attach_loss(**arguments)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_a_captured_step_follows_the_scale_at_each_replay(mode: str) -> None:
    run, scale = compiled(step, mode), number(1.0)
    x, w = leaves()

    def grads() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, w, scale).sum(), (x, w))

    graph, (dx, dw) = captured(grads)
    for value in (2.0, 0.0, 512.0):
        scale.fill_(value)
        graph.replay()
        assert dw == value
        assert torch.equal(dx, torch.full_like(dx, 6.0))


@gpu
def test_a_backward_captured_apart_reads_the_scale_at_its_own_replay() -> None:
    layer = Layer()
    x, w = leaves()
    graphed = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()))
    check_rounds(graphed, layer.get_buffer("scale"), rounds=5)


def check_with_cuda_graphs(run: Function, scale: Tensor) -> None:
    counters.clear()
    check_rounds(run, scale, rounds=6)  # warm-up, recording, replays
    assert counters["inductor"]["cudagraph_skips"] == 0


@gpu
def test_reduce_overhead_follows_an_argument() -> None:
    run, scale = compiled(step, "reduce-overhead"), number(1.0)
    check_with_cuda_graphs(lambda x, w: run(x, w, scale), scale)


@gpu
def test_reduce_overhead_follows_another_argument_each_time() -> None:
    run = compiled(step, "reduce-overhead")
    for _ in range(4):
        scale = number(1.0)
        check_with_cuda_graphs(lambda x, w, scale=scale: run(x, w, scale), scale)


@gpu
def test_reduce_overhead_follows_a_buffer() -> None:
    layer = Layer()
    check_with_cuda_graphs(compiled(layer, "reduce-overhead"), layer.get_buffer("scale"))


@gpu
def test_reduce_overhead_follows_a_global() -> None:
    check_with_cuda_graphs(compiled(global_step, "reduce-overhead"), GLOBAL_SCALE)


@gpu
def test_reduce_overhead_follows_an_element_of_a_larger_tensor() -> None:
    scales = torch.ones(3, device=DEVICE)
    check_with_cuda_graphs(compiled(lambda x, w: step(x, w, scales[1]), "reduce-overhead"), scales)
