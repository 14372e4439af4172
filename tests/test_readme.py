"""README.md, taken at its word: its code runs as it stands and gives what its comments say; its table names every op."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import thdops
from thdops.namespace import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_runs_and_zeroes_what_it_says() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    padding = [3, 9, 10, 11]
    assert f"zeros on rows {', '.join(map(str, padding))}" in code
    assert names["mask"].nonzero().flatten().tolist() == padding
    for name in ("out", "clean"):
        zero = names[name].flatten(1).eq(0).all(1)
        assert zero.nonzero().flatten().tolist() == padding, name
    names["out"].sum().backward()
    assert all(names[name].grad[padding].eq(0).all() for name in "qkv")
    assert names["position"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert names["mixed"].eq(0).all(1).nonzero().flatten().tolist() == padding
    assert names["offsets"][-1] == 2 * 8  # top-2 of 8 valid rows
    sums = names["routed"].sums
    assert sums.num_tokens == 8
    torch.testing.assert_close(names["routed"].aux_loss, 8 * 1e-2 / 2 / 8 / 8 * (sums.counts * sums.scores).sum())
    assert [rows.tolist() for rows in names["batch"].unpack(names["batch"].tokens)] == [[1, 2, 3], [4, 5, 6, 7, 8]]


def test_pictures_are_there() -> None:
    missing = [name for name in re.findall(r"!\[[^]]*\]\((.*?)\)", README) if not (ROOT / name).is_file()]
    assert missing == []


def test_every_op_and_public_function_is_named() -> None:
    public = {spec.name for spec in REGISTRY if not spec.name.endswith("_grad")} | set(thdops.__all__) - {"__version__"}
    assert sorted(name for name in public if not re.search(rf"\b{name}\b", README)) == []
