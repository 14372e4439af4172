"""What an op passes before it is an op.

    from thdops.conformance import run
    report = run(registry)            # any Registry: ours, or your own
    assert report.ok, report.failures

`CHECKS` is the table of checks; `OpUnderTest` is what each is a function of. In pytest, parametrise over both.
"""

from __future__ import annotations

from thdops.conformance.case import CheckFailed, NotRun, OpUnderTest
from thdops.conformance.report import Report, outcome, run
from thdops.conformance.table import CHECKS, Check

__all__ = ["CHECKS", "Check", "CheckFailed", "NotRun", "OpUnderTest", "Report", "outcome", "run"]
