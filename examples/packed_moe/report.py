"""What people see: progress, the table, the picture, the summary. rich and matplotlib are used where they are installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packed_moe.config import Config
from packed_moe.training import METRICS

if TYPE_CHECKING:
    from packed_moe.checks import Check
    from packed_moe.data import Documents
    from packed_moe.loop import Result


class Progress:
    """A bar on a terminal that has rich, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._label = ""
        self._steps = 0
        self._lines_left: list[int] = []

    def start(self, label: str, steps: int, done: int) -> None:
        """Begin a run of `steps`, `done` of them behind it."""
        self._label, self._steps = label, steps
        self._lines_left = [steps * part // 4 for part in (1, 2, 3, 4)]
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task(label, total=steps, completed=done)
        else:
            print(f"{label}: {'resumed behind step ' + str(done) if done else 'started'}, {steps} steps", flush=True)

    def update(self, done: int, loss: float) -> None:
        """`done` steps are behind us, the last with this loss."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._label} loss {loss:.3f}")
        elif self._lines_left and done >= self._lines_left[0]:
            self._lines_left = [line for line in self._lines_left if line > done]
            print(f"{self._label}: step {done}/{self._steps}, loss {loss:.3f}", flush=True)

    def finish(self) -> None:
        """End the run, also one that was interrupted."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def print_header(config: Config, documents: Documents, parameters: int) -> None:
    """One line each on the data, the model and the machine's part in it."""
    print(f"data: {len(documents.texts)} documents from {documents.files} files below {documents.source}")
    precision = "bf16 autocast" if config.autocast else "fp32"
    print(
        f"model: {parameters / 1e6:.2f} M parameters, {config.layers} layers, {config.experts} experts (top {config.topk}),"
        f" {precision} on {config.device}; buffer: {config.max_tokens} rows, {config.max_seqs} sequences, seed {config.seed}"
    )


def print_report(results: Sequence[Result], checks: Sequence[Check], not_run: dict[str, str]) -> None:
    """Two tables: the modes and their speed, the checks and what was seen."""
    rows = [
        (
            result.label,
            f"{result.history[0, 0]:.4f}",
            f"{result.history[-1, 0]:.4f}",
            f"{result.tokens_per_second:,.0f}" if result.tokens_per_second else "-",
            f"{result.padding_share:.1%}",
        )
        for result in results
    ]
    rows += [(mode, "not run: " + reason, "", "", "") for mode, reason in not_run.items()]
    table(("mode", "first loss", "last loss", "tokens/s", "padding"), rows)
    table(
        ("mode", "check", "", "seen"),
        [(check.mode, check.name, "pass" if check.passed else "FAIL", check.detail) for check in checks],
    )


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """To the terminal: with colours where rich is."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*head)
        styles = {"pass": "[green]pass[/green]", "FAIL": "[bold red]FAIL[/bold red]"}
        for row in rows:
            table.add_row(*(styles.get(cell, escape(cell)) for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print()
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_summary(
    path: Path, config: dict[str, Any], results: Sequence[Result], checks: Sequence[Check], not_run: dict[str, str], ok: bool
) -> None:
    """Everything the run found, as JSON. Losses are written so that they read back to the same bits."""
    summary = {
        "ok": ok,
        "config": config,
        "metrics": METRICS,
        "modes": [
            {
                "mode": result.mode,
                "label": result.label,
                "tokens_per_second": result.tokens_per_second,
                "timed_steps": result.timed_steps,
                "padding_share": result.padding_share,
                "resumed_at": result.resumed_at,
                "history": result.history.tolist(),
            }
            for result in results
        ],
        "not_run": not_run,
        "checks": [check._asdict() for check in checks],
        "document_lengths": results[0].lengths if results else [],
    }
    path.write_text(json.dumps(summary, indent=1) + "\n")


def draw_curves(path: Path, results: Sequence[Result]) -> bool:
    """The loss of every mode and the share of valid rows, step by step. False where matplotlib is missing."""
    if not importlib.util.find_spec("matplotlib"):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, filling = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    dashes = ("-", "--", ":")
    for result, dash in zip(results, dashes, strict=False):
        steps = range(1, len(result.history) + 1)
        losses.plot(steps, result.history[:, METRICS.index("cross_entropy")].tolist(), dash, label=result.label)
    losses.set_ylabel("cross-entropy, nats a byte")
    losses.legend()
    shares = [sum(lengths) / results[0].capacity for lengths in results[0].lengths]
    filling.bar(range(1, len(shares) + 1), shares, width=1.0)
    filling.set(ylabel="valid rows", xlabel="step", ylim=(0, 1))
    figure.savefig(path, dpi=120)
    return True
