"""What one search knows and measures of its root problem: torch's own choice, what is wrong, what was dropped."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewise import solvers
from tilewise.machine.device import torch_device
from tilewise.machine.places import check_present
from tilewise.machine.torch_state import undisturbed
from tilewise.plan import Config, Measurement, Plan, format_bytes
from tilewise.planner.experience import Experience
from tilewise.planner.measuring import replacing
from tilewise.planner.measuring.samples import Sample
from tilewise.planner.measuring.times import Timer, Took, check_peak_is_known
from tilewise.planner.options import EXCLUDED, Options
from tilewise.planner.search.benchmark import Benchmark
from tilewise.planner.search.checker import Checker
from tilewise.planner.search.divisions import Choice, choice_of
from tilewise.planner.search.estimate import Profile, estimate_ms
from tilewise.planner.search.known import Measurements
from tilewise.planner.search.leaves import (
    baseline_over,
    leaf_parts,
    leaf_plan,
)
from tilewise.planner.search.partitions import told_as
from tilewise.planner.search.rates import Key
from tilewise.planner.search.trial import UNKNOWN, Trial
from tilewise.problems.base import Problem
from tilewise.problems.kept_runs import KEPT_BYTES, keeping_runs
from tilewise.problems.operands import Tensors, make_bias, make_operands, make_residual, make_results
from tilewise.solvers import Split

__all__ = ["Root"]


@dataclass
class Root:
    """The root ``problem`` of a search, its tensors, and what came of everything that was tried on it so far."""

    problem: Problem
    options: Options
    profile_of: Callable[[str], Profile]
    """Gives a device's measured rates."""
    store: Measurements
    experience: Experience | None = None
    """What estimates were worth for problems before."""

    def __post_init__(self) -> None:
        check_present(self.options.share_with)
        self.log: list[Measurement] = []
        self.estimates: dict[tuple[str, Config], float] = {}
        """Expected milliseconds on the whole problem, by solver and config."""
        self.baseline: Measurement | None = None
        """torch's own choice, once it was measured."""
        self.wrong: dict[tuple[str, Config], str] = {}
        """Leaves with wrong results, and the reason. They are left out of this search at every size."""
        self.dropped: dict[Choice, str] = {}
        """Plans that failed when run whole, and the reason."""
        self.samples: dict[Choice, Sample] = {}
        """The times of each plan that was run whole."""
        self.time_ratios: dict[Choice, list[float]] = {}
        """For each plan, its time divided by torch's in every round, the least first."""
        self._timers: dict[str, Timer] = {}
        self.timer = self.timer_of(self.problem)  # before anything is allocated: refuses in a capture
        self.tensors = Tensors(make_operands(self.problem), make_results(self.problem), make_residual(self.problem))
        self.bias = make_bias(self.problem)
        self.checker = Checker(self.problem, self.options, lambda: self.baseline)
        self.for_front = False
        """Whether a whole front is looked for."""

    @property
    def profile(self) -> Profile:
        """The measured rates of the root problem's device."""
        return self.profile_of(self.problem.device)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Set torch's flags as the problem wants them, and keep the caller's settings away.

        What checks compare with is kept from one plan to the next.
        """
        problem, deterministic = self.problem, self.options.deterministic
        kept = KEPT_BYTES.get(problem.device_type, 0)
        with problem.flags(deterministic=deterministic), undisturbed(), keeping_runs(kept):
            yield

    def measure_baseline(self) -> None:
        """Time torch's choice in its steady state; its benchmark mode has run by then."""
        solver = solvers.baseline(self.problem)
        reasons = solver.why_not(self.problem)
        if not reasons:
            cost = solver.cost(self.problem, Config())
            self.estimates[solver.name, Config()] = estimate_ms(
                self.problem, cost, self.profile_of(self.problem.device)
            )
        known = self.store.of(self.problem)
        key = (solver.name, solver.version, Config())
        foreign = self.foreign(self.problem)
        if key in foreign:
            del known[key]  # all else is held against it, so that it is measured here
            foreign.remove(key)
        if not reasons and self.options.rigor == "wisdom_only" and key not in known:
            reasons = [UNKNOWN]
        if reasons:
            self.log.append(Measurement(*key, reason="; ".join(reasons)))
            return
        measured = known.get(key)
        if measured is None:
            outside = replace(self.options, workspace=None)
            measured = self.trial(self.problem, self.tensors, outside).measure(solver, Config())
            known[key] = measured
        self.baseline = None if measured.reason else measured
        self.log.append(replace(measured, reason=measured.reason or self.against_baseline()))

    @property
    def baseline_allowed(self) -> bool:
        """Whether torch's choice may be used: it is not excluded, and keeps limit, determinism and error asked for."""
        return self.baseline is not None and not self.against_baseline()

    def against_baseline(self) -> str:
        """The constraint that torch's choice breaks; empty when it keeps all."""
        assert self.baseline is not None
        if self.options.excludes(solvers.baseline(self.problem)):
            return EXCLUDED
        limit, workspace = self.options.workspace, self.baseline.workspace or 0
        if limit is not None and workspace > limit:
            return baseline_over(self.problem, workspace, limit)
        if self.options.deterministic and not solvers.baseline(self.problem).is_deterministic(self.problem, Config()):
            return "is not deterministic"
        if self.options.error_limit is not None:  # only one asked for: else torch's own error is what is wanted
            return self.checker.judge(self.problem, self.checker.own_errors)
        return ""

    def loses_by_launches(self, candidate: Measurement | Plan) -> bool:
        """Whether a candidate of the whole is expected to lose to torch's choice where launches count.

        Not where torch's choice may not be used, nor where a time is not known.
        """
        if not self.baseline_allowed or self.baseline is None:
            return False
        times = [self.baseline.time_ms, self.baseline.host_ms, candidate.time_ms, candidate.host_ms]
        known = [ms for ms in times if ms is not None and math.isfinite(ms)]
        return len(known) == len(times) and replacing.loses_by_launches(Took(*known[2:]), Took(*known[:2]))

    def trial(self, problem: Problem, tensors: Tensors, options: Options, *, root: bool = True) -> Trial:
        """A trial of ``problem``, which is the root problem or, without ``root``, a part of it."""
        return Trial(
            problem,
            tensors,
            options,
            self.profile_of(problem.device),
            self.timer_of(problem),
            self.store.of(problem),
            self.foreign(problem),
            {**self.wrong, **{key[:2]: reason for key, reason in self.dropped.items()}} if root else self.wrong,
            functools.partial(self.checker.judge, problem),
            is_root=root,
            bias=self.bias if root else None,
            loses=self.loses_by_launches if root else None,
            for_front=self.for_front,
            experience=self.experience,
            known_of=self.store.of,
            watched=self.for_front or self.options.workspace is not None,
        )

    def timer_of(self, problem: Problem) -> Timer:
        """What times on the device of ``problem``: a part may be computed on another than its whole.

        Raises ``RuntimeError`` where memory cannot be told there, which a workspace limit needs.
        """
        timer = self._timers.get(problem.device)
        if timer is None:
            timer = self._timers[problem.device] = Timer(torch_device(problem.device))
            if self.options.workspace is not None:
                check_peak_is_known(timer.device, self.options.workspace)
        return timer

    def benchmark(self) -> Benchmark:
        """What measures plans of the whole problem."""
        return Benchmark(self.problem, self.tensors, self.options, self.timer, bias=self.bias)

    def foreign(self, problem: Problem) -> set[Key]:
        """Keys of the measurements of ``problem`` that were made elsewhere."""
        return self.store.foreign_of(problem)

    def over_limit(self, workspace: int) -> str:
        """Why ``workspace`` bytes are over the limit; empty where they are not."""
        limit = self.options.workspace
        if limit is None or workspace <= limit:
            return ""
        return f"took {format_bytes(workspace)} of workspace when run whole, the limit is {format_bytes(limit)}"

    def drop(self, plan: Plan, reason: str) -> None:
        """Leave ``plan`` out of this search from now on, and log the reason."""
        self.dropped[choice_of(plan)] = reason
        self.log.append(
            Measurement(
                plan.solver, plan.version, told_as(plan), plan.time_ms, plan.workspace, plan.error, reason,
                host_ms=plan.host_ms, load=plan.load,
            )
        )  # fmt: skip

    def baseline_plan(self) -> Plan:
        """The plan that uses torch's own choice."""
        assert self.baseline is not None
        return leaf_plan(self.problem, self.baseline)

    def is_baseline(self, plan: Plan) -> bool:
        """Whether ``plan`` is by the solver of torch's own choice."""
        return plan.solver == solvers.baseline(self.problem).name

    def remember_wrong(self, leaf: Plan, problem: Problem, reason: str) -> None:
        """Leave a leaf out of this search, and keep its error for other searches, whose error limits may be wider."""
        self.wrong[leaf.solver, leaf.config] = reason
        if math.isnan(leaf.time_ms) or (leaf.solver, leaf.version, leaf.config) in self.foreign(problem):
            return  # one of several at once, on fewer threads: what is kept of the problem is of all of them
        error = leaf.error
        finite = error is not None and math.isfinite(error.l2) and math.isfinite(error.spread)
        self.store.of(problem)[(leaf.solver, leaf.version, leaf.config)] = Measurement(
            leaf.solver,
            leaf.version,
            leaf.config,
            leaf.time_ms,
            leaf.workspace,
            error if finite else None,
            "" if finite else reason,
            host_ms=leaf.host_ms,
            load=leaf.load,
        )

    def look_for_wrong_parts(self, plan: Plan) -> None:
        """Check the leaves of a division one by one, and remember those that are wrong."""
        solver = solvers.get(plan.solver)
        if isinstance(solver, Split):
            for problem, child in leaf_parts(plan):
                error, reason = self.checker.checked(child, problem)
                if reason:
                    self.remember_wrong(replace(child, error=error), problem, f"{reason}, as a part")
