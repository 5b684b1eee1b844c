"""Times of short calls on a GPU while its second cache holds all that they read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from tilewise.planner.measuring.repeats import launches_of
from tilewise.planner.measuring.times import Timer, lead_ms

__all__ = ["MOST", "ROUNDS", "may_hold", "ratios"]

MOST = 1.03
"""A plan that gains over cold caches may take so many times torch's time over warm ones: less is noise."""
ROUNDS = 7
SHARE = 0.5
"""The share of the cache that a call's data may fill: each half of it keeps copies of what the other half has."""


def may_hold(data: int, device: torch.device) -> bool:
    """Whether the cache of ``device`` can hold so many bytes from one call to the next. ``False`` for a CPU."""
    if device.type != "cuda":
        return False
    return data <= SHARE * torch.cuda.get_device_properties(device).L2_cache_size


def ratios(calls: Sequence[Callable[[], object]], timer: Timer) -> list[float]:
    """The time of each call but the last, divided by that of the last, in the median over rounds in turns."""
    first = [timer.time(call) for call in calls]
    first = [timer.time(call, lead_ms(took)) for call, took in zip(calls, first, strict=True)]
    count = max(2, launches_of(min(took.device_ms for took in first), timer.device.type))
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS):
        order = range(len(calls)) if turn % 2 == 0 else range(len(calls) - 1, -1, -1)
        for index in order:
            times[index].append(timer.time_warm(calls[index], count, lead_ms(first[index])))
    return [statistics.median(own / torchs for own, torchs in zip(each, times[-1], strict=True)) for each in times[:-1]]
