"""Which points are worth naming: those that are the best for something."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.advice.points import Point
from tilewise.advice.sweep import Sizes, Sweep

__all__ = ["roles", "without"]

MORE_WORK = 1.01
"""A layer is larger where one sample takes more than so many times the work."""


def roles(sweep: Sweep, asked: Point, points: Sequence[Point]) -> list[tuple[str, Point]]:
    """What a point is the best for, in words, and the point: of ``points``, which have times, and ``asked`` is one.

    The best by samples a second and by rate; by samples a second those that differ from the asked one only in the
    mini-batch, or in all but that; and the largest layer that gives as many samples a second as the asked one.
    """
    place = sweep.batch_place
    rest = without(asked.sizes, place)
    lists = {
        "most samples a second": points,
        f"best {sweep.batch} for these sizes": [p for p in points if without(p.sizes, place) == rest],
        f"best sizes for this {sweep.batch}": [p for p in points if p.sizes[place] == asked.sizes[place]],
    }
    found = [("as asked", asked)]
    found += [(role, max(among, key=lambda p: p.samples_per_second)) for role, among in lists.items() if among]
    found.insert(2, ("highest rate", max(points, key=lambda p: p.rate, default=asked)))
    speed = asked.samples_per_second
    larger = [p for p in points if p.work > MORE_WORK * asked.work and p.samples_per_second >= speed > 0]
    if larger:
        found.append(("largest that is as fast", max(larger, key=lambda p: (p.work, p.samples_per_second))))
    return found


def without(sizes: Sizes, place: int) -> Sizes:
    """``sizes`` but the one at ``place``."""
    return (*sizes[:place], *sizes[place + 1 :])
