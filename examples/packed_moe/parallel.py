"""Context parallelism: torchrun starts a process per rank, and the ranks share out the rows of every batch.

    torchrun --nproc-per-node 2 examples/train_packed_moe.py --cp 2

W ranks. All of them draw the same documents, have the same weights and take the same steps. A rank computes its own rows, so what
its backward gives is its share of every gradient: the sum over ranks is the gradient.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from packed_moe.config import UserError

if TYPE_CHECKING:
    from packed_moe.checks import Check

COMMS = ("p2p", "all_gather", "a2a")
_TIMEOUT = datetime.timedelta(minutes=5)
"""How long a rank waits for another one, which may be compiling, before it calls it dead."""


@contextlib.contextmanager
def joined(ranks: int, device: str) -> Iterator[None]:
    """Within, this process is one of `ranks` if torchrun started it. Only the first one prints.

    Raises:
        UserError: it was started otherwise, or with another number of processes, or has no GPU of its own.
    """
    if ranks < 1:
        raise UserError(f"--cp must be at least 1, got {ranks}; pass a positive number")
    if not dist.is_torchelastic_launched():
        if ranks > 1:
            raise UserError(f"--cp {ranks} wants {ranks} processes, which torchrun starts; run: {_command(ranks)}")
        yield
        return
    processes = int(os.environ["WORLD_SIZE"])
    if ranks != processes:
        fix = "pass it so, or start as many as --cp says"
        raise UserError(f"--cp must be the number of processes that torchrun started ({processes}), got {ranks}; {fix}")
    chosen: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        number = int(os.environ["LOCAL_RANK"])
        if number >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise UserError(f"--cp {ranks} wants a GPU for each process, but torch sees {gpus}; lower it, or use --device cpu")
        torch.cuda.set_device(number)
        chosen = {"backend": "nccl", "device_id": torch.device("cuda", number)}
    dist.init_process_group(timeout=_TIMEOUT, **chosen)
    with _among(dist.group.WORLD), contextlib.nullcontext() if is_first() else contextlib.redirect_stdout(io.StringIO()):
        yield
    # After an error there is no leaving in order: others may be waiting for this rank, and torchrun ends them.
    gc.collect()  # a captured graph holds on to the communicator
    dist.destroy_process_group()


def _command(ranks: int) -> str:
    """The command line that would have been right, with the words that were given."""
    words, given = [], iter(sys.argv)
    for word in given:
        if word == "--cp":
            next(given, None)
        elif not word.startswith("--cp="):
            words.append(word)
    return shlex.join(["torchrun", "--nproc-per-node", str(ranks), *words, "--cp", str(ranks)])


def leave(code: int) -> NoReturn:
    """End the process. A rank does so without Python's shutdown, in which a thread of its group that lets go of a tensor aborts."""
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_first() -> bool:
    """Whether this process prints and writes."""
    return os.environ.get("RANK", "0") == "0"


_group: str | None = None


def group() -> str | None:
    """The name of the group whose ranks share out rows; None where this process has them all."""
    return _group


@contextlib.contextmanager
def _among(ranks: dist.ProcessGroup | None) -> Iterator[None]:
    global _group
    before, _group = _group, None if ranks is None else ranks.group_name
    try:
        yield
    finally:
        _group = before


def alone() -> contextlib.AbstractContextManager[None]:
    """Within, models are built for one process that has all rows."""
    return _among(None)


def added_up(*tensors: Tensor) -> list[Tensor]:
    """Each one's sum over all ranks, fp32, in one message; differentiable. Counts are exact up to 2^24.

    Every rank goes on to the same loss of the sum and differentiates that one number, so the gradient that arrives is that of what
    this rank put in already: adding it up over ranks would give W times as much.
    """
    own = torch.cat([tensor.flatten().float() for tensor in tensors])
    total = own.detach().clone()
    dist.all_reduce(total)
    # No autograd.Function: compiled by torch 2.11, one that calls a collective loses its gradient without a word.
    total = total + (own - own.detach())
    parts = total.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def of_all_ranks(checks: Sequence[Check]) -> list[Check]:
    """Every rank's checks as one list: passed where all passed, else what was seen on the first rank that did not."""
    if group() is None:
        return list(checks)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(checks))
    merged = []
    for same in zip(*everyone, strict=True):
        rank = next((rank for rank, check in enumerate(same) if not check.passed), None)
        merged.append(same[0] if rank is None else same[rank]._replace(detail=f"{same[rank].detail} (rank {rank})"))
    return merged
