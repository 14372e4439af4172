"""Time of a training step against the share of rows that hold a token: eager at the exact size, one CUDA graph, graphs in buckets.

    python examples/graph_buckets.py                    # on a GPU; on a CPU it runs small and eagerly, and its times say nothing
    python examples/graph_buckets.py --max-tokens 65536 --buckets 8
    python examples/graph_buckets.py --picture buckets.png  # and the numbers as a Markdown table

The model is that of `train_packed_moe.py`; a step is loading the documents, forward, backward and AdamW. "exact" is the eager step
on a pack that has just the documents' rows: what one graph wastes on padding, and what eager mode loses to launches, show against
it, and buckets are to take at most 1.1 times as long at every share. Writes `buckets.json` and, where matplotlib is installed,
`buckets.png` into `--out`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packed_moe.config import Config, make_config
from packed_moe.model import Batch
from packed_moe.training import Trainer
from torch import Tensor

from thdops import graphs
from thdops.bench import header
from thdops.packing import PackedSequences
from thdops.progress import progress

SHARES = (0.05, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_AIM = 1.1
"""What buckets may take at most of the eager step's time at the exact size, at every share."""
_DOCUMENTS = 16
_LOTS = 7 if torch.cuda.is_available() else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 1 if anything was captured after the start, else 0."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--max-tokens", type=int, default=32768 if gpu else 512, metavar="N", help="rows of the batch")
    parser.add_argument("--buckets", type=int, default=4, metavar="N", help="how many, of even steps up to all rows")
    parser.add_argument("--steps", type=int, default=10 if gpu else 1, metavar="N", help="steps between two looks at the clock")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="where the picture goes (default: OUT/buckets.png)")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where results go (default: runs/)")
    options = parser.parse_args(argv)
    if not gpu:
        torch.set_num_threads(1)  # a step is tiny: threads only cost

    config = make_config("cuda" if gpu else "cpu", 0, max_tokens=options.max_tokens, max_seqs=_DOCUMENTS)
    capacities = [config.max_tokens * (i + 1) // options.buckets for i in range(options.buckets)]
    capacities = [-(-capacity // config.pad_multiple) * config.pad_multiple for capacity in capacities]
    times, reports = measure(config, capacities, options.steps)
    facts = header(torch.device(config.device))
    many = f"{len(capacities)} buckets"
    found = {"header": facts, "max_tokens": config.max_tokens, "shares": SHARES, "ms": times, "graphs": reports}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "buckets.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{facts['gpu']}, torch {facts['torch']}, {config.max_tokens} rows; ms a step\n")
    print("\n".join(markdown(times, many)) + "\n")
    for way, report in reports.items():
        print(f"{way}: {report['text']}")
    worst = max(bucket / exact for bucket, exact in zip(times[many], times["exact"], strict=True))
    aim = f"the aim is {_AIM}" if config.device == "cuda" else "on a CPU, which captures nothing, that says nothing"
    print(f"{many} take at most {worst:.2f} times as long as the exact size; {aim}")
    picture = options.picture or options.out / "buckets.png"
    if draw(picture, times, reports, facts):
        print(f"wrote {picture}")
    return 0 if all(report["captures"] == report["expected_captures"] for report in reports.values()) else 1


def markdown(times: dict[str, list[float]], many: str) -> list[str]:
    """The lines of a table: a row per share, a column per way, and what buckets take of the exact size's time."""
    lines = [("tokens", *times, f"{many} / exact"), ("---:",) * (len(times) + 2)]
    for i, share in enumerate(SHARES):
        lines.append((f"{share:.1%}", *(f"{of[i]:.3f}" for of in times.values()), f"{times[many][i] / times['exact'][i]:.2f}"))
    return [f"| {' | '.join(line)} |" for line in lines]


def measure(config: Config, capacities: Sequence[int], steps: int) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Milliseconds a step by way and share, and what the captured ways report."""
    trainer = Trainer(config)
    trainer.rate.fill_(1e-4)

    def step(pack: PackedSequences) -> Tensor:
        for gradient in trainer.gradients:
            gradient.zero_()
        batch = Batch.of(pack)
        loss = trainer.model(batch, trainer.probe.detach()[: pack.spec.max_tokens]).total
        loss.backward()
        trainer.optimizer.step()
        return loss.detach()

    batch = trainer.packed
    batch.load_(documents(config, 0.5))
    ways = {"one graph": (config.max_tokens,), f"{len(capacities)} buckets": capacities}
    captured = {way: graphs.capture(step, batch, buckets, state=trainer.state().values()) for way, buckets in ways.items()}
    times: dict[str, list[float]] = {"exact": [], **{way: [] for way in ways}}
    with progress(len(SHARES) * len(times)) as at:
        for share in SHARES:
            texts = documents(config, share)
            exact = PackedSequences.allocate(
                sum(map(len, texts)), config.max_seqs, pad_multiple=config.pad_multiple, device=config.device
            )
            calls: dict[str, Callable[[], object]] = {"exact": lambda pack=exact, texts=texts: step(pack.load_(texts))}
            for way, run in captured.items():
                calls[way] = lambda run=run, texts=texts: (batch.load_(texts), run())
            for way, call in calls.items():
                at(f"{share:.1%} of the rows, {way}")
                times[way].append(_milliseconds(call, config.device, steps))
                at("", done=1)
    reports: dict[str, dict[str, Any]] = {}
    for way, run in captured.items():
        report = run.report
        expected = len(ways[way]) if config.device == "cuda" else 0
        numbers = {"captures": report.captures, "expected_captures": expected, "pool_bytes": report.pool_bytes}
        reports[way] = {**numbers, "runs": report.runs, "eager": report.eager, "text": str(report)}
    return times, reports


def documents(config: Config, share: float) -> list[Tensor]:
    """Random bytes that fill this share of the rows, in documents of one to three parts of the whole, without a gap."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 4, (config.max_seqs,), generator=generator)
    rows = max(1, int(share * config.max_tokens) // config.pad_multiple)
    ends = (weights.cumsum(0) * rows // weights.sum() * config.pad_multiple).tolist()
    lengths = [stop - start for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def _milliseconds(call: Callable[[], object], device: str, steps: int) -> float:
    """Steps one behind the other, as in training; the device is waited for around each lot. The first lot is dropped."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    samples = []
    for _ in range(1 + _LOTS):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        wait()
        samples.append((time.perf_counter() - start) * 1e3 / steps)
    return statistics.median(samples[1:])


def draw(path: Path, times: dict[str, list[float]], reports: dict[str, dict[str, Any]], facts: dict[str, str]) -> bool:
    """The picture, if matplotlib is installed: step times, and what they are of the exact size's; pools stand in the legend."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    steps, ratios = figure.subplots(1, 2)
    shares = [100 * share for share in SHARES]
    for way, of in times.items():
        pool = f"{way}, pool of {reports[way]['pool_bytes'] / 2**30:.2f} GiB" if way in reports else "eager, exact size"
        steps.plot(shares, of, marker="o", label=pool)
        ratios.plot(shares, [time / exact for time, exact in zip(of, times["exact"], strict=True)], marker="o")
    ratios.axhline(_AIM, color="black", linewidth=0.8, linestyle="--")
    steps.set_ylabel("ms a step")
    ratios.set_ylabel(f"of the eager step at the exact size (dashed: {_AIM})")
    steps.legend()
    for axes in (steps, ratios):
        axes.set_xlabel("rows that hold a token, %")
        axes.set_ylim(bottom=0)
    figure.suptitle(f"{facts['gpu']}, torch {facts['torch']}, {facts['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return True


if __name__ == "__main__":
    sys.exit(main())
