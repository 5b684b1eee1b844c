"""The planner: wisdom first, then a search; equal problems once; what was measured is kept whatever happens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from tilewise import solvers
from tilewise.device import environment, is_capturing, torch_device
from tilewise.execute import parts_of
from tilewise.plan import Measurement, Plan
from tilewise.planner.divisions import BATCH_LEVEL, Choice, choice_of
from tilewise.planner.estimate import Profile, is_profile, measure_profile
from tilewise.planner.messages import Job
from tilewise.planner.options import RIGORS, NoPlanError, Options
from tilewise.planner.places import Devices
from tilewise.planner.search import Search
from tilewise.planner.store import Store
from tilewise.planner.trial import Known
from tilewise.planner.workers import Workers, WorkersWarning
from tilewise.problem import ConvProblem
from tilewise.solvers import Split
from tilewise.wisdom import Wisdom

__all__ = ["Planner", "Progress"]

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""``progress(done, total, text)`` as problems are planned."""

REPLAYED = " from CUDA graphs"
"""Added to the environment of times without launches, and to the constraints of plans by them."""
SAVE_EVERY_S = 2.0

ALONE = 3
"""So few problems are planned before a worker has started, unless each has every size to measure."""
MEASURING = ("measure", "patient")
EFFORT = {"estimate": 0, "wisdom_only": 0, "measure": 1, "patient": 2}


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
        self._read_ahead: dict[str, list[Measurement]] = {}
        self._plans: dict[tuple[str, str, str], Plan] = {}
        self._fronts: dict[tuple[str, str], dict[Options, tuple[Plan, ...]]] = {}
        self._profiles: dict[str, Profile] = {}
        self._refused: set[tuple[str, str, Choice]] = set()
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
                raise NoPlanError(f"no wisdom for {problem.key} with {_constraints(options)}")
            plan = self._searched(problem, options, Search.best)
            self._plans[self._plan_key(problem, options)] = plan
            self._refused.discard((environment(problem.device).key, problem.key, choice_of(plan)))  # checked just now
            self.wisdom.remember(
                environment(problem.device).key, problem.key, f"rigor={options.rigor} {_constraints(options)}", plan
            )
            return plan

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
        for rigor in _satisfying(options.rigor):
            known = kept.get(replace(options, rigor=rigor), ())
            if known and all(_fits(plan, problem, options) for plan in known):
                return known
        found = self._searched(problem, options, Search.front)
        if options.rigor != "wisdom_only":  # which knows more from one time to the next
            kept[options] = found
            for place, plan in enumerate([*found, *found[-1:]]):  # the last one twice: that is its end
                self.wisdom.remember(key, problem.key, _place_text(place, options), plan)
        return found

    def _preload_fronts(self, problems: list[ConvProblem], options: Options) -> None:
        """Read the fronts of all problems, which are kept as plans are, place by place.

        The last plan follows itself: what is behind it was left by a longer front, and one that was not written to its
        end is no front.
        """
        for device, rigor in itertools.product({p.device for p in problems}, _satisfying(options.rigor)):
            key, asked = environment(device).key, replace(options, rigor=rigor)
            here = dict.fromkeys(p.key for p in problems if p.device == device)
            fronts: dict[str, list[Plan]] = {k: [] for k in here if asked not in self._fronts.get((key, k), {})}
            for place in itertools.count():
                found = self.wisdom.plans_many(key, fronts, _place_text(place, asked)) if fronts else {}
                fronts = {problem: [*fronts[problem], plan] for problem, plan in found.items()}
                for problem, plans in list(fronts.items()):
                    if plans[-2:-1] == plans[-1:]:
                        self._fronts.setdefault((key, problem), {})[asked] = tuple(fronts.pop(problem)[:-1])
                if not fronts:
                    break

    def _also(self, problem: ConvProblem, options: Options) -> tuple[Plan, ...]:
        """Divisions within the limit from fronts of ``problem`` that were asked for with all else the same."""
        fronts = self._fronts.get((environment(problem.device).key, problem.key), {})
        return tuple(
            plan
            for asked, plans in fronts.items()
            if replace(asked, workspace=options.workspace) == options
            for plan in plans
            if not plan.leaf and _fits(plan, problem, options)
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
            latest = {(m.solver, m.version, m.config): m for m in search.log}
            return sorted(latest.values(), key=lambda m: (bool(m.reason), m.time_ms or 0.0, m.solver))

        return self._searched(problem, options, explained)

    def confirm(self, problem: ConvProblem, plan: Plan, options: Options | None = None) -> tuple[Plan, str]:
        """A plan from elsewhere with its workspace and error here, and why it may not be used; empty when it may.

        It is run and checked as one found here would be, but not timed. What is refused is not taken from wisdom either
        any more.
        """
        options = options or Options()
        with self._lock:
            checked, reason = self._searched(problem, options, lambda search: search.confirm(plan), timed=False)
            if reason:
                self._refused.add((environment(problem.device).key, problem.key, choice_of(plan)))
            return checked, reason

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
            key = environment(problem.device).key + (REPLAYED if options.cuda_graphs else "")
            store = self._stores.setdefault(key, Store(functools.partial(self._load, key)))
            try:
                profile = self.profile(problem.device) if timed else {}
                also = self._also(problem, options) if timed else ()
                self._read_parts(key, problem, options, store)
                return work(Search(problem, options, profile, store, also))
            except torch.OutOfMemoryError as error:
                text = str(error).splitlines()[0]
                raise NoPlanError(f"no plan for {problem.key}: no memory to measure with: {text}") from error
            finally:
                self._read_ahead.clear()
                self._save(key, store)

    def _read_parts(self, environment_key: str, problem: ConvProblem, options: Options, store: Store) -> None:
        """Read at once what wisdom knows of a problem and of its micro-batches."""
        keys = {problem.key}
        for solver in solvers.all_solvers():
            if not isinstance(solver, Split) or solver.at_once or solver.level > BATCH_LEVEL:
                continue
            if not solver.why_not(problem):
                keys |= {solver.child(problem, n).key for n in solver.sizes(problem, options.batch_sizes)}
        wanted = sorted(keys - store.known.keys())
        self._read_ahead = self.wisdom.measurements_many(environment_key, wanted) if wanted else {}

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

        What was measured of others is recorded first, now and then: a process may be killed.
        """
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save(environment_key, self._stores[environment_key])
        versions = {solver.name: solver.version for solver in solvers.all_solvers()}
        kept = self._read_ahead.pop(problem.key, None)
        if kept is None:
            kept = self.wisdom.measurements(environment_key, problem.key)
        found = {(m.solver, m.version, m.config): m for m in kept if versions.get(m.solver) == m.version}
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
            self.wisdom.record_many(environment_key, new)
            for problem in new:
                self._saved[environment_key, problem] = dict(store.known[problem])
        store.asked.clear()
        self._saved_at = time.monotonic()

    def _plan_key(self, problem: ConvProblem, options: Options) -> tuple[str, str, str]:
        return environment(problem.device).key, problem.key, f"{options.rigor} {_constraints(options)}"

    def _preload(self, problems: list[ConvProblem], options: Options) -> None:
        """Read the plans of all problems in one query an effort."""
        for device in {p.device for p in problems}:
            key = environment(device).key
            keys = [p.key for p in problems if p.device == device]
            for rigor in _satisfying(options.rigor):
                text = f"rigor={rigor} {_constraints(options)}"
                for problem, plan in self.wisdom.plans_many(key, keys, text).items():
                    if plan is not None:
                        self._plans.setdefault((key, problem, f"{rigor} {_constraints(options)}"), plan)

    def remembered(self, problem: ConvProblem, options: Options) -> Plan | None:
        """A plan made with at least the effort asked for, if it still fits the solvers and the limit.

        ``None`` where there is none; nothing is measured.
        """
        key = environment(problem.device).key
        for rigor in _satisfying(options.rigor):
            entry = (key, problem.key, f"{rigor} {_constraints(options)}")
            plan = self._plans.get(entry)
            if plan is None:
                plan = self.wisdom.plan(key, problem.key, f"rigor={rigor} {_constraints(options)}")
            if (
                plan is not None
                and _fits(plan, problem, options)
                and (*entry[:2], choice_of(plan)) not in self._refused
            ):
                self._plans[entry] = plan
                return plan
        return None


def _silent(done: int, total: int, text: str) -> None:
    """No progress is asked for."""


def _satisfying(rigor: str) -> list[str]:
    """Rigors whose plans serve a request for ``rigor``, the most thorough first."""
    return sorted((r for r in RIGORS if r != "wisdom_only" and EFFORT[r] >= EFFORT[rigor]), key=lambda r: -EFFORT[r])


def _place_text(place: int, options: Options) -> str:
    """What the plan at one place of a front is kept under."""
    return f"front={place} rigor={options.rigor} {_constraints(options)}"


def _constraints(options: Options) -> str:
    return (
        f"workspace={options.workspace} batch_sizes={options.batch_sizes} deterministic={options.deterministic} "
        f"error_limit={options.error_limit} strict={options.strict}"
        + (f" exclude={','.join(options.exclude)}" if options.exclude else "")
        + (REPLAYED if options.cuda_graphs else "")
    )


def _fits(plan: Plan, problem: ConvProblem, options: Options) -> bool:
    """Whether a remembered plan names solvers of this version that can solve the problem within the limit."""
    if options.workspace is not None and plan.workspace > options.workspace:
        return False
    try:
        solver = solvers.get(plan.solver)
        if solver.version != plan.version or solver.why_not(problem) or options.excludes(solver, plan.config):
            return False
        if not isinstance(solver, Split):
            return plan.leaf
        parts, plans = parts_of(plan, problem, solver)
        return all(
            part.problem is None or _fits(child, part.problem, options)
            for part, child in zip(parts, plans, strict=True)
        )
    except (KeyError, ValueError):
        return False
