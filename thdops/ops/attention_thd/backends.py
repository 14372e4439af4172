"""What the attention ops run on CUDA: the backend that the call names. The contract has refused every other name by then.

On CPU tensors, which come here to be interpreted or compiled ahead of time only, it is the native kernels. What a call asks for is
checked once for every kind of call, and what then runs it is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meta_kernels import attention_thd as contract
from meta_kernels.attention_thd import Call, GradCall
from meta_kernels.contract import takes
from thdops.ops.attention_thd import cudnn_backend, fa4_backend, reference, torch_backend
from thdops.ops.plans import Plans

_ADAPTERS = {"fa4": fa4_backend, "cudnn": cudnn_backend, "torch": torch_backend}  # none imports its library before it is called


def _plan(call: Call) -> Callable[[Call], tuple[Tensor, ...]]:
    contract.check_attention(*call)
    if call.backend == "native" or not call.q.is_cuda:
        from thdops.ops.attention_thd import kernels

        return kernels.Attention(call)
    if call.backend in _ADAPTERS:
        return _ADAPTERS[call.backend].attention
    return torch.no_grad()(lambda call: reference.attention(*call))


def _plan_grad(call: GradCall) -> Callable[[GradCall], tuple[Tensor, ...]]:
    contract.check_attention_grad(*call)
    if call.backend == "native" or not call.q.is_cuda:
        from thdops.ops.attention_thd import kernels

        return kernels.AttentionGrad(call)
    if call.backend in _ADAPTERS:
        return _ADAPTERS[call.backend].attention_grad
    return torch.no_grad()(lambda call: reference.attention_grad(*call))


_plans = Plans(_plan)
_grad_plans = Plans(_plan_grad)


@takes(Call)
def attention(call: Call) -> tuple[Tensor, ...]:
    _, run = _plans(call)
    return run(call)


@takes(GradCall)
def attention_grad(call: GradCall) -> tuple[Tensor, ...]:
    _, run = _grad_plans(call)
    return run(call)
