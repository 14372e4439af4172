"""A pipeline stage in the style of Megatron: several micro-batches in flight, router losses attached, layers that can be captured.

T rows, D model width, M micro-batches of an iteration, P of them in flight at most.

A micro-batch lives in a slot from its forward to its backward. Its router losses hang on the residual stream (`attach_loss`) and
get their gradient from a scale that is set between forward and backward, as a trainer with a dynamic loss scale does: it is NaN in
every forward, so that whoever reads it too early is found out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import thdops
from packed_moe.config import Config
from packed_moe.data import Documents, draw
from packed_moe.loop import no_sync
from packed_moe.model import Attention, Block, PackedMoE, Rows, largest_on_padding, untouched
from packed_moe.training import Trainer
from thdops import graphs
from thdops.integrations.megatron import DotProductAttention
from thdops.packing import PackedSequences, PackedSlots, PackSpec

MICROBATCHES = 5
IN_FLIGHT = 4
METRICS = ("cross_entropy", "router losses", "padding_activation")

Call = Callable[..., tuple[Tensor, Tensor]]


def one_forward_one_backward(in_flight: int) -> Iterator[tuple[str, int]]:
    """The order of a pipeline's first stage: P forwards, then one backward before each further forward, then the rest."""
    for m in range(MICROBATCHES + in_flight):
        if m >= in_flight:
            yield "backward", m - in_flight
        if m < MICROBATCHES:
            yield "forward", m


def draw_microbatches(documents: Documents, config: Config, iteration: int) -> list[list[Tensor]]:
    """The documents of each micro-batch of an iteration: one is full, one empty, one has a single token; which, changes."""
    chance = random.Random(f"{config.seed}/{iteration}")
    drawn = [draw(documents, config, iteration * MICROBATCHES + m) for m in range(MICROBATCHES)]
    drawn[:3] = _full(documents, config, chance), [], [drawn[2][0][:1]]
    chance.shuffle(drawn)
    return drawn


def _full(documents: Documents, config: Config, chance: random.Random) -> list[Tensor]:
    """Documents that leave no row empty: two or four of about equal length, the last one what is left; one where only one fits."""
    text = torch.cat(chance.choices(documents.texts, k=16))
    while len(text) < config.max_tokens:
        text = torch.cat((text, text))
    count = min(chance.choice((2, 4)), config.max_seqs)
    length = config.pad_multiple * math.ceil(config.max_tokens / (config.pad_multiple * count))
    return list(text[: config.max_tokens].split(length))


# --- the model -------------------------------------------------------------------------------------------------------------------


class MegatronAttention(Attention):
    """Attention whose core is called as Megatron calls it."""

    def __init__(self, config: Config, layer_number: int) -> None:
        super().__init__(config)
        settings = {"num_attention_heads": config.heads, "num_query_groups": config.kv_heads, "kv_channels": config.head_dim}
        self.core = DotProductAttention(SimpleNamespace(**settings), layer_number, "padding_causal", "self")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=rows.cu_seqlens, cu_seqlens_q_padded=rows.cu_seqlens_padded)
        return self.core(q, k, v, None, packed_seq_params=packed).unflatten(1, (self.heads, -1))


class Layer(nn.Module):
    """A block that takes tensors only, as graphed callables want it, and whose router losses are attached to its output."""

    scale: Tensor
    rotary: Tensor

    def __init__(self, config: Config, layer_number: int, scale: Tensor) -> None:
        super().__init__()
        self.block = Block(config)
        self.block.attention = MegatronAttention(config, layer_number)
        self.autocast = config.autocast
        # Buffers: graphed callables copy an argument, and a scale must be read where the trainer writes it.
        self.register_buffer("scale", scale, persistent=False)
        half = config.head_dim // 2
        self.register_buffer("rotary", 10_000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, x: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream, the router losses' value)."""
        x, loss = self.unattached(x, *metadata)
        return thdops.attach_loss(x, loss, self.scale), loss.detach()

    def unattached(self, x: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream, the router losses), for a trainer that adds them to its own."""
        cu_seqlens, cu_seqlens_padded, padding, positions, num_tokens = metadata
        angles = positions[:, None, None].float() * self.rotary
        rows = Rows(cu_seqlens, cu_seqlens_padded, padding, num_tokens, angles.cos(), angles.sin())
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            x, aux, z = self.block(x, rows, untouched)
        return x, aux + z


class Stage(PackedMoE):
    """Embedding, layers and head; `scale` is what the attached losses' gradients are made of."""

    scale: Tensor

    def make_blocks(self, config: Config) -> nn.ModuleList:
        scale = torch.full((), torch.nan, device=config.device)
        self.register_buffer("scale", scale, persistent=False)
        return nn.ModuleList(Layer(config, number + 1, scale) for number in range(config.layers))

    def losses(self, pack: PackedSequences, layers: Sequence[Call]) -> tuple[Tensor, Tensor, Tensor]:
        """(cross-entropy, router losses, largest |activation| on a padding row), 0-d each, of one micro-batch."""
        metadata = metadata_of(pack)
        with torch.autocast(pack.tokens.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            x = thdops.zero_fill(self.embedding(pack.tokens), pack.cu_seqlens, pack.cu_seqlens_padded)
            router = x.new_zeros(())
            for layer in layers:
                x, loss = layer(x, *metadata)
                router = router + loss
            return self.cross_entropy(x, pack.labels), router, largest_on_padding(x.detach(), pack.padding_mask)


def metadata_of(pack: PackedSequences) -> tuple[Tensor, ...]:
    """What a layer needs of a micro-batch."""
    return pack.cu_seqlens, pack.cu_seqlens_padded, pack.padding_mask, pack.positions, pack.num_tokens


# --- an iteration ----------------------------------------------------------------------------------------------------------------


class Pipeline:
    """A stage and the slots of its micro-batches. The same seed gives the same stage."""

    def __init__(self, config: Config, slots: int = IN_FLIGHT) -> None:
        self.config = config
        self.trainer = Trainer(config, Stage)
        self.stage: Stage = self.trainer.model
        self.slots = PackedSlots(
            PackSpec(config.max_tokens, config.max_seqs, pad_multiple=config.pad_multiple), slots, config.device
        )
        self.layers: list[Sequence[Any]] = [list(self.stage.blocks) for _ in range(slots)]
        self.waiting: dict[int, Tensor] = {}
        self.loss_scale = torch.ones((), device=config.device)
        self.metrics = torch.zeros(MICROBATCHES, len(METRICS), device=config.device)
        self.bits = torch.zeros(len(self.trainer.parameters), dtype=torch.int64, device=config.device)
        """Of each gradient, the sum of its bits read as integers."""

    def prepare(self, iteration: int) -> None:
        """Write what changes from one iteration to the next, apart from documents, where the stage reads it."""
        self.loss_scale.fill_(2.0 ** random.Random(f"scale {iteration}").randint(0, 16))
        self.trainer.rate.fill_(self.config.learning_rate(iteration))

    def forward(self, m: int) -> None:
        """Of the micro-batch that its slot holds."""
        self.stage.scale.fill_(torch.nan)
        slot = m % len(self.slots)
        loss, *numbers = self.stage.losses(self.slots[slot], self.layers[slot])
        self.metrics[m].copy_(torch.stack([number.detach().float() for number in (loss, *numbers)]))
        self.waiting[m] = loss

    def backward(self, m: int) -> None:
        """Of the same: the scale that counts is the one of now."""
        self.stage.scale.copy_(self.loss_scale / MICROBATCHES)
        self.waiting.pop(m).backward(self.stage.scale.clone())

    def zero(self) -> None:
        """Gradients stay where they are."""
        for gradient in self.trainer.gradients:
            gradient.zero_()

    def update(self) -> None:
        """Unscale, clip, step."""
        gradients = self.trainer.gradients[: len(self.trainer.parameters)]
        for gradient in gradients:
            gradient.div_(self.loss_scale)
        self.bits.copy_(torch.stack([gradient.view(torch.int32).sum() for gradient in gradients]))
        torch.nn.utils.clip_grad_norm_(self.trainer.parameters, self.config.clip)
        self.trainer.optimizer.step()

    def accumulate(self, documents: list[list[Tensor]], in_flight: int = IN_FLIGHT, guarded: bool = False) -> None:
        """Gradients of all micro-batches; a slot is loaded before a forward and free behind its backward."""
        for kind, m in one_forward_one_backward(in_flight):
            slot = m % len(self.slots)
            if kind == "forward":
                self.slots.load_(documents[m], slot)
            with no_sync(self.config.device, guarded):
                getattr(self, kind)(m)
            if kind == "backward":
                self.slots.release(slot)


# --- ways to run it --------------------------------------------------------------------------------------------------------------


Way = Callable[[list[list[Tensor]], bool], None]
"""Runs one iteration on documents; the second argument makes a host sync an error."""


def eager(pipeline: Pipeline) -> Way:
    """Every op launched anew."""

    def run(documents: list[list[Tensor]], guarded: bool) -> None:
        pipeline.zero()
        pipeline.accumulate(documents, guarded=guarded)
        with no_sync(pipeline.config.device, guarded):
            pipeline.update()

    return run


def graphed_layers(pipeline: Pipeline, documents: list[list[Tensor]]) -> Way:
    """Forward and backward of each layer are graphs, one pair per slot, replayed in whatever order the schedule has.

    Each slot's graphs have a pool of their own: a pool's memory is laid out for backwards in the reverse order of forwards, and
    micro-batches in flight are not run so.
    """
    for slot, pack in enumerate(pipeline.slots):
        pipeline.slots.load_(documents[slot], slot)
        layers = tuple(_OfSlot(layer) for layer in pipeline.stage.blocks)
        samples = tuple((_sample_rows(pipeline.config), *metadata_of(pack)) for _ in layers)
        graphed: Any = torch.cuda.make_graphed_callables(layers, samples)
        pipeline.layers[slot] = graphed
        pipeline.slots.release(slot)
    return eager(pipeline)


class _OfSlot(nn.Module):
    """A layer under another name: capturing replaces a module's forward, and every slot captures the same layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *metadata: Tensor) -> Any:
        return self.layer(x, *metadata)


def _sample_rows(config: Config) -> Tensor:
    return torch.zeros(config.max_tokens, config.dim, device=config.device, requires_grad=True)


def whole_iteration(pipeline: Pipeline) -> tuple[Way, Callable[[], graphs.Report | None]]:
    """One graph of all forwards and backwards and the update: every micro-batch has a slot, and all are loaded before a replay."""
    captured: graphs.Captured | None = None

    def body(_: PackedSequences) -> None:
        pipeline.zero()
        for kind, m in one_forward_one_backward(IN_FLIGHT):
            getattr(pipeline, kind)(m)
        pipeline.update()

    def run(documents: list[list[Tensor]], guarded: bool) -> None:
        nonlocal captured
        for slot, texts in enumerate(documents):
            pipeline.slots.load_(texts, slot)
        if captured is None:
            captured = graphs.capture(body, pipeline.slots[0], state=pipeline.trainer.state().values())
        with no_sync(pipeline.config.device, guarded):
            captured()
        pipeline.slots.release()

    return run, lambda: None if captured is None else captured.report
