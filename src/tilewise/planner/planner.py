"""The planner asks wisdom first, then searches. Equal problems are planned once; measurements are always kept."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from tilewise.machine.device import is_capturing, torch_device
from tilewise.plan import Measurement, Plan
from tilewise.planner.caches.again import Again
from tilewise.planner.caches.fronts import FrontCache
from tilewise.planner.caches.measurements import MeasurementCache, baselines
from tilewise.planner.caches.overtaken import overtaken
from tilewise.planner.caches.plans import PlanCache
from tilewise.planner.caches.rates import Rates
from tilewise.planner.caches.refusals import Refusals
from tilewise.planner.experience import Experience
from tilewise.planner.gate import as_here, why_unfit
from tilewise.planner.measuring.cold import made_once
from tilewise.planner.options import MEASURING, NoPlanError, Options, names_to_measure
from tilewise.planner.order import in_order
from tilewise.planner.processes.messages import Job
from tilewise.planner.processes.places import Devices
from tilewise.planner.processes.workers import Workers, WorkersWarning
from tilewise.planner.remembered import constraints_text, is_current
from tilewise.planner.search.estimate import Profile
from tilewise.planner.search.explain import explained
from tilewise.planner.search.search import Search
from tilewise.problems.base import Problem
from tilewise.wisdom import Wisdom, WisdomWarning

__all__ = ["Lacking", "Planner", "Progress", "best_if_compiled", "do_job", "settle", "shares_of"]

P = TypeVar("P", bound=Problem)

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""``progress(done, total, text)`` as problems are planned."""

REFUSED = "; a plan that was not made here was refused: "
ALONE = 3
"""Up to so many problems are planned here alone, faster than workers start, unless all sizes are to be measured."""


class Planner:
    """Finds plans and remembers them.

    ``wisdom`` is where measurements and plans are kept (``None``: the user's cache directory); ``progress`` is called
    by :meth:`plan_many`. ``devices`` are those on which :meth:`plan_many` measures at once, with a process for each
    beside this one: ``"all"`` GPUs of the current model, or a list (``[0, 1]``); ``None`` measures here alone.
    Threads may share a planner, which then plans for one after the other: measuring sets torch's flags for
    its length, so no other thread should use them meanwhile. Raises ``ValueError`` naming the argument at fault.

    >>> plan = tilewise.Planner().plan(tilewise.GemmProblem(16, 32, 8), tilewise.Options(rigor="estimate"))
    """

    def __init__(
        self, wisdom: Wisdom | None = None, progress: Progress | None = None, *, devices: Devices | None = None
    ) -> None:
        if wisdom is not None and not isinstance(wisdom, Wisdom):
            raise ValueError(f"wisdom={wisdom!r:.80}: a tilewise.wisdom.Wisdom, or None, would do")
        if progress is not None and not callable(progress):
            raise ValueError(f"progress={progress!r:.80}: a function of (done, total, text), or None, would do")
        self.wisdom = Wisdom() if wisdom is None else wisdom
        self.progress = progress
        self.workers = None if devices is None else Workers(devices, self.wisdom.path)
        self._again = Again()
        self.measurements = MeasurementCache(self.wisdom, self._again)
        self._refusals = Refusals()
        self.best: Callable[[Search], Plan] = best_of  # how a search chooses
        self._plans = PlanCache(self.wisdom, self._refusals)
        self._fronts = FrontCache(self.wisdom)
        self._experience = Experience()
        self._rates = Rates(self.wisdom)
        self._lock = threading.RLock()

    def plan(self, problem: Problem, options: Options | None = None) -> Plan:
        """The fastest plan for ``problem`` within ``options``; its solver is ``aten`` where torch's own choice won.

        Raises :class:`NoPlanError` when nothing keeps the constraints (every solver's reasons are in the message) or
        ``wisdom_only`` finds none, ``RuntimeError`` while a CUDA graph is being captured.
        """
        options = _asked(options, problem)
        with self._lock:
            known_plan = self.remembered(problem, options)
            if known_plan is not None and not self._again.is_wanted(known_plan, options):
                return known_plan
            if options.rigor == "wisdom_only":
                refused = "".join(f"{REFUSED}{reason}" for reason in self._refusals.reasons(problem))
                raise NoPlanError(f"no wisdom for {problem.key} with {constraints_text(options)}{refused}")
            if known_plan is not None:
                self._again.begin(problem.key)
            try:
                plan = self._found(problem, options)
            except NoPlanError:
                if known_plan is None:
                    raise
                return known_plan  # of a busy host, and there is no newer one
            self._plans.keep(problem, options, plan)
            self._rates.has_planned = True
            return plan

    def _found(self, problem: Problem, options: Options) -> Plan:
        """The plan that a search finds. Where there is none, it searches again without measurements from elsewhere."""
        try:
            return self._searched(problem, options, self.best)
        except NoPlanError:
            if options.rigor not in MEASURING or not self.measurements.store(problem, options).forget_foreign():
                raise
            return self._searched(problem, options, self.best)

    def plan_many(self, problems: Iterable[P], options: Options | None = None) -> dict[P, Plan]:
        """A plan for each distinct problem, with progress. Raises as :meth:`plan`. Ctrl-C keeps what was measured."""
        distinct = list(dict.fromkeys(problems))
        options = _asked(options, *distinct)
        self._plans.preload(distinct, options)
        _look_for_overtaken(self, distinct, options)
        far = _Far(tell := self.progress or _silent, len(distinct))
        self.plan_ahead(distinct, options, far.told)
        plans: dict[P, Plan] = {}
        over_cold_caches = options.rigor in MEASURING and any(p.device_type == "cpu" for p in distinct)
        with made_once(over_cold_caches), contextlib.closing(_order(self, distinct, options, far.look)) as order:
            for problem in order:
                if problem not in far.begun:
                    far.told(problem)
                plans[problem] = self.plan(problem, options)
        tell(len(distinct), len(distinct), "")
        return {problem: plans[problem] for problem in distinct}

    def plan_ahead(self, problems: Sequence[Problem], options: Options, told: Callable[[Problem], None]) -> None:
        """Measure on all devices at once what :meth:`plan` would measure here; ``told`` hears of each when it is done.

        Nothing where the planner has no further device, where fewer than four problems are unknown (unless
        ``batch_sizes`` is ``all``) or nothing is to be measured. What has no plan is for :meth:`plan` to say. Nothing
        either where a batch may be shared with other devices, which must be quiet then.
        """
        workers = self.workers
        if workers is None or not workers.others or options.rigor not in MEASURING or options.share_with:
            return
        with self._lock:
            known = {p: self.remembered(p, options) for p in problems if p.device == workers.name}
            missing = [p for p, plan in known.items() if plan is None or self._again.is_wanted(plan, options)]
            if not missing or (len(missing) <= ALONE and options.batch_sizes != "all"):
                return
            if self.wisdom.in_memory:
                text = "wisdom is kept in memory, which no other process sees: planned on one device"
                warnings.warn(text, WorkersWarning, stacklevel=3)
                return
            self.profile(workers.name)  # workers read it from wisdom
            jobs = [Job(problem, options) for problem in missing]
            for problem in missing:
                self._again.begin(problem.key)
                self._plans.forget(problem, options)  # workers write a newer one where it was planned on a busy host
            workers.plan(jobs, functools.partial(do_job, self), told)
            self._plans.preload(missing, options)

    def measure_share(self, problem: Problem, options: Options, index: int, count: int) -> None:
        """Measure candidates; of sizes between powers of two only every ``count``-th, from ``index`` on (0: none)."""
        if not count:
            options, count = replace(options, batch_sizes="powers_of_two"), 1
        self._searched(problem, options, lambda search: search.measure_share(index, count))

    def close(self) -> None:
        """End the processes of other devices, if there are any; they end by themselves ten seconds after their last."""
        if self.workers is not None:
            self.workers.close()

    def front(self, problem: Problem, options: Options | None = None) -> tuple[Plan, ...]:
        """The desirable plans (Oyama et al. 2018, III-C1), fastest first, each in less workspace than the one before.

        Times of divisions are the sums of their parts'. ``options.workspace`` bounds the front; it is empty where
        nothing keeps the constraints. What was found once is remembered.
        """
        return self.fronts([problem], options, progress=False)[problem]

    def fronts(
        self, problems: Iterable[Problem], options: Options | None = None, *, progress: bool = True
    ) -> dict[Problem, tuple[Plan, ...]]:
        """:meth:`front` of each distinct problem; progress is reported. Ctrl-C keeps what was measured until then."""
        distinct = list(dict.fromkeys(problems))
        options = _asked(options, *distinct)
        report = self.progress if progress and self.progress is not None else _silent
        found_fronts: dict[Problem, tuple[Plan, ...]] = {}
        with self._lock:
            self._fronts.preload(distinct, options)
            for done, problem in enumerate(distinct):
                report(done, len(distinct), problem.key)
                found_fronts[problem] = self._front(problem, options)
        report(len(distinct), len(distinct), "")
        return found_fronts

    def _front(self, problem: Problem, options: Options) -> tuple[Plan, ...]:
        """The front of one problem, remembered or searched for."""
        known_front = self._fronts.find(problem, options, self._admitted)
        if known_front:
            if not any(self._again.is_wanted(plan, options, front=True) for plan in known_front):
                return known_front
            self._again.begin(problem.key, front=True)
        plans = self._searched(problem, options, Search.front)
        if options.rigor != "wisdom_only":  # which knows more from one time to the next
            self._fronts.keep(problem, options, plans)
        return plans

    def explain(
        self, problem: Problem, options: Options | None = None, *, every_config_of: Iterable[str] = ()
    ) -> list[Measurement]:
        """Every solver and config tried on ``problem``: estimate, time, workspace and error, or the reason it was lost.

        A solver that cannot solve it appears once, with an empty config and its reasons. ``every_config_of`` names
        solvers of which all configs are measured, whatever their estimates, and checked against float64 each;
        :attr:`progress` hears of each such solver. Raises ``ValueError`` for other names, for splits, and where
        ``options.rigor`` is ``wisdom_only``.
        """
        options = _asked(options, problem)
        names = names_to_measure(every_config_of, options, "every_config_of")
        tell = self.progress or _silent
        return self._searched(
            problem, options, lambda search: explained(search, names, self._refusals.as_lost(problem), tell)
        )

    def alternatives(self, problem: Problem, options: Options | None = None) -> list[Plan]:
        """The fastest config of each solver and exactness that was measured, by time. :meth:`confirm` checks one."""
        with self._lock:
            return self.measurements.alternatives(problem, options or Options())

    def confirm(
        self, problem: Problem, plan: Plan, options: Options | None = None, *, by_peak: bool = True
    ) -> tuple[Plan, str]:
        """Check a plan from elsewhere. Returns it as it is here, and why it may not be used; empty when it may.

        Solvers are asked whether they offer it; then it is run and checked as one found here would be, but not timed.
        Unless ``by_peak``, what libraries take while it runs is not looked at, only what the plan is bound to. What is
        refused is not taken from wisdom either any more.
        """
        options = options or Options()
        with self._lock:
            checked, reason = plan, why_unfit(plan, problem, options)
            reason_told = reason
            if not reason:
                plan = as_here(plan, problem)
                checked, reason = self._searched(
                    problem, options, lambda search: search.confirm(plan, by_peak=by_peak), timed=False
                )
                reason_told = f"{plan.solver} {reason}"
            if reason:
                self._refusals.add(problem, plan, reason_told)
            return checked, reason

    def _admitted(self, problem: Problem, plan: Plan, options: Options) -> Plan | None:
        """A plan in wisdom that no process of this user checked here, checked now; ``None`` where it is refused."""
        if not is_current(plan) or self._refusals.reason(problem, plan):
            return None
        checked, reason = self.confirm(problem, plan, options)
        if not reason:
            return checked
        told = self._refusals.reason(problem, plan)
        text = f"{self.wisdom.path}: a plan that was not made here is not used for {problem.key}: {told}"
        warnings.warn(text, WisdomWarning, stacklevel=6)
        return None

    def measure_torch(self, problem: Problem, options: Options) -> None:
        """Measure torch's choice on one problem, where it is not known; :meth:`torch_ms` has it then."""
        self._searched(problem, options, Search.measure_torch)

    def torch_ms(self, problems: Iterable[P]) -> dict[P, float]:
        """The device's time of torch's choice on each problem in ms, as measured last; only where that is known."""
        return {p: m.time_ms for p, m in baselines(self.wisdom, problems).items() if m.time_ms is not None}

    def _searched(self, problem: Problem, options: Options, work: Callable[[Search], T], *, timed: bool = True) -> T:
        """What ``work`` makes of a search for ``problem``. Estimates are only made where something is ``timed``."""
        if is_capturing(torch_device(problem.device)):
            raise RuntimeError("nothing can be planned while a CUDA graph is being captured: plan before the capture")
        with self._lock, self.measurements.searching(problem, options) as store:
            try:
                profile_of = self.profile if timed else _no_profile
                also = self._fronts.divisions(problem, options) if timed else ()
                experience = Experience() if self._rates.in_haste else self._experience  # that is worth its rates alone
                return work(Search(problem, options, profile_of, store, also, experience))
            except torch.OutOfMemoryError as error:
                text = str(error).splitlines()[0]
                raise NoPlanError(f"no plan for {problem.key}: no memory to measure with: {text}") from error

    def profile(self, device: str) -> Profile:
        """The measured rates of ``device``, from wisdom where they are known; in haste those of a typical device."""
        with self._lock:
            return self._rates.of(device)

    def remembered(self, problem: Problem, options: Options) -> Plan | None:
        """A plan made with at least the effort asked for, if it still fits the solvers and the limit.

        ``None`` where there is none; nothing is measured. A plan that no process of this user checked here is run and
        checked first, once; one that is refused is a :class:`~tilewise.wisdom.WisdomWarning` with the reason.
        """
        return self._plans.find(problem, options, self._admitted)


def settle(planner: Planner, problems: Iterable[Problem]) -> None:
    """Let the plans of ``problems`` stay as they are for ``planner``.

    Otherwise what was timed on a busy host is planned again once the host is quiet. Whoever has shown a plan, and is to
    run by it next, settles it before.
    """
    with planner._lock:
        planner._again.settle(problem.key for problem in problems)


def _look_for_overtaken(planner: Planner, problems: Sequence[Problem], options: Options) -> None:
    """Have those problems planned again whose remembered plans torch's own choice has overtaken."""
    if options.rigor in MEASURING:
        with planner._lock:
            known = {problem: planner.remembered(problem, options) for problem in problems}
        plans = {problem: plan for problem, plan in known.items() if plan is not None}
        planner._again.overtake(problem.key for problem in overtaken(planner.wisdom, plans, options))


class _Far:
    """How far the planning of ``total`` problems is, which ``tell`` hears of.

    On a GPU a look at a problem while kernels are compiled is half of its planning.
    """

    def __init__(self, tell: Progress, total: int) -> None:
        self._tell, self._total = tell, total
        self._looked: dict[Problem, None] = {}
        self.begun: dict[Problem, None] = {}
        """The problems that are planned or being planned."""

    def look(self, problem: Problem) -> None:
        """A problem is looked at."""
        self._looked[problem] = None
        self._tell((len(self._looked) - 1 + len(self.begun)) // 2, self._total, problem.key)

    def told(self, problem: Problem) -> None:
        """A problem is planned now."""
        self.look(problem)
        self.begun[problem] = None


def _order(planner: Planner, problems: Sequence[P], options: Options, look: Callable[[Problem], None]) -> Generator[P]:
    """``problems`` in the order in which they are planned; ``look`` hears of each that is looked at before.

    Nothing is measured ahead for a planner that plans in a way of its own.
    """
    if type(planner).plan is not Planner.plan:
        return (problem for problem in problems)

    def begin(problem: Problem) -> list[tuple[Problem, Plan]]:
        look(problem)
        with contextlib.suppress(NoPlanError):
            return planner._searched(problem, options, Search.begin)
        return []

    return in_order(problems, options, lambda problem: planner.remembered(problem, options) is not None, begin)


def _no_profile(device: str) -> Profile:
    """Stands in for measured rates where nothing is estimated."""
    return {}


def _asked(options: Options | None, *problems: object) -> Options:
    """The options, or the defaults. Raises ``ValueError`` for what are no options, or where something is no problem."""
    if not isinstance(options, Options | None):
        raise ValueError(f"options={options!r:.80}: a tilewise.Options, or None, would do")
    for problem in problems:
        if not isinstance(problem, Problem):
            would_do = "a problem would do, such as tilewise.GemmProblem(16, 32, 8); tilewise.notation reads text"
            raise ValueError(f"problem={' '.join(f'{problem!r:.160}'.split()):.80}: {would_do}")
    return options or Options()


def _silent(done: int, total: int, text: str) -> None:
    """Stands in where no progress is asked for."""


def best_of(search: Search) -> Plan:
    """:meth:`Search.best`, the usual :attr:`Planner.best`."""
    return search.best()


class Lacking(Exception):
    """A problem is not planned yet: workers are to do ``jobs`` before."""

    def __init__(self, jobs: list[str]) -> None:
        super().__init__(f"{len(jobs)} kernels are still to be compiled")
        self.jobs = jobs


def best_if_compiled(search: Search) -> Plan:
    """:meth:`Search.best`, for :attr:`Planner.best`. Raises :class:`Lacking` after measuring what is compiled."""
    jobs = search.lacking()
    if jobs:
        raise Lacking(jobs)
    return search.best()


def shares_of(
    planner: Planner, problem: Problem, options: Options, steps: int, beside: tuple[str, ...]
) -> tuple[list[Plan], list[tuple[str, Plan]], list[Measurement]]:
    """What :meth:`Search.shares` measures of one problem, and its log: for benchmarks of shares of devices."""
    return planner._searched(problem, options, lambda search: (*search.shares(steps, beside), search.log))


def do_job(planner: Planner, job: Job) -> None:
    """Plan or measure what ``job`` asks for. That there is no plan is said where the plan is asked for."""
    with contextlib.suppress(NoPlanError):
        if job.share is None:
            planner.plan(job.problem, job.options)
        else:
            planner.measure_share(job.problem, job.options, *job.share)
