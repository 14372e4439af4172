"""`python -m thdops doctor`: it shows what there is, and knows each combination that is known to be wrong."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thdops import doctor
from thdops.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"triton": "3.6.0", "numpy": "2.3.5", "transformers": "", "flash-attn-4": "", "nvidia-cudnn-frontend": ""}
RIGHT = doctor.Machine(
    thdops="0.1.0",
    python="3.12.3",
    torch="2.11.0+cu130",
    cuda_of_torch="13.0",
    rocm_of_torch="",
    cudnn_of_torch="91900",
    driver="580.159",
    gpus=("NVIDIA H200, sm_90",),
    capability=(9, 0),
    packages=PACKAGES,
    interprets=False,
)
ON_A_CPU = replace(RIGHT, torch="2.13.0+cpu", cuda_of_torch="", driver="", gpus=(), capability=None, interprets=True)


def _run(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(("doctor", *words))
    return status, out.getvalue()


@pytest.mark.parametrize("machine", [RIGHT, ON_A_CPU, replace(ON_A_CPU, packages={})])
def test_nothing_is_wrong(machine: doctor.Machine) -> None:
    assert list(doctor.known_problems(machine)) == []


def _with(**packages: str) -> doctor.Machine:
    return replace(RIGHT, packages={**PACKAGES, **{name.replace("_", "-"): found for name, found in packages.items()}})


@pytest.mark.parametrize(
    ("machine", "start"),
    [
        (replace(RIGHT, torch="2.10.1"), "torch 2.10.1 is older than 2.11"),
        (_with(triton="3.5.1"), "triton 3.5.1 is older than 3.6"),
        (_with(triton=""), "a GPU without Triton"),
        (_with(numpy="2.4.0"), "triton 3.6.0 with numpy 2.4.0"),
        (_with(flash_attn_4="4.0.0b37"), "flash-attn-4 4.0.0b37 is not 4.0.0b36"),
        (_with(nvidia_cudnn_frontend="1.31.0"), "nvidia-cudnn-frontend 1.31.0 is not in >=1.32,<2"),
        (_with(transformers="5.18.0"), "transformers 5.18.0 is not in >=5.17,<5.18"),
        (replace(RIGHT, interprets=True), "TRITON_INTERPRET is set"),
        (replace(RIGHT, capability=(7, 5)), "a GPU older than sm_80"),
        (replace(RIGHT, gpus=(), capability=None), "driver 580.159 and torch for CUDA 13.0, which sees none"),
        (replace(RIGHT, gpus=(), capability=None, cuda_of_torch=""), "driver 580.159, but a CPU build of torch"),
        (replace(RIGHT, cuda_of_torch="", rocm_of_torch="7.1"), "torch for ROCm 7.1: not tested"),
    ],
)
def test_a_bad_combination_is_named(machine: doctor.Machine, start: str) -> None:
    (problem,) = doctor.known_problems(machine)
    assert problem.what.startswith(start)
    assert problem.way_out


def test_bounds_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in (
        "torch>=2.11",
        "triton>=3.6",
        "flash-attn-4[cu13]==4.0.0b36",
        "nvidia-cudnn-frontend>=1.32,<2",
        "transformers>=5.17,<5.18",
        "numpy<2.4",
    ):
        assert f'"{requirement}' in text, f"{requirement} has moved: thdops/doctor.py knows it too"


def test_what_is_shown_and_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"native": "chosen", "fa4": "is not installed (pip install 'thdops[fa4]')"}
    monkeypatch.setattr(doctor, "look", lambda: replace(_with(triton=""), backends=backends))
    status, out = _run()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 1
    for line in (
        "driver 580.159",
        "GPU 0 NVIDIA H200, sm_90",
        "triton not installed",
        "native chosen",
        "fa4 is not installed (pip install 'thdops[fa4]')",
        "a GPU without Triton: every op raises there pip install 'thdops[kernels]'",
    ):
        assert line in lines


def test_on_this_machine() -> None:
    status, out = _run("--json")
    found: dict[str, Any] = json.loads(out)
    assert found["torch"] == torch.__version__
    assert found["backends"]["reference"] == ("serves" if found["gpus"] else "chosen")
    assert status == bool(found["problems"])
