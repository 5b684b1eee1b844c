"""What a page shows: plain values, read from a document and checked."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewise.plan import Measurement, Plan

__all__ = ["Budget", "Layer", "Moment", "Part", "Report", "Segment", "Side", "Step", "Totals", "Training"]


@dataclass(frozen=True, slots=True)
class Part:
    """One pass of a layer, the ``number``-th; ``title`` is the layer's name and how many are equal to it."""

    number: int
    title: str
    names: tuple[str, ...]
    pass_: str
    text: str
    key: str
    flops: int | None
    bytes: int | None
    replaced: bool
    plan: Plan | None
    reason: str
    framework_ms: float | None
    planned_ms: float | None
    ratio: float | None
    front: tuple[Plan, ...] | None
    candidates: tuple[Measurement, ...] | None

    @property
    def ran_ms(self) -> float | None:
        """The time of what runs: the plan's in turns with the framework's, or the latter where it is left to it."""
        return self.planned_ms if self.planned_ms is not None or self.replaced else self.framework_ms

    @property
    def plan_ms(self) -> float | None:
        """The time the plan had when it was made."""
        return self.plan.time_ms if self.plan is not None and math.isfinite(self.plan.time_ms) else None

    @property
    def saved_ms(self) -> float | None:
        """What all equal layers together save; negative where they lose."""
        if self.framework_ms is None or self.ran_ms is None:
            return None
        return (self.framework_ms - self.ran_ms) * len(self.names)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, equal ones being one, and its passes; none where it is ``left`` to torch unplanned."""

    title: str
    names: tuple[str, ...]
    transposed: bool
    left: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """The document's summary; ``None`` for what it does not say."""

    passes: int | None
    replaced: int | None
    divided: int | None
    unplanned: int | None
    compared: int | None
    framework_ms: float | None
    planned_ms: float | None
    geometric_mean: float | None
    worst: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """A training step of one side."""

    forward_ms: float | None
    backward_ms: float | None
    step_ms: float | None
    peak: int | None


@dataclass(frozen=True, slots=True)
class Training:
    """Training steps side by side."""

    iterations: int | None
    ratio: float | None
    framework: Side
    planned: Side


@dataclass(frozen=True, slots=True)
class Segment:
    """What one kernel got of the budget."""

    layer: str
    pass_: str
    workspace: int
    time_ms: float | None


@dataclass(frozen=True, slots=True)
class Budget:
    """How the budget was divided; ``program`` is what the 0-1 program says of itself, in the document's words."""

    policy: str
    total: int | None
    used: int | None
    least: int | None
    segments: tuple[Segment, ...]
    variables: int | None
    rows: int | None
    solve_ms: float | None
    optimal: bool | None
    method: str


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory while one kernel runs: what is alive, its result, its workspace."""

    layer: str
    pass_: str
    alive: int
    result: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.alive + self.result + self.workspace


@dataclass(frozen=True, slots=True)
class Step:
    """Memory over one training step."""

    limit: int | None
    peak: int | None
    least: int | None
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Report:
    """All that the page shows. ``options`` are (name, text) pairs; ``workspace`` is the limit per kernel."""

    target: str
    device: str
    environment: str
    version: str
    options: tuple[tuple[str, str], ...]
    workspace: int | None
    rigor: str
    layers: tuple[Layer, ...]
    totals: Totals | None
    training: Training | None
    budget: Budget | None
    step: Step | None

    @functools.cached_property
    def parts(self) -> list[Part]:
        """Every pass of every layer."""
        return [part for layer in self.layers for part in layer.parts]

    @functools.cached_property
    def compared(self) -> bool:
        """Whether some pass has the framework's time and that of what runs."""
        return any(part.saved_ms is not None for part in self.parts)
