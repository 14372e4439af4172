"""What the stress tests run: one small step that calls most ops, forward and backward, on packs of random layout.

T rows, H heads, D head dim, E experts, K experts a token.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

import thdops
from thdops.conformance.tensors import bits
from thdops.packing import PackedSequences

HEADS, KV_HEADS, DIM, EXPERTS, TOPK = 4, 2, 64, 8, 2
SEQUENCES, MULTIPLE = 12, 4
_TOKENS = torch.zeros(1 << 16, dtype=torch.int64)


class Step:
    """Attention, a router with its losses, its experts' dispatch and all gradients, over the first rows of fixed tensors.

    Bitwise repeatable, and without a matrix product: whatever differs comes from thdops. NaN stands on padding rows of q, k and v.
    """

    def __init__(self, rows: int, device: str) -> None:
        """Tensors of up to `rows` rows: bf16 on a GPU, where that is what the fast kernels take, fp32 on a CPU."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        shapes = [(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    def __call__(self, pack: PackedSequences) -> tuple[Tensor, ...]:
        """(loss, out, lse, chosen experts, offsets, mixed, dq, dk, dv)."""
        padding = pack.padding_mask[:, None, None]
        q, k, v = (torch.where(padding, torch.nan, leaf[: len(padding)]) for leaf in self.leaves)
        out, lse = thdops.attention(
            q,
            k,
            v,
            pack.cu_seqlens,
            cu_seqlens_q_padded=pack.cu_seqlens_padded,
            causal=True,
            return_lse=True,
            deterministic=True,
        )
        x = out.flatten(1)
        routed = thdops.router(
            x[:, :EXPERTS].float(),
            TOPK,
            padding_mask=pack.padding_mask,
            probs="topk",
            routing="indices",
            index_dtype=torch.int32,
            aux_coeff=1e-2,
            z_coeff=1e-3,
            total_num_tokens=pack.num_tokens,
        )
        rows, offsets, row_map = thdops.permute_tokens(x, routed.routing, EXPERTS)
        mixed = thdops.unpermute_tokens(rows, row_map, routed.probs)
        loss = mixed.float().square().sum() + routed.aux_loss + routed.z_loss
        gradients = torch.autograd.grad(loss, self.leaves)
        return loss.detach(), out.detach(), lse.detach(), routed.routing, offsets, mixed.detach(), *gradients


def allocate(rows: int, device: str) -> PackedSequences:
    """A pack for `random_documents`."""
    return PackedSequences.allocate(rows, SEQUENCES, pad_multiple=MULTIPLE, device=device)


def random_documents(chance: random.Random, rows: int) -> list[Tensor]:
    """Up to `SEQUENCES` documents that fit `rows` rows: one pack in eight is full, one empty, one a single document."""
    share = chance.choice((1, 0, *(chance.random() for _ in range(6))))
    groups = int(share * rows) // MULTIPLE
    count = chance.choice((1, *(chance.randint(0, SEQUENCES) for _ in range(7))))
    cuts = sorted(chance.randint(0, groups) for _ in range(count - 1))
    padded = [MULTIPLE * (stop - start) for start, stop in zip([0, *cuts], [*cuts, groups], strict=True)] if count else []
    return [_TOKENS[: max(0, length - chance.randrange(MULTIPLE))] for length in padded]


def differs(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Tensor:
    """0-d bool, on the device, so that comparing makes nobody wait: whether any bit differs, or the loss is not finite."""
    unequal = [(bits(a) != bits(e)).any() for a, e in zip(actual, expected, strict=True)]
    return torch.stack([*unequal, ~expected[0].isfinite()]).any()
