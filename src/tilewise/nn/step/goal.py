"""Decides by whole steps what runs by plan: torch's step and the planned one in turns, doubtful passes taken back.

What a pass gains by itself may not reach the step: the host may be what a step waits for, or a cache that was warm in a
measurement is not. So the step is run both ways. Where it gains less than its passes promise, passes that promise least
are taken back while that helps (:mod:`.search`). A step that is not surely faster with plans stays torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from tilewise.nn.ranks.steps import ALONE, Ranks, StepFailed
from tilewise.nn.step.modelled import Cost, StepModel
from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs, Side, time_pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import (
    NOTE,
    Asked,
    Key,
    Search,
    Swappable,
    concluded,
    search,
    why_nothing_to_compare,
)
from tilewise.nn.step.step import Step
from tilewise.nn.step.trace import Trace, Traceable, trace_step, why_not_traced

__all__ = ["NOTE", "Modelled", "StepGoal", "Swappable", "is_of_memory", "reason_of"]

ROUNDS = 4
"""How often passes are taken back and the step is timed anew."""
COMPILED_ROUNDS = 1
"""As ``ROUNDS`` for a compiled or captured model: every choice of passes is compiled, or captured, anew."""
EXPLORING_PAIRS = 6
EXPLORING_S = 8.0
"""Seconds for timing steps from which passes are taken back: where steps are long, few choices are tried."""


class Modelled(Traceable, Protocol):
    """Modules whose calls can be told apart in a step, and whose plans have times of host and device."""

    def costs(self) -> Mapping[Key, Cost]:
        """What each plan that runs takes more than torch's choice in one call."""
        ...


class StepGoal:
    """Compares ``step`` with the plans of ``modules`` and without them, and keeps what is faster.

    ``note(done, total)`` is called as pairs of steps are timed. With ``traced``, which are the same modules, the choice
    that a model of the step has made is timed first. All ``ranks`` do this at once: they run the same steps,
    the slowest rank's time counts, and what rank 0 decides holds for all.
    """

    def __init__(
        self,
        step: Step,
        modules: Swappable,
        note: Callable[[int, int], object] | None = None,
        ranks: Ranks = ALONE,
        traced: Modelled | None = None,
    ) -> None:
        self._step, self._modules, self._note, self._ranks = step, modules, note, ranks
        self._traced = traced
        self._done = self._total = 0
        self._withheld: frozenset[Key] | None = None
        self._model: StepModel | None = None

    def decide(self, *, own: bool) -> StepReport:
        """Time the step, take back what does not help it, and leave the modules as the fastest step had them.

        Raises what a step of the program's ``own`` raises, with all passes left to torch, and ``StepFailed`` where it
        raised on another rank. Where a step was made up here and fails, or runs out of memory, nothing is compared.
        Raises ``RankMismatch`` where ranks have plans for different problems.
        """
        gains, reason = self._agreed(self._modules.gains())
        if reason:
            return StepReport(reason=reason)
        try:
            with self._step.repeatable(compiled=True):
                made, withheld = self._searched(gains)
        except Exception as error:
            if own and not is_of_memory(error):
                self._withhold(gains)
                raise
            self._withhold(())
            return StepReport(reason=reason_of(error))
        except BaseException:
            self._withhold(())
            raise
        self._withhold(withheld)
        return made

    def _agreed(self, own: Mapping[Key, float]) -> tuple[dict[Key, float], str]:
        """The gains by rank 0's times, in the order of calls, and why there is nothing to compare."""
        keys = list(own)
        self._ranks.agree("\n".join(map(str, keys)), "what runs by plan in the step")
        gains, reason = self._ranks.first([[own[key] for key in keys], why_nothing_to_compare(own)])
        return dict(zip(keys, gains, strict=True)), reason

    def _searched(self, gains: Mapping[Key, float]) -> tuple[StepReport, frozenset[Key]]:
        """The report of the fastest choice found, timed by enough pairs to be sure, and what it leaves to torch."""
        self._total = LEAST_PAIRS
        keys, pairs = list(gains), None
        self._model = self._modelled()
        searching = self._search(gains) if self._ranks.leads else None
        while True:
            said = self._ranks.first(None if searching is None else self._next(searching, pairs, gains))
            withheld = frozenset(keys[i] for i in said["withheld"])
            if "made" in said:
                return StepReport(**said["made"]), withheld
            pairs = self._timed(Asked(withheld, said["pairs"]))

    def _search(self, gains: Mapping[Key, float]) -> Search[Key]:
        """The search, which begins with what the model of the step has chosen, where there is one."""
        model = self._model
        start = frozenset() if model is None else model.to_withhold()
        if model is None or not start:  # the host is never waited for: every pass reaches the step
            return search(gains, self._rounds_of, EXPLORING_PAIRS)
        return search(
            gains,
            self._rounds_of,
            EXPLORING_PAIRS,
            start,
            lambda withheld: model.torch_ms - model.step_ms(withheld),
        )

    def _modelled(self) -> StepModel | None:
        """The model of the step, from one of torch's that all ranks run; ``None`` where none can be recorded."""
        modules = self._traced
        if self._ranks.any("" if modules is not None and self._step.way == "eager" else "no") or modules is None:
            return None
        if self._ranks.any(why_not_traced()):
            return None
        traces: list[Trace | None] = []

        def record() -> tuple[float, ...]:
            """Record torch's step."""
            traces.append(trace_step(self._step, modules, self._step.device))
            return ()

        by_torch, by_plans = self._modules.switches()
        by_torch()
        try:
            self._ranks.slowest(record)
        finally:
            by_plans()
        return None if traces[0] is None else StepModel(traces[0], modules.costs())

    def _next(self, searching: Search[Key], pairs: Pairs | None, gains: Mapping[Key, float]) -> dict[str, Any]:
        """What the search asks for after ``pairs``, or what it found; problems by their place among ``gains``."""
        places = {key: i for i, key in enumerate(gains)}
        try:
            asked = next(searching) if pairs is None else searching.send(pairs)
        except StopIteration as over:
            made, withheld = concluded(gains, over.value, self._step.way)
            if self._model is not None:
                planned_ms = self._model.step_ms(over.value.withheld)
                made = replace(made, modelled_torch_ms=self._model.torch_ms, modelled_planned_ms=planned_ms)
            return {"made": made.to_json(), "withheld": [places[key] for key in withheld]}
        return {"pairs": asked.pairs, "withheld": [places[key] for key in asked.withheld]}

    def _timed(self, asked: Asked[Key]) -> Pairs:
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
            return time_pairs(*sides, self._step.device, asked.pairs, note, self._ranks)
        finally:
            by_plans()

    def _withhold(self, keys: Iterable[Key]) -> None:
        """Leave these problems to torch, and no others. Layers stay as they are where that is so already."""
        wanted = frozenset(keys)
        if wanted != self._withheld:
            self._modules.withhold(wanted, NOTE)
            self._withheld = wanted

    def _compile(self, sides: Sequence[Side]) -> None:
        """Run each way of a compiled or captured model once: what compiling takes is no time of a step."""
        if self._ranks.any("" if self._step.way == "eager" else self._step.way):
            for side in sides:
                self._ranks.slowest(functools.partial(_run_once, side))

    def _rounds_of(self, pairs: Pairs) -> int:
        """How often passes may be taken back, where a pair of steps takes as long as in ``pairs``."""
        round_s = 2 * EXPLORING_PAIRS * max(pairs.medians) / 1e3
        most = ROUNDS if self._step.way == "eager" else COMPILED_ROUNDS
        return min(most, int(EXPLORING_S / round_s))


def _run_once(side: Side) -> tuple[float, ...]:
    """Run one way once."""
    side.use()
    side.run()
    return ()


def reason_of(error: Exception) -> str:
    """What a step raised, here or on another rank, as a reason why nothing is compared."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, StepFailed) else f"the step raised {type(error).__name__}: {first}"


def is_of_memory(error: Exception) -> bool:
    """Whether a step ran out of memory, here or on another rank."""
    return error.memory if isinstance(error, StepFailed) else isinstance(error, torch.OutOfMemoryError)
