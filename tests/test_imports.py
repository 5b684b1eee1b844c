"""How the modules of ``src/tilewise`` hang together: no circle of imports, none upwards, no folder or file too large.

Every import is read, also one inside a function or under ``TYPE_CHECKING``: a module that needs another there needs it
all the same.

Of packages the rule is: an import is of the module that it takes something from. ``from tilewise.nn import optimize``
takes the module ``tilewise.nn.optimize`` where there is one of that name, and else a name that ``tilewise.nn`` itself
has, that is, its ``__init__``. That Python also runs the ``__init__`` of every package on the way does not count: else
each package that offers names of its modules would be a circle with each of them. So a module may not take from the
``__init__`` above it what that has from elsewhere: this is a circle, and is found as one.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"
MOST_FILES, MOST_LINES = 20, 500
MOST_OF_CLASS, MOST_OF_FUNCTION = 250, 60
"""Lines of one class and of one function, docstrings included."""
DEVICE_CODE = ("tilewise/kernels/triton/", "tilewise/kernels/cpu/")
"""Where functions are kernels for Triton and Numba, which cannot be cut at will."""
LONG: dict[str, tuple[int, str]] = {}
"""Files of more lines than others may have: how many, and why."""
BY_NAME = {
    "tilewise": "public names come from their modules on first use",
    "tilewise.cli.caffe": "a command is the module of its name",
    "tilewise.cli.program": "a command is the module of its name",
    "tilewise.distributed.layers": "finds handlers of torch's functions by their being there",
    "tilewise.frontends.networks": "imports the user's model",
    "tilewise.kernels.building.jobs": "a job names its kernel",
    "tilewise.kernels.cuda.nvrtc": "tries the packages that CUDA's bindings may be in",
    "tilewise.nn.layers.kinds": "finds kinds of modules by their being there",
    "tilewise.problems.kinds": "finds kinds of problems by their being there",
    "tilewise.solvers": "finds solvers by their being there",
}
"""Modules that import others by names which they compute, and why."""

Graph = dict[str, set[str]]


def modules_in(root: Path) -> dict[str, Path]:
    """Every module below ``root`` by its full name; a package stands for its ``__init__``."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package_of(name: str, path: Path, level: int) -> list[str]:
    """The package that ``level`` dots stand for in module ``name``."""
    parts = name.split(".")
    above = level - 1 if path.name == "__init__.py" else level
    return parts[: len(parts) - above]


def names_imported(name: str, path: Path) -> Iterator[str]:
    """Full names that a module imports, in all of its text; of ``from a import b`` it is ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package_of(name, path, node.level) if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(named := name_given(node), ast.Constant):
            yield str(named.value)


def name_given(call: ast.Call) -> ast.expr | None:
    """What ``import_module`` or ``__import__`` is called with; ``None`` for any other call."""
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if called not in ("import_module", "__import__"):
        return None
    return next(iter((*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "name"))))


def graph_of(root: Path) -> Graph:
    """Of each module those that it imports, itself left out."""
    modules = modules_in(root)
    graph: Graph = {}
    for name, path in modules.items():
        taken = {full if full in modules else full.rpartition(".")[0] for full in names_imported(name, path)}
        graph[name] = (taken & modules.keys()) - {name}
    return graph


def reached(graph: Graph, start: str) -> set[str]:
    """What ``start`` imports, at any distance."""
    found: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Modules that import each other, at any distance: the strongly connected components of more than one module."""
    behind = {name: reached(graph, name) for name in graph}
    found = {tuple(sorted(other for other in behind[name] if name in behind[other])) for name in graph}
    return sorted(list(circle) for circle in found if circle)


def lines_of(layer: str) -> tuple[list[str], bool]:
    """The modules of one line of a contract, and whether they may not import each other."""
    independent = ":" not in layer
    return [part.strip(" ()") for part in layer.replace(":", "|").split("|")], independent


def upward(graph: Graph, container: str, layers: list[str]) -> list[str]:
    """Imports against the order of ``layers``, the highest first, of the modules and folders in ``container``."""
    level: dict[str, int] = {}
    apart = set()
    for number, layer in enumerate(layers):
        members, independent = lines_of(layer)
        level |= dict.fromkeys(members, number)
        if independent:
            apart.add(number)

    def child(name: str) -> str | None:
        head = name.removeprefix(container + ".").split(".")[0]
        return head if name.startswith(container + ".") and head in level else None

    found = []
    for name, imports in graph.items():
        for other in imports:
            above, below = child(name), child(other)
            if above is None or below is None or above == below:
                continue
            if level[above] > level[below] or (level[above] == level[below] and level[above] in apart):
                found.append(f"{name} imports {other}")
    return sorted(found)


def contracts() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]  # type: ignore[no-any-return]


def too_long(root: Path, long: Mapping[str, tuple[int, str]]) -> list[str]:
    """Files of more lines than they may have."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name, lines = path.relative_to(root).as_posix(), len(path.read_text("utf-8").splitlines())
        most, _ = long.get(name, (MOST_LINES, ""))
        if lines > most:
            found.append(f"{name}: {lines}")
    return found


def too_long_definitions(root: Path) -> list[str]:
    """Functions and classes of more lines than they may have, outside device code."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(DEVICE_CODE):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            most = MOST_OF_CLASS if isinstance(node, ast.ClassDef) else MOST_OF_FUNCTION
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > most:
                found.append(f"{name}: {node.name}")
    return found


def too_full(root: Path) -> list[str]:
    """Folders with more Python files than one may have."""
    counted = Counter(path.parent.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return sorted(f"{name}: {files}" for name, files in counted.items() if files > MOST_FILES)


@functools.cache
def whole_graph() -> Graph:
    """That of the library: read by the first test that asks, not by every worker that collects this file."""
    return graph_of(SOURCES)


def test_no_modules_import_each_other() -> None:
    assert len(whole_graph()) > 300
    assert circles(whole_graph()) == []


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: str(contract["id"]))
def test_no_import_points_up(contract: dict[str, object]) -> None:
    assert contract["type"] == "layers"
    assert contract["exhaustive"] is True
    (container,), layers = contract["containers"], contract["layers"]  # type: ignore[misc]
    assert upward(whole_graph(), container, layers) == []


@pytest.mark.slow
def test_modules_that_import_by_computed_names_are_known() -> None:
    """Their imports cannot be read here. So each is named with its reason, and it is no way to hide a circle."""
    found = set()
    for name, path in modules_in(SOURCES).items():
        calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
        if any(not isinstance(name_given(call), ast.Constant | None) for call in calls):
            found.add(name)
    assert found == BY_NAME.keys()


def test_no_folder_is_too_full() -> None:
    assert too_full(SOURCES) == []


def test_no_class_or_function_is_too_long() -> None:
    assert too_long_definitions(SOURCES) == []


def test_no_file_is_too_long() -> None:
    assert too_long(SOURCES, LONG) == []


def written(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


BACK = "from p.a import A"
ROUND = {
    "at the top": BACK,
    "inside a function": f"def late():\n    {BACK}",
    "for types alone": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {BACK}",
    "as a module of a package": "from p import a",
    "by its full name": "import p.a as other",
    "relative": "from .a import A",
    "relative, the module itself": "from . import a",
    "by name": "import importlib\nimportlib.import_module('p.a')",
    "by name inside a method": "class B:\n    def run(self):\n        return __import__('p.a')",
    "everything": "from p.a import *",
    "through a third": "from p.c import A",
    "through the package's own names": "from p import A",
    "through the package's own names, relative": "from . import A",
}
"""Ways for module ``p.b`` to import ``p.a``, which imports it."""


@pytest.mark.parametrize("text", ROUND.values(), ids=ROUND)
def test_a_circle_is_found_wherever_its_imports_are(tmp_path: Path, text: str) -> None:
    files = {"p/__init__.py": BACK, "p/a.py": "from p.b import B", "p/b.py": text, "p/c.py": BACK, "p/d.py": BACK}
    (circle,) = circles(graph_of(written(tmp_path, files)))
    assert {"p.a", "p.b"} <= set(circle)
    assert "p.d" not in circle


def test_a_package_that_offers_names_of_its_modules_is_no_circle(tmp_path: Path) -> None:
    inner = {"p/q/__init__.py": "", "p/q/b.py": ""}
    files = {"p/__init__.py": BACK, "p/a.py": "from p.q.b import B\nimport os.path", **inner}
    graph = graph_of(written(tmp_path, files))
    assert graph == {"p": {"p.a"}, "p.a": {"p.q.b"}, "p.q": set(), "p.q.b": set()}
    assert circles(graph) == []


@pytest.mark.parametrize("text", ["from p.high.a import A", "def late():\n    from p.high import a"])
def test_an_import_upwards_is_found_wherever_it_is(tmp_path: Path, text: str) -> None:
    files = {"p/__init__.py": "", "p/high/__init__.py": "", "p/high/a.py": "import p.low", "p/low.py": text}
    graph = graph_of(written(tmp_path, files))
    assert upward(graph, "p", ["(high)", "(low)"]) == ["p.low imports p.high.a"]
    assert upward(graph, "p", ["(low)", "(high)"]) == ["p.high.a imports p.low"]
    assert upward(graph, "p", ["(low) | (high)"]) == ["p.high.a imports p.low", "p.low imports p.high.a"]
    assert upward(graph, "p", ["(low) : (high)"]) == []
    assert upward(graph, "p.high", ["a"]) == []


def test_a_full_folder_and_a_long_file_are_found(tmp_path: Path) -> None:
    line = "x = 1\n"
    written(tmp_path, {f"p/full/{number}.py": line * MOST_LINES for number in range(MOST_FILES)})
    assert too_full(tmp_path) == []
    assert too_long(tmp_path, {}) == []
    written(tmp_path, {"p/full/one_more.py": "", "p/long.py": line * (MOST_LINES + 1)})
    assert too_full(tmp_path) == [f"p/full: {MOST_FILES + 1}"]
    assert too_long(tmp_path, {}) == [f"p/long.py: {MOST_LINES + 1}"]
    assert too_long(tmp_path, {"p/long.py": (MOST_LINES + 1, "")}) == []


def test_long_classes_and_functions_are_found(tmp_path: Path) -> None:
    kernel = "def late():\n" + "    x = 1\n" * MOST_OF_FUNCTION
    text = "class Long:\n" + "    x = 1\n" * MOST_OF_CLASS + kernel
    short = "class Short:\n" + "    x = 1\n" * (MOST_OF_CLASS - 1) + kernel.removesuffix("    x = 1\n")
    written(tmp_path, {"p/long.py": text, "p/short.py": short, "tilewise/kernels/triton/a.py": kernel})
    assert too_long_definitions(tmp_path) == ["p/long.py: Long", "p/long.py: late"]
