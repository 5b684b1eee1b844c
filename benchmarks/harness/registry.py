"""Benchmarks are found by being there: a file in ``benchmarks/`` that defines ``run(settings)``."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.picture import Figure
    from harness.result import Result
    from harness.settings import Settings

FOLDER = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Entry:
    """One benchmark before it is imported: its name and the first line of its docstring."""

    name: str
    title: str


@dataclass(frozen=True)
class Benchmark:
    """One imported benchmark. ``quick`` overrides ``defaults`` in quick mode; both are option texts by name.

    ``draw`` makes the picture of a result document, where the benchmark has one.
    """

    name: str
    title: str
    defaults: Mapping[str, str]
    quick: Mapping[str, str]
    run: Callable[[Settings], Result]
    draw: Callable[[dict[str, Any]], Figure] | None = None


def entries() -> list[Entry]:
    """Every benchmark, by name. Files are parsed, not imported, so that listing them costs nothing."""
    found = (_entry(path) for path in sorted(FOLDER.glob("*.py")))
    return [entry for entry in found if entry is not None]


def load(name: str) -> Benchmark:
    """Import one benchmark. Raises ``KeyError`` with the known names."""
    path = FOLDER / f"{name}.py"
    entry = _entry(path) if name.isidentifier() and path.is_file() else None  # that of all takes a second
    if entry is None:
        raise KeyError(f"no benchmark named {name!r}; there are {', '.join(each.name for each in entries())}")
    module = importlib.import_module(name)
    draw = getattr(module, "draw", None)
    return Benchmark(name, entry.title, module.DEFAULTS, module.QUICK, module.run, draw)


def _entry(path: Path) -> Entry | None:
    """The benchmark in a file; ``None`` where it holds none."""
    tree = ast.parse(path.read_text())
    if not any(_is_run(node) for node in tree.body):
        return None
    return Entry(path.stem, (ast.get_docstring(tree) or "").split("\n")[0])


def _is_run(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != "run":
        return False
    return [argument.arg for argument in node.args.args] == ["settings"]
