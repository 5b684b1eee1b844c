"""Steps of a program that goes on, computed by torch and by plans in turns: blocks of a few steps, and their times."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tilewise.nn.step.lead import Times, is_by_torch, pairs_of

__all__ = ["Blocks", "Moment", "StepTime", "between", "counted_in_a_block", "moment"]

COUNTED = 2
"""Steps of a block that count, at least: one way of computing keeps on for so long."""
MOST_COUNTED = 8
SAMPLE_MS = 4.0
"""A block takes at least so long: of shorter steps it has more, up to :data:`MOST_COUNTED`."""
SETTLING = (1, 2)
"""Steps after a switch that do not count: calls are looked up anew, and the allocator and benchmark modes settle.

The number is drawn for each block. So what a program does every few steps (an optimizer's step after four backwards,
say) does not always meet the same way of computing.
"""
HURRIED = 6
"""Pairs after which a choice that is surely slower is timed no further."""

Moment = float | torch.cuda.Event
StepTime = tuple[Moment, Moment]
"""When a step began and ended."""


def moment(device: torch.device, clock: Callable[[], float]) -> Moment:
    """This moment: by ``clock``, in seconds, or in the current stream of a GPU.

    On a GPU it is an event. Between two of them in one stream lies the GPU's time where the host is ahead of it, and
    the host's where the GPU waits. So nothing is synchronised at a boundary, and how far the host was ahead when a
    block began or ended makes no difference, as it would by the wall clock.
    """
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(first: Moment, last: Moment) -> float:
    """Milliseconds between two moments of one device. On a GPU it waits for the second."""
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return (last - first) * 1e3
    last.synchronize()
    return float(first.elapsed_time(last))


def counted_in_a_block(ms: Sequence[float]) -> int:
    """How many steps of a block count where steps take these milliseconds.

    >>> counted_in_a_block([40.0]), counted_in_a_block([1.0, 1.1, 9.0])
    (2, 4)
    """
    return max(COUNTED, min(MOST_COUNTED, math.ceil(SAMPLE_MS / max(statistics.median(ms), 1e-3))))


@dataclass
class _Block:
    """Steps in a row that are computed in one way. ``settling`` of them are still to pass before any counts."""

    by_torch: bool
    settling: int
    steps: list[StepTime] = field(default_factory=list)

    def is_done(self) -> bool:
        """Whether nothing has to be waited for."""
        last = self.steps[-1][1]
        return isinstance(last, float) or bool(last.query())


class Blocks:
    """Takes times of both ways until there are ``wanted`` pairs of blocks in which ``counted`` steps count.

    ``switches`` let the next steps be computed by torch and by plans. Plans run at first.
    """

    def __init__(
        self,
        wanted: int,
        counted: int,
        switches: tuple[Callable[[], None], Callable[[], None]],
        draw: random.Random,
    ) -> None:
        self.wanted = wanted
        self._counted, self._switches, self._draw = counted, switches, draw
        self._taken: list[_Block] = []
        self._block: _Block | None = None
        self._by_torch = False

    @property
    def done(self) -> int:
        """How many pairs are complete."""
        return len(self._taken) // 2

    def times(self) -> Times:
        """The milliseconds of the steps of all blocks that are over. On a GPU it waits until they are done."""
        return [[between(*step) for step in block.steps] for block in self._taken]

    def passed(self, step: StepTime | None, number: int = 0) -> bool:
        """A step is over, which is ``None`` where it is not one to compare. Returns whether that was the last needed.

        Plans run from then on. The ``number`` of the next step is of no interest here.
        """
        if self._block is None:
            self._next()
        elif self._block.settling:
            self._block.settling -= 1
        elif step is not None:
            self._block.steps.append(step)
            if len(self._block.steps) >= self._counted:
                self._taken.append(self._block)
                if self._are_enough():
                    self.rest()
                    return True
                self._next()
        return False

    def rest(self) -> None:
        """Let plans run from now on. The block under way begins anew with the next step."""
        self._block = None
        self._use(by_torch=False)

    def _next(self) -> None:
        """Begin the block that is due."""
        by_torch = is_by_torch(len(self._taken))
        settling = self._draw.choice(SETTLING)
        self._block = _Block(by_torch, settling if by_torch is not self._by_torch else settling - 1)
        self._use(by_torch=by_torch)

    def _use(self, *, by_torch: bool) -> None:
        """Let the next steps be computed by torch, or by plans."""
        if by_torch is not self._by_torch:
            self._switches[0 if by_torch else 1]()
            self._by_torch = by_torch

    def _are_enough(self) -> bool:
        """Whether no more blocks are needed."""
        if len(self._taken) % 2:
            return False
        return self.done >= self.wanted or (
            self.done >= HURRIED and self._taken[-1].is_done() and pairs_of(self.times()).speedup[2] < 1.0
        )
