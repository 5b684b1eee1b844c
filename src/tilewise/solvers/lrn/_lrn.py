"""What solvers of local response normalization share: the kind that they solve, and forward and backward apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.base import Problem, dense_strides
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import Solver

__all__ = ["LrnPasses", "LrnSolver", "is_dense", "outside", "quarters_of"]

LEAST_K = 2.0**-16
MOST_BETA = 4.0
"""With ``k`` and ``beta`` within these no power is beyond fp32."""
QUARTERS = 4


class LrnPasses(Protocol):
    """Forward and backward of one normalization, for dense tensors in the problem's layout."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the result of ``x`` into ``y`` and return it. Both are (batch, channels, *space)."""
        ...

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """Write the gradient of ``x`` into ``dx`` and return it, by that of the result, ``dy``."""
        ...


class LrnSolver(Solver):
    """One way to compute local response normalization."""

    solves: ClassVar[type[Problem]] = LrnProblem
    exact_memory = True

    def unsupported(self, p: LrnProblem) -> list[str]:
        """None: it takes every normalization of the declared types."""
        return []

    def configs(self, p: LrnProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def passes(self, p: LrnProblem, c: Config, device: torch.device) -> LrnPasses | None:
        """Forward and backward apart on ``device``, as a module needs them; ``None`` where there is no such thing.

        Raises :class:`~tilewise.solvers.base.SolverUnavailable` where the config cannot run here.
        """
        return None


def outside(p: LrnProblem) -> list[str]:
    """Reasons why a denominator may be 0 or negative, or its power beyond fp32."""
    reasons = []
    if not LEAST_K <= p.k <= 1 / LEAST_K:
        reasons.append(f"takes k from {LEAST_K} to {1 / LEAST_K}, not {p.k}")
    if not 0 <= p.alpha <= 1 / LEAST_K:
        reasons.append(f"takes alpha from 0 to {1 / LEAST_K}, not {p.alpha}")
    if not 0 <= p.beta <= MOST_BETA:
        reasons.append(f"takes beta from 0 to {MOST_BETA}, not {p.beta}")
    return reasons


def quarters_of(beta: float) -> int:
    """``beta`` in quarters, where square roots make the power; -1 where it is no multiple of a quarter."""
    return round(beta * QUARTERS) if (beta * QUARTERS).is_integer() else -1


def is_dense(p: LrnProblem, tensor: Tensor) -> bool:
    """Whether a tensor lies as the problem's layout says, but for strides along axes of size 1."""
    dense = dense_strides(p.shape("x"), p.layout_name)
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), dense, strict=True))
