"""What the attention ops run on CUDA: the backend that the call names. The contract has refused every other name by then.

On CPU tensors, which come here to be interpreted or compiled ahead of time only, it is the native kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.attention_thd import Call, GradCall
from meta_kernels.contract import takes
from thdops.ops.attention_thd import cudnn_backend, fa4_backend, reference, torch_backend

_ADAPTERS = {"fa4": fa4_backend, "cudnn": cudnn_backend, "torch": torch_backend}  # none imports its library before it is called


@takes(Call)
def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    if call.backend == "native" or not call.q.is_cuda:
        from thdops.ops.attention_thd import kernels

        return kernels.attention(call)
    if call.backend in _ADAPTERS:
        return _ADAPTERS[call.backend].attention(call)
    with torch.no_grad():
        return reference.attention(*call)


@takes(GradCall)
def attention_grad(call: GradCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if call.backend == "native" or not call.q.is_cuda:
        from thdops.ops.attention_thd import kernels

        return kernels.attention_grad(call)
    if call.backend in _ADAPTERS:
        return _ADAPTERS[call.backend].attention_grad(call)
    with torch.no_grad():
        return reference.attention_grad(*call)
