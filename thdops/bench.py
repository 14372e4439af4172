"""`python -m thdops bench [op ...]`: every op that offers a bench, beside what people write without it, in one run.

A row is one bench by one provider: the op, the baseline in eager mode, the baseline under `torch.compile`. An op's number counts
only if its result is right: it is held against the baseline's on the same inputs first, and where they differ the word WRONG
stands in place of every speed-up and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thdops._version import __version__
from thdops.doctor import driver, version
from thdops.progress import progress
from thdops.registry import Bench, Cost, OpSpec, Registry
from thdops.timing import Roofline, device_time, host_time, measure_roofline

__all__ = ["Row", "add_arguments", "main"]

_RANKS = "context_parallel"
_SHARED_BYTES = 64 * 1024
"""Tensors up to this size (cu_seqlens, counts, biases) are not copied: every kernel of a training step reads them."""
_L2_MULTIPLE = 4
_MAX_COPIES = 32
_HOST_BUDGET_US = 3e6
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_RELATIVE_FP8 = 0.15


@dataclass(frozen=True)
class Row:
    """One bench by one provider. Times in microseconds a call; None where there is no number, and `note` says why."""

    op: str
    bench: str
    provider: str
    us: float | None = None
    spread: float | None = None
    how: str = ""
    rate: float | None = None
    unit: str = ""
    roofline: float | None = None
    """The floor's share of the time: 1 is a call that no kernel on this device could beat."""
    floor_us: float | None = None
    above_floor_us: float | None = None
    host_us: float | None = None
    speedup: float | None = None
    """The op's, over this provider, on the device."""
    host_speedup: float | None = None
    copies: int = 1
    note: str = ""
    failed: bool = False


# --- arguments that can be copied -------------------------------------------------------------------------------------------------


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from tensors(leaf)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def clone_arguments(args: tuple[Any, ...], share_up_to: int = -1) -> tuple[Any, ...]:
    """The same arguments in fresh memory: equal values and strides, and views of one buffer are again views of one buffer.

    Storages of at most `share_up_to` bytes are shared, not copied.
    """
    fresh: dict[int, torch.UntypedStorage] = {}

    def copy(tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(copy, tree))
        if not isinstance(tree, Tensor) or tree.untyped_storage().nbytes() <= share_up_to:
            return tree
        old = tree.untyped_storage()
        if old.data_ptr() not in fresh:
            fresh[old.data_ptr()] = old.clone()
        new = torch.empty(0, dtype=tree.dtype, device=tree.device)
        new.set_(fresh[old.data_ptr()], tree.storage_offset(), tree.size(), tree.stride())
        return new.requires_grad_(tree.requires_grad)

    return tuple(map(copy, args))


def copies_wanted(args: tuple[Any, ...], cost: Cost, l2_bytes: int, free_bytes: int) -> int:
    """How many copies of the arguments a graph rotates over, so that none is still in the L2 cache when its turn comes again."""
    held = sum(s.nbytes() for s in _storages(tensors(args)).values() if s.nbytes() > _SHARED_BYTES)
    if held == 0:
        return 1
    touched = max(1.0, min(cost.read + cost.written, 2.0 * held))
    wanted = int(_L2_MULTIPLE * l2_bytes / touched) + 1
    # A quarter of the memory for inputs leaves room for as many outputs and for what a baseline allocates.
    return max(1, min(wanted, _MAX_COPIES, int(free_bytes / 4 / held)))


# --- right or wrong ---------------------------------------------------------------------------------------------------------------


def call_results(function: Callable[..., Any], args: tuple[Any, ...], written: Sequence[int]) -> list[Tensor]:
    """What a call returned, or, if it returned nothing, what it wrote to: the arguments at the positions `written`."""
    returned = function(*args)
    results = list(tensors(returned)) if returned is not None else list(tensors([args[i] for i in written]))
    return [r.detach() for r in results]


def difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """ "" if the results agree, else where they do not. A baseline may leave out trailing results.

    Integers and bools must be equal. Floats are compared in fp32: the error may be the coarser dtype's tolerance times
    (|expected| + the root mean square of what is expected). NaN is never right, an infinity only where both have it.
    """
    if not expected or len(got) < len(expected):
        return f"{len(got)} results against the baseline's {len(expected)}"
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if ours.shape != theirs.shape:
            return f"result {i}: shape {list(ours.shape)} against {list(theirs.shape)}"
        if ours.numel() == 0:
            continue
        if not (ours.is_floating_point() and theirs.is_floating_point()):
            unequal = int((ours != theirs).sum())
            if unequal:
                return f"result {i}: {unequal} of {ours.numel()} elements differ"
            continue
        tolerance = max(_RELATIVE.get(t.dtype, _RELATIVE_FP8) for t in (ours, theirs))
        a, b = ours.float(), theirs.float()
        same = a == b  # equal infinities included
        finite = b.isfinite()
        scale = torch.where(finite, b, 0).square().mean().sqrt()
        wrong = ~same & ~((a - b).abs() <= tolerance * (b.abs() + scale) * finite)
        if bool(wrong.any()):
            worst = float(torch.where(wrong, (a - b).abs(), 0).max())
            share = float(wrong.float().mean())
            return f"result {i}: error up to {worst:.3g}, {share:.2%} of elements beyond {tolerance:g} relative"
    return ""


# --- one bench --------------------------------------------------------------------------------------------------------------------


def run_bench(
    registry: Registry, spec: OpSpec, bench: Bench, device: torch.device, roofline: Roofline | None, compiled_too: bool = True
) -> Iterator[Row]:
    """The rows of one bench: the op and the baseline, each eager and, with `compiled_too`, compiled. `roofline` is None on CPU."""
    op = getattr(getattr(torch.ops, registry.namespace), spec.name)
    written = [i for i, a in enumerate(registry.schema(spec.name).arguments) if a.name in spec.mutates]
    args = bench.make()
    cost = spec.cost(*args)
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "eager"
    compiled = torch.compile(bench.baseline, dynamic=False, backend=backend)
    compiled_op = torch.compile(lambda *given: op(*given), dynamic=False, fullgraph=True, backend=backend)

    # All comparisons come before any timing: a timed op that mutates does so many times, on the very arguments.
    ours = call_results(op, clone_arguments(args), written)
    wrong = difference(ours, call_results(bench.baseline, clone_arguments(args), written))
    if wrong:
        yield Row(spec.name, bench.name, "thdops", note=f"WRONG: {wrong}", failed=True)
        return
    compiled_failure = compiled_wrong = ""
    try:
        if compiled_too:
            compiled_wrong = difference(ours, call_results(compiled, clone_arguments(args), written))
    except Exception as error:  # a baseline that does not compile is no failure of ours, but the table must say it
        compiled_failure = f"does not compile: {first_line(error)}"
    del ours

    copies = 2
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = copies_wanted(args, cost, l2_bytes, torch.cuda.mem_get_info(device)[0])
    rotation = [args, *(clone_arguments(args, _SHARED_BYTES) for _ in range(copies - 1))]

    def time(provider: str, function: Callable[..., Any], against: Row | None = None) -> Row:
        return _timed(Row(spec.name, bench.name, provider, copies=copies), function, rotation, cost, device, roofline, against)

    row = time("thdops", op)
    yield row
    if compiled_too:
        yield time("op compiled", compiled_op)
    yield time("eager", bench.baseline, row)
    if not compiled_too:
        return
    if compiled_failure:
        yield Row(spec.name, bench.name, "compiled", note=compiled_failure)
    elif compiled_wrong:
        yield Row(spec.name, bench.name, "compiled", note=f"WRONG: {compiled_wrong}", failed=True)
    else:
        yield time("compiled", compiled, row)


def _timed(
    row: Row,
    function: Callable[..., Any],
    rotation: Sequence[tuple[Any, ...]],
    cost: Cost,
    device: torch.device,
    roofline: Roofline | None,
    against: Row | None,
) -> Row:
    def run(i: int) -> Any:
        return function(*rotation[i])

    on_device, note = device_time(run, len(rotation), device)
    host_us = None
    if device.type == "cuda":
        calls = max(60, min(1000, int(_HOST_BUDGET_US / on_device.p50)))
        host_us = host_time(run, len(rotation), torch.cuda.synchronize, calls).p50
    values: dict[str, Any] = asdict(row) | {
        "us": on_device.p50,
        "spread": on_device.spread,
        "how": on_device.how,
        "host_us": host_us,
        "note": note,
    }
    bytes_moved = cost.read + cost.written
    flops_bound = roofline is not None and roofline.flops_us(cost) > roofline.bytes_us(cost)
    if flops_bound:
        values |= {"rate": cost.flops / on_device.p50 / 1e6, "unit": "TFLOP/s"}
    elif bytes_moved:
        values |= {"rate": bytes_moved / on_device.p50 / 1e3, "unit": "GB/s"}
    if roofline is not None:
        floor = roofline.floor_us(cost)
        values |= {"roofline": floor / on_device.p50, "floor_us": floor, "above_floor_us": on_device.p50 - floor}
    if against is not None and against.us:
        values["speedup"] = on_device.p50 / against.us
    if against is not None and against.host_us and host_us:
        values["host_speedup"] = host_us / against.host_us
    return Row(**values)


# --- the run ----------------------------------------------------------------------------------------------------------------------


def header(device: torch.device) -> dict[str, str]:
    """The circumstances that a number carries."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"none, CPU ({platform.machine()})",
        "thdops": __version__,
        "torch": torch.__version__,
        "triton": version("triton") or "not installed",
        "cuda": torch.version.cuda or "none",
        "driver": (driver() or "unknown") if device.type == "cuda" else "none",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "command": shlex.join(["python", "-m", "thdops", *sys.argv[1:]]),
    }


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_WIDTHS = {"us": 11, "spread": 8, "rate": 15, "roofline": 10, "+us": 10, "host us": 9, "speed-up": 10}


def _columns() -> str:
    return " " * 13 + "".join(f"{title:>{width}}" for title, width in _WIDTHS.items())


def format_row(row: Row) -> str:
    """One line of the table, below a line that names op and bench; a row without numbers shows its note instead."""
    if row.us is None:
        return f"  {row.provider:<11} {row.note}"
    cells = (
        f"{row.us:.2f}" + ("*" if row.how == "events" else ""),
        f"{row.spread:.1%}",
        f"{row.rate:,.1f} {row.unit}" if row.rate is not None else "-",
        f"{row.roofline:.0%}" if row.roofline is not None else "-",
        f"{row.above_floor_us:.2f}" if row.above_floor_us is not None else "-",
        f"{row.host_us:.1f}" if row.host_us is not None else "-",
        f"{row.speedup:.2f}x" if row.speedup is not None else "",
    )
    line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=True))
    return f"  {row.provider:<11}{line}" + (f"  * {row.note}" if row.note else "")


def _rows(
    registry: Registry, specs: Sequence[OpSpec], device: torch.device, roofline: Roofline | None, match: str, compiled_too: bool
) -> Iterator[Row]:
    """Every row of the benches whose name holds `match`. One that raises is a failed row: a long run must not lose what it has."""
    offered = [(spec, list(spec.benches(device))) for spec in specs]
    with progress(sum(match in bench.name for _, benches in offered for bench in benches)) as at:
        for spec, benches in offered:
            if not benches:
                yield Row(spec.name, "none", "-", note="offers no bench")
            for bench in (bench for bench in benches if match in bench.name):
                at(f"{spec.name}: {bench.name}")
                try:
                    yield from run_bench(registry, spec, bench, device, roofline, compiled_too)
                except Exception as error:
                    yield Row(spec.name, bench.name, "-", note=f"FAILED: {first_line(error)}", failed=True)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                at("", done=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m thdops bench`."""
    ops = f"ops to time; all that offer a bench if none is named; or {_RANKS} alone: attention on all GPUs beside one of them"
    parser.add_argument("ops", nargs="*", metavar="op", help=ops)
    parser.add_argument("--match", default="", metavar="TEXT", help="only benches whose name holds it, such as T=65536")
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled, the baseline and the op: it takes long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write header, roofline and rows there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw bars of times, and times against the roofline, there (needs matplotlib)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run every bench once on CPU: is the result right? Its times say nothing"
    )
    parser.add_argument("--peers", action="store_true", help="beside every installed implementation of the same thing instead")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="with --peers: only these providers")
    parser.add_argument("--write-table", action="store_true", help="with --peers: choose default backends by what was found")


def main(args: argparse.Namespace, registry: Registry | None = None) -> int:
    """Run the benches; 0 if every result was right, 1 if one was wrong or failed, 2 if there is nothing to run."""
    if registry is None:
        import thdops  # noqa: F401  (fills the registry)
        from thdops.namespace import REGISTRY

        registry = REGISTRY
    unknown = [name for name in args.ops if name not in registry and args.ops != [_RANKS]]
    if unknown:
        print(f"bench: no op named {', '.join(unknown)}; known: {', '.join(s.name for s in registry)}", file=sys.stderr)
        return 2
    if (args.only or args.write_table) and not args.peers:
        print("bench: --only and --write-table are options of --peers", file=sys.stderr)
        return 2
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        print("bench: --plot needs matplotlib; install it with: pip install 'thdops[plot]'", file=sys.stderr)
        return 2
    if args.write_table and args.cpu:
        print("bench: --write-table keeps times, and those of --cpu say nothing; leave one of them out", file=sys.stderr)
        return 2
    if not args.cpu and not torch.cuda.is_available():
        print("bench: there is no GPU here, so there is nothing to time; --cpu checks every bench's result on CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if args.cpu else torch.device("cuda", torch.cuda.current_device())
    if args.ops == [_RANKS]:
        return _across_ranks(args, device)
    specs = [registry[name] for name in args.ops] if args.ops else list(registry)
    if args.peers:
        return _against_peers(args, specs, device)

    facts = header(device)
    print("\n".join(f"{name:<9} {value}" for name, value in facts.items()))
    roofline = _roofline(device)
    print(f"{_legend(device, '+us: above the roofline; speed-up: of the op over that row')}\n")
    rows = _shown(_rows(registry, specs, device, roofline, args.match, not args.eager))
    return _finished(args, facts, roofline, rows)


def _legend(device: torch.device, columns: str) -> str:
    """What the times are."""
    if device.type == "cuda":
        return f"us: a call inside a CUDA graph (*: timed eagerly); {columns}"
    return "results are compared on CPU; the times are those of the references and say nothing about the kernels"


def _across_ranks(args: argparse.Namespace, device: torch.device) -> int:
    from torch.cuda import nccl

    from thdops.bench_ranks import rows

    if args.peers or args.plot:
        print(f"bench: --peers and --plot are about ops by themselves; leave them out with {_RANKS}", file=sys.stderr)
        return 2
    facts = header(device)
    facts["gpus"] = str(torch.cuda.device_count() if device.type == "cuda" else 0)
    facts["nccl"] = ".".join(map(str, nccl.version())) if device.type == "cuda" else "none"
    print("\n".join(f"{name:<9} {value}" for name, value in facts.items()))
    if device.type == "cuda":
        print("us: a call inside a CUDA graph, of the slowest rank; speed-up: of the ranks over that row\n")
    else:
        print("results of Gloo ranks are compared on CPU; the times say nothing\n")
    return _finished(args, facts, None, _shown(rows(device.type, args.match)))


def _roofline(device: torch.device) -> Roofline | None:
    """Measured and shown, on a GPU."""
    if device.type != "cuda":
        return None
    roofline = measure_roofline(device)
    torch.cuda.empty_cache()
    print(
        f"roofline  read {roofline.read:.0f} GB/s, write {roofline.write:.0f} GB/s, copy {roofline.copy:.0f} GB/s,"
        f" bf16 matmul {roofline.matmul:.0f} TFLOP/s"
    )
    return roofline


def _against_peers(args: argparse.Namespace, specs: Sequence[OpSpec], device: torch.device) -> int:
    from thdops.bench_peers import Peers

    facts = header(device)
    facts |= {name: version(name) or "not installed" for name in ("flash-attn-4", "nvidia-cudnn-frontend")}
    facts["cudnn"] = str(torch.backends.cudnn.version())
    print("\n".join(f"{name:<22} {value}" for name, value in facts.items()))
    roofline = _roofline(device)
    peers = Peers(device, args.match, args.only, roofline)
    print(f"{_legend(device, 'speed-up: of the first provider over that row')}\n")
    rows = _shown(peers.rows(specs))
    for spec in specs:
        if args.write_table and spec.write_table is not None:
            print(f"\nwrote {spec.write_table(device, peers.outcomes, facts)}")
    return _finished(args, facts, roofline, rows)


def _shown(rows: Iterable[Row]) -> list[Row]:
    """Print rows as they come."""
    print(_columns())
    shown: list[Row] = []
    for row in rows:
        if not shown or (shown[-1].op, shown[-1].bench) != (row.op, row.bench):
            print(f"{row.op}: {row.bench}")
        print(format_row(row), flush=True)
        shown.append(row)
    return shown


def _finished(args: argparse.Namespace, facts: Mapping[str, str], roofline: Roofline | None, rows: Sequence[Row]) -> int:
    """Write what was asked for and settle the exit status."""
    if not rows:
        wanted = f" with {args.match!r} in its name; leave out --match to see them" if args.match else ""
        print(f"bench: these ops have nothing to time{wanted}", file=sys.stderr)
        return 2
    if args.json:
        try:
            _write_json(args.json, facts, roofline, rows)
        except OSError as error:
            print(f"bench: --json {args.json} cannot be written: {error}", file=sys.stderr)
            return 2
    if args.plot:
        from thdops.bench_plot import draw

        try:
            draw(args.plot, rows, facts)
        except (OSError, ValueError) as error:  # ValueError: no picture has that suffix
            print(f"bench: --plot {args.plot} cannot be written: {error}", file=sys.stderr)
            return 2
    failed = sum(row.failed for row in rows)
    if failed:
        print(f"\n{failed} of {len(rows)} rows wrong or failed", file=sys.stderr)
    return 1 if failed else 0


def _write_json(path: Path, facts: Mapping[str, str], roofline: Roofline | None, rows: Sequence[Row]) -> None:
    document = {"header": dict(facts), "roofline": asdict(roofline) if roofline else None, "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
