"""The last part of a search: finalists run whole beside torch's own choice, and the fastest checked against float64."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.machine import load
from tilewise.machine.turns import beside
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.measuring import replacing, warm
from tilewise.planner.measuring.copies import Copies
from tilewise.planner.measuring.replacing import rounds
from tilewise.planner.measuring.samples import sample_of
from tilewise.planner.measuring.times import Alike
from tilewise.planner.measuring.took import Took
from tilewise.planner.options import NoPlanError, first_line, no_plan_text
from tilewise.planner.search.benchmark import as_counted, kept_beside
from tilewise.planner.search.divisions import choice_of
from tilewise.planner.search.leaves import (
    OverLimit,
    check_declared,
    has_exact_memory,
    leaf_parts,
    leaf_plan,
)
from tilewise.planner.search.partitions import told_as
from tilewise.planner.search.root import Root

__all__ = ["Dropped", "Finals"]

FINALISTS = 3
"""Plans measured whole against the baseline."""
NEAR = 1.15
"""Plans whose estimate is within this of the best are finalists."""
BEHIND = {"cuda": 2.0, "cpu": 1.3}
"""Plans whose estimate is this many times torch's time are not run whole. A GPU's small parts are overestimated."""


class Dropped(Exception):
    """The best plan turned out to be unusable: the search starts again without it."""


@dataclass
class Finals:
    """Chooses among plans that were ranked by expected time: the best are run whole, timed and checked."""

    root: Root

    def choose(self, ranked: list[Plan]) -> Plan:
        """Time the finalists whole beside torch and take the fastest that is right."""
        ranked = [p for p in ranked if not self.root.over_limit(p.workspace)]
        # One of many launches may be the fastest on the device and lose by them: it must not keep the others out.
        ranked = [p for p in ranked if not self.root.loses_by_launches(p)] or ranked
        if ranked and not self._is_behind(ranked[0]):
            timed = self._time_whole(self._finalists(ranked))
            gaining = [plan for plan in timed if not self._keeps_baseline(plan)]
            if timed and not gaining:
                return self.root.baseline_plan()
            gaining = self._without_warm_losses(gaining)
            checked = self.verified(min(gaining, key=lambda plan: plan.time_ms)) if gaining else None
            if checked is None:
                raise Dropped  # others were given up because of what now turned out to be none
            if not self._gains_again(checked):
                return self.root.baseline_plan()
            self._note(checked)
            return checked
        if self.root.baseline_allowed:
            return self.root.baseline_plan()
        raise NoPlanError(no_plan_text(self.root.problem, self.root.options, self.root.log))

    def _is_behind(self, plan: Plan) -> bool:
        """Whether torch's choice is so much faster that running ``plan`` whole would be a waste."""
        if self.root.options.rigor in ("estimate", "patient") or not self.root.baseline_allowed:
            return False
        assert self.root.baseline is not None
        return plan.time_ms > BEHIND[self.root.problem.device_type] * (self.root.baseline.time_ms or math.inf)

    def _finalists(self, ranked: list[Plan]) -> list[Plan]:
        """The plans to time whole: the best, and those that are expected to be nearly as fast."""
        if self.root.options.rigor == "estimate":
            return ranked[:1]
        best = ranked[0].time_ms
        return [p for p in ranked[:FINALISTS] if p.time_ms <= NEAR * best]

    def _time_whole(self, plans: list[Plan]) -> list[Plan]:
        """The plans with their own measured times; one that takes too much memory or raises is dropped."""
        tensors, device = self.root.tensors, self.root.tensors.device
        within_limit: list[Plan] = []
        bounds: list[execute.Bound] = []
        for plan in plans:
            try:
                bound, workspace = self.run_whole(plan)
            except OverLimit as over_limit:
                self.root.drop(plan, str(over_limit))
                continue
            except Exception as error:  # as in a trial: the candidate is lost, planning goes on
                self.root.drop(plan, f"raised {type(error).__name__} when run whole: {first_line(error)}")
                self.root.look_for_wrong_parts(plan)
                continue
            if over := self.root.over_limit(workspace):
                self.root.drop(replace(plan, workspace=workspace), over)
                self._note_torchs_parts(plan, workspace)
                continue
            bounds.append(bound)
            within_limit.append(replace(plan, workspace=workspace))
        if not within_limit:
            return []
        if self.root.baseline is not None:
            baseline = leaf_plan(self.root.problem, self.root.baseline)
            bounds.append(execute.bind(baseline, self.root.problem, *tensors.operands))
        # Timed as a layer runs it: like torch, each call allocates its result.
        calls = [tensors.call(bound, self.root.bias, new=True) for bound in bounds]
        try:
            begun = load.begin()
            launched, compared = not self.root.options.cuda_graphs, self.root.baseline is not None
            times = rounds(calls, device, compared, launched, self._written_last(), self._alike(bounds))
            share = load.others_since(begun)
        except Exception as error:
            if len(within_limit) > 1:
                return [timed for plan in within_limit for timed in self._time_whole([plan])]
            self.root.drop(within_limit[0], f"raised {type(error).__name__} when timed whole: {first_line(error)}")
            return []
        for index, plan in enumerate(within_limit):
            times[index] = list(as_counted(plan, self.root.problem, times[index]))
        return self._with_times(within_limit, times, share)

    def _alike(self, bounds: Sequence[execute.Bound]) -> list[Alike]:
        """What gives calls of each plan on copies of its operands, on a GPU. What a step has just written is shared."""
        problem, tensors = self.root.problem, self.root.tensors
        if tensors.device.type != "cuda":
            return []
        shared = None if self._written_last() is None else problem.written_last
        copies = Copies(problem, tensors, shared)
        return [functools.partial(copies.calls, bound, self.root.bias, new=True) for bound in bounds]

    def _written_last(self) -> torch.Tensor | None:
        """The operand that a step has just written before, on a GPU, where it lies so that it may be written."""
        problem = self.root.problem
        operand = self.root.tensors.operands[problem.operands.index(problem.written_last)]
        return operand if operand.is_cuda and 0 not in operand.stride() else None

    def _with_times(self, plans: list[Plan], times: list[list[Took]], share: float | None) -> list[Plan]:
        """``plans`` with their measured times. Those of torch's choice are the last, where it was timed with them.

        ``share`` is that of the host's cores which other processes used meanwhile.
        """
        samples = [sample_of(values, share) for values in times]
        baseline, device_type = self.root.baseline, self.root.problem.device_type
        if baseline is not None:
            for plan, values in zip(plans, times, strict=False):
                pairs = zip(values, times[-1], strict=True)
                self.root.time_ratios[choice_of(plan)] = sorted(
                    replacing.time_ratio(of_plan, of_torch, device_type) for of_plan, of_torch in pairs
                )
            last = samples[-1]
            self.root.baseline = baseline = replace(
                baseline, time_ms=last.device_ms, host_ms=last.host_ms, dispersion=last.dispersion, runs=last.runs,
                load=last.load,
            )  # fmt: skip
            self.root.store.of(self.root.problem)[baseline.solver, baseline.version, Config()] = baseline
        self.root.samples |= {choice_of(plan): sample for plan, sample in zip(plans, samples, strict=False)}
        return [
            replace(plan, time_ms=sample.device_ms, host_ms=sample.host_ms, load=sample.load)
            for plan, sample in zip(plans, samples, strict=False)
        ]

    def _without_warm_losses(self, plans: list[Plan]) -> list[Plan]:
        """Those of ``plans`` that do not lose either while a GPU's cache holds all operands; others are dropped.

        Finalists are compared over cold caches. Within a step the caches are somewhere between.
        """
        problem, device = self.root.problem, self.root.tensors.device
        if not self.root.baseline_allowed or not plans or not warm.may_hold(problem.bytes, device):
            return plans
        assert self.root.baseline is not None
        all_plans = [*plans, leaf_plan(problem, self.root.baseline)]
        bounds = [execute.bind(plan, problem, *self.root.tensors.operands) for plan in all_plans]
        calls = [self.root.tensors.call(bound, self.root.bias, new=True) for bound in bounds]
        found = []
        for plan, ratio in zip(plans, warm.ratios(calls, self.root.timer), strict=True):
            if ratio > warm.MOST:
                self.root.drop(plan, f"takes {ratio:.2f} times as long as torch's choice over warm caches")
            else:
                found.append(plan)
        return found

    def run_whole(self, plan: Plan) -> tuple[execute.Bound, int]:
        """The bound plan and the bytes it takes beyond operands and result."""
        with beside(short=True):
            bound = execute.bind(plan, self.root.problem, *self.root.tensors.all)
        check_declared(plan, self.root.problem, bound, self.root.options.workspace)
        new = plan.leaf and solvers.get(plan.solver).own_output and not self.root.problem.accumulate
        call = self.root.tensors.call(bound, self.root.bias, new=new)
        benchmark = self.root.benchmark()
        exact = has_exact_memory(plan)
        workspace = benchmark.peak(call, bound.workspace, new, exact=exact)
        if benchmark.shows_more(workspace, bound.workspace, exact=exact):
            workspace = benchmark.peak(call, bound.workspace, new, exact=exact)  # as in a trial
        return bound, workspace + kept_beside(bound)

    def _keeps_baseline(self, plan: Plan) -> bool:
        """Whether torch's choice is kept because ``plan`` does not beat it surely enough."""
        if not self.root.baseline_allowed or self.root.baseline is None or self.root.baseline.time_ms is None:
            return False
        ratios = self.root.time_ratios[choice_of(plan)]
        return not replacing.wins(ratios, self.root.problem.device_type)

    def _gains_again(self, plan: Plan) -> bool:
        """Whether a small gain on a CPU is confirmed by a second timing seconds later, as the load of CPUs changes."""
        if (
            self.root.problem.device_type != "cpu"
            or not self.root.baseline_allowed
            or choice_of(plan) not in self.root.time_ratios
        ):
            return True
        if statistics.median(self.root.time_ratios[choice_of(plan)]) < replacing.SURE:
            return True
        return bool(self._time_whole([plan])) and not self._keeps_baseline(plan)

    def as_run(self, plan: Plan) -> Plan:
        """A front's plan with the workspace it takes here, where some measurements come from elsewhere."""
        if not self.root.store.any_foreign():
            return plan
        with contextlib.suppress(Exception):  # raised again, and kept as its reason, where it is checked
            plan = replace(plan, workspace=max(plan.workspace, self.run_whole(plan)[1]))
        return plan

    def verified(self, plan: Plan) -> Plan | None:
        """The plan with its error; ``None`` when it is too far from float64. Its leaves are then checked one by one."""
        if over := self.root.over_limit(plan.workspace):
            self.root.drop(plan, over)
            return None
        error, reason = self.root.checker.checked(plan, self.root.problem)
        plan = replace(plan, error=error)
        if not reason:
            return plan
        self.root.drop(plan, reason)
        if plan.leaf:
            self.root.remember_wrong(plan, self.root.problem, reason)
        self.root.look_for_wrong_parts(plan)
        return None

    def _note_torchs_parts(self, plan: Plan, workspace: int) -> None:
        """Note the larger workspace that torch's own parts took in a whole plan, so that they are not chosen again."""
        for problem, leaf in leaf_parts(plan):
            if self.root.is_baseline(leaf):
                measured = Measurement(
                    leaf.solver, leaf.version, leaf.config, leaf.time_ms, workspace, host_ms=leaf.host_ms,
                    load=leaf.load,
                )  # fmt: skip
                self.root.store.of(problem)[(leaf.solver, leaf.version, leaf.config)] = measured

    def _note(self, plan: Plan) -> None:
        """Add the chosen plan to the log, and a leaf to what is known."""
        base, sample = self.root.baseline, self.root.samples.get(choice_of(plan))
        m = Measurement(
            plan.solver, plan.version, told_as(plan), plan.time_ms, plan.workspace, plan.error,
            baseline_ms=None if base is None else base.time_ms,
            host_ms=plan.host_ms,
            baseline_host_ms=None if base is None else base.host_ms,
            dispersion=None if sample is None else sample.dispersion,
            runs=None if sample is None else sample.runs,
            load=plan.load,
        )  # fmt: skip
        self.root.log.append(m)
        if plan.leaf:
            self.root.store.of(self.root.problem)[(plan.solver, plan.version, plan.config)] = m
