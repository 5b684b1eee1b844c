"""The check of what computes a separable convolution: whole images against float64, on data of several kinds.

Filters are scaled so that what one convolution gives is of the size of what it reads: else functions with bounds would
leave nothing of most numbers, and hide what is wrong with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.machine.turns import pause
from tilewise.problems.activations import activated
from tilewise.problems.base import WHOLE, Compute, Seams, as_tuple
from tilewise.problems.checks import distance
from tilewise.problems.error import Error
from tilewise.problems.operands import fill_constant, make_operands, make_residual, make_result, plant_outlier
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.reference import reference_and_scale
from tilewise.problems.separable.stages import parted

__all__ = ["data_of_all_kinds", "errors_of"]

ALL = 8
"""Batches up to this one are compared whole."""


def errors_of(problem: SeparableProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` on data of all kinds; infinite where it leaves or makes NaN.

    Of a large batch the images at both ends, in the middle and on both sides of ``seams`` are compared. ``own`` changes
    nothing: nothing is excused.
    """
    worst, images = Error(0.0, 0.0), torch.tensor(_compared(problem, seams), dtype=torch.int64, device="cpu")
    for seed, operands in enumerate(data_of_all_kinds(problem), 1):
        pause()
        residual = make_residual(problem, seed)
        added = {} if residual is None else {"residual": residual}
        (got,) = as_tuple(compute(*operands, None, make_result(problem), **added))
        if not torch.isfinite(got).all():
            return Error(math.inf, math.inf)
        x, w = operands
        chosen = images.to(x.device)
        want, scale = reference_and_scale(problem, x[chosen], w)
        if residual is not None:
            more = residual[chosen].double()
            want, scale = want + more, scale + more.abs()
        want = activated(want, problem.activation)
        error = distance(got[chosen], want, scale + want.abs())
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def _compared(problem: SeparableProblem, seams: Seams) -> list[int]:
    """The images that are compared, in order."""
    if problem.batch <= ALL:
        return list(range(problem.batch))
    starts = (0, *seams.starts.get("batch", ()), problem.batch // 2, problem.batch)
    near = {image for start in starts for image in (start - 1, start)}
    return sorted(image for image in near if 0 <= image < problem.batch)


def data_of_all_kinds(problem: SeparableProblem) -> Iterator[tuple[torch.Tensor, ...]]:
    """Operands of several kinds: normal images, images of a wide range with an outlier, and constant ones."""
    for seed in range(3):
        x, w = make_operands(problem, seed + 1)
        if seed == 1:
            x = make_operands(problem, seed + 1, wide=True)[0]
            plant_outlier(problem, x)
        elif seed == 2:
            fill_constant(x)
        for stage in parted(problem, w):
            stage.weight.mul_(math.prod(stage.weight.shape[1:]) ** -0.5)
        yield x, w
