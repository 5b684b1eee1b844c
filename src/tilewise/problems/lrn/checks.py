"""The check of what computes a local response normalization: all results against float64, on data of several kinds.

With torch's defaults ordinary values hardly change: alpha is 1e-4, so that the sum of squares adds little to k. So some
data are scaled until the squares count as much as k does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.machine.turns import pause
from tilewise.problems.base import DTYPES, WHOLE, Compute, Seams, as_tuple
from tilewise.problems.checks import distance
from tilewise.problems.error import Error
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.lrn.reference import reference_and_scales
from tilewise.problems.operands import fill_constant, make_operands, make_results, plant_outlier

__all__ = ["data_of_all_kinds", "errors_of"]

MOST_SCALE = 1e4
"""The most by which data are scaled; less for fp16, whose squares end at 2^16."""

Tensors = tuple[torch.Tensor, ...]


def errors_of(problem: LrnProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` over all results, on data of several kinds; infinite where it leaves NaN.

    The scale of an element, for ``spread``, is the sum of the magnitudes of its terms. ``seams`` and ``own`` change
    nothing: all is compared.
    """
    worst = Error(0.0, 0.0)
    for operands in data_of_all_kinds(problem):
        pause()
        computed = as_tuple(compute(*operands, None, *make_results(problem)))
        for got, (want, scale) in zip(computed, reference_and_scales(problem, operands), strict=True):
            pause()
            error = distance(got, want, scale)
            worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def data_of_all_kinds(problem: LrnProblem) -> Iterator[Tensors]:
    """Operands of several kinds.

    They are normal values, normal values whose squares weigh as much as ``k``, the same with half of them 0 as behind a
    ReLU, values of a wide range with an outlier, and constant ones.
    """
    yield make_operands(problem, 1)
    scale = _scale(problem)
    scaled = make_operands(problem, 2)
    scaled[0].mul_(scale)
    yield scaled
    rectified = make_operands(problem, 3)
    rectified[0].clamp_(min=0.0).mul_(scale)
    yield rectified
    wide = make_operands(problem, 4, wide=True)
    plant_outlier(problem, wide[0])
    if DTYPES[problem.dtype] is torch.float16:  # squares of larger numbers are beyond fp16, torch's own as well
        wide[0].clamp_(-_most(problem), _most(problem))
    yield wide
    constant = make_operands(problem, 5)
    fill_constant(constant[0])
    constant[0].mul_(scale)
    yield constant


def _scale(problem: LrnProblem) -> float:
    """What makes normal values so large that alpha times their mean square is about ``k``."""
    if problem.alpha <= 0 or problem.k <= 0:
        return 1.0
    return min(max(math.sqrt(problem.k / problem.alpha), 1.0), MOST_SCALE, _most(problem) / 8)


def _most(problem: LrnProblem) -> float:
    """The largest number of which a window's squares may be added up in the problem's type."""
    return math.sqrt(torch.finfo(DTYPES[problem.dtype]).max / (2 * min(problem.size, problem.channels)))
