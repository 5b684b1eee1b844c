"""What reports are made of: plain values, measured elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.notation import format_layer
from tilewise.planner.results import BASELINE, Layer, LayerResult, PassResult, Summary, divisions, summarize
from tilewise.problem import ConvProblem

__all__ = [
    "BASELINE",
    "Layer",
    "LayerResult",
    "NetworkTime",
    "PassResult",
    "StepTime",
    "Summary",
    "describe",
    "divisions",
    "summarize",
]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One training step, without the optimizer: medians in ms, peak bytes beyond the model and its input, the loss."""

    forward_ms: float
    backward_ms: float
    peak: int | None
    loss: float

    @property
    def step_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Training steps of a network as the framework runs it and with its layers planned, taken in turns."""

    framework: StepTime
    planned: StepTime
    iterations: int

    @property
    def ratio(self) -> float:
        """How many times faster the planned step is."""
        return self.framework.step_ms / self.planned.step_ms


def describe(problem: ConvProblem) -> str:
    """A problem's layer in benchdnn's notation, or its key where the notation has no text for it."""
    try:
        return format_layer(problem)
    except ValueError:
        return problem.key
