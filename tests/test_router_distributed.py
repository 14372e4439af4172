"""Sums of `router` that are added up over process groups: losses and gradients of every rank are those of one process.

Four Gloo processes, two context-parallel ranks times two sequence-parallel ones. T rows (tokens), E experts, K top-k, B sequences.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from router_oracle import random_logits
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import thdops
from thdops import RouterSums

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without torch.distributed or Gloo"
)

RANKS, PARTS = 4, 2
ROWS, EXPERTS, TOPK = 32, 8, 2
LOCAL = ROWS // RANKS
AUX, Z = 0.3, 0.02
TIMEOUT = datetime.timedelta(seconds=120)
CPU = torch.device("cpu")

# Document 2 is cut by every group, and has no token in its second half: that leaves the last rank without any. Document 3 is empty.
VALID = torch.tensor([0, 7, 10, 15, 15], dtype=torch.int32)
PADDED = torch.tensor([0, 8, 12, 32, 32], dtype=torch.int32)


class Case(NamedTuple):
    """What is asked for: a loss per sequence or one of the batch; of how many layers the sums are added."""

    packed: bool = False
    reduction: str = "mean"
    layers: int = 1


CASES = {
    "batch": Case(),
    "mean over sequences": Case(packed=True),
    "sum over sequences": Case(packed=True, reduction="sum"),
    "two layers": Case(layers=2),
}


def whole_logits(layers: int) -> list[Tensor]:
    """Of the whole pack, `[T, E]` a layer: the same in every process. NaN stands on padding rows."""
    padding = thdops.padding_mask(VALID, PADDED, ROWS)
    return [torch.where(padding[:, None], torch.nan, random_logits(ROWS, EXPERTS, CPU, seed=layer)) for layer in range(layers)]


# --- one rank ---------------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A rank's rows of the whole pack `[T / RANKS]`, and their own metadata."""

    rows: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor


def place_of(rank: int) -> Place:
    """Context-parallel rank c holds half c of each document, back to back; sequence-parallel rank s is a slice of those rows."""
    s, c = divmod(rank, PARTS)
    halves = PADDED.diff() // PARTS
    rows = torch.cat([start + c * half + torch.arange(half) for start, half in zip(PADDED.tolist(), halves.tolist(), strict=False)])
    lengths = (VALID.diff() - c * halves).clamp(min=0).minimum(halves)
    metadata = (thdops.cu_seqlens_from_lengths(lengths, len(lengths)), PADDED // PARTS)
    return Place(rows[s * LOCAL :][:LOCAL], *thdops.slice_cu_seqlens(*metadata, s * LOCAL, LOCAL))


class _Added(torch.autograd.Function):
    """The sum over a group. Every rank goes on to the same loss L of it and differentiates that one number, so the gradient that
    arrives, dL/d(sum), is dL/d(what this rank put in) already. Adding it up over ranks would give the gradient of 4 L."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


def losses(logits: list[Tensor], place: Place, case: Case, added: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(aux loss, z-loss) of the whole pack on one rank, which sees its own logits only."""
    metadata: dict[str, Any] = {"cu_seqlens": place.cu_seqlens, "cu_seqlens_padded": place.cu_seqlens_padded}
    if not case.packed:
        metadata = {"padding_mask": thdops.padding_mask(place.cu_seqlens, place.cu_seqlens_padded, LOCAL)}
    layers = [thdops.router(layer, TOPK, **metadata).sums for layer in logits]
    sums = RouterSums(*(added(torch.stack(parts).sum(0)) for parts in zip(*layers, strict=True)))
    aux = thdops.aux_loss_from_sums(sums.scores, sums.counts, sums.num_tokens, topk=TOPK, coeff=AUX, reduction=case.reduction)
    return aux, thdops.z_loss_from_sums(sums.z, sums.num_tokens, Z)


def run_rank(rank: int, folder: str) -> None:
    """Every case on one rank; results go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    try:
        torch.save(_results(rank), f"{folder}/{rank}.pt")
        dist.barrier()  # a rank that leaves early takes its end of the others' connections with it
    finally:
        dist.destroy_process_group()


def _results(rank: int) -> dict[str, list[Tensor]]:
    from torch.distributed.nn.functional import all_reduce

    place = place_of(rank)
    groups = [dist.new_subgroups_by_enumeration(ranks, timeout=TIMEOUT)[0] for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]

    def by_groups(part: Tensor) -> Tensor:
        for group in groups:
            part = _Added.apply(part, group)
        return part

    def by_torch(part: Tensor) -> Tensor:
        return all_reduce(part.clone())

    # The backward of torch's all-reduce adds gradients up over ranks, as if the ranks' losses were summands: here they are one.
    ways = {"identity": (by_groups, 1), "torch": (by_torch, RANKS)}
    found: dict[str, list[Tensor]] = {}
    for name, case in CASES.items():
        for way, (added, divisor) in ways.items():
            logits = [layer[place.rows].requires_grad_() for layer in whole_logits(case.layers)]
            both = losses(logits, place, case, added)
            grads = [torch.stack(torch.autograd.grad(loss / divisor, logits, retain_graph=True)) for loss in both]
            found[f"{name}/{way}"] = [loss.detach() for loss in both] + grads
    return found


# --- against one process ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    context = spawn(run_rank, (str(folder),), RANKS, join=False, daemon=True)
    assert context is not None
    deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
    while not context.join(timeout=max(deadline - time.monotonic(), 0)):
        assert time.monotonic() < deadline, "the processes did not end in time"
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(RANKS)]


def in_one_process(case: Case) -> list[Tensor]:
    """Losses and gradients `[layers, T, E]` from the whole pack, without sums. Two layers are a batch of twice as many rows."""
    leaf = torch.stack(whole_logits(case.layers)).requires_grad_()
    options: dict[str, Any] = {"padding_mask": thdops.padding_mask(VALID, PADDED, ROWS).expand(case.layers, ROWS)}
    if case.packed:
        options = {"cu_seqlens": VALID, "cu_seqlens_padded": PADDED, "reduction": case.reduction}
    output = thdops.router(leaf, TOPK, aux_coeff=AUX, z_coeff=Z, **options)
    both = (output.aux_loss, output.z_loss)
    return [loss.detach() for loss in both] + [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in both]


def test_the_ranks_share_the_pack_and_one_has_no_token() -> None:
    places = [place_of(rank) for rank in range(RANKS)]
    assert sorted(torch.cat([place.rows for place in places]).tolist()) == list(range(ROWS))
    padding = thdops.padding_mask(VALID, PADDED, ROWS)
    for place in places:
        own = thdops.padding_mask(place.cu_seqlens, place.cu_seqlens_padded, LOCAL)
        assert torch.equal(own, padding[place.rows])
    assert [int(place.cu_seqlens[-1]) for place in places] == [8, 4, 3, 0]


@pytest.mark.parametrize("way", ["identity", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_what_one_process_finds(name: str, way: str, ranks: list[dict[str, list[Tensor]]]) -> None:
    *expected_losses, expected_aux, expected_z = in_one_process(CASES[name])
    assert min(map(float, expected_losses)) > 0
    for rank, found in enumerate(ranks):
        *found_losses, aux, z = found[f"{name}/{way}"]
        torch.testing.assert_close(found_losses, expected_losses, rtol=1e-6, atol=0.0)
        for grad, expected in ((aux, expected_aux), (z, expected_z)):
            tolerance = 1e-6 * float(expected.abs().max())
            torch.testing.assert_close(grad, expected[:, place_of(rank).rows], rtol=0.0, atol=tolerance)
