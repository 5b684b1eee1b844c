"""Blocks of steps that lie at fixed numbers: all ranks that count the same steps run each of them in the same way."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable

from tilewise.nn.step.blocks import SETTLING, StepTime, between
from tilewise.nn.step.lead import Times, Trial, is_by_torch

__all__ = ["NumberedBlocks"]


class NumberedBlocks:
    """Takes times of both ways in the blocks of ``trial``, whose steps have numbers from ``trial.begin`` on.

    A rank that comes late, or lets plans run for a while, is back in step with the others at once, since the number
    alone says how a step is computed. The block in which that happens does not count on this rank.
    ``switches`` let the next steps be computed by torch and by plans. Plans run before and after.
    Step ``number`` is the next.
    """

    def __init__(self, trial: Trial, switches: tuple[Callable[[], None], Callable[[], None]], number: int) -> None:
        assert trial.begin is not None
        self._counted, self._switches = trial.counted, switches
        self._begins, self._firsts = [], []
        """The numbers of the first step of each block, and of the first that counts."""
        draw = random.Random(trial.seed)
        self._end, before = trial.begin, False
        for block in range(2 * trial.pairs):
            settling = draw.choice(SETTLING)
            self._begins.append(self._end)
            self._firsts.append(self._end + (settling if is_by_torch(block) is not before else settling - 1))
            self._end, before = self._firsts[-1] + trial.counted, is_by_torch(block)
        self._taken: list[list[StepTime | None]] = [[None] * trial.counted for _ in self._begins]
        self._whole: int | None = None
        """The block under way, where it was run as it should from its beginning."""
        self._by_torch = False
        self.passed(None, number)

    @property
    def done(self) -> int:
        """How many pairs are over."""
        return sum(begin + self._counted <= self._number for begin in self._firsts) // 2

    def passed(self, step: StepTime | None, number: int) -> bool:
        """A step is over, which is ``None`` where it does not count, and step ``number`` is the next.

        Returns whether that was the last one; plans run from then on.
        """
        self._number = number
        if step is not None and self._whole is not None:
            place = number - 1 - self._firsts[self._whole]
            if 0 <= place < self._counted:
                self._taken[self._whole][place] = step
        block = bisect.bisect_right(self._begins, number) - 1
        if block < 0 or number >= self._end:
            self.rest()
            return block >= 0
        if number == self._begins[block]:
            self._whole = block
        elif block != self._whole:
            self._whole = None
        self._use(by_torch=is_by_torch(block))
        return False

    def rest(self) -> None:
        """Let plans run until the next step that :meth:`passed` is told of. The block under way does not count."""
        if self._whole is not None and self._number < self._firsts[self._whole] + self._counted:
            self._taken[self._whole] = [None] * self._counted
        self._whole = None
        self._use(by_torch=False)

    def times(self) -> Times:
        """The milliseconds of the steps of all blocks. On a GPU it waits until they are done."""
        return [[None if step is None else between(*step) for step in block] for block in self._taken]

    def _use(self, *, by_torch: bool) -> None:
        """Let the next steps be computed by torch, or by plans."""
        if by_torch is not self._by_torch:
            self._switches[0 if by_torch else 1]()
            self._by_torch = by_torch
