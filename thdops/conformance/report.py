"""Running the checks over a registry."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from thdops.conformance.case import CheckFailed, NotRun, OpUnderTest, describe
from thdops.conformance.table import CHECKS, Check
from thdops.registry import Registry

PASS = "pass"
DOES_NOT_APPLY = "n/a"

Progress = Callable[[str, str, str], None]
"""Called after each check with the op's name, the check's name and the outcome."""


@dataclass(frozen=True)
class Report:
    """What was found: `rows[op][check]` is "pass", "FAIL: reason", "not run: reason" or "n/a"."""

    namespace: str
    device: str
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent per check, over all ops."""

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(op, check, reason) of everything that failed."""
        return [(op, check, o[6:]) for op, row in self.rows.items() for check, o in row.items() if o.startswith("FAIL: ")]

    @property
    def not_run(self) -> list[tuple[str, str, str]]:
        """(op, check, reason) of everything that this machine could not tell."""
        return [(op, check, o[9:]) for op, row in self.rows.items() for check, o in row.items() if o.startswith("not run: ")]

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failures


def outcome(check: Check, case: OpUnderTest) -> str:
    """One cell of the report. Any exception of the op is a failure of the op."""
    try:
        with torch.random.fork_rng(), _quiet():
            torch.manual_seed(0)
            if not check.applies(case):
                return DOES_NOT_APPLY
            check(case)
    except NotRun as reason:
        return f"not run: {reason}"
    except CheckFailed as reason:
        return f"FAIL: {reason}"
    except Exception as error:
        return f"FAIL: {describe(error)}"
    return PASS


@contextmanager
def _quiet() -> Iterator[None]:
    """Checks provoke errors on purpose; torch would log each of them."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(
    registry: Registry,
    ops: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    checks: Iterable[Check] = CHECKS,
) -> Report:
    """Hold every op of `registry` (or those named in `ops`) against every check, on `device` (the GPU if there is one).

    Raises:
        KeyError: an op that the registry does not have.
    """
    device = default_device() if device is None else torch.device(device)
    report = Report(registry.namespace, device.type)
    checks = tuple(checks)
    for spec in [registry[name] for name in ops] if ops is not None else list(registry):
        case = OpUnderTest(registry, spec, device)
        row = report.rows.setdefault(spec.name, {})
        for check in checks:
            start = time.perf_counter()
            row[check.name] = outcome(check, case)
            report.seconds[check.name] = report.seconds.get(check.name, 0.0) + time.perf_counter() - start
            if progress is not None:
                progress(spec.name, check.name, row[check.name])
    return report
