"""What a user gets who installs this: what importing needs and costs, which way imports point, what the package lists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 cannot read TOML by itself")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("thdops", "meta_kernels")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _python(code: str) -> str:
    """The output of `code` in a fresh interpreter that finds this checkout's packages first."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, wherever it stands, those by `importlib.import_module("...")` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the module in full"
            yield node.lineno, node.module or ""
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def _importers_of(*roots: str, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in paths
        for line, module in _imports(path)
        if module.split(".")[0] in roots
    ]


# --- importing --------------------------------------------------------------------------------------------------------------------


def test_import_needs_no_triton_and_no_gpu() -> None:
    out = _python(
        "sys.modules['triton'] = None\n"
        "import torch, thdops, meta_kernels\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(thdops.padding_mask(torch.tensor([0, 2], dtype=torch.int32), None, 3).tolist())"
    )
    assert out == "[False, False, True]"


def test_import_pulls_in_nothing_optional() -> None:
    """Not even where it is installed: what is imported by accident is missed on the first machine that lacks it."""
    optional = ("triton", "numpy", "rich", "matplotlib", "pytest", "hypothesis")
    out = _python(
        f"import torch; before = set(sys.modules)\nimport thdops\nprint(sorted(set({optional!r}) & (set(sys.modules) - before)))"
    )
    assert out == "[]"


def test_import_takes_under_a_second_beyond_torch() -> None:
    """In processor time, which a busy machine does not stretch as it does the wall's."""
    code = "import time, torch\nstart = time.process_time()\nimport thdops\nprint(time.process_time() - start)"
    assert min(float(_python(code)) for _ in range(2)) < 1.0


def test_contracts_import_alone() -> None:
    modules = [f"meta_kernels.{path.stem}" for path in sorted((ROOT / "meta_kernels").glob("*.py")) if path.stem != "__init__"]
    out = _python(
        f"import importlib; sys.modules['triton'] = sys.modules['thdops'] = None\n"
        f"print(len([importlib.import_module(name) for name in {modules!r}]))"
    )
    assert out == str(len(modules))


# --- which way imports point ------------------------------------------------------------------------------------------------------


def test_contracts_import_neither_thdops_nor_triton() -> None:
    assert _importers_of("thdops", "triton", paths=sorted((ROOT / "meta_kernels").rglob("*.py"))) == []


def test_only_kernels_import_triton() -> None:
    """`conformance` may too: it drives Triton's compiler and interpreter; like kernels, it is never imported by `thdops` itself."""
    others = [
        path
        for path in SOURCES
        if not path.name.startswith("kernels") and path.name != "launch.py" and "conformance" not in path.relative_to(ROOT).parts
    ]
    assert _importers_of("triton", paths=others) == []


def test_only_kernels_import_launch_and_kernels() -> None:
    """Kernels are imported by the registry, from the string in a spec, on the first CUDA call; any other way needs triton early."""
    for path in SOURCES:
        if path.name.startswith("kernels") or "conformance" in path.relative_to(ROOT).parts:
            continue
        found = [f"{path}:{line}" for line, module in _imports(path) if re.search(r"\.(launch|kernels\w*)$", module)]
        assert found == []


def test_only_the_registry_registers() -> None:
    """The rest of torch.library (opcheck, infer_schema) may be used anywhere; what defines or implements stands in one file."""
    registering = re.compile(r"\b(custom_op|triton_op|Library|impl|define|register_\w+|fallthrough_kernel)$")
    for path in SOURCES:
        if path.relative_to(ROOT).as_posix() == "thdops/registry.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert not (name.startswith(("torch.library.", "torch._library.")) and registering.search(name)), (path, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch.library", "torch._library")):
                assert not [alias.name for alias in node.names if registering.search(alias.name)], path


# --- what the package says of itself ----------------------------------------------------------------------------------------------


def test_listed_packages_are_the_folders() -> None:
    folders = {
        ".".join(path.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package, *(ROOT / package).rglob("*"))
        if path.is_dir() and path.name != "__pycache__"
    }
    assert sorted(CONFIG["tool"]["setuptools"]["packages"]) == sorted(folders)
    missing = [folder for folder in folders if not (ROOT / folder.replace(".", "/") / "__init__.py").exists()]
    assert missing == []


def test_the_version_is_written_once() -> None:
    import thdops
    from thdops._version import __version__

    assert thdops.__version__ == __version__
    assert "version" not in CONFIG["project"]
    assert CONFIG["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "thdops._version.__version__"}
    elsewhere = [
        path
        for path in [*SOURCES, ROOT / "pyproject.toml"]
        if path.name != "_version.py" and f'"{__version__}"' in path.read_text()
    ]
    assert elsewhere == []
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] in (__version__, "Unreleased"), "the changelog starts with the version being written"


def test_a_plain_install_needs_torch_alone() -> None:
    extras = CONFIG["project"]["optional-dependencies"]
    assert {"test", "plot", "bench"} <= extras.keys()
    assert CONFIG["project"]["dependencies"] == ["torch>=2.11"], "a plain install needs torch alone"


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert CONFIG["project"]["license"] == "Apache-2.0"


def test_top_level_holds_nothing_else() -> None:
    """What git tracks: folders of a build, an environment or a run are ignored."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    texts = {"README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md"}
    allowed = {"pyproject.toml", "MANIFEST.in", *PACKAGES, "tests", "examples", *texts}
    assert {name for name in top if not name.startswith(".")} <= allowed


# --- continuous integration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["-m pytest", "examples/train_packed_moe.py"])
def test_ci_finds_the_commands_of_the_readme(end: str) -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv ")]
    assert len([line for line in lines if line.endswith(end)]) == 1
    assert end in (ROOT / ".ci" / "run").read_text().replace("\\", "")
