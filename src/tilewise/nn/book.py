"""The plans of one set of options: found ahead of time or on sight, each problem once, and bound once a device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from tilewise import solvers
from tilewise.comm.agreement import several_ranks
from tilewise.device import is_capturing
from tilewise.nn.budget import Budget, GroupsOf, Names, divide
from tilewise.nn.progress import Late, showing
from tilewise.nn.runner import BoundPass
from tilewise.plan import Plan, format_bytes, parse_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.options import EXCLUDED
from tilewise.problem import ConvProblem
from tilewise.recent import Recent
from tilewise.solvers import SolverUnavailable
from tilewise.torch_state import undisturbed

__all__ = ["UNPLANNED", "Book", "make_options", "planning"]

UNPLANNED = ("plan", "torch")
MOST_ON_SIGHT = 4096
"""Problems met first in use of which a book remembers what became of them."""

_planning = threading.RLock()


def _nobody_plans() -> None:
    """A thread that was planning when the process forked does not live in the child."""
    global _planning
    _planning = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_nobody_plans)


def planning() -> AbstractContextManager[object]:
    """torch's flags and a device's clocks are the process's own: one thread plans at a time."""
    return _planning


def make_options(
    workspace: int | str | None,
    batch_sizes: str,
    rigor: str,
    deterministic: bool,
    error_limit: float | None,
    strict: bool,
    cuda_graphs: bool = False,
    exclude: Sequence[str] = (),
) -> Options:
    """Options from a user's arguments; raises ``ValueError`` naming the one at fault."""
    limit = None if workspace is None else parse_bytes(workspace)
    return Options(limit, batch_sizes, rigor, deterministic, error_limit, strict, cuda_graphs, exclude)  # type: ignore[arg-type]


class Book:
    """Plans by problem under ``options``; ``unplanned`` says what becomes of a shape seen first in use.

    Raises ``ValueError`` naming ``unplanned`` when it is neither ``"plan"`` nor ``"torch"``.
    """

    traced = True
    """Whether ``torch.compile`` may find the layers of this book."""

    def __init__(self, options: Options, unplanned: str, planner: Planner | None = None) -> None:
        if unplanned not in UNPLANNED:
            raise ValueError(f"unplanned={unplanned!r}: one of {', '.join(UNPLANNED)} would do")
        self.options, self.unplanned = options, unplanned
        self._planner = planner
        self.reasons: dict[ConvProblem, str] = {}
        self.times: dict[ConvProblem, float] = {}
        self.limits: dict[ConvProblem, int] = {}
        """Workspace in bytes that single problems may use, in place of the options' limit."""
        self.facts: dict[str, Any] = {}
        """What is to be told of the plans beside them, by name: plain JSON values."""
        self.notes: dict[ConvProblem, str] = {}
        """Why a schedule's plan was not taken, where there is a schedule."""
        self.supply: Callable[[Book, list[ConvProblem], bool], list[ConvProblem]] | None = None
        """Asked before anything is planned: it brings plans from elsewhere and gives back what is left to plan."""
        self._plans: dict[tuple[ConvProblem, bool], Plan | None] = {}
        self._on_sight: Recent[tuple[ConvProblem, bool], None] = Recent(MOST_ON_SIGHT, self._let_go)
        """What was met first in use, not planned ahead of it."""
        self._bound: dict[tuple[ConvProblem, bool, torch.device], BoundPass] = {}

    @property
    def planner(self) -> Planner:
        """The planner, made when first needed; of several ranks the first shows its progress."""
        if self._planner is None:
            first = not several_ranks() or torch.distributed.get_rank() == 0
            self._planner = Planner(progress=Late() if first else None)
        return self._planner

    def constraints(self, problem: ConvProblem, deterministic: bool) -> Options:
        """The options for ``problem`` in a call under torch's own ``deterministic`` flag."""
        workspace = self.limits.get(problem, self.options.workspace)
        return replace(self.options, workspace=workspace, deterministic=self.options.deterministic or deterministic)

    def missing(self, problems: Iterable[ConvProblem], deterministic: bool) -> list[ConvProblem]:
        """Those not planned yet, each once."""
        return [p for p in dict.fromkeys(problems) if (p, deterministic) not in self._plans]

    def plan(self, problems: Iterable[ConvProblem], deterministic: bool) -> None:
        """Plan what is missing.

        Where no solver will do, torch keeps the problem and the reason is kept, unless there is a memory limit that
        torch would break too: then ``NoPlanError`` is raised. Torch's own choice may be excluded from plans and still
        keep the limit: such a problem is torch's.
        """
        with planning(), undisturbed(), showing(self.planner.progress):
            alike: dict[Options, list[ConvProblem]] = {}
            waiting = self.missing(problems, deterministic)
            if self.supply is not None:
                waiting = self.supply(self, waiting, deterministic)
            for problem in waiting:
                alike.setdefault(self.constraints(problem, deterministic), []).append(problem)
            for options, todo in alike.items():
                try:
                    found = self.planner.plan_many(todo, options)
                except NoPlanError:
                    if self.must_plan(options) and not options.excludes(solvers.baseline()):
                        raise
                    found = self._one_by_one(todo, deterministic, options)
                for problem, plan in found.items():
                    self.learn(problem, deterministic, plan)

    def must_plan(self, options: Options) -> bool:
        """Whether a problem without a plan is an error: torch would break the limit too."""
        return options.workspace is not None and options.rigor != "wisdom_only"

    def divide(self, names: Names, budget: Budget, deterministic: bool, groups_of: GroupsOf | None = None) -> None:
        """Divide ``budget`` among the problems of ``names`` as limits for :meth:`plan`; its facts are ``budget``.

        Raises ``NoPlanError`` with the least budget that works.
        """
        options = replace(self.options, deterministic=self.options.deterministic or deterministic)
        with planning(), undisturbed(), showing(self.planner.progress):
            divided = divide(self.planner, names, options, budget, groups_of)
        self.limits.update(divided.limits)
        self.facts.update(divided.facts)

    def _one_by_one(
        self, problems: Iterable[ConvProblem], deterministic: bool, options: Options
    ) -> dict[ConvProblem, Plan]:
        found = {}
        for problem in problems:
            try:
                found[problem] = self.planner.plan(problem, options)
            except NoPlanError as error:
                if self.must_plan(options) and not self._torch_keeps(problem, options):
                    raise
                alone = f"no solver but {solvers.baseline().name}, {EXCLUDED}, can compute it\n"
                self.refuse(problem, deterministic, f"{alone if options.excludes(solvers.baseline()) else ''}{error}")
        return found

    def _torch_keeps(self, problem: ConvProblem, options: Options) -> bool:
        """Whether torch's own choice keeps the constraints that it was excluded under."""
        others = tuple(solver.name for solver in solvers.all_solvers() if not solver.baseline)
        try:
            self.planner.plan(problem, replace(options, exclude=others))
        except NoPlanError:
            return False
        return True

    def learn(self, problem: ConvProblem, deterministic: bool, plan: Plan) -> None:
        """Take a plan of this planner, or one that :meth:`confirm` found nothing against."""
        self._plans[problem, deterministic] = plan

    def confirm(self, problem: ConvProblem, deterministic: bool, plan: Plan) -> None:
        """Check another rank's plan here: offered by the solvers, within the limit, against float64.

        That rank measured what libraries take in the same environment. Raises ``ValueError`` with the reason why it
        may not be used.
        """
        options = self.constraints(problem, deterministic)
        with planning(), undisturbed():
            reason = self.planner.confirm(problem, plan, options, by_peak=False)[1]
        if reason:
            raise ValueError(f"the plan for {problem.key} may not be used: {plan.solver}: {reason}")

    def follow(self, other: Book, plans: Mapping[tuple[ConvProblem, bool], Plan]) -> None:
        """Have the plans of ``other``, but ``plans`` for the problems and deterministic flags that they are of."""
        self._bound.clear()
        self._plans = {**other._plans, **plans}
        self.reasons, self.times = other.reasons, other.times
        self.limits = {problem: plan.workspace for (problem, _), plan in plans.items()}

    def refuse(self, problem: ConvProblem, deterministic: bool, reason: str) -> None:
        """Leave a problem to torch."""
        self._plans[problem, deterministic] = None
        self.reasons[problem] = reason

    def chosen(self, problem: ConvProblem, deterministic: bool) -> Plan | None:
        """The plan of ``problem``, torch's own included; ``None`` where there is none."""
        return self._plans.get((problem, deterministic))

    def replacement(self, problem: ConvProblem, deterministic: bool) -> Plan | None:
        """The plan that is to run in place of torch's choice, ``None`` where torch's own won or nothing is known."""
        plan = self.chosen(problem, deterministic)
        return None if plan is None or plan.solver == solvers.baseline().name else plan

    def torch_times(self, problems: Iterable[ConvProblem]) -> dict[ConvProblem, float]:
        """torch's time in ms on each problem, as measured beside its plans, where that is known."""
        unknown = [p for p in problems if p not in self.times]
        if unknown:
            self.times |= self.planner.torch_ms(unknown)
        return self.times

    def ready(self, problems: Iterable[ConvProblem], deterministic: bool, device: torch.device) -> bool:
        """Have every problem planned and bound, planning on sight where that is asked for.

        ``False`` when it cannot be done now: nothing is planned or bound while capturing a CUDA graph, nor planned by
        one rank of several.
        """
        wanted = list(problems)
        for problem in wanted:
            self._on_sight.get((problem, deterministic))
        if missing := self.missing(wanted, deterministic):
            if self.unplanned == "torch" or several_ranks():
                for problem in missing:
                    self.refuse(problem, deterministic, "not planned for")
            elif is_capturing(device):
                return False
            else:
                self.plan(wanted, deterministic)
            for problem in missing:
                self._on_sight[problem, deterministic] = None
        unbound = [
            p for p in wanted if self.replacement(p, deterministic) and (p, deterministic, device) not in self._bound
        ]
        if unbound and is_capturing(device):
            return False
        for problem in unbound:
            self._bind(problem, deterministic, device)
        return True

    def _let_go(self, keys: list[tuple[ConvProblem, bool]]) -> None:
        """Let go of what was met in use long ago: met again, wisdom has its plan, or torch keeps it."""
        for problem, deterministic in keys:
            self._plans.pop((problem, deterministic), None)
            if (problem, not deterministic) not in self._plans:
                for table in (self.reasons, self.times, self.notes):
                    table.pop(problem, None)
        gone = set(keys)
        for key in [key for key in self._bound if key[:2] in gone]:
            self._bound.pop(key, None)

    def bound(self, problem: ConvProblem, deterministic: bool, device: torch.device) -> BoundPass | None:
        """What runs ``problem`` on ``device`` once :meth:`ready`; ``None``: torch."""
        return self._bound.get((problem, deterministic, device))

    def _bind(self, problem: ConvProblem, deterministic: bool, device: torch.device) -> None:
        plan = self.replacement(problem, deterministic)
        assert plan is not None
        limit = self.constraints(problem, deterministic).workspace
        try:
            with undisturbed():
                made = BoundPass(plan, problem, device)
        except Exception as error:  # as while planning: the plan is lost with its reason
            what = "" if isinstance(error, SolverUnavailable) else f"{type(error).__name__}: "
            self.refuse(problem, deterministic, f"{plan.solver}: {what}{error}")
            return
        if limit is not None and made.bound.workspace > limit:
            needs = format_bytes(made.bound.workspace)
            self.refuse(problem, deterministic, f"{plan.solver}: needs {needs}, the limit is {format_bytes(limit)}")
            return
        self._bound[problem, deterministic, device] = made
