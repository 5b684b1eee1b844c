"""Measurements of the problems of one device, shared by its searches."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.planner.rates import Key
from tilewise.planner.trial import Known
from tilewise.problem import ConvProblem

__all__ = ["Store"]


class Store:
    """Measurements known of each problem; ``load`` brings those of earlier searches when a problem is first met."""

    def __init__(self, load: Callable[[ConvProblem], Known]) -> None:
        self.known: dict[str, Known] = {}
        self.asked: set[str] = set()
        """Keys of the problems that were asked for, which a caller may clear."""
        self.foreign: dict[str, set[Key]] = {}
        """By problem, what was not measured by a process of this user here: its times are believed, its memory not."""
        self._load = load

    def of(self, problem: ConvProblem) -> Known:
        """Measurements of ``problem`` by solver, version and config; grows as candidates are tried."""
        key = problem.key
        if key not in self.known:
            self.known[key] = self._load(problem)
        self.foreign.setdefault(key, set())
        self.asked.add(key)  # after loading, which may record and forget what was asked for
        return self.known[key]

    def forget_foreign(self) -> bool:
        """Forget what was measured elsewhere; whether there was anything."""
        found = False
        for problem, keys in self.foreign.items():
            for key in keys:
                found = self.known.get(problem, {}).pop(key, None) is not None or found
            keys.clear()
        return found
