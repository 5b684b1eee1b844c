"""Choosing how each tensor of a region lies in memory and how each part runs, all at once, for the least total time.

Each part has ways to run. A way takes its inputs in certain formats (strides) and gives its result in one. A tensor
that is read in another format than it is given in is converted, once for each such format. The choice is a 0-1
program, solved exactly: one way for each part, and a conversion wherever a chosen way reads what no chosen way gives.
Where the errors of parts together are limited, the sum of their squares is one more constraint.

A part may also be left to the part that reads it, which then computes both: its way is deferred, and gives a format
that no tensor has. Such a format is read by ways that know of it, and is never converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.planner.budget.program import load_solver, stdout_kept

__all__ = ["Choice", "Format", "Part", "Way", "choose_ways", "deferred", "is_deferred"]

TIME_LIMIT_S = 10.0
"""Seconds for HiGHS. Programs of networks of 300 parts take a fraction of a second."""
TOLERANCE = 1e-6
"""Share by which the sum of squares may exceed its limit: the solver computes with rounded numbers."""
SCALE = 1e4
"""What all times together are scaled to, so that the solver's tolerances are small beside each."""

Tensor = Hashable
Format = tuple[int, ...]
"""Strides, or what :func:`deferred` gives."""


def deferred(number: int) -> Format:
    """The format of a tensor that is not computed, because the part that reads it computes what gives it.

    ``number``, from 0 on, tells the ways to leave a part apart by what the reader then computes. The reader alone
    reads the tensor.
    """
    return (-1 - number,)


def is_deferred(format_: Format) -> bool:
    """Whether a format is one of :func:`deferred`: strides are never negative.

    >>> is_deferred(deferred(0)), is_deferred((1, 4)), is_deferred(())
    (True, False, False)
    """
    return format_[:1] < (0,) and bool(format_)


@dataclass(frozen=True)
class Way:
    """One way to run a part: the format of each input, in the order of the part's, that of its result, and its time.

    ``error`` is that of its result by itself, on data that is made to show errors. ``local_error`` is the same on what
    the part meets in its region, where that was measured. ``what`` is for the caller.
    """

    reads: tuple[Format, ...]
    gives: Format
    ms: float
    what: Any = None
    error: float = 0.0
    local_error: float | None = None

    @property
    def expected_error(self) -> float:
        """The error that its result is expected to have in the region."""
        return self.error if self.local_error is None else self.local_error


@dataclass(frozen=True)
class Part:
    """A part with its inputs, its result and its ways. A result of the region is read by a part with one way."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Choice:
    """The index of each part's way, the total time in milliseconds, and whether it is proven to be the least."""

    ways: tuple[int, ...]
    ms: float
    optimal: bool


def choose_ways(
    parts: Sequence[Part],
    given: Mapping[Tensor, Format],
    conversion_ms: Callable[[Tensor], float],
    most_squares: float = math.inf,
) -> Choice:
    """A choice with the least time. ``given`` has the formats of tensors that no part gives.

    ``conversion_ms(tensor)`` is what a conversion of a tensor takes. The squares of the parts' errors sum up to
    ``most_squares`` at the most, or to the least that there is. Raises ``ValueError`` for a part without ways.

    >>> rows, columns = (4, 1), (1, 4)
    >>> a = Part(("x",), "y", (Way((rows,), rows, 3.0), Way((columns,), columns, 1.0)))
    >>> b = Part(("y",), "z", (Way((rows,), rows, 2.0), Way((columns,), columns, 1.5)))
    >>> choose_ways([a, b], {"x": rows}, lambda tensor: 1.0)
    Choice(ways=(1, 1), ms=3.5, optimal=True)
    """
    for part in parts:
        if not part.ways:
            raise ValueError(f"{part.output}: a part with at least one way would do")
    program = _Program(parts, given, conversion_ms, most_squares)
    ways, optimal = program.solved()
    return Choice(ways, program.total(ways), optimal)


class _Program:
    """The 0-1 program: a column for each way, then one for each conversion."""

    def __init__(
        self,
        parts: Sequence[Part],
        given: Mapping[Tensor, Format],
        conversion_ms: Callable[[Tensor], float],
        most_squares: float,
    ) -> None:
        self._parts, self._given = parts, given
        least = sum(min(way.error**2 for way in part.ways) for part in parts)
        self._most = max(most_squares, least * (1 + TOLERANCE))
        self._first: list[int] = []
        self.costs: list[float] = []
        for part in parts:
            self._first.append(len(self.costs))
            self.costs += [way.ms for way in part.ways]
        self._producers = {part.output: index for index, part in enumerate(parts)}
        self.count = len(self.costs)
        self.conversions: dict[tuple[Tensor, Format], int] = {}
        for part in parts:
            for way in part.ways:
                for tensor, format_ in zip(part.inputs, way.reads, strict=True):
                    known = (tensor, format_) in self.conversions or given.get(tensor) == format_
                    if not known and not is_deferred(format_):
                        self.conversions[tensor, format_] = len(self.costs)
                        self.costs.append(conversion_ms(tensor))

    def solved(self) -> tuple[tuple[int, ...], bool]:
        """The index of each part's way, and whether the choice is proven."""
        milp, constraint, bounds, matrix = load_solver()
        entries, lows, highs = self._rows()
        rows, columns, values = (np.array(each) for each in zip(*entries, strict=True))
        shape = (len(lows), len(self.costs))
        integral = np.zeros(len(self.costs), np.int64)
        integral[: self.count] = 1
        with stdout_kept():
            result = milp(
                np.array(self.costs, np.float64) * (SCALE / max(sum(self.costs), 1e-9)),
                integrality=integral,
                bounds=bounds(0, 1),
                constraints=constraint(matrix((values, (rows, columns)), shape=shape), lows, highs),
                options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 0.0},
            )
        if result.x is None:
            return tuple(_fastest(part) for part in self._parts), False
        ways = tuple(
            int(np.argmax(result.x[first : first + len(part.ways)]))
            for first, part in zip(self._first, self._parts, strict=True)
        )
        return ways, result.status == 0

    def _rows(self) -> tuple[list[tuple[int, int, float]], list[float], list[float]]:
        """The constraints as entries (row, column, value), with the least and most of each row."""
        entries: list[tuple[int, int, float]] = []
        lows: list[float] = []
        highs: list[float] = []
        for first, part in zip(self._first, self._parts, strict=True):
            entries += [(len(lows), first + index, 1.0) for index in range(len(part.ways))]
            lows.append(1.0)
            highs.append(1.0)
        if math.isfinite(self._most):
            scale = self._most or max(way.error**2 for part in self._parts for way in part.ways) or 1.0
            entries += [
                (len(lows), first + index, way.error**2 / scale)
                for first, part in zip(self._first, self._parts, strict=True)
                for index, way in enumerate(part.ways)
            ]
            lows.append(0.0)
            highs.append(self._most / scale * (1.0 + TOLERANCE))
        self._leave(entries, lows, highs)
        for (tensor, format_), column in self.conversions.items():
            for first, part in zip(self._first, self._parts, strict=True):
                readers = [
                    first + index
                    for index, way in enumerate(part.ways)
                    if (tensor, format_) in zip(part.inputs, way.reads, strict=True)
                ]
                if not readers:
                    continue
                row = len(lows)  # conversion + ways that give the format - ways that read it >= 0
                entries += [(row, reader, -1.0) for reader in readers]
                entries.append((row, column, 1.0))
                producer = self._producers.get(tensor)
                if producer is not None:
                    ways = self._parts[producer].ways
                    gives = [self._first[producer] + i for i, way in enumerate(ways) if way.gives == format_]
                    entries += [(row, way, 1.0) for way in gives]
                lows.append(0.0)
                highs.append(np.inf)
        return entries, lows, highs

    def _leave(self, entries: list[tuple[int, int, float]], lows: list[float], highs: list[float]) -> None:
        """Constrain that a part is left to another one just where that one computes it."""
        for first, part in zip(self._first, self._parts, strict=True):
            for format_ in {way.gives for way in part.ways if is_deferred(way.gives)}:
                row = len(lows)
                entries += [(row, first + i, 1.0) for i, way in enumerate(part.ways) if way.gives == format_]
                for start, reader in zip(self._first, self._parts, strict=True):
                    entries += [
                        (row, start + i, -1.0)
                        for i, way in enumerate(reader.ways)
                        if (part.output, format_) in zip(reader.inputs, way.reads, strict=True)
                    ]
                lows.append(0.0)
                highs.append(0.0)

    def total(self, ways: Sequence[int]) -> float:
        """Milliseconds of all parts and conversions."""
        chosen = [part.ways[index] for part, index in zip(self._parts, ways, strict=True)]
        formats = dict(self._given)
        formats.update({part.output: way.gives for part, way in zip(self._parts, chosen, strict=True)})
        converted = {
            (tensor, format_)
            for part, way in zip(self._parts, chosen, strict=True)
            for tensor, format_ in zip(part.inputs, way.reads, strict=True)
            if formats[tensor] != format_
        }
        return sum(way.ms for way in chosen) + sum(self.costs[self.conversions[each]] for each in converted)


def _fastest(part: Part) -> int:
    """The index of the fastest way that computes just this part."""

    def rank(index: int) -> tuple[bool, float]:
        way = part.ways[index]
        return any(map(is_deferred, (*way.reads, way.gives))), way.ms

    return min(range(len(part.ways)), key=rank)
