"""The planner: wisdom first, then a search; equal problems once; what was measured is kept whatever happens."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from tilewise import solvers
from tilewise.device import environment, is_capturing, torch_device
from tilewise.plan import Measurement, Plan
from tilewise.planner.divisions import BATCH_LEVEL
from tilewise.planner.estimate import Profile, is_profile, measure_profile
from tilewise.planner.gate import as_here, why_unfit
from tilewise.planner.memory import (
    REPLAYED,
    Entry,
    constraints_text,
    fits,
    is_current,
    place_text,
    plan_text,
    read_fronts,
    read_plans,
    satisfying,
    written,
)
from tilewise.planner.messages import Job
from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.pareto import MOST_POINTS, front
from tilewise.planner.places import Devices
from tilewise.planner.search import Search
from tilewise.planner.store import Store
from tilewise.planner.trial import Known
from tilewise.planner.workers import Workers, WorkersWarning
from tilewise.problem import ConvProblem
from tilewise.recent import Recent
from tilewise.solvers import Split
from tilewise.wisdom import Kept, Wisdom, WisdomWarning

__all__ = ["Planner", "Progress"]

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""``progress(done, total, text)`` as problems are planned."""

SAVE_EVERY_S = 2.0
MOST_PLANS = 16384
"""Plans, fronts and refusals that a planner remembers beside wisdom, which has them all but refusals."""
MOST_KNOWN = 4096
"""Problems whose measurements a planner remembers from one search to the next."""

ALONE = 3
"""So few problems are planned before a worker has started, unless each has every size to measure."""
MEASURING = ("measure", "patient")
MOST_MS, MOST_WORKSPACE = 1e9, 1 << 50
"""What was measured elsewhere and is beyond these was not measured: eleven days, a pebibyte."""


class Planner:
    """Finds plans and remembers them.

    ``wisdom`` is where measurements and plans are kept (``None``: the user's cache directory); ``progress`` is called
    by :meth:`plan_many`. ``devices``: where :meth:`plan_many` measures at once, in a process for each beside this one:
    ``"all"`` GPUs of the current one's model, or a list (``[0, 1]``); ``None``, here alone.

    Threads may share a planner, which then plans for one after the other: measuring sets torch's convolution flags for
    its length, so no other thread should use them meanwhile. Raises ``ValueError`` naming ``devices``.
    """

    def __init__(
        self, wisdom: Wisdom | None = None, progress: Progress | None = None, *, devices: Devices | None = None
    ) -> None:
        self.wisdom = Wisdom() if wisdom is None else wisdom
        self.progress = progress
        self.workers = None if devices is None else Workers(devices, self.wisdom.path)
        self._lock = threading.RLock()
        self._stores: dict[str, Store] = {}
        self._saved: dict[tuple[str, str], Known] = {}
        self._read_ahead: dict[str, list[Kept[Measurement]]] = {}
        self._plans: Recent[Entry, Plan] = Recent(MOST_PLANS)
        self._unchecked: Recent[Entry, Plan] = Recent(MOST_PLANS)
        """Plans that no process of this user checked here."""
        self._fronts: Recent[tuple[str, str], dict[Options, tuple[Plan, ...]]] = Recent(MOST_PLANS)
        self._unchecked_fronts: Recent[Entry, tuple[Plan, ...]] = Recent(MOST_PLANS)
        self._profiles: dict[str, Profile] = {}
        self._refused: Recent[tuple[str, str, tuple[object, ...]], tuple[Plan, str]] = Recent(MOST_PLANS)
        """Plans from elsewhere that may not be used here, with the reason."""
        self._searches = 0
        self._saved_at = time.monotonic()

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        """The fastest plan for ``problem`` within ``options``; its solver is ``aten`` where torch's own choice won.

        Raises :class:`NoPlanError` when nothing keeps the constraints (every solver's reasons are in the message) or
        ``wisdom_only`` finds none, ``RuntimeError`` while a CUDA graph is being captured.
        """
        options = options or Options()
        with self._lock:
            known = self.remembered(problem, options)
            if known is not None:
                return known
            if options.rigor == "wisdom_only":
                refused = "".join(
                    f"; a plan that was not made here was refused: {reason}" for _, reason in self._refusals(problem)
                )
                raise NoPlanError(f"no wisdom for {problem.key} with {constraints_text(options)}{refused}")
            plan = self._found(problem, options)
            self._keep(problem, options, plan)
            return plan

    def _found(self, problem: ConvProblem, options: Options) -> Plan:
        """The plan of a search. Where what was measured elsewhere leaves none, nothing of it is believed."""
        try:
            return self._searched(problem, options, Search.best)
        except NoPlanError:
            if options.rigor not in MEASURING or not self._store(problem, options).forget_foreign():
                raise
            return self._searched(problem, options, Search.best)

    def _keep(self, problem: ConvProblem, options: Options, plan: Plan) -> None:
        """Remember a plan that was checked just now."""
        key = environment(problem.device).key
        self._plans[key, problem.key, options] = plan
        self._refused.pop((key, problem.key, written(plan)), None)
        self.wisdom.remember(key, problem.key, plan_text(options), plan, own=True)

    def _refusals(self, problem: ConvProblem) -> list[tuple[Plan, str]]:
        """Plans from elsewhere for ``problem`` that were refused, with the reasons."""
        key = environment(problem.device).key
        return [found for (device, asked, _), found in self._refused.items() if (device, asked) == (key, problem.key)]

    def plan_many(self, problems: Iterable[ConvProblem], options: Options | None = None) -> dict[ConvProblem, Plan]:
        """A plan for each distinct problem; progress is reported. Raises as :meth:`plan`.

        Ctrl-C keeps what was measured until then.
        """
        options = options or Options()
        distinct = list(dict.fromkeys(problems))
        self._preload(distinct, options)
        tell = self.progress or _silent
        begun: dict[ConvProblem, None] = {}

        def told(problem: ConvProblem) -> None:
            tell(len(begun), len(distinct), problem.key)
            begun[problem] = None

        self.plan_ahead(distinct, options, told)
        plans: dict[ConvProblem, Plan] = {}
        for problem in distinct:
            if problem not in begun:
                told(problem)
            plans[problem] = self.plan(problem, options)
        tell(len(distinct), len(distinct), "")
        return plans

    def plan_ahead(
        self, problems: Sequence[ConvProblem], options: Options, told: Callable[[ConvProblem], None]
    ) -> None:
        """Measure on all devices at once what :meth:`plan` would measure here; ``told`` hears of each when it is done.

        Nothing where the planner has no further device, where fewer than four problems are unknown (unless
        ``batch_sizes`` is ``all``) or nothing is to be measured. What has no plan is for :meth:`plan` to say.
        """
        workers = self.workers
        if workers is None or not workers.others or options.rigor not in MEASURING:
            return
        with self._lock:
            missing = [p for p in problems if p.device == workers.name and self.remembered(p, options) is None]
            if not missing or (len(missing) <= ALONE and options.batch_sizes != "all"):
                return
            if self.wisdom.in_memory:
                text = "wisdom is kept in memory, which no other process sees: planned on one device"
                warnings.warn(text, WorkersWarning, stacklevel=3)
                return
            self.profile(workers.name)  # workers read it from wisdom

            def own(job: Job) -> None:
                with contextlib.suppress(NoPlanError):  # said when the plan is asked for
                    if job.share is None:
                        self.plan(job.problem, job.options)
                    else:
                        self.measure_share(job.problem, job.options, *job.share)

            workers.plan([Job(problem, options) for problem in missing], own, told)
            self._preload(missing, options)

    def measure_share(self, problem: ConvProblem, options: Options, index: int, count: int) -> None:
        """Measure what a plan may be made of, of the sizes between powers of two only one in ``count``, 0 for none."""
        if not count:
            options, count = replace(options, batch_sizes="powers_of_two"), 1
        self._searched(problem, options, lambda search: search.measure_share(index, count))

    def close(self) -> None:
        """End the processes of other devices, if there are any; they end by themselves ten seconds after their last."""
        if self.workers is not None:
            self.workers.close()

    def front(self, problem: ConvProblem, options: Options | None = None) -> tuple[Plan, ...]:
        """The desirable plans (Oyama et al. 2018, III-C1), fastest first, each in less workspace than the one before.

        Times of divisions are the sums of their parts'. ``options.workspace`` bounds the front; it is empty where
        nothing keeps the constraints. What was found once is remembered.
        """
        options = options or Options()
        return self.fronts([problem], options, progress=False)[problem]

    def fronts(
        self, problems: Iterable[ConvProblem], options: Options | None = None, *, progress: bool = True
    ) -> dict[ConvProblem, tuple[Plan, ...]]:
        """:meth:`front` of each distinct problem; progress is reported. Ctrl-C keeps what was measured until then."""
        options = options or Options()
        distinct = list(dict.fromkeys(problems))
        report = self.progress if progress and self.progress is not None else lambda done, total, text: None
        found: dict[ConvProblem, tuple[Plan, ...]] = {}
        with self._lock:
            self._preload_fronts(distinct, options)
            for done, problem in enumerate(distinct):
                report(done, len(distinct), problem.key)
                found[problem] = self._front(problem, options)
        report(len(distinct), len(distinct), "")
        return found

    def _front(self, problem: ConvProblem, options: Options) -> tuple[Plan, ...]:
        key = environment(problem.device).key
        kept = self._fronts.setdefault((key, problem.key), {})
        for asked in satisfying(options):
            unchecked = self._unchecked_fronts.pop((key, problem.key, asked), ())
            if unchecked and (checked := self._admitted_front(problem, unchecked, asked)):
                kept[asked] = checked
                self._keep_front(problem, asked, checked)
            known = kept.get(asked, ())
            if known and all(fits(plan, problem, options) for plan in known):
                return known
        found = self._searched(problem, options, Search.front)
        if options.rigor != "wisdom_only":  # which knows more from one time to the next
            kept[options] = found
            self._keep_front(problem, options, found)
        return found

    def _keep_front(self, problem: ConvProblem, options: Options, found: tuple[Plan, ...]) -> None:
        key = environment(problem.device).key
        for place, plan in enumerate([*found, *found[-1:]]):  # the last one twice: that is its end
            self.wisdom.remember(key, problem.key, place_text(place, options), plan, own=True)

    def _preload_fronts(self, problems: list[ConvProblem], options: Options) -> None:
        known = [(*key, asked) for key, fronts in self._fronts.items() for asked in fronts]
        for entry, kept in read_fronts(self.wisdom, problems, options, [*known, *self._unchecked_fronts]):
            plans = tuple(one.value for one in kept)
            if all(one.own for one in kept):
                self._fronts.setdefault(entry[:2], {})[entry[2]] = plans
            else:
                self._unchecked_fronts[entry] = plans

    def _admitted_front(self, problem: ConvProblem, plans: tuple[Plan, ...], options: Options) -> tuple[Plan, ...]:
        """A front from elsewhere as it is here; none where one of its plans may not be used."""
        found = []
        for plan in plans[:MOST_POINTS]:
            admitted = self._admitted(problem, plan, options)
            if admitted is None or not math.isfinite(admitted.time_ms):
                return ()
            found.append(admitted)
        return tuple(found[i] for i in front((plan.time_ms, plan.workspace) for plan in found))

    def _also(self, problem: ConvProblem, options: Options) -> tuple[Plan, ...]:
        """Divisions within the limit from fronts of ``problem`` that were asked for with all else the same."""
        fronts = self._fronts.get((environment(problem.device).key, problem.key)) or {}
        return tuple(
            plan
            for asked, plans in fronts.items()
            if replace(asked, workspace=options.workspace) == options
            for plan in plans
            if not plan.leaf and fits(plan, problem, options)
        )

    def explain(self, problem: ConvProblem, options: Options | None = None) -> list[Measurement]:
        """Every solver and config tried on ``problem``: time, workspace and error, or the reason it was lost.

        A solver that cannot solve it appears once, with an empty config and its reasons.
        """
        options = options or Options()

        def explained(search: Search) -> list[Measurement]:
            if options.rigor == "wisdom_only":
                search.survey()
            else:
                with contextlib.suppress(NoPlanError):  # the log holds the reasons, which is all that is asked here
                    search.best()
            refused = (
                Measurement(p.solver, p.version, p.config, reason=f"its plan from elsewhere was refused: {reason}")
                for p, reason in self._refusals(problem)
                if is_current(p)
            )
            latest = {(m.solver, m.version, m.config): m for m in (*refused, *search.log)}
            return sorted(latest.values(), key=lambda m: (bool(m.reason), m.time_ms or 0.0, m.solver))

        return self._searched(problem, options, explained)

    def confirm(
        self, problem: ConvProblem, plan: Plan, options: Options | None = None, *, by_peak: bool = True
    ) -> tuple[Plan, str]:
        """A plan from elsewhere with its workspace and error here, and why it may not be used; empty when it may.

        Solvers are asked whether they offer it; then it is run and checked as one found here would be, but not timed.
        Unless ``by_peak``, what libraries take while it runs is not looked at, only what the plan is bound to. What is
        refused is not taken from wisdom either any more.
        """
        options = options or Options()
        with self._lock:
            checked, reason = plan, why_unfit(plan, problem, options)
            told = reason
            if not reason:
                plan = as_here(plan, problem)
                checked, reason = self._searched(
                    problem, options, lambda search: search.confirm(plan, by_peak=by_peak), timed=False
                )
                told = f"{plan.solver} {reason}"
            if reason:
                self._refused[environment(problem.device).key, problem.key, written(plan)] = plan, told
            return checked, reason

    def _admitted(self, problem: ConvProblem, plan: Plan, options: Options) -> Plan | None:
        """A plan in wisdom that no process of this user checked here, checked now; ``None`` where it is refused."""
        key = environment(problem.device).key, problem.key, written(plan)
        if not is_current(plan) or key in self._refused:
            return None
        checked, reason = self.confirm(problem, plan, options)
        if not reason:
            return checked
        told = self._refused[key][1]
        text = f"{self.wisdom.path}: a plan that was not made here is not used for {problem.key}: {told}"
        warnings.warn(text, WisdomWarning, stacklevel=5)
        return None

    def torch_ms(self, problems: Iterable[ConvProblem]) -> dict[ConvProblem, float]:
        """torch's time on each problem in ms, as measured last beside its plans; only those where that is known."""
        found: dict[ConvProblem, float] = {}
        name = solvers.baseline().name
        distinct = list(dict.fromkeys(problems))
        for device in {p.device for p in distinct}:
            here = [p for p in distinct if p.device == device]
            known = self.wisdom.measurements_many(environment(device).key, [p.key for p in here])
            for problem in here:
                times = [m.time_ms for m in known[problem.key] if m.solver == name and m.time_ms is not None]
                if times:
                    found[problem] = times[-1]
        return found

    def _searched(
        self, problem: ConvProblem, options: Options, work: Callable[[Search], T], *, timed: bool = True
    ) -> T:
        if is_capturing(torch_device(problem.device)):
            raise RuntimeError("nothing can be planned while a CUDA graph is being captured: plan before the capture")
        with self._lock:
            key, store = self._store_key(problem, options), self._store(problem, options)
            self._searches += 1
            try:
                profile = self.profile(problem.device) if timed else {}
                also = self._also(problem, options) if timed else ()
                self._read_parts(key, problem, options, store)
                return work(Search(problem, options, profile, store, also))
            except torch.OutOfMemoryError as error:
                text = str(error).splitlines()[0]
                raise NoPlanError(f"no plan for {problem.key}: no memory to measure with: {text}") from error
            finally:
                self._searches -= 1
                self._read_ahead.clear()
                self._save(key, store)
                if not self._searches:
                    self._forget(key, store)

    def _forget(self, environment_key: str, store: Store) -> None:
        """Let go of measurements of many problems, all of which wisdom has by now; no search is at them."""
        if len(store.known) > MOST_KNOWN:
            for problem in store.known:
                self._saved.pop((environment_key, problem), None)
            store.known.clear()

    def _store_key(self, problem: ConvProblem, options: Options) -> str:
        return environment(problem.device).key + (REPLAYED if options.cuda_graphs else "")

    def _store(self, problem: ConvProblem, options: Options) -> Store:
        key = self._store_key(problem, options)
        return self._stores.setdefault(key, Store(functools.partial(self._load, key)))

    def _read_parts(self, environment_key: str, problem: ConvProblem, options: Options, store: Store) -> None:
        """Read at once what wisdom knows of a problem and of its micro-batches."""
        keys = {problem.key}
        for solver in solvers.all_solvers():
            if not isinstance(solver, Split) or solver.at_once or solver.level > BATCH_LEVEL:
                continue
            if not solver.why_not(problem):
                keys |= {solver.child(problem, n).key for n in solver.sizes(problem, options.batch_sizes)}
        wanted = sorted(keys - store.known.keys())
        self._read_ahead = self.wisdom.kept_measurements(environment_key, wanted) if wanted else {}

    def profile(self, device: str) -> Profile:
        """The measured rates of ``device``, from wisdom where they are known."""
        key = environment(device).key
        with self._lock:
            if key not in self._profiles:
                found = self.wisdom.profile(key)
                if found is None or not is_profile(found):
                    found = measure_profile(device)
                    self.wisdom.remember_profile(key, found)
                self._profiles[key] = found
            return self._profiles[key]

    def _load(self, environment_key: str, problem: ConvProblem) -> Known:
        """What wisdom knows of ``problem``; measurements of other versions of a solver are left out.

        The store is told which of them were made elsewhere. What was measured of others is recorded first, now and
        then: a process may be killed.
        """
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save(environment_key, self._stores[environment_key])
        versions = {solver.name: solver.version for solver in solvers.all_solvers()}
        kept = self._read_ahead.pop(problem.key, None)
        if kept is None:
            kept = self.wisdom.kept_measurements(environment_key, [problem.key])[problem.key]
        used = [entry for entry in kept if versions.get(entry.value.solver) == entry.value.version and _is_sane(entry)]
        found = {(m.solver, m.version, m.config): m for m in (entry.value for entry in used)}
        foreign = {(m.solver, m.version, m.config) for m in (entry.value for entry in used if not entry.own)}
        self._stores[environment_key].foreign[problem.key] = foreign
        self._saved[environment_key, problem.key] = found
        return dict(found)

    def _save(self, environment_key: str, store: Store) -> None:
        """Record what was measured of the problems asked for since the last time, in one transaction."""
        new: dict[str, list[Measurement]] = {}
        for problem in store.asked:
            saved = self._saved.get((environment_key, problem), {})
            found = [m for entry, m in store.known.get(problem, {}).items() if saved.get(entry) != m]
            if found:
                new[problem] = found
        if new:
            self.wisdom.record_many(environment_key, new, own=True)
            for problem in new:
                self._saved[environment_key, problem] = dict(store.known[problem])
        store.asked.clear()
        self._saved_at = time.monotonic()

    def _preload(self, problems: list[ConvProblem], options: Options) -> None:
        """Read the plans of all problems in one query an effort."""
        for entry, kept in read_plans(self.wisdom, problems, options):
            if entry not in self._plans:
                (self._plans if kept.own else self._unchecked)[entry] = kept.value

    def remembered(self, problem: ConvProblem, options: Options) -> Plan | None:
        """A plan made with at least the effort asked for, if it still fits the solvers and the limit.

        ``None`` where there is none; nothing is measured. A plan that no process of this user checked here is run and
        checked first, once; one that is refused is a :class:`~tilewise.wisdom.WisdomWarning` with the reason.
        """
        key = environment(problem.device).key
        for asked in satisfying(options):
            entry = key, problem.key, asked
            if entry not in self._plans and entry not in self._unchecked:
                kept = self.wisdom.kept_plans(key, [problem.key], plan_text(asked)).get(problem.key)
                if kept is not None:
                    (self._plans if kept.own else self._unchecked)[entry] = kept.value
            plan = self._plans.get(entry)
            if plan is None and entry in self._unchecked:
                plan = self._admitted(problem, self._unchecked.pop(entry), asked)
                if plan is not None:
                    self._keep(problem, asked, plan)
            refused = bool(self._refused) and plan is not None and (*entry[:2], written(plan)) in self._refused
            if plan is not None and not refused and fits(plan, problem, options):
                return plan
            self._plans.pop(entry, None)  # another process may have written a newer one by the next time
        return None


def _is_sane(entry: Kept[Measurement]) -> bool:
    """Whether numbers of what was measured elsewhere are such as are measured."""
    m = entry.value
    return entry.own or ((m.time_ms or 0.0) <= MOST_MS and (m.workspace or 0) <= MOST_WORKSPACE)


def _silent(done: int, total: int, text: str) -> None:
    """No progress is asked for."""
