"""Kinds of steps of a program that goes on: only steps alike are compared, of the kind that takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch

from tilewise.nn.step.blocks import Moment, StepTime, between, counted_in_a_block

__all__ = ["Chosen", "Kind", "Observed", "UnderWay"]

OBSERVED = 6
"""Steps by plans that are looked at before any is compared, to see of which kind most of the time is."""


class Kind(NamedTuple):
    """What makes steps alike: ``calls`` stands for all that was called in it, and in which order."""

    calls: int
    with_gradients: bool


class Chosen(NamedTuple):
    """The ``kind`` of steps that is compared: ``counted`` of them in a block, which are one of every ``stretch``."""

    kind: Kind
    counted: int
    stretch: int


class Observed:
    """The first steps of a program."""

    def __init__(self) -> None:
        self._seen: dict[Kind, list[StepTime]] = {}

    def take(self, kind: Kind, step: StepTime) -> Chosen | None:
        """Look at a step. After enough of them, the kind that takes most of the time, where any came twice."""
        self._seen.setdefault(kind, []).append(step)
        seen = sum(map(len, self._seen.values()))
        if seen < OBSERVED:
            return None
        took = {kind: [between(*each) for each in steps] for kind, steps in self._seen.items() if len(steps) > 1}
        self._seen.clear()
        if not took:
            return None
        longest = max(took, key=lambda kind: (kind.with_gradients, sum(took[kind])))
        return Chosen(longest, counted_in_a_block(took[longest]), math.ceil(seen / len(took[longest])))


class UnderWay:
    """The step under way: what is called in it, and since when; and how many steps are over."""

    def __init__(self) -> None:
        self.numbers = {True: 0, False: 0}
        """How many steps are over, with gradients and without."""
        self._since: Moment | None = None
        self._calls: list[Hashable] = []
        self._with_gradients = False
        self._turns = 0

    def called(self, what: Hashable, *, with_gradients: bool) -> None:
        """Something is called in it."""
        self._calls.append(what)
        self._with_gradients = self._with_gradients or with_gradients

    def count(self) -> None:
        """It is over."""
        if self._calls:
            self.numbers[self._with_gradients] += 1

    def disturb(self) -> None:
        """It is not to count."""
        self._since = None
        self._calls.clear()
        self._with_gradients = False

    def next(self, device: torch.device, now: Moment, turns: int) -> tuple[Kind, StepTime | None, bool]:
        """The next one begins ``now``, after so many ``turns`` of planning.

        Returns the kind of the one before, its times where it is to count, and whether there was a turn in it.
        """
        kind = Kind(hash((device, *self._calls)), self._with_gradients)
        times = None if self._since is None else (self._since, now)
        had_turn = turns != self._turns
        self.disturb()
        self._since, self._turns = now, turns
        return kind, times, had_turn
