"""Somebody else's op, in their own registry, gets the whole of conformance and passes."""

from __future__ import annotations

import pytest
import third_party_op

from thdops.conformance import CHECKS, Check, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_passes_every_check(check: Check, device: str) -> None:
    report = run(third_party_op.REGISTRY, device=device, checks=[check])
    assert report.ok, report.failures
    assert report.rows.keys() == {"double_rows", "double_rows_grad"}
    assert any(outcome != "n/a" for row in report.rows.values() for outcome in row.values()) or check.name == "mutation"
