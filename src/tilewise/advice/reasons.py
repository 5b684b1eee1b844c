"""Why some sizes are better than others, in sentences: only what was measured, and the reasons that solvers give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tilewise.advice.axes import alignment
from tilewise.advice.gauge import Tried
from tilewise.advice.points import Part, Point
from tilewise.advice.sweep import Sweep

__all__ = ["reasons"]

SAME = 0.02
"""Rates within so much of each other are called equal."""
CLIFF = 0.12
"""A fall of the rate by more than this share, from one measured size to the next larger one, is a cliff."""
MOST_CLIFFS = 4
WORDS = 200
"""Characters of a solver's reason that are shown."""


def reasons(
    sweep: Sweep, asked: Point, best: Point, fastest: Point, lines: Sequence[tuple[str, list[Point]]], tried: Tried
) -> list[str]:
    """What to say of the ``best`` and the ``fastest`` point beside the ``asked`` one, then of cliffs along ``lines``.

    A line has an axis's name and the points that differ from the asked one in its size alone, in their order.
    """
    said: list[str] = []
    for point in dict.fromkeys([best.sizes, fastest.sizes]):
        chosen = best if point == best.sizes else fastest
        if chosen.sizes != asked.sizes and chosen.ms and asked.ms:
            said.append(_gain(sweep, asked, chosen))
            said += _solvers(sweep, asked, chosen, tried)
    if best.sizes == asked.sizes:
        said.append("nothing that was measured gives more samples a second than what was asked")
    said += itertools.islice(_cliffs(sweep, lines, tried), MOST_CLIFFS)
    return list(dict.fromkeys(said))


def _gain(sweep: Sweep, asked: Point, chosen: Point) -> str:
    """How many more samples a second, and how much of that is less work and how much a higher rate."""
    ratio = chosen.samples_per_second / asked.samples_per_second
    work, rate = chosen.work / asked.work, chosen.rate / asked.rate
    parts = []
    if abs(work - 1) > SAME / 2:
        parts.append(f"a sample is {abs(1 - work):.0%} {'less' if work < 1 else 'more'} work")
    level = "the same" if abs(rate - 1) <= SAME else f"{abs(rate - 1):.0%} {'higher' if rate > 1 else 'lower'}"
    parts.append(f"the rate is {level} ({chosen.rate:.3g} in place of {asked.rate:.3g} TFLOP/s)")
    text = f"{sweep.text(chosen.sizes)}: {ratio:.2f}x the samples a second, as {' and '.join(parts)}"
    even = [
        f"{axis.name} {size} is a multiple of {alignment(size)}, {axis.asked} of {alignment(axis.asked)}"
        for axis, size in zip(sweep.axes, chosen.sizes, strict=True)
        if alignment(size) > alignment(axis.asked)
    ]
    return f"{text}; {', '.join(even)}" if even and rate > 1 + SAME else text


def _solvers(sweep: Sweep, asked: Point, chosen: Point, tried: Tried) -> Iterator[str]:
    """Of parts that are computed by another solver than the asked ones: which, and why not there."""
    for here, there in zip(chosen.parts, asked.parts, strict=True):
        if here.solver and there.solver and here.solver != there.solver:
            lost = _why_not(there, here.solver, tried)
            name = here.problem.task
            text = f"{name}: {here.solver} computes {sweep.text(chosen.sizes)}, {there.solver} what was asked"
            yield f"{text}; there {here.solver} {lost}" if lost else text


def _cliffs(sweep: Sweep, lines: Sequence[tuple[str, list[Point]]], tried: Tried) -> Iterator[str]:
    """Where the rate falls from one measured size to the next larger one, the steepest fall first."""
    falls = [
        (after.rate / before.rate, name, before, after)
        for name, line in lines
        for before, after in itertools.pairwise(line)
        if after.rate < (1 - CLIFF) * before.rate
    ]
    for ratio, name, before, after in sorted(falls, key=lambda fall: fall[0]):
        place = next(i for i, axis in enumerate(sweep.axes) if axis.name == name)
        sizes = f"{name} {before.sizes[place]} to {after.sizes[place]}"
        text = (
            f"cliff at {sizes}: the rate falls by {1 - ratio:.0%}, from {before.rate:.3g} to {after.rate:.3g} TFLOP/s"
        )
        changes = [
            (early, late)
            for early, late in zip(before.parts, after.parts, strict=True)
            if early.solver != late.solver and early.solver and late.solver
        ]
        for early, late in changes:
            lost = _why_not(late, early.solver, tried)
            text += f"; {late.problem.task}: {early.solver}, then {late.solver}"
            text += f", as {early.solver} {lost}" if lost else ""
        yield text


def _why_not(part: Part, solver: str, tried: Tried) -> str:
    """Why ``solver`` does not compute a part: its reason, or its time beside the part's; empty where nothing tells."""
    known = [m for m in tried(part.problem) if m.solver == solver]
    times = [m.time_ms for m in known if not m.reason and m.time_ms is not None]
    if times and part.ms is not None:
        return f"took {min(times):.3g} ms against {part.ms:.3g}" if min(times) > part.ms else ""
    reason = next((m.reason for m in known if m.reason), "")
    return f"says: {reason[:WORDS]}" if reason else ""
