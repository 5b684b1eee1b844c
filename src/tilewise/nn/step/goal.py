"""Decides by whole steps what runs by plan: torch's step and the planned one in turns, doubtful passes taken back.

What a pass gains by itself may not reach the step: the host may be what a step waits for, or a cache that was warm in a
measurement is not. So the step is run both ways. Where it gains less than its passes promise, passes that promise least
are taken back while that helps (:mod:`.search`). A step that is not surely faster with plans stays torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs, Side, time_pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import NOTE, Asked, Key, Swappable, Tried, concluded, search, why_nothing_to_compare
from tilewise.nn.step.step import Step

__all__ = ["NOTE", "StepGoal", "Swappable"]

ROUNDS = 4
"""How often passes are taken back and the step is timed anew."""
COMPILED_ROUNDS = 1
"""As ``ROUNDS`` for a compiled model, which every choice of passes compiles anew."""
EXPLORING_PAIRS = 6
EXPLORING_S = 8.0
"""Seconds for timing steps from which passes are taken back: where steps are long, few choices are tried."""


class StepGoal:
    """Compares ``step`` with the plans of ``modules`` and without them, and keeps what is faster.

    ``note(done, total)`` is called as pairs of steps are timed.
    """

    def __init__(self, step: Step, modules: Swappable, note: Callable[[int, int], object] | None = None) -> None:
        self._step, self._modules, self._note = step, modules, note
        self._done = self._total = 0
        self._withheld: frozenset[Key] | None = None

    def decide(self, *, own: bool) -> StepReport:
        """Time the step, take back what does not help it, and leave the modules as the fastest step had them.

        Raises what a step of the program's ``own`` raises, with all passes left to torch. Where a step was made up here
        and fails, or runs out of memory, nothing is compared.
        """
        gains = dict(self._modules.gains())
        reason = why_nothing_to_compare(gains)
        if reason:
            return StepReport(reason=reason)
        try:
            with self._step.repeatable(compiled=True):
                best = self._searched(gains)
        except Exception as error:
            if own and not isinstance(error, torch.OutOfMemoryError):
                self._withhold(gains)
                raise
            self._withhold(())
            return StepReport(reason=f"the step raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        except BaseException:
            self._withhold(())
            raise
        made, withheld = concluded(gains, best, self._step.way)
        self._withhold(withheld)
        return made

    def _searched(self, gains: Mapping[Key, float]) -> Tried:
        """The fastest choice found, timed by enough pairs to be sure."""
        self._total = LEAST_PAIRS
        searching = search(gains, self._rounds_of, EXPLORING_PAIRS)
        asked = next(searching)
        while True:
            try:
                asked = searching.send(self._timed(asked))
            except StopIteration as over:
                best: Tried = over.value
                return best

    def _timed(self, asked: Asked) -> Pairs:
        """Time torch's step and the one that is ``asked`` for in turns."""
        self._withhold(asked.withheld)
        by_torch, by_plans = self._modules.switches()
        self._total = max(self._total, self._done + asked.pairs)
        start = self._done

        def note(done: int, _: int) -> None:
            """Say how many pairs are timed."""
            self._done = start + done
            if self._note is not None:
                self._note(self._done, self._total)

        sides = Side(by_torch, self._step), Side(by_plans, self._step)
        try:
            self._compile(sides)
            return time_pairs(*sides, self._step.device, asked.pairs, note)
        finally:
            by_plans()

    def _withhold(self, keys: Iterable[Key]) -> None:
        """Leave these problems to torch, and no others. Layers stay as they are where that is so already."""
        wanted = frozenset(keys)
        if wanted != self._withheld:
            self._modules.withhold(wanted, NOTE)
            self._withheld = wanted

    def _compile(self, sides: Sequence[Side]) -> None:
        """Run each way of a compiled model once: what compiling takes is no time of a step."""
        if self._step.way == "compiled":
            for side in sides:
                side.use()
                side.run()

    def _rounds_of(self, pairs: Pairs) -> int:
        """How often passes may be taken back, where a pair of steps takes as long as in ``pairs``."""
        round_s = 2 * EXPLORING_PAIRS * max(pairs.medians) / 1e3
        most = COMPILED_ROUNDS if self._step.way == "compiled" else ROUNDS
        return min(most, int(EXPLORING_S / round_s))
