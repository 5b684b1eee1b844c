"""The samples of a result that a check compares: images or channels at the ends, and where plans of parts meet.

A whole reference would cost more than the plan: FPROP and DGRAD are compared on whole images, the last of the batch and
the first of each plan in a division; WGRAD on the first and last output channels, summed over the whole batch. Of an
image too large for that, stripes are compared: at both ends and where the plan of a tile begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewise.problems.base import Range, Seams
from tilewise.problems.conv.mixtures import KINDS, end_ranks
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

__all__ = ["FLOPS", "MOST_RANKS", "REFERENCE_BYTES", "Sample", "few_samples", "first_images", "samples_of"]

FLOPS = {"cpu": 1e8, "cuda": 2e10}
"""Most float64 operations a check spends on its reference."""
IMAGES = 4
MOST_RANKS = len(KINDS)
"""Most images or channels that each hold a different kind of data."""
GROUPS = 2
"""Groups of each kind that are compared where they are small."""
FEWER = 4
"""In a run that adds kinds of data, one channel in so many is compared."""
REFERENCE_BYTES = 1 << 28
WHOLE_BYTES = 1 << 32
"""Images whose input and output take more bytes in float64 are compared by stripes."""


@dataclass(frozen=True)
class Sample:
    """A part of the problem that is compared, with its ranges of each tensor. ``problem`` is ``None`` for zeros."""

    problem: ConvProblem | None
    ranges: dict[str, tuple[Range, ...]]


def samples_of(problem: ConvProblem, seams: Seams, ends: int = 1) -> Iterator[Sample]:
    """The samples to compare: at least ``ends`` at either end of the batch, or of WGRAD's output channels or groups."""
    whole = Sample(problem, dict.fromkeys(ROLES, ()))
    budget = FLOPS[problem.device_type] / problem.flops
    if problem.pass_ is not Pass.WGRAD:
        images = {*_telling_images(problem, seams, int(budget * problem.batch)), *_at_ends(problem.batch, ends)}
        for image in sorted(images):
            yield from _stripes(_cut(whole, "batch", image, 1), seams)
        return
    groups, channels = problem.groups, problem.out_channels // problem.groups
    if groups == 1 or budget * groups >= 2 or ends > 1:
        axis, extent = ("groups", groups) if groups > 1 else ("out_channels", channels)
        least = ends * GROUPS if groups > 1 and ends > 1 else ends
        for start, length in _ends(extent, max(2 * least, int(budget * extent))):
            yield _cut(whole, axis, start, length)
        return
    channels_compared = max(1, int(budget * problem.out_channels / 2))  # a part of one group at either end
    yield _cut(_cut(whole, "groups", 0, 1), "out_channels", 0, channels_compared)
    yield _cut(_cut(whole, "groups", groups - 1, 1), "out_channels", channels - channels_compared, channels_compared)


def few_samples(problem: ConvProblem) -> Iterator[Sample]:
    """Just enough images and channels to hold every kind of data of an operand."""
    channels = "out_channels" if problem.pass_ is Pass.FPROP else "in_channels"
    for sample in samples_of(problem, Seams(), MOST_RANKS // 2):
        assert sample.problem is not None or problem.pass_ is not Pass.WGRAD
        count = 0 if sample.problem is None else sample.problem.extent(channels)
        if problem.pass_ is Pass.WGRAD or problem.groups > 1 or count <= 2 * len(KINDS):
            yield sample
        else:
            yield _cut(sample, channels, 0, max(len(KINDS), count // FEWER))


def _at_ends(extent: int, count: int) -> list[int]:
    """The indices of ``count`` things at either end of ``extent`` things."""
    return [index for index, rank in enumerate(end_ranks(extent)) if rank < 2 * count]


def _ends(extent: int, most: int) -> list[tuple[int, int]]:
    """Starts and lengths of about ``most`` of ``extent`` things, half at either end."""
    half = max(1, most // 2)
    return [(0, extent)] if 2 * half >= extent else [(0, half), (extent - half, half)]


def _cut(sample: Sample, axis: str, start: int, length: int) -> Sample:
    """The part of ``sample`` with ``length`` elements along ``axis`` from ``start``."""
    assert sample.problem is not None
    sizes = [n for n in (start, length, sample.problem.extent(axis) - start - length) if n]
    part = sample.problem.split(axis, sizes)[1 if start else 0]
    return Sample(part.problem, {role: (*sample.ranges[role], *part.ranges(role)) for role in ROLES})


def _stripes(image: Sample, seams: Seams) -> Iterator[Sample]:
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
    for seam in sorted({0, whole, *seams.starts.get("space", ())}):
        yield _cut(image, axis, min(max(0, seam - rows // 2), whole - rows), rows)


def first_images(seams: Seams) -> list[int]:
    """The first image of each plan that has a part of the batch, in order."""
    return [0, *seams.starts.get("batch", ())]


def _telling_images(problem: ConvProblem, seams: Seams, most: int) -> list[int]:
    """The last image and the first of each plan that has a part of the batch, then images before them."""
    firsts = first_images(seams)
    telling = dict.fromkeys((problem.batch - 1, *firsts))
    others = dict.fromkeys(start - 1 for start in firsts[1:])
    room = min(IMAGES, most) - len(telling)
    return sorted({*telling, *list(others)[: max(0, room)]})
