"""CONTRIBUTING.md, taken at its word: its code makes an op, in a package and a registry of its own, that passes every check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ["my_ops/contract.py", "my_ops/reference.py", "my_ops/kernels.py", "my_ops/samples.py", "my_ops/op.py", "check.py"]


def _blocks() -> dict[str, str]:
    """The Python blocks of the page by the file name in their first line."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    return dict(blocks)


def _write(folder: Path) -> None:
    for name, code in _blocks().items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)


def _python(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_every_block_is_a_named_file() -> None:
    assert list(_blocks()) == FILES
    assert (ROOT / "CONTRIBUTING.md").read_text().count("```python") == len(FILES)


@pytest.mark.slow
def test_the_op_passes_every_check(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, so its interpreter cannot run the kernel")
    _write(tmp_path)
    done = _python(tmp_path, "check.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_kernel_is_caught(tmp_path: Path) -> None:
    """What makes the test above worth something: the same page with one sign changed does not pass."""
    pytest.importorskip("triton", reason="Triton is not installed, so its interpreter cannot run the kernel")
    _write(tmp_path)
    kernels = tmp_path / "my_ops" / "kernels.py"
    assert kernels.read_text().count("value < 0") == 1
    kernels.write_text(kernels.read_text().replace("value < 0", "value > 0"))
    check = tmp_path / "check.py"
    narrowed = check.read_text().replace(
        "run(REGISTRY, device", "run(REGISTRY, checks=[c for c in CHECKS if c.name == 'kernel'], device"
    )
    check.write_text(narrowed.replace("import run", "import CHECKS, run"))
    done = _python(tmp_path, "check.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "squared_relu: kernel: sample" in done.stdout
    assert "squared_relu_backward: kernel: sample" in done.stdout


def test_the_bench_runs(tmp_path: Path) -> None:
    """Its results against the baselines of the page; the shapes are cut down for CPU."""
    _write(tmp_path)
    samples = tmp_path / "my_ops" / "samples.py"
    assert samples.read_text().count("torch.randn(16384, 4096") == 2
    samples.write_text(samples.read_text().replace("16384, 4096,", "64, 32,").replace("_every(8, 16384", "_every(8, 64"))
    code = (
        "import argparse; from thdops import bench; from my_ops.op import REGISTRY; parser = argparse.ArgumentParser();"
        "bench.add_arguments(parser); raise SystemExit(bench.main(parser.parse_args(['--cpu']), REGISTRY))"
    )
    done = _python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("speed-up") == 1
    assert re.findall(r"^squared_relu\w*", done.stdout, re.M) == ["squared_relu", "squared_relu_backward"]
