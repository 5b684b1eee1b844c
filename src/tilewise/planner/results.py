"""What planning came to, by layer and pass: plain values that reports and schedules are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilewise.plan import Measurement, Plan
from tilewise.problem import ConvProblem

__all__ = ["BASELINE", "Layer", "LayerResult", "PassResult", "Summary", "divisions", "summarize", "with_times"]

BASELINE = "aten"
"""Name of the solver that is the framework's own choice: a root plan of it leaves the layer to torch."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution layer and the problems of its passes.

    Equal layers of a network are one, under the ``names`` of all. ``left`` says why tilewise leaves the layer to torch
    unplanned; its ``problems`` are then empty. ``transposed`` layers compute DGRAD in their forward.
    """

    names: tuple[str, ...]
    problems: tuple[ConvProblem, ...]
    transposed: bool = False
    left: str = ""

    @property
    def title(self) -> str:
        """Its name, with how many further ones are equal to it."""
        return self.names[0] + (f" x{len(self.names)}" if len(self.names) > 1 else "")


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass of a layer: its plan, or the ``reason`` there is none; and both times where they were measured.

    ``framework_ms`` and ``planned_ms`` are medians taken in turns in one run. ``front`` holds the desirable plans,
    fastest first, and ``candidates`` what was tried; ``None`` where nobody asked.
    """

    problem: ConvProblem
    plan: Plan | None = None
    reason: str = ""
    framework_ms: float | None = None
    planned_ms: float | None = None
    front: tuple[Plan, ...] | None = None
    candidates: tuple[Measurement, ...] | None = None

    @property
    def replaced(self) -> bool:
        """Whether the plan takes the place of torch's own choice."""
        return self.plan is not None and self.plan.solver != BASELINE

    @property
    def ratio(self) -> float | None:
        """How many times faster than the framework: 1 where the layer is left to it; ``None`` where not known."""
        if self.plan is None:
            return None
        if not self.replaced:
            return 1.0
        if self.framework_ms is None or self.planned_ms is None:
            return None
        return self.framework_ms / self.planned_ms


def with_times(found: PassResult, framework_ms: float | None) -> PassResult:
    """``found`` with torch's time and its plan's own, both as measured while planning."""
    if framework_ms is None or found.plan is None:
        return found
    planned = found.plan.time_ms if found.replaced and math.isfinite(found.plan.time_ms) else None
    return replace(found, framework_ms=framework_ms, planned_ms=planned)


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A layer and what came of each of its passes; of none where the layer is left to torch unplanned."""

    layer: Layer
    passes: tuple[PassResult, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Layer-passes of a network taken together; a layer that occurs n times counts n times.

    ``geometric_mean`` and ``worst`` are over the ``compared`` layer-passes, those with a time on both sides, of which
    the ones left to torch count 1.00; ``None`` where nothing was timed. So are the sums of times.
    """

    passes: int
    replaced: int
    divided: int
    unplanned: int
    compared: int
    framework_ms: float | None
    planned_ms: float | None
    geometric_mean: float | None
    worst: float | None

    @property
    def share_replaced(self) -> float:
        """Replaced layer-passes of all."""
        return self.replaced / self.passes if self.passes else 0.0


def summarize(results: Iterable[LayerResult]) -> Summary:
    """Totals of ``results``."""
    every = [found for result in results for _ in result.layer.names for found in result.passes]
    compared = [(r.framework_ms, r.planned_ms, r.ratio) for r in every if r.framework_ms and r.ratio]
    ratios = [ratio for _, _, ratio in compared if ratio is not None]
    return Summary(
        passes=len(every),
        replaced=sum(result.replaced for result in every),
        divided=sum(result.plan is not None and any(divisions(result.plan)) for result in every),
        unplanned=sum(result.plan is None for result in every),
        compared=len(compared),
        framework_ms=sum(framework or 0.0 for framework, _, _ in compared) if compared else None,
        planned_ms=sum(planned or framework or 0.0 for framework, planned, _ in compared) if compared else None,
        geometric_mean=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        worst=min(ratios, default=None),
    )


def divisions(plan: Plan) -> Iterator[Plan]:
    """Every split in a plan, from the root down."""
    if not plan.leaf:
        yield plan
    for child in plan.children:
        yield from divisions(child)
