"""Solvers: one file per algorithm or split, found by being here."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable, Split, mismatch

__all__ = [
    "Cost",
    "Prepare",
    "Run",
    "Solver",
    "SolverUnavailable",
    "Split",
    "all_solvers",
    "baseline",
    "get",
    "mismatch",
]


@functools.cache
def all_solvers() -> tuple[Solver, ...]:
    """One instance of every solver in this package, by name."""
    found: dict[str, Solver] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_") or module_info.name == "base":
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Solver) and kind.__module__ == module.__name__ and not inspect.isabstract(kind):
                solver = kind()
                if solver.name in found:
                    raise TypeError(f"two solvers are named {solver.name!r}")
                found[solver.name] = solver
    return tuple(found[name] for name in sorted(found))


def get(name: str) -> Solver:
    """The solver called ``name``. Raises ``KeyError`` with the known names."""
    for solver in all_solvers():
        if solver.name == name:
            return solver
    raise KeyError(f"no solver named {name!r}; there are {', '.join(s.name for s in all_solvers())}")


@functools.cache
def baseline() -> Solver:
    """The framework's own choice."""
    return next(solver for solver in all_solvers() if solver.baseline)
