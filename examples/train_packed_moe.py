"""Train a small byte-level mixture-of-experts transformer on packed real documents, and prove what packing promises.

    python examples/train_packed_moe.py                     # every mode that this machine can run
    python examples/train_packed_moe.py --data ~/books --steps 500 --mode cudagraph
    torchrun --nproc-per-node 2 examples/train_packed_moe.py --cp 2     # two ranks share out the rows of every batch

Documents of changing lengths fill a buffer of fixed capacity, with gaps and a tail, another number of tokens each step. The same
step runs eagerly, compiled (`fullgraph=True`) and as one captured CUDA graph, from the same seed over the same batches. Shown at
the end: whether the losses agree (bitwise between eager and graph), whether padding stayed exactly zero in activations and
gradients with NaN standing in it, that nothing was recompiled and one graph served every step.

Writes `summary.json`, `losses.png` and a checkpoint per mode into `--out`. Exit code: 0 all checks passed, 1 one failed, 2 the call
was wrong (no text, bad sizes, a damaged checkpoint), 130 interrupted (go on with `--resume`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

# cuBLAS repeats bitwise only with a fixed workspace, and reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from packed_moe import parallel, report
from packed_moe.checks import Check, check_variety, compare
from packed_moe.config import CPU_SIZES, Config, UserError, make_config
from packed_moe.data import Documents, load_documents
from packed_moe.loop import Job, Result, Schedule, run_mode
from packed_moe.modes import MODES, missing_for

_SIZES = tuple(size for size in CPU_SIZES if size not in ("lr", "autocast"))


def _parser(description: str, job: Job) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all", help="default: all that this machine can run")
    parser.add_argument("--data", metavar="DIR", help="a folder of text (default: the Python standard library's sources)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path(job.folder), help=f"where results go (default: {job.folder}/)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument("--checkpoint-every", metavar="N", type=int, default=0, help="save every N steps (always at the end)")
    parser.add_argument("--check-every", metavar="N", type=int, default=0, help="check padding every N steps (always at the end)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for size in _SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", metavar="N", type=int, help="default: by device")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: by device)")
    if job.context_parallel:
        parser.add_argument("--cp", metavar="W", type=int, help="ranks that share out rows, started by torchrun (default: 1)")
        parser.add_argument("--cp-comm", choices=parallel.COMMS, help="how attention's rows meet (default: p2p, a ring)")
    parser.set_defaults(cp=1, cp_comm="p2p")
    return parser


def main(argv: Sequence[str] | None = None, job: Job | None = None, description: str = __doc__ or "") -> int:
    """Run the example, or another job in its place; the exit code is described above."""
    job = job or Job()
    options = _parser(description, job).parse_args(argv)
    try:
        with parallel.joined(options.cp, options.device):
            return _run(options, job)
    except UserError as error:
        if parallel.is_first():
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; go on from the last checkpoint with --resume", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, job: Job) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no GPU; use --device cpu")
    sizes = dict(job.cpu_sizes) if options.device == "cpu" else {}
    sizes |= {size: value for size in (*_SIZES, "lr", "cp", "cp_comm") if (value := getattr(options, size)) is not None}
    config = make_config(options.device, options.seed, **sizes)
    documents = load_documents(options.data, config.max_tokens // 2)
    schedule = _schedule(options)
    wanted = MODES if options.mode == "all" else (options.mode,)
    missing = {mode: missing_for(mode, config.device) for mode in wanted}
    not_run = {mode: reason for mode, reason in missing.items() if reason}
    if len(not_run) == len(wanted):
        raise UserError(f"--mode {options.mode}: cannot run here: {not_run[options.mode]}; use --mode all for what can")

    report.print_header(config, documents, sum(p.numel() for p in job.build(config).parameters()))
    results: list[Result] = []
    broken: list[Check] = []
    progress = report.Progress()
    for mode in wanted:
        if mode in not_run:
            continue
        try:
            results.append(run_mode(mode, config, documents, schedule, progress, job))
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # one mode's failure must not hide what the others show
            if parallel.group() is not None:
                raise  # but other ranks are in the middle of a step: torchrun ends them with this one
            traceback.print_exc()
            reason = (str(error).strip() or "no message").splitlines()[0]
            broken.append(Check(mode, "ran to the end", False, f"{type(error).__name__}: {reason}"))
        finally:
            progress.finish()
    return _conclude(config, documents, schedule.folder, results, broken, not_run)


def _schedule(options: argparse.Namespace) -> Schedule:
    for flag in ("checkpoint_every", "check_every"):
        if getattr(options, flag) < 0:
            raise UserError(f"--{flag.replace('_', '-')} must be at least 0, got {getattr(options, flag)}; 0 means at the end only")
    schedule = Schedule(options.out, options.resume, options.checkpoint_every, options.check_every)
    if options.resume and not any(schedule.checkpoint(mode).exists() for mode in MODES):
        raise UserError(f"--resume: no checkpoint in {str(options.out)!r}; pass the --out of the run to go on with")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {str(options.out)!r} ({error.strerror}); pass another") from error
    return schedule


def _conclude(
    config: Config, documents: Documents, folder: Path, results: list[Result], broken: list[Check], not_run: dict[str, str]
) -> int:
    """Compare the modes, write and print everything; the exit code."""
    checks = [*broken, *(check for result in results for check in result.checks)]
    eager = next((result for result in results if result.mode == "eager"), None)
    for result in results:
        if eager is not None and result is not eager:
            checks.append(compare(eager, result, config.autocast))
    if results:
        checks.append(check_variety(results[0].lengths))
    checks = parallel.of_all_ranks(checks)
    ok = all(check.passed for check in checks)
    if not parallel.is_first():
        return 0 if ok else 1

    report.print_report(results, checks, not_run)
    settings = {**dataclasses.asdict(config), "data": documents.source}
    report.write_summary(folder / "summary.json", settings, results, checks, not_run, ok)
    print(f"\nwrote {folder / 'summary.json'}")
    picture = folder / "losses.png"
    if results:
        drawn = report.draw_curves(picture, results)
        print(f"wrote {picture}" if drawn else "no picture: matplotlib is not installed (pip install matplotlib)")
    print("all checks passed" if ok else "FAILED: " + "; ".join(f"{c.mode}: {c.name}" for c in checks if not c.passed))
    return 0 if ok else 1


if __name__ == "__main__":
    parallel.leave(main())
