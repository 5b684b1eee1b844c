"""Decides by whole steps what runs by plan: torch's step and the planned one in turns, doubtful passes taken back.

What a pass gains by itself may not reach the step: the host may be what a step waits for, or a cache that was warm in a
measurement is not. So the step is run both ways. Where it gains less than its passes promise, passes that promise least
are taken back while that helps. A step that is not surely faster with plans stays torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs, Side, time_pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.step import Step
from tilewise.problems.base import Problem

__all__ = ["NOTE", "StepGoal", "Swappable"]

NOTE = "taken back: the step is not faster with it"
ROUNDS = 4
"""How often passes are taken back and the step is timed anew."""
EXPLORING_PAIRS = 8
EXPLORING_S = 12.0
"""Seconds for timing steps from which passes are taken back: where steps are long, few choices are tried."""
SHORT_OF = 0.85
SHORT_BY_MS = 0.3
"""A step that gains less than this part of what its passes promise, and by so many milliseconds less, has passes that
are in doubt."""

Key = tuple[Problem, bool]


class Swappable(Protocol):
    """The modules of a model whose passes may run by plan or by torch."""

    def gains(self) -> Mapping[Key, float]:
        """The milliseconds that a step gains by each problem that runs by plan, as measured alone."""
        ...

    def withhold(self, keys: Collection[Key], note: str) -> None:
        """Let torch compute these problems, and no others, although they have plans."""
        ...

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions that let all modules compute as torch does, and as they do now."""
        ...


@dataclass(frozen=True)
class _Tried:
    """A choice of problems to leave to torch, and the times of torch's step and this one.

    Of the pairs that were ``asked`` for, fewer may have been enough.
    """

    withheld: frozenset[Key]
    asked: int
    pairs: Pairs


class StepGoal:
    """Compares ``step`` with the plans of ``modules`` and without them, and keeps what is faster.

    ``note(done, total)`` is called as pairs of steps are timed.
    """

    def __init__(self, step: Step, modules: Swappable, note: Callable[[int, int], object] | None = None) -> None:
        self._step, self._modules, self._note = step, modules, note
        self._done = self._total = 0

    def decide(self, *, own: bool) -> StepReport:
        """Time the step, take back what does not help it, and leave the modules as the fastest step had them.

        Raises what a step of the program's ``own`` raises, with all passes left to torch. Where a step was made up here
        and fails, or runs out of memory, nothing is compared.
        """
        gains = dict(self._modules.gains())
        if not gains:
            return StepReport(reason="no pass runs by plan")
        if any(math.isnan(gain) for gain in gains.values()):
            return StepReport(reason="there are plans that were not chosen by their times")
        try:
            with self._step.repeatable():
                best = self._searched(gains)
        except Exception as error:
            if own and not isinstance(error, torch.OutOfMemoryError):
                self._modules.withhold(gains, NOTE)
                raise
            self._modules.withhold((), NOTE)
            return StepReport(reason=f"the step raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        except BaseException:
            self._modules.withhold((), NOTE)
            raise
        return self._concluded(gains, best)

    def _searched(self, gains: Mapping[Key, float]) -> _Tried:
        """The fastest choice found, timed by enough pairs to be sure."""
        self._total = LEAST_PAIRS
        best = self._timed(frozenset(), LEAST_PAIRS)
        ordered = sorted(gains, key=lambda key: gains[key])
        low, high = 0, len(ordered)  # how many are taken back: all is torch's step
        round_s = 2 * EXPLORING_PAIRS * max(best.pairs.medians) / 1e3
        for _ in range(min(ROUNDS, int(EXPLORING_S / round_s))):
            if high - low < 2 or not self._falls_short(best, gains):
                break
            middle = (low + high) // 2
            tried = self._timed(frozenset(ordered[:middle]), EXPLORING_PAIRS)
            if tried.pairs.speedup[1] > best.pairs.speedup[1]:
                best, low = tried, middle
            else:
                high = middle
        if best.asked < LEAST_PAIRS:
            best = self._timed(best.withheld, LEAST_PAIRS)
        return best

    def _timed(self, withheld: frozenset[Key], pairs: int) -> _Tried:
        """Time torch's step and the one without the plans of ``withheld`` in turns."""
        self._modules.withhold(withheld, NOTE)
        by_torch, by_plans = self._modules.switches()
        self._total = max(self._total, self._done + pairs)
        start = self._done

        def note(done: int, _: int) -> None:
            """Say how many pairs are timed."""
            self._done = start + done
            if self._note is not None:
                self._note(self._done, self._total)

        sides = Side(by_torch, self._step), Side(by_plans, self._step)
        try:
            taken = time_pairs(*sides, self._step.device, pairs, note)
        finally:
            by_plans()
        return _Tried(withheld, pairs, taken)

    @staticmethod
    def _falls_short(tried: _Tried, gains: Mapping[Key, float]) -> bool:
        """Whether the step gains clearly less than its passes promise."""
        torch_ms, planned_ms = tried.pairs.medians
        promised = sum(gain for key, gain in gains.items() if key not in tried.withheld)
        gained = torch_ms - planned_ms
        return gained < SHORT_OF * promised and promised - gained > SHORT_BY_MS

    def _concluded(self, gains: Mapping[Key, float], best: _Tried) -> StepReport:
        """Install the choice, or torch's step where the planned one is not surely faster, and report both."""
        least, speedup, most = best.pairs.speedup
        kept = least > 1.0
        withheld = best.withheld if kept else frozenset(gains)
        self._modules.withhold(withheld, NOTE)
        pairs = best.pairs
        torch_ms, planned_ms = pairs.medians
        host = pairs.host_ms or (None, None)
        device = pairs.device_ms or (None, None)
        return StepReport(
            torch_ms,
            planned_ms,
            speedup,
            least,
            most,
            len(pairs.first_ms),
            host[0],
            host[1],
            device[0],
            device[1],
            sum(gain for key, gain in gains.items() if key not in best.withheld),
            len(withheld),
            kept,
        )
