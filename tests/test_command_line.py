"""What people read: the tables of `list` and `check`, as text and drawn; and the exit statuses."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import pytest
import third_party_op
from expecttest import TestCase

from thdops.__main__ import main
from thdops.conformance import CHECKS, Report, render, run

FEW = [check for check in CHECKS if check.name in ("pieces", "no alias", "mutation", "graph replay")]


def _printed(*tables: render.Table | str, rich: bool = False) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        render.show(tables, rich=rich)
    return out.getvalue()


def _run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words, third_party_op.REGISTRY)
    return status, out.getvalue(), err.getvalue()


class TestTables(TestCase):
    def test_list(self) -> None:
        status, out, _ = _run("list")
        assert status == 0
        self.assertExpectedInline(
            out,
            """\
2 ops in torch.ops.third_party

op                what it gives                          promises                                                backends
double_rows_grad  gradient of double_rows                deterministic, graph-safe, pads zeroed                  triton
double_rows       twice each row and its sum of squares  differentiable, deterministic, graph-safe, pads zeroed  triton

Schemas

op                schema
double_rows_grad  (Tensor? g, Tensor? s, Tensor x, Tensor cu_seqlens) -> Tensor
double_rows       (Tensor x, Tensor cu_seqlens) -> (Tensor y, Tensor squares)
""",
        )

    def test_check(self) -> None:
        report = run(third_party_op.REGISTRY, device="cpu", checks=FEW)
        report.rows["double_rows"]["no alias"] = "FAIL: sample 'fp32': y shares memory with input x"
        self.assertExpectedInline(
            _printed(*render.check_tables(report, FEW)),
            """\
Conformance of third_party on cpu

op                 1   2   3   4
double_rows_grad  ok  ok   .  --
double_rows       ok  XX   .  --

ok passes   XX fails   -- not run here   . does not apply

    check         what holds
 1  pieces        Summary, samples, a compile sample, replays, refusals and benches are there and agree with the schema.
 2  no alias      No output shares memory with an input or with another output.
 3  mutation      What is written gets a new version, nothing else does; tensors that require grad are refused, fake ones too.
 4  graph replay  No host sync, eager or captured; each replay, forward and backward, equals eager mode on the same contents.

Not run (no GPU): graph replay

FAIL double_rows, no alias: sample 'fp32': y shares memory with input x

2 ops: 3 passed, 1 failed, 2 not run
""",
        )

    def test_unknown_op(self) -> None:
        self.assertExpectedInline(
            str(_run("check", "double_row")), """(2, '', 'no op named double_row; there are: double_rows_grad, double_rows\\n')"""
        )


@pytest.mark.parametrize(("outcome", "status"), [("pass", 0), ("FAIL: wrong", 1), ("not run: no GPU", 0)])
def test_exit_status_and_json(outcome: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(*args: object) -> Report:
        return Report("third_party", "cpu", {"double_rows": {check.name: outcome for check in CHECKS}}, {"pieces": 0.5})

    monkeypatch.setattr("thdops.conformance.run", pretended)
    found, out, _ = _run("check", "double_rows", "--json")
    report = json.loads(out)
    assert found == status
    assert report["ok"] == (status == 0)
    assert report["ops"]["double_rows"]["pieces"] == outcome
    assert _run("check", "--times")[0] == status


def test_tables_drawn_by_rich_hold_the_same_cells() -> None:
    pytest.importorskip("rich")
    table = render.Table("Title", ("op", "what"), [[("zero_fill", "cyan"), "[T, D] of a fused [T, 3, D]"]])
    drawn = _printed(table, "a paragraph", rich=True)
    for text in ("Title", "op", "what", "zero_fill", "[T, D] of a fused [T, 3, D]", "a paragraph"):
        assert text in drawn


def test_a_reader_that_has_seen_enough() -> None:
    """As `| head` has: no traceback."""
    with subprocess.Popen([sys.executable, "-m", "thdops", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "thdops", "list", "--json"], capture_output=True, text=True, check=True)
    assert {"zero_fill", "moe_aux_loss"} <= {record["op"] for record in json.loads(done.stdout)}
