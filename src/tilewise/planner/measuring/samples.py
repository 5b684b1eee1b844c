"""What several runs of one call say together: its times, how far they spread, and how busy the host was."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tilewise.planner.measuring.times import Took

__all__ = ["Sample", "dispersion", "sample_of"]


class Sample(NamedTuple):
    """The times of one call over several ``runs``, in milliseconds.

    ``device_ms`` is the median of the device's times. ``host_ms`` is the least of the host's, to which other work only
    adds. ``dispersion`` is the interquartile range of the device's times over their median, ``None`` for a single run.
    ``load`` is the share of all cores that other processes used meanwhile, ``None`` where it is not known.
    """

    device_ms: float
    host_ms: float
    dispersion: float | None
    runs: int
    load: float | None

    @property
    def took(self) -> Took:
        """Both times."""
        return Took(self.device_ms, self.host_ms)


def sample_of(times: Sequence[Took], load: float | None = None) -> Sample:
    """The sample of the runs that took ``times``, at least one, under ``load``.

    >>> sample_of([Took(2.0, 0.2), Took(1.0, 0.1), Took(2.0, 0.3)])
    Sample(device_ms=2.0, host_ms=0.1, dispersion=0.25, runs=3, load=None)
    """
    device_ms = [took.device_ms for took in times]
    return Sample(
        statistics.median(device_ms), min(took.host_ms for took in times), dispersion(device_ms), len(times), load
    )


def dispersion(values: Sequence[float]) -> float | None:
    """The interquartile range of ``values`` over their median; ``None`` for fewer than two, or a median of 0."""
    middle = statistics.median(values)
    if len(values) < 2 or not middle:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / middle
