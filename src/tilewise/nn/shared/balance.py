"""How many samples of a batch each device takes: a first guess, and what was measured since."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

__all__ = ["GAIN", "MOST_CHANGES", "Balance"]

WINDOW = 8
"""Steps whose median is a device's rate."""
FEW, FAR = 3, 1.5
"""Steps that are enough for the first change, where a step takes this many times what another division promises."""
SKIPPED = 2
"""Steps after a change that do not count: libraries choose kernels, and caches fill."""
GAIN = 0.025
"""The least part of a step that another division must promise to save."""
MOST_CHANGES = 16
"""Changes at most. Each costs a capture on a GPU."""
LONGEST_WAIT = 256
"""Steps between changes at most; the wait doubles from :data:`WINDOW` with each change."""
UNITS = 64
"""Into how many units a large batch is divided, so that parts have even sizes."""


class Balance:
    """Divides batches among devices by their ``rates``, in samples a second of each other's measure.

    ``fixed`` keeps the shares at the given rates. Otherwise :meth:`note` takes what steps took: rates become the
    medians of the last steps, and batches are divided anew where that promises to save a :data:`GAIN` of a step, twice
    in a row.
    """

    def __init__(self, rates: Sequence[float], *, fixed: bool = False, why: str = "") -> None:
        self.rates = tuple(rates)
        self.fixed = fixed
        self.reasons: list[str] = [why] if why else []
        self.changes = 0
        self.measured: tuple[float, ...] | None = None
        """Samples a second of each device by the last measurement; 0 for one that had none."""
        self._since = 0
        self._largest = 0
        self._suspected = False
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in rates]

    def sizes(self, batch: int) -> tuple[int, ...]:
        """How many of ``batch`` samples each device takes, ``0`` for one that is left out."""
        return divided(batch, self.rates)

    def note(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Take a step in which the devices took ``seconds`` for ``sizes`` samples.

        One with less than half of the samples of the largest batch does not count: its rates are those of overheads.
        """
        self._largest = max(self._largest, sum(sizes))
        if 2 * sum(sizes) < self._largest:
            return
        self._since += 1
        if self._since <= SKIPPED:
            return
        for seen, size, time in zip(self._seen, sizes, seconds, strict=True):
            if size and time > 0:
                seen.append(size / time)
        active = [seen for seen, size in zip(self._seen, sizes, strict=True) if size]
        least = min(map(len, active))
        if least < FEW or (least < WINDOW and self.changes):
            return
        rates = tuple(statistics.median(seen) if seen else 0.0 for seen in self._seen)
        wanted = divided(sum(sizes), rates)
        now, then = _time(sizes, rates), _time(wanted, rates)
        if least >= WINDOW or now > FAR * then:
            self.measured = rates
            self._decide(sizes, wanted, now, then)

    def _decide(self, sizes: Sequence[int], wanted: Sequence[int], now: float, then: float) -> None:
        """Divide batches as ``wanted`` by the measured rates, where a step that takes ``now`` takes so much less."""
        assert self.measured is not None
        wait = min(WINDOW << self.changes, LONGEST_WAIT) if self.changes else FEW
        if self.fixed or self._since < wait or self.changes >= MOST_CHANGES:
            return
        if then > (1 - GAIN) * now:
            self._suspected = False
            return
        if not self._suspected:  # some of these steps may be from before a device changed: see whether it lasts
            self._suspected = True
            self._forget()
            return
        self.rates = self.measured
        self.changes += 1
        out = [i for i, (size, before) in enumerate(zip(wanted, sizes, strict=True)) if before and not size]
        left = f"; number {', '.join(map(str, out))} is left out, too slow for one unit of samples" if out else ""
        self.reasons.append(
            f"{_words(sizes)} to {_words(wanted)} of {sum(sizes)} samples: a step of {now * 1e3:.3g} ms should take "
            f"{then * 1e3:.3g} ms{left}"
        )
        self._since, self._suspected = 0, False
        self._forget()

    def _forget(self) -> None:
        """Let rates be those of steps to come."""
        for seen in self._seen:
            seen.clear()


def divided(batch: int, rates: Sequence[float]) -> tuple[int, ...]:
    """``batch`` samples in proportion to ``rates``, in whole units of a sixty-fourth of a batch.

    What no whole number of units holds goes to the fastest.
    """
    unit = max(1, batch // UNITS)
    units = batch // unit
    exact = [units * rate / sum(rates) for rate in rates]
    sizes = [int(each) for each in exact]
    for index in sorted(range(len(rates)), key=lambda i: (sizes[i] - exact[i], i))[: units - sum(sizes)]:
        sizes[index] += 1
    fastest = max(range(len(rates)), key=lambda i: rates[i])
    return tuple(size * unit + (batch - units * unit if i == fastest else 0) for i, size in enumerate(sizes))


def _time(sizes: Sequence[int], rates: Sequence[float]) -> float:
    """Seconds until the last device is ready; those without samples take none."""
    return max(size / rate if rate else float("inf") for size, rate in zip(sizes, rates, strict=True) if size)


def _words(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes))
