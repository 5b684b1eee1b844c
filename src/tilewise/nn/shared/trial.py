"""Which of two ways of a step is the faster one, by the program's own steps."""

from __future__ import annotations

import statistics

__all__ = ["Trial"]

SKIPPED = 4
"""Steps of each way that do not count: graphs are captured, libraries choose kernels, and caches fill."""
WINDOW = 8
"""Steps whose median is the time of a way."""


class Trial:
    """Compares steps of a first way with those of a second one, for batches of one size.

    The first way is kept where it is not slower.
    """

    def __init__(self, first: str, second: str) -> None:
        self._names = (first, second)
        self._seen: tuple[list[float], list[float]] = ([], [])
        self._skipped = 0
        self._batch = 0
        self.way = 0
        """The number of the way that is on."""
        self._over = False

    def over(self) -> bool:
        """Whether both ways have been measured."""
        return self._over

    def note(self, batch: int, seconds: float) -> bool:
        """Take a step of the way that is on, with so many samples; say whether the way changes now."""
        self._batch = self._batch or batch
        if self._over or batch != self._batch or not seconds > 0:
            return False
        if self._skipped < SKIPPED:
            self._skipped += 1
            return False
        self._seen[self.way].append(seconds)
        if len(self._seen[self.way]) < WINDOW:
            return False
        if self.way == 0:
            self.way, self._skipped = 1, 0
            return True
        self._over = True
        first, second = map(statistics.median, self._seen)
        self.way = int(second < first)
        return self.way == 0

    def __str__(self) -> str:
        told = [
            f"{name} {statistics.median(seen) * 1e3:.3g} ms" if len(seen) >= WINDOW else f"{name} not measured yet"
            for name, seen in zip(self._names, self._seen, strict=True)
        ]
        return f"a step of {self._batch} samples: {', '.join(told)}" + (
            f"; {self._names[self.way]} is kept" if self._over else ""
        )
