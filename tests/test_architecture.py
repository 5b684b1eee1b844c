"""What import-linter's layers cannot say: solver files do not know each other, nor families other families."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOLVERS = Path(__file__).parent.parent / "src" / "tilewise" / "solvers"
PACKAGE = "tilewise.solvers"
SHARED = {"base", "common", "conv"}
"""What every family may import."""
ASKING = {"gemm", "rewrites"}
"""Families that ask the registry for other solvers to leave the work to."""


def family_of(path: Path) -> str:
    """The folder that a file is in; its own name for a lone file."""
    return path.relative_to(SOLVERS).parts[0].removesuffix(".py")


def is_solver(path: Path) -> bool:
    """Whether a file is found by the registry: all but packages, what families share and underscore modules."""
    return not path.stem.startswith("_") and family_of(path) not in SHARED


def imported(path: Path) -> set[str]:
    """Names in the solvers package that a file imports, at the top or in a function, as ``fourier.fft.FFT``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not followed here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix(PACKAGE).lstrip(".") for name in names if f"{name}.".startswith(f"{PACKAGE}.")}


FILES = sorted(path for path in SOLVERS.rglob("*.py") if path != SOLVERS / "__init__.py")


def names(path: Path) -> str:
    return str(path.relative_to(SOLVERS))


def test_every_file_is_in_a_family_or_alone() -> None:
    assert len([path for path in FILES if is_solver(path)]) >= 24
    folders = {path.parent for path in FILES}
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_family_imports_itself_and_what_families_share(path: Path) -> None:
    families = {name.split(".")[0] for name in imported(path)}
    registry = {""} if family_of(path) in ASKING else set()
    assert families <= {family_of(path), *SHARED, *registry}


@pytest.mark.parametrize("path", [path for path in FILES if is_solver(path)], ids=names)
def test_a_solver_file_imports_no_other_solver(path: Path) -> None:
    modules = {SOLVERS.joinpath(*name.split(".")[:depth]) for name in imported(path) for depth in (1, 2)}
    files = {module.with_suffix(".py") for module in modules} - {path}
    assert [file for file in files if file.is_file() and is_solver(file)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from tilewise.solvers.fourier.fft import FFT", {"fourier.fft.FFT"}),
        ("from tilewise.solvers.fourier import fft", {"fourier.fft"}),
        ("import tilewise.solvers.fourier.fft as f", {"fourier.fft"}),
        ("from tilewise import solvers", {""}),
        ("from tilewise.solvers import get", {"get"}),
        ("def late():\n    from tilewise.solvers.base import Solver", {"base.Solver"}),
        ("from tilewise.problems.conv.problem import ConvProblem\nimport torch", set()),
    ],
)
def test_every_way_to_import_is_seen(tmp_path: Path, line: str, found: set[str]) -> None:
    path = tmp_path / "some_solver.py"
    path.write_text(line + "\n", "utf-8")
    assert imported(path) == found


CONVOLUTION = re.compile(r"ConvProblem|FPROP|DGRAD|WGRAD|\bconv\b|convolution", re.IGNORECASE)
GENERAL = ("planner", "wisdom", "execute", "plan.py")
"""What knows problems of any kind, and no convolutions."""


def test_what_knows_any_problem_names_no_convolution() -> None:
    root = SOLVERS.parent
    files = [
        path for name in GENERAL for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    assert len(files) > 50
    lines = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if CONVOLUTION.search(line)
    ]
    assert lines == []
    assert CONVOLUTION.search((root / "problems" / "conv" / "problem.py").read_text("utf-8"))
