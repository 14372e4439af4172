"""`python -m thdops bench context_parallel`: attention whose rows are shared out among GPUs, beside one GPU that has them all.

It starts a process for each GPU (with `--cpu` two, on Gloo, at sizes that only exercise the machinery). For each shape, direction
and comm, once the ranks' results were held against one GPU's:

    W ranks     the op: steps and exchanges, as users get them
    one GPU     attention over the whole batch, without ranks
    steps       what a rank computes, with everything that comes from others at hand
    exchanges   what a rank exchanges, one exchange after the other, with nothing to compute

Of the exchanges, the share (steps + exchanges - W ranks) / exchanges is hidden: all where they cost nothing, none where times add
up, less than none where they slow the steps down. It is told where the exchanges are more than noise. A time is the slowest rank's.

W ranks, T rows of the whole batch, n = T / W rows of a rank, H heads, D head dim.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from meta_kernels.context_attention import Call, GradCall
from thdops.bench import Row, difference
from thdops.context_parallel import partition_indices, run
from thdops.context_parallel.communicator import Wait, answered, drive
from thdops.context_parallel.samples import context_attention_cost, context_attention_grad_cost, on_one_device
from thdops.ops.layouts import prefix_sums
from thdops.timing import Timing, same_calls_time

__all__ = ["Shape", "hidden", "rows", "rows_of_rank"]

OP = "context_attention"
_COMMS = ("p2p", "all_gather", "a2a")
_LITTLE = 0.05
_TIMEOUT = datetime.timedelta(minutes=3)


@dataclass(frozen=True)
class Shape:
    """Sequences of one length. `calls` is how many a captured graph holds, for every rank the same."""

    sequences: int
    length: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    calls: int = 1

    def __str__(self) -> str:
        return f"{self.sequences} x {self.length}, {self.heads[0]}/{self.heads[1]} heads, D {self.dim}, causal"


_SHAPES = {"cuda": (Shape(8, 4096, calls=5), Shape(2, 32_768)), "cpu": (Shape(3, 64, (4, 4), 16),)}


# --- the processes -------------------------------------------------------------------------------------------------------------


def rows(device: str, match: str) -> Iterator[Row]:
    """The rows of every measurement whose name holds `match`, as rank 0 finds them; a failed row where a process failed."""
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = spawn(_run_rank, (ranks, folder, device, match, queue), ranks, join=False, daemon=True)
        ended, failure = False, ""
        while not ended:
            try:
                ended = processes.join(timeout=0.2)
            except Exception as error:
                ended, failure = True, str(error).strip().splitlines()[-1]
            while not queue.empty():
                yield queue.get()
    if failure:
        yield Row(OP, f"{ranks} ranks", "-", note=f"FAILED: {failure}", failed=True)


def _run_rank(rank: int, ranks: int, folder: str, device: str, match: str, queue: Any) -> None:
    how: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        how = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=_TIMEOUT, **how)
    world = dist.group.WORLD
    for row in () if world is None else rows_of_rank(torch.device(device), world, _SHAPES[device], match):
        if rank == 0:
            queue.put(row)
    dist.barrier()
    dist.destroy_process_group()


# --- one rank ------------------------------------------------------------------------------------------------------------------


def rows_of_rank(device: torch.device, group: dist.ProcessGroup, shapes: Sequence[Shape], match: str = "") -> Iterator[Row]:
    """The same rows on every rank of `group`, all of which must ask for them alike."""
    for shape in shapes:
        for direction, make in (("forward", _forward), ("backward", _backward)):
            wanted = [comm for comm in _COMMS if match in f"{shape}, {direction}, {comm}"]
            alone = None
            for comm in wanted:
                work = make(device, group, shape, comm)
                if alone is None:
                    alone = _time(work.alone, shape, device, group)
                yield from _rows_of(f"{shape}, {direction}, {comm}", work, alone, shape, device, group)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


class _Work(NamedTuple):
    """A call by all ranks, and by one."""

    call: Call | GradCall
    alone: Callable[[], Any]
    expected: Callable[[], list[Tensor]]
    """This rank's rows of what one finds alone."""
    flops: float

    def together(self) -> Any:
        op = torch.ops.thdops.context_attention if isinstance(self.call, Call) else torch.ops.thdops.context_attention_grad
        return op(*self.call)


def _forward(device: torch.device, group: dist.ProcessGroup, shape: Shape, comm: str) -> _Work:
    whole, own, indices = _calls(device, group, shape, comm)
    one = on_one_device(whole)

    def expected() -> list[Tensor]:
        out, lse, _ = torch.ops.thdops.attention(*one)
        return [out[indices], lse[:, indices]]

    return _Work(own, lambda: torch.ops.thdops.attention(*one), expected, context_attention_cost(*whole).flops)


def _backward(device: torch.device, group: dist.ProcessGroup, shape: Shape, comm: str) -> _Work:
    whole, own, indices = _calls(device, group, shape, comm)
    one = on_one_device(whole)
    out, lse, _ = torch.ops.thdops.attention(*one)
    grad = torch.randn(out.shape, device=device, dtype=out.dtype, generator=torch.Generator(device).manual_seed(1))
    one_grad = (grad, None, *one[:3], out, lse, *one[3:19])
    own_grad = GradCall(grad[indices], None, *own[:3], out[indices], lse[:, indices].contiguous(), *own[3:17])
    flops = context_attention_grad_cost(grad, None, *whole[:3], out, lse, *whole[3:17]).flops

    def expected() -> list[Tensor]:
        return [x[indices] for x in torch.ops.thdops.attention_grad(*one_grad)[:3]]

    return _Work(own_grad, lambda: torch.ops.thdops.attention_grad(*one_grad), expected, flops)


def _calls(device: torch.device, group: dist.ProcessGroup, shape: Shape, comm: str) -> tuple[Call, Call, Tensor]:
    """(the whole batch's call, this rank's, the rows of this rank)."""
    gpu = device.type == "cuda"
    rows, (heads, kv_heads) = shape.sequences * shape.length, shape.heads
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(rows, h, shape.dim, device=device, dtype=torch.bfloat16 if gpu else torch.float32, generator=generator)
        for h in (heads, kv_heads, kv_heads)
    )
    whole = Call(
        q=q,
        k=k,
        v=v,
        cu_seqlens=prefix_sums([shape.length] * shape.sequences, device),
        cu_seqlens_padded=None,
        sink=None,
        groups=[group.group_name],
        comm=comm,
        partition="zigzag",
        causal=True,
        window_left=-1,
        window_right=-1,
        scale=shape.dim**-0.5,
        softmax="vanilla",
        softcap=0.0,
        deterministic=False,
        backend="native" if gpu else "reference",
        return_max_logit=False,
        total_tokens=rows,
    )
    indices = partition_indices(whole.cu_seqlens, rows, dist.get_world_size(group), dist.get_rank(group))
    q, k, v = (x.index_select(0, indices) for x in (q, k, v))
    return whole, whole._replace(q=q, k=k, v=v), indices


# --- measuring -----------------------------------------------------------------------------------------------------------------


def _rows_of(name: str, work: _Work, alone: Timing, shape: Shape, device: torch.device, group: dist.ProcessGroup) -> Iterator[Row]:
    """Rows about one comm; `alone` is what one GPU takes."""

    def timed(provider: str, timing: Timing, **more: Any) -> Row:
        return Row(OP, name, provider, us=timing.p50, spread=timing.spread, how=timing.how, **more)

    def rate(timing: Timing) -> dict[str, Any]:
        return {"rate": work.flops / timing.p50 / 1e6, "unit": "TFLOP/s"}

    ranks = dist.get_world_size(group)
    provider = f"{ranks} rank{'s' * (ranks > 1)}"
    expected = work.expected()
    wrong = _of_any_rank(difference(work.together()[: len(expected)], expected), group)
    if wrong:
        yield Row(OP, name, provider, note=f"WRONG: {wrong}", failed=True)
        return
    del expected
    tape = _Tape(work.call)
    together, steps = (_time(call, shape, device, group) for call in (work.together, tape.steps))
    exchanges = _time(tape.exchanges, shape, device, group) if tape.answers else None
    note = hidden(together.p50, steps.p50, None if exchanges is None else exchanges.p50)
    yield timed(provider, together, note=note, **rate(together))
    yield timed("one GPU", alone, speedup=alone.p50 / together.p50, **rate(alone))
    yield timed("steps", steps)
    if exchanges is not None:
        yield timed("exchanges", exchanges)


def hidden(together: float, steps: float, exchanges: float | None) -> str:
    """What to say of the exchanges. A share of next to nothing would be that of the other two times' noise."""
    if exchanges is None or exchanges < _LITTLE * together:
        return f"exchanges are under {_LITTLE:.0%} of it"
    if steps > (1 + _LITTLE) * together:
        return "times are too noisy to tell what is hidden"
    if together > steps + exchanges:
        return "longer than steps and exchanges one after the other"
    return f"{min(1, (steps + exchanges - together) / exchanges):.0%} of the exchanges hidden"


def _time(call: Callable[[], Any], shape: Shape, device: torch.device, group: dist.ProcessGroup) -> Timing:
    """The slowest rank's."""
    own = same_calls_time(call, shape.calls, device)
    slowest = torch.tensor([own.p20, own.p50, own.p80], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    p20, p50, p80 = slowest.tolist()
    return Timing(p20, p50, p80, own.how)


def _of_any_rank(text: str, group: dist.ProcessGroup) -> str:
    """The first rank's text that is not empty: ranks must go on alike."""
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return next((f"{found} (rank {rank})" for rank, found in enumerate(texts) if found), "")


class _Tape:
    """What a rank's pass asked of the others and was answered: to take its steps without them, and them without its steps."""

    def __init__(self, call: Call | GradCall) -> None:
        self.call = call
        self.answers: list[tuple[Any, Any]] = []
        algorithm, self.groups = run.of_this_rank(OP, call, run.room_for(call))

        def answer(request: Any) -> Any:
            self.answers.append((request, answered(request, self.groups)))
            return self.answers[-1][1]

        drive(algorithm, answer)

    def steps(self) -> tuple[Tensor, ...]:
        results = run.room_for(self.call)
        algorithm, _ = run.of_this_rank(OP, self.call, results)
        recorded = iter(self.answers)
        result = drive(algorithm, lambda request: next(recorded)[1])
        return (run.attended if isinstance(self.call, Call) else run.gradients)(results, [result])

    def exchanges(self) -> None:
        begun: dict[int, Any] = {}
        for request, answer in self.answers:
            again = Wait(begun[id(request.pending)]) if isinstance(request, Wait) else request
            begun[id(answer)] = answered(again, self.groups)
