"""The error that each plan in a program adds by itself, on the tensors that it meets there.

Plans are checked on data that is made to show errors, such as long sums of one constant. What they add to a network's
error is several times less, and differs otherwise between plans. So where the errors of a whole region count, they are
measured in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.nn.programs.program import Program
from tilewise.nn.regions.check import error_of
from tilewise.problems.activations import activated
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.gemm.problem import GemmProblem

__all__ = ["local_errors"]

ROWS = 512
"""Most rows of a matrix product that are compared. Of a batch of images the first is."""


def local_errors(program: Program, tensors: Sequence[Tensor]) -> dict[int, float]:
    """The relative L2 error of each planned convolution and matrix product of a program, by the number of its step.

    Each step's result is compared with float64's on the inputs that the step was given, which hold the errors of the
    steps before it: the error is its own. The program is run once on ``tensors``.
    """
    found: dict[int, float] = {}

    def compare(number: int, inputs: Sequence[Tensor], result: Tensor) -> None:
        bound = program.steps[number].plan
        if bound is not None and isinstance(bound.problem, ConvProblem | GemmProblem):
            count = 1 if isinstance(bound.problem, ConvProblem) else ROWS
            first, *others = inputs
            found[number] = error_of([result[:count]], [_in_float64(bound.problem, first[:count], *others)])

    program.show_steps(tensors, compare)
    return found


def _in_float64(problem: Problem, x: Tensor, w: Tensor, *added: Tensor) -> Tensor:
    """The result for some of the images, or rows, of a step: ``added`` are its bias and its residual."""
    with torch.no_grad():
        wanted = problem.reference(x, w)
        assert isinstance(wanted, Tensor)
        rest = list(added)
        if problem.bias:
            wanted = wanted + rest.pop(0).double().view(-1, *[1] * (wanted.ndim - 1 - problem.bias_dim))
        if rest:
            wanted = wanted + rest.pop(0)[: len(wanted)].double()
        return activated(wanted, problem.activation)
