"""Times of candidates on parts of falling size, and the times they suggest for smaller parts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilewise.plan import Config

__all__ = ["LOST", "Key", "Rates"]

LOST = 1.4
"""A candidate that was this many times slower than the best at a size is not measured at half of it, save by
``patient``; at a quarter this squared counts, and so on: the smaller a part, the less the larger says of it."""

Key = tuple[str, int, Config]
"""Solver, version and config."""


class Rates:
    """The latest time of each candidate. Sizes fall from one :meth:`note` to the next."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[float, int]] = {}

    def note(self, took_ms: Mapping[Key, float], parts: float, size: int) -> None:
        """Note the milliseconds that candidates took on a part of ``size``, of which ``parts`` make the whole."""
        for key, ms in took_ms.items():
            self._seen[key] = ms * parts, size

    def at(self, size: int, parts: float) -> dict[Key, float]:
        """Milliseconds expected for a part of ``size``, of which ``parts`` make the whole.

        A candidate above :data:`LOST` times the best is not worth a measurement.
        """
        return {
            key: ms / parts / LOST ** max(0.0, math.log2(seen / size) - 1.0) for key, (ms, seen) in self._seen.items()
        }
