"""Running a CPU solver's config outside the planner: in memory full of NaN, and by several callers at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
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
