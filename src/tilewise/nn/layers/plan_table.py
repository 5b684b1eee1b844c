"""The plans of one set of options, made ahead of time or at first use: each problem once, and bound once per device."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from tilewise import solvers
from tilewise.comm.agreement import several_ranks
from tilewise.kernels.native import autograd
from tilewise.machine.device import is_capturing
from tilewise.machine.recent import Recent
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.budget import Budget, GroupsOf, Names, divide
from tilewise.nn.layers.bound_pass import BoundPass, bind_pass
from tilewise.nn.new_inputs import NewInputs
from tilewise.nn.progress import Late, showing
from tilewise.plan import Plan, format_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.caches.measurements import baselines
from tilewise.planner.options import EXCLUDED
from tilewise.planner.processes.messages import effort
from tilewise.problems.base import Problem
from tilewise.settings import OPTIONS
from tilewise.solvers import SolverUnavailable

__all__ = ["PlanTable", "planning"]

MOST_ON_SIGHT = 4096
"""The most problems planned at first use that a plan table remembers."""

_planning = threading.RLock()


def _nobody_plans() -> None:
    """Make a new lock in a forked child: the thread that held the old one does not exist there."""
    global _planning
    _planning = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_nobody_plans)


def planning() -> AbstractContextManager[object]:
    """The lock of planning, since torch's flags and a device's clocks belong to the whole process."""
    return _planning


_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, PlanTable] = weakref.WeakValueDictionary()


def table_of(number: int) -> PlanTable | None:
    """The plan table with this ``number``; ``None`` where it is gone."""
    return _tables.get(number)


class PlanTable:
    """The plans of problems under ``options``.

    ``unplanned`` says what to do with a shape seen first in use: ``"plan"`` it or leave it to ``"torch"``. Raises
    ``ValueError`` naming ``unplanned`` or ``planner`` for another value.
    """

    traced = True
    """Whether ``torch.compile`` may find the layers of this plan table."""
    left_out: tuple[str, ...] = ()  # the names of the convolutions that the caller's filter_fn leaves out

    def __init__(self, options: Options, unplanned: str, planner: Planner | None = None) -> None:
        OPTIONS["unplanned"].kind.check("unplanned", unplanned)
        if planner is not None and not isinstance(planner, Planner):
            raise ValueError(f"planner={planner!r:.80}: a tilewise.planner.Planner, or None, would do")
        self.options, self.unplanned, self._planner = options, unplanned, planner
        self.reasons: dict[Problem, str] = {}
        self.times: dict[Problem, float] = {}
        self.host_times: dict[Problem, float | None] = {}
        """The host's part beside torch's times; ``None`` where it is not known."""
        self.limits: dict[Problem, int] = {}
        """Workspace in bytes that single problems may use, in place of the options' limit."""
        self.facts: dict[str, Any] = {}
        """Further facts on the plans for the report, by name: plain JSON values."""
        self.notes: dict[Problem, str] = {}
        """Why a schedule's plan was not taken, where there is a schedule."""
        self.uses: dict[Problem, int] = {}
        """How often a step of the model computes each problem, where that was seen."""
        self.published: set[str] = set()
        """The names by which compiled graphs may find its layers."""
        self.number = next(_numbers)
        """What compiled graphs are traced with in place of this object, see :func:`table_of`."""
        _tables[self.number] = self
        self.new_inputs = NewInputs()
        self.supply: Callable[[PlanTable, list[Problem], bool], list[Problem]] | None = None
        """Asked before anything is planned: it brings plans from elsewhere and gives back what is left to plan."""
        self._plans: dict[tuple[Problem, bool], Plan | None] = {}
        self._withheld: frozenset[tuple[Problem, bool]] = frozenset()
        """Problems that torch computes although they have plans."""
        self._on_sight: Recent[tuple[Problem, bool], None] = Recent(MOST_ON_SIGHT, self._let_go)
        """Problems that were planned at first use, not ahead of time."""
        self._bound: dict[tuple[Problem, bool, torch.device], BoundPass] = {}

    @property
    def planner(self) -> Planner:
        """The planner, made at first use. With several ranks only rank 0 shows its progress."""
        if self._planner is None:
            first = not several_ranks() or torch.distributed.get_rank() == 0
            self._planner = Planner(progress=Late() if first else None)
        return self._planner

    def constraints(self, problem: Problem, deterministic: bool) -> Options:
        """The options for ``problem`` in a call under torch's own ``deterministic`` flag."""
        workspace = self.limits.get(problem, self.options.workspace)
        return replace(self.options, workspace=workspace, deterministic=self.options.deterministic or deterministic)

    def missing(self, problems: Iterable[Problem], deterministic: bool) -> list[Problem]:
        """The problems that are not planned yet, each once."""
        return [p for p in dict.fromkeys(problems) if (p, deterministic) not in self._plans]

    def plan(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Plan the problems that are not planned yet.

        Where no solver can compute a problem it is left to torch, and the reason is remembered. Under a memory limit
        that torch would exceed too, ``NoPlanError`` is raised instead. Where torch's choice is excluded from plans but
        keeps the limit, the problem is left to torch.
        """
        waiting = self.missing(problems, deterministic)
        autograd.start({problem.device_type for problem in waiting})  # compiled while kernels are
        efforts = {p.key: effort(p, self.constraints(p, deterministic)) for p in waiting}
        with planning(), undisturbed(), showing(self.planner.progress, efforts):
            alike: dict[Options, list[Problem]] = {}
            if self.supply is not None:
                waiting = self.supply(self, waiting, deterministic)
            for problem in waiting:
                alike.setdefault(self.constraints(problem, deterministic), []).append(problem)
            for options, todo in alike.items():
                try:
                    plans = self.planner.plan_many(todo, options)
                except NoPlanError:
                    if self.must_plan(options) and not options.excludes(solvers.baseline(todo[0])):
                        raise
                    plans = self._one_by_one(todo, deterministic, options)
                for problem, plan in plans.items():
                    self.learn(problem, deterministic, plan)

    def must_plan(self, options: Options) -> bool:
        """Whether a problem without a plan is an error, because torch would exceed the limit as well."""
        return options.workspace is not None and options.rigor != "wisdom_only"

    def divide(self, names: Names, budget: Budget, deterministic: bool, groups_of: GroupsOf | None = None) -> None:
        """Divide ``budget`` among the problems of ``names``, as limits for :meth:`plan`, and keep the facts of it.

        Raises ``NoPlanError`` with the least budget that works.
        """
        options = replace(self.options, deterministic=self.options.deterministic or deterministic)
        with planning(), undisturbed(), showing(self.planner.progress):
            divided = divide(self.planner, names, options, budget, groups_of)
        self.limits.update(divided.limits)
        self.facts.update(divided.facts)

    def _one_by_one(self, problems: Iterable[Problem], deterministic: bool, options: Options) -> dict[Problem, Plan]:
        """Plan each problem by itself, so that one without a plan does not keep the others from theirs."""
        plans = {}
        for problem in problems:
            try:
                plans[problem] = self.planner.plan(problem, options)
            except NoPlanError as error:
                if self.must_plan(options) and not _torch_keeps(self.planner, problem, options):
                    raise
                alone = f"no solver but {solvers.baseline(problem).name}, {EXCLUDED}, can compute it\n"
                self.refuse(
                    problem, deterministic, f"{alone if options.excludes(solvers.baseline(problem)) else ''}{error}"
                )
        return plans

    def learn(self, problem: Problem, deterministic: bool, plan: Plan) -> None:
        """Take a plan that this plan table's planner made, or that :meth:`confirm` accepted."""
        self._plans[problem, deterministic] = plan

    def confirm(self, problem: Problem, deterministic: bool, plan: Plan) -> None:
        """Check a plan of another rank: solvers offer it, it keeps the limit, and it is right against float64.

        Peak memory is not measured again, as that rank measured it in the same environment. Raises ``ValueError`` with
        the reason why the plan may not be used.
        """
        options = self.constraints(problem, deterministic)
        with planning(), undisturbed():
            reason = self.planner.confirm(problem, plan, options, by_peak=False)[1]
        if reason:
            raise ValueError(f"the plan for {problem.key} may not be used: {plan.solver}: {reason}")

    def follow(self, other: PlanTable, plans: Mapping[tuple[Problem, bool], Plan]) -> None:
        """Take the plans of ``other``, except where ``plans`` has one for a problem and deterministic flag."""
        self._bound.clear()
        self._plans = {**other._plans, **plans}
        self.reasons, self.times, self.host_times = other.reasons, other.times, other.host_times
        self.limits = {problem: plan.workspace for (problem, _), plan in plans.items()}

    def refuse(self, problem: Problem, deterministic: bool, reason: str) -> None:
        """Leave a problem to torch, for ``reason``."""
        self._plans[problem, deterministic] = None
        self.reasons[problem] = reason

    def chosen(self, problem: Problem, deterministic: bool) -> Plan | None:
        """The plan of ``problem``, torch's own included; ``None`` where there is none."""
        return self._plans.get((problem, deterministic))

    def replacement(self, problem: Problem, deterministic: bool) -> Plan | None:
        """The plan to run in place of torch's choice; ``None`` where torch's choice won or nothing is known."""
        if (problem, deterministic) in self._withheld:
            return None
        plan = self.chosen(problem, deterministic)
        return None if plan is None or plan.solver == solvers.baseline(problem).name else plan

    def left_to_torch(self) -> dict[Problem, int]:
        """The problems that torch computes, and how often a step computes each."""
        by_torch = (problem for problem, deterministic in self._plans if not self.replacement(problem, deterministic))
        return {problem: self.uses.get(problem, 1) for problem in by_torch}

    def withhold(self, keys: Collection[tuple[Problem, bool]], note: str) -> None:
        """Let torch compute these problems although they have plans, and no others; ``note`` says why in reports."""
        for problem, _ in self._withheld:
            self.notes.pop(problem, None)
        self._withheld = frozenset(keys)
        self.notes.update({problem: note for problem, _ in keys})

    def torch_times(self, problems: Iterable[Problem]) -> dict[Problem, float]:
        """torch's milliseconds on each problem, measured beside its plans, of all problems known so far.

        They are the device's; :attr:`host_times` has the host's.
        """
        unknown = [p for p in problems if p not in self.times]
        if unknown:
            self.times |= self.planner.torch_ms(unknown)
            measured = baselines(self.planner.wisdom, unknown)
            self.host_times |= {p: m.host_ms for p, m in measured.items()}
        return self.times

    def ready(self, problems: Iterable[Problem], deterministic: bool, device: torch.device) -> bool:
        """Plan and bind the problems where that is missing, and return whether all can be used now.

        A shape seen first is planned if ``unplanned`` says so. ``False`` while a CUDA graph is captured and something
        is missing. One rank of several does not plan by itself: its new problems are left to torch.
        """
        required = list(problems)
        for problem in required:
            self._on_sight.get((problem, deterministic))
        if missing := self.missing(required, deterministic):
            if self.unplanned == "torch" or several_ranks():
                for problem in missing:
                    self.refuse(problem, deterministic, "not planned for")
            elif is_capturing(device):
                return False
            else:
                with self.new_inputs.told(self.planner, {p: self.constraints(p, deterministic) for p in missing}):
                    self.plan(required, deterministic)
            for problem in missing:
                self._on_sight[problem, deterministic] = None
        unbound = [
            p for p in required if self.replacement(p, deterministic) and (p, deterministic, device) not in self._bound
        ]
        if unbound and is_capturing(device):
            return False
        for problem in unbound:
            self._bind(problem, deterministic, device)
        return True

    def _let_go(self, keys: list[tuple[Problem, bool]]) -> None:
        """Drop problems met in use long ago. If one comes again, wisdom has its plan, or torch computes it."""
        for problem, deterministic in keys:
            self._plans.pop((problem, deterministic), None)
            if (problem, not deterministic) not in self._plans:
                for table in (self.reasons, self.times, self.host_times, self.notes):
                    table.pop(problem, None)
        gone = set(keys)
        for key in [key for key in self._bound if key[:2] in gone]:
            self._bound.pop(key, None)

    def bound(self, problem: Problem, deterministic: bool, device: torch.device) -> BoundPass | None:
        """The bound plan of ``problem`` on ``device``, after :meth:`ready`; ``None`` where torch computes it."""
        if (problem, deterministic) in self._withheld:
            return None
        return self._bound.get((problem, deterministic, device))

    def _bind(self, problem: Problem, deterministic: bool, device: torch.device) -> None:
        """Bind the plan of ``problem``; leave the problem to torch where that fails or takes more than the limit."""
        plan = self.replacement(problem, deterministic)
        assert plan is not None
        limit = self.constraints(problem, deterministic).workspace
        try:
            with undisturbed():
                bound_pass = bind_pass(plan, problem, device)
        except Exception as error:  # as while planning: the plan is lost with its reason
            error_type = "" if isinstance(error, SolverUnavailable) else f"{type(error).__name__}: "
            self.refuse(problem, deterministic, f"{plan.solver}: {error_type}{error}")
            return
        declared = max(bound_pass.bound.workspaces.values())  # on each device by itself
        if limit is not None and declared > limit:
            needs = format_bytes(declared)
            self.refuse(problem, deterministic, f"{plan.solver}: needs {needs}, the limit is {format_bytes(limit)}")
            return
        self._bound[problem, deterministic, device] = bound_pass


def _torch_keeps(planner: Planner, problem: Problem, options: Options) -> bool:
    """Whether torch's own choice, excluded from plans, keeps the limits of ``options``."""
    solver_names = tuple(solver.name for solver in solvers.all_solvers() if not solver.baseline)
    try:
        planner.plan(problem, replace(options, exclude=solver_names))
    except NoPlanError:
        return False
    return True
