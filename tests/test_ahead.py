"""Compiling ahead of time: one process for all ops, another one where it has ended, each architecture by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import third_party_op
import torch

from thdops.conformance import CheckFailed, OpUnderTest, ahead

pytest.importorskip("triton", reason="Triton is not installed")
CASE = OpUnderTest(third_party_op.REGISTRY, third_party_op.REGISTRY["double_rows"], torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_process_of_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    running: list[ahead._Process] = []
    monkeypatch.setattr(ahead, "_running", running)
    yield
    for process in running:
        process.end()


def test_one_process_compiles_one_job_after_the_other(tmp_path: Path) -> None:
    """Until it ends; then there is another one, and the reason is told."""
    first = ahead.compile_ahead(CASE)
    (process,) = ahead._running
    assert ahead.compile_ahead(CASE) == first
    assert ahead._running == [process]
    assert first["failures"] == []
    assert {name.split()[1] for name in first["compiled"]} == {f"sm_{number}" for number in CASE.spec.architectures}
    process._process.kill()  # as an operating system does that has no memory left
    process._process.wait()
    assert ahead.compile_ahead(CASE) == first
    (another,) = ahead._running
    assert another is not process
    with pytest.raises(CheckFailed, match=r"^the compiling process ended with 1: FileNotFoundError: .*nothing\.pt"):
        another.compile(tmp_path / "nothing.pt")


def test_a_job_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_TIMEOUT", 0.01)
    with pytest.raises(CheckFailed, match=r"^not compiled within 0\.01 s$"):
        ahead.compile_ahead(CASE)
    assert not ahead._running[0].runs
