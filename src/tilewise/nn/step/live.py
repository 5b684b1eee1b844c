"""Compares the steps of a program that goes on: a few of torch's among the planned ones, and what wins is kept.

The program says where a step may end (:meth:`LiveGoal.boundary`) and what is called in it (:meth:`LiveGoal.called`).
Steps are compared with steps alike: those of the kind that takes most of the time, by what was called and with which
shapes. Nothing is run that the program would not run. So it costs torch's time for some of its steps, and the switches.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import warnings
from collections.abc import Callable, Hashable

import torch

from tilewise.comm.agreement import several_ranks
from tilewise.nn.background.service import service
from tilewise.nn.ranks.post import PostLost
from tilewise.nn.step.blocks import Blocks, StepTime, moment
from tilewise.nn.step.course import Course
from tilewise.nn.step.kinds import Chosen, Kind, UnderWay
from tilewise.nn.step.lead import Anew, Lead, Trial, Verdict
from tilewise.nn.step.leading import lead_of
from tilewise.nn.step.numbered import NumberedBlocks
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import NOTE, Key, Swappable, why_nothing_to_compare
from tilewise.planner.options import first_line

__all__ = ["LiveGoal"]

WITHOUT = 100
"""Steps without gradients, and none with them, until what was planned for training is compared by those."""
MOST_FOREIGN = 4
"""Steps of other kinds in a row, from which on they are an evaluation, say, which is not to run by torch for long."""
MOST_DECISIONS = 8
"""So often new plans are compared with torch's choice."""

_names = itertools.count()
"""By its number a comparison is known to other ranks, whose programs make theirs in the same order."""


class LiveGoal:
    """Decides by real steps which passes of ``modules`` run by plan. Once it is :attr:`over` nothing need be told.

    With ``training``, steps with gradients are compared where there are any. ``decided(report)`` hears of the result.
    Nothing is compared while ``pending()`` problems of the program, or any of another model, are still to be planned.
    Several ranks compare together (:mod:`.leading`).
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
        self._name, self._round = next(_names), 0
        self._step = UnderWay()
        self._draw = random.Random(1)  # of its own: the program's random numbers stay as they are
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
        self._now = Course()

    @property
    def report(self) -> StepReport:
        """The first decision that was made by times, or why there is none, or how far it is."""
        timed = next((made for made in self._decisions if not made.reason), None)
        if timed is not None or self.over:
            return timed or self._decisions[-1]
        if self._unseen:
            return StepReport(reason=f"its steps are not seen: {self._unseen}")
        return StepReport(reason=f"still to be compared{self._now.progress()}", pending=True)

    def called(self, what: Hashable, *, with_gradients: bool) -> None:
        """Something is called in the step under way: steps with the same calls in the same order are alike."""
        self._step.called(what, with_gradients=with_gradients)

    def boundary(self, device: torch.device) -> None:
        """A step on ``device`` is over, and the next has not begun. Where layers may not change now, it goes on."""
        planning = service()
        self._unseen = ""
        if self.over or not planning.is_between_steps((device,)):
            return
        self._step.count()
        if planning.is_planning or self._pending() or not planning.compare(self):
            self.rest()
            return
        try:
            self._boundary(device)
        except PostLost as error:
            self._end(StepReport(reason=str(error)))
        except Exception as error:  # the program must not fail by it
            self._fail(error)

    def _boundary(self, device: torch.device) -> None:
        """A step is over, at a moment when layers may change and nothing is planned."""
        if self._is_new or (self._now.lead is not None and self._now.lead.several is not several_ranks()):
            self._begin_anew()
        if self._now.lead is None and not self._begin():
            return
        kind, step, had_turn = self._step.next(device, moment(device, self._clock), service().turns)
        if step is not None:
            self._take(kind, step, had_turn)
        if self._now.chosen is not None and self._now.blocks is None and self._now.lead is not None:
            self._hear(self._now.lead, self._now.chosen)
        why = self._now.why_given_up()
        if why and not self.over:
            self._end(StepReport(reason=why))

    def disturb(self) -> None:
        """The step under way is not to count: it failed, or something else was done in it."""
        self._step.disturb()

    def rest(self) -> None:
        """Let plans run until the next step: something is planned, captured or compiled. The block begins anew then.

        While a graph is alive layers stay as they are.
        """
        self.disturb()
        if self._now.blocks is not None and service().is_between_steps(()):
            self._now.blocks.rest()

    def stop(self, reason: str) -> None:
        """End without a decision, for ``reason``: plans stay as they were chosen pass by pass."""
        if not self.over:
            self._end(StepReport(reason=reason))

    def unseen(self, why: str) -> None:
        """The steps to come are not seen, for ``why``: plans run in them. Once one is seen after all, it goes on."""
        if not self.over:
            self.disturb()
            if self._now.blocks is not None and not service().has_graph:  # a tracer watches, and sees what runs then
                self._now.blocks.rest()
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
        if self._now.trial is not None:
            self._modules.withhold(self._settled, NOTE)
        if self._kinds:
            self._training = False
        if self._now.lead is not None and self._now.lead.began:
            self._leave("")
        self._now = Course()

    def _begin(self) -> bool:
        """Look at the plans that there are now. Where there is nothing to compare, that is the decision."""
        self._now.gains = {key: gain for key, gain in self._modules.gains().items() if key not in self._known}
        reason = "" if several_ranks() else why_nothing_to_compare(self._now.gains)  # others may have something
        if reason:
            self._end(StepReport(reason=reason))
            return False
        self._now.lead = lead_of(f"{self._name}/{self._round}")
        return True

    def _take(self, kind: Kind, step: StepTime, had_turn: bool) -> None:
        """A step is over: count it where it is one of those that are compared."""
        if not kind.with_gradients and self._is_evaluation():
            return
        self._now.steps += 1
        if kind in self._kinds:
            return
        chosen = self._now.chosen
        if chosen is None:
            self._now.chosen = self._now.observed.take(kind, step)
            if self._now.chosen is not None and self._now.lead is not None:
                self._now.steps = 0
                self._now.lead.begin(self._now.gains, self._now.chosen.counted, self._now.chosen.stretch, self._number)
        elif kind.with_gradients and not chosen.kind.with_gradients and self._training:
            self._begin_anew()  # here is the training that it was planned for
        elif self._now.blocks is not None:
            self._now.foreign = 0 if kind == chosen.kind else self._now.foreign + 1
            if self._now.foreign > MOST_FOREIGN:
                self._now.blocks.rest()
            elif self._now.blocks.passed(step if kind == chosen.kind and not had_turn else None, self._number):
                assert self._now.lead is not None
                self._now.steps = 0
                self._now.lead.timed(self._now.blocks.times(), self._number)
                self._now.blocks = None

    @property
    def _number(self) -> int:
        """The number of the step that is about to begin, among those with or without gradients that are compared."""
        return self._step.numbers[self._now.chosen is None or self._now.chosen.kind.with_gradients]

    def _is_evaluation(self) -> bool:
        """Whether a step without gradients is part of an evaluation in a program that trains, or may do so yet."""
        if self._now.chosen is not None and self._now.chosen.kind.with_gradients:
            self._now.foreign += 1
            if self._now.foreign > MOST_FOREIGN and self._now.blocks is not None:
                self._now.blocks.rest()
            return True
        self._now.without += 1
        return self._training and self._now.without <= WITHOUT

    def _hear(self, lead: Lead, chosen: Chosen) -> None:
        """Do what is to be done next, where that is known, from the step on for which it was said."""
        said = self._now.said or lead.next(self._number)
        if isinstance(said, Anew):
            self._begin_anew()
        elif said is not None and said.begin is not None and self._number < said.begin:
            self._now.said = said
        elif said is not None:
            self._now.said = None
            if isinstance(said, Trial):
                self._ask(said)
            else:
                self._conclude(said, chosen)

    def _ask(self, trial: Trial) -> None:
        """Begin to time a choice of passes."""
        self._now.steps = 0
        self._modules.withhold(trial.withheld | self._settled, NOTE)
        switches, self._now.trial = self._modules.switches(), trial
        if trial.begin is None:
            self._now.blocks = Blocks(trial.pairs, trial.counted, switches, self._draw)
        else:
            self._now.blocks = NumberedBlocks(trial, switches, self._number)

    def _conclude(self, verdict: Verdict, chosen: Chosen) -> None:
        """It is decided, for all ranks alike."""
        if verdict.report.reason:
            self._end(verdict.report)
            return
        if verdict.begin is not None:  # all ranks go on counting from here, if they ever compare again
            self._step.numbers[chosen.kind.with_gradients] = verdict.begin
        self._settled |= verdict.withheld
        self._kinds.add(chosen.kind)
        self._end(verdict.report)
        self._decided(verdict.report)

    def _fail(self, error: Exception) -> None:
        """Compare no more: plans and torch stay where they are now."""
        self._now.blocks = self._now.trial = None
        text = f"comparing raised {type(error).__name__}: {first_line(error)}"
        warnings.warn(f"tilewise: {text}", stacklevel=2)
        self._end(StepReport(reason=text))

    def _end(self, made: StepReport) -> None:
        """It is decided: nothing is timed or switched any more."""
        if self._now.blocks is not None:
            self._now.blocks.rest()
        if self._now.trial is not None:
            self._modules.withhold(self._settled, NOTE)
        self._known |= self._now.gains.keys()
        self._decisions.append(made)
        self._leave(made.reason)
        self._now = Course()
        self.over, self._is_new = True, False
        service().compared(self)

    def _leave(self, reason: str) -> None:
        """Tell other ranks, where they may wait for this one, that it goes on without them, or begins anew."""
        if self._now.lead is not None:
            self._round += self._now.lead.several
            with contextlib.suppress(PostLost):  # then nobody hears of it anyway
                self._now.lead.leave(reason)
