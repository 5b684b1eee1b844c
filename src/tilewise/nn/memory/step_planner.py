"""Planning a whole step under one memory limit: each kernel may use what is left when it runs, and the step is run.

mu-cuDNN gives every layer a workspace for good (Oyama et al. 2018, III-C). In torch a workspace exists only while its
kernel runs, so a kernel may use the limit less the bytes alive at that moment.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewise.machine.device import total_memory
from tilewise.machine.torch_state import without_benchmark
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import swap_back
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.meter import Meter, allocator_cap, meter_of
from tilewise.nn.memory.moments import MemoryProfiler, Moment, saved_swaps
from tilewise.nn.memory.plans_by_workspace import plans_by_workspace
from tilewise.nn.step.step import Step
from tilewise.plan import Plan, format_bytes, parse_bytes
from tilewise.planner import NoPlanError
from tilewise.problems.base import Problem
from tilewise.settings.kinds import memory_share

__all__ = ["Choices", "Needs", "StepPlanner", "StepTooLarge", "memory_bytes", "profile"]

ROUNDS = 6
"""Schedules that are run before the least one is taken."""
SLACK = 64
"""Where a step is above the limit and no kernel is to blame, all get this part of the limit less."""
CAPS = (1.0, 1.02, 1.04, 1.06, 1.09, 1.12, 1.16, 1.2, 1.25, 1.35, 1.5)
"""Where the allocator's fragments keep the least schedule from running in what it holds, what is tried, in that."""
NEAR = 0.9
"""What is alive is rounded up: a step may run in less than its profile says, but not below this part of it."""

Key = tuple[str, Problem, bool]
"""A module's name, a problem of its calls, and torch's deterministic flag in them."""
Choices = Mapping[Key, Plan]


class StepTooLarge(NoPlanError):
    """No plans keep a step within its limit, as :func:`tilewise.optimize` with a ``memory_limit`` raises it.

    ``limit`` is the limit in bytes, ``least`` the bytes that the step needs at least, as measured.

    >>> error = tilewise.nn.StepTooLarge(2**30, least=3 * 2**30, text="the step needs 3.0 GiB at least")
    >>> error.least > 2**30, isinstance(error, tilewise.NoPlanError)
    (True, True)
    """

    def __init__(self, limit: int, least: int, text: str) -> None:
        super().__init__(text)
        self.limit, self.least = limit, least


def memory_bytes(limit: int | str, device: torch.device, argument: str = "memory_limit") -> int:
    """The bytes of a limit: an int, text with a unit, or a share of the memory of ``device`` (``"80%"``).

    Raises ``ValueError`` naming ``argument``, its value and what would do.
    """
    share = memory_share(limit, argument)
    if share is None:
        return parse_bytes(limit, argument)
    return int(share * total_memory(device))


@dataclass(frozen=True)
class Needs:
    """A profiled step: its kernels in the order they ran, and ``rest``, the most bytes alive outside all of them."""

    moments: tuple[Moment, ...]
    rest: int
    meter: Meter

    def base(self) -> dict[Key, int]:
        """The bytes alive at each kernel without its workspace, at the worst of its runs."""
        base: dict[Key, int] = {}
        for m in self.moments:
            size = m.alive + self.meter.charged(m.result) + (self.meter.charged(m.beside) if m.beside else 0)
            key = m.kernel.layer, m.kernel.problem, m.kernel.deterministic
            base[key] = max(base.get(key, 0), size)
        if self.meter.keeps:  # what one kernel took is there at every other moment
            most = max([self.rest, *base.values()])
            base = dict.fromkeys(base, most)
        return base

    @property
    def floor(self) -> int:
        """The bytes that the step takes with no workspace for any kernel."""
        return max([self.rest, *self.base().values()])


def profile(step: Step, modules: Mapping[str, nn.Module], weights: Weights) -> Needs:
    """Run ``step`` with every convolution of ``modules`` computed by torch, and measure what is alive at each.

    Raises ``NoPlanError`` where the step does not fit on the device.
    """
    meter = meter_of(step.device, step.held)
    profiler = MemoryProfiler(meter, {})
    gc.collect()  # what planning left
    try:
        with step.repeatable(), profiler.over(modules, weights), without_benchmark(step.device.type):
            _, moments, rest = profiler.traced(step)
    except torch.OutOfMemoryError as error:
        text = str(error).partition("\n")[0]
        raise NoPlanError(f"the step does not fit in the memory of {step.device}: {text}") from error
    return Needs(tuple(moments), rest, meter)


@dataclass
class StepPlanner:
    """Chooses the fastest plans of ``modules`` with which ``step`` keeps to ``limit`` bytes.

    ``plan_table`` has the plans that each problem has without the limit. ``install(choices)`` lets the modules run by
    the given plans, and by those of ``plan_table`` where none is given; then ``plan_tables`` has each module's plans.
    """

    step: Step
    modules: Mapping[str, nn.Module]
    plan_table: PlanTable
    plan_tables: Mapping[str, PlanTable]
    install: Callable[[Choices], None]
    limit: int
    weights: Weights

    def fit(self) -> dict[str, Any]:
        """Install plans with which the step keeps its limit; return facts about it (``step`` in ``docs/json.md``).

        Raises :class:`StepTooLarge` where even the plans with the least workspace exceed the limit, and what the step
        raises. In both cases the modules compute as they did before.
        """
        put_back = saved_swaps(self.modules.values())
        try:
            return self._fit()
        except BaseException:
            put_back()
            raise

    def _fit(self) -> dict[str, Any]:
        """As :meth:`fit`, without undoing anything where it fails."""
        for module in self.modules.values():
            swap_back(module)
        needs = profile(self.step, self.modules, self.weights)
        self._base = needs.base()
        self._grain, self._unseen = needs.meter.granularity, needs.meter.unseen
        for deterministic in {key[2] for key in self._base}:
            self.plan_table.plan([p for _, p, d in self._base if d == deterministic], deterministic)
        lean = self._least(needs.floor)
        least = self._needed(self._chosen(lean, {}), lean, needs.floor)
        if least > self.limit and self.limit < NEAR * needs.floor:
            raise StepTooLarge(self.limit, least, self._too_large(least))
        schedule, peak = self._fitted(lean, least)
        moments = [self._told(m, schedule) for m in needs.moments]
        if self.step.device.type != "cuda":  # where it is a peak; on a GPU what the allocator had to be let have
            least = min(least, peak)
        return {"limit": self.limit, "peak": peak, "least": least, "moments": moments}

    def _too_large(self, least: int) -> str:
        """The message of :class:`StepTooLarge`."""
        return (
            f"memory_limit={self.limit}: the step needs {format_bytes(least)} at least ({least} bytes), the limit is "
            f"{format_bytes(self.limit)}; a smaller batch would do (tilewise.largest_batch finds the largest)"
        )

    def _told(self, m: Moment, schedule: Choices) -> dict[str, Any]:
        """One moment of the step, as plain JSON values for the report."""
        k = m.kernel
        plan = schedule.get((k.layer, k.problem, k.deterministic))
        return {
            "layer": k.layer,
            "pass": k.problem.task,
            "alive": m.alive,
            "result": m.result,
            "workspace": 0 if plan is None else plan.workspace,
        }

    def _plan(self, key: Key, room: int) -> Plan | None:
        """The fastest plan within ``room`` bytes, or that with the least; ``None`` where torch runs without a plan."""
        _, problem, deterministic = key
        if self.plan_table.chosen(problem, deterministic) is None:
            return None
        options = self.plan_table.constraints(problem, deterministic)
        return plans_by_workspace(self.plan_table.planner, problem, options).plan(room)

    def _chosen(self, limit: int, caps: Mapping[Key, int]) -> dict[Key, Plan]:
        """For each kernel the fastest plan in what ``limit`` leaves it, and in at most its entry in ``caps``."""
        chosen = {}
        for key, base in self._base.items():
            room = limit - base
            if room > self._grain:
                room -= self._grain
            plan = self._plan(key, min(room, caps.get(key, room)))
            if plan is not None:
                chosen[key] = plan
        return chosen

    def _least(self, floor: int) -> int:
        """The bytes with which every kernel has a plan that fits. Few kernels are planned anew to find it."""
        least = floor
        free = {key: self.plan_table.chosen(key[1], key[2]) for key in self._base}
        needing = {key: base + plan.workspace for key, base in self._base.items() if (plan := free[key]) is not None}
        for key in sorted(needing, key=lambda key: -self._base[key]):
            if needing[key] > least:
                plan = self._plan(key, least - self._base[key])
                least = max(least, self._base[key] + (0 if plan is None else plan.workspace))
        return least

    def _needed(self, schedule: Choices, predicted: int, floor: int) -> int:
        """The bytes in which a step by the least plans was seen to run."""
        self.install(schedule)
        if self.step.device.type != "cuda":
            peak = self._peak(self.limit)
            assert peak is not None
            return peak
        sizes = {int(factor * predicted) for factor in CAPS} | ({self.limit} if self.limit >= NEAR * floor else set())
        for size in sorted(sizes):
            if self._peak(size) is not None:
                return size
        raise NoPlanError(f"the step does not run in the memory of {self.step.device} by any schedule")

    def _fitted(self, lean: int, least: int) -> tuple[Choices, int]:
        """The fastest plans with which a run kept the limit, and the bytes that the run took."""
        caps: dict[Key, int] = {}
        slack = self._unseen
        tried: list[Choices] = []
        for _ in range(ROUNDS):
            schedule = self._chosen(self.limit - slack, caps)
            if schedule in tried:
                break
            self.install(schedule)
            peak = self._peak(self.limit)
            if peak is not None and peak <= self.limit:
                return schedule, peak
            tried.append(schedule)
            if not self._lower(schedule, caps):
                slack += self.limit // SLACK
            slack = max(slack, sum(leaf.constant for plan in schedule.values() for leaf in plan.leaves()))
        schedule = self._chosen(lean, {})
        self.install(schedule)
        peak = self._peak(self.limit)
        if peak is None or peak > self.limit:
            raise StepTooLarge(self.limit, least, self._too_large(least))
        return schedule, peak

    def _lower(self, schedule: Choices, caps: dict[Key, int]) -> bool:
        """Lower ``caps`` of kernels that exceeded the limit when run; whether there were any."""
        profiler = MemoryProfiler(meter_of(self.step.device, self.step.held), self.plan_tables)
        try:
            with self.step.repeatable(), profiler.over(self.modules, self.weights):
                _, moments, _ = profiler.traced(self.step)
        except torch.OutOfMemoryError:
            return False
        lowered = False
        for m in moments:
            key = m.kernel.layer, m.kernel.problem, m.kernel.deterministic
            over = _total(m, schedule.get(key), self._unseen) - self.limit
            if over > 0 and key in schedule and schedule[key].workspace > 0:
                caps[key] = min(caps.get(key, schedule[key].workspace), schedule[key].workspace - over)
                lowered = True
        return lowered

    def _peak(self, cap: int) -> int | None:
        """The most bytes that the step takes in two runs as the modules are now; ``None`` if ``cap`` is too little.

        The first run counts because torch's benchmark mode tries algorithms in the memory that the allocator grants it,
        at most ``cap``, and keeps its choice.
        """
        meter = meter_of(self.step.device, self.step.held)
        if self.step.device.type == "cuda":
            try:
                with self.step.repeatable(), allocator_cap(cap, self.step.device):
                    return meter.traced(self.step, self.step).peak
            except torch.OutOfMemoryError:
                gc.collect()
                return None
        profiler = MemoryProfiler(meter, self.plan_tables)
        with self.step.repeatable():
            peak = meter.traced(self.step, self.step).peak
            with profiler.over(self.modules, self.weights):
                _, moments, _ = profiler.traced(self.step)
        hidden = []
        for m in moments:
            plan = self.plan_tables[m.kernel.layer].chosen(m.kernel.problem, m.kernel.deterministic)
            hidden.append(m.alive + m.result + _hidden(m, plan))
        return max([peak + meter.unseen, *hidden])


def _total(m: Moment, plan: Plan | None, unseen: int) -> int:
    """The bytes while a kernel ran: those counted or, if more, those with what the planner saw its library take."""
    return max(m.most + unseen, m.alive + m.result + _hidden(m, plan))


def _hidden(m: Moment, plan: Plan | None) -> int:
    """The bytes that the planner saw a library take by itself, beside the declared workspace."""
    return 0 if plan is None else max(0, plan.workspace - m.kernel.declared)
