"""What is done next with the steps of a program that goes on: which of them are timed, and what is decided by them.

A program of one process leads itself (:class:`Alone`). Of several ranks rank 0 leads (:mod:`.leading`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewise.nn.step.pairs import Pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import Asked, Key, Search, concluded, search

__all__ = [
    "EXPLORING_PAIRS",
    "ROUNDS",
    "Alone",
    "Anew",
    "Lead",
    "Said",
    "Times",
    "Trial",
    "Verdict",
    "is_by_torch",
    "pairs_of",
]

ROUNDS = 3
"""How often passes are taken back and the steps are timed anew."""
EXPLORING_PAIRS = 6

Times = Sequence[Sequence[float | None]]
"""The milliseconds of the steps of each block, in the order of blocks; ``None`` for a step that does not count."""


@dataclass(frozen=True)
class Trial:
    """Steps to time: torch's and those with the plans of ``withheld`` taken back, ``pairs`` of blocks in turns.

    Of the ``wanted`` pairs for this choice ``before`` are there already. In a block ``counted`` steps count. The first
    block begins with step number ``begin``, or with the next one for ``None``. All ranks that draw the lengths of
    blocks from ``seed`` draw the same.
    """

    withheld: frozenset[Key]
    pairs: int
    counted: int
    before: int
    wanted: int
    begin: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Verdict:
    """What was decided, and what torch computes from step number ``begin`` on, or from the next one for ``None``.

    Without times ``report`` has the reason, and what was withheld before stays so.
    """

    report: StepReport
    withheld: frozenset[Key]
    begin: int | None = None


@dataclass(frozen=True)
class Anew:
    """Some rank has new plans, or other steps: all begin anew."""


Said = Trial | Verdict | Anew


class Lead(Protocol):
    """Says what is done next. ``number`` is always that of the step that is about to begin."""

    several: bool
    """Whether there are other ranks."""
    patience: int
    """For how many times as many steps as usual it may say nothing."""

    @property
    def began(self) -> bool:
        """Whether other ranks may have heard of this one."""
        ...

    def begin(self, gains: Mapping[Key, float], counted: int, stretch: int, number: int) -> None:
        """Begin with the plans that there are. ``counted`` steps of a block are to count, one of every ``stretch``."""
        ...

    def next(self, number: int) -> Said | None:
        """What is to be done next; ``None`` while that is not known."""
        ...

    def timed(self, times: Times, number: int) -> None:
        """The steps that were asked for last took these ``times``."""
        ...

    def leave(self, reason: str) -> None:
        """Go on without this one: for ``reason``, or to begin anew where it is empty. Nothing where all is said."""
        ...

    def waits_for(self) -> str:
        """What it waits for, in words."""
        ...


class Alone:
    """Leads the one process of a program that has no others."""

    several, patience, began = False, 1, False

    def __init__(self) -> None:
        self._gains: Mapping[Key, float] = {}
        self._search: Search[Key] | None = None
        self._counted = 0
        self._said: Said | None = None

    def begin(self, gains: Mapping[Key, float], counted: int, stretch: int, number: int) -> None:
        """As :meth:`Lead.begin`."""
        self._gains, self._counted = gains, counted
        self._search = search(gains, lambda _: ROUNDS, EXPLORING_PAIRS)
        self._said = self._trial(next(self._search))

    def next(self, number: int) -> Said | None:
        """As :meth:`Lead.next`."""
        said, self._said = self._said, None
        return said

    def timed(self, times: Times, number: int) -> None:
        """As :meth:`Lead.timed`."""
        assert self._search is not None
        try:
            self._said = self._trial(self._search.send(pairs_of(times)))
        except StopIteration as over:
            self._said = Verdict(*concluded(self._gains, over.value))

    def leave(self, reason: str) -> None:
        """As :meth:`Lead.leave`."""

    def waits_for(self) -> str:
        """As :meth:`Lead.waits_for`."""
        return "nothing"

    def _trial(self, asked: Asked[Key]) -> Trial:
        """The trial of what the search asks for."""
        return Trial(asked.withheld, asked.pairs, self._counted, 0, asked.pairs)


def is_by_torch(block: int) -> bool:
    """Whether torch computes the steps of a block with this number.

    A block of torch's comes first, then two by plans, two by torch, and so on, so that a drift of clocks or load meets
    both.

    >>> [is_by_torch(block) for block in range(6)]
    [True, False, False, True, True, False]
    """
    return block % 4 in (0, 3)


def pairs_of(times: Times, least: int = 1) -> Pairs:
    """The means of each two blocks one after the other in both of which ``least`` steps count.

    >>> pairs_of([[2.0, 2.0], [1.0, 1.0], [1.0, None], [3.0, 3.0], [None, None], [1.0, 1.0]])
    Pairs(first_ms=(2.0, 3.0), second_ms=(1.0, 1.0), host_ms=None, device_ms=None)
    """
    torchs, planned = [], []
    for block in range(0, len(times) - 1, 2):
        counted = [[ms for ms in steps if ms is not None] for steps in times[block : block + 2]]
        if min(map(len, counted)) >= least:
            first, second = map(_mean, counted)
            torchs.append(first if is_by_torch(block) else second)
            planned.append(second if is_by_torch(block) else first)
    return Pairs(tuple(torchs), tuple(planned))


def _mean(values: Sequence[float]) -> float:
    """The mean of some values."""
    return statistics.mean(values)
