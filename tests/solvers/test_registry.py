"""How solvers are found: in families, in lone files, in nobody's silence."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
from tests.forked import run_script

import tilewise
from tilewise import solvers

SOLVER = """
    from tilewise.solvers.base import Cost
    from tilewise.solvers.conv import ConvSolver

    class {kind}(ConvSolver):
        name, version = {name!r}, 1

        def unsupported(self, p):
            return []

        def configs(self, p):
            return ()

        def cost(self, p, c):
            return Cost(1, 1)

        def bind(self, p, c, a, b, out):
            raise NotImplementedError
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's own folders by links, but for ``solvers``, to which a test may add."""
    copy = tmp_path / "tilewise"
    own = Path(tilewise.__file__).parent
    (copy / "solvers").mkdir(parents=True)
    for source, target in ((own, copy), (own / "solvers", copy / "solvers")):
        for entry in source.iterdir():
            if entry.name not in ("solvers", "__pycache__"):
                (target / entry.name).symlink_to(entry)
    return copy / "solvers"


def listed(package: Path) -> subprocess.CompletedProcess[str]:
    code = """
        import warnings
        from tilewise import solvers
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(*(solver.name for solver in solvers.all_solvers()))
        print(*(f"{type(w.message).__name__}: {w.message}" for w in caught), sep="\\n")
    """
    variables = {"PYTHONPATH": str(package.parent.parent), "PATH": "/usr/bin:/bin", "HOME": str(package.parent)}
    return run_script("-c", textwrap.dedent(code), environment=variables, has_tilewise=False)


def write(path: Path, kind: str = "Some", name: str = "some", text: str = SOLVER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).format(kind=kind, name=name), "utf-8")


@pytest.mark.slow
def test_a_lone_file_and_families_of_any_depth(package: Path) -> None:
    write(package / "alone.py", name="alone")
    for folder, name in (("family", "inside"), ("family/deep", "deeper")):
        write(package / folder / "__init__.py", text="")
        write(package / folder / f"{name}.py", name=name)
        write(package / folder / "_helper.py", name="helper")
    found = listed(package)
    assert found.returncode == 0, found.stderr
    names = found.stdout.splitlines()[0].split()
    assert {"alone", "inside", "deeper", "aten", "fft"} <= set(names)
    assert "helper" not in names
    assert len(names) == len(solvers.all_solvers()) + 3


def test_a_folder_that_would_be_passed_over_is_named(package: Path) -> None:
    write(package / "family" / "inside.py")
    (package / "only_leftovers" / "__pycache__").mkdir(parents=True)
    found = listed(package)
    assert "family: its solvers are not found; an __init__.py in it would do" in found.stderr
    write(package / "family" / "__init__.py", text="")
    assert listed(package).returncode == 0


def test_two_solvers_of_one_name(package: Path) -> None:
    write(package / "first.py", "First", "twin")
    write(package / "second.py", "Second", "twin")
    found = listed(package)
    assert found.returncode == 1
    assert "two solvers are named 'twin': tilewise.solvers.first and tilewise.solvers.second" in found.stderr


@pytest.mark.parametrize("text", ["import nothing_of_this_name", "1 / 0", "def broken(:"])
def test_a_file_that_cannot_be_imported_is_named_and_the_rest_works(package: Path, text: str) -> None:
    write(package / "broken.py", text=text)
    found = listed(package)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()[0].split()) == len(solvers.all_solvers())
    assert "SolverWarning: tilewise.solvers.broken cannot be imported, plans are made without it: " in found.stdout
