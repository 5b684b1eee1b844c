"""What checks of every kind share: error floors, and a whole check for problems that are sums of products.

A kind with a check of its own (convolutions compare samples, since a whole reference costs more than the plan) takes
the floors alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.problems.base import WHOLE, Compute, Problem, Seams, as_tuple
from tilewise.problems.error import Error
from tilewise.problems.operands import fill_constant, make_bias, make_operands, make_results, plant_outlier

__all__ = ["FLOOR", "LIMIT", "distance", "errors_of_products", "floor_of", "is_exact", "operands_of_all_kinds"]

LIMIT = 1e-5
"""Error limit of fp32."""
FLOOR = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}
"""Least error limits where operands or result are rounded; for fp32 operands to TF32."""


def is_exact(problem: Problem) -> bool:
    """Whether operands and results are fp32 and nothing may be rounded to less."""
    return problem.dtype == problem.out_dtype == "fp32" and problem.precision == "ieee"


def floor_of(problem: Problem) -> float:
    """The relative error that is allowed whatever torch's own choice has."""
    return LIMIT if is_exact(problem) else max(FLOOR[problem.dtype], FLOOR[problem.out_dtype])


def errors_of_products(problem: Problem, compute: Compute, seams: Seams = WHOLE, own: Compute | None = None) -> Error:
    """The worst errors of ``compute`` over whole results, for problems that are sums of products of their operands.

    The operands are normal values, values of a wide range with outliers, and one constant operand beside a normal one.
    Each element is compared with ``problem.reference`` in float64; its scale is the reference of the operands' absolute
    values. ``seams`` and ``own`` change nothing: all is compared, and nothing is excused.
    """
    worst = Error(0.0, 0.0)
    for seed, operands in enumerate(operands_of_all_kinds(problem), 1):
        error = _errors(problem, compute, operands, seed)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
        if not math.isfinite(worst.l2):
            break
    return worst


def operands_of_all_kinds(problem: Problem) -> Iterator[tuple[torch.Tensor, ...]]:
    """Operands of normal values, of a wide range with outliers, and with one operand constant."""
    yield make_operands(problem, 1)
    wide = make_operands(problem, 2, wide=True)
    for tensor in wide:
        plant_outlier(problem, tensor)
    yield wide
    for index in range(len(problem.operands)):
        operands = make_operands(problem, 3 + index)
        fill_constant(operands[index])
        yield operands


def _errors(problem: Problem, compute: Compute, operands: tuple[torch.Tensor, ...], seed: int) -> Error:
    """The worst errors over all results for these operands."""
    start = 1.0 if problem.accumulate else 0.0  # what sets where it should add is seen
    results = make_results(problem)
    if problem.accumulate:
        for result in results:
            result.fill_(start)
    bias = make_bias(problem, seed)
    returned = compute(*operands, bias, *results)
    computed = as_tuple(returned)
    wanted = as_tuple(problem.reference(*(t.double() for t in operands)))
    scales = as_tuple(problem.reference(*(t.double().abs() for t in operands)))
    worst = Error(0.0, 0.0)
    for got, want, scale in zip(computed, wanted, scales, strict=True):
        added = torch.zeros((), dtype=torch.float64, device=got.device)
        if bias is not None:
            added = bias.double().view(-1, *[1] * (got.ndim - 1 - problem.bias_dim))
        want, scale = want + start + added, scale + start + added.abs()
        error = distance(got, want, scale)
        worst = Error(max(worst.l2, error.l2), max(worst.spread, error.spread))
    return worst


def distance(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> Error:
    """The errors of one result; infinite where it holds NaN or infinity."""
    if not torch.isfinite(got).all():
        return Error(math.inf, math.inf)
    tiny = torch.finfo(got.dtype).tiny  # results below it are rounded to multiples, in fp16 often
    gap = (got.double() - want).abs()
    l2 = float(gap.norm()) / max(float(want.norm()), tiny)
    spread = torch.where(scale == 0.0, (gap != 0.0).double(), gap / scale.clamp_min(tiny))
    return Error(l2, float(spread.max()) if spread.numel() else 0.0)
