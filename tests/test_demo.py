"""`python -m thdops demo`: what it finds on a CPU, that it is in the exit status, and that every cell can turn red."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thdops
from thdops import demo
from thdops.__main__ import main
from thdops.demo_attention import Attend, Attention, installed
from thdops.packing import validate

SIZES = demo.Sizes(64, 1, 16, torch.float32, torch.device("cpu"))


def _run(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(("demo", *words))
    return status, out.getvalue()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    status, out = _run("--json", "--cpu")
    assert status == 0
    return json.loads(out)


def _texts(row: dict[str, Any], *columns: str) -> list[str]:
    return [row["cells"][column]["text"] for column in columns]


def test_ours_keeps_every_promise(found: dict[str, Any]) -> None:
    assert found["ok"]
    (ours,) = [row for row in found["attention"] if row["ours"]]
    assert ours["name"] == "thdops reference"
    assert _texts(ours, "out", "dQ", "dK", "dV", "LSE", "valid rows", "same graph") == ["ok"] * 6 + ["ok (compiled)"]
    assert _texts(ours, "compiles", "syncs") == ["1", "n/a"]
    assert all(float(text) > 0 for text in _texts(ours, "us full", "us half"))


def test_the_readme_shows_this_table(found: dict[str, Any]) -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    (block,) = (text for text in re.findall(r"^```text\n(.*?)^```$", readme, re.M | re.S) if "compiles" in text)
    columns = [column for column in demo.COLUMNS if not column.startswith("us ")]
    cells = [[row["name"], *_texts(row, *columns)] for row in found["attention"]]
    assert [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()] == [columns, *cells]


def test_the_others_show_what_nan_in_padding_does(found: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in found["attention"]}
    assert _texts(rows["SDPA with a mask"], "out", "LSE", "valid rows") == ["NaN", "-", "NaN: out dQ dK dV"]
    assert _texts(rows["FlexAttention"], "dQ", "valid rows") == ["-", "NaN: out"]
    assert all(row["notes"] == [] for row in rows.values())


def test_the_loss_follows_its_count(found: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in found["aux_loss"]}
    assert list(rows) == ["N = 96", "N = 57", "N = 1", "N = 0"]
    for row in found["aux_loss"]:
        assert row["cells"]["device"] == {"text": row["cells"]["fp64"]["text"], "good": True}
        assert row["cells"]["device programs"] == {"text": "1", "good": True}
        assert row["cells"]["number programs"]["good"] is False


# --- every cell can turn red ------------------------------------------------------------------------------------------------------


def _reference() -> Attention:
    q = torch.zeros(SIZES.rows, SIZES.heads, SIZES.dim)
    *_, ours = installed(q, q, q, *demo.layout(SIZES, 0.4, seed=0).metadata)
    return ours


def _changed(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Attention:
    """Ours, with something done to out and LSE, given padding."""
    attend = _reference().function

    def broken(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, cu_seqlens, padded)
        assert lse is not None
        return change(out, lse, thdops.padding_mask(cu_seqlens, padded, q.shape[0]))

    return Attention("broken", broken, broken, ours=True)


def _fill(out: Tensor, padding: Tensor, value: float) -> Tensor:
    return torch.where(padding[:, None, None], value, out)


@pytest.mark.parametrize(
    ("change", "column", "text"),
    [
        (lambda out, lse, padding: (_fill(out, padding, math.nan), lse), "out", "NaN"),
        (lambda out, lse, padding: (_fill(out, padding, -0.0), lse), "out", "other"),
        (lambda out, lse, padding: (out, torch.where(padding, 0, lse)), "LSE", "other"),
        (lambda out, lse, padding: (out * 1.01, lse), "valid rows", "wrong: out dQ dK dV"),
        (lambda out, lse, padding: (out, lse + 1), "valid rows", "wrong: LSE"),
        (lambda out, lse, padding: (out * 1.01, lse), "same graph", "wrong: out (compiled)"),
    ],
)
def test_a_broken_promise_is_seen(change: Callable[..., Any], column: str, text: str) -> None:
    row = demo.examine(_changed(change), SIZES)
    assert row.cells[column].text == text
    assert not row.held
    assert replace(row, ours=False).held


def test_a_host_read_is_seen_in_the_compilations() -> None:
    row = demo.examine(_changed(lambda out, lse, padding: (out * int(padding.sum()) / int(padding.sum()), lse)), SIZES)
    assert int(row.cells["compiles"].text) > 1
    assert [name for name, cell in row.cells.items() if cell.good is False] == ["compiles"]


@pytest.mark.parametrize("which", ["dQ", "dK", "dV"])
def test_a_gradient_that_leaks_is_seen(which: str) -> None:
    attend = _reference().function

    def broken(*given: Tensor) -> tuple[Tensor, Tensor | None]:
        position = ("dQ", "dK", "dV").index(which)
        leaking = [x + 0 if i == position else x for i, x in enumerate(given)]
        if leaking[position].requires_grad:
            leaking[position].register_hook(lambda grad: grad + 1e-30)
        q, k, v, *metadata = leaking
        return attend(q, k, v, metadata[0], metadata[1])

    row = demo.examine(Attention("broken", attend, broken, ours=True), SIZES)
    assert row.cells[which].text == "other"
    assert [name for name, cell in row.cells.items() if cell.good is False] == [which]


def _raises(*given: Tensor) -> tuple[Tensor, Tensor | None]:
    raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize(("function", "ours", "status"), [(_raises, True, 1), (_raises, False, 0)])
def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, function: Attend, ours: bool, status: int) -> None:
    """What raises is a red cell with its reason, and the rest of the table is shown."""

    def pretended(*given: Tensor) -> Iterator[Attention]:
        yield Attention("broken", function, function, ours=ours)
        yield _reference()

    monkeypatch.setattr(demo, "installed", pretended)
    monkeypatch.setattr(demo, "sizes_for", lambda device: SIZES)
    found, out = _run("--cpu")
    assert found == status
    assert "broken, us full, us half: RuntimeError: no kernel\n" in out
    assert "thdops reference" in out
    verdict = "A promise of thdops did not hold." if status else "Everything that thdops promises held."
    assert out.rstrip().endswith(verdict)


def test_a_compilation_that_takes_too_long_is_left() -> None:
    """Its other rows are there, and nothing that we promise is broken by it."""
    reference = _reference()

    def slow(*given: Tensor) -> tuple[Tensor, Tensor | None]:
        time.sleep(30)
        return reference.function(*given)

    row = demo.examine(Attention("slow", reference.function, slow, compiled=True), SIZES, seconds=0.2)
    late = set(demo.COLUMNS) - {"compiles", "same graph"}
    assert {name for name, cell in row.cells.items() if cell.text == "late"} == late
    assert row.cells["compiles"].text == "1"
    assert row.notes == ["slow: not compiled within 0 s"]
    assert row.held


def test_a_compilation_that_fails_is_not_tried_again() -> None:
    reference, calls = _reference(), []

    def failing(*given: Tensor) -> tuple[Tensor, Tensor | None]:
        calls.append(given)
        return _raises(*given)

    row = demo.examine(Attention("failing", reference.function, failing, compiled=True), SIZES)
    assert len(calls) == 1
    assert row.cells.keys() == set(demo.COLUMNS)
    assert {name for name, cell in row.cells.items() if cell.text == "raises"} == set(demo.COLUMNS) - {"compiles", "same graph"}


def test_what_is_compiled_keeps_one_setting() -> None:
    """In a second one it would be compiled again, which takes longer than the rest of the table."""
    reference, settings = _reference(), set()

    def seen(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor | None]:
        deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        settings.add((deterministic, torch.is_grad_enabled(), q.requires_grad, q.stride()))
        return reference.function(q, *rest)

    demo.examine(Attention("compiled", reference.function, seen, compiled=True), SIZES, seconds=60.0)
    assert len(settings) == 1


def test_a_loss_that_does_not_follow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = thdops.moe_aux_loss

    def stale(probs: Tensor, chosen: Tensor, number: int | Tensor, **options: Any) -> Tensor:
        return right(probs, chosen, 96, **options)

    monkeypatch.setattr(thdops, "moe_aux_loss", stale)
    rows = demo.aux_loss(torch.device("cpu"))
    assert [row.cells["device"].good for row in rows] == [True, False, False, False, True]
    assert [row.held for row in rows] == [True, False, False, False, True]


@pytest.mark.parametrize("empty", [0.0, 0.5, 0.9])
def test_layouts(empty: float) -> None:
    where = demo.layout(SIZES, empty, seed=3)
    validate(*where.metadata, SIZES.rows)
    assert 0 in where.lengths
    assert int(where.padding(SIZES.rows).sum()) == SIZES.rows - round(SIZES.rows * (1 - empty))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    status, out = _run("--json")
    found = json.loads(out)
    rows = {row["name"]: row for row in found["attention"]}
    assert status == 0, [(row["name"], row["cells"], row["notes"]) for row in rows.values() if row["ours"]]
    assert _texts(rows["thdops native"], "syncs", "compiles", "same graph") == ["0", "1", "ok"]
    stale = [row["cells"]["number"]["good"] for row in found["aux_loss"]]
    assert stale == [True, False, False, False, True]
