"""One layer-pass as the framework runs it and planned, in turns."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from tilewise import execute, solvers
from tilewise.machine import load
from tilewise.plan import Config, Plan
from tilewise.planner.measuring.samples import sample_of
from tilewise.planner.measuring.times import rounds
from tilewise.problems.activations import activate
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_residual
from tilewise.report.values import PassResult, RunTimes

__all__ = ["time_pass", "time_runs"]

Call = Callable[[], object]


def time_pass(result: PassResult, deterministic: bool = False, iterations: int | None = None) -> PassResult:
    """``result`` with the times of both sides in milliseconds, each call with a new result, and bias, as in a network.

    The device's times are medians, the host's the least. The load is that of the host meanwhile. The framework's times
    are ``None`` for padding that ATen's operator does not take; the planned ones where there is no plan or the plan
    leaves the layer to torch.
    """
    problem = result.problem
    with problem.flags(deterministic=deterministic):
        operands, bias, residual = _given(problem)
        calls: dict[str, Call] = {}
        if not solvers.baseline(problem).why_not(problem):
            calls["framework"] = framework_call(problem, operands, bias, residual)
        if result.plan is not None and result.replaced:
            calls["planned"] = _planned_call(problem, result.plan, operands, bias, residual)
        if not calls:
            return result
        begun = load.begin()
        times = rounds(list(calls.values()), operands[0].device, repeats=iterations or 0)
        share = load.others_since(begun)
    by_side = {side: sample_of(values) for side, values in zip(calls, times, strict=True)}
    framework, planned = by_side.get("framework"), by_side.get("planned")
    return replace(
        result,
        framework_ms=None if framework is None else framework.device_ms,
        planned_ms=None if planned is None else planned.device_ms,
        framework_host_ms=None if framework is None else framework.host_ms,
        planned_host_ms=None if planned is None else planned.host_ms,
        load=share,
    )


def _given(problem: Problem) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, torch.Tensor | None]:
    """Operands, and bias and residual where the problem adds one."""
    operands = make_operands(problem)
    bias = None
    if problem.bias:
        bias = operands[0].new_zeros(problem.shape(problem.result)[problem.bias_dim])
    return operands, bias, make_residual(problem)


def _planned_call(
    problem: Problem,
    plan: Plan,
    operands: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Call:
    """A call of ``plan`` that makes a new result."""
    added = {} if residual is None else {"residual": residual}
    bound = execute.bind(plan, problem, *operands)
    return functools.partial(bound, *operands, bias, **added)


def time_runs(result: PassResult, deterministic: bool = False, iterations: int | None = None) -> RunTimes | None:
    """Times on the device of runs of the plan of ``result``, with bias as in a network; ``None`` without a plan.

    Caches are cold, and one run warms up. As many runs follow as ``iterations`` says, or as a fifth of a second holds.
    """
    problem = result.problem
    if result.plan is None:
        return None
    with problem.flags(deterministic=deterministic):
        operands, bias, residual = _given(problem)
        call = _planned_call(problem, result.plan, operands, bias, residual)
        (times,) = rounds([call], operands[0].device, repeats=iterations or 0)
    taken = [took.device_ms for took in times]
    return RunTimes(len(taken), min(taken), statistics.median(taken))


def framework_call(
    problem: Problem,
    operands: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> Call:
    """What torch runs for ``problem``: for a layer's forward its operator, which knows how to add the bias.

    A residual and an activation are operators of their own, which work in place.
    """
    alone = bias is None and residual is None and problem.activation == "none"
    if alone or not isinstance(problem, ConvProblem):
        solver = solvers.baseline(problem)
        plan = Plan(problem.key, solver.name, solver.version, Config())
        return functools.partial(execute.bind(plan, problem, *operands), *operands, bias)
    a, b = operands
    axes = problem.axes
    stride, padding, dilation = [x.stride for x in axes], [x.before for x in axes], [x.dilation for x in axes]
    transposed = problem.pass_ is Pass.DGRAD
    extra = (
        [x.size - ((x.out - 1) * x.stride - 2 * x.before + x.reach) for x in axes] if transposed else [0] * len(axes)
    )
    convolution = functools.partial(
        torch.convolution, a, b, bias, stride, padding, dilation, transposed, extra, problem.groups
    )
    if residual is None and problem.activation == "none":
        return convolution

    def operators() -> torch.Tensor:
        y = convolution()
        return activate(y if residual is None else y.add_(residual), problem.activation)

    return operators
