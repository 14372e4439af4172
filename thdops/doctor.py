"""`python -m thdops doctor`: what this machine has, what runs attention here, and what is known not to work together.

Nothing is computed: versions come from package metadata, GPUs from torch and the driver. The exit status is 1 if something that is
known to be wrong is found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata

import torch
from torch.torch_version import TorchVersion

from thdops._version import __version__
from thdops.conformance.render import Table, show

__all__ = ["Machine", "Problem", "add_arguments", "known_problems", "look", "main"]

_PACKAGES = ("triton", "numpy", "rich", "matplotlib", "transformers", "flash-attn", "flash-attn-4", "nvidia-cudnn-frontend")
_STYLES = {"not installed": "dim", "none": "dim"}


@dataclass(frozen=True)
class Machine:
    """What there is. "" stands for what there is not, or what nobody would say."""

    thdops: str
    python: str
    torch: str
    cuda_of_torch: str
    rocm_of_torch: str
    cudnn_of_torch: str
    driver: str
    """The NVIDIA driver, if nvidia-smi answers, whatever torch says."""
    gpus: tuple[str, ...]
    """As torch sees them: name and architecture."""
    capability: tuple[int, int] | None
    """Of the first GPU that torch sees."""
    packages: Mapping[str, str]
    interprets: bool
    """Whether TRITON_INTERPRET is set."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Of attention, for an ordinary call here: "chosen", "serves", or why not."""


@dataclass(frozen=True)
class Problem:
    """A combination that is known to be wrong, and the way out."""

    what: str
    way_out: str


def look() -> Machine:
    """This machine."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = [torch.cuda.get_device_capability(i) for i in gpus]
    return Machine(
        thdops=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_of_torch=torch.version.cuda or "",
        rocm_of_torch=torch.version.hip or "",
        cudnn_of_torch=str(torch.backends.cudnn.version() or ""),
        driver=driver(),
        gpus=tuple(f"{torch.cuda.get_device_name(i)}, sm_{''.join(map(str, capabilities[i]))}" for i in gpus),
        capability=capabilities[0] if capabilities else None,
        packages={name: version(name) for name in _PACKAGES},
        interprets=os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
        backends=_backends("cuda" if gpus else "cpu"),
    )


def version(package: str) -> str:
    """Of an installed package, else ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    """The version of the NVIDIA driver, "" if nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def _backends(device: str) -> dict[str, str]:
    """What `attention` says of a causal call in bf16, head dim 128."""
    import thdops

    q, k = torch.empty(8, 2, 128, dtype=torch.bfloat16, device=device), torch.empty(8, 1, 128, dtype=torch.bfloat16, device=device)
    return thdops.attention_backends(q, k, k, torch.tensor([0, 8], dtype=torch.int32, device=device), causal=True)


# --- what is known to be wrong ----------------------------------------------------------------------------------------------------


def _below(bound: str, found: str) -> bool:
    return bool(found) and TorchVersion(found) < bound


def _outside(low: str, high: str, found: str) -> bool:
    return bool(found) and not low <= TorchVersion(found) < high


def _is_not(wanted: str, found: str) -> bool:
    return bool(found) and found != wanted


# What is wrong with a package by itself. The bounds are those of pyproject.toml, which a test holds against them.
_PACKAGE_PROBLEMS: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "torch": (partial(_below, "2.11"), "is older than 2.11", "pip install 'torch>=2.11'"),
    "triton": (partial(_below, "3.6"), "is older than 3.6: kernels do not compile", "pip install 'thdops[kernels]'"),
    "flash-attn-4": (
        partial(_is_not, "4.0.0b36"),
        'is not 4.0.0b36: backend "fa4" calls functions that no other release promises',
        "pip install 'thdops[fa4]'",
    ),
    "nvidia-cudnn-frontend": (
        partial(_outside, "1.32", "2"),
        'is not in >=1.32,<2: backend "cudnn" is written for those',
        "pip install 'thdops[cudnn]'",
    ),
    "transformers": (
        partial(_outside, "5.17", "5.18"),
        "is not in >=5.17,<5.18: thdops.integrations.transformers enters interfaces that move between minor releases",
        "pip install 'thdops[transformers]'",
    ),
}


def known_problems(machine: Machine) -> Iterator[Problem]:
    """Every bad combination that `machine` has."""
    versions = {**machine.packages, "torch": machine.torch}
    for name, (bad, what, way_out) in _PACKAGE_PROBLEMS.items():
        if bad(versions.get(name, "")):
            yield Problem(f"{name} {versions[name]} {what}", way_out)
    triton, numpy = versions.get("triton", ""), versions.get("numpy", "")
    if machine.gpus and not machine.rocm_of_torch and not triton:
        yield Problem("a GPU without Triton: every op raises there", "pip install 'thdops[kernels]'")
    if machine.gpus and machine.interprets:
        yield Problem("TRITON_INTERPRET is set where there is a GPU: its kernels would be interpreted", "unset TRITON_INTERPRET")
    if _below("3.7", triton) and numpy and not _below("2.4", numpy):
        yield Problem(
            f"triton {triton} with numpy {numpy}: its interpreter, which `check` runs kernels in on a CPU, fails there",
            "pip install 'numpy<2.4'",
        )
    if machine.rocm_of_torch:
        yield Problem(f"torch for ROCm {machine.rocm_of_torch}: not tested", "use a CUDA or CPU build")
    if machine.driver and not machine.gpus:
        if machine.cuda_of_torch:
            what = f"driver {machine.driver} and torch for CUDA {machine.cuda_of_torch}, which sees none: the driver may be too old"
            yield Problem(what, "update the driver, install torch for an older CUDA, or look at CUDA_VISIBLE_DEVICES")
        else:
            what = f"driver {machine.driver}, but a CPU build of torch"
            yield Problem(what, "install a build for CUDA (torch's install page says how)")
    if machine.capability is not None and machine.capability < (8, 0):
        yield Problem("a GPU older than sm_80: kernels are compiled and tested for sm_80 and later", "use a newer GPU")


# --- the command ------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m thdops doctor`."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Look, and say what was found; 1 if something is known to be wrong, else 0."""
    machine = look()
    problems = list(known_problems(machine))
    if arguments.json:
        print(json.dumps({**asdict(machine), "problems": [asdict(problem) for problem in problems]}, indent=1))
    else:
        show(_tables(machine, problems))
    return 1 if problems else 0


def _tables(machine: Machine, problems: Sequence[Problem]) -> Iterator[Table | str]:
    gpus = machine.gpus or ("none that torch sees: references serve CPU tensors, kernels can be interpreted",)
    facts = {
        "thdops": machine.thdops,
        "python": machine.python,
        "torch": machine.torch,
        "CUDA of torch": machine.cuda_of_torch or (f"none, ROCm {machine.rocm_of_torch}" if machine.rocm_of_torch else "none"),
        "cuDNN of torch": machine.cudnn_of_torch or "none",
        "driver": machine.driver or "none that nvidia-smi knows",
        **{f"GPU {i}" if machine.gpus else "GPU": gpu for i, gpu in enumerate(gpus)},
        **{name: found or "not installed" for name, found in machine.packages.items()},
    }
    yield Table("This machine", ("what", "found"), [(name, (found, _STYLES.get(found, ""))) for name, found in facts.items()])
    backends = [(name, (state, "green" if state in ("chosen", "serves") else "dim")) for name, state in machine.backends.items()]
    yield Table("Attention's backends here (causal, bf16, head dim 128)", ("backend", "state"), backends)
    if problems:
        rows = [((problem.what, "bold red"), problem.way_out) for problem in problems]
        yield Table("Known to be wrong", ("what", "way out"), rows)
    else:
        yield "Nothing here is known to be wrong."
