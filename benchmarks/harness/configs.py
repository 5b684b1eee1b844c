"""Single configs of one solver, outside the planner: which is fastest, and what it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from harness.sides import Call, Tensors, framework_call, planned_call, race
from tilewise.machine.torch_state import framework_flags
from tilewise.plan import Config, Plan
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Solver

ERROR_LIMITS = {"ieee": 1e-4, "tf32": 1e-2}
HALF_LIMIT = 2e-2
"""Relative L2 distance from torch's result above which a config is wrong: of fp32 by precision, of 16-bit types."""


class LostConfig(Exception):
    """A config that is out of the race, and why."""


@dataclass(frozen=True)
class Runnable:
    """A config that runs here and gives torch's result within ``error``."""

    config: Config
    call: Call
    error: float


def runnable(problem: ConvProblem, solver: Solver, config: Config, tensors: Tensors) -> Runnable:
    """``LostConfig`` where it does not run here, or in the memory there is, or is wrong."""
    return runnable_plan(problem, Plan(problem.key, solver.name, solver.version, config), tensors)


def runnable_plan(problem: ConvProblem, plan: Plan, tensors: Tensors) -> Runnable:
    """The same of any plan."""
    name = f"{plan.solver} {plan.config} on {problem.key}"
    try:
        call = planned_call(problem, plan, tensors)
        got = call()
    except RuntimeError as error:  # SolverUnavailable and a lack of memory among them
        raise LostConfig(f"{name}: {error}") from error
    assert isinstance(got, torch.Tensor)
    want = framework_result(problem, tensors)
    error = float((got.double() - want).norm() / want.double().norm())
    if not error <= (ERROR_LIMITS[problem.precision] if problem.dtype == "fp32" else HALF_LIMIT):
        raise LostConfig(f"{name}: relative error {error:.1e}")
    return Runnable(plan.config, call, error)


def framework_result(problem: ConvProblem, tensors: Tensors) -> torch.Tensor:
    """Torch's result for the pass, in the problem's precision."""
    with framework_flags(problem.device_type, problem.precision, deterministic=False):
        found = framework_call(problem, tensors)()
    if isinstance(found, torch.Tensor):
        return found
    assert isinstance(found, (list, tuple))
    return next(each for each in found if each is not None)


def fastest(
    problem: ConvProblem,
    solver: Solver,
    configs: Iterable[Config],
    tensors: Tensors,
    budget_ms: float,
    lost: list[str],
    most: int = 0,
) -> Runnable | None:
    """The fastest of the ``most`` most promising configs, which come first, by a short race; ``None`` when none runs.

    0: as many as the planner tries. Reasons of those that do not run are added to ``lost``.
    """
    found = []
    for config in itertools.islice(configs, most or solver.most_configs):
        try:
            found.append(runnable(problem, solver, config, tensors))
        except LostConfig as error:
            lost.append(str(error))
    if not found:
        return None
    times = race(problem, [each.call for each in found], budget_ms)
    return found[min(range(len(found)), key=times.__getitem__)]
