"""A recurrent layer's table from calls to what runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewise import solvers
from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import disturbed
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.call import RecurrentCall, describe, given_of, problem_of
from tilewise.nn.layers.recurrent.compiled import Known, publish
from tilewise.nn.layers.recurrent.run import RecurrentRun
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.recurrent._recurrent import RecurrentSolver

__all__ = ["RecurrentLayer"]

MOST_CALLS = 128
"""Kinds of call of which a layer remembers what runs them."""


class RecurrentLayer:
    """Recurrent layers with plans in one table: ``layer(module, x, hx)`` is the result, or ``NotImplemented``.

    The latter means that torch computes it. Copies of a module share it. It holds no tensor.
    """

    __slots__ = ("__weakref__", "_runs", "known", "plan_table")

    def __init__(self, plan_table: PlanTable) -> None:
        self.plan_table = plan_table
        self._runs: Recent[RecurrentCall, RecurrentRun] = Recent(MOST_CALLS)
        self.known: list[Known] = []
        """The planned calls as ``torch.compile`` finds them."""

    def __call__(self, module: nn.RNNBase, x: object, hx: object) -> Any:
        if disturbed():
            return NotImplemented
        given = given_of(module, x, hx)
        if isinstance(given, str):
            return NotImplemented
        run = self.resolve(describe(given))
        return NotImplemented if run is None or not run.planned else run(given)

    def problems(self, call: RecurrentCall) -> dict[str, RecurrentProblem]:
        """The problem of a call. That of a call with gradients is the backward's as well: one plan runs both."""
        return {"forward": problem_of(call)}

    def resolve(self, call: RecurrentCall) -> RecurrentRun | None:
        """What runs such a call; ``None`` where it cannot be planned at this moment."""
        run = self._runs.get(call)
        if run is None and self.plan_table.ready([problem_of(call)], call.deterministic, call.device):
            run = self._runs[call] = self._made(call)
        return run

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
        run = RecurrentRun(problem, call.device, layer, bound.slots, several)
        if self.plan_table.traced and len(self.known) < MOST_CALLS:
            known = publish(run, call, bound.plan)
            if known is not None and known not in self.known:
                self.known.append(known)
                self.plan_table.published.add(known.plans)
        return run

    def forget(self) -> None:
        """Forget all resolved calls, as the plan table's plans have changed."""
        self._runs.clear()
        self.known.clear()
