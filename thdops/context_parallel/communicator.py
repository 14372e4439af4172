"""How ranks talk: an algorithm yields what it wants from the others and is sent the answer.

    def algorithm(x):
        pending = yield Shift((x,))  # on its way to the next rank; the previous rank's x comes in
        y = compute(x)               # meanwhile
        (x,) = yield Wait(pending)

So an algorithm is written once, for one rank, and knows neither torch.distributed nor who drives it. `run` drives it on a process
group: NCCL (its own stream carries what is on its way while kernels run on the current one) or Gloo. `run_together` steps W of
them on one device in lock step, deterministically and without threads: every rank yields the same request at the same step.

W ranks along one axis; a rank of a mesh has one group per axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meta_kernels.contract import refusal

# --- what can be asked for -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """Something that every rank along an axis of the mesh takes part in. Answers may be shared between ranks: read them only."""

    x: Tensor
    axis: int = 0

    def through(self, group: dist.ProcessGroup) -> Any:
        """This rank's answer from a process group."""
        raise NotImplementedError

    @staticmethod
    def together(xs: list[Tensor]) -> Sequence[Any]:
        """Every rank's answer where the x of all ranks are at hand."""
        raise NotImplementedError


class Pending(NamedTuple):
    """Tensors on their way, what they come from (which must live until then), and the work to wait for."""

    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]
    works: list[dist.Work]


@dataclass(frozen=True)
class Shift(Request):
    """Start sending x, a tuple of tensors, to the next rank, as one message: they need not lie in one piece of memory. Answer: a
    `Pending` of the previous rank's, for `Wait`. What arrives is the receiver's, to write into if the sender may; nobody else does.
    """

    x: Any

    def through(self, group: dist.ProcessGroup) -> Pending:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        leaving = tuple(x.contiguous() for x in self.x)
        arriving = tuple(map(torch.empty_like, leaving))
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size) for x in leaving]
        receipts = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size) for x in arriving]
        return Pending(arriving, leaving, dist.batch_isend_irecv(sends + receipts))

    @staticmethod
    def together(xs: list[Any]) -> list[Pending]:
        return [Pending(x, x, []) for x in (xs[-1], *xs[:-1])]


@dataclass(frozen=True)
class Wait:
    """Answer: the tensors that a `Shift` started. On a GPU the stream waits, not the host."""

    pending: Pending

    def arrived(self) -> tuple[Tensor, ...]:
        for work in self.pending.works:
            work.wait()
        return self.pending.arriving


def _named(name: str, before: str) -> Callable[..., Any]:
    """A collective by its name in torch, or the one that it had before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


@dataclass(frozen=True)
class AllGather(Request):
    """Answer: the x [n, ...] of all ranks one after the other, [W * n, ...]."""

    def through(self, group: dist.ProcessGroup) -> Tensor:
        x = self.x.contiguous()
        gathered = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        _named("all_gather_single", "all_gather_into_tensor")(gathered, x, group=group)
        return gathered

    @staticmethod
    def together(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(xs)] * len(xs)


@dataclass(frozen=True)
class ReduceScatter(Request):
    """Answer: this rank's rows [n, ...] of the sum over ranks of x [W * n, ...]."""

    def through(self, group: dist.ProcessGroup) -> Tensor:
        x = self.x.contiguous()
        scattered = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        _named("reduce_scatter_single", "reduce_scatter_tensor")(scattered, x, group=group)
        return scattered

    @staticmethod
    def together(xs: list[Tensor]) -> Sequence[Tensor]:
        total = xs[0].clone()
        for x in xs[1:]:
            total += x
        return total.chunk(len(xs))


@dataclass(frozen=True)
class AllToAll(Request):
    """Answer: [W, ...], where x [W, ...] has one block for each rank: rank s's block for this one at s."""

    def through(self, group: dist.ProcessGroup) -> Tensor:
        x = self.x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def together(xs: list[Tensor]) -> list[Tensor]:
        return [torch.stack([x[rank] for x in xs]) for rank in range(len(xs))]


@dataclass(frozen=True)
class AllReduceMax(Request):
    """Answer: the largest of all ranks' x, element by element."""

    def through(self, group: dist.ProcessGroup) -> Tensor:
        largest = self.x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest

    @staticmethod
    def together(xs: list[Tensor]) -> list[Tensor]:
        return [torch.stack(xs).amax(0)] * len(xs)


_T = TypeVar("_T")
Steps = Generator[Any, Any, _T]
"""An algorithm: yields a `Request` or a `Wait`, is sent the answer, returns its result."""


class Place(NamedTuple):
    """Where a rank stands: its number along each axis of the mesh, how many there are along each, whether on other devices."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    remote: bool = False


def places(sizes: Sequence[int]) -> list[Place]:
    """Those of all ranks of a mesh, in row-major order."""
    return [Place(ranks, tuple(sizes)) for ranks in itertools.product(*map(range, sizes))]


# --- who drives ----------------------------------------------------------------------------------------------------------------


def run(op: str, algorithm: Steps[_T], groups: Sequence[dist.ProcessGroup]) -> _T:
    """This rank's result; `groups` has one group per axis.

    Raises:
        RuntimeError: a rank died, left, or takes part with other shapes, and the group's backend noticed. How long it waits is the
            group's timeout.
    """

    def answer(request: Any) -> Any:
        try:
            return answered(request, groups)
        except RuntimeError as error:
            got = f"an error in {type(request).__name__} on rank {dist.get_rank()} ({str(error).strip().splitlines()[0]})"
            fix = "see whether a rank died, or called it with other shapes or another comm"
            raise refusal(op, "group", "carry every exchange", got, fix, RuntimeError) from error

    return drive(algorithm, answer)


def answered(request: Any, groups: Sequence[dist.ProcessGroup]) -> Any:
    """This rank's answer."""
    return request.arrived() if isinstance(request, Wait) else request.through(groups[request.axis])


def drive(algorithm: Steps[_T], answer: Callable[[Any], Any]) -> _T:
    """The result of an algorithm whose requests are answered so."""
    given: Any = None
    while True:
        try:
            request = algorithm.send(given)
        except StopIteration as stop:
            return stop.value
        given = answer(request)


def run_together(algorithms: Sequence[Steps[_T]], sizes: Sequence[int]) -> list[_T]:
    """Every rank's result, in the order of `places(sizes)`."""
    answers: list[Any] = [None] * len(algorithms)
    while True:
        requests: list[Any] = []
        results: list[_T] = []
        for algorithm, answer in zip(algorithms, answers, strict=True):
            try:
                requests.append(algorithm.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results
        answers = _answers(requests, sizes)


def _answers(requests: list[Any], sizes: Sequence[int]) -> list[Any]:
    if isinstance(requests[0], Wait):
        return [request.arrived() for request in requests]
    axis = requests[0].axis
    answers: list[Any] = [None] * len(requests)
    lines = torch.arange(len(requests), device="cpu").view(*sizes).movedim(axis, -1).reshape(-1, sizes[axis])
    for line in lines.tolist():
        for rank, answer in zip(line, requests[line[0]].together([requests[rank].x for rank in line]), strict=True):
            answers[rank] = answer
    return answers
