"""Which points are measured: lines through the asked one first, then what is expected to be best, as time allows."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tilewise.advice.gauge import LEVELS, Gauge
from tilewise.advice.outlook import Outlook
from tilewise.advice.points import Point
from tilewise.advice.roles import roles
from tilewise.advice.sweep import Sizes, Sweep
from tilewise.machine.turns import OutOfTime, pause, stopped_when

__all__ = ["Clock", "Search"]

LINE = {1: 24, 2: 12, 3: 9}
"""Sizes of each axis that are measured with the others as asked, by the number of axes; fewer for more axes."""
WANTED = 20
"""Points that should fit into the time: otherwise each is measured less thoroughly."""
TRIED_SHARE = 0.25
"""The largest share of the time that is left in which a single point is measured more thoroughly."""
IN_TURNS_S = 4.5
"""Seconds for timing the best points in turns, where they are short."""
RUNNERS_UP = 3
"""The best few points by each measure that are timed in turns."""
FIRST_SHARE, SWEEP_SHARE, FINAL_SHARE, END_SHARE = 0.5, 0.7, 0.88, 0.93
"""Shares of the time by which the asked point, all points, and the best ones in turns are to be done, and when work is
stopped. A run or a compilation that has begun is finished, and what was found is still to be shown."""
USUAL_MISS = 0.03
"""How far a measured rate is usually from the expected one, as the difference of their logarithms."""
EXPECTED_LEAST, EXPECTED_SHARE = 16, 0.2
"""So many points are measured as the likeliest at the most, and this share of all points more: where nearly all take
the same time for their work, each may be the best by a little, and to look at all of them is not worth it."""
MISSES = 2.0
"""Points are measured that may be the best if their rate is so many times the usual miss above the expected one."""


@dataclass
class Clock:
    """A time limit of ``seconds`` from ``begun`` on, by :func:`time.monotonic`."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def left(self, share: float = 1.0) -> float:
        """Seconds until ``share`` of the limit is over; negative afterwards."""
        return share * self.seconds - self.passed


@dataclass
class Search:
    """Measures points of ``gauge.sweep`` within ``clock``; ``tell`` hears of each before it is measured.

    :meth:`run` may be interrupted at any time. What was measured until then is in :attr:`points`.
    """

    gauge: Gauge
    clock: Clock
    tell: Callable[[str], object]
    points: dict[str, dict[Sizes, Point]] = field(default_factory=lambda: {level: {} for level in LEVELS})
    """What was measured at each level, by sizes."""
    level: str = LEVELS[0]
    """How thoroughly points are compared."""
    finals: dict[Sizes, Point] = field(default_factory=dict)
    """The best points and the asked one, timed in turns."""
    is_done: bool = False
    """Whether all was measured that was worth it."""
    misses: list[float] = field(default_factory=list)
    """By how much the logarithm of each rate was off that was expected before it was measured."""

    @property
    def sweep(self) -> Sweep:
        """What is swept."""
        return self.gauge.sweep

    @property
    def compared(self) -> dict[Sizes, Point]:
        """The points at the level of comparison."""
        return self.points[self.level]

    def run(self) -> None:
        """Measure until nothing is expected to be better, or the time is over."""
        try:
            with self._until(END_SHARE):
                self._begin()
                finished = self._measure_all(self._lines()) and self._measure_all(self._expected())
                self._measure_disturbed()
                self._finish()
                self.is_done = finished
        except OutOfTime:
            return

    def _until(self, share: float) -> AbstractContextManager[None]:
        """A context that raises :class:`OutOfTime` when ``share`` of the time is over."""
        return stopped_when(lambda: self.clock.left(share) < 0)

    def _begin(self) -> None:
        """Measure the asked point and a second one at each level for which there is time, then choose among these."""
        asked = self.sweep.asked
        second = next((sizes for sizes in filter(self.sweep.flops, self._lines()) if sizes != asked), asked)
        for level in LEVELS:
            pause()
            if level != LEVELS[0] and self.gauge.expected_s(asked, level) > TRIED_SHARE * self.clock.left():
                break
            try:
                with self._until(FINAL_SHARE if level == LEVELS[0] else FIRST_SHARE):
                    self._measure(asked, level)
            except OutOfTime:
                break
            self.level = level
            # The first one loads libraries and compiles: the second tells what a point takes.
            if self.gauge.expected_s(second, level) < TRIED_SHARE * self.clock.left():
                self._measure(second, level)
        self.level = self._affordable()

    def _affordable(self) -> str:
        """The most thorough level at which enough points fit into the time."""
        asked, left = self.sweep.asked, self.clock.left(SWEEP_SHARE)
        wanted = min(WANTED, math.prod(len(axis.values) for axis in self.sweep.axes))
        known = [level for level in LEVELS if asked in self.points[level]]
        for level in reversed(known[1:]):
            if left > wanted * self.gauge.expected_s(asked, level):
                return level
        return known[0] if known else LEVELS[0]

    def _measure_all(self, wanted: Iterator[Sizes]) -> bool:
        """Measure the points that are ``wanted``. Returns whether there was time for all."""
        for sizes in filter(self.sweep.flops, wanted):
            if not self._has_time(sizes, self.level):
                return False
            self._measure(sizes, self.level)
        return True

    def _has_time(self, sizes: Sizes, level: str) -> bool:
        """Whether a point is expected to be measured in time."""
        plan_s = self.gauge.expected_s(self.sweep.asked, "plans")
        # Where the best cannot be planned at the end, there is nothing to keep time for.
        share = SWEEP_SHARE if level == "plans" or 2 * plan_s < self.clock.left() else FINAL_SHARE
        return self.gauge.expected_s(sizes, level) < self.clock.left(share)

    def _measure(self, sizes: Sizes, level: str) -> None:
        """Measure the point at ``sizes``, unless that was done."""
        if sizes not in self.points[level]:
            self.tell(self.sweep.text(sizes))
            self.points[level][sizes] = self.gauge.measure(sizes, level)

    def _lines(self) -> Iterator[Sizes]:
        """Points that differ from the asked one in one size, axes in turns."""
        axes, asked = self.sweep.axes, self.sweep.asked
        most = LINE.get(len(axes), 7)
        lines = [[(place, size) for size in axis.promising(most)] for place, axis in enumerate(axes)]
        for row in itertools.zip_longest(*lines):
            for place, size in (each for each in row if each is not None):
                yield _with(asked, place, size)

    def _expected(self) -> Iterator[Sizes]:
        """Points that are expected to be best, the next one by all that was measured before it.

        In turns by samples a second and by rate. Then neighbours of the best, and the line of mini-batches through it.
        """
        most = EXPECTED_LEAST + int(EXPECTED_SHARE * math.prod(len(axis.values) for axis in self.sweep.axes))
        for turn in range(most):
            outlook = Outlook(self.sweep.axes, list(self.compared.values()))
            found = [self._likeliest(outlook, by_rate=by_rate) for by_rate in (False, True)]
            likely = [sizes for sizes in found if sizes is not None]
            if not likely:
                break
            sizes = likely[turn % len(likely)]
            yield sizes
            if sizes in self.compared and (rate := self.compared[sizes].rate):
                self.misses.append(math.log(rate / outlook.rate(sizes)))
        for by_rate in (False, True):
            yield from self._around(by_rate=by_rate)

    def _likeliest(self, outlook: Outlook, *, by_rate: bool) -> Sizes | None:
        """The point that is expected to be the best of those not measured; ``None`` where none is worth it.

        The rougher the device turns out to be, or the noisier its times, the less must be expected of a point.
        """
        possible = filter(self.sweep.flops, outlook.unmeasured(self.compared))
        others = {sizes: self._merit(sizes, outlook.rate(sizes), by_rate) for sizes in possible}
        # As expected, too: a lucky measurement would keep all others out.
        best = max((self._merit(s, outlook.rate(s), by_rate) for s, p in self.compared.items() if p.ms), default=0.0)
        likeliest = max(others, key=others.__getitem__, default=None)
        squares = [USUAL_MISS**2, *(miss**2 for miss in self.misses)]
        worth = best * math.exp(-MISSES * math.sqrt(sum(squares) / len(squares)))
        return likeliest if likeliest is not None and others[likeliest] > worth else None

    def _merit(self, sizes: Sizes, rate: float, by_rate: bool) -> float:
        """What points are compared by: TFLOP/s ``by_rate``, samples a second otherwise."""
        if by_rate:
            return rate
        return rate * self.sweep.samples(sizes) / self.sweep.flops(sizes)

    def _around(self, *, by_rate: bool) -> Iterator[Sizes]:
        """Neighbours of the best point on each axis, then mini-batches of its other sizes."""
        best = max(self.compared.values(), key=lambda p: p.rate if by_rate else p.samples_per_second).sizes
        for place, axis in enumerate(self.sweep.axes):
            tried = [sizes[place] for sizes in self.compared if _with(sizes, place, 0) == _with(best, place, 0)]
            for size in axis.near(best[place], tried)[:2]:
                yield _with(best, place, size)
        place = self.sweep.batch_place
        for size in self.sweep.axes[place].promising(LINE.get(len(self.sweep.axes), 7)):
            yield _with(best, place, size)

    def _measure_disturbed(self) -> None:
        """Measure points again whose times other processes disturbed; where these still run, the planner will not."""
        for sizes, point in list(self.points["plans"].items()):
            if point.busy and self._has_time(sizes, "plans"):
                self.tell(self.sweep.text(sizes))
                self.points["plans"][sizes] = self.gauge.measure(sizes, "plans")

    def _finish(self) -> None:
        """Plan the best points, so that they are checked, and time them in turns with the asked one."""
        planned = []
        for sizes in self._finalists():
            needs = self.gauge.expected_s(sizes, "plans") if sizes not in self.points["plans"] else 0.0
            if needs < self.clock.left(FINAL_SHARE):
                self._measure(sizes, "plans")
                planned.append(self.points["plans"][sizes])
        able = [point for point in planned if point.ms is not None]
        while len(able) > 1 and self._in_turns_s(able) > self.clock.left(FINAL_SHARE):
            able.pop()
        if len(able) > 1 and able[0].sizes == self.sweep.asked:
            self.tell("the best in turns")
            self.finals = {point.sizes: point for point in self.gauge.in_turns(able)}

    def _finalists(self) -> list[Sizes]:
        """The asked point, then those that may be named: all that is named is to be timed in turns.

        Those that the outlook takes for the best are among them, as they may have been disturbed when measured.
        """
        points = [point for point in self.compared.values() if point.ms]
        if not points or self.sweep.asked not in self.compared:
            return []
        outlook = Outlook(self.sweep.axes, points)
        asked = self.compared[self.sweep.asked]
        chosen = [asked, *(point for _, point in roles(self.sweep, asked, points))]
        for by_rate in (False, True):
            chosen += sorted(points, key=lambda p: -self._merit(p.sizes, outlook.rate(p.sizes), by_rate))[:RUNNERS_UP]
            chosen += sorted(points, key=lambda p: -self._merit(p.sizes, p.rate, by_rate))[:RUNNERS_UP]
        return list(dict.fromkeys(point.sizes for point in chosen))

    @staticmethod
    def _in_turns_s(points: list[Point]) -> float:
        """Seconds for timing ``points`` in turns: two rounds to warm up, then at least five."""
        once = sum(point.ms or 0.0 for point in points) / 1e3
        return max(7 * once, IN_TURNS_S)


def _with(sizes: Sizes, place: int, size: int) -> Sizes:
    """``sizes`` with another one at ``place``."""
    return (*sizes[:place], size, *sizes[place + 1 :])
