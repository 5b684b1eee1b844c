"""The solvers of this package: one file per algorithm or split, in the folder of its family.

There is no list to edit: :func:`all_solvers` imports every module of these folders and finds the solvers in them.

>>> from tilewise.solvers import Prepare, Run, get
>>> get("winograd").name
'winograd'
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tilewise.problems.base import Problem
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable, Split, mismatch

__all__ = [
    "Cost",
    "Prepare",
    "Run",
    "Solver",
    "SolverUnavailable",
    "SolverWarning",
    "Split",
    "all_solvers",
    "baseline",
    "get",
    "mismatch",
    "solver_modules",
    "solving",
]


SHARED = ("base", "common", "conv")
"""Modules beside the families that hold no solver. Inside a family such modules have a leading underscore."""


class SolverWarning(UserWarning):
    """A file of solvers could not be imported: plans are made without its solvers.

    >>> import warnings
    >>> from tilewise import solvers
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", solvers.SolverWarning)  # a file without its package ends the program
    ...     _ = solvers.all_solvers()
    """


def solver_modules() -> Iterator[str]:
    """Names of all modules that may hold solvers: those in folders of families, at any depth, and files beside them.

    Raises ``ImportError`` for a folder without ``__init__.py``: its solvers would be left out silently.

    >>> from tilewise import solvers
    >>> "tilewise.solvers.winograd.winograd" in solvers.solver_modules()
    True
    """
    for module in _modules(__path__, __name__):
        if module.removeprefix(f"{__name__}.").split(".")[0] not in SHARED:
            yield module


def _modules(paths: Iterable[str], package: str) -> Iterator[str]:
    """Names of the modules under ``package``, whose folders are ``paths``, in subpackages too.

    Modules whose names begin with an underscore are left out. Raises ``ImportError`` for a folder without
    ``__init__.py``.
    """
    for folder in sorted(folder for path in paths for folder in Path(path).iterdir() if folder.is_dir()):
        if not (folder / "__init__.py").is_file() and any(folder.rglob("*.py")):
            raise ImportError(f"{folder}: its solvers are not found; an __init__.py in it would do")
    for info in pkgutil.iter_modules(paths):
        if info.name.startswith("_"):
            continue
        name = f"{package}.{info.name}"
        if info.ispkg:
            yield from _modules(importlib.import_module(name).__path__, name)
        else:
            yield name


@functools.cache
def all_solvers() -> tuple[Solver, ...]:
    """One instance of every solver in this package, sorted by name.

    A file that cannot be imported is left out with a :class:`SolverWarning`. Raises ``TypeError`` where two solvers
    have the same name, and ``ImportError`` as :func:`solver_modules`.

    >>> from tilewise import solvers
    >>> "winograd" in [solver.name for solver in solvers.all_solvers()]
    True
    """
    by_name: dict[str, Solver] = {}
    for name in solver_modules():
        for solver in _solvers_of(name):
            known = by_name.setdefault(solver.name, solver)
            if known is not solver:
                places = " and ".join(type(namesake).__module__ for namesake in (known, solver))
                raise TypeError(f"two solvers are named {solver.name!r}: {places}; another name for one would do")
    return tuple(by_name[name] for name in sorted(by_name))


def _solvers_of(module_name: str) -> list[Solver]:
    """An instance of each solver that the module defines. Empty, with a warning, where it cannot be imported."""
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        text = f"{module_name} cannot be imported, plans are made without it: {type(error).__name__}: {error}"
        warnings.warn(text, SolverWarning, stacklevel=2)
        return []
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module_name]
    return [kind() for kind in kinds if issubclass(kind, Solver) and not inspect.isabstract(kind)]


def get(name: str) -> Solver:
    """The solver called ``name``, such as ``"winograd"``. Raises ``KeyError`` with the known names.

    >>> from tilewise import solvers
    >>> solvers.get("winograd").version >= 1
    True
    """
    for solver in all_solvers():
        if solver.name == name:
            return solver
    raise KeyError(f"no solver named {name!r}; there are {', '.join(s.name for s in all_solvers())}")


def solving(problem: Problem | type[Problem]) -> Iterator[Solver]:
    """The solvers of problems of this kind, by name.

    >>> from tilewise import solvers
    >>> "micro_batch" in [solver.name for solver in solvers.solving(tilewise.ConvProblem)]
    True
    """
    kind = problem if isinstance(problem, type) else type(problem)
    return (solver for solver in all_solvers() if issubclass(kind, solver.solves))


def baseline(problem: Problem | type[Problem]) -> Solver:
    """The framework's own choice for problems of this kind. Raises ``LookupError`` where the kind has none.

    >>> from tilewise import solvers
    >>> solvers.baseline(tilewise.ConvProblem).name
    'aten'
    """
    kind = problem if isinstance(problem, type) else type(problem)
    return _baseline(kind, all_solvers())


@functools.lru_cache(maxsize=64)
def _baseline(kind: type[Problem], among: tuple[Solver, ...]) -> Solver:
    """As :func:`baseline`, of the solvers ``among`` which it is looked for."""
    baselines = [solver for solver in among if solver.baseline and issubclass(kind, solver.solves)]
    if len(baselines) != 1:
        names = ", ".join(solver.name for solver in baselines) or "none"
        raise LookupError(f"{kind.__name__}: one solver is to be its baseline, there is {names}")
    return baselines[0]
