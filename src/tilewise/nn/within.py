"""Plans for a whole step under one limit of memory: each kernel gets what is left at its moment, and the step is run.

mu-cuDNN gives every layer a workspace for good (Oyama et al. 2018, III-C). In torch one lives only while its kernel
runs, so what a kernel may use is the limit less what is alive just then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewise.device import total_memory
from tilewise.nn.book import Book
from tilewise.nn.geometry import Weights
from tilewise.nn.ladder import ladder_of
from tilewise.nn.meter import Meter, allocator_cap, meter_of
from tilewise.nn.step import Step
from tilewise.nn.swaps import swap_back
from tilewise.nn.watch import Moment, Watch, saved_swaps
from tilewise.plan import Plan, format_bytes, parse_bytes
from tilewise.planner import NoPlanError
from tilewise.problem import ConvProblem
from tilewise.torch_state import without_benchmark

__all__ = ["Choices", "Needs", "StepTooLarge", "Within", "memory_bytes", "profile"]

ROUNDS = 6
"""Schedules that are run before the least one is taken."""
SLACK = 64
"""Where a step is above the limit and no kernel is to blame, all get this part of the limit less."""
CAPS = (1.0, 1.02, 1.04, 1.06, 1.09, 1.12, 1.16, 1.2, 1.25, 1.35, 1.5)
"""Where the allocator's fragments keep the least schedule from running in what it holds, what is tried, in that."""
NEAR = 0.9
"""What is alive is rounded up: a step may run in less than its profile says, but not below this part of it."""

Key = tuple[str, ConvProblem, bool]
"""A module's name, a problem of its calls, and torch's deterministic flag in them."""
Choices = Mapping[Key, Plan]


class StepTooLarge(NoPlanError):
    """No schedule keeps a step within its limit. ``least``: bytes that it needs at least, as measured."""

    def __init__(self, limit: int, least: int, text: str) -> None:
        super().__init__(text)
        self.limit, self.least = limit, least


def memory_bytes(limit: int | str, device: torch.device, argument: str = "memory_limit") -> int:
    """Bytes of a limit given as an int, text with a unit, or a share of the device's memory (``"80%"``).

    Raises ``ValueError`` naming ``argument``, the value and what would do.
    """
    if not isinstance(limit, str) or not limit.strip().endswith("%"):
        return parse_bytes(limit, argument)
    try:
        share = float(limit.strip()[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"{argument}={limit!r}: a share above 0% and up to 100%, or a size such as '16GiB', would do")
    return int(share * total_memory(device))


@dataclass(frozen=True)
class Needs:
    """A step as profiled: its kernels in the order they ran, and the most bytes alive outside all of them."""

    moments: tuple[Moment, ...]
    rest: int
    meter: Meter

    def base(self) -> dict[Key, int]:
        """What there is of each kernel beside its workspace, at the worst of its moments."""
        found: dict[Key, int] = {}
        for m in self.moments:
            size = m.alive + self.meter.charged(m.result) + (self.meter.charged(m.beside) if m.beside else 0)
            key = m.kernel.layer, m.kernel.problem, m.kernel.deterministic
            found[key] = max(found.get(key, 0), size)
        if self.meter.keeps:  # what one kernel took is there at every other moment
            most = max([self.rest, *found.values()])
            found = dict.fromkeys(found, most)
        return found

    @property
    def floor(self) -> int:
        """Bytes that the step takes even if no kernel has a workspace."""
        return max([self.rest, *self.base().values()])


def profile(step: Step, modules: Mapping[str, nn.Module], weights: Weights) -> Needs:
    """Run ``step`` with every convolution of ``modules`` computed by torch, and see what is alive when.

    Raises ``NoPlanError`` where it does not fit on the device.
    """
    meter = meter_of(step.device, step.held)
    watch = Watch(meter, {})
    gc.collect()  # what planning left
    try:
        with step.repeatable(), watch.over(modules, weights), without_benchmark(step.device.type):
            _, moments, rest = watch.traced(step)
    except torch.OutOfMemoryError as error:
        text = str(error).partition("\n")[0]
        raise NoPlanError(f"the step does not fit in the memory of {step.device}: {text}") from error
    return Needs(tuple(moments), rest, meter)


@dataclass
class Within:
    """Finds the fastest schedule of ``modules`` with which ``step`` keeps to ``limit`` bytes.

    ``book`` has the plans that each problem would have without it; ``install`` has the modules run by a schedule
    (``books`` then hold its plans by module), and by those of ``book`` what the schedule does not name.
    """

    step: Step
    modules: Mapping[str, nn.Module]
    book: Book
    books: Mapping[str, Book]
    install: Callable[[Choices], None]
    limit: int
    weights: Weights

    def fit(self) -> dict[str, Any]:
        """Leave the schedule installed and return what is to be told of it (``step`` in ``docs/json.md``).

        Raises :class:`StepTooLarge` where even the least schedule is above the limit, and what the step raises; the
        modules then compute as they did before.
        """
        put_back = saved_swaps(self.modules.values())
        try:
            return self._fit()
        except BaseException:
            put_back()
            raise

    def _fit(self) -> dict[str, Any]:
        for module in self.modules.values():
            swap_back(module)
        needs = profile(self.step, self.modules, self.weights)
        self._base = needs.base()
        self._grain = needs.meter.granularity
        for deterministic in {key[2] for key in self._base}:
            self.book.plan([p for _, p, d in self._base if d == deterministic], deterministic)
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
        return (
            f"memory_limit={self.limit}: the step needs {format_bytes(least)} at least ({least} bytes), the limit is "
            f"{format_bytes(self.limit)}; a smaller batch would do (tilewise.largest_batch finds the largest)"
        )

    def _told(self, m: Moment, schedule: Choices) -> dict[str, Any]:
        k = m.kernel
        plan = schedule.get((k.layer, k.problem, k.deterministic))
        return {
            "layer": k.layer,
            "pass": k.problem.pass_.value,
            "alive": m.alive,
            "result": m.result,
            "workspace": 0 if plan is None else plan.workspace,
        }

    def _plan(self, key: Key, room: int) -> Plan | None:
        """The fastest plan within ``room``, or the one in the least; ``None`` where torch has to do it unplanned."""
        _, problem, deterministic = key
        if self.book.chosen(problem, deterministic) is None:
            return None
        options = self.book.constraints(problem, deterministic)
        return ladder_of(self.book.planner, problem, options).plan(room)

    def _chosen(self, limit: int, caps: Mapping[Key, int]) -> dict[Key, Plan]:
        """For each kernel the fastest plan in what ``limit`` leaves it, and in no more than its entry in ``caps``."""
        found = {}
        for key, base in self._base.items():
            room = limit - base
            if room > self._grain:
                room -= self._grain
            plan = self._plan(key, min(room, caps.get(key, room)))
            if plan is not None:
                found[key] = plan
        return found

    def _least(self, floor: int) -> int:
        """Bytes for which every kernel has a plan that fits; few are planned anew for it."""
        least = floor
        free = {key: self.book.chosen(key[1], key[2]) for key in self._base}
        needing = {key: base + plan.workspace for key, base in self._base.items() if (plan := free[key]) is not None}
        for key in sorted(needing, key=lambda key: -self._base[key]):
            if needing[key] > least:
                plan = self._plan(key, least - self._base[key])
                least = max(least, self._base[key] + (0 if plan is None else plan.workspace))
        return least

    def _needed(self, schedule: Choices, predicted: int, floor: int) -> int:
        """Bytes in which a step by the least schedule was seen to run."""
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
        """The fastest schedule that kept the limit when run, and the bytes it took."""
        caps: dict[Key, int] = {}
        slack = 0
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
        """Have kernels that were above the limit when run use less; whether there were any."""
        watch = Watch(meter_of(self.step.device, self.step.held), self.books)
        try:
            with self.step.repeatable(), watch.over(self.modules, self.weights):
                _, moments, _ = watch.traced(self.step)
        except torch.OutOfMemoryError:
            return False
        lowered = False
        for m in moments:
            key = m.kernel.layer, m.kernel.problem, m.kernel.deterministic
            over = _total(m, schedule.get(key)) - self.limit
            if over > 0 and key in schedule and schedule[key].workspace > 0:
                caps[key] = min(caps.get(key, schedule[key].workspace), schedule[key].workspace - over)
                lowered = True
        return lowered

    def _peak(self, cap: int) -> int | None:
        """Bytes that the step takes as the modules are now, twice run; ``None`` where it cannot run in ``cap``.

        A first run counts, too: torch's benchmark mode tries what the allocator lets it have, which is no more than
        ``cap``, and keeps its choice.
        """
        meter = meter_of(self.step.device, self.step.held)
        if self.step.device.type == "cuda":
            try:
                with self.step.repeatable(), allocator_cap(cap, self.step.device):
                    return meter.traced(self.step, self.step).peak
            except torch.OutOfMemoryError:
                gc.collect()
                return None
        watch = Watch(meter, self.books)
        with self.step.repeatable():
            peak = meter.traced(self.step, self.step).peak
            with watch.over(self.modules, self.weights):
                _, moments, _ = watch.traced(self.step)
        hidden = []
        for m in moments:
            plan = self.books[m.kernel.layer].chosen(m.kernel.problem, m.kernel.deterministic)
            hidden.append(m.alive + m.result + _hidden(m, plan))
        return max([peak, *hidden])


def _total(m: Moment, plan: Plan | None) -> int:
    """Bytes while a kernel ran: as counted, or with what its library took by itself where the planner saw more."""
    return max(m.most, m.alive + m.result + _hidden(m, plan))


def _hidden(m: Moment, plan: Plan | None) -> int:
    """What the planner saw a library take by itself."""
    return 0 if plan is None else max(0, plan.workspace - m.kernel.declared)
