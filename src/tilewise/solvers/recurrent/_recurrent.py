"""What solvers of recurrent layers share: the kind that they solve, and runs of the layer that they make."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.recurrent.packing import packing_of
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.solvers.base import Cost, Run, Solver
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.recurrent._layers import Layer

__all__ = ["RecurrentSolver", "recurrent_cost"]


class RecurrentSolver(Solver):
    """One way to compute recurrent layers. It makes a layer, and a run calls that forwards, and backwards to train."""

    solves: ClassVar[type[Problem]] = RecurrentProblem
    own_output = True

    @abc.abstractmethod
    def layer(self, p: RecurrentProblem, c: Config) -> Layer:
        """What computes ``p`` by config ``c``, with forward and backward apart.

        Raises :class:`~tilewise.solvers.base.SolverUnavailable` where the config cannot run here.
        """

    def unsupported(self, p: RecurrentProblem) -> list[str]:
        """None: it takes every layer of the declared types."""
        return []

    def configs(self, p: RecurrentProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def hidden_workspace(self, p: RecurrentProblem, c: Config) -> int:
        """Bytes of what all steps give the gates, and for training of what is kept and of the gates' gradients."""
        gates = p.rows * p.gates * p.hidden
        if p.task == "inference":
            return gates * p.torch_dtype("x").itemsize
        return gates * (p.torch_dtype("x").itemsize + 4 * p.layers * p.directions)

    def bind(self, p: RecurrentProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """A run of the layer into new tensors."""
        layer, count = self.layer(p, c), len(p.weights)
        states = 2 if p.cell == "lstm" else 1
        first, last = 1 + states, 1 + states + count
        training, operands = p.task == "training", len(p.operands)
        packing = packing_of(p) if p.packed else None

        @torch.no_grad()
        def run(*tensors: Any) -> Any:
            x, h0, c0 = tensors[0], tensors[1], tensors[2] if states == 2 else None
            weights = tensors[first:last]
            y, hn, cn, saved = layer.forward(x, h0, c0, weights, packing=packing, keep=training)
            results = (y, hn) if cn is None else (y, hn, cn)
            if not training:
                return results
            dy, dhn, *dcn = tensors[last:operands]
            needs = (True, True, states == 2, *(True for _ in weights))
            gradients = layer.backward(saved, weights, dy, dhn, dcn[0] if dcn else None, needs)
            return (*results, *(each for each, needed in zip(gradients, needs, strict=True) if needed))

        return run


def recurrent_cost(p: RecurrentProblem, kernels: int, factor: float = 1.0) -> Cost:
    """The products' arithmetic, of which a step's has few rows, in ``kernels`` launches.

    ``factor`` is the share of a product's rate that is left where other work is done between.
    """
    rate = efficiency(p.device_type, -(-p.rows // p.time), p.gates * p.hidden, p.hidden)
    return Cost(p.flops, p.bytes, kernels, efficiency=max(rate * factor, 1e-4))
