"""Dividing a number of images among devices so that all are done at the same time, by measuring divisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

__all__ = ["GAIN", "Images", "balanced", "moves"]

Images = tuple[int, ...]
"""How many images each device computes."""
GAIN = 0.995
"""Another division is taken where its time is below this part of the best."""


def balanced(
    images: Images, step: int, least: int, time_of: Callable[[Images], float], goes_on: Callable[[], bool]
) -> Images:
    """The best division that is reached from ``images`` by moving some from one device to another.

    ``time_of`` measures a division. ``step`` images are moved at first, and half as many once no move gains, down to
    ``least``. So where time falls towards one best division and rises behind it, that one is met to within ``least``
    images. It ends earlier where it no longer ``goes_on``.

    >>> balanced((50, 50), 25, 1, lambda n: max(n[0] / 9, n[1] / 91), lambda: True)
    (9, 91)
    """
    while goes_on():
        best = min(moves(images, step), key=time_of, default=images)
        if time_of(best) < GAIN * time_of(images):
            images = best
        elif step <= least:
            break
        else:
            step = max(step // 2, least)
    return images


def moves(images: Images, step: int) -> Iterator[Images]:
    """Divisions in which one device gives ``step`` images, or all that it has, to another.

    >>> list(moves((3, 1), 2))
    [(1, 3), (4, 0)]
    """
    for giver, taker in itertools.permutations(range(len(images)), 2):
        moved = min(step, images[giver])
        if moved:
            yield tuple(n - moved * (i == giver) + moved * (i == taker) for i, n in enumerate(images))
