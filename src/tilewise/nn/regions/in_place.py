"""What the ways of a region's parts take where they run: after the parts before them, with caches as these leave them.

Plans are measured one by one over cold caches, which says little of a layer that takes a tenth of a millisecond within
a network whose filters stay in cache. So whole programs are run and each step is timed. One program times one way of
every part at once: there are as many programs as a layer has ways, not as many as there are combinations. Plans of
several layers at once are timed in programs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from tilewise.machine.turns import pause
from tilewise.nn.programs.program import Program
from tilewise.nn.regions.layouts import Way, is_deferred
from tilewise.nn.regions.units import PRODUCT, Unit, formats, value_of
from tilewise.planner import Progress

__all__ = ["Built", "plain_ways", "steps_in_place", "timed_in_place"]

MOST_PROGRAMS = 5
"""Programs of one layout at the most: of a layer with more ways, those that should be fastest are timed."""
PASSES = 3
"""How often all programs are timed, one after the other: what slows one down for a second slows others at another time.
The least median of the passes counts."""
ROUNDS_MS, LEAST_ROUNDS, MOST_ROUNDS = 150.0, 3, 11
"""In each pass a program is run for so many milliseconds, so often at least and at the most."""
HELD_BYTES = 1 << 30
"""Programs that take more together are timed in one pass, each let go before the next is made."""
NEAR = 1.25
"""Then the two best ways of each part are timed once more, where the second takes at most so many times the first: a
second in which the machine was slow must not cost a program's ways their place."""

Built = Callable[[Sequence[Sequence[int]]], tuple[Program, Sequence[int], Sequence[int]]]
"""``built(allowed)``, with the indices of the ways that each part may take: a program, the way that each part takes in
it, and the number of each part's step, -1 for a part without one."""


def timed_in_place(
    units: Sequence[Unit],
    ways: Sequence[tuple[Way, ...]],
    tensors: Sequence[Tensor],
    built: Built,
    tell: Progress | None = None,
) -> list[tuple[Way, ...]]:
    """The ways with the times that they take in programs of such parts; a way in no program keeps its time.

    ``tell`` hears how many programs are timed.
    """
    found: dict[tuple[int, int], float] = {}
    trials = [*_trials(units, ways), *_of_several(units, ways)]
    held: list[_Timed] = []
    count = len(trials)
    for done, allowed in enumerate(trials):
        if tell is not None:
            tell(done, count, "")
        fixed = {(part, each[0]) for part, each in enumerate(allowed) if units[part].kind == PRODUCT}
        if fixed <= found.keys():
            continue
        timed = _Timed(*built(allowed))
        timed.into(found, tensors)
        if timed.nbytes * len(trials) <= HELD_BYTES:
            held.append(timed)
    for _ in range(PASSES - 1):
        for timed in held:
            timed.into(found, tensors)
    if not held and count:
        for done, allowed in enumerate(_best_again(units, _with_times(ways, found)), count):
            if tell is not None:
                tell(done, count + 2, "")
            _Timed(*built(allowed)).into(found, tensors)
    return _with_times(ways, found)


def _with_times(ways: Sequence[tuple[Way, ...]], found: Mapping[tuple[int, int], float]) -> list[tuple[Way, ...]]:
    """The ways with the times that were ``found``, by part and index."""
    return [
        tuple(replace(way, ms=found.get((part, index), way.ms)) for index, way in enumerate(each))
        for part, each in enumerate(ways)
    ]


def _best_again(units: Sequence[Unit], ways: Sequence[tuple[Way, ...]]) -> Iterator[list[Sequence[int]]]:
    """The ways that parts may take in two programs: the best of each product, and the second best in its format.

    Where there is none that is :data:`NEAR`, that is the best again.
    """
    options = [
        _near(each) if unit.kind == PRODUCT else _in_layout(unit, each, -1)
        for unit, each in zip(units, ways, strict=True)
    ]
    for number in (0, 1):
        yield [
            [each[min(number, len(each) - 1)]] if unit.kind == PRODUCT else each
            for unit, each in zip(units, options, strict=True)
        ]


def _near(ways: Sequence[Way]) -> list[int]:
    """The index of the fastest way that computes its part alone, and of those in its formats that are near."""
    best, *others = sorted(plain_ways(ways) or range(len(ways)), key=lambda index: ways[index].ms)
    alike = (ways[best].reads, ways[best].gives)
    return [
        best,
        *(i for i in others if (ways[i].reads, ways[i].gives) == alike and ways[i].ms <= NEAR * ways[best].ms),
    ]


def steps_in_place(program: Program, tensors: Sequence[Tensor]) -> list[float]:
    """What each step of one program takes in its place, in milliseconds: the least median of :data:`PASSES` passes."""
    rounds = _rounds(program, tensors)
    passes = [program.step_ms(tensors, rounds) for _ in range(PASSES)]
    return [min(each) for each in zip(*passes, strict=True)]


def _rounds(program: Program, tensors: Sequence[Tensor]) -> int:
    """How often a program is run in one pass."""
    once = sum(program.step_ms(tensors, 1))
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(ROUNDS_MS / max(once, 1e-3))))


class _Timed:
    """A program, the way that each part takes in it, and the number of each part's step."""

    def __init__(self, program: Program, taken: Sequence[int], steps: Sequence[int]) -> None:
        self._program, self._taken, self._steps = program, taken, steps
        self._rounds = 0

    @property
    def nbytes(self) -> int:
        """Roughly the bytes that it holds: its constants, as given and as plans keep them, and its arena."""
        constants = sum(slot.nbytes for slot in self._program.slots if slot.tensor is not None)
        return 3 * constants + self._program.arena_bytes

    def into(self, found: dict[tuple[int, int], float], tensors: Sequence[Tensor]) -> None:
        """Time it, and put the time of each part's way into ``found`` where it is the least."""
        pause()
        if not self._rounds:
            self._rounds = _rounds(self._program, tensors)
        times = self._program.step_ms(tensors, self._rounds)
        for part, (way, step) in enumerate(zip(self._taken, self._steps, strict=True)):
            if step >= 0:
                found[part, way] = min(times[step], found.get((part, way), times[step]))


def _trials(units: Sequence[Unit], ways: Sequence[tuple[Way, ...]]) -> Iterator[list[Sequence[int]]]:
    """For each layout the ways that parts may take in each program: a product one, all others any."""
    for layout in (-1, 0):
        options = [_in_layout(unit, each, layout) for unit, each in zip(units, ways, strict=True)]
        products = [each for unit, each in zip(units, options, strict=True) if unit.kind == PRODUCT]
        for number in range(min(MOST_PROGRAMS, max(map(len, products), default=0))):
            yield [
                [each[min(number, len(each) - 1)]] if unit.kind == PRODUCT else each
                for unit, each in zip(units, options, strict=True)
            ]


def _of_several(units: Sequence[Unit], ways: Sequence[tuple[Way, ...]]) -> Iterator[list[Sequence[int]]]:
    """The ways that parts may take in programs where one plan computes several: each such plan is in one of them."""
    producers = {unit.node: part for part, unit in enumerate(units)}
    plain = [_in_layout(unit, each, -1) for unit, each in zip(units, ways, strict=True)]
    left = [
        (rank, part, index)
        for part, each in enumerate(ways)
        for rank, index in enumerate(sorted(_last_of_several(each), key=lambda index: each[index].ms))
    ]
    for _ in range(MOST_PROGRAMS):
        taken: dict[int, int] = {}
        for entry in sorted(left):
            _, part, index = entry
            chain = {part: index}
            while is_deferred(format_ := ways[part][index].reads[0]):
                part = producers[units[part].inputs[0]]
                index = next(i for i, way in enumerate(ways[part]) if way.gives == format_)
                chain[part] = index
            if not chain.keys() & taken.keys():
                taken |= chain
                left.remove(entry)
        if not taken:
            return
        yield [
            [taken[part]] if part in taken else each[:1] if unit.kind == PRODUCT else each
            for part, (unit, each) in enumerate(zip(units, plain, strict=True))
        ]


def _last_of_several(ways: Sequence[Way]) -> list[int]:
    """The indices of those ways that compute parts before as well."""
    return [i for i, way in enumerate(ways) if any(map(is_deferred, way.reads)) and not is_deferred(way.gives)]


def plain_ways(ways: Sequence[Way]) -> list[int]:
    """The indices of the ways that compute their part alone."""
    return [i for i, way in enumerate(ways) if not any(map(is_deferred, (*way.reads, way.gives)))]


def _in_layout(unit: Unit, ways: Sequence[Way], layout: int) -> list[int]:
    """The indices of a part's ways, fastest first; of a product those that read this one of its formats, if any do.

    Ways that compute other parts as well, or leave this one to another, are not among them.
    """
    order = sorted(plain_ways(ways), key=lambda index: ways[index].ms)
    if unit.kind != PRODUCT:
        return order
    wanted = formats(value_of(unit.inputs[0]).shape)[layout]
    return [index for index in order if ways[index].reads[0] == wanted] or order
