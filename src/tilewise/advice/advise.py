"""Advice: which sizes near those of a layer give the most samples a second, by measurement, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.advice.gauge import Gauge
from tilewise.advice.points import Point
from tilewise.advice.reasons import reasons
from tilewise.advice.roles import roles, without
from tilewise.advice.search import Clock, Search
from tilewise.advice.sweep import Sizes, Sweep
from tilewise.planner import Options, Planner
from tilewise.planner.options import MEASURING

__all__ = ["Advice", "Named", "NoAdviceError", "advise"]

SECONDS = 30.0
"""The usual time limit."""


class NoAdviceError(RuntimeError):
    """The time was over before what was asked could be measured.

    >>> layer = tilewise.RecurrentProblem("gru", time=4, batch=4, inputs=8, hidden=8)
    >>> from tilewise.advice import NoAdviceError, advise, recurrent_layer
    >>> try:
    ...     found = advise(recurrent_layer(layer), seconds=0.0001)
    ... except NoAdviceError as error:
    ...     print("more seconds would do")
    more seconds would do
    """


@dataclass(frozen=True, slots=True)
class Named:
    """A point worth naming, and ``roles``: what it is the best for."""

    roles: tuple[str, ...]
    point: Point


@dataclass(frozen=True)
class Advice:
    """What was found out about ``sweep``.

    ``points`` are all that were measured at one ``level``: by ``torch``'s own choice alone, by all ``candidates``, or
    by ``plans`` as a layer runs them, checked. ``finals`` are the best and the asked one with times taken in turns,
    which count where there are any. ``is_done`` says that nothing else was expected to be better; otherwise the time
    was over before. ``seconds`` were spent. ``why`` are sentences.

    >>> from tilewise.advice import Advice, Part, Point, product
    >>> sweep = product([tilewise.GemmProblem(64, 32, 32)])
    >>> points = tuple(
    ...     Point(sizes, sizes[2], tuple(Part(problem, ms) for problem in sweep.problems(sizes)))
    ...     for sizes, ms in (((32, 32, 64), 2.0), ((32, 32, 80), 2.0))
    ... )
    >>> found = Advice(sweep, "torch", points, finals=(), is_done=True, seconds=1.0)
    >>> found.best.samples_per_second, found.asked.samples_per_second
    (40000.0, 32000.0)
    """

    sweep: Sweep
    level: str
    points: tuple[Point, ...]
    finals: tuple[Point, ...]
    is_done: bool
    seconds: float
    why: tuple[str, ...] = ()

    @property
    def best_known(self) -> dict[Sizes, Point]:
        """Each point by its sizes, with the times that count."""
        return {point.sizes: point for point in (*self.points, *self.finals)}

    @property
    def asked(self) -> Point:
        """The point at the sizes that were asked."""
        return self.best_known[self.sweep.asked]

    @property
    def best(self) -> Point:
        """The point with the most samples a second: of those that were timed in turns, where there are any."""
        return max(self.finals or self.points, key=lambda point: point.samples_per_second)

    @property
    def fastest(self) -> Point:
        """The point with the highest rate, likewise."""
        return max(self.finals or self.points, key=lambda point: point.rate)

    def named(self) -> list[Named]:
        """The points worth naming, each once with all that it is best for; the asked one is the first."""
        points = [point for point in self.finals or self.points if point.ms]
        by_sizes: dict[Sizes, list[str]] = {}
        for role, point in roles(self.sweep, self.asked, points):
            by_sizes.setdefault(point.sizes, []).append(role)
        return [Named(tuple(words), self.best_known[sizes]) for sizes, words in by_sizes.items()]

    def curves(self) -> list[list[Point]]:
        """Points of one layer each, by mini-batch: those at the asked sizes, then those at the best and fastest."""
        place = self.sweep.batch_place
        curves = []
        for rest in dict.fromkeys(without(p.sizes, place) for p in (self.asked, self.best, self.fastest)):
            curve = [point for point in self.points if point.ms and without(point.sizes, place) == rest]
            curves.append(sorted(curve, key=lambda point: point.samples))
        return curves


def advise(
    sweep: Sweep,
    planner: Planner | None = None,
    options: Options | None = None,
    *,
    seconds: float = SECONDS,
    clock: Clock | None = None,
    tell: Callable[[str], object] = lambda text: None,
    keep: Callable[[Advice], object] = lambda advice: None,
) -> Advice:
    """Measure points of ``sweep`` near the asked one for at most ``seconds``, and say which are the best.

    Measurements are those of ``planner`` (``None``: a new one) under ``options``, remembered and never taken twice.
    Points are measured along each axis first, then where a fit of what was measured expects the most samples a second
    or the highest rate. The best ones are timed in turns at the end. Within the time limit each point is measured as
    thoroughly as allows for enough of them. ``clock``, where it is given, says when the time began. ``tell(text)``
    hears of each point before it is measured. Where Ctrl-C interrupts it, ``keep(advice)`` gets what was measured until
    then, if that is anything, before ``KeyboardInterrupt`` goes on.

    Raises ``ValueError`` naming ``seconds`` or ``options.rigor``, and :class:`NoAdviceError` where the asked point
    could not be measured within the time.

    >>> from tilewise.advice import advise, product
    >>> sweep = product([tilewise.GemmProblem(4, 4, 4)], size_share=0.0, batch_share=0.25)
    >>> found = advise(sweep, options=tilewise.Options(exclude=("row_shares", "thin_gemm")), seconds=5)
    >>> found.best.samples_per_second >= found.asked.samples_per_second
    True
    """
    options = options or Options()
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r:.80}: a positive number would do, such as 30")
    if options.rigor not in MEASURING:
        raise ValueError(f"options.rigor={options.rigor!r}: advice is measured; {' or '.join(MEASURING)} would do")
    gauge = Gauge(sweep, planner or Planner(), options)
    search = Search(gauge, clock or Clock(seconds), tell)
    try:
        search.run()
    except KeyboardInterrupt:
        if sweep.asked in search.compared:
            keep(_advice(search))
        raise
    if sweep.asked not in search.compared:
        raise NoAdviceError(
            f"nothing was measured within seconds={seconds:g}: more of them, or a smaller layer, would do"
        )
    return _advice(search)


def _advice(search: Search) -> Advice:
    """What a search found, with the reasons."""
    points, finals = tuple(search.compared.values()), tuple(search.finals.values())
    plain = Advice(search.sweep, search.level, points, finals, search.is_done, search.clock.passed)
    why = reasons(search.sweep, plain.asked, plain.best, plain.fastest, _lines(plain), search.gauge.tried)
    return Advice(search.sweep, search.level, points, finals, search.is_done, search.clock.passed, tuple(why))


def _lines(advice: Advice) -> list[tuple[str, list[Point]]]:
    """For each axis its name, and the points that differ from the asked one in its size alone, in their order."""
    lines = []
    for place, axis in enumerate(advice.sweep.axes):
        rest = without(advice.sweep.asked, place)
        line = [point for point in advice.points if point.ms and without(point.sizes, place) == rest]
        lines.append((axis.name, sorted(line, key=lambda point, place=place: point.sizes[place])))  # type: ignore[misc]
    return lines
