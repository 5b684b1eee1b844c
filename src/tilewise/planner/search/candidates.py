"""The candidates for a problem's plan: leaves, and divisions over their fronts, ranked by their times.

The bound on the search: a split may only be cut again at a higher level (so at most two splits are nested), at most 16
points of a front go up, and sizes descend only while the limit kept something out or smaller parts gain.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from tilewise import execute, solvers
from tilewise.plan import Config, Measurement, Plan, sum_known
from tilewise.planner.gate import MOST_NESTED
from tilewise.planner.measuring.times import peak_is_known
from tilewise.planner.options import EXCLUDED
from tilewise.planner.search.divisions import Divisions, choice_of
from tilewise.planner.search.estimate import estimate_ms
from tilewise.planner.search.foreseen import of_first_parts
from tilewise.planner.search.leaves import leaf_plan
from tilewise.planner.search.partitions import Partitions
from tilewise.planner.search.root import Root
from tilewise.planner.search.sharing.device_shares import DeviceShares
from tilewise.planner.search.tilings import Tilings
from tilewise.planner.search.trial import Trial
from tilewise.problems.base import Problem
from tilewise.solvers import Cost, Split
from tilewise.solvers.base import BATCH_LEVEL

__all__ = ["Candidates"]

MOST_WITHIN_LESS = 2
"""Configs of each solver that are measured under each of the limits below."""
LEAST_LIMIT = 1 << 20
"""A front is looked for under limits of half, a quarter and so on of its fastest plan's workspace, down to this."""


@dataclass
class Candidates:
    """Finds the plans among which a search chooses."""

    root: Root
    also: tuple[Plan, ...] = ()
    """Divisions that an earlier search found for a front, which may have tried more sizes."""
    share: tuple[int, int] = (0, 1)
    """Index and count: of the sizes between powers of two every count-th is measured, from that index on."""

    def ranked(self) -> list[Plan]:
        """Leaves and divisions, best first by measured, summed or (rigor ``estimate``) estimated time."""
        trial = self._trial_of_whole()
        usable = self._usable(trial)
        if self.root.for_front:
            usable += self._within_less(usable)
        plans = [leaf_plan(self.root.problem, m) for m in usable]
        plans += map(self._with_bias, self._cut(trial, -1))
        choices = {choice_of(plan) for plan in plans}
        plans += [plan for plan in self.also if choice_of(plan) not in choices]
        not_dropped = (plan for plan in plans if choice_of(plan) not in self.root.dropped)
        return sorted(not_dropped, key=lambda plan: plan.time_ms)

    def begin(self) -> list[tuple[Problem, Plan]]:
        """Measure what needs no kernel of ours.

        Returns leaves that :meth:`ranked` may then want compiled, each with its problem: the whole or a part of it.
        """
        trial = self._trial_of_whole()
        offers = trial.run_ready()
        problem, options = self.root.problem, self.root.options
        own = [(problem, Plan(problem.key, *offer.key)) for offer in offers]
        return [*own, *of_first_parts(problem, options, self.root.profile, offers)]

    def shares(self, steps: int, beside: tuple[str, ...]) -> tuple[list[Plan], list[tuple[str, Plan]]]:
        """Measure shares of the batch with the devices at the places ``beside``, and a sweep of so many ``steps``.

        Returns the leaves that computed the whole where its tensors lie, and what found each share with its plan.
        """
        trial = self._trial_of_whole()
        leaves = [leaf_plan(self.root.problem, m) for m in self._usable(trial)]
        split = solvers.get("devices")
        assert isinstance(split, Split)
        shares = DeviceShares(split, self.root, trial, steps=steps, beside=beside)
        shares.plans()
        self.root.log += shares.log
        return leaves, shares.found

    def lacking(self) -> list[str]:
        """Measure what is compiled; returns what workers would compile for the other candidates of the whole."""
        return self._trial_of_whole().lacking()

    def _trial_of_whole(self) -> Trial:
        """The trial of the whole problem, which torch's choice bounds where it may be used."""
        trial = self.root.trial(self.root.problem, self.root.tensors, self.root.options)
        allowed = self.root.baseline_allowed and self.root.options.rigor != "estimate"
        if self.root.baseline is not None and self.root.baseline.time_ms is not None:
            if allowed:
                trial.best_ms = self.root.baseline.time_ms
            elif self._may_in_parts(self.root.baseline):
                # In parts it may keep the limit; on a GPU it is never held to one.
                trial.offers.blocked[self.root.baseline.solver, Config()] = self.root.baseline.time_ms
        return trial

    def _may_in_parts(self, baseline: Measurement) -> bool:
        """Whether torch's choice is only ruled out by its workspace on the whole, so that parts may use it."""
        over = bool(self.root.over_limit(baseline.workspace or 0)) and self.root.problem.device_type == "cpu"
        return over and not self.root.options.excludes(solvers.baseline(self.root.problem))

    def _with_bias(self, division: Plan) -> Plan:
        """``division`` with the time of the pass behind it that adds bias and residual and applies the activation.

        Where its parts do all of that themselves there is no such pass.
        """
        problem = self.root.problem
        if execute.finishes(division, problem):
            return division
        moved = (3 if problem.residual else 2) * problem.nbytes(problem.result)
        bias_ms = estimate_ms(problem, Cost(0, moved), self.root.profile)
        launch_ms = self.root.profile["launch"] if self.root.problem.device_type == "cuda" else 0.0
        host_ms = sum_known((division.host_ms, launch_ms))
        return replace(division, time_ms=division.time_ms + bias_ms, host_ms=host_ms)

    def _within_less(self, usable: list[Measurement]) -> list[Measurement]:
        """Measurements under lower and lower workspace limits: some solvers block their work only to fit a limit."""
        if not usable or not peak_is_known(self.root.timer.device):
            return []
        limit = min(usable, key=lambda m: m.time_ms or math.inf).workspace or 0
        under_lower_limits: list[Measurement] = []
        while (limit := limit // 2) >= LEAST_LIMIT:
            trial = self.root.trial(self.root.problem, self.root.tensors, replace(self.root.options, workspace=limit))
            trial.offers.beside, trial.pruning.most = [*usable, *under_lower_limits], MOST_WITHIN_LESS
            known = {(m.solver, m.config) for m in trial.offers.beside}
            under_lower_limits += [m for m in self._usable(trial) if (m.solver, m.config) not in known]
        return under_lower_limits

    def _cut(self, trial: Trial, level: int, depth: int = 0) -> list[Plan]:
        """Plans that cut a trial's problem by splits of a higher level, each axis once and at most two nested."""
        plans: list[Plan] = []
        problem, patient = trial.problem, self.root.options.rigor == "patient"
        for solver in solvers.solving(problem):
            if not isinstance(solver, Split) or solver.level <= level or depth == MOST_NESTED:
                continue
            reasons = [EXCLUDED] if self.root.options.excludes(solver) else solver.why_not(problem)
            if self.root.options.batch_sizes == "undivided":
                reasons = reasons or ["batch_sizes=undivided"]
            for_front = solver.level <= BATCH_LEVEL and self.root.for_front
            if not (for_front or patient or trial.offers.blocked) and (idle := solver.idle(problem)):
                reasons = reasons or [f"not tried: {idle}"]
            if reasons:
                if depth == 0:
                    self.root.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
                continue
            if solver.across:
                shares = DeviceShares(solver, self.root, trial)
                plans += shares.plans()
                self.root.log += shares.log
                continue
            if solver.at_once:
                if depth == 0:
                    partitions = Partitions(solver, trial, self.root.baseline if self.root.baseline_allowed else None)
                    plans += partitions.plans()
                    self.root.log += partitions.log
                continue
            trial_of_part = functools.partial(self.root.trial, root=False)
            deeper = functools.partial(self._cut, level=solver.level, depth=depth + 1)
            divisions: Divisions | Tilings = Tilings(solver, trial, trial_of_part, deeper, patient)
            if solver.alike:
                divisions = Divisions(solver, trial, trial_of_part, deeper, patient, for_front, self.share)
            kept_plans = [plan for plan in divisions.plans() if plan.is_kept]
            plans += kept_plans
            if depth == 0:
                self.root.log += [
                    Measurement(p.solver, p.version, p.config, p.time_ms, p.workspace, host_ms=p.host_ms, load=p.load)
                    for p in kept_plans
                ]
                if not kept_plans:
                    reason = divisions.why_none()
                    self.root.log.append(Measurement(solver.name, solver.version, Config(), reason=reason))
        return plans

    def _usable(self, trial: Trial) -> list[Measurement]:
        """Run a trial, log it where it is of the whole problem, and return the measurements that were not lost."""
        measurements = trial.run()
        if trial.is_root:
            self.root.estimates |= trial.offers.estimates
        if trial.is_root and self.root.options.rigor == "estimate":
            self.root.log += [
                m if m.reason else replace(m, reason=f"not run: estimated {m.time_ms:.3f} ms") for m in measurements
            ]
        elif trial.is_root:
            self.root.log += measurements
        return [m for m in measurements if not m.reason and m.time_ms is not None]
