"""`python -m thdops demo`: in under a minute, what padding, compilation and CUDA graphs do to every attention that is installed.

T rows, B sequences (an empty one among them), H heads, D head dim. One batch has NaN on every padding row, in q, k, v and in the
gradient that arrives. Then the load-balancing loss of a router, whose token count changes between replays. The exit status is 1 if
something that thdops promises does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import thdops
from thdops.bench import first_line, header
from thdops.conformance.render import Table, show
from thdops.demo_attention import Attention, installed
from thdops.progress import progress
from thdops.timing import device_time

__all__ = ["Cell", "Row", "add_arguments", "main"]

_SECONDS = 50.0
"""After so long nothing is waited for that torch compiles. What is left of a minute is for what follows a compilation."""
_BATCHES = 20
_WARM_UPS = 3
_NOT_OURS = "number"  # of the loss's columns: what a count as a Python number gives
_SEQUENCES = 9
_RESULTS = ("out", "dQ", "dK", "dV", "LSE")
_TIMES = {"us full": 0.0, "us half": 0.5}
COLUMNS = (*_RESULTS, "valid rows", "compiles", "syncs", "same graph", *_TIMES)
_LEGEND = f"""\
out dQ dK dV LSE: are padding rows exactly zero (LSE: -inf)?   valid rows: finite, and right against fp64?
compiles: for {_BATCHES} layouts   syncs: of one forward and backward   same graph: right on layouts that it was not made with
us: one forward, microseconds, with no row empty and with half of them (*: timed outside of a graph)
-: not offered   n/a: for a GPU to show   late: its compilation did not end in time"""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Cell:
    """What was found, and whether that is as it should be; None where it is neither."""

    text: str
    good: bool | None = None

    @property
    def drawn(self) -> tuple[str, str]:
        """Text and style for a table."""
        return self.text, {True: "green", False: "bold red", None: "dim"}[self.good]


@dataclass
class Row:
    """One attention, or one token count: `cells` by column."""

    name: str
    ours: bool
    cells: dict[str, Cell] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """No promise of ours is broken here."""
        return not self.ours or all(cell.good is not False for name, cell in self.cells.items() if not name.startswith(_NOT_OURS))


# --- a batch ----------------------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    rows: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


class Layout(NamedTuple):
    """Where sequences stand, for the host and on the device."""

    lengths: list[int]
    starts: list[int]
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor

    @property
    def metadata(self) -> tuple[Tensor, Tensor]:
        return self.cu_seqlens, self.cu_seqlens_padded

    def padding(self, rows: int) -> Tensor:
        return thdops.padding_mask(*self.metadata, rows)


def sizes_for(device: torch.device) -> Sizes:
    if device.type == "cuda":
        return Sizes(4096, 8, 128, torch.bfloat16, device)
    return Sizes(256, 2, 32, torch.float32, device)


def layout(sizes: Sizes, empty: float, seed: int) -> Layout:
    """Sequences of random lengths, the middle one without a row; `empty` of all rows are gaps and tail."""
    chance = random.Random(seed)
    valid = round(sizes.rows * (1 - empty))

    def split(total: int, pieces: int) -> list[int]:
        cuts = sorted(chance.randrange(total + 1) for _ in range(pieces - 1))
        return [stop - start for start, stop in pairwise([0, *cuts, total])]

    lengths = split(valid, _SEQUENCES - 1)
    lengths.insert(_SEQUENCES // 2, 0)
    gaps = split(sizes.rows - valid, _SEQUENCES + 1)  # the last is the tail
    ends = [0, *accumulate(lengths)]
    starts = [0, *accumulate(length + gap for length, gap in zip(lengths, gaps, strict=False))]
    valid_ends, padded = (torch.tensor(offsets, dtype=torch.int32, device=sizes.device) for offsets in (ends, starts))
    return Layout(lengths, starts[:-1], valid_ends, padded)


def _random(sizes: Sizes) -> list[Tensor]:
    """q, k, v and a gradient of out."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    shape = (sizes.rows, sizes.heads, sizes.dim)
    return [torch.randn(shape, generator=generator, device=sizes.device, dtype=sizes.dtype) for _ in range(4)]


def _filled(tensors: Sequence[Tensor], padding: Tensor, value: float) -> list[Tensor]:
    """Copies with `value` on padding rows."""
    return [torch.where(padding[:, None, None], value, x) for x in tensors]


def _call(attention: Attention, where: Layout, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The results that it has, by name, rows first."""
    q, k, v = (x.detach().requires_grad_(attention.gradients) for x in (q, k, v))
    out, lse = attention.run(q, k, v, *where.metadata)
    found = {"out": out.detach()}
    if attention.gradients:
        found |= zip(("dQ", "dK", "dV"), torch.autograd.grad(out, (q, k, v), grad), strict=True)
    return found if lse is None else {**found, "LSE": lse.detach().t()}


def _expected(where: Layout, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The same in fp64, sequence by sequence; zeros on padding rows."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2])
    outs, lses = [out.detach()], [lse]
    for start, length in zip(where.starts, where.lengths, strict=True):
        rows = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[rows]) / math.sqrt(q.shape[2])
        scores = scores.masked_fill(scores.new_ones(length, length).triu(1).bool(), -math.inf)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[rows]))
        lses.append(scores.logsumexp(-1).t())
    place = torch.cat([torch.arange(s, s + n, device=q.device) for s, n in zip(where.starts, where.lengths, strict=True)])
    out = outs[0].index_copy(0, place, torch.cat(outs[1:]))
    lse = lses[0].index_copy(0, place, torch.cat(lses[1:]))
    found = {
        "out": out,
        **dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(out, (q, k, v), grad.double()), strict=True)),
        "LSE": lse,
    }
    return {name: result.detach() for name, result in found.items()}


# --- what is asked of an attention ------------------------------------------------------------------------------------------------


def examine(attention: Attention, sizes: Sizes, seconds: float = math.inf) -> Row:
    """Every column. What raises is an answer too; so is a compilation that takes longer than `seconds`."""
    row = Row(attention.name, attention.ours)
    tensors = _random(sizes)
    # One that torch compiles keeps one setting from its first call to its last: in any other it would compile again.
    fresh_memory_is_nan = _used_memory_is_nan(tensors) if attention.compiled else _deterministic_memory_is_nan()
    for columns, ask, setting in (
        (("compiles", "same graph"), _compiles, nullcontext()),
        ((*_RESULTS, "valid rows"), _padding, fresh_memory_is_nan),
        (("syncs",), _syncs, nullcontext()),
        (("same graph",), _graph, nullcontext()),
        (tuple(_TIMES), _times, nullcontext()),
    ):
        compiles_now = attention.compiled and ask is _padding
        try:
            with warnings.catch_warnings(), setting, _patience(seconds) if compiles_now else nullcontext():
                warnings.simplefilter("ignore")
                row.cells |= ask(attention, sizes, tensors)
        except Exception as error:
            if compiles_now:  # once is enough: each further question would compile again
                columns = [column for column in COLUMNS if column not in row.cells]
            row.cells |= dict.fromkeys(columns, Cell("raises", False))
            row.notes.append(f"{attention.name}, {', '.join(columns)}: {first_line(error)}")
            if compiles_now:
                break
        except _OutOfTime:
            row.cells = dict.fromkeys(COLUMNS, Cell("late")) | row.cells
            row.notes.append(f"{attention.name}: not compiled within {seconds:.0f} s")
            break
    return row


class _OutOfTime(BaseException):
    """No `Exception`: a compiler would catch it, and fall back or report a fault of its own."""


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` inside after so long. Signals reach the main thread alone, so elsewhere there is no limit."""
    if seconds == math.inf or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would switch it off
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _deterministic_memory_is_nan() -> Iterator[None]:
    """Every `torch.empty` holds NaN: a row that nobody writes shows, instead of holding zeros by luck."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill


@contextmanager
def _used_memory_is_nan(like: Sequence[Tensor]) -> Iterator[None]:
    """The same for code that Inductor makes, whose buffers the setting above does not reach: what the allocator hands out next is
    what it got back last, which is full of NaN."""
    rows = [torch.full_like(x, math.nan) for x in like for _ in range(4)]
    numbers_of_rows = [torch.full(x.shape[:2], math.nan, device=x.device) for x in like for _ in range(4)]
    del rows, numbers_of_rows
    yield


def _padding(attention: Attention, sizes: Sizes, tensors: list[Tensor]) -> dict[str, Cell]:
    where = layout(sizes, 0.4, seed=0)
    padding = where.padding(sizes.rows)
    found = _call(attention, where, *_filled(tensors, padding, math.nan))
    cells = {name: _padding_cell(found[name][padding], name) if name in found else Cell("-") for name in _RESULTS}
    return cells | {"valid rows": _valid_cell(found, _expected(where, *_filled(tensors, padding, 0)), padding)}


def _padding_cell(rows: Tensor, name: str) -> Cell:
    exact = bool((rows == -math.inf).all()) if name == "LSE" else not bool((rows != 0).any() or rows.signbit().any())
    return Cell("ok", True) if exact else Cell("NaN" if bool(rows.isnan().any()) else "other", False)


def _valid_cell(found: dict[str, Tensor], expected: dict[str, Tensor], padding: Tensor) -> Cell:
    infinite, wrong = [], []
    for name, result in found.items():
        got, want = result[~padding].double(), expected[name][~padding]
        if not bool(got.isfinite().all()):
            infinite.append(name)
        elif float((got - want).norm()) > _TOLERANCE[found["out"].dtype] * float(want.norm()):
            wrong.append(name)
    if infinite or wrong:
        return Cell(f"NaN: {' '.join(infinite)}" if infinite else f"wrong: {' '.join(wrong)}", False)
    return Cell("ok", True)


def _compiles(attention: Attention, sizes: Sizes, tensors: list[Tensor]) -> dict[str, Cell]:
    """Counted only, so no code is generated. Padding is zero here: the question is whether one program follows the layout."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention.function, backend=counter)
    right = Cell("ok", True)
    for number in range(_BATCHES):
        where = layout(sizes, 0.1 + 0.8 * number / _BATCHES, seed=number)
        padding = where.padding(sizes.rows)
        q, k, v, grad = _filled(tensors, padding, 0)
        out, _ = compiled(q, k, v, *where.metadata)
        if right.good and number in (1, _BATCHES - 1):
            right = _valid_cell({"out": out}, _expected(where, q, k, v, grad), padding)
    torch._dynamo.reset()
    cells = {"compiles": Cell(str(counter.frame_count), counter.frame_count == 1)}
    return cells if sizes.device.type == "cuda" else cells | {"same graph": Cell(f"{right.text} (compiled)", right.good)}


def _syncs(attention: Attention, sizes: Sizes, tensors: list[Tensor]) -> dict[str, Cell]:
    if sizes.device.type != "cuda":
        return {"syncs": Cell("n/a")}
    where = layout(sizes, 0.4, seed=0)
    _call(attention, where, *tensors)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _call(attention, where, *tensors)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    count = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return {"syncs": Cell(str(count), count == 0)}


def _graph(attention: Attention, sizes: Sizes, tensors: list[Tensor]) -> dict[str, Cell]:
    """Forward and backward captured once, replayed on other layouts. Padding is zero, as in `_compiles`."""
    if sizes.device.type != "cuda":
        return {}
    static_layout = layout(sizes, 0.4, seed=0)
    static = [x.clone() for x in tensors]
    graph, found = _captured(lambda: _call(attention, static_layout, *static))
    cell = Cell("ok", True)
    for number, empty in enumerate((0.2, 0.5, 0.8, 0.0)):
        where = layout(sizes, empty, seed=number + 1)
        padding = where.padding(sizes.rows)
        contents = _filled(tensors, padding, 0)
        for here, new in zip((*static, *static_layout.metadata), (*contents, *where.metadata), strict=True):
            here.copy_(new)
        graph.replay()
        if cell.good:
            cell = _valid_cell(found, _expected(where, *contents), padding)
    return {"same graph": cell}


def _captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call, and the call's results, which a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def _times(attention: Attention, sizes: Sizes, tensors: list[Tensor]) -> dict[str, Cell]:
    cells = {}
    for column, empty in _TIMES.items():
        where = layout(sizes, empty, seed=0)
        q, k, v, _ = _filled(tensors, where.padding(sizes.rows), 0)
        for x in (q, k, v):
            x.requires_grad_(attention.gradients)  # as in training, and as where it was compiled
        given = (q, k, v, *where.metadata)
        taken, _ = device_time(lambda _, given=given: attention.run(*given), 1 if q.is_cuda else 5, sizes.device)
        cells[column] = Cell(f"{taken.p50:.0f}" + "*" * (taken.how == "events"))
    return cells


# --- the load-balancing loss ------------------------------------------------------------------------------------------------------

_COUNTS = (96, 57, 1, 0, 96)
_EXPERTS, _TOPK, _COEFF = 8, 2, 0.01
_MADE = "programs"


def aux_loss(device: torch.device) -> list[Row]:
    """A row per count: the loss by a program that has the count on the device, and by one that has it as a Python number.

    A program is a captured graph, or a compiled function on CPU, whose compilations are counted. Good is what equals fp64, loss and
    gradient, without another compilation.
    """
    probs = torch.randn(96, _EXPERTS, generator=torch.Generator().manual_seed(0)).softmax(1).to(device).requires_grad_()
    chosen = torch.arange(_EXPERTS, device=device) * 3
    count = torch.tensor(_COUNTS[0], device=device)

    def loss(probs: Tensor, number: int | Tensor) -> Tensor:
        return thdops.moe_aux_loss(probs, chosen, number, num_experts=_EXPERTS, topk=_TOPK, coeff=_COEFF)

    program = _Graph if device.type == "cuda" else _Compiled
    found: dict[str, list[list[Tensor]]] = {}
    made: dict[str, int] = {}
    for name, given in {"device": count.fill_, "number": int}.items():
        torch._dynamo.reset()
        run = program(loss, probs, given(_COUNTS[0]))
        found[name] = [[result.clone() for result in run(given(number))] for number in _COUNTS]
        made[name] = run.made
    rows = []
    for i, number in enumerate(_COUNTS):
        expected = _loss_and_gradient(number, probs.detach().double(), chosen.double())
        row = Row(f"N = {number}", True, {"fp64": Cell(f"{float(expected[0]):.6g}")})
        for name, results in found.items():
            equal = all(torch.allclose(r.double(), e, rtol=1e-5, atol=0) for r, e in zip(results[i], expected, strict=True))
            row.cells[name] = Cell(f"{float(results[i][0]):.6g}", equal)
            row.cells[f"{name} {_MADE}"] = Cell(str(made[name]), made[name] == 1)
        rows.append(row)
    return rows


def _loss_and_gradient(number: int, probs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    gradient = chosen * (_EXPERTS * _COEFF / _TOPK / number**2 if number else 0.0)
    return (gradient * probs).sum(), gradient.expand(probs.shape)


class _Compiled:
    """A compiled loss with its gradient; `made` counts compilations."""

    def __init__(self, loss: Callable[..., Tensor], probs: Tensor, number: int | Tensor) -> None:
        self.counter = CompileCounterWithBackend("aot_eager")
        self.loss, self.probs = torch.compile(lambda *given: loss(*given), backend=self.counter, fullgraph=True), probs

    def __call__(self, number: int | Tensor) -> tuple[Tensor, Tensor]:
        loss = self.loss(self.probs, number)
        return loss.detach(), torch.autograd.grad(loss, self.probs)[0]

    @property
    def made(self) -> int:
        return self.counter.frame_count


class _Graph:
    """A captured loss with its gradient. A replay asks nobody what the count is now: it reads it, or holds it."""

    made = 1

    def __init__(self, loss: Callable[..., Tensor], probs: Tensor, number: int | Tensor) -> None:
        def run() -> tuple[Tensor, Tensor]:
            found = loss(probs, number)
            return found.detach(), torch.autograd.grad(found, probs)[0]

        self.graph, self.results = _captured(run)

    def __call__(self, number: int | Tensor) -> tuple[Tensor, Tensor]:
        self.graph.replay()
        return self.results


# --- the command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m thdops demo`."""
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--cpu", action="store_true", help="show what a CPU can show, even if there is a GPU")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 if all that thdops promises holds, else 1."""
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the batch is tiny: threads only cost
    sizes = sizes_for(device)
    q, k, v, _ = _random(sizes)
    attentions = list(installed(q, k, v, *layout(sizes, 0.4, seed=0).metadata))
    found: dict[str, Row] = {}
    with progress(len(attentions) + 1) as at:
        at("demo: the load-balancing loss")
        aux = aux_loss(device)
        for attention in sorted(attentions, key=lambda one: one.compiled):  # what may take long comes last, and gets what is left
            at(f"demo: {attention.name}", done=1)
            found[attention.name] = examine(attention, sizes, start + _SECONDS - time.monotonic())
    rows = [found[attention.name] for attention in attentions]
    ok = all(row.held for row in (*rows, *aux))
    facts = header(device)
    if arguments.json:
        tables = {"attention": [asdict(row) for row in rows], "aux_loss": [asdict(row) for row in aux]}
        print(json.dumps({"header": facts, **tables, "ok": ok}, indent=1))
    else:
        show(_tables(sizes, facts, rows, aux, ok))
    return 0 if ok else 1


def _tables(sizes: Sizes, facts: dict[str, str], rows: list[Row], aux: list[Row], ok: bool) -> Iterator[Table | str]:
    shape = f"{sizes.rows} rows, {_SEQUENCES} sequences, {sizes.heads} heads of {sizes.dim}, causal"
    where = f"{facts['gpu']}, torch {facts['torch']}"
    yield _table(f"Attention with NaN in the padding: {shape}; {where}", COLUMNS, rows)
    yield _LEGEND
    yield from (note for row in rows for note in row.notes)
    made = "compiles" if sizes.device.type == "cpu" else "captures"
    header = ("fp64", "N on the device", made, "N as a number", made)
    columns = ("fp64", "device", f"device {_MADE}", "number", f"number {_MADE}")
    yield _table("The load-balancing loss while the token count N changes", columns, aux, header)
    yield "Everything that thdops promises held." if ok else "A promise of thdops did not hold."


def _table(title: str, columns: Sequence[str], rows: Sequence[Row], header: Sequence[str] | None = None) -> Table:
    drawn = [[(row.name, "cyan" if row.ours else ""), *(row.cells[column].drawn for column in columns)] for row in rows]
    return Table(title, ("", *(header or columns)), drawn)
