"""The two sides of a comparison as calls: what torch's autograd runs for a layer, and a plan bound to its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from tilewise.execute import Bound, bind, release_workspaces
from tilewise.machine.device import torch_device
from tilewise.machine.torch_state import framework_flags
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.measuring import times as measure
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

Call = Callable[[], object]
SEED = 20141224


class Tensors:
    """The image, filter and output of a layer, all drawn at random: the result's place holds a tensor too.

    The framework's backward asks for all three, as in training.
    """

    def __init__(self, problem: ConvProblem, layout: str = "") -> None:
        device = torch_device(problem.device)
        generator = torch.Generator(device=device).manual_seed(SEED)
        self._by_role = {}
        for role in ROLES:
            shape = problem.shape(role)
            strides = dense_strides(shape, layout or problem.layout(role))
            tensor = torch.empty_strided(shape, strides, dtype=problem.torch_dtype(role), device=device)
            self._by_role[role] = tensor.normal_(generator=generator)

    def __getitem__(self, role: str) -> torch.Tensor:
        return self._by_role[role]


def framework_call(problem: ConvProblem, tensors: Tensors) -> Call:
    """The operator that ``F.conv2d`` or its autograd formula calls for this pass, on tensors in their own layout."""
    x, w, y = (tensors[role] for role in ROLES)
    options = (
        [axis.stride for axis in problem.axes],
        [axis.before for axis in problem.axes],
        [axis.dilation for axis in problem.axes],
        False,
        [0] * problem.dims,
        problem.groups,
    )
    if problem.pass_ is Pass.FPROP:
        return lambda: torch.ops.aten.convolution.default(x, w, None, *options)
    mask = [problem.pass_ is Pass.DGRAD, problem.pass_ is Pass.WGRAD, False]
    return lambda: torch.ops.aten.convolution_backward.default(y, x, w, None, *options, mask)


def bound_plan(problem: ConvProblem, plan: Plan, tensors: Tensors) -> Bound:
    """``plan`` bound to the layer's tensors; it allocates its result, as the framework does."""
    a, b = (tensors[role] for role in problem.operands)
    return bind(plan, problem, a, b)


def planned_call(problem: ConvProblem, plan: Plan, tensors: Tensors) -> Call:
    """What a layer with this plan runs. Torch's own operator where torch's choice won: such a layer is left alone."""
    if is_framework(plan):
        return framework_call(problem, tensors)
    a, b = (tensors[role] for role in problem.operands)
    bound = bound_plan(problem, plan, tensors)
    return lambda: bound(a, b)


def plans_found(planner: Planner, problems: Iterable[ConvProblem], options: Options) -> dict[ConvProblem, Plan]:
    """A plan for each problem that has one within ``options``."""
    waiting, found = list(problems), {}
    try:
        return planner.plan_many(waiting, options)
    except NoPlanError:
        # What was measured until then is in wisdom, so that asking one by one costs little.
        for problem in waiting:
            with contextlib.suppress(NoPlanError):
                found[problem] = planner.plan(problem, options)
    return found


def is_framework(plan: Plan) -> bool:
    """Whether torch's own choice won."""
    return plan.solver == "aten"


def race(problem: ConvProblem, calls: list[Call], budget_ms: float = 200.0) -> list[float]:
    """Median milliseconds of each call, in turns, under the problem's precision and torch's benchmark mode."""
    with framework_flags(problem.device_type, problem.precision, deterministic=False):
        return measure.interleaved(calls, torch_device(problem.device), budget_ms=budget_ms)


def peak_workspace(problem: ConvProblem, call: Call) -> int:
    """Bytes ``call`` takes at its peak beyond operands and result, library scratch included.

    One run before warms up what a library keeps for good (handles, code); a workspace that a plan keeps is let go, so
    that it is counted.
    """
    with framework_flags(problem.device_type, problem.precision, deterministic=False):
        call()
        release_workspaces()
        return measure.peak_bytes(call, torch_device(problem.device), problem.nbytes(problem.result))


def plan_line(plan: Plan) -> str:
    """A plan on one line: ``micro_batch 256 = 4x64 (fft basis=32x32 @64)``."""
    own = " ".join(word for word in (plan.solver, plan.label or str(plan.config)) if word)
    parts = dict.fromkeys(plan_line(child) for child in plan.children)
    return f"{own} ({' | '.join(parts)})" if parts else own
