"""Limits on the errors of all plans of a region together, tried until the whole errs just as much as it may."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Limits"]

AIM = 0.97
"""The error of the whole that is aimed at, as a share of what is allowed."""
LEAST_STEP, MOST_STEP = 1.1, 4.0
"""The factor by which the error of all plans together is lowered each time: the excess of the whole, within these."""
INWARDS = 0.05
"""How far below what was refused a limit is tried at least. What is left within as much is not looked at."""


@dataclass
class Limits:
    """Limits on the sum of the squares of the plans' errors: what was enough, what was not, and what to try next.

    >>> limits = Limits()
    >>> limits.note(4e-10, excess=2.0)
    >>> f"{limits.next():.1e}"
    '1.0e-10'
    >>> limits.note(1e-10, excess=0.8)  # a line through both: 0.64 and 4, of squares in units of what is allowed
    >>> f"{limits.next():.2e}"
    '1.27e-10'
    """

    allowed: float = 0.0
    """The largest sum known to be enough."""
    refused: float = math.inf
    """The least sum known to be too much."""
    tried: list[tuple[float, float]] = field(default_factory=list)
    """Each sum tried, with the square of the whole's error in units of what is allowed."""
    by_line: bool = True
    """Whether the next limit is read from a line; in turns with the middle of what is left, where lines mislead."""

    def note(self, squares: float, excess: float) -> None:
        """Remember that the whole erred ``excess`` times as much as it may where the plans' sum was ``squares``."""
        self.tried.append((squares, excess**2))
        if excess <= 1.0:
            self.allowed = max(self.allowed, squares)
        else:
            self.refused = min(self.refused, squares)

    @property
    def empty(self) -> bool:
        """Whether nothing is left to try: no sum lies between what is enough and what is not."""
        return self.refused <= self.allowed * (1.0 + INWARDS)

    def next(self) -> float:
        """The next limit. At least one sum must have been refused.

        While all sums were refused, it is lowered as if the plans alone erred, in ever longer steps. What else errs in
        the whole, such as norms, shows when one was enough: the whole's square grows with the plans' squares along a
        line.
        """
        squares, excess = self.tried[-1]
        if not self.allowed:
            return squares / min(max(excess, LEAST_STEP**2) ** len(self.tried), MOST_STEP**2)
        low, least = max(each for each in self.tried if each[0] <= self.allowed)
        high, most = min(each for each in self.tried if each[0] >= self.refused)
        wanted = low + (AIM**2 - least) * (high - low) / (most - least)
        by_line, self.by_line = self.by_line and wanted > self.allowed, not self.by_line
        return min(wanted, (1.0 - INWARDS) * self.refused) if by_line else math.sqrt(self.allowed * self.refused)
