"""What every test needs: kernels are interpreted where there is no GPU, GPU tests skip there, seeds are fixed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported whether it interprets, so this stands before any import of it.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # samples are tiny; threads only cost


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU that torch sees")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
