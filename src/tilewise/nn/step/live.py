"""Compares the steps of a program that goes on: a few of torch's among the planned ones, and what wins is kept.

The program says where a step may end (:meth:`LiveGoal.boundary`) and what is called in it (:meth:`LiveGoal.called`).
Steps are compared with steps alike: those of the kind that takes most of the time, by what was called and with which
shapes. Nothing is run that the program would not run. So it costs torch's time for some of its steps, and the switches.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from tilewise.nn.background.service import service
from tilewise.nn.step.blocks import COUNTED, Blocks, Moment, StepTime, between, counted_in_a_block, moment
from tilewise.nn.step.pairs import LEAST_PAIRS
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import (
    NOTE,
    Asked,
    Key,
    Search,
    Swappable,
    Tried,
    concluded,
    search,
    why_nothing_to_compare,
)
from tilewise.planner.options import first_line

__all__ = ["LiveGoal"]

OBSERVED = 6
"""Steps by plans that are looked at before any is compared, to see of which kind most of the time is."""
ROUNDS = 3
"""How often passes are taken back and the steps are timed anew."""
EXPLORING_PAIRS = 6
MOST_STEPS = 400
"""Steps for one choice of passes where two of a block count. Where steps are never alike there is no decision."""
WITHOUT = 100
"""Steps without gradients, and none with them, until what was planned for training is compared by those."""
MOST_FOREIGN = 4
"""Steps of other kinds in a row, from which on they are an evaluation, say, which is not to run by torch for long."""
MOST_DECISIONS = 8
"""So often new plans are compared with torch's choice."""


class Kind(NamedTuple):
    """What makes steps alike: ``calls`` stands for all that was called in it, and in which order."""

    calls: int
    with_gradients: bool


class LiveGoal:
    """Decides by real steps which passes of ``modules`` run by plan. Once it is :attr:`over` nothing need be told.

    With ``training``, steps with gradients are compared where there are any. ``decided(report)`` hears of the result.
    Nothing is compared while ``pending()`` problems of the program, or any of another model, are still to be planned.
    """

    def __init__(
        self,
        modules: Swappable,
        pending: Callable[[], int] = lambda: 0,
        *,
        training: bool = True,
        decided: Callable[[StepReport], object] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.over = False
        """Whether the decision has fallen."""
        self._modules, self._pending, self._training, self._decided = modules, pending, training, decided
        self._clock = clock
        self._draw = random.Random(1)  # of its own: the program's random numbers stay as they are
        self._calls: list[Hashable] = []
        self._with_gradients = False
        self._since: Moment | None = None
        """When the step under way began; ``None`` where it is not to count."""
        self._turns = 0
        self._settled: frozenset[Key] = frozenset()
        """What was taken back by decisions before this one."""
        self._known: frozenset[Key] = frozenset()
        self._kinds: set[Kind] = set()
        """Problems, and kinds of steps, of which it was decided before."""
        self._decisions: list[StepReport] = []
        self._is_new = False
        """Whether there are plans that were not looked at yet."""
        self._unseen = ""
        """Why the steps that follow are not seen; empty where one was seen since."""
        self._start_over()

    @property
    def report(self) -> StepReport:
        """The first decision that was made by times, or why there is none, or how far it is."""
        timed = next((made for made in self._decisions if not made.reason), None)
        if timed is not None or self.over:
            return timed or self._decisions[-1]
        if self._unseen:
            return StepReport(reason=f"its steps are not seen: {self._unseen}")
        if self._blocks is None:
            return StepReport(reason="still to be compared, once all is planned", pending=True)
        done = f"{self._blocks.done} of {self._blocks.wanted} pairs"
        return StepReport(reason=f"still to be compared: {done}", pending=True)

    def called(self, what: Hashable, *, with_gradients: bool) -> None:
        """Something is called in the step under way: steps with the same calls in the same order are alike."""
        self._calls.append(what)
        self._with_gradients = self._with_gradients or with_gradients

    def boundary(self, device: torch.device) -> None:
        """A step on ``device`` is over, and the next has not begun. Where layers may not change now, it goes on."""
        planning = service()
        self._unseen = ""
        if self.over or not planning.is_between_steps((device,)):
            return
        if planning.is_planning or self._pending() or not planning.compare(self):
            self.rest()
            return
        try:
            self._boundary(device)
        except Exception as error:  # the program must not fail by it
            self._fail(error)

    def _boundary(self, device: torch.device) -> None:
        """A step is over, at a moment when layers may change and nothing is planned."""
        if self._is_new:
            self._begin_anew()
        if self._search is None and not self._begin():
            return
        planning = service()
        now, turns = moment(device, self._clock), planning.turns
        kind = Kind(hash((device, *self._calls)), self._with_gradients)
        since, disturbed = self._since, turns != self._turns
        self.disturb()
        self._since, self._turns = now, turns
        if since is not None:
            self._take(kind, (since, now), disturbed)
        if not self.over and self._steps > MOST_STEPS * self._counted // COUNTED:
            done = 0 if self._blocks is None else self._blocks.done
            paired = f"{done} of {LEAST_PAIRS} pairs after {self._steps} steps"
            self._end(StepReport(reason=f"steps are too irregular ({paired})"))

    def disturb(self) -> None:
        """The step under way is not to count: it failed, or something else was done in it."""
        self._since = None
        self._calls.clear()
        self._with_gradients = False

    def rest(self) -> None:
        """Let plans run until the next step: something is planned, captured or compiled. The block begins anew then.

        While a graph is alive layers stay as they are.
        """
        self.disturb()
        if self._blocks is not None and service().is_between_steps(()):
            self._blocks.rest()

    def stop(self, reason: str) -> None:
        """End without a decision, for ``reason``: plans stay as they were chosen pass by pass."""
        if not self.over:
            self._end(StepReport(reason=reason))

    def unseen(self, why: str) -> None:
        """The steps to come are not seen, for ``why``: plans run in them. Once one is seen after all, it goes on."""
        if not self.over:
            self.disturb()
            if self._blocks is not None and not service().has_graph:  # a tracer watches, and sees what runs then
                self._blocks.rest()
            self._unseen = why

    def reopen(self) -> None:
        """There are new plans. Where it was decided before, only these are compared, by steps of kinds not seen yet.

        It begins with the next step: a graph may be alive.
        """
        if len(self._decisions) < MOST_DECISIONS:
            self.disturb()
            self._is_new, self.over = True, False

    def _begin_anew(self) -> None:
        """Compare the plans that there are now, less those of which it was decided before."""
        self._is_new = False
        self.rest()
        if self._blocks is not None:
            self._modules.withhold(self._settled, NOTE)
        if self._kinds:
            self._training = False
        self._start_over()

    def _start_over(self) -> None:
        """Forget what was seen since the last decision."""
        self._gains: dict[Key, float] = {}
        self._search: Search | None = None
        self._seen: dict[Kind, list[StepTime]] = {}
        self._kind: Kind | None = None
        self._steps = self._without = self._foreign = 0
        self._counted = COUNTED
        self._blocks: Blocks | None = None

    def _begin(self) -> bool:
        """Look at the plans that there are now. Where there is nothing to compare, that is the decision."""
        self._gains = {key: gain for key, gain in self._modules.gains().items() if key not in self._known}
        reason = why_nothing_to_compare(self._gains)
        if reason:
            self._end(StepReport(reason=reason))
            return False
        self._search = search(self._gains, lambda _: ROUNDS, EXPLORING_PAIRS)
        return True

    def _take(self, kind: Kind, step: StepTime, disturbed: bool) -> None:
        """A step is over: count it where it is one of those that are compared."""
        if not kind.with_gradients and self._is_evaluation():
            return
        self._steps += 1
        if kind in self._kinds:
            return
        if self._kind is None:
            self._observe(kind, step)
        elif kind.with_gradients and not self._kind.with_gradients and self._training:
            self._begin_anew()  # here is the training that it was planned for
        elif self._blocks is not None:
            self._foreign = 0 if kind == self._kind else self._foreign + 1
            if self._foreign > MOST_FOREIGN:
                self._blocks.rest()
            elif self._blocks.passed(step if kind == self._kind and not disturbed else None):
                self._go_on(self._blocks)

    def _is_evaluation(self) -> bool:
        """Whether a step without gradients is part of an evaluation in a program that trains, or may do so yet."""
        if self._kind is not None and self._kind.with_gradients:
            self._foreign += 1
            if self._foreign > MOST_FOREIGN and self._blocks is not None:
                self._blocks.rest()
            return True
        self._without += 1
        return self._training and self._without <= WITHOUT

    def _observe(self, kind: Kind, step: StepTime) -> None:
        """Look at a step by plans. After enough of them, compare those of the kind that takes most of the time."""
        self._seen.setdefault(kind, []).append(step)
        if sum(map(len, self._seen.values())) < OBSERVED:
            return
        took = {kind: [between(*each) for each in steps] for kind, steps in self._seen.items() if len(steps) > 1}
        self._seen.clear()
        if took:
            self._kind = max(took, key=lambda kind: (kind.with_gradients, sum(took[kind])))
            self._counted = counted_in_a_block(took[self._kind])
            assert self._search is not None
            self._ask(next(self._search))

    def _ask(self, asked: Asked) -> None:
        """Begin to time a choice of passes."""
        self._steps = 0
        self._modules.withhold(asked.withheld | self._settled, NOTE)
        self._blocks = Blocks(asked.pairs, self._counted, self._modules.switches(), self._draw)

    def _go_on(self, blocks: Blocks) -> None:
        """A choice of passes is timed: go on with what the search asks for next, or conclude."""
        assert self._search is not None
        try:
            self._ask(self._search.send(blocks.pairs()))
        except StopIteration as over:
            best: Tried = over.value
            made, withheld = concluded(self._gains, best)
            self._settled |= withheld
            assert self._kind is not None
            self._kinds.add(self._kind)
            self._end(made)
            self._decided(made)

    def _fail(self, error: Exception) -> None:
        """Compare no more: plans and torch stay where they are now."""
        self._blocks = None
        text = f"comparing raised {type(error).__name__}: {first_line(error)}"
        warnings.warn(f"tilewise: {text}", stacklevel=2)
        self._end(StepReport(reason=text))

    def _end(self, made: StepReport) -> None:
        """It is decided: nothing is timed or switched any more."""
        if self._blocks is not None:
            self._blocks.rest()
            self._modules.withhold(self._settled, NOTE)
        self._known |= self._gains.keys()
        self._decisions.append(made)
        self._start_over()
        self.over, self._is_new = True, False
        service().compared(self)
