"""Running a CPU solver's config outside the planner: in memory full of NaN, and by several callers at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import activated
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import Solver


def run_poisoned(
    solver: Solver, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """In a workspace full of NaN, which what is kept of a constant weight does not outlive."""
    space = torch.full((solver.workspace(p, c),), 0xFF, dtype=torch.uint8)
    bound = solver.bind(p, c, a, b, out)
    if p.constant_weight:
        kept = torch.full((solver.constant(p, c),), 0xFF, dtype=torch.uint8)
        solver.prepare(p, c, b)(b, kept, space)
        b, space = kept, space.fill_(0xFF)
    return bound(a, b, out.fill_(math.nan), space)


def at_once(call: Callable[[], torch.Tensor], callers: int, times: int = 20) -> list[torch.Tensor]:
    """What every call of so many threads gave."""
    got: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: got.extend(call() for _ in range(times))) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def check_followed(solver: Solver, p: ConvProblem, c: Config, bound: float) -> None:
    """The result with bias, residual and activation, beside float64."""
    a, b = make_operands(p, 3)
    bias, residual = make_bias(p, 5), make_residual(p, 5)
    added = [tensor for tensor in (bias, residual) if tensor is not None]
    want = p.reference(a, b)
    if bias is not None:
        want += bias.double().view(-1, *[1] * p.dims)
    if residual is not None:
        want += residual.double()
    want = activated(want, p.activation)
    space = torch.full((max(1, solver.workspace(p, c)),), 0xFF, dtype=torch.uint8)
    out = make_result(p)
    run = solver.bind(p, c, a, b, out)
    if p.constant_weight:
        kept = torch.full((solver.constant(p, c),), 0xFF, dtype=torch.uint8)
        solver.prepare(p, c, b)(b, kept, space)
        b = kept
    got = run(a, b, out.fill_(math.nan), space, *added)
    assert float((got.double() - want).norm() / want.norm()) <= bound, c
