"""The check of what pools: results against float64, on data of several kinds.

Maxima that are equal, infinities and NaN are among the data: which element of a window a gradient goes to depends on
them. Where float64 has NaN or an infinity, the result must have the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.machine.device import torch_device
from tilewise.machine.turns import pause
from tilewise.problems.base import WHOLE, Compute, Seams, as_tuple, dense_strides
from tilewise.problems.checks import distance
from tilewise.problems.error import Error
from tilewise.problems.operands import make_operands, make_results
from tilewise.problems.pooling.problem import PoolingProblem

__all__ = ["errors_of", "operands_of_kind"]

KINDS = ("normal", "equal", "infinite")
RARE = 7
"""One element in so many is infinite or NaN."""


def errors_of(problem: PoolingProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` over whole results; infinite where it leaves NaN, or has another infinity.

    The scale of an element, for ``spread``, is its magnitude and the root mean square of its tensor. ``seams`` and
    ``own`` change nothing: all is compared, and nothing is excused.
    """
    worst = Error(0.0, 0.0)
    for operands in _data(problem):
        pause()
        computed = as_tuple(compute(*operands, None, *make_results(problem)))
        pause()
        for got, want in zip(computed, as_tuple(problem.reference(*operands)), strict=True):
            error = _error(got, want)
            worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def _data(problem: PoolingProblem) -> Iterator[tuple[torch.Tensor, ...]]:
    """Operands of every kind."""
    for seed, kind in enumerate(KINDS, 1):
        yield operands_of_kind(problem, kind, seed)


def operands_of_kind(problem: PoolingProblem, kind: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Operands of normal values, or where the input has many ``equal`` values, or also ``infinite`` ones and NaN."""
    operands = make_operands(problem, seed)
    if kind == "normal":
        return operands
    x = operands[0]
    generator = torch.Generator(torch_device(problem.device)).manual_seed(seed)

    def whole(first: int, last: int) -> torch.Tensor:
        """Random whole numbers from ``first`` to ``last``, which lie in memory as x does."""
        made = torch.empty_strided(
            x.shape, dense_strides(x.shape, problem.layout("x")), dtype=torch.float32, device=x.device
        )
        return made.random_(first, last + 1, generator=generator)

    x.copy_(whole(-2, 2))
    if kind == "infinite":
        place, chosen = whole(0, RARE - 1), whole(0, 5)
        for number, value in enumerate((-math.inf, -math.inf, -math.inf, -math.inf, math.inf, math.nan)):
            x.masked_fill_((place == 0) & (chosen == number), value)
        x[:, 0] = -math.inf  # windows without any other value
    return operands


def _error(got: torch.Tensor, want: torch.Tensor) -> Error:
    """The errors of one result."""
    odd = ~torch.isfinite(want)
    if not torch.equal(got.double()[odd].nan_to_num(nan=1.0), want[odd].nan_to_num(nan=1.0)):
        return Error(math.inf, math.inf)
    want = want.masked_fill(odd, 0.0)
    return distance(got.masked_fill(odd, 0.0), want, want.abs() + want.square().mean().sqrt())
