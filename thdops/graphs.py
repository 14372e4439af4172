"""A step captured once per bucket and replayed for every batch: thin help over `torch.cuda.graph`.

    batch = PackedSequences.allocate(max_tokens=65536, max_seqs=256, device="cuda")
    batch.load_(documents)                                # something to warm up on
    run = graphs.capture(step, batch, buckets=(16384, 32768, 65536), state=tensors_that_step_changes)
    for documents in batch.spec.pack(corpus):
        batch.load_(documents)
        loss = run()                                      # replays the graph of the smallest bucket that holds them; no sync
    print(run.report)

T rows. A bucket of capacity C is the first C rows of the batch's own tensors: views, no buffers of its own. So `load_` stays the
one way in, for documents and collated packs alike, and offsets and counts have one address in all graphs: whatever else reads them
sees the batch that ran. The price is that a load writes all T rows, 21 bytes each, whichever bucket runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meta_kernels.contract import check_count, kind_of, refusal
from thdops.ops.padding.op import slice_cu_seqlens
from thdops.packing import PackedSequences

__all__ = ["Captured", "Report", "Step", "capture"]

Step: TypeAlias = Callable[[PackedSequences], Any]
"""What is captured: reads the pack that it is given, and no device value on the host."""

_WARM_UPS = 3
_OP = "graphs.capture"


@dataclass(frozen=True)
class Report:
    """What has happened so far.

    Attributes:
        captures: graphs that were captured (0 where there is no GPU); it never grows after `capture` returned.
        runs: by capacity, how many calls each bucket served: replays of its graph, or eager calls where there is none.
        eager: calls that no bucket could hold and that ran eagerly, on the whole batch.
        pool_bytes: device memory that the graphs' pool holds, all buckets together.
    """

    captures: int
    runs: dict[int, int]
    eager: int
    pool_bytes: int

    @property
    def replays(self) -> int:
        """Graph replays, of all buckets."""
        return sum(self.runs.values()) if self.captures else 0

    def __str__(self) -> str:
        served = ", ".join(f"{count} of {capacity} rows" for capacity, count in self.runs.items())
        how = "replays" if self.captures else "eager calls, for want of a GPU"
        pool = f"{self.pool_bytes / 2**20:.1f} MiB in their pool"
        return f"graphs captured: {self.captures}, {pool}; {how}: {served}; eager, no bucket fits: {self.eager}"


class Captured:
    """What `capture` returns: call it after each `batch.load_`."""

    def __init__(self, step: Step, batch: PackedSequences, runs: dict[int, Callable[[], Any]], pool: Any) -> None:
        self._step, self._batch, self._pool = step, batch, pool
        self._run = dict(sorted(runs.items()))
        self._served = dict.fromkeys(self._run, 0)
        self._eager = 0

    @property
    def bucket(self) -> int | None:
        """The capacity that the loaded batch goes to, or None where it fits no bucket. Known to the host from `load_`."""
        rows = self._batch.loaded_rows
        wanted = self._batch.spec.max_tokens if rows is None else rows
        return next((capacity for capacity in self._run if wanted <= capacity), None)

    def __call__(self) -> Any:
        """Run the step on the loaded batch.

        Returns:
            What the step returned. From a graph it is the same tensors every time: the next replay of the same bucket overwrites
            them, so clone what must last.
        """
        capacity = self.bucket
        if capacity is None:
            self._eager += 1
            return self._step(self._batch)
        self._served[capacity] += 1
        return self._run[capacity]()

    @property
    def report(self) -> Report:
        """Captures, replays and memory until now. Asks the allocator, not the device."""
        captures = len(self._run) if self._pool is not None else 0
        return Report(captures, dict(self._served), self._eager, _pool_bytes(self._pool))


def capture(
    step: Step,
    batch: PackedSequences,
    buckets: Sequence[int] | None = None,
    *,
    state: Iterable[Tensor] = (),
    differentiable: bool = False,
) -> Captured:
    """Capture `step` on the first rows of `batch`, once per bucket, all in one memory pool.

    Load a typical batch first: each bucket is warmed up on what is loaded, cut to its rows, on a side stream. Batch, `state` and
    random generators are then as they were. On CPU nothing is warmed up or captured and the same object calls `step` eagerly, with
    the same choice of bucket, so that code is portable. Of `PackedSlots`, capture each slot.

    A bucket is chosen by `batch.loaded_rows`, which the host knows from `load_`. Where a pack was filled otherwise, it is the
    whole capacity.

    A graph holds the Python values that the step saw at its capture, a module's training mode among them. Gradients that are read
    outside of the step must exist before and be zeroed in place: what a step allocates belongs to the pool, and other buckets use
    that memory too.

    Args:
        step: takes a `PackedSequences` and returns a tensor, nested tensors or None. It gets `batch` itself where a bucket has its
            capacity, else a pack of views, whose `spec` says how many rows it has.
        batch: a pack on CUDA, or on the CPU.
        buckets: capacities in rows, in any order; multiples of the pack's `pad_multiple`. None is one bucket, all of `batch`.
        state: tensors that the step changes and the next one needs (parameters, an optimizer's moments and count), which the
            warm-up leaves as they were. They must exist before: what a step creates lazily cannot be put back.
        differentiable: False captures the step whole: backward and update, if any, are inside. True captures forward and backward
            as two graphs (`torch.cuda.make_graphed_callables`): the results have gradients, and `backward()` outside replays the
            second. `step` is then a `torch.nn.Module`, so that its parameters are known, and each bucket keeps a set of their
            gradients. One batch at a time: its backward comes before the next call.

    Returns:
        A `Captured`.

    Raises:
        ValueError: no bucket, or one below 1, above the batch's capacity, or no multiple of `pad_multiple`; a bucket below the
            capacity of a pack with tail="sequence", whose last sequence ends at the capacity.
        TypeError: `differentiable` and the step is no module.
        RuntimeError: the step cannot be captured.
    """
    capacities = _check(step, batch, buckets, differentiable)
    packs = {capacity: _first_rows(batch, capacity) for capacity in capacities}
    if batch.tokens.device.type == "cuda":
        with torch.cuda.device(batch.tokens.device):
            return _captured(step, batch, packs, tuple(state), _capture_parts if differentiable else _capture_whole)
    return Captured(step, batch, {capacity: lambda pack=pack: step(pack) for capacity, pack in packs.items()}, None)


def _check(step: Step, batch: PackedSequences, buckets: Sequence[int] | None, differentiable: bool) -> list[int]:
    """The capacities, largest first, so that smaller graphs find their memory in the pool."""
    spec = batch.spec
    capacities = sorted({spec.max_tokens} if buckets is None else set(buckets), reverse=True)
    if not capacities:
        raise refusal(_OP, "buckets", "hold a capacity", "none", "pass None for one bucket of all rows")
    for capacity in capacities:
        check_count(_OP, "buckets", capacity, 1)
        if capacity > spec.max_tokens:
            raise refusal(
                _OP, "buckets", f"be at most the batch's max_tokens ({spec.max_tokens})", capacity, "allocate a larger batch"
            )
        if capacity % spec.pad_multiple:
            fix = "a document's rows are rounded up to it"
            raise refusal(_OP, "buckets", f"be multiples of pad_multiple ({spec.pad_multiple})", capacity, fix)
    if spec.tail == "sequence" and capacities[-1] < spec.max_tokens:
        rule = f"be max_tokens ({spec.max_tokens}) alone with tail='sequence'"
        raise refusal(_OP, "buckets", rule, capacities[-1], "that tail ends at the capacity; use tail='padding'")
    if differentiable and not isinstance(step, nn.Module):
        fix = "its parameters must be known to get gradients"
        raise refusal(_OP, "step", "be a torch.nn.Module with differentiable=True", kind_of(step), fix, TypeError)
    return capacities


def _first_rows(batch: PackedSequences, capacity: int) -> PackedSequences:
    """The batch as a pack of so many rows; shares all memory with it."""
    if capacity == batch.spec.max_tokens:
        return batch
    rows = batch.token_like()
    named = zip(batch.spec.tensors(), batch.tensors(), strict=True)
    views = [tensor[:capacity] if name in rows else tensor for name, tensor in named]
    return PackedSequences.from_tensors(views, replace(batch.spec, max_tokens=capacity))


# --- CUDA -------------------------------------------------------------------------------------------------------------------------


def _captured(
    step: Step, batch: PackedSequences, packs: dict[int, PackedSequences], state: Sequence[Tensor], one: Callable[..., Any]
) -> Captured:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    runs = {}
    for capacity, pack in packs.items():
        with _unchanged(state), _cut(batch, capacity), torch.random.fork_rng([torch.cuda.current_device()]):
            runs[capacity] = one(step, pack, pool, stream)
    return Captured(step, batch, runs, pool)


def _capture_whole(step: Step, pack: PackedSequences, pool: Any, stream: torch.cuda.Stream) -> Callable[[], Any]:
    present = torch.cuda.current_stream()
    stream.wait_stream(present)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step(pack)
    present.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Threads of process groups poll for work that is done: what others than this thread ask for must not end the capture.
    mode = "thread_local" if dist.is_available() and dist.is_initialized() else "global"
    with _explained(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        results = step(pack)

    def replay() -> Any:
        graph.replay()
        return results

    return replay


class _Part(nn.Module):
    """A step as graphed callables want it: a module that takes tensors only."""

    def __init__(self, step: Step, spec: Any) -> None:
        super().__init__()
        self.step, self.spec = step, spec

    def forward(self, *tensors: Tensor) -> Any:
        return self.step(PackedSequences.from_tensors(tensors, self.spec))


def _capture_parts(step: Step, pack: PackedSequences, pool: Any, stream: torch.cuda.Stream) -> Callable[[], Any]:
    tensors = pack.tensors()  # at replay their addresses are those of the capture, so nothing is copied
    with _explained():
        graphed: Any = torch.cuda.make_graphed_callables(
            _Part(step, pack.spec), tensors, num_warmup_iters=_WARM_UPS, allow_unused_input=True, pool=pool
        )
    return lambda: graphed(*tensors)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        rule = "be capturable: no host read of a device value, nothing created lazily"
        raise refusal(_OP, "step", rule, str(error).split("\n")[0], "the error above says where", RuntimeError) from error


@contextmanager
def _unchanged(state: Iterable[Tensor]) -> Iterator[None]:
    """Put tensors back to what they hold now."""
    held = [(tensor, tensor.detach().clone()) for tensor in state]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in held:
                tensor.copy_(before)


@contextmanager
def _cut(batch: PackedSequences, rows: int) -> Iterator[None]:
    """Let no sequence of the batch reach beyond its first rows meanwhile: a view's metadata would point outside of it."""
    with _unchanged((batch.cu_seqlens, batch.cu_seqlens_padded, batch.num_tokens)):
        valid, padded = slice_cu_seqlens(batch.cu_seqlens, batch.cu_seqlens_padded, 0, rows)
        batch.cu_seqlens.copy_(valid)
        batch.cu_seqlens_padded.copy_(padded)
        batch.num_tokens.copy_(valid[-1])
        yield


def _pool_bytes(pool: Any) -> int:
    if pool is None:
        return 0
    return sum(
        segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)
    )
