"""A byte-level mixture-of-experts transformer over packed rows.

T rows, D model width, H query heads, G key/value heads, E experts, K experts a token, F expert width, V = 256 bytes.

The residual stream is zero on padding rows: it starts from `zero_fill`, attention returns zeros there, padding is routed to no
expert, and no layer has a bias. Nothing here reads a device value on the host, so the whole step compiles without a graph break
and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thdops
from packed_moe import parallel
from packed_moe.config import Config
from thdops import RouterOutput
from thdops.integrations.grouped import grouped_linear
from thdops.packing import IGNORE_INDEX, PackedSequences

VOCABULARY = 256

Tap = Callable[[str, Tensor], Tensor]
"""Sees a named intermediate tensor and returns what to go on with; the checks look through it."""


class Share(NamedTuple):
    """Of a rank's rows: the place of each in its whole sequence [T], and where they stand among themselves [B+1]."""

    positions: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor


class Batch(NamedTuple):
    """The tensors of a packed batch that the model reads: tokens and labels [T], metadata [B+1], number of valid tokens (0-d).

    Where ranks share out the rows of a batch, tokens, labels and `share` are of this rank's T rows, all else of the whole batch.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    num_tokens: Tensor
    share: Share | None = None

    @classmethod
    def of(cls, pack: PackedSequences, group: str | None = None) -> Batch:
        """What a pack holds, or this rank's share of it."""
        if group is None:
            return cls(pack.tokens, pack.labels, pack.cu_seqlens, pack.cu_seqlens_padded, pack.num_tokens)
        mine = pack.shard(group)
        share = Share(mine.positions, mine.local_cu_seqlens, mine.local_cu_seqlens_padded)
        return cls(mine.tokens, mine.labels, mine.cu_seqlens, mine.cu_seqlens_padded, mine.num_tokens, share)

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """Where the rows of `tokens` stand: what everything but attention goes by."""
        return (self.cu_seqlens, self.cu_seqlens_padded) if self.share is None else self.share[1:]


class Losses(NamedTuple):
    """0-d fp32 each. `total` = cross_entropy + aux + z. `padding` is the largest |activation| on a padding row: 0, always."""

    total: Tensor
    cross_entropy: Tensor
    aux: Tensor
    z: Tensor
    padding: Tensor


class Rows(NamedTuple):
    """What every layer needs of the batch: metadata, padding (bool [T]), valid count (0-d), rotary cos and sin [T, 1, D/2]."""

    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    padding: Tensor
    num_tokens: Tensor
    cos: Tensor
    sin: Tensor


def untouched(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _weight(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(fan_in))


def _rotate(x: Tensor, rows: Rows) -> Tensor:
    """Rotary embedding of `[T, H, head_dim]`, in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * rows.cos - second * rows.sin, second * rows.cos + first * rows.sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention inside each document; q, k and v are slices of one projection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.group, self.comm = parallel.group(), config.cp_comm
        self.qkv = nn.Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rows: Rows, tap: Tap) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        out = self.attend(tap("q", _rotate(q, rows)), tap("k", _rotate(k, rows)), tap("v", v), rows)
        return self.out(tap("attention", out).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """`[T, H, head_dim]`."""
        if self.group is None:
            own = "native" if q.is_cuda else None  # in every mode, whatever else is installed
            return thdops.attention(q, k, v, rows.cu_seqlens, cu_seqlens_q_padded=rows.cu_seqlens_padded, causal=True, backend=own)
        metadata = (rows.cu_seqlens, rows.cu_seqlens_padded)
        return thdops.context_parallel.attention(q, k, v, *metadata, group=self.group, comm=self.comm, causal=True)


class MixtureOfExperts(nn.Module):
    """A softmax router and its experts, each of which computes the rows that chose it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.experts, self.topk = config.experts, config.topk
        self.aux_coeff, self.z_coeff, self.group = config.aux_coeff, config.z_coeff, parallel.group()
        self.dtype = torch.bfloat16 if config.autocast else torch.float32
        self.router = _weight(config.dim, config.experts, fan_in=config.dim)
        self.up = _weight(config.experts, config.dim, config.ffn, fan_in=config.dim)
        self.down = _weight(config.experts, config.ffn, config.dim, fan_in=config.topk * config.ffn)

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """(out [T, D], aux loss, z-loss). Padding rows choose no expert and count in no loss."""
        # The choice is discrete: in bf16 near ties would fall differently from one mode to the next.
        with torch.autocast(x.device.type, enabled=False):
            logits = x.float() @ self.router
        routed = thdops.router(
            logits,
            self.topk,
            padding_mask=rows.padding,
            probs="topk",
            routing="indices",
            index_dtype=torch.int32,
            aux_coeff=self.aux_coeff,
            z_coeff=self.z_coeff,
            total_num_tokens=rows.num_tokens,  # on the device: the count that changes with every batch
        )
        sorted_rows, offsets, row_map = thdops.permute_tokens(x.to(self.dtype), routed.routing, self.experts)
        hidden = F.silu(grouped_linear(sorted_rows, self.up, offsets))
        out = thdops.unpermute_tokens(grouped_linear(hidden, self.down, offsets), row_map, routed.probs)
        return out, *self._losses(routed, rows.num_tokens)

    def _losses(self, routed: RouterOutput, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(aux loss, z-loss) of the whole batch."""
        if self.group is None:
            return routed.aux_loss, routed.z_loss
        scores, counts, z = parallel.added_up(routed.sums.scores, routed.sums.counts, routed.sums.z)
        aux = thdops.aux_loss_from_sums(scores, counts, num_tokens, topk=self.topk, coeff=self.aux_coeff)
        return aux, thdops.z_loss_from_sums(z, num_tokens, self.z_coeff)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.experts_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.experts = MixtureOfExperts(config)

    def forward(self, x: Tensor, rows: Rows, tap: Tap) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rows, tap)
        out, aux, z = self.experts(self.experts_norm(x), rows)
        return tap("block", x + out), aux, z


class PackedMoE(nn.Module):
    """Bytes in, losses out."""

    rotary: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = self.make_blocks(config)
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        half = config.head_dim // 2
        self.register_buffer("rotary", 10_000.0 ** (-torch.arange(half) / half), persistent=False)
        self.autocast, self.group = config.autocast, parallel.group()

    def make_blocks(self, config: Config) -> nn.ModuleList:
        """The layers between embedding and head."""
        return nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, batch: Batch, probe: Tensor, tap: Tap = untouched) -> Losses:
        """The losses of a batch.

        `probe` is a leaf of zeros `[T, D]` that is added to the residual stream at its start: its gradient is the stream's, so
        that the step can look at the gradient on padding rows without a hook.
        """
        with torch.autocast(probe.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return self._losses(batch, probe, tap)

    def _rows(self, batch: Batch) -> Rows:
        rows = batch.tokens.shape[0]
        positions = thdops.positions(*batch.own, rows) if batch.share is None else batch.share.positions
        angles = positions[:, None, None].float() * self.rotary
        padding = thdops.padding_mask(*batch.own, rows)
        return Rows(batch.cu_seqlens, batch.cu_seqlens_padded, padding, batch.num_tokens, angles.cos(), angles.sin())

    def _losses(self, batch: Batch, probe: Tensor, tap: Tap) -> Losses:
        rows = self._rows(batch)
        x = thdops.zero_fill(self.embedding(batch.tokens), *batch.own) + probe
        aux = z = x.new_zeros(())
        for block in self.blocks:
            x, block_aux, block_z = block(x, rows, tap)
            aux, z = aux + block_aux, z + block_z
        cross_entropy = self.cross_entropy(x, batch.labels)
        padding = largest_on_padding(x.detach(), rows.padding)
        return Losses(cross_entropy + aux + z, cross_entropy, aux, z, padding)

    def cross_entropy(self, x: Tensor, labels: Tensor) -> Tensor:
        """Of the residual stream's end `[T, D]`, in nats per label of the whole batch; 0 where there is none."""
        logits = self.head(self.norm(x)).float()
        summed = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        counted = (labels != IGNORE_INDEX).sum()
        if self.group is not None:
            summed, counted = parallel.added_up(summed, counted)
        return summed / counted.clamp(min=1)


def largest_on_padding(x: Tensor, padding: Tensor) -> Tensor:
    """0-d fp32: the largest magnitude on a padding row of `[T, D]`; NaN where one holds NaN."""
    return torch.where(padding, x.abs().amax(-1), 0).amax().float()
