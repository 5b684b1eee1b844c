"""Two ways to run a step, timed in turns: what each takes, and the interval in which the ratio of both lies."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewise.nn.ranks.steps import ALONE, Ranks

__all__ = ["LEAST_PAIRS", "Pairs", "Side", "interval", "time_pairs"]

LEAST_PAIRS = 20
"""Pairs by which it is decided which of two ways is faster."""
CONFIDENCE = 0.95
CLEAR_PAIRS, CLEAR, LONG_S = 8, 1.05, 5.0
"""Steps that take long are timed by fewer pairs where these are clear.

Once so many pairs have taken so many seconds, they are enough if the same way was faster in each of them, by this
factor or more. By chance alone that happens less than once in a hundred times.
"""
SAMPLE_MS = 4.0
"""A sample takes at least so long: shorter steps are run several times in a row, as a program runs them."""
MOST_STEPS = 8
"""Steps in one sample at most."""
WARM, WARM_MS = 2, 300.0
"""Runs of each way before anything is timed: caches, allocators and benchmark modes settle. One that long is enough."""
DEVICE_RUNS = 3
TRIAL_CYCLES = 1_000_000
"""Clock cycles of the wait by which a GPU's clock is timed."""
SLEEP_SLACK = 1.3
"""The GPU is kept busy for this many times what the host needs to launch a step, so that launches cost nothing."""


@dataclass(frozen=True)
class Side:
    """One way to run a step. ``use()`` switches to it, which is not timed, and ``run()`` runs the step once."""

    use: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True)
class Pairs:
    """What two ways took, in milliseconds a step: the times of each pair, and medians.

    ``host_ms`` is the time until the host has launched everything, and ``device_ms`` what a GPU takes with launches
    hidden, each for both ways. On a CPU both are ``None``.
    """

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]
    host_ms: tuple[float, float] | None = None
    device_ms: tuple[float, float] | None = None

    @property
    def medians(self) -> tuple[float, float]:
        """The median of each way."""
        return statistics.median(self.first_ms), statistics.median(self.second_ms)

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Least, median and most of the first way's time over the second's, within the interval of 95 %."""
        return interval([first / second for first, second in zip(self.first_ms, self.second_ms, strict=True)])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of ``values`` between the ends of the interval that holds the true median in 95 of 100 cases.

    The ends are two of the values themselves, by the binomial distribution: nothing is assumed of how they scatter.
    Fewer than six values have no such interval: its ends are infinitely far.

    >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 3.5, 6.0)
    """
    ordered, count = sorted(values), len(values)
    below = 0.0
    outside = 0
    while True:
        below += math.comb(count, outside) / 2**count
        if below > (1 - CONFIDENCE) / 2:
            break
        outside += 1
    middle = statistics.median(ordered)
    if not outside:
        return -math.inf, middle, math.inf
    return ordered[outside - 1], middle, ordered[count - outside]


def time_pairs(
    first: Side,
    second: Side,
    device: torch.device,
    pairs: int = LEAST_PAIRS,
    note: Callable[[int, int], object] | None = None,
    ranks: Ranks = ALONE,
) -> Pairs:
    """Time both ways ``pairs`` times in turns, the order changing with every pair. Raises what the steps raise.

    Long steps end earlier where :data:`CLEAR_PAIRS` tell which way is faster. ``note(done, pairs)`` is called after
    each pair. Of several ``ranks``, which all call this, the slowest counts in every sample.
    """
    longest = max(_warmed(side, device, ranks) for side in (first, second))
    steps = max(1, min(MOST_STEPS, math.ceil(SAMPLE_MS / max(longest, 1e-3))))
    taken: tuple[list[float], list[float]] = ([], [])
    hosts: tuple[list[float], list[float]] = ([], [])
    spent_ms = 0.0  # by the times that count, of which all ranks have the same
    for turn in range(pairs):
        if spent_ms > LONG_S * 1e3 and _is_clear(*taken):
            break
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            side = (first, second)[index]
            wall, host = ranks.slowest(functools.partial(_sample, side, device, steps))
            spent_ms += wall * steps
            taken[index].append(wall)
            hosts[index].append(host)
        if note is not None:
            note(turn + 1, pairs)
    host_ms = device_ms = None
    if device.type == "cuda":
        host_ms = statistics.median(hosts[0]), statistics.median(hosts[1])
        first_ms, second_ms = (
            ranks.slowest(functools.partial(_device_ms, side, device, ms))[0]
            for side, ms in zip((first, second), host_ms, strict=True)
        )
        device_ms = first_ms, second_ms
    return Pairs(tuple(taken[0]), tuple(taken[1]), host_ms, device_ms)


def _is_clear(first_ms: Sequence[float], second_ms: Sequence[float]) -> bool:
    """Whether the same way was clearly faster in each of enough pairs."""
    ratios = [first / second for first, second in zip(first_ms, second_ms, strict=True)]
    return len(ratios) >= CLEAR_PAIRS and (min(ratios) > CLEAR or max(ratios) < 1 / CLEAR)


def _warmed(side: Side, device: torch.device, ranks: Ranks) -> float:
    """Run one way until it has settled, and return the milliseconds of its last run."""
    for _ in range(WARM):
        wall, _ = ranks.slowest(functools.partial(_sample, side, device, 1))
        if wall > WARM_MS:
            break
    return wall


def _sample(side: Side, device: torch.device, steps: int) -> tuple[float, float]:
    """Milliseconds a step of ``steps`` in a row: until the device is done, and until the host has launched all."""
    side.use()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        side.run()
    launched = time.perf_counter()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3 / steps, (launched - start) * 1e3 / steps


def _device_ms(side: Side, device: torch.device, host_ms: float) -> tuple[float]:
    """Milliseconds that a GPU takes for a step whose launches all wait for it already."""
    side.use()
    cycles_a_ms = TRIAL_CYCLES / max(_between(lambda: torch.cuda._sleep(TRIAL_CYCLES)), 1e-3)
    times = []
    for _ in range(DEVICE_RUNS):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(SLEEP_SLACK * host_ms * cycles_a_ms))
        times.append(_between(side.run))
    return (statistics.median(times),)


def _between(run: Callable[[], object]) -> float:
    """Milliseconds on the GPU between the beginning and the end of what ``run()`` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
