"""The registry of the kinds of problems, which also reads a problem's key back by its first word.

Each kind is a folder of this package. Its ``__init__`` calls :func:`register`, and nothing else names it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from tilewise.problems.base import Compute, Problem, Seams
from tilewise.problems.error import Error

__all__ = ["ErrorsOf", "Kind", "from_key", "kind_of", "kinds", "register"]


class ErrorsOf(Protocol):
    """A check: the worst errors of ``compute`` against ``problem`` in float64, on data of several kinds.

    Errors are infinite where ``compute`` leaves or makes NaN. ``seams`` tells where a plan's parts meet. ``own`` is
    torch's own way, if there is one: on data where every way drifts, errors no worse than torch's count as none.
    """

    def __call__(self, problem: Any, compute: Compute, seams: Seams = ..., own: Compute | None = ...) -> Error: ...


def _none(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """One kind of problems.

    ``problem`` is the class. ``called`` is what they are called in messages, in the plural. ``baseline`` is the name of
    the solver that is the framework's own choice for them. ``errors_of`` checks what computes one;
    :mod:`tilewise.problems.checks` has a check for any kind. ``tasks`` are the names of a layer's computations.
    ``notation(problem)`` is the text that users write for it, ``None`` where there is none. ``small_example(device)``
    is a problem of microseconds that every solver is asked about to load libraries; ``fast_example(device)`` one that
    torch computes in fp32 as fast as any product: by it the device's speed is estimated.
    """

    problem: type[Problem]
    called: str
    baseline: str
    errors_of: ErrorsOf
    tasks: tuple[str, ...] = ("forward",)
    notation: Callable[[Any], str | None] = _none
    small_example: Callable[[str], Problem | None] = _none
    fast_example: Callable[[str], Problem | None] = _none


_registered: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Make a kind of problems known by the first word of its keys.

    Raises ``TypeError`` for a class that lacks something of :class:`~tilewise.problems.base.Problem`, and for a second
    kind of one name.
    """
    problem_class = kind.problem
    names: set[str] = {f.name for f in fields(problem_class)} if is_dataclass(problem_class) else set()
    missing = [name for name in Problem.ATTRIBUTES if name not in names and not hasattr(problem_class, name)]
    missing += sorted(problem_class.__abstractmethods__)
    if missing:
        raise TypeError(f"{problem_class.__name__} is no kind of problem yet: it has no {', '.join(missing)}")
    registered = _registered.setdefault(problem_class.kind, kind)
    if (registered.problem.__module__, registered.problem.__qualname__) != (
        problem_class.__module__,
        problem_class.__qualname__,
    ):
        places = f"{registered.problem.__module__} and {problem_class.__module__}"
        raise TypeError(
            f"two kinds of problems are called {problem_class.kind!r}: {places}; another word for one would do"
        )


@functools.cache
def _load() -> None:
    """Import every kind's folder beside this file, so that each registers itself."""
    package = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.ispkg:
            importlib.import_module(f"{package}.{info.name}")


def kinds() -> dict[str, Kind]:
    """Every kind by the first word of its keys."""
    _load()
    return dict(_registered)


def kind_of(problem: Problem) -> Kind:
    """The kind of ``problem``. Raises ``KeyError`` with the known words."""
    kind = _registered.get(problem.kind) or kinds().get(problem.kind)
    if kind is None:
        raise KeyError(f"no kind of problems is called {problem.kind!r}; there are {', '.join(sorted(_registered))}")
    return kind


def from_key(text: str) -> Problem:
    """Read a problem's key back, whoever wrote it. Raises ``ValueError`` for what is the key of no kind here."""
    word = text.split(" ", 1)[0]
    kind = _registered.get(word) or kinds().get(word)
    if kind is None:
        known = ", ".join(sorted(kinds()))
        raise ValueError(f"problem {text[:200]!r}: not a problem's key, whose first word is one of {known}")
    return kind.problem.from_key(text)
