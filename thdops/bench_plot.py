"""The picture of a bench run: times of the op beside its baselines, and every time against its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thdops.bench import Row

_COLOURS = {"thdops": "#1b7837", "op compiled": "#a6dba0", "eager": "#bdbdbd", "compiled": "#6baed6"}


def draw(path: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Write the picture to `path`; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("bench --plot needs matplotlib; install it with: pip install 'thdops[plot]'") from error

    timed = [row for row in rows if row.us is not None]
    labels = list(dict.fromkeys(f"{row.op}\n{row.bench}" for row in timed))
    figure = Figure(figsize=(15, max(4.0, 0.6 * len(labels) + 2)), layout="constrained")
    bars, floors = figure.subplots(1, 2)

    for shift, (provider, colour) in zip((-0.3, -0.1, 0.1, 0.3), _COLOURS.items(), strict=True):
        mine = [row for row in timed if row.provider == provider]
        places = [labels.index(f"{row.op}\n{row.bench}") + shift for row in mine]
        times = [row.us or 0.0 for row in mine]
        bars.barh(places, times, height=0.2, color=colour, label=provider)
        for place, row in zip(places, mine, strict=True):
            note = f" {row.us:.1f}" + (f"  ({row.speedup:.1f}x)" if row.speedup else "")
            bars.text(row.us or 0.0, place, note, va="center", fontsize=7)
        bounded = [row for row in mine if row.floor_us]
        floors.scatter([row.floor_us for row in bounded], [row.us for row in bounded], color=colour, label=provider, s=22)
    bars.set_yticks(range(len(labels)), labels, fontsize=7)
    bars.invert_yaxis()
    bars.set_xscale("log")
    bars.margins(x=0.15)
    bars.set_xlabel("microseconds a call (speed-up of thdops over it)")
    bars.legend(fontsize=8)

    known = [row.floor_us for row in timed if row.floor_us]
    if known:
        ends = (min(known), max(row.us or 0.0 for row in timed))
        floors.plot(ends, ends, color="black", linewidth=0.8, label="roofline")
        floors.set_xscale("log")
        floors.set_yscale("log")
        floors.legend(fontsize=8)
    else:
        floors.text(0.5, 0.5, "no roofline on this device", ha="center", transform=floors.transAxes)
    floors.set_xlabel("floor of the call: its bytes or flops at the measured rates, us")
    floors.set_ylabel("microseconds a call")

    figure.suptitle(f"{facts['gpu']}, torch {facts['torch']}, triton {facts['triton']}, {facts['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
