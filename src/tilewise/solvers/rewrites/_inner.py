"""Configs of solvers that compute with another solver: the other solver's name and its parameters."""

from __future__ import annotations

from tilewise.plan import Config
from tilewise.solvers.base import Solver

__all__ = ["inner_config", "named"]


def named(solver: Solver, c: Config) -> Config:
    """The config that runs ``solver`` with its config ``c``."""
    return Config(solver=solver.name, **c)


def inner_config(c: Config) -> Config:
    """The other solver's config inside ``c``."""
    return Config(**{name: value for name, value in c.items() if name != "solver"})
