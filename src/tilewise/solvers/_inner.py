"""Configs of solvers that compute with another solver: its name beside what is its own."""

from __future__ import annotations

from tilewise.plan import Config
from tilewise.solvers.base import Solver

__all__ = ["named", "own"]


def named(solver: Solver, c: Config) -> Config:
    """The other solver's config, and whose it is."""
    return Config(solver=solver.name, **c)


def own(c: Config) -> Config:
    """What of a config is the other solver's."""
    return Config(**{name: value for name, value in c.items() if name != "solver"})
