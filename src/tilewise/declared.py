"""What the files of solvers declare, read from their text: importing them would import torch.

>>> from tilewise.declared import names_at_once, solver_names
>>> "winograd" in solver_names(), "winograd" in names_at_once()
(True, False)
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["names_at_once", "solver_names"]

NAMED = re.compile(r'^    name, version = "(\w+)", \d+$', re.MULTILINE)
"""The line by which a solver says its name."""
AT_ONCE = re.compile(r"^    (?:[\w, ]*\W)?at_once\b[\w, ]* = ", re.MULTILINE)
"""A line by which a split may say that its parts run at once."""


def solver_names() -> tuple[str, ...]:
    """Names of all solvers, sorted, as their files have them."""
    return tuple(sorted({name for text in _texts() for name in NAMED.findall(text)}))


@functools.cache
def names_at_once() -> frozenset[str]:
    """Names of the splits whose parts run at once, as their classes have it."""
    return frozenset(name for text in _texts() if AT_ONCE.search(text) for name in _at_once(text))


def _texts() -> Iterator[str]:
    """The text of every file that may hold solvers."""
    folder = Path(__file__).with_name("solvers")
    yield from (path.read_text("utf-8") for path in folder.rglob("*.py") if not path.name.startswith("_"))


def _at_once(text: str) -> Iterator[str]:
    """Names of a file's solvers whose class sets ``at_once``."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            values = dict(_values(node))
            name = values.get("name")
            if values.get("at_once") is True and isinstance(name, str):
                yield name


def _values(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    """Names and constants that a class sets, also several in one line."""
    for line in node.body:
        if isinstance(line, ast.Assign):
            for target in line.targets:
                pairs = [(target, line.value)]
                if isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple):
                    pairs = [*zip(target.elts, line.value.elts, strict=True)]
                for name, value in pairs:
                    if isinstance(name, ast.Name) and isinstance(value, ast.Constant):
                        yield name.id, value.value
