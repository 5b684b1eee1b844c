"""Measurements of the problems of one device, shared by its searches."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.planner.trial import Known
from tilewise.problem import ConvProblem

__all__ = ["Store"]


class Store:
    """Measurements known of each problem; ``load`` brings those of earlier searches when a problem is first met."""

    def __init__(self, load: Callable[[ConvProblem], Known]) -> None:
        self.known: dict[str, Known] = {}
        self.asked: set[str] = set()
        """Keys of the problems that were asked for, which a caller may clear."""
        self._load = load

    def of(self, problem: ConvProblem) -> Known:
        """Measurements of ``problem`` by solver, version and config; grows as candidates are tried."""
        key = problem.key
        if key not in self.known:
            self.known[key] = self._load(problem)
        self.asked.add(key)  # after loading, which may record and forget what was asked for
        return self.known[key]
