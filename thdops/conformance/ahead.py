"""Compiling every kernel of an op ahead of time, for GPUs that are not there.

The launcher runs on the CPU tensors of the samples, but its launches are intercepted and compiled for each architecture of the
spec. That needs a process in which Triton does not interpret.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thdops.conformance.case import CheckFailed, NotRun, OpUnderTest

_TIMEOUT = 600


def check_ahead_of_time(case: OpUnderTest) -> None:
    """Every kernel that a sample launches compiles for every architecture of the spec, each of its variants for one at least."""
    if importlib.util.find_spec("triton") is None:
        raise NotRun("Triton is not installed")
    outcome = compile_ahead(case)
    if outcome["failures"]:
        raise CheckFailed("; ".join(outcome["failures"]))
    if not outcome["compiled"]:
        raise CheckFailed("no sample launches a kernel")


def compile_ahead(case: OpUnderTest) -> dict[str, Any]:
    """`{"compiled": ["kernel sm_90", ...], "failures": [...]}`, from another process."""
    on_cpu = OpUnderTest(case.registry, case.spec, torch.device("cpu"))
    job = {
        "launcher": case.spec.cuda,
        "architectures": list(case.spec.architectures),
        "path": sys.path,
        "calls": [(s.name, s.args) for s in on_cpu.samples() if not _has_fp64(on_cpu, s.args)],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.pt"
        torch.save(job, file)
        return _process().compile(file)


class _Process:
    """Compiles one job after the other: it takes seconds to start, most of what a small op takes."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        code = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import main; main()"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process, and closed with it)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)
        atexit.register(self.end)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def compile(self, file: Path) -> dict[str, Any]:
        """The outcome of the job in `file`."""
        jobs, answers = self._process.stdin, self._process.stdout
        if jobs is None or answers is None:
            raise RuntimeError("the compiling process has no pipes")
        print(file, file=jobs, flush=True)
        if not select.select([answers], [], [], _TIMEOUT)[0]:
            self.end()
            raise CheckFailed(f"not compiled within {_TIMEOUT} s")
        line = answers.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no output"])[-1]
        raise CheckFailed(f"the compiling process ended with {status}: {last}")

    def end(self) -> None:
        """End it, at the latest with this process."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.communicate()
        self._errors.close()


_running: list[_Process] = []


def _process() -> _Process:
    """The one that runs; another one where it has ended."""
    if not _running or not _running[0].runs:
        _running[:] = [_Process()]
    return _running[0]


def _has_fp64(case: OpUnderTest, args: tuple[Any, ...]) -> bool:
    return any(s.tensor.dtype == torch.float64 for s in case.slots(args))


class _Driver:
    """A stand-in for Triton's driver: a pretended GPU per architecture. That is its device's number, too, for Triton keeps what it
    has compiled by device."""

    def __init__(self, architectures: list[int]) -> None:
        self.device = architectures[0]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.device, 32)


class _Compiler:
    """Takes intercepted launches and compiles each kernel: its first kind of arguments for all architectures, every further one
    for the next of them in turn. What an architecture lacks is seen in any kind; compiling all of them everywhere takes minutes.
    """

    def __init__(self, architectures: list[int]) -> None:
        import triton

        self.architectures = architectures
        self.driver = _Driver(architectures)
        driver: Any = triton.runtime.driver
        driver.set_active(self.driver)
        self.seen: set[Any] = set()
        self.kinds: dict[Any, int] = {}
        self.compiled: list[str] = []
        self.failures: list[str] = []

    def __call__(
        self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constexprs: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        key = (id(kernel), tuple(options.items()), constexprs, tuple(map(_kind, args)))
        if key in self.seen:
            return
        self.seen.add(key)
        kind = self.kinds[id(kernel)] = self.kinds.get(id(kernel), -1) + 1
        for architecture in self.architectures if kind == 0 else [self.architectures[kind % len(self.architectures)]]:
            self.driver.device = architecture
            name = f"{kernel.__name__} sm_{architecture}"
            try:
                kernel.warmup(*args, *constexprs, grid=grid, **options)
                self.compiled.append(name)
            except Exception as error:
                self.failures.append(f"{name}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: Triton wraps it in quoted source lines."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else '(no text)'}"


def _kind(arg: Any) -> Any:
    """What decides whether a kernel compiles; alignments and the values of integers only make it faster."""
    if isinstance(arg, Tensor):
        return arg.dtype
    if isinstance(arg, tuple):
        return tuple(map(_kind, arg))
    return (int, -(2**31) <= arg < 2**31) if isinstance(arg, int) else type(arg)


def main() -> None:
    """Compile the jobs whose files are named on stdin, line by line; a line of JSON on stdout is the outcome of one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        print(json.dumps(_compile(Path(line.rstrip("\n")))), file=answers, flush=True)


def _compile(file: Path) -> dict[str, Any]:
    from thdops.ops.launch import intercept

    job = torch.load(file, weights_only=False)
    sys.path[:0] = [p for p in job["path"] if p not in sys.path]
    module, function = job["launcher"].split(":")
    launcher = getattr(importlib.import_module(module), function)
    compiler = _Compiler(job["architectures"])
    for _, args in job["calls"]:
        with intercept(compiler):
            launcher(*args)
    return {"compiled": sorted(set(compiler.compiled)), "failures": sorted(set(compiler.failures))}
