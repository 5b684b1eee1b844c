"""What a page shows, as plain values that were read from a document and checked."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewise.plan import Measurement, Plan

__all__ = ["Budget", "Compared", "Layer", "Moment", "Part", "Report", "Segment", "Side", "Step", "Totals", "Training"]


LEAST_NOISE = 0.03
"""A gain or loss below this share of a time is shown as noise, even where single runs lie closer together."""


@dataclass(frozen=True)
class Part:
    """One pass of a layer, the ``number``-th of the page.

    ``title`` is the layer's name and how many layers are equal to it; ``names`` are all their names. ``text`` is the
    layer in benchdnn's notation. Times are ``None`` where the document has none: those of the device, and those that
    the host needs to launch it. ``busy`` says that other processes kept the host busy while they were taken,
    ``taken_back`` that the step runs it by torch although it has a plan.
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
    taken_back: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes it, so that the host's times are shown beside the device's."""
        return self.device != "cpu"

    @property
    def ran_ms(self) -> float | None:
        """Time of what runs: the plan's, timed in turns with the framework's, or the framework's where it is left to
        it. Without a plan nothing runs within the limits, and there is no time.
        """
        if self.plan is None:
            return None
        return self.planned_ms if self.planned_ms is not None or self.replaced else self.framework_ms

    @property
    def plan_ms(self) -> float | None:
        """The time that the plan had when it was made."""
        return self.plan.time_ms if self.plan is not None and math.isfinite(self.plan.time_ms) else None

    @property
    def time_ms(self) -> float | None:
        """The time that the page gives the pass everywhere: what runs, as timed in turns with the framework, or else
        as it was when the plan was made.
        """
        return self.plan_ms if self.ran_ms is None else self.ran_ms

    @property
    def all_ms(self) -> float:
        """:attr:`time_ms` of all equal layers together; 0 where it is not known."""
        return (self.time_ms or 0.0) * len(self.names)

    @functools.cached_property
    def tried(self) -> Measurement | None:
        """What was measured of the chosen plan, where the document says what was tried."""
        plan = self.plan
        if plan is None:
            return None
        found = (m for m in self.candidates or () if not m.reason and m.time_ms is not None)
        return next((m for m in found if (m.solver, m.config) == (plan.solver, plan.config)), None)

    @property
    def spread(self) -> float | None:
        """How far the times of single runs of the plan lie apart: their interquartile range over their median."""
        return None if self.tried is None else self.tried.dispersion

    @property
    def noise(self) -> float:
        """The share of its time that a pass must gain or lose for that to be more than noise."""
        return max(LEAST_NOISE, self.spread or 0.0)

    @property
    def gains(self) -> int:
        """1 where the pass gains more than noise, -1 where it loses more, and 0 where it is about equal."""
        if self.ratio is None or abs(self.ratio - 1) < self.noise:
            return 0
        return 1 if self.ratio > 1 else -1

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
class Compared:
    """Whole steps of both sides in pairs, by which passes were chosen: the speed-up with its 95 % interval.

    Times are those of the ``host``, which launches, and of the ``device``, of torch's step and of the planned one.
    ``kept`` says whether plans run; if not, all of the step is torch's.
    """

    speedup: float | None
    least: float | None
    most: float | None
    pairs: int | None
    host: tuple[float | None, float | None]
    device: tuple[float | None, float | None]
    kept: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Training:
    """Training steps of both sides, and how passes were chosen by them."""

    iterations: int | None
    framework: Side
    planned: Side
    compared: Compared | None

    @property
    def ratio(self) -> float | None:
        """How many times faster the planned step is."""
        planned, framework = self.planned.step_ms, self.framework.step_ms
        return framework / planned if framework is not None and planned else None


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


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to reach: bytes a second of a copy, operations a second of a matrix product."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Report:
    """All that the page shows. ``options`` are pairs (name, text); ``workspace`` is the limit per kernel in bytes.

    ``in_turns`` says that both sides were timed in turns, not each when it was measured.
    """

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
    in_turns: bool = True
    rates: Rates | None = None

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
    def doubtful(self) -> bool:
        """Whether most layer-passes with a time were timed while other processes kept the host busy."""
        timed = sum(len(p.names) for p in self.parts if p.time_ms is not None or p.framework_ms is not None)
        return 2 * self.busy > timed

    @functools.cached_property
    def divided(self) -> list[Part]:
        """Every pass whose plan divides it."""
        return [part for part in self.parts if part.plan is not None and not part.plan.leaf]

    @functools.cached_property
    def convolutions(self) -> str:
        """What all passes of the document are, in a word."""
        known = all(part.pass_ in ("fprop", "dgrad", "wgrad") for part in self.parts)
        return "convolutions" if known else "planned layers"

    @functools.cached_property
    def compared(self) -> bool:
        """Whether some pass has both the framework's time and that of what runs."""
        return any(part.saved_ms is not None for part in self.parts)
