"""How often a candidate is run, and which of its runs count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewise.planner.measuring.took import Took

__all__ = ["GIVE_UP", "LOSES", "counted", "launches_of", "repeats_of"]

REPEATS = 3
LONG_MS = 1.0
"""Runs on a GPU above so many ms vary little: candidates get one more. Finalists are timed again anyway."""
SETTLING, SETTLING_MS = 4, 30.0
"""On a CPU, most runs after the first, and the ms that they may take: the first two or three runs are slower."""
SLOW_MS = 400.0
"""Runs above so many ms are not repeated at all."""
GIVE_UP = 1.5
"""After one run this many times slower than the best a candidate is not repeated."""
FIRST = 2.0
"""The same factor for short runs on a CPU."""
LOSES = {"cuda": 1.2, "cpu": GIVE_UP}
"""A candidate is not repeated further after two runs that were both this many times slower than the best.

What disturbs one run seldom disturbs two."""

SHORT_MS, TOGETHER_MS, MOST_LAUNCHES = 0.05, 0.1, 16
"""Launches on a GPU below so many ms are timed several at once, which take so many ms, and at most so many of them."""


def launches_of(took_ms: float, device: str) -> int:
    """How many launches of ``took_ms`` on the device are timed between two events.

    Events tell time to a part of a microsecond, and what they add does not depend on what is between them.

    >>> [launches_of(ms, "cuda") for ms in (0.006, 0.02, 0.06)], launches_of(0.006, "cpu")
    ([16, 5, 1], 1)
    """
    if device != "cuda" or took_ms >= SHORT_MS:
        return 1
    return min(MOST_LAUNCHES, math.ceil(TOGETHER_MS / max(took_ms, 1e-3)))


def counted(times: Sequence[Took], device: str) -> Sequence[Took]:
    """The runs of a candidate that count: the first only where there is no other, on a CPU the later half."""
    return times[(len(times) + 1) // 2 if device == "cpu" else 1 :] or times


def repeats_of(took_ms: float, device: str) -> tuple[int, float]:
    """How many runs follow a first one of ``took_ms``, and how many times slower than the best that one may be."""
    if device == "cpu" and took_ms < SETTLING_MS / 2:
        return min(SETTLING, int(SETTLING_MS / max(took_ms, 1e-3))), FIRST
    return REPEATS if took_ms < LONG_MS else 1 if took_ms < SLOW_MS else 0, GIVE_UP
