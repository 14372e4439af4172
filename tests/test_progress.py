"""Bars of long work: on a terminal they count and name what is done, and what is printed meanwhile goes where it was meant to."""

from __future__ import annotations

import io
import sys

import pytest

from thdops.progress import progress

LONG = "x" * 200  # longer than any terminal is wide


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("to_a_file", [False, True])
def test_a_bar(to_a_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    out = io.StringIO() if to_a_file else terminal
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", out)
    with progress(3) as at:
        at("the first")
        print(LONG)
        at("the second", done=1)
    assert "the first" in terminal.getvalue()
    assert "1/3" in terminal.getvalue()
    assert f"{LONG}\n" in out.getvalue()  # in one piece: no terminal's width breaks a row of a table
    if to_a_file:
        assert out.getvalue() == f"{LONG}\n"


def test_nothing_is_drawn_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as at:
        at("the first")
        at("the second", done=1)
    assert capsys.readouterr() == ("", "")
