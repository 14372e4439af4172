"""How long a call takes: on the device inside a CUDA graph, on the host in eager mode, and how fast the device could be.

Nothing here knows of ops. A call is `run(i)`, which works on the i-th copy of its arguments: copies that together exceed the L2
cache several times keep a number from being a cache's number.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thdops.registry import Cost

__all__ = ["NotCapturable", "Roofline", "Timing", "device_time", "graph_time", "host_time", "measure_roofline", "same_calls_time"]

_GRAPH_US = 1000.0
"""A captured graph holds so many calls that one replay lasts about this long: launch gaps and event overhead drown in it."""
_MAX_CALLS = 400
_BUDGET_US = 1e6
"""How long the replays of one measurement may take together."""
_HOST_BATCH = 20
"""Host calls between two synchronisations: far fewer than a stream's queue holds, so that no call waits for the device."""


class NotCapturable(Exception):
    """The call reads a device value on the host, so no CUDA graph can hold it."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, over many measurements: the median and the 20th and 80th percentiles; `how` they were taken."""

    p20: float
    p50: float
    p80: float
    how: str

    @classmethod
    def of(cls, samples: Sequence[float], how: str) -> Timing:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], how)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(fifths[0], statistics.median(samples), fifths[-1], how)

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, as a share of the median."""
        return (self.p80 - self.p20) / 2 / self.p50 if self.p50 else 0.0


# --- device time ------------------------------------------------------------------------------------------------------------------


def device_time(run: Callable[[int], Any], copies: int, device: torch.device) -> tuple[Timing, str]:
    """The time of one call on `device`, and "" or why it could not be taken inside a CUDA graph.

    On CPU it is the time of the wall: there to exercise the machinery, not to be quoted.
    """
    if device.type != "cuda":
        return Timing.of([_wall_us(lambda i=i: run(i)) for i in range(copies)], "wall"), ""
    try:
        return graph_time(run, copies), ""
    except NotCapturable as reason:
        return _event_time(run, copies), str(reason)


def graph_time(run: Callable[[int], Any], copies: int) -> Timing:
    """Many calls captured in one CUDA graph; each sample is one replay divided by them.

    Results are kept until their copy's turn comes again, so that outputs move through memory like inputs do.

    Raises:
        NotCapturable: the call synchronises with the host, or fails under capture.
    """
    _warm_up(run, copies)
    _refuse_host_sync(run)
    calls = max(copies, 10)
    graph, kept = _capture(run, copies, calls)
    rough = min(_replay_us(graph, 3)) / calls
    wanted = min(_MAX_CALLS, int(_GRAPH_US / rough) + 1)
    if wanted > calls:
        del graph, kept
        calls = -(-wanted // copies) * copies
        graph, kept = _capture(run, copies, calls)
    repeats = max(7, min(50, int(_BUDGET_US / (rough * calls))))
    timing = Timing.of([us / calls for us in _replay_us(graph, repeats)], "graph")
    del kept
    return timing


def same_calls_time(run: Callable[[], Any], calls: int, device: torch.device) -> Timing:
    """The time of one call that all ranks of a group make together: nothing here depends on a time, which each rank sees otherwise.

    `calls` of them are in a captured graph. On CPU it is the time of the wall.

    Raises:
        NotCapturable: the call fails under capture.
    """
    if device.type != "cuda":
        run()
        return Timing.of([_wall_us(run) for _ in range(3)], "wall")
    _warm_up(lambda _: run(), 1)
    graph, kept = _capture(lambda _: run(), 1, calls, mode="thread_local")  # other threads poll for exchanges that are done
    timing = Timing.of([us / calls for us in _replay_us(graph, 7)], "graph")
    del kept
    return timing


def _warm_up(run: Callable[[int], Any], copies: int) -> None:
    """On a side stream, as a capture wants it: compiles kernels and loads libraries for every copy."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(max(copies, 3)):
            run(i % copies)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _refuse_host_sync(run: Callable[[int], Any]) -> None:
    """Find a call that synchronises before it is captured: a capture that fails half-way is best avoided."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces once that this mode does not find every synchronisation
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(0)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise NotCapturable("host sync: no graph, timed eagerly") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def _capture(run: Callable[[int], Any], copies: int, calls: int, mode: str = "global") -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    kept: list[Any] = [None] * copies
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            for i in range(calls):
                kept[i % copies] = run(i % copies)
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise NotCapturable(f"capture failed ({str(error).splitlines()[0]}), timed eagerly") from error
    return graph, kept


def _replay_us(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Replays stand back to back in the stream, so that no launch from the host lies between two events; the first is dropped."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in pairwise(events[1:])]


def _event_time(run: Callable[[int], Any], copies: int) -> Timing:
    """Eager calls between two events; includes what the device waits for the host."""
    samples = []
    for repeat in range(22):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(repeat % copies)
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1000)
    return Timing.of(samples[2:], "events")


# --- host time --------------------------------------------------------------------------------------------------------------------


def host_time(run: Callable[[int], Any], copies: int, synchronize: Callable[[], None], calls: int = 1000) -> Timing:
    """What one eager call costs the host. Each sample is a batch of calls into a drained queue, divided by them."""
    batches = max(3, calls // _HOST_BATCH)
    for i in range(_HOST_BATCH):
        run(i % copies)
    samples = []
    with _no_collection():
        for _ in range(batches):
            synchronize()
            start = time.perf_counter()
            for i in range(_HOST_BATCH):
                run(i % copies)
            samples.append((time.perf_counter() - start) * 1e6 / _HOST_BATCH)
    synchronize()
    return Timing.of(samples, "host")


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _wall_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


# --- roofline ---------------------------------------------------------------------------------------------------------------------

_ONE_SIDED = 0.1
"""A call whose reads (writes) are at most this share of its bytes is held against the write (read) bandwidth."""


@dataclass(frozen=True)
class Roofline:
    """What this device reached in this run: GB/s for reading, writing and copying (read + written), TFLOP/s for a bf16 matmul."""

    read: float
    write: float
    copy: float
    matmul: float

    def bandwidth(self, cost: Cost) -> float:
        """GB/s that the mix of reads and writes of `cost` could reach."""
        total = cost.read + cost.written
        if cost.read <= _ONE_SIDED * total:
            return self.write
        return self.read if cost.written <= _ONE_SIDED * total else self.copy

    def bytes_us(self, cost: Cost) -> float:
        """Microseconds that the bytes of `cost` take at least."""
        return (cost.read + cost.written) / self.bandwidth(cost) / 1e3

    def flops_us(self, cost: Cost) -> float:
        """Microseconds that the floating-point operations of `cost` take at least."""
        return cost.flops / self.matmul / 1e6

    def floor_us(self, cost: Cost) -> float:
        """The least time of a call: nobody is faster than its bytes or its flops."""
        return max(self.bytes_us(cost), self.flops_us(cost))


def measure_roofline(device: torch.device, gib: float = 2.0, matmul: int = 8192) -> Roofline:
    """The best that torch's own kernels reach on buffers far beyond any cache, on random data (zeros need less power)."""
    elements = int(gib * 2**30 / 4)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    size = elements * 4
    left, right = (torch.randn(matmul, matmul, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def best_us(*calls: Callable[[], Tensor]) -> float:
        return min(device_time(lambda i, call=call: call(), 1, device)[0].p50 for call in calls)

    return Roofline(
        read=size / best_us(source.sum, source.amax) / 1e3,
        write=size / best_us(lambda: target.fill_(1.5), target.zero_) / 1e3,
        copy=2 * size / best_us(lambda: target.copy_(source), lambda: torch.mul(source, 1.5, out=target)) / 1e3,
        matmul=2 * matmul**3 / best_us(lambda: torch.mm(left, right, out=product)) / 1e6,
    )
