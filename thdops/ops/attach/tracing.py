"""When a compiled backward would read another tensor than the caller's scale, or let another op read a changed one.

A compiled program keeps a tensor that stands on an autograd context as it is, the same memory, without a version check (PyTorch's
note "Activations with no version counter checks in eager"). So a backward reads what the scale holds by then, with three
exceptions. Only the tracer can see them, and they are refused while compiling: a silently wrong value is what must never be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from meta_kernels.contract import refusal


def refuse_another_scale(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Looks at a traced `attach_loss_grad`; the forward has been traced by then. Any other call passes."""
    if not isinstance(scale, FunctionalTensor):
        return
    # Imported late: only what compiles has paid for them already.
    from torch._functorch._aot_autograd.functional_utils import has_data_mutation
    from torch._inductor import config

    if has_data_mutation(scale):
        # The program has no mutations: it keeps what was written apart, and copies it into the caller's tensor when it ends.
        rule = "be left unchanged by the compiled function that attaches the loss"
        raise refusal("attach_loss", "scale", rule, "an in-place change inside it", "change it before or after the call")
    owner = _input(scale)
    if owner is None:  # made inside the function: nobody outside can change it
        return
    for reader in _readers(owner):
        # What it computes may be computed again in the backward, from the changed scale and unchecked. CUDA graph trees moreover
        # copy an input that a graph reads, and hand on the copy where the input was to be saved.
        rule = "be read by nothing else in the compiled function that attaches the loss"
        raise refusal("attach_loss", "scale", rule, f"{reader.target} reading it", "give that a clone made outside of the function")
    if config.triton.cudagraphs and not config.graph_partition:  # then a graph copies all inputs of the program
        fix = "set torch._inductor.config.graph_partition = True, its default"
        raise refusal("attach_loss", "scale", "not be an input of a CUDA graph", "CUDA graphs of whole programs", fix)


def _input(tensor: FunctionalTensor) -> Node | None:
    """The input, of the program that is being traced, whose memory this is."""
    from torch._functorch._aot_autograd.functional_utils import from_fun

    mode, traceable = get_proxy_mode(), cast(Tensor, from_fun(tensor))
    traced = None if mode is None else get_proxy_slot(traceable, mode.tracer, None)
    if traced is None:
        return None
    node = traced.proxy.node
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" else None


def _is_view(node: Node) -> bool:
    return getattr(node.target, "is_view", False)


def _readers(node: Node) -> Iterator[Node]:
    """What reads the memory of `node`, directly or through views, except for the op itself."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        elif user.target is not torch.ops.thdops.attach_loss_grad.default:
            yield user
