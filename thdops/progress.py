"""A bar for long work: on stderr, if that is a terminal and rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["At", "progress"]


class At(Protocol):
    def __call__(self, text: str, done: int = 0) -> None:
        """`text` says what is being done now; so many parts have been finished since the last call."""
        ...


@contextmanager
def progress(total: int) -> Iterator[At]:
    """A bar over work in `total` parts, while it lasts. Nothing of it runs between two calls: much of this work is timed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda text, done=0: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # What is printed meanwhile goes through the bar only where both are on the terminal: else it would not reach its file.
    settings = {"transient": True, "auto_refresh": False, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=Console(stderr=True, soft_wrap=True), **settings) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done=0: bar.update(task, advance=done, description=text, refresh=True)
