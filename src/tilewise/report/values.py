"""Values that reports are made of, measured elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.nn.step.result import StepReport
from tilewise.planner.schedules.results import (
    Layer,
    LayerResult,
    PassResult,
    RunTimes,
    Summary,
    divisions,
    is_left,
    summarize,
)
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of

__all__ = [
    "Layer",
    "LayerResult",
    "NetworkTime",
    "PassResult",
    "RunTimes",
    "StepTime",
    "Summary",
    "describe",
    "divisions",
    "is_left",
    "summarize",
]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One training step without the optimizer.

    ``forward_ms`` and ``backward_ms`` are medians; ``peak`` is in bytes beyond the model and its input, ``None`` where
    unknown.
    """

    forward_ms: float
    backward_ms: float
    peak: int | None
    loss: float

    @property
    def step_ms(self) -> float:
        """Time of forward and backward together."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Training steps of a network as the framework runs it and as planned, timed in turns.

    ``compared`` says what became of the whole step, where passes were chosen by it, and ``taken_back`` which of them
    run by torch for its sake although their plans are faster by themselves.
    """

    framework: StepTime
    planned: StepTime
    iterations: int
    compared: StepReport | None = None
    taken_back: frozenset[Problem] = frozenset()

    @property
    def ratio(self) -> float:
        """How many times faster the planned step is."""
        return self.framework.step_ms / self.planned.step_ms


def describe(problem: Problem) -> str:
    """A problem's layer as users write it, or its key where there is no text for it."""
    return kind_of(problem).notation(problem) or problem.key
