"""Public function attach_loss and the spec of the op in its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta_kernels import attach as contract
from meta_kernels.contract import check_tensors, refusal
from thdops.namespace import REGISTRY
from thdops.ops.attach import reference, samples, tracing
from thdops.registry import OpSpec, register


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, loss, scale = inputs
        # An attribute, not saved: a saved tensor must not change before the backward, and changing is what a scale is for.
        ctx.scale = scale
        ctx.shape, ctx.dtype = loss.shape, loss.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        if isinstance(ctx.scale, Tensor):
            # An op that takes the incoming gradient: a compiler cannot move the reading of the scale into the forward.
            grad_loss = torch.ops.thdops.attach_loss_grad(grad.detach(), ctx.scale, ctx.dtype)
        else:
            grad_loss = torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device)
        return grad, grad_loss.reshape(ctx.shape), None


def attach_loss(x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
    """`x`; whoever backpropagates through it backpropagates through `loss` too, with the gradient `scale`.

    How a router's loss reaches the optimizer without being added to the main loss. The gradient of x passes unchanged, bit by bit.
    Only the loss's graph matters, not its value: a NaN there changes nothing.

    A tensor `scale` is read by the backward, not before: what it holds then counts, so a trainer may change it in place at any
    time (`scale.copy_(...)`, `fill_`). That holds in eager mode, for every micro-batch in flight, in a compiled function (`scale`
    being an argument, a buffer or a global), in a captured CUDA graph, at each replay, and under `mode="reduce-overhead"`. Where
    it cannot hold, compiling is refused: the compiled function must neither change `scale` in place nor read it elsewhere.

    Left to the caller, as no op can see it: code outside may copy `scale` before this function is called.
    `torch.cuda.make_graphed_callables` copies an argument that is not the sample argument itself (let `scale` be a buffer or a
    global), and Inductor on a GPU copies an argument that is not aligned to 16 bytes (take an element of a larger tensor inside the
    compiled function). `torch.utils.checkpoint` saves its arguments, so that changing one raises (unless it is compiled).

    Args:
        x: any shape, any floating-point dtype. Returned as an alias, without a copy; it must not be written in place.
        loss: one element, fp32, bf16 or fp16 (fp64 on CPU), on the device of x.
        scale: a float, or one element, fp32, bf16 or fp16 (fp64 on CPU), on the device of x. No gradient. A float is constant: part
            of a captured graph, and one compilation per value.

    Returns:
        x. The gradient of `loss` has its shape and dtype.

    Raises:
        ValueError, TypeError: wrong dtype, device or number of elements of an argument; a compiled function that changes `scale`
            or reads it elsewhere.
    """
    check_tensors("attach_loss", x=x, loss=loss)
    if isinstance(scale, Tensor):
        contract.check_attach_loss(x, loss, scale)
        return _AttachLoss.apply(x, loss, scale)
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        got, fix = type(scale).__name__, "pass float(...), or the device tensor"
        raise refusal("attach_loss", "scale", "be a float or a one-element tensor", got, fix, TypeError)
    contract.check_attach_loss(x, loss, None)
    return _AttachLoss.apply(x, loss, float(scale))


# --- specs ------------------------------------------------------------------------------------------------------------------------

register(
    OpSpec(
        name="attach_loss_grad",
        schema="(Tensor grad, Tensor scale, ScalarType dtype) -> Tensor",
        summary="the gradient of a loss that attach_loss attached: its scale, read when grad is there",
        check=contract.check_attach_loss_grad,
        fake=contract.fake_attach_loss_grad,
        reference=reference.attach_loss_grad,
        cuda=f"{reference.__name__}:attach_loss_grad",
        traced=tracing.refuse_another_scale,
        samples=samples.attach_loss_grad_samples,
        refusals=samples.attach_loss_grad_refusals,
        cost=samples.attach_loss_grad_cost,
        benches=samples.attach_loss_grad_benches,
        backends=("torch",),
    ),
    REGISTRY,
)
