"""What solvers of pooling share: the kind that they solve, and runs of the layer that they make."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.base import Cost, Run, Solver

__all__ = ["Pooler", "PoolingSolver"]


class Pooler(Protocol):
    """What pools, with forward and backward apart. Tensors are dense in the problem's layout; it holds none."""

    def forward(self, x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The result, and where ``keep`` what the backward needs."""
        ...

    def backward(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """The gradient of the input."""
        ...


class PoolingSolver(Solver):
    """One way to pool. It makes a pooler, and a run calls that forwards, and backwards to train."""

    solves: ClassVar[type[Problem]] = PoolingProblem
    own_output = True
    exact_memory = True
    kept_bytes: ClassVar[int] = 0
    """Bytes that are kept of each maximum for the backward."""

    @abc.abstractmethod
    def pooler(self, p: PoolingProblem, c: Config, device: torch.device) -> Pooler:
        """What computes ``p`` by config ``c`` on ``device``.

        Raises :class:`~tilewise.solvers.base.SolverUnavailable` where the config cannot run here.
        """

    def unsupported(self, p: PoolingProblem) -> list[str]:
        """None: it takes every problem of the declared types."""
        return []

    def configs(self, p: PoolingProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def kept(self, p: PoolingProblem) -> int:
        """Bytes that are kept between forward and backward beside the input."""
        return self.kept_bytes * math.prod(p.shape("y")) if p.op == "max" and p.task == "training" else 0

    def hidden_workspace(self, p: PoolingProblem, c: Config) -> int:
        """Bytes of what is kept between forward and backward."""
        return self.kept(p)

    def cost(self, p: PoolingProblem, c: Config) -> Cost:
        """The traffic, with what is kept written and read."""
        return Cost(p.flops, p.bytes + 2 * self.kept(p), len(p.results), efficiency=0.2)

    def bind(self, p: PoolingProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A run of the pooler into new tensors."""
        pooler, training = self.pooler(p, c, tensors[0].device), p.task == "training"

        @torch.no_grad()
        def run(*tensors: Any) -> Any:
            y, saved = pooler.forward(tensors[0], keep=training)
            return (y, pooler.backward(saved, tensors[1])) if training else y

        return run
