"""Routers of transformers' mixtures of experts, and their load-balancing loss, on `thdops.router`.

T rows, E experts, K experts a row, L layers with experts, n rows that count (tokens; padding does not).

The library's loss is one product of sums over all layers: with counts[e] and scores[e] summed over rows and layers,

    loss = E / (n * L)^2 * sum_e counts[e] * scores[e],

K times the loss that `thdops.router` gives for one layer (which is Megatron's), and no mean of layers' losses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meta_kernels.contract import refusal
from thdops.integrations.transformers.registration import NAME
from thdops.integrations.transformers.rows import sequences
from thdops.ops.padding.op import padding_mask
from thdops.ops.router.losses import aux_loss_from_sums
from thdops.ops.router.op import RouterSums, router


class _Kind(NamedTuple):
    """What a class of routers does after its softmax over all experts."""

    normalized: bool | None
    """Whether weights are divided by their sum; None: as the module's `norm_topk_prob` says."""
    wide: bool
    """Whether weights stay fp32 where the logits are not."""


_KINDS = {
    "FlexOlmoTopKRouter": _Kind(None, wide=False),
    "MixtralTopKRouter": _Kind(True, wide=True),
    "OlmoeTopKRouter": _Kind(None, wide=False),
    "Qwen2MoeTopKRouter": _Kind(None, wide=False),
    "Qwen3MoeTopKRouter": _Kind(None, wide=False),
}


class PatchedRouter:
    """What `patch_router` did to a model; `remove` undoes it."""

    def __init__(self, model: nn.Module, hooks: list[Any], gates: list[Any], experts_implementation: str) -> None:
        self._model, self._hooks, self._gates, self._experts = model, hooks, gates, experts_implementation

    def remove(self) -> None:
        """Give the model its own routers, experts and loss back."""
        for hook in self._hooks:
            hook.remove()
        for gate in self._gates:
            del gate.forward
        model: Any = self._model
        model.set_experts_implementation(self._experts)


def patch_router(model: nn.Module) -> PatchedRouter:
    """Let the routers and experts of a model run on thdops; parameters, state dict and outputs keep names and values.

    Served are FlexOlmo, Mixtral, Olmoe, Qwen2-MoE and Qwen3-MoE, with `attn_implementation="thdops"`, whose metadata say which
    rows are padding: such rows choose no expert, get +0.0 from the experts, and count in no loss. Of equal logits the expert of the
    lower index is chosen.

    Where the model's own load-balancing loss is wanted (`output_router_logits`), `aux_loss` is the same number (and `loss` has
    `router_aux_loss_coef` times it), from sums that the routers make on the way instead of from all layers' logits; `router_logits`
    is None. It counts the rows that are no padding by the batch's metadata, of this process.

    Works under gradient checkpointing (`use_reentrant=False`) and `torch.compile(fullgraph=True)`: as one graph in a function that
    calls the model, while `torch.compile(model)` makes a second graph of the loss's few sums.

    Raises:
        ValueError: another attention implementation; no router of a known kind.
    """
    config: Any = model.config
    if config._attn_implementation != NAME:
        fix = f"call model.set_attn_implementation({NAME!r}) first"
        raise refusal("patch_router", "model", f"have the attention implementation {NAME!r}", config._attn_implementation, fix)
    layer_class = import_module("transformers.modeling_layers").GradientCheckpointingLayer
    loss = _BalancingLoss()
    hooks: list[Any] = []
    gates: list[Any] = []
    for layer in model.modules():
        if isinstance(layer, layer_class):
            for gate in [module for module in layer.modules() if type(module).__name__ in _KINDS]:
                router_of_gate = _Router(gate, loss)
                gate.forward = router_of_gate.forward
                gates.append(gate)
                hooks.append(layer.register_forward_pre_hook(router_of_gate.enter, with_kwargs=True))
    if not gates:
        rule = f"have routers of a known kind ({', '.join(_KINDS)})"
        raise refusal("patch_router", "model", rule, f"a {type(model).__name__} without", "use its own experts")
    if hasattr(model, "router_aux_loss_coef"):
        hooks.append(model.register_forward_pre_hook(loss.start, with_kwargs=True))
        hooks.append(model.register_forward_hook(loss.finish, with_kwargs=True))
    before = config._experts_implementation
    library_model: Any = model
    library_model.set_experts_implementation(NAME)
    return PatchedRouter(model, hooks, gates, before)


class _Router:
    """One layer's router. The layer is asked for its padding at each call, so that a recomputed layer finds its own again."""

    def __init__(self, gate: Any, loss: _BalancingLoss) -> None:
        self.gate, self.loss = gate, loss
        self.padding: Tensor | None = None

    def enter(self, layer: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> None:
        """The hook before the layer: which rows of its input are padding."""
        hidden = args[0] if args else batch["hidden_states"]
        rows, length = hidden.shape[:2]
        self.padding = padding_mask(*sequences(rows, length, hidden.device, batch), rows * length)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits `[T, E]`, weights `[T, K]`, experts `[T, K]`: best first, -1 on padding rows), in place of the gate's forward."""
        gate = self.gate
        normalized, wide = _KINDS[type(gate).__name__]
        logits = F.linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
        routed = router(
            logits.float() if wide else logits,
            gate.top_k,
            # The softmax over the chosen is the softmax over all, divided by its sum over the chosen.
            pre_softmax=not (gate.norm_topk_prob if normalized is None else normalized),
            padding_mask=self.padding,
            probs="topk",
            routing="indices",
            index_dtype=torch.int32,
        )
        self.padding = None
        if self.loss.sums is not None:
            self.loss.sums.append(routed.sums)
        return logits, routed.probs, routed.routing


class _BalancingLoss:
    """The load-balancing loss of one forward: `sums` collects the layers' sums from `start` to `finish`, and is None outside."""

    def __init__(self) -> None:
        self.sums: list[RouterSums] | None = None

    def start(self, model: Any, args: tuple[Any, ...], batch: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook before the model: if its loss is wanted, it is ours to make."""
        wanted = batch.get("output_router_logits")
        wanted = model.config.output_router_logits if wanted is None else wanted
        self.sums = [] if wanted else None
        return args, {**batch, "output_router_logits": False}

    def finish(self, model: Any, args: tuple[Any, ...], batch: dict[str, Any], output: Any) -> Any:
        """The hook behind the model: the loss from all layers' sums, put where the library puts its own."""
        sums, self.sums = self.sums, None
        if not sums:
            return output
        topk = model.num_experts_per_tok
        device = sums[0].scores.device
        scores, counts, rows = (torch.stack([s[i].to(device) for s in sums]).sum(0) for i in (0, 1, 3))
        aux_loss = aux_loss_from_sums(scores, counts, rows, topk=topk, coeff=float(topk))
        if isinstance(output, tuple):
            return _into_tuple(output, aux_loss, model.router_aux_loss_coef, batch.get("labels") is not None)
        output.aux_loss = aux_loss
        if output.loss is not None:
            output.loss = output.loss + model.router_aux_loss_coef * aux_loss.to(output.loss.device)
        return output


def _into_tuple(output: tuple[Any, ...], aux_loss: Tensor, coefficient: float, has_loss: bool) -> tuple[Any, ...]:
    """The library's order: loss (with labels), aux_loss, the rest."""
    if not has_loss:
        return aux_loss, *output
    return output[0] + coefficient * aux_loss.to(output[0].device), aux_loss, *output[1:]
