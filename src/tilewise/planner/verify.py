"""The proof that a plan computes its problem: distance from float64 on normal and on wide-range data.

A whole reference would cost more than the plan: FPROP and DGRAD are compared on whole images, the last of the batch and
the first of each plan in a division; WGRAD on the first and last output channels, summed over the whole batch. Of an
image too large for that, stripes are compared: at both ends and where the plan of a tile begins. Outputs start as NaN,
so an element that nobody wrote anywhere shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tilewise import solvers
from tilewise.kernels.reference import convolve_by_transform
from tilewise.plan import Error, Plan
from tilewise.planner.operands import make_bias, make_operands, make_result, narrow
from tilewise.problem import ROLES, ConvProblem, Pass, Range
from tilewise.solvers import Split
from tilewise.torch_state import without_benchmark

__all__ = ["FLOOR", "Compute", "allowed", "error_limit", "errors_of"]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""``compute(a, b, bias, out) -> result`` of the problem; a bias where it has one."""

FLOPS = {"cpu": 1e8, "cuda": 2e10}
"""Most float64 operations a check spends on its reference."""
IMAGES = 4
REFERENCE_BYTES = 1 << 28
WHOLE_BYTES = 1 << 32
"""Of an image that takes more in float64, before and after the convolution together, stripes are compared."""
MANY_TAPS = 64
"""From so many on a depthwise reference is transformed: torch takes a CPU's float64 products one by one."""
RESOLVED = 1e-9
"""Of the largest result: what lies below is compared as if it were this large."""
LIMIT = 1e-5
"""Error limit of fp32."""
FLOOR = {"fp32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}
"""Least error limits where operands or result are rounded; for fp32 operands to TF32."""


def errors_of(problem: ConvProblem, compute: Compute, plan: Plan | None = None) -> Error:
    """Worst errors of ``compute`` on normal and on wide-range data; infinite where it leaves or makes NaN."""
    worst_l2 = worst_spread = 0.0
    start = 1.0 if problem.accumulate else 0.0  # a solver that sets where it should add is seen
    for seed, wide in ((1, False), (2, True)):
        a, b = make_operands(problem, seed, wide=wide)
        result = make_result(problem)
        if problem.accumulate:
            result.fill_(start)
        bias = make_bias(problem, seed)
        result = compute(a, b, bias, result)
        if not torch.isfinite(result).all():
            return Error(math.inf, math.inf)
        square = norm = spread = 0.0
        tiny = torch.finfo(result.dtype).tiny  # results below it are rounded to multiples, in fp16 often
        for sample in _samples(problem, plan):
            first, second = problem.operands
            got = narrow(result, sample.ranges[problem.result]).double()
            operands = narrow(a, sample.ranges[first]), narrow(b, sample.ranges[second])
            if sample.problem is None:
                want, scale = torch.zeros_like(got), torch.zeros_like(got)
            else:
                want, scale = _reference(sample.problem, *operands)
            want, scale = want.add_(start), scale.add_(start)
            if bias is not None:
                added = bias.double().view(-1, *[1] * problem.dims)
                want, scale = want.add_(added), scale.add_(added.abs())
            gap = got - want
            square += float(gap.square().sum())
            norm += float(want.square().clamp_min_(tiny**2).sum())
            spread = max(spread, float(_spread(gap.abs(), scale, tiny).max()))
        worst_l2 = max(worst_l2, math.sqrt(square / norm))
        worst_spread = max(worst_spread, spread)
    return Error(worst_l2, worst_spread)


def _spread(gap: torch.Tensor, scale: torch.Tensor, tiny: float) -> torch.Tensor:
    """``gap`` in shares of ``scale``, which is |a| conv |b|. Where that is 0 nothing is read: all but 0 counts as 1."""
    return torch.where(scale == 0.0, (gap != 0.0).to(gap.dtype), gap / scale.clamp_min(tiny))


def error_limit(
    problem: ConvProblem, asked: float | None, found: Error, own: Callable[[], Error]
) -> tuple[float, float]:
    """What :func:`allowed` says of the problem's data types and precision."""
    exact = problem.dtype == problem.out_dtype == "fp32" and problem.precision == "ieee"
    return allowed(None if exact else max(FLOOR[problem.dtype], FLOOR[problem.out_dtype]), asked, found, own)


def allowed(floor: float | None, asked: float | None, found: Error, own: Callable[[], Error]) -> tuple[float, float]:
    """Largest L2 error and spread allowed: 1e-5 in fp32 (``floor`` is ``None``), twice torch's own (and no less than
    its dtype's rounding) otherwise, or what was ``asked`` for.

    ``own`` gives torch's own errors, which take as long as those ``found`` did: it is called only where these are above
    what is allowed in any case. TF32 rounds operands to 10 bits, so 1e-3 is allowed where torch happens to pick an fp32
    engine.
    """
    if asked is not None:
        return asked, asked
    if floor is None:
        return LIMIT, LIMIT
    if found.l2 <= floor and found.spread <= floor:
        return floor, floor
    error = own()
    l2, spread = (2 * e if math.isfinite(e) else 0.0 for e in (error.l2, error.spread))
    return max(l2, floor), max(spread, floor)


@dataclass(frozen=True)
class _Sample:
    """A part of the problem that is compared, and the ranges of each tensor that it uses; ``None``: it is zero."""

    problem: ConvProblem | None
    ranges: dict[str, tuple[Range, ...]]


def _samples(problem: ConvProblem, plan: Plan | None) -> Iterator[_Sample]:
    whole = _Sample(problem, dict.fromkeys(ROLES, ()))
    budget = FLOPS[problem.device_type] / problem.flops
    if problem.pass_ is not Pass.WGRAD:
        for image in _telling_images(problem, plan, int(budget * problem.batch)):
            yield from _stripes(_cut(whole, "batch", image, 1), plan)
        return
    groups, channels = problem.groups, problem.out_channels // problem.groups
    if groups == 1 or budget * groups >= 2:
        axis, extent = ("groups", groups) if groups > 1 else ("out_channels", channels)
        for start, length in _ends(extent, int(budget * extent)):
            yield _cut(whole, axis, start, length)
        return
    some = max(1, int(budget * problem.out_channels / 2))  # a part of one group at either end
    yield _cut(_cut(whole, "groups", 0, 1), "out_channels", 0, some)
    yield _cut(_cut(whole, "groups", groups - 1, 1), "out_channels", channels - some, some)


def _ends(extent: int, most: int) -> list[tuple[int, int]]:
    """Starts and lengths of about ``most`` of ``extent`` things, half at either end."""
    half = max(1, most // 2)
    return [(0, extent)] if 2 * half >= extent else [(0, half), (extent - half, half)]


def _cut(sample: _Sample, axis: str, start: int, length: int) -> _Sample:
    """``length`` of ``sample`` along ``axis`` from ``start``."""
    assert sample.problem is not None
    sizes = [n for n in (start, length, sample.problem.extent(axis) - start - length) if n]
    part = sample.problem.split(axis, sizes)[1 if start else 0]
    return _Sample(part.problem, {role: (*sample.ranges[role], *part.ranges(role)) for role in ROLES})


def _stripes(image: _Sample, plan: Plan | None) -> Iterator[_Sample]:
    """An image, or stripes of a large one along its outermost axis, each with rows on both sides of a seam."""
    p = image.problem
    assert p is not None
    size = 8 * (math.prod(p.shape("x")) + math.prod(p.shape("y")))
    if size <= WHOLE_BYTES:
        yield image
        return
    axis = p.space[0]
    whole = p.extent(axis)
    rows = max(2, min(whole, REFERENCE_BYTES * whole // size))
    for seam in sorted({0, whole, *_seams(plan)}):
        yield _cut(image, axis, min(max(0, seam - rows // 2), whole - rows), rows)


def _seams(plan: Plan | None) -> Iterator[int]:
    """Where along space the first part of each plan begins, in a division or in the parts of one of the batch."""
    if plan is None or plan.leaf:
        return
    solver = solvers.get(plan.solver)
    sizes = plan.config.get("sizes")
    if isinstance(solver, Split) and solver.axis == "space" and isinstance(sizes, tuple):
        for index in itertools.accumulate(plan.counts[:-1]):
            yield sum(sizes[:index])
    else:
        for child in plan.children:
            yield from _seams(child)


def _cuts_batch(plan: Plan) -> bool:
    solver = solvers.get(plan.solver)
    return isinstance(solver, Split) and solver.axis == "batch"


def _telling_images(problem: ConvProblem, plan: Plan | None, most: int) -> list[int]:
    """The last image and the first of each plan that has a part of the batch, then images before them."""
    sizes = plan.config.get("sizes", ()) if plan is not None and _cuts_batch(plan) else ()
    firsts = [0]
    if plan is not None and isinstance(sizes, tuple):
        parts = itertools.accumulate(plan.counts, initial=0)
        firsts += [sum(sizes[:index]) for index in parts if 0 < index < len(sizes)]
    telling = dict.fromkeys((problem.batch - 1, *firsts))
    others = dict.fromkeys(start - 1 for start in firsts[1:])
    room = min(IMAGES, most) - len(telling)
    return sorted({*telling, *list(others)[: max(0, room)]})


def _reference(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and |a| conv |b| in float64; WGRAD in chunks of the batch and of images, so that copies stay small."""
    with without_benchmark(problem.device_type):  # torch's search would outlast the reference
        return _float64(problem, a, b)


def _float64(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.device_type == "cpu" and problem.depthwise and problem.taps >= MANY_TAPS:
        value = convolve_by_transform(problem, a, b)
        scale = convolve_by_transform(problem, a.abs(), b.abs())
        # It errs by a share of the largest, also where nothing meets.
        return value, scale.clamp_min_(RESOLVED * float(scale.max()))
    if problem.pass_ is not Pass.WGRAD:
        return problem.reference(a, b), problem.reference(a.abs(), b.abs())
    image = 8 * (math.prod(problem.shape("x")) + math.prod(problem.shape("y"))) // problem.batch
    chunk = max(1, min(problem.batch, REFERENCE_BYTES // image))
    sizes = [min(chunk, problem.batch - i) for i in range(0, problem.batch, chunk)]
    value = torch.zeros(problem.shape("w"), dtype=torch.float64, device=a.device)
    scale = torch.zeros_like(value)
    rows = problem.extent(problem.space[0])
    stripe = max(1, min(rows, REFERENCE_BYTES * rows // image))
    stripes = [min(stripe, rows - i) for i in range(0, rows, stripe)]
    for some in problem.split("batch", sizes):
        assert some.problem is not None
        for part in some.problem.split(problem.space[0], stripes):
            if part.problem is not None:
                x, dy = narrow(a, (*some.x, *part.x)), narrow(b, (*some.y, *part.y))
                value += part.problem.reference(x, dy)
                scale += part.problem.reference(x.abs(), dy.abs())
    return value, scale
