"""The picture of a bench run: bars of every provider's times, and each time against the floor that the roofline sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdops.bench import Row

_BASELINES = {"thdops": "#1b7837", "op compiled": "#a6dba0", "eager": "#bdbdbd", "compiled": "#6baed6"}
_BAR = 0.2  # of the distance between two benches, where there are few providers


def draw(path: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Write the picture to `path`; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not write that format.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.us is not None]
    labels = list(dict.fromkeys(_label(row) for row in timed))
    colours = _colours(timed)
    height = max(4.0, _BAR * max(3, len(colours)) * len(labels) + 2)
    figure = Figure(figsize=(15, height), layout="constrained")
    bars, floors = figure.subplots(1, 2)
    _draw_bars(bars, timed, labels, colours)
    _draw_roofline(floors, timed, colours)
    figure.suptitle(f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}, {facts['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _label(row: Row) -> str:
    return f"{row.op}\n{row.bench}"


def _colours(timed: Sequence[Row]) -> dict[str, Any]:
    """By provider, in the order of their first rows: those of baselines are fixed, peers take theirs in turn."""
    from matplotlib import colormaps

    providers = dict.fromkeys(row.provider for row in timed)
    return {name: _BASELINES.get(name, colormaps["tab10"](i % 10)) for i, name in enumerate(providers)}


def _draw_bars(bars: Any, timed: Sequence[Row], labels: Sequence[str], colours: Mapping[str, Any]) -> None:
    height = min(_BAR, 0.8 / max(1, len(colours)))
    for i, (provider, colour) in enumerate(colours.items()):
        mine = [row for row in timed if row.provider == provider]
        places = [labels.index(_label(row)) + (i - (len(colours) - 1) / 2) * height for row in mine]
        bars.barh(places, [row.us for row in mine], height=height, color=colour, label=provider)
        for place, row in zip(places, mine, strict=True):
            bars.text(row.us, place, _note(row), va="center", fontsize=7)
    bars.set_yticks(range(len(labels)), labels, fontsize=7)
    bars.invert_yaxis()
    bars.margins(x=0.3)  # for the notes
    bars.set_xlabel("microseconds a call (and how many times what the first of its bench takes)")
    if timed:
        bars.set_xscale("log")
        bars.legend(fontsize=8)


def _note(row: Row) -> str:
    rate = f", {row.rate:,.0f} TFLOP/s" if row.unit == "TFLOP/s" and (row.rate or 0) >= 1 else ""
    times = f"  ({row.speedup:.2f}x)" if row.speedup is not None else ""
    return f" {row.us:.1f}{rate}{times}"


def _draw_roofline(floors: Any, timed: Sequence[Row], colours: Mapping[str, Any]) -> None:
    bounded = [row for row in timed if row.floor_us]
    if not bounded:
        floors.set_axis_off()
        floors.text(0.5, 0.5, "no roofline: nothing was timed on a GPU", ha="center", transform=floors.transAxes)
        return
    for provider, colour in colours.items():
        mine = [row for row in bounded if row.provider == provider]
        floors.scatter([row.floor_us for row in mine], [row.us for row in mine], color=[colour], label=provider, s=22)
    ends = (min(row.floor_us or 0.0 for row in bounded), max(row.us or 0.0 for row in bounded))
    floors.plot(ends, ends, color="black", linewidth=0.8, label="roofline")
    floors.set_xscale("log")
    floors.set_yscale("log")
    floors.legend(fontsize=8)
    floors.set_xlabel("floor of the call: its bytes or flops at the rates measured in this run, us")
    floors.set_ylabel("microseconds a call")
