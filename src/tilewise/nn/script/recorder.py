"""A plan table that records calls until a step is over and then plans them all at once (Oyama et al. 2018, III-E).

A step is over when a call repeats: the same problems, with a weight at the same address. In a network whose layers
share a weight a call repeats earlier; the calls that follow it are then planned at the next repetition.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tilewise.comm.agreement import several_ranks
from tilewise.machine.device import is_capturing
from tilewise.nn.layers.geometry import Role
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.report import CallReport, LayerReport, PassReport, Report
from tilewise.planner import Options, Planner
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import Pass
from tilewise.problems.kinds import kind_of

__all__ = ["MOST_KINDS", "MOST_RECORDED", "Noted", "Recorder", "Site", "plan_recorded"]

MOST_KINDS = 16
"""Kinds of call (shapes, needs for gradients, flags) of one layer before it is left to torch as ever changing."""
MOST_REASONS = 64
"""Reasons why calls are torch's affair that are kept for the report."""
MOST_RECORDED = 4096
"""Calls taken down without one that comes again before no more are."""
OFTEN = 64
"""So many calls of one kind are a repeat whatever their weights: some networks make their weights anew each time."""


OF_WEIGHTS = (Pass.WGRAD.value, "tn")
"""Names of the computations that give the gradient of a weight: a convolution's, and a linear layer's product."""


@dataclass(frozen=True, slots=True)
class Noted:
    """One kind of call: its problems, the forward's first, and torch's deterministic flag."""

    function: str
    problems: tuple[Problem, ...]
    deterministic: bool

    def roles(self) -> Iterator[tuple[Role, Problem]]:
        """Each problem with its role in the layer."""
        for index, problem in enumerate(self.problems):
            gradient = Role.GRAD_WEIGHT if problem.task in OF_WEIGHTS else Role.GRAD_INPUT
            yield (gradient if index else Role.FORWARD), problem


class Site(Protocol):
    """What the recorder does with the site of a call."""

    @property
    def function(self) -> str:
        """The name of torch's function."""
        ...

    def close(self) -> None:
        """Leave to torch every kind of call that has not been seen by now."""
        ...


class Recorder(PlanTable):
    """The plans of recorded calls, of at most ``most_plans`` problems.

    ``waiting`` has, for each thread, the problems of the call that :meth:`ready` has just refused. With ``full``, no
    kind of call that is not known yet is planned any more.
    """

    def __init__(self, options: Options, planner: Planner | None, most_plans: int) -> None:
        super().__init__(options, "plan", planner)
        self.most_plans = most_plans
        self.full = False
        self.waiting: dict[int, tuple[tuple[Problem, ...], bool]] = {}
        self.calls: dict[Noted, int] = {}
        """Kinds of call that were planned, and how many weights met each before."""
        self.restless: dict[tuple[str, int], Noted] = {}
        """Layers left to torch as ever changing, with one of their calls."""
        self.left: dict[tuple[str, str], int] = {}
        """Calls that are torch's affair, by function and reason, and how many there were."""
        self._pending: dict[Noted, dict[int, None]] = {}
        self._kinds: dict[tuple[str, int], dict[Noted, None]] = {}
        self._often: dict[Noted, int] = {}
        self._recorded = 0
        self._planning = False
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def constraints(self, problem: Problem, deterministic: bool) -> Options:
        """As :meth:`PlanTable.constraints`; with several ranks plans come from wisdom only."""
        options = super().constraints(problem, deterministic)
        return replace(options, rigor="wisdom_only") if several_ranks() else options

    def must_plan(self, options: Options) -> bool:
        """Always ``False``: the recorded step was computed by torch, and so may the next one be."""
        return False

    def ready(self, problems: Iterable[Problem], deterministic: bool, device: torch.device) -> bool:
        """As :meth:`PlanTable.ready`, but problems without a plan are put into :attr:`waiting`; then ``False``."""
        required = tuple(problems)
        if not self.missing(required, deterministic):
            return super().ready(required, deterministic, device)
        if not is_capturing(device):
            self.waiting[threading.get_ident()] = required, deterministic
        return False

    def note(self, site: Site, weight: torch.Tensor | None) -> bool:
        """Record the call that :meth:`ready` has just refused to this thread.

        That of a function without a weight ends no step by itself, unless it comes often. Returns whether a step was
        over with it, so that all recorded calls are planned now.
        """
        refused = self.waiting.pop(threading.get_ident(), None)
        if refused is None:
            return False
        if self.full:
            site.close()
            return False
        with self._lock:
            noted = Noted(site.function, *refused)
            if weight is None:
                over = self._record_alone(noted)
            else:
                with torch._C.DisableTorchFunctionSubclass():
                    place = weight.data_ptr()
                over = self._record(noted, site, place)
            if not over or self._planning:
                return False
            self._planning = True
            recorded = dict(self._pending)
        try:
            self._plan_within_bounds(recorded)
        finally:
            with self._lock:
                self._planning = False
        return True

    def leave(self, function: str, reason: str) -> None:
        """Count a call that is left to torch, for the report."""
        key = function, reason
        with self._lock:
            if key in self.left or len(self.left) < MOST_REASONS:
                self.left[key] = self.left.get(key, 0) + 1

    def _record(self, noted: Noted, site: Site, place: int) -> bool:
        """Record a call, and return whether a step was over before it."""
        key = (noted.function, place)
        if len(self._kinds) > MOST_RECORDED:
            self._kinds.clear()
        kinds = self._kinds.setdefault(key, {})
        if noted in kinds:
            self._pending.setdefault(noted, {})[place] = None
            return True
        if len(kinds) >= MOST_KINDS:
            self._leave(key, kinds, noted, site)
            return False
        kinds[noted] = None
        self._pending.setdefault(noted, {})[place] = None
        return self._counted(noted)

    def _record_alone(self, noted: Noted) -> bool:
        """Record a call of a function without a weight, and return whether such calls came often enough to plan."""
        if noted in self._pending:
            self._often[noted] = self._often.get(noted, 0) + 1
            return self._often[noted] >= OFTEN
        self._pending[noted] = {0: None}
        return self._counted(noted)

    def _counted(self, noted: Noted) -> bool:
        """Count a call that was recorded, and return whether its kind came often enough to plan."""
        self._often[noted] = self._often.get(noted, 0) + 1
        self._recorded += 1
        if self._recorded > MOST_RECORDED:
            self._forget()
            self._fill(f"{MOST_RECORDED} calls were recorded and none came again")
        return self._often.get(noted, 0) >= OFTEN

    def _leave(self, key: tuple[str, int], kinds: dict[Noted, None], noted: Noted, site: Site) -> None:
        """Leave a layer to torch whose calls keep changing, and drop recorded calls that only this layer made."""
        site.close()
        for kind in kinds:
            places = self._pending.get(kind, {})
            places.pop(key[1], None)
            if not places:
                self._pending.pop(kind, None)
        if len(self.restless) < MOST_RECORDED:
            self.restless[key] = noted
        self._tell(
            "restless",
            f"layers whose shapes keep changing ({MOST_KINDS} kinds of call) are left to torch from then on",
        )

    def _forget(self) -> None:
        """Drop all recorded calls."""
        self._pending.clear()
        self._often.clear()
        self._recorded = 0

    def _plan_within_bounds(self, recorded: dict[Noted, dict[int, None]]) -> None:
        """Plan the recorded calls, as many as ``most_plans`` allows."""
        allowed = self.most_plans - len(self._plans)
        todo: list[Noted] = []
        for noted in recorded:
            unplanned = self.missing([p for kind in [*todo, noted] for p in kind.problems], noted.deterministic)
            if len(unplanned) > allowed:
                self._fill(f"most_plans={self.most_plans} problems are planned")
                break
            todo.append(noted)
        plan_recorded(self, todo)
        with self._lock:
            for noted in recorded:
                places = self._pending.pop(noted, {})
                if noted in todo:
                    self.calls[noted] = len(places)
            self._often.clear()
            self._recorded = len(self._pending)
        if several_ranks() and any(self.reasons.get(p) for noted in todo for p in noted.problems):
            self._tell(
                "ranks",
                "one rank of several plans nothing; what wisdom has no plan for is left to torch "
                "(run one process alone first, or call tilewise.optimize on every rank)",
            )

    def _fill(self, why: str) -> None:
        """Plan no further kinds of call, and warn of it with the reason ``why``."""
        self.full = True
        self._tell("full", f"{why}; shapes not seen until now are left to torch")

    def _tell(self, topic: str, text: str) -> None:
        """Warn with ``text``, once for each topic."""
        if topic not in self._told:
            self._told.add(topic)
            warnings.warn(f"tilewise: {text}", stacklevel=2)

    def report(self) -> Report:
        """The report of every kind of recorded call, as a layer named in benchdnn's notation."""
        times = self.torch_times(())
        with self._lock:
            planned, pending, restless = dict(self.calls), dict(self._pending), dict(self.restless)
            left = dict(self.left)
        layers = [_layer_report(self, noted, count, times) for noted, count in planned.items()]
        layers += [_unplanned(noted, len(places), "not seen a second time") for noted, places in pending.items()]
        layers += [_unplanned(noted, 1, "its shapes keep changing") for noted in restless.values()]
        layers += [LayerReport(f"{name} x{n}", name, (), reason) for (name, reason), n in left.items()]
        return Report(tuple(layers), facts=dict(self.facts))


def plan_recorded(plan_table: PlanTable, recorded: Iterable[Noted]) -> None:
    """Plan every problem of the calls ``recorded`` in ``plan_table``, and note torch's times beside the plans."""
    calls = list(recorded)
    for deterministic in dict.fromkeys(noted.deterministic for noted in calls):
        problems = [p for noted in calls if noted.deterministic is deterministic for p in noted.problems]
        plan_table.plan(problems, deterministic)
        plan_table.torch_times(problems)


def _layer_report(plan_table: PlanTable, noted: Noted, count: int, times: dict[Problem, float]) -> LayerReport:
    """The report of one kind of call that was planned; ``count`` weights were used with it."""
    passes = tuple(
        PassReport(
            role.value,
            problem,
            plan_table.chosen(problem, noted.deterministic),
            times.get(problem),
            plan_table.replacement(problem, noted.deterministic) is not None,
            plan_table.reasons.get(problem, ""),
            plan_table.notes.get(problem, ""),
            torch_host_ms=plan_table.host_times.get(problem),
        )
        for role, problem in noted.roles()
    )
    return LayerReport(_name(noted, count), noted.function, (CallReport(_input(noted), passes),))


def _unplanned(noted: Noted, count: int, reason: str) -> LayerReport:
    """The report of one kind of call that was not planned, for ``reason``."""
    return LayerReport(_name(noted, count), noted.function, (CallReport(_input(noted), ()),), reason)


def _input(noted: Noted) -> tuple[int, ...]:
    """The shape of the forward's input."""
    forward = noted.problems[0]
    return forward.shape(forward.operands[0])


def _name(noted: Noted, count: int) -> str:
    """The problem in the notation of its kind, or its key where that has no words for it, and the count."""
    forward = noted.problems[0]
    text = kind_of(forward).notation(forward) or forward.key
    return f"{text} x{count}" if count > 1 else text
