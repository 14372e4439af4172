"""`python -m thdops list | check [op ...] | bench [op ...] | demo | doctor`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thdops.progress import progress

if TYPE_CHECKING:
    from thdops.registry import Registry


def main(argv: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    """Run a command; returns the exit status. `registry` is the one to work on, ours by default."""
    parser = argparse.ArgumentParser(prog="python -m thdops", description="Packed variable-length (THD) training ops for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="the ops: schemas, promises, backends")
    listing.add_argument("--json", action="store_true", help="as JSON")

    check = commands.add_parser("check", help="hold ops against everything that they promise, on this machine")
    check.add_argument("ops", nargs="*", metavar="op", help="ops to check; all by default")
    check.add_argument("--json", action="store_true", help="the report as JSON")
    check.add_argument("--device", choices=("cpu", "cuda"), help="where; the GPU if there is one")
    check.add_argument("--times", action="store_true", help="seconds spent per check")

    bench = commands.add_parser("bench", help="time ops against what people write without them")
    demo = commands.add_parser("demo", help="every installed attention on one batch with NaN in its padding, in under a minute")
    doctor = commands.add_parser("doctor", help="what this machine has, and what is known not to work together")

    words = sys.argv[1:] if argv is None else list(argv)
    for name, its_parser in (("bench", bench), ("demo", demo), ("doctor", doctor)):
        if words[:1] == [name]:  # these bring their own arguments, and more imports than the rest
            module = importlib.import_module(f"thdops.{name}")
            module.add_arguments(its_parser)
            return module.main(parser.parse_args(words))
    arguments = parser.parse_args(words)
    if arguments.command == "list":
        return _list(registry or _ours(), arguments)
    return _check(arguments, registry)


def _ours() -> Registry:
    import thdops  # noqa: F401  (importing it registers every op)
    from thdops.namespace import REGISTRY

    return REGISTRY


def _list(registry: Registry, arguments: argparse.Namespace) -> int:
    from thdops.conformance import render

    if arguments.json:
        print(json.dumps([render.as_record(spec) for spec in registry], indent=2))
    else:
        render.show(render.list_tables(registry))
    return 0


def _check(arguments: argparse.Namespace, registry: Registry | None) -> int:
    import torch

    if arguments.device == "cpu" or not torch.cuda.is_available():
        # Kernels are interpreted on CPU, and Triton decides that when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    registry = registry or _ours()
    from thdops.conformance import CHECKS, render, run

    names = arguments.ops or [spec.name for spec in registry]
    unknown = [name for name in names if name not in registry]
    if unknown:
        print(f"no op named {', '.join(unknown)}; there are: {', '.join(s.name for s in registry)}", file=sys.stderr)
        return 2
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU; leave it out to check what a CPU can tell", file=sys.stderr)
        return 2
    with progress(len(names) * len(CHECKS)) as at:
        report = run(registry, names, arguments.device, lambda op, check, outcome: at(f"{op}: {check}", done=1))
    if arguments.json:
        fields = {"namespace": report.namespace, "device": report.device, "ok": report.ok}
        print(json.dumps({**fields, "ops": report.rows, "seconds": report.seconds}, indent=2))
    else:
        tables = render.check_tables(report)
        if arguments.times:
            slowest = sorted(report.seconds.items(), key=lambda item: -item[1])
            tables.insert(-1, render.Table("Seconds", ("check", "seconds"), [[name, f"{s:7.1f}"] for name, s in slowest]))
        render.show(tables)
    return 0 if report.ok else 1


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as `| head` has; a second flush at the exit would say so again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
