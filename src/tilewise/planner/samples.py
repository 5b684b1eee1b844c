"""What of a result a check compares: whole images or channels at the ends, and where plans of parts meet.

A whole reference would cost more than the plan: FPROP and DGRAD are compared on whole images, the last of the batch and
the first of each plan in a division; WGRAD on the first and last output channels, summed over the whole batch. Of an
image too large for that, stripes are compared: at both ends and where the plan of a tile begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewise import solvers
from tilewise.plan import Plan
from tilewise.planner.kinds import KINDS, end_ranks
from tilewise.problem import ROLES, ConvProblem, Pass, Range
from tilewise.solvers import Split

__all__ = ["FLOPS", "MOST_RANKS", "REFERENCE_BYTES", "Sample", "few_samples", "first_images", "samples_of", "seams_of"]

FLOPS = {"cpu": 1e8, "cuda": 2e10}
"""Most float64 operations a check spends on its reference."""
IMAGES = 4
MOST_RANKS = len(KINDS)
"""Images, or channels, of which each holds another kind."""
GROUPS = 2
"""Groups of each kind that are compared where they are small."""
FEWER = 4
"""Of the channels of a run that adds kinds one in so many is compared."""
REFERENCE_BYTES = 1 << 28
WHOLE_BYTES = 1 << 32
"""Of an image that takes more in float64, before and after the convolution together, stripes are compared."""


@dataclass(frozen=True)
class Sample:
    """A part of the problem that is compared, and the ranges of each tensor that it uses; ``None``: it is zero."""

    problem: ConvProblem | None
    ranges: dict[str, tuple[Range, ...]]


def samples_of(problem: ConvProblem, plan: Plan | None, ends: int = 1) -> Iterator[Sample]:
    """What is compared: at either end of the batch, or of WGRAD's output channels or groups, ``ends`` at the least."""
    whole = Sample(problem, dict.fromkeys(ROLES, ()))
    budget = FLOPS[problem.device_type] / problem.flops
    if problem.pass_ is not Pass.WGRAD:
        images = {*_telling_images(problem, plan, int(budget * problem.batch)), *_at_ends(problem.batch, ends)}
        for image in sorted(images):
            yield from _stripes(_cut(whole, "batch", image, 1), plan)
        return
    groups, channels = problem.groups, problem.out_channels // problem.groups
    if groups == 1 or budget * groups >= 2 or ends > 1:
        axis, extent = ("groups", groups) if groups > 1 else ("out_channels", channels)
        least = ends * GROUPS if groups > 1 and ends > 1 else ends
        for start, length in _ends(extent, max(2 * least, int(budget * extent))):
            yield _cut(whole, axis, start, length)
        return
    some = max(1, int(budget * problem.out_channels / 2))  # a part of one group at either end
    yield _cut(_cut(whole, "groups", 0, 1), "out_channels", 0, some)
    yield _cut(_cut(whole, "groups", groups - 1, 1), "out_channels", channels - some, some)


def few_samples(problem: ConvProblem) -> Iterator[Sample]:
    """As much as holds every kind of an operand: some images and channels."""
    channels = "out_channels" if problem.pass_ is Pass.FPROP else "in_channels"
    for sample in samples_of(problem, None, MOST_RANKS // 2):
        assert sample.problem is not None or problem.pass_ is not Pass.WGRAD
        count = 0 if sample.problem is None else sample.problem.extent(channels)
        if problem.pass_ is Pass.WGRAD or problem.groups > 1 or count <= 2 * len(KINDS):
            yield sample
        else:
            yield _cut(sample, channels, 0, max(len(KINDS), count // FEWER))


def _at_ends(extent: int, count: int) -> list[int]:
    return [index for index, rank in enumerate(end_ranks(extent)) if rank < 2 * count]


def _ends(extent: int, most: int) -> list[tuple[int, int]]:
    """Starts and lengths of about ``most`` of ``extent`` things, half at either end."""
    half = max(1, most // 2)
    return [(0, extent)] if 2 * half >= extent else [(0, half), (extent - half, half)]


def _cut(sample: Sample, axis: str, start: int, length: int) -> Sample:
    """``length`` of ``sample`` along ``axis`` from ``start``."""
    assert sample.problem is not None
    sizes = [n for n in (start, length, sample.problem.extent(axis) - start - length) if n]
    part = sample.problem.split(axis, sizes)[1 if start else 0]
    return Sample(part.problem, {role: (*sample.ranges[role], *part.ranges(role)) for role in ROLES})


def _stripes(image: Sample, plan: Plan | None) -> Iterator[Sample]:
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
    for seam in sorted({0, whole, *seams_of(plan)}):
        yield _cut(image, axis, min(max(0, seam - rows // 2), whole - rows), rows)


def seams_of(plan: Plan | None) -> Iterator[int]:
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
            yield from seams_of(child)


def _cuts_batch(plan: Plan) -> bool:
    solver = solvers.get(plan.solver)
    return isinstance(solver, Split) and solver.axis == "batch"


def first_images(problem: ConvProblem, plan: Plan | None) -> list[int]:
    """The first image of each plan that has a part of the batch, in order."""
    sizes = plan.config.get("sizes", ()) if plan is not None and _cuts_batch(plan) else ()
    firsts = [0]
    if plan is not None and isinstance(sizes, tuple):
        parts = itertools.accumulate(plan.counts, initial=0)
        firsts += [sum(sizes[:index]) for index in parts if 0 < index < len(sizes)]
    return firsts


def _telling_images(problem: ConvProblem, plan: Plan | None, most: int) -> list[int]:
    """The last image and the first of each plan that has a part of the batch, then images before them."""
    firsts = first_images(problem, plan)
    telling = dict.fromkeys((problem.batch - 1, *firsts))
    others = dict.fromkeys(start - 1 for start in firsts[1:])
    room = min(IMAGES, most) - len(telling)
    return sorted({*telling, *list(others)[: max(0, room)]})
