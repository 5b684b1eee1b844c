"""One layer-pass as the framework runs it and planned, in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from tilewise import execute, solvers
from tilewise.plan import Config, Plan
from tilewise.planner.measure import interleaved
from tilewise.planner.operands import make_operands
from tilewise.problem import ConvProblem, Pass
from tilewise.report.values import PassResult
from tilewise.torch_state import framework_flags

__all__ = ["time_pass"]

Call = Callable[[], object]


def time_pass(found: PassResult, deterministic: bool = False, iterations: int | None = None) -> PassResult:
    """``found`` with both its times in milliseconds, each call with a new result, and bias, as in a network.

    The framework's is ``None`` for padding that ATen's operator does not take; the planned one where there is no plan
    or the plan leaves the layer to torch.
    """
    problem = found.problem
    with framework_flags(problem.device_type, problem.precision, deterministic=deterministic):
        a, b = make_operands(problem)
        bias = a.new_zeros(problem.shape(problem.result)[1]) if problem.bias else None
        calls: dict[str, Call] = {}
        if not solvers.baseline().why_not(problem):
            calls["framework"] = framework_call(problem, a, b, bias)
        if found.plan is not None and found.replaced:
            calls["planned"] = functools.partial(execute.bind(found.plan, problem, a, b), a, b, bias)
        if not calls:
            return found
        times = interleaved(list(calls.values()), a.device, repeats=iterations or 0)
    by_side = dict(zip(calls, times, strict=True))
    return replace(found, framework_ms=by_side.get("framework"), planned_ms=by_side.get("planned"))


def framework_call(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Call:
    """What torch runs for ``problem``: for a layer's forward its operator, which knows how to add the bias."""
    axes = problem.axes
    stride, padding, dilation = [x.stride for x in axes], [x.before for x in axes], [x.dilation for x in axes]
    if bias is None:
        solver = solvers.baseline()
        plan = Plan(problem.key, solver.name, solver.version, Config())
        return functools.partial(execute.bind(plan, problem, a, b), a, b)
    transposed = problem.pass_ is Pass.DGRAD
    extra = (
        [x.size - ((x.out - 1) * x.stride - 2 * x.before + x.reach) for x in axes] if transposed else [0] * len(axes)
    )
    return functools.partial(
        torch.convolution, a, b, bias, stride, padding, dilation, transposed, extra, problem.groups
    )
