"""The proof that a plan computes its problem: distance from float64 on normal and on wide-range data.

A whole reference would cost more than the plan: FPROP and DGRAD are compared on whole images, the first and last of the
batch and both sides of a division; WGRAD on some output channels summed over the whole batch. Outputs start as NaN, so
an element that nobody wrote anywhere shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from tilewise import solvers
from tilewise.plan import Error, Plan
from tilewise.planner.measure import without_benchmark
from tilewise.planner.operands import make_operands, make_result, narrow
from tilewise.problem import ConvProblem, Pass, Range
from tilewise.solvers import Split

__all__ = ["Compute", "error_limit", "errors_of"]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``compute(a, b, out) -> result`` of the problem without bias."""

FLOPS = {"cpu": 3e8, "cuda": 2e10}
"""Most float64 operations a check spends on its reference."""
IMAGES = 4
REFERENCE_BYTES = 1 << 30


def errors_of(problem: ConvProblem, compute: Compute, plan: Plan | None = None) -> Error:
    """Worst errors of ``compute`` on normal and on wide-range data; infinite where it leaves or makes NaN."""
    worst_l2 = worst_spread = 0.0
    for seed, wide in ((1, False), (2, True)):
        a, b = make_operands(problem, seed, wide=wide)
        result = compute(a, b, make_result(problem))
        if not torch.isfinite(result).all():
            return Error(math.inf, math.inf)
        square = norm = spread = 0.0
        for part in _samples(problem, plan):
            child = part[0]
            ranges_a, ranges_b, ranges_out = part[1:]
            got = narrow(result, ranges_out).double()
            want, scale = _reference(child, narrow(a, ranges_a), narrow(b, ranges_b))
            gap = got - want
            square += float(gap.square().sum())
            norm += float(want.square().sum())
            spread = max(spread, float((gap.abs() / scale.clamp_min(1e-300)).max()))
        worst_l2 = max(worst_l2, math.sqrt(square / norm) if norm else math.sqrt(square))
        worst_spread = max(worst_spread, spread)
    return Error(worst_l2, worst_spread)


def error_limit(problem: ConvProblem, asked: float | None, own: Callable[[], Error]) -> tuple[float, float]:
    """Largest L2 error and spread allowed: 1e-5 in fp32, twice torch's own (and no less than its dtype's rounding)
    otherwise, or what was ``asked`` for.

    ``own`` gives torch's own errors; it is called only where they matter. TF32 rounds operands to 10 bits, so 1e-3 is
    allowed where torch happens to pick an fp32 engine.
    """
    if asked is not None:
        return asked, asked
    if problem.dtype == "fp32" and problem.precision == "ieee":
        return 1e-5, 1e-5
    floor = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}[problem.dtype]
    error = own()
    return max(2 * error.l2, floor), max(2 * error.spread, floor)


def _samples(
    problem: ConvProblem, plan: Plan | None
) -> Iterator[tuple[ConvProblem, tuple[Range, ...], tuple[Range, ...], tuple[Range, ...]]]:
    budget = FLOPS[problem.device_type]
    if problem.pass_ is Pass.WGRAD:
        per = problem.flops / problem.out_channels
        channels = max(1, min(problem.out_channels // problem.groups, int(budget / per)))
        rest = problem.out_channels - channels
        axis, starts = "out_channels", [(0, channels)]
        if problem.groups == 1 and rest and channels > 1:
            half = channels // 2
            starts = [(0, half), (problem.out_channels - half, half)]
    else:
        images = max(2, min(IMAGES, int(budget * problem.batch / problem.flops)))
        axis, starts = "batch", [(i, 1) for i in _telling_images(problem, plan, images)]
    whole = problem.extent(axis)
    for start, length in starts:
        sizes = [n for n in (start, length, whole - start - length) if n]
        part = _cut(problem, axis, sizes)[1 if start else 0]
        assert part.problem is not None
        first, second = problem.operands
        yield part.problem, part.ranges(first), part.ranges(second), part.ranges(problem.result)


def _cut(problem: ConvProblem, axis: str, sizes: list[int]) -> tuple:  # type: ignore[type-arg]
    if axis == "out_channels" and problem.groups > 1:
        # The rest may cross groups, which no convolution does: only the first group's part is wanted.
        per_group = problem.out_channels // problem.groups
        sizes = [*([sizes[0], per_group - sizes[0]] if sizes[0] < per_group else [sizes[0]])]
        sizes += [per_group] * (problem.groups - 1)
    return problem.split(axis, sizes)


def _cuts_batch(plan: Plan) -> bool:
    solver = solvers.get(plan.solver)
    return isinstance(solver, Split) and solver.axis == "batch"


def _telling_images(problem: ConvProblem, plan: Plan | None, most: int) -> list[int]:
    telling = [0, problem.batch - 1]
    sizes = plan.config.get("sizes", ()) if plan is not None and _cuts_batch(plan) else ()
    if isinstance(sizes, tuple):
        start = 0
        for size in sizes[:-1]:
            start += size
            telling += [start, start - 1]
    return sorted(set(dict.fromkeys(telling[: max(2, most)])))


def _reference(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and |a| conv |b| in float64; WGRAD in chunks of the batch, so that float64 copies stay small."""
    with without_benchmark():  # torch's search would outlast the reference
        return _float64(problem, a, b)


def _float64(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.pass_ is not Pass.WGRAD:
        return problem.reference(a, b), problem.reference(a.abs(), b.abs())
    image = 8 * (math.prod(problem.shape("x")) + math.prod(problem.shape("y"))) // problem.batch
    chunk = max(1, min(problem.batch, REFERENCE_BYTES // image))
    sizes = [min(chunk, problem.batch - i) for i in range(0, problem.batch, chunk)]
    value = torch.zeros(problem.shape("w"), dtype=torch.float64, device=a.device)
    scale = torch.zeros_like(value)
    for part in problem.split("batch", sizes):
        assert part.problem is not None
        x, dy = narrow(a, part.x), narrow(b, part.y)
        value += part.problem.reference(x, dy)
        scale += part.problem.reference(x.abs(), dy.abs())
    return value, scale
