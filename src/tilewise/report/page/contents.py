"""What a page shows, as plain values that were read from a document and checked."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewise.plan import Measurement, Plan

__all__ = ["Budget", "Layer", "Moment", "Part", "Report", "Segment", "Side", "Step", "Totals", "Training"]


@dataclass(frozen=True, slots=True)
class Part:
    """One pass of a layer, the ``number``-th of the page.

    ``title`` is the layer's name and how many layers are equal to it; ``names`` are all their names. ``text`` is the
    layer in benchdnn's notation. Times are ``None`` where the document has none: those of the device, and those that
    the host needs to launch it. ``busy`` says that other processes kept the host busy while they were taken.
    """

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
    device: str = "cpu"
    framework_host_ms: float | None = None
    planned_host_ms: float | None = None
    busy: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes it, so that the host's times are shown beside the device's."""
        return self.device != "cpu"

    @property
    def ran_ms(self) -> float | None:
        """Time of what runs: the plan's, timed in turns with the framework's, or the framework's where it is left to
        it.
        """
        return self.planned_ms if self.planned_ms is not None or self.replaced else self.framework_ms

    @property
    def plan_ms(self) -> float | None:
        """The time that the plan had when it was made."""
        return self.plan.time_ms if self.plan is not None and math.isfinite(self.plan.time_ms) else None

    @property
    def saved_ms(self) -> float | None:
        """The time that all equal layers save together; negative where they lose."""
        if self.framework_ms is None or self.ran_ms is None:
            return None
        return (self.framework_ms - self.ran_ms) * len(self.names)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its passes; equal layers are one. There are no passes where it is ``left`` to torch unplanned."""

    title: str
    names: tuple[str, ...]
    transposed: bool
    left: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """The document's summary; ``None`` for what the document does not say."""

    passes: int | None
    replaced: int | None
    divided: int | None
    unplanned: int | None
    compared: int | None
    framework_ms: float | None
    planned_ms: float | None
    geometric_mean: float | None
    worst: float | None
    framework_host_ms: float | None = None
    planned_host_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A training step of the framework or of the plan."""

    forward_ms: float | None
    backward_ms: float | None
    step_ms: float | None
    peak: int | None


@dataclass(frozen=True, slots=True)
class Training:
    """Training steps of both sides."""

    iterations: int | None
    ratio: float | None
    framework: Side
    planned: Side


@dataclass(frozen=True, slots=True)
class Segment:
    """One kernel's share of the budget, in bytes."""

    layer: str
    pass_: str
    workspace: int
    time_ms: float | None


@dataclass(frozen=True, slots=True)
class Budget:
    """How the budget was divided, and what the 0-1 program says of itself."""

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
    """Memory in bytes while one kernel runs: what is alive, its result, and its workspace."""

    layer: str
    pass_: str
    alive: int
    result: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.alive + self.result + self.workspace


@dataclass(frozen=True, slots=True)
class Step:
    """Memory in bytes over one training step."""

    limit: int | None
    peak: int | None
    least: int | None
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Report:
    """All that the page shows. ``options`` are pairs (name, text); ``workspace`` is the limit per kernel in bytes."""

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
    def on_gpu(self) -> bool:
        """Whether a GPU computes any pass."""
        return any(part.on_gpu for part in self.parts)

    @functools.cached_property
    def busy(self) -> int:
        """How many layer-passes were timed while other processes kept the host busy."""
        return sum(len(part.names) for part in self.parts if part.busy)

    @functools.cached_property
    def compared(self) -> bool:
        """Whether some pass has both the framework's time and that of what runs."""
        return any(part.saved_ms is not None for part in self.parts)
