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
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(_is_run(node) for node in tree.body):
            found.append(Entry(path.stem, (ast.get_docstring(tree) or "").split("\n")[0]))
    return found


def load(name: str) -> Benchmark:
    """Import one benchmark. Raises ``KeyError`` with the known names."""
    known = {entry.name: entry for entry in entries()}
    if name not in known:
        raise KeyError(f"no benchmark named {name!r}; there are {', '.join(known)}")
    module = importlib.import_module(name)
    draw = getattr(module, "draw", None)
    return Benchmark(name, known[name].title, module.DEFAULTS, module.QUICK, module.run, draw)


def _is_run(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != "run":
        return False
    return [argument.arg for argument in node.args.args] == ["settings"]
