"""Recurrent modules that run by given plans, for the tests beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tilewise.nn.layers.kinds import run_by_plans
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.layer import RecurrentLayer
from tilewise.plan import Plan
from tilewise.planner import Options
from tilewise.problems.base import Problem
from tilewise.solvers import get

__all__ = ["CLASSES", "Forced", "close", "drawn_projection", "flat", "forced", "with_gradients"]

CLASSES: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)


def drawn_projection(draw: Any, kind: Any, hidden: int) -> dict[str, int]:
    """The option of a projection for a module of this class, or none."""
    sizes = st.integers(0, hidden - 1) if kind is nn.LSTM else st.just(0)
    size = draw(sizes, "projection")
    return {"proj_size": size} if size else {}


class Forced(PlanTable):
    """A table whose plans are those of one solver, with its first config."""

    def __init__(self, solver: str = "stepped") -> None:
        super().__init__(Options(), "plan")
        self.solver, self.asked = solver, list[Problem]()

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.asked.append(p)
            solver = get(self.solver)
            self.learn(p, deterministic, Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p)))))


def forced(module: nn.RNNBase, solver: str = "stepped") -> tuple[nn.RNNBase, Forced]:
    """A copy of ``module`` that runs by plans of ``solver``."""
    twin, table = copy.deepcopy(module), Forced(solver)
    run_by_plans(twin, RecurrentLayer(table))
    return twin, table


def flat(result: Any) -> list[Tensor]:
    """y and the last states."""
    y, last = result
    return [y, *(last if isinstance(last, tuple) else (last,))]


def with_gradients(module: nn.RNNBase, x: Tensor, hx: Any = None, used: Sequence[int] = (0, 1, 2)) -> list[Any]:
    """The results of a call, and the gradient of all that needs one, of a sum over the results that are ``used``."""
    module.zero_grad()
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, *states)]
    given: Any = None if hx is None else tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    results = flat(module(leaves[0], given))
    loss = sum(
        (r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype, device=r.device).view(r.shape)).sum()
        for i, r in enumerate(results)
        if i in used
    )
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    gradients = [t.grad for t in (*leaves, *module.parameters())]
    return [*(r.detach() for r in results), *(None if g is None else g.clone() for g in gradients)]


def close(got: Any, want: Any) -> None:
    """Results of the same call agree, in their strides as well."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, check_stride=True)
