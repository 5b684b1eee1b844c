"""Measurements of problems, shared by searches: those of one device, or of all devices that a search meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tilewise.plan import Measurement
from tilewise.planner.search.rates import Key
from tilewise.problems.base import Problem

__all__ = ["Known", "Measurements", "Store", "StoreByDevice"]

Known = dict[Key, Measurement]
"""The measurements of one problem."""


class Measurements(Protocol):
    """What a search needs of the measurements known before it, and adds to them."""

    def of(self, problem: Problem) -> Known:
        """Measurements of ``problem`` by solver, version and config; grows as candidates are tried."""
        ...

    def foreign_of(self, problem: Problem) -> set[Key]:
        """The keys of those measurements of ``problem`` that were made elsewhere."""
        ...

    def any_foreign(self) -> bool:
        """Whether any measurement was made elsewhere."""
        ...


class Store:
    """Measurements known of each problem of one device.

    ``load`` brings those of earlier searches when a problem is first met.
    """

    def __init__(self, load: Callable[[Problem], Known]) -> None:
        self.known: dict[str, Known] = {}
        self.asked: set[str] = set()
        """Keys of the problems that were asked for since a caller last cleared this set."""
        self.foreign: dict[str, set[Key]] = {}
        """By problem key, what was measured elsewhere: its times are believed, its memory is not."""
        self._load = load

    def of(self, problem: Problem) -> Known:
        """Measurements of ``problem`` by solver, version and config; grows as candidates are tried."""
        key = problem.key
        if key not in self.known:
            self.known[key] = self._load(problem)
        self.foreign.setdefault(key, set())
        self.asked.add(key)  # after loading, which may record and forget what was asked for
        return self.known[key]

    def foreign_of(self, problem: Problem) -> set[Key]:
        """The keys of those measurements of ``problem`` that were made elsewhere."""
        self.of(problem)
        return self.foreign[problem.key]

    def any_foreign(self) -> bool:
        """Whether any measurement was made elsewhere."""
        return any(self.foreign.values())

    def forget_foreign(self) -> bool:
        """Forget what was measured elsewhere. Returns whether there was anything."""
        forgot_any = False
        for problem, keys in self.foreign.items():
            for key in keys:
                forgot_any = self.known.get(problem, {}).pop(key, None) is not None or forgot_any
            keys.clear()
        return forgot_any


class StoreByDevice:
    """The measurements of each problem in the store of its own device, of which ``store_of(problem)`` gives it.

    A part may be computed on another device than its whole.
    """

    def __init__(self, store_of: Callable[[Problem], Store]) -> None:
        self._store_of = store_of
        self._stores: dict[str, Store] = {}

    def of(self, problem: Problem) -> Known:
        """As :meth:`Store.of`."""
        return self._store(problem).of(problem)

    def foreign_of(self, problem: Problem) -> set[Key]:
        """As :meth:`Store.foreign_of`."""
        return self._store(problem).foreign_of(problem)

    def any_foreign(self) -> bool:
        """As :meth:`Store.any_foreign`, of all devices met so far."""
        return any(store.any_foreign() for store in self._stores.values())

    def _store(self, problem: Problem) -> Store:
        """The store of the device of ``problem``."""
        store = self._stores.get(problem.device)
        if store is None:
            store = self._stores[problem.device] = self._store_of(problem)
        return store
