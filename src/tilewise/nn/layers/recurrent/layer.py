"""A recurrent layer's table from calls to what runs them."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewise import solvers
from tilewise.machine.recent import Recent
from tilewise.nn.layers.bound_pass import Slot
from tilewise.nn.layers.call import disturbed
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.call import Given, RecurrentCall, describe, given_of, problem_of
from tilewise.nn.layers.recurrent.compiled import Known, publish
from tilewise.nn.layers.recurrent.repeated import RepeatedCall
from tilewise.nn.layers.recurrent.run import RecurrentRun
from tilewise.nn.ranges import both_ranges
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.recurrent._recurrent import RecurrentSolver

__all__ = ["RecurrentLayer"]

MOST_CALLS = 128
"""Kinds of call of which a layer remembers what runs them."""
WIDTH = 1.25
"""Numbers of steps, and of sequences, that share a plan differ by less than this factor."""
MOST_PLANNED = 1024
"""Ranges of which a plan table remembers the call that is planned for all."""
_planned: weakref.WeakKeyDictionary[PlanTable, Recent[RecurrentCall, RecurrentCall]] = weakref.WeakKeyDictionary()
"""For each plan table the call that is planned for a range of steps and sequences, see :func:`_range_of`."""


class RecurrentLayer:
    """Recurrent layers with plans in one table: ``layer(module, x, hx)`` is the result, or ``NotImplemented``.

    The latter means that torch computes it. Copies of a module share it. It holds no tensor. ``name`` is the module's
    in its model, for a profiler to show.
    """

    __slots__ = ("__weakref__", "_latest", "_runs", "known", "name", "plan_table")

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table, self.name = plan_table, ""
        self._runs: Recent[RecurrentCall, RecurrentRun] = Recent(MOST_CALLS)
        self._latest: RepeatedCall | None = None
        """The latest call, in the hope that the next one is like it."""
        self.known: list[Known] = []
        """The planned calls as ``torch.compile`` finds them."""

    def knows(self, call: RecurrentCall) -> bool:
        """Whether it has met such a call, or one whose plan serves it, too."""
        return call in self._runs or _calls_of(self.plan_table).get(_range_of(call)) in self._runs

    def __call__(self, module: nn.RNNBase, x: object, hx: object) -> Any:
        if disturbed():
            return NotImplemented
        latest = self._latest
        given: Given | str | None = None if latest is None else latest.given(module, x, hx)
        if latest is not None and isinstance(given, Given):
            run = latest.run
        else:
            given = given_of(module, x, hx)
            if isinstance(given, str):
                return NotImplemented
            call = describe(given)
            run = self.resolve(call)
            self._latest = RepeatedCall.of(x, hx, given, call, run)
        return NotImplemented if run is None or not run.planned else run(given)

    def problems(self, call: RecurrentCall) -> dict[str, RecurrentProblem]:
        """The problem of a call. That of a call with gradients is the backward's as well: one plan runs both."""
        return {"forward": problem_of(call)}

    def resolve(self, call: RecurrentCall) -> RecurrentRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is not None:
            return run
        planned = self._planned_instead(call)
        if planned is not None:
            like = self.resolve(planned)
            if like is None:
                return None
            run = self._bound_like(like, call)
        if run is None:
            self.plan_table.new_inputs.note(self.name, call, self.problems(call), self.plan_table)
        if run is None and self.plan_table.ready([problem_of(call)], call.deterministic, call.device):
            run = self._made(call)
        if run is not None:
            self._runs[call] = run
        return run

    def _planned_instead(self, call: RecurrentCall) -> RecurrentCall | None:
        """The call whose plan serves this one, too; ``None`` where this one has a plan or is the first of its range.

        The first one counts before it is planned: a session plans calls that come again, and one of any length is that.
        """
        if self.plan_table.unplanned == "torch":
            return None
        calls, of_range = _calls_of(self.plan_table), _range_of(call)
        found = calls.get(of_range)
        if found is None:
            calls[of_range] = call
        if found == call or not self.plan_table.missing([problem_of(call)], call.deterministic):
            return None
        return found

    def _bound_like(self, like: RecurrentRun, call: RecurrentCall) -> RecurrentRun | None:
        """What runs ``call`` by the solver and config of ``like``; ``None`` where the solver does not take it."""
        problem = problem_of(call)
        if like.layer is None or like.solver is None or like.config is None:
            return replace(like, problem=problem)
        slots = tuple(Slot(problem, role) for role in problem.operands)
        if problem.packed and problem.batch == like.problem.batch:
            return replace(like, problem=problem, slots=slots)  # a layer takes any lengths
        if like.solver.why_not(problem):
            return None
        try:
            layer = like.solver.layer(problem, like.config)
        except SolverUnavailable:  # planned by itself instead
            return None
        return replace(like, problem=problem, layer=layer, slots=slots)

    def _made(self, call: RecurrentCall) -> RecurrentRun:
        """What runs such a call, of which the plan is bound."""
        problem = problem_of(call)
        several = call.device.type == "cuda" and torch.cuda.device_count() > 1
        bound = self.plan_table.bound(problem, call.deterministic, call.device)
        if bound is None:
            return RecurrentRun(problem, call.device, None, (), several)
        solver = solvers.get(bound.plan.solver)
        if not isinstance(solver, RecurrentSolver):
            reason = f"{solver.name}: cannot run forward and backward apart, as a module needs them"
            self.plan_table.refuse(problem, call.deterministic, reason)
            return RecurrentRun(problem, call.device, None, (), several)
        layer = solver.layer(problem, bound.plan.config)
        ranges, shared = (both_ranges(name, bound.plan.solver) for name in (self.name, ""))
        run = RecurrentRun(problem, call.device, layer, bound.slots, several, solver, bound.plan.config, ranges)
        if self.plan_table.traced and not call.packed and len(self.known) < MOST_CALLS:
            # Layers of equal plans share what is published, so that it has no layer's name.
            known = publish(replace(run, ranges=shared), call, bound.plan)
            if known is not None and known not in self.known:
                self.known.append(known)
                self.plan_table.published.add(known.plans)
        return run

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()
        self._latest = None
        self.known.clear()


def _calls_of(plan_table: PlanTable) -> Recent[RecurrentCall, RecurrentCall]:
    """The calls of a plan table that are planned for others, by their ranges."""
    return _planned.setdefault(plan_table, Recent(MOST_PLANNED))


def _range_of(call: RecurrentCall) -> RecurrentCall:
    """The calls that share a plan, told by one of them: their steps and sequences differ by less than ``WIDTH``.

    So do the rows of packed batches.
    """
    time, batch, inputs = call.shape
    return replace(call, shape=(_step(time), _step(batch), inputs), packed=_step(call.packed) if call.packed else 0)


def _step(size: int) -> int:
    """The number of the range that a size is in. Ranges do not overlap; up to 4 each size is one by itself."""
    return size if size < 5 else 5 + int(math.log(size / 5, WIDTH) + 1e-9)
