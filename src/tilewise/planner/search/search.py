"""The search for one problem's plan: leaves, divisions over their fronts, then the finalists whole against torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from tilewise import execute, solvers
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.experience import Experience
from tilewise.planner.fronts import front, thin
from tilewise.planner.options import Options, first_line
from tilewise.planner.search.candidates import Candidates
from tilewise.planner.search.estimate import Profile
from tilewise.planner.search.finals import Dropped, Finals
from tilewise.planner.search.known import Measurements
from tilewise.planner.search.leaves import (
    OverLimit,
    check_declared,
    leaf_plan,
)
from tilewise.planner.search.root import Root
from tilewise.problems.base import Problem

__all__ = ["Search"]


class Search:
    """Plans one root ``problem``. :meth:`best` gives the plan to use, :meth:`front` the whole front.

    ``profile_of(device)`` gives a device's measured rates. ``store`` has what was measured before, and takes what this
    search measures. ``also`` are divisions that an earlier search found for a front, which may have tried more sizes.
    ``experience`` corrects estimates by what was measured of other problems, and learns from this one.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        profile_of: Callable[[str], Profile],
        store: Measurements,
        also: tuple[Plan, ...] = (),
        experience: Experience | None = None,
    ) -> None:
        self.root = Root(problem, options, profile_of, store, experience)
        self.candidates, self.finals = Candidates(self.root, also), Finals(self.root)

    @property
    def log(self) -> list[Measurement]:
        """Measurements of all that was tried, or the reasons why it was not."""
        return self.root.log

    @property
    def estimates(self) -> dict[tuple[str, Config], float]:
        """Expected milliseconds on the whole problem, by solver and config."""
        return self.root.estimates

    def begin(self) -> list[tuple[Problem, Plan]]:
        """Measure torch's choice and all that needs no kernel of ours.

        Returns leaves whose kernels :meth:`best` may then want, each with its problem: the whole or a part of it.
        """
        with self.root.undisturbed():
            self.root.measure_baseline()
            return self.candidates.begin()

    def lacking(self) -> list[str]:
        """As :meth:`begin`, for a search beside a program; returns what workers would compile for :meth:`best`.

        No other GPU is compiled for meanwhile, which is a setting of the process. So parts are left out: their strides
        are known only where they are tried.
        """
        with self.root.undisturbed():
            self.root.measure_baseline()
            return self.candidates.lacking()

    def measure_torch(self) -> None:
        """Measure torch's choice alone, where it is not known yet."""
        with self.root.undisturbed():
            self.root.measure_baseline()

    def best(self) -> Plan:
        """The fastest plan that keeps every constraint, checked against float64 and timed whole against torch.

        Its solver is torch's own where that wins. Raises :class:`NoPlanError` with every candidate's reason.
        """
        with self.root.undisturbed():
            self.root.measure_baseline()
            while True:  # ends: each turn but the last adds to what is wrong or dropped
                with contextlib.suppress(Dropped):
                    return self.finals.choose(self.candidates.ranked())

    def front(self) -> tuple[Plan, ...]:
        """Checked plans of the time/workspace front, fastest first; times of divisions are their parts' sums."""
        self.root.for_front = True
        with self.root.undisturbed():
            self.root.measure_baseline()
            while True:  # ends: as above
                ranked = self.candidates.ranked()
                if self.root.baseline_allowed:
                    ranked.append(self.root.baseline_plan())
                front_plans = [ranked[i] for i in thin(front((plan.time_ms, plan.workspace) for plan in ranked))]
                checked = [
                    plan if self.root.is_baseline(plan) else self.finals.verified(self.finals.as_run(plan))
                    for plan in front_plans
                ]
                right = tuple(plan for plan in checked if plan is not None)
                if len(right) == len(front_plans):
                    return tuple(right[i] for i in front((plan.time_ms, plan.workspace) for plan in right))

    def survey(self) -> None:
        """Fill :attr:`log` with what every solver could do, without choosing."""
        with self.root.undisturbed():
            self.root.measure_baseline()
            self.candidates.ranked()

    def shares(self, steps: int, beside: tuple[str, ...]) -> tuple[list[Plan], list[tuple[str, Plan]]]:
        """Plans of the whole where its tensors lie, torch's choice included, and a sweep of shares of its batch.

        ``beside`` are the places of other devices (:mod:`tilewise.machine.places`). With each share comes what found
        it. The reasons of those that were lost are in :attr:`log`.
        """
        with self.root.undisturbed():
            self.root.measure_baseline()
            leaves, found = self.candidates.shares(steps, beside)
            own = [self.root.baseline_plan()] if self.root.baseline_allowed else []
            return sorted([*own, *leaves], key=lambda plan: plan.time_ms), found

    def confirm(self, plan: Plan, *, by_peak: bool = True) -> tuple[Plan, str]:
        """Check a plan from elsewhere. Returns it with its workspace and error here, and why it may not be used.

        The reason is empty when it may. The plan is run whole and checked like one found here, but not timed. Its
        workspace is the measured peak, or without ``by_peak`` what the bound plan declares.
        """
        baseline, limit = solvers.baseline(self.root.problem), self.root.options.workspace
        with self.root.undisturbed():
            if not baseline.why_not(self.root.problem):  # its errors are what others' are held to, save in fp32
                self.root.baseline = Measurement(baseline.name, baseline.version, Config())
            try:
                bound = execute.bind(plan, self.root.problem, *self.root.tensors.all)
                check_declared(plan, self.root.problem, bound, limit)
                workspace = bound.workspace
                if by_peak:
                    _, workspace = self.finals.run_whole(plan)
            except OverLimit as over:
                return plan, str(over)
            except Exception as error:  # as in a trial
                return plan, f"raised {type(error).__name__} when run whole: {first_line(error)}"
            plan = replace(plan, workspace=workspace)
            reason = self.root.over_limit(workspace)
            if reason or (self.root.is_baseline(plan) and self.root.options.error_limit is None):
                return plan, reason
            distance, reason = self.root.checker.checked(plan, self.root.problem)
            return replace(plan, error=distance), reason

    def measure_share(self, index: int, count: int) -> None:
        """Like :meth:`survey`, but of the sizes between powers of two only every ``count``-th, from ``index`` on."""
        self.candidates.share = index, count
        self.survey()

    def measure_every_config(self, name: str) -> None:
        """Measure all configs of the solver called ``name``, whatever is expected of them, and check them in float64.

        What was measured before is not measured again, only checked. Results go to :attr:`log` and to the store.
        """
        with self.root.undisturbed():
            trial = self.root.trial(self.root.problem, self.root.tensors, replace(self.root.options, rigor="patient"))
            trial.offers.among = frozenset((name,))
            if self.root.baseline is not None and self.root.baseline.time_ms is not None:
                trial.best_ms = self.root.baseline.time_ms  # what takes much longer is not repeated
                if self.root.baseline.solver == name:  # no trial of the whole problem takes it
                    lost = self.root.against_baseline()
                    self.root.log.append(replace(self.root.baseline, error=self.root.checker.own_errors, reason=lost))
            measurements = trial.run()
            self.root.estimates |= trial.offers.estimates
            for m in measurements:
                if not m.reason:
                    plan = leaf_plan(self.root.problem, m)
                    error, reason = self.root.checker.checked(plan, self.root.problem)
                    m = replace(m, error=error, reason=reason)
                    if reason:
                        self.root.remember_wrong(replace(plan, error=error), self.root.problem, reason)
                    elif (key := (m.solver, m.version, m.config)) not in trial.foreign:
                        trial.known[key] = m
                self.root.log.append(m)
