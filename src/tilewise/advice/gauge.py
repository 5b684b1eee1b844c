"""Measures points by the planner, which remembers all it measures: quickly by torch's choice alone, or in full."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tilewise import execute
from tilewise.advice.points import Part, Point
from tilewise.advice.sweep import Sizes, Sweep
from tilewise.machine import load
from tilewise.machine.device import torch_device
from tilewise.machine.torch_state import undisturbed
from tilewise.plan import Measurement, is_busy
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.caches.measurements import baselines
from tilewise.planner.measuring.cold import made_once
from tilewise.planner.measuring.samples import Sample, sample_of
from tilewise.planner.measuring.times import rounds
from tilewise.planner.options import first_line
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of
from tilewise.problems.operands import make_bias, make_operands

__all__ = ["LEVELS", "Gauge", "Tried"]

LEVELS = ("torch", "candidates", "plans")
"""How thoroughly a point is measured: torch's choice alone; all that may win; or a plan, checked and timed whole."""
USUAL_S = 1.0
"""Seconds that a point is expected to take where nothing is known yet."""
USUAL_COSTS = {"torch": 1.0, "candidates": 3.0, "plans": 8.0}
"""How many times as long as by torch's choice alone a point takes at each level, where that is not known yet."""
IN_TURNS_MS = 3000.0
"""Milliseconds for timing the last few points in turns."""


@dataclass
class Gauge:
    """Measures the points of ``sweep`` by ``planner`` under ``options``, and knows how long that takes."""

    sweep: Sweep
    planner: Planner
    options: Options
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds for a floating-point operation by level, as the last points had it."""

    def expected_s(self, sizes: Sizes, level: str) -> float:
        """Seconds that measuring the point at ``sizes`` is expected to take."""
        flops, least = self.sweep.flops(sizes), LEVELS[0]
        if level in self.costs or least not in self.costs:
            return flops * self.costs[level] if level in self.costs else USUAL_S
        return flops * self.costs[least] * USUAL_COSTS[level]

    def measure(self, sizes: Sizes, level: str) -> Point:
        """The point at ``sizes``. What has no plan has a part without a time, and the reason."""
        begun = time.perf_counter()
        measure = {"torch": self._by_torch, "candidates": self._by_candidates, "plans": self._by_plan}[level]
        parts = tuple(measure(problem) for problem in self.sweep.problems(sizes))
        point = Point(sizes, self.sweep.samples(sizes), parts)
        cost = (time.perf_counter() - begun) / max(1, point.flops)
        # The first loads libraries and compiles, and one that was disturbed tells little.
        self.costs[level] = min(cost, 2 * self.costs.get(level, cost))
        for less in LEVELS[: LEVELS.index(level)]:
            self.costs[less] = min(self.costs.get(less, cost), self.costs[level])
        return point

    def tried(self, problem: Problem) -> list[Measurement]:
        """All that is known of candidates on ``problem``, and why they were lost. Nothing is measured."""
        return self.planner.explain(problem, replace(self.options, rigor="wisdom_only"))

    def _by_torch(self, problem: Problem) -> Part:
        """torch's choice alone."""
        self.planner.measure_torch(problem, self.options)
        name = kind_of(problem).baseline
        found = baselines(self.planner.wisdom, [problem]).get(problem)
        if found is None:
            return Part(problem, None, reason=f"{name} does not compute it here")
        ms, busy = _taken_ms(found), is_busy(found.load, problem.device)
        return Part(problem, ms, name, name, ms, checked=True, busy=busy)

    def _by_candidates(self, problem: Problem) -> Part:
        """The fastest of all candidates, each by itself and not checked."""
        self.planner.measure_share(problem, self.options, 0, 1)
        timed = [m for m in self.tried(problem) if not m.reason and m.time_ms is not None]
        if not timed:
            return Part(problem, None, reason="no candidate keeps the constraints")
        best = min(timed, key=_taken_ms)
        text = " ".join(word for word in (best.solver, str(best.config)) if word)
        checked = best.solver == kind_of(problem).baseline
        busy = is_busy(best.load, problem.device)
        return Part(problem, _taken_ms(best), best.solver, text, self._torch_ms(problem), checked, busy)

    def _by_plan(self, problem: Problem) -> Part:
        """The plan that a layer would run by."""
        try:
            plan = self.planner.plan(problem, self.options)
        except NoPlanError as error:
            return Part(problem, None, reason=first_line(error))
        text = " ".join(word for word in (plan.solver, plan.label or str(plan.config)) if word)
        ms = max(plan.time_ms, plan.host_ms or 0.0)
        return Part(problem, ms, plan.solver, text, self._torch_ms(problem), checked=True, busy=plan.busy)

    def _torch_ms(self, problem: Problem) -> float | None:
        """What torch's choice took, where that is known."""
        found = baselines(self.planner.wisdom, [problem]).get(problem)
        return None if found is None else _taken_ms(found)

    def in_turns(self, points: Sequence[Point]) -> list[Point]:
        """``points`` with times that were taken in turns, as load and clocks change from one moment to the next.

        All have plans. With a warning they are returned as they are where memory does not hold all of them. Where other
        processes kept the host busy meanwhile, which only adds to times, the least time of each counts.
        """
        calls: list[Callable[[], object]] = []
        problems = [part.problem for point in points for part in point.parts]
        device = torch_device(problems[0].device)
        try:
            with problems[0].flags(deterministic=self.options.deterministic), undisturbed(), made_once(True):
                calls += (self._call(problem) for problem in problems)
                begun = load.begin()
                times = rounds(calls, device, budget_ms=IN_TURNS_MS)
                share = load.others_since(begun)
        except (RuntimeError, MemoryError) as error:
            warnings.warn(f"the best points were not timed in turns: {first_line(error)}", stacklevel=2)
            return list(points)
        busy = is_busy(share, problems[0].device)
        each = iter([min(took.ms for took in values) if busy else _ms(sample_of(values)) for values in times])
        return [point.timed(tuple(next(each) for _ in point.parts), busy=busy) for point in points]

    def _call(self, problem: Problem) -> Callable[[], object]:
        """A call of the plan of ``problem`` on tensors of its own."""
        plan = self.planner.remembered(problem, self.options) or self.planner.plan(problem, self.options)
        operands = make_operands(problem)
        return functools.partial(execute.bind(plan, problem, *operands), *operands, make_bias(problem))


def _ms(sample: Sample) -> float:
    """The longer of the device's and the host's time."""
    return max(sample.device_ms, sample.host_ms)


def _taken_ms(measured: Measurement) -> float:
    """The longer of the device's and the host's time."""
    return max(measured.time_ms or 0.0, measured.host_ms or 0.0)


Tried = Callable[[Problem], Sequence[Measurement]]
"""What is known of the candidates on a problem."""
