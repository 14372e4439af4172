"""One training step, written once for all modes: no host read, no allocation that outlives it, everything in place.

T rows, D model width. All state lives in tensors that exist before the first step (optimizer state and gradients included), so
that a checkpoint, or the restore after a CUDA graph's warm-up, is a copy into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import deterministic

import thdops
from packed_moe import parallel
from packed_moe.config import Config
from packed_moe.model import Batch, Losses, PackedMoE, largest_on_padding
from thdops.packing import PackedSequences

METRICS = ("loss", "cross_entropy", "aux_loss", "z_loss", "tokens", "grad_norm", "padding_activation", "padding_gradient")
"""What a step reports, fp32, in this order. The last two are exactly 0 where padding is."""


@contextmanager
def poisoned_memory(on: bool) -> Iterator[None]:
    """Whether deterministic mode fills fresh memory with NaN (torch's default): it shows rows that nobody writes, and is slow."""
    settings: Any = deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = on
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


class Trainer:
    """Model, optimizer and the static buffers that a step reads and writes. The same seed gives the same state on every device."""

    def __init__(self, config: Config, build: Callable[[Config], nn.Module] = PackedMoE) -> None:
        """`build` makes the model: called with (Batch, probe, tap), as `PackedMoE`, it gives `Losses`."""
        self.config, self.build = config, build
        device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.model: Any = build(config).to(device)
        self.parameters = list(self.model.parameters())
        self.packed = PackedSequences.allocate(config.max_tokens, config.max_seqs, pad_multiple=config.pad_multiple, device=device)
        self.group = parallel.group()
        self.probe = torch.zeros(config.max_tokens // config.cp, config.dim, device=device, requires_grad=True)
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.rate,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.metrics = torch.zeros(len(METRICS), device=device)
        self.forward: Callable[[Batch, Tensor], Losses] = self.model
        # In one buffer, so that ranks can add them up in one message.
        self.flat_gradients = torch.zeros(sum(p.numel() for p in self.parameters), device=device)
        parts = self.flat_gradients.split([p.numel() for p in self.parameters])
        self.gradients = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
        self.gradients.append(torch.zeros_like(self.probe, requires_grad=False))
        self._create_optimizer_state()

    def _create_optimizer_state(self) -> None:
        """Let the optimizer allocate now what it would allocate in its first step, and leave everything at its start."""
        for leaf, gradient in zip((*self.parameters, self.probe), self.gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()  # at rate 0 and gradient 0: changes nothing but the step count
        for state in self.optimizer.state.values():
            state["step"].zero_()

    @property
    def batch(self) -> Batch:
        """What is loaded, or this rank's rows of it."""
        return Batch.of(self.packed, self.group)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes and the next one needs, by a stable name."""
        named = dict(self.model.named_parameters())
        tensors: dict[str, Tensor] = {}
        for name, parameter in named.items():
            tensors[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of `state()`."""
        return {name: tensor.clone() for name, tensor in self.state().items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Write a snapshot back, in place: addresses that a graph has captured stay good."""
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])

    def load(self, documents: list[Tensor], step: int) -> None:
        """Put the documents and the learning rate of a step where the step reads them."""
        self.packed.load_(documents)
        self.rate.fill_(self.config.learning_rate(step))

    def step(self) -> None:
        """Forward, backward, clip, update; the numbers go to `metrics`. What a CUDA graph captures as it is."""
        for gradient in (self.flat_gradients, self.gradients[-1]):
            gradient.zero_()
        batch = self.batch
        losses = self.forward(batch, self.probe)
        losses.total.backward()
        if self.group is not None:
            torch.distributed.all_reduce(self.flat_gradients)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()
        padding = thdops.padding_mask(*batch.own, len(self.probe))
        leaked = largest_on_padding(self.gradients[-1], padding)
        numbers = (*losses[:4], batch.num_tokens, norm, losses.padding, leaked)
        self.metrics.copy_(torch.stack([number.detach().float() for number in numbers]))
