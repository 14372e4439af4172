"""Showing a registry and a report to a person: with rich where it is installed, as plain text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thdops.conformance.report import Report
from thdops.conformance.table import CHECKS, Check
from thdops.registry import OpSpec, Registry

_WIDTH = 120
_SYMBOLS = {"pass": ("ok", "green"), "FAIL": ("XX", "bold red"), "not run": ("--", "yellow"), "n/a": (" .", "dim")}


@dataclass(frozen=True)
class Table:
    """A table before it is drawn. A cell is its text, or its text and a style of rich."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]


def show(tables: Iterable[Table | str], rich: bool | None = None) -> None:
    """Print tables and paragraphs: drawn by rich on a terminal, plain text where rich is missing or the output goes to a file."""
    if rich if rich is not None else sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _show_rich(tables)
    else:
        print("\n\n".join(item if isinstance(item, str) else plain(item) for item in tables))


def plain(table: Table) -> str:
    """A table as text, columns aligned, no trailing blanks."""
    rows = [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([table.title, "", *lines])


def _show_rich(tables: Iterable[Table | str]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for item in tables:
        if isinstance(item, str):
            console.print(Text(item), soft_wrap=True)
            continue
        drawn = RichTable(title=item.title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
        for name in item.header:
            drawn.add_column(name, overflow="fold")
        for row in item.rows:
            drawn.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
        console.print(drawn)
        console.print()


# --- list ------------------------------------------------------------------------------------------------------------------------


def promises(spec: OpSpec) -> list[str]:
    """What a spec promises, in words."""
    return [
        word
        for word, holds in (
            ("differentiable", spec.backward is not None),
            ("deterministic", spec.deterministic),
            ("graph-safe", spec.graph_safe),
            ("pads zeroed", spec.pads_zeroed),
            (f"mutates {', '.join(spec.mutates)}", bool(spec.mutates)),
        )
        if holds
    ]


def list_tables(registry: Registry) -> list[Table | str]:
    """The ops of a registry: what each is, promises, runs on; then the schemas."""
    summary = [[(s.name, "cyan"), s.summary, ", ".join(promises(s)), ", ".join(s.backends)] for s in registry]
    schemas = [[(s.name, "cyan"), s.schema] for s in registry]
    return [
        Table(f"{len(registry)} ops in torch.ops.{registry.namespace}", ("op", "what it gives", "promises", "backends"), summary),
        Table("Schemas", ("op", "schema"), schemas),
    ]


def as_record(spec: OpSpec) -> dict[str, object]:
    """One op for `list --json`."""
    return {
        "op": spec.name,
        "schema": spec.schema,
        "summary": spec.summary,
        "promises": promises(spec),
        "backends": list(spec.backends),
        "architectures": [f"sm_{a}" for a in spec.architectures],
    }


# --- check -----------------------------------------------------------------------------------------------------------------------


def check_tables(report: Report, checks: Sequence[Check] = CHECKS) -> list[Table | str]:
    """One row per op and one column per check; the checks by number below; then every failure with its reason."""
    names = [c.name for c in checks]
    header = ("op", *(f"{i + 1:2d}" for i in range(len(names))))
    rows = [[(op, "cyan"), *(_SYMBOLS[_outcome(row[name])] for name in names)] for op, row in report.rows.items()]
    legend = [[f"{i + 1:2d}", c.name, c.promise] for i, c in enumerate(checks)]
    tables: list[Table | str] = [
        Table(f"Conformance of {report.namespace} on {report.device}", header, rows),
        Table("ok passes   XX fails   -- not run here   . does not apply", ("", "check", "what holds"), legend),
    ]
    skipped: dict[str, set[str]] = {}
    for _, check, reason in report.not_run:
        skipped.setdefault(reason, set()).add(check)
    for reason, which in skipped.items():
        listed = ", ".join(name for name in names if name in which)
        tables.append(textwrap.fill(f"Not run ({reason}): {listed}", _WIDTH, subsequent_indent="    "))
    for op, check, reason in report.failures:
        tables.append(textwrap.fill(f"FAIL {op}, {check}: {reason}", _WIDTH, subsequent_indent="    "))
    tables.append(_verdict(report))
    return tables


def _outcome(cell: str) -> str:
    return cell.split(":")[0]


def _verdict(report: Report) -> str:
    cells = [_outcome(cell) for row in report.rows.values() for cell in row.values()]
    counts = ", ".join(
        f"{cells.count(kind)} {word}" for kind, word in (("pass", "passed"), ("FAIL", "failed"), ("not run", "not run"))
    )
    return f"{len(report.rows)} ops: {counts}"
