"""How long planning may take between two steps, so that it stays within a share of the time of training."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Allowance"]

MOST_S = 0.25
"""Most seconds of one turn that begins on time, however long the program did something else before."""


class Allowance:
    """Accounts for turns: ``share`` seconds may be spent for every second that the program ran since the turn before.

    A turn ends with whole measurements, so that it may take longer than it should. What it took too much is paid back
    before the next one begins. What is not used is not saved up. So over any time in which the program ran for ``t``
    seconds, turns take at most ``share * t`` and what the last one took too much.

    >>> seconds = iter([0.0, 10.0, 11.0])
    >>> allowance = Allowance(0.02, lambda: next(seconds))
    >>> round(allowance.seconds(), 3)
    0.2
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self.spent_s = 0.0
        """Seconds that all turns took together."""
        self._clock = clock
        self._credit = 0.0
        self._ran_from = clock()

    def seconds(self) -> float:
        """How many seconds a turn may take now; 0 where there may be none yet."""
        now = self._clock()
        earned = self.share * (now - self._ran_from)
        self._ran_from = now
        self._credit = min(min(self._credit, 0.0) + earned, MOST_S)
        return max(self._credit, 0.0)

    def spend(self, seconds: float) -> None:
        """Take off what a turn took that has just ended."""
        self.spent_s += seconds
        self._credit -= seconds
        self._ran_from = self._clock()

    def restart(self) -> None:
        """Earn nothing for the time until now, in which there was nothing to plan."""
        self._ran_from = self._clock()
