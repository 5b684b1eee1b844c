"""The check of what computes a product: rows and columns of the result against float64.

A whole reference would cost more than the plan. So some whole rows and some whole columns are compared: at both ends,
where parts of a plan meet, and at places spread between. Each tile of a result has some of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from tilewise.machine.turns import pause
from tilewise.problems.activations import activated
from tilewise.problems.base import WHOLE, Compute, Seams, as_tuple
from tilewise.problems.checks import distance, operands_of_all_kinds
from tilewise.problems.error import Error
from tilewise.problems.gemm.layouts import matrix_axes
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import make_bias, make_result

__all__ = ["compared_lines", "errors_of"]

FLOPS = {"cpu": 1e8, "cuda": 2e10}
"""Most float64 operations that a check spends on the rows of its reference, and as many on its columns."""
LEAST = 4
"""Rows and columns that are compared whatever they cost."""
REFERENCE_BYTES = 1 << 27
"""Bytes in float64 of an operand that meets the compared lines at a time."""
EDGE = 2
"""Neighbours of each end and each seam that are compared."""


def errors_of(problem: GemmProblem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` on operands of all kinds; infinite where it leaves or makes NaN.

    The errors are those of :func:`tilewise.problems.checks.errors_of_products`, of the rows and columns that
    :func:`compared_lines` names. ``own`` changes nothing: nothing is excused.
    """
    worst = Error(0.0, 0.0)
    for seed, operands in enumerate(operands_of_all_kinds(problem), 1):
        error = _errors(problem, compute, operands, seed, seams)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def compared_lines(problem: GemmProblem, axis: str, seams: Seams = WHOLE) -> list[int]:
    """The indices along ``axis``, ``rows`` or ``columns``, that are compared, rising: all, where that is cheap."""
    whole = problem.extent(axis)
    most = max(LEAST, int(FLOPS[problem.device_type] * whole / problem.flops))
    if most >= whole:
        return list(range(whole))
    starts = (0, *seams.starts.get(axis, ()), whole)
    wanted = itertools.chain(*zip(*map(_around, starts), strict=True))
    told = dict.fromkeys(line for line in wanted if 0 <= line < whole)
    spread = (index * whole // most for index in range(most))
    lines = list(dict.fromkeys((*told, *spread)))
    return sorted(lines[: max(most, min(len(told), 2 * most))])


def _around(start: int) -> Iterator[int]:
    """The lines on both sides of ``start``, the nearest first."""
    for away in range(EDGE):
        yield start + away
        yield start - away - 1


def _errors(
    problem: GemmProblem, compute: Compute, operands: tuple[torch.Tensor, ...], seed: int, seams: Seams
) -> Error:
    """The worst errors of the compared lines for these operands."""
    result, start = make_result(problem), 1.0 if problem.accumulate else 0.0
    if problem.accumulate:
        result.fill_(start)  # what sets where it should add is seen
    bias = make_bias(problem, seed)
    (got,) = as_tuple(compute(*operands, bias, result))
    if not torch.isfinite(got).all():
        return Error(math.inf, math.inf)
    worst = Error(0.0, 0.0)
    for axis in ("rows", "columns"):
        pause()
        lines = torch.tensor(compared_lines(problem, axis, seams), dtype=torch.int64, device=got.device)
        cut = [_lines(problem, role, tensor, axis, lines) for role, tensor in zip("ab", operands, strict=True)]
        want, scale = (reference + start for reference in _references(problem, axis, *cut))
        if bias is not None:
            added = bias.double() if axis == "rows" else bias.double()[lines]
            want, scale = want + added, scale + added.abs()
        want = activated(want, problem.activation)
        error = distance(_lines(problem, "c", got, axis, lines), want, scale)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
    return worst


def _references(problem: GemmProblem, axis: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of ``a`` and ``b``, and of their absolute values, of which one has only lines along ``axis``.

    The other operand is taken in pieces, so that its copy in float64 stays small.
    """
    whole, across = ("b", "columns") if axis == "rows" else ("a", "rows")
    tensor = b if whole == "b" else a
    dim = matrix_axes(problem.op, whole).index(across) - 2
    count = -(-8 * tensor.numel() // REFERENCE_BYTES)
    wants, scales = [], []
    for piece in tensor.chunk(count, dim):
        pause()
        left, right = (a, piece) if whole == "b" else (piece, b)
        wants.append(problem.reference(left, right))
        scales.append(problem.reference(left.abs(), right.abs()))
    along = -1 if axis == "rows" else -2
    return torch.cat(wants, along), torch.cat(scales, along)


def _lines(problem: GemmProblem, role: str, tensor: torch.Tensor, axis: str, lines: torch.Tensor) -> torch.Tensor:
    """The ``lines`` along ``axis`` of the tensor of ``role``, all of one that has no such axis."""
    axes = matrix_axes(problem.op, role)
    return tensor.index_select(axes.index(axis) - 2, lines) if axis in axes else tensor
