"""Measurements in memory, in front of those in wisdom, where new ones are recorded every few seconds."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tilewise import solvers
from tilewise.machine.device import environment
from tilewise.machine.turns import beside
from tilewise.plan import Measurement, Plan
from tilewise.planner.caches.again import Again
from tilewise.planner.gate import why_unfit
from tilewise.planner.options import Options
from tilewise.planner.remembered import REPLAYED, is_sane
from tilewise.planner.search.known import Known, Store, StoreByDevice
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of
from tilewise.solvers import Split
from tilewise.solvers.base import BATCH_LEVEL
from tilewise.wisdom import Kept, Wisdom

__all__ = ["MeasurementCache", "baselines"]

P = TypeVar("P", bound=Problem)

SAVE_EVERY_S = 2.0
MOST_KNOWN = 4096
"""Most problems whose measurements are held in memory from one search to the next."""


class MeasurementCache:
    """The measurements of problems, in a :class:`~tilewise.planner.search.known.Store` for each environment.

    A store reads a problem's measurements from ``wisdom`` when a search first asks for them.
    """

    def __init__(self, wisdom: Wisdom, again: Again) -> None:
        self._wisdom, self._again = wisdom, again
        self._options = Options()
        """Those of the search under way."""
        self.on_load: Callable[[Problem], object] = lambda problem: None
        """Hears of each problem before its measurements are read."""
        self._stores: dict[str, Store] = {}
        self._saved: dict[tuple[str, str], Known] = {}
        """What wisdom has, by an environment's and a problem's key."""
        self._read_ahead: dict[str, list[Kept[Measurement]]] = {}
        """What was read for the searches under way, by problem key."""
        self._searches = 0
        self._saved_at = time.monotonic()

    def store(self, problem: Problem, options: Options) -> Store:
        """The measurements of the environment of ``problem``."""
        key = _environment_key(problem, options)
        return self._stores.setdefault(key, Store(functools.partial(self._load, key)))

    def alternatives(self, problem: Problem, options: Options) -> list[Plan]:
        """The fastest config of each solver that was measured here, of each :meth:`exactness`, fastest first.

        What was lost, what the options exclude and what exceeds the limit is left out. Nothing is checked.
        """
        store = self.store(problem, options)
        known, foreign = store.of(problem), store.foreign_of(problem)
        best: dict[tuple[str, object], tuple[float, Measurement]] = {}
        for key, m in known.items():
            if m.reason or m.time_ms is None or m.solver in options.exclude or key in foreign:
                continue
            if options.workspace is not None and (m.workspace or 0) > options.workspace:
                continue
            kind = m.solver, solvers.get(m.solver).exactness(m.config)
            if kind not in best or m.time_ms < best[kind][0]:
                best[kind] = m.time_ms, m
        fastest = [m for _, m in sorted(best.values(), key=lambda entry: entry[0])]
        plans = [leaf_plan(problem, m) for m in fastest if not isinstance(solvers.get(m.solver), Split)]
        return [plan for plan in plans if not why_unfit(plan, problem, options)]

    @contextlib.contextmanager
    def searching(self, problem: Problem, options: Options) -> Iterator[StoreByDevice]:
        """The stores for a search of ``problem``. What the search measures is recorded in wisdom, however it ends."""
        key, store = _environment_key(problem, options), self.store(problem, options)
        self._searches += 1
        before, self._options = self._options, options
        try:
            with beside(short=True):
                self._drop_again(options)
                self._preload(key, problem, options, store)
            try:
                yield StoreByDevice(lambda part: self.store(part, options))
            except Exception:
                with beside(short=True):
                    self._save_all()
                raise
            with beside(short=True):
                self._save_all()
        finally:  # where nothing waits any more, too, as the thread is to end
            self._searches -= 1
            self._options = before
            self._read_ahead.clear()
            self._save_all()
            if not self._searches:
                for key, store in self._stores.items():
                    self._forget(key, store)

    def _save_all(self) -> None:
        """Record what was measured in all environments."""
        for key, store in self._stores.items():
            self._save(key, store)

    def _drop_again(self, options: Options) -> None:
        """Drop from memory what a search with ``options`` measures again."""
        for problem in self._again.waiting:
            for store in self._stores.values():
                self._again.drop(problem, store.known.get(problem, {}), options)

    def _preload(self, environment_key: str, problem: Problem, options: Options, store: Store) -> None:
        """Read at once what wisdom knows of a problem and of its micro-batches."""
        keys = {problem.key}
        for solver in solvers.solving(problem):
            if not isinstance(solver, Split) or solver.at_once or solver.level > BATCH_LEVEL:
                continue
            if not solver.why_not(problem):
                keys |= {solver.child(problem, n).key for n in solver.sizes(problem, options.batch_sizes)}
        wanted = sorted(keys - store.known.keys())
        self._read_ahead = self._wisdom.kept_measurements(environment_key, wanted) if wanted else {}

    def _load(self, environment_key: str, problem: Problem) -> Known:
        """What wisdom knows of ``problem``; measurements of other versions of a solver are left out.

        The store is told which of them were made elsewhere. What was measured of others is recorded first, now and
        then: a process may be killed.
        """
        self.on_load(problem)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save(environment_key, self._stores[environment_key])
        versions = {solver.name: solver.version for solver in solvers.all_solvers()}
        kept = self._read_ahead.pop(problem.key, None)
        if kept is None:
            kept = self._wisdom.kept_measurements(environment_key, [problem.key])[problem.key]
        used = [entry for entry in kept if versions.get(entry.value.solver) == entry.value.version and is_sane(entry)]
        measurements = {(m.solver, m.version, m.config): m for m in (entry.value for entry in used)}
        foreign = {(m.solver, m.version, m.config) for m in (entry.value for entry in used if not entry.own)}
        self._stores[environment_key].foreign[problem.key] = foreign
        self._saved[environment_key, problem.key] = measurements
        known = dict(measurements)
        self._again.drop(problem.key, known, self._options)
        return known

    def _save(self, environment_key: str, store: Store) -> None:
        """Record what was measured of the problems asked for since the last time, in one transaction."""
        new: dict[str, list[Measurement]] = {}
        for problem in store.asked:
            saved = self._saved.get((environment_key, problem), {})
            changed = [m for entry, m in store.known.get(problem, {}).items() if saved.get(entry) != m]
            if changed:
                new[problem] = changed
        if new:
            self._wisdom.record_many(environment_key, new, own=True)
            for problem in new:
                self._saved[environment_key, problem] = dict(store.known[problem])
        store.asked.clear()
        self._saved_at = time.monotonic()

    def _forget(self, environment_key: str, store: Store) -> None:
        """Drop the measurements of too many problems from memory. Wisdom has them, and no search is running."""
        if len(store.known) > MOST_KNOWN:
            for problem in store.known:
                self._saved.pop((environment_key, problem), None)
            store.known.clear()


def baselines(wisdom: Wisdom, problems: Iterable[P]) -> dict[P, Measurement]:
    """What was measured last of torch's own choice on each problem; only those where that is known.

    The measurements have the device's and the host's time, and the host's load.
    """
    found: dict[P, Measurement] = {}
    distinct = list(dict.fromkeys(problems))
    for device in {p.device for p in distinct}:
        here = [p for p in distinct if p.device == device]
        known = wisdom.measurements_many(environment(device).key, [p.key for p in here])
        for problem in here:
            name = kind_of(problem).baseline
            timed = [m for m in known[problem.key] if m.solver == name and m.time_ms is not None]
            if timed:
                found[problem] = timed[-1]
    return found


def _environment_key(problem: Problem, options: Options) -> str:
    """The key of the environment under which wisdom keeps measurements of ``problem``."""
    return environment(problem.device).key + (REPLAYED if options.cuda_graphs else "")
