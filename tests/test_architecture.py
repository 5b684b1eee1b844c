"""What import-linter's layers cannot say: solver files do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOLVERS = Path(__file__).parent.parent / "src" / "tilewise" / "solvers"
PACKAGE = "tilewise.solvers"


def is_shared(name: str) -> bool:
    """``base`` and underscore modules are for all solver files."""
    return name == "base" or name.startswith("_")


def solver_files() -> list[Path]:
    return [path for path in sorted(SOLVERS.glob("*.py")) if not is_shared(path.stem)]


def imported_siblings(path: Path) -> set[str]:
    """Modules of the solvers package that a file imports, at the top or in a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{PACKAGE}{'.' if node.module else ''}{node.module or ''}" if node.level else node.module or ""
            names |= {module} if module.startswith(f"{PACKAGE}.") else {f"{module}.{a.name}" for a in node.names}
    return {name.split(".")[2] for name in names if name.startswith(f"{PACKAGE}.")}


@pytest.mark.parametrize("path", solver_files(), ids=lambda path: path.stem)
def test_a_solver_file_imports_no_other_solver(path: Path) -> None:
    assert {name for name in imported_siblings(path) if not is_shared(name)} == set()


@pytest.mark.parametrize(
    ("line", "siblings"),
    [
        ("from tilewise.solvers.fft import FFT", {"fft"}),
        ("from tilewise.solvers import fft", {"fft"}),
        ("import tilewise.solvers.fft as f", {"fft"}),
        ("from .fft import FFT", {"fft"}),
        ("from . import fft", {"fft"}),
        ("def late():\n    from tilewise.solvers.base import Solver", {"base"}),
        ("from tilewise.problem import ConvProblem\nimport torch", set()),
    ],
)
def test_every_way_to_import_a_sibling_is_seen(tmp_path: Path, line: str, siblings: set[str]) -> None:
    path = tmp_path / "some_solver.py"
    path.write_text(line + "\n", "utf-8")
    assert imported_siblings(path) == siblings
