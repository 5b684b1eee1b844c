"""Checks plans against float64: whether their errors keep the limit asked for, or are as good as torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise import execute, solvers
from tilewise.machine.turns import beside, pause
from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.planner.measuring.seams import seams_of
from tilewise.planner.measuring.verify import error_limit
from tilewise.planner.options import Options, first_line
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Compute, Problem, Tensors
from tilewise.problems.kinds import kind_of

__all__ = ["Checker"]


@dataclass
class Checker:
    """Checks plans for ``problem`` and its parts.

    ``torchs()`` is the measurement of torch's own choice, if there is one.
    """

    problem: Problem
    options: Options
    torchs: Callable[[], Measurement | None]

    def checked(self, plan: Plan, problem: Problem) -> tuple[Error | None, str]:
        """A plan's error and why it may not be used, empty when it may."""
        try:
            error = self.errors(plan, problem)
        except Exception as raised:  # as in a trial
            return None, f"raised {type(raised).__name__} when checked: {first_line(raised)}"
        return error, self.judge(problem, error)

    def judge(self, problem: Problem, error: Error) -> str:
        """Why ``error`` is too large under these options; empty when it is not."""
        counted = error if self.options.strict else replace(error, spread=0.0)
        most = error_limit(problem, self.options.error_limit, counted, lambda: self.own_errors)
        if not error.l2 <= most[0]:
            return f"error {error.l2:.1e} over the limit {most[0]:.1e}"
        if self.options.strict and not error.spread <= most[1]:
            return f"error {error.spread:.1e} beside an outlier over the limit {most[1]:.1e}"
        return ""

    @functools.cached_property
    def own_errors(self) -> Error:
        """The errors of torch's own choice; zeros where it cannot solve the problem."""
        torchs = self.torchs()
        if torchs is None:
            return Error(0.0, 0.0)
        return self.errors(leaf_plan(self.problem, torchs), self.problem)

    def errors(self, plan: Plan, problem: Problem) -> Error:
        """The worst errors of ``plan`` on operands of every kind."""
        baseline, is_root = solvers.baseline(problem), problem == self.problem
        torch_can = self.torchs() is not None if is_root else not baseline.why_not(problem)
        torchs = None
        if torch_can and baseline in solvers.all_solvers():
            torchs = _computing(leaf_plan(problem, Measurement(baseline.name, baseline.version, Config())), problem)
        return kind_of(problem).errors_of(problem, _computing(plan, problem), seams_of(plan), torchs)


def _computing(plan: Plan, problem: Problem) -> Compute:
    """A function that computes ``problem`` by ``plan``, which it binds anew to the tensors of each call."""

    count = len(problem.operands)

    def compute(*tensors: Any, **residual: torch.Tensor) -> torch.Tensor | Tensors:
        """Takes all operands, a bias or ``None``, all results, and a residual where the problem adds one."""
        pause()
        operands, bias, results = tensors[:count], tensors[count], tensors[count + 1 :]
        with beside(short=True):
            bound = execute.bind(plan, problem, *operands, *results)
        computed: torch.Tensor | Tensors = bound(*operands, bias, *results, **residual)
        pause()
        return computed

    return compute
