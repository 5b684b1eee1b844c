"""How long planning may take between two steps, so that it stays within a share of the time of training."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Allowance"]

MOST_S = 0.25
"""Most seconds of one turn that begins on time, however long the program did something else before."""
LET_OFF_S = 2.0
"""Seconds of turns that are not paid back, all in all. Some work comes once and cannot be cut, such as a library that
loads its kernels; planning would else not go on for up to a minute after it."""
LONGEST_REST_S = 5.0
"""What a turn took too much is let off as far as the program would run for longer than this to pay it back."""
WORTH_S = 5e-3
"""Seconds of a turn that need not be longer: beside it, what it costs to hand the device over hardly counts."""


class Allowance:
    """Accounts for turns: ``share`` seconds may be spent for every second that the program ran since the turn before.

    A turn ends with whole measurements, so that it may take longer than it should. What it took too much is paid back
    before the next one begins, but for :data:`LET_OFF_S` seconds in the object's life. What is not used is not saved
    up; but short turns wait for a second step, since each costs something by itself. So over any time in which the
    program ran for ``t`` seconds, turns take at most ``share * t``, what the last one took too much, and what was let
    off.

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
        self._left = LET_OFF_S
        self._ran_from = clock()

    def seconds(self) -> float:
        """How many seconds a turn may take now; 0 where there may be none yet."""
        now = self._clock()
        earned = self.share * (now - self._ran_from)
        self._ran_from = now
        most = max(earned, min(2.0 * earned, WORTH_S))
        self._credit = min(self._credit + earned, most, MOST_S)
        return self._credit if self._credit >= min(1.5 * earned, WORTH_S) else 0.0

    def spend(self, seconds: float) -> None:
        """Take off what a turn took that has just ended."""
        self.spent_s += seconds
        debt = max(seconds - self._credit, 0.0)
        let_off = min(max(debt - LONGEST_REST_S * self.share, 0.0), self._left)
        self._left -= let_off
        self._credit = let_off - debt
        self._ran_from = self._clock()

    def restart(self) -> None:
        """Earn nothing for the time until now, in which there was nothing to plan."""
        self._ran_from = self._clock()
