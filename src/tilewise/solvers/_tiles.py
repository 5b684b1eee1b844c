"""What solvers with tiled Triton kernels share: integers of a config, and how tiles fill the multiprocessors."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

from tilewise.plan import Config

__all__ = ["PROCESSORS", "busy", "first_that", "integer", "splits_that_fill"]

T = TypeVar("T")

PROCESSORS = 132
"""Multiprocessors that tiles are shared out to, for estimates and for the number of partial sums."""


def integer(c: Config, name: str, default: int | None = None) -> int:
    """A positive integer of a config. Raises ``ValueError`` naming the value for anything else."""
    value = c.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: a positive integer would do")
    return value


def busy(programs: int) -> float:
    """Share of the multiprocessors that are busy when ``programs`` equal ones run."""
    return programs / (-(-programs // PROCESSORS) * PROCESSORS)


def first_that(fits: Callable[[T], bool], choices: Sequence[T]) -> int:
    """Number of the first of ``choices``, which ask for less and less, that ``fits``; of one beyond where none does.

    Mostly the first one does, so it is asked about before the others are halved.
    """
    return 0 if fits(choices[0]) else bisect.bisect_left(choices, True, lo=1, key=fits)


def splits_that_fill(most: int, places: int, busy_with: Callable[[int], float]) -> int:
    """In how many sums, from 1 to ``most``, to take one over ``places``: ``busy_with`` so many, that share is busy."""
    # Partial sums go through memory: at usual rates that takes some 200 / places of the time of a share's products.
    return max(range(1, most + 1), key=lambda n: (busy_with(n) / (1 + 200 * n / places), -n))
