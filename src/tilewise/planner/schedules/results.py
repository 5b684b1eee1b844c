"""Results of planning by layer and pass: plain values that reports and schedules are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilewise.plan import Measurement, Plan, is_busy, sum_known
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kinds

__all__ = [
    "Layer",
    "LayerResult",
    "PassResult",
    "RunTimes",
    "Summary",
    "divisions",
    "is_left",
    "summarize",
    "with_times",
]


def is_left(plan: Plan) -> bool:
    """Whether a root plan leaves its layer to the framework: its solver is the framework's own choice of some kind."""
    return any(plan.solver == kind.baseline for kind in kinds().values())


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the problems of its computations, the passes of one that is trained.

    Equal layers of a network are one, under the ``names`` of all. ``left`` says why tilewise leaves the layer to torch
    unplanned; its ``problems`` are then empty. A ``transposed`` layer computes in its forward pass what is
    the gradient of the input for others.
    """

    names: tuple[str, ...]
    problems: tuple[Problem, ...]
    transposed: bool = False
    left: str = ""

    @property
    def title(self) -> str:
        """The layer's first name, and how many equal layers there are."""
        return self.names[0] + (f" x{len(self.names)}" if len(self.names) > 1 else "")


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Runs of a plan, one after the other: how many, and the least and the median of what the device took, in ms."""

    count: int
    least_ms: float
    median_ms: float


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass of a layer: its plan, or the ``reason`` why there is none, and both times where they were measured.

    ``framework_ms`` and ``planned_ms`` are what the device computes, medians taken in turns in one run.
    ``framework_host_ms`` and ``planned_host_ms`` are what the host needs to launch it: 0 on a CPU, ``None`` where it is
    not known. ``load`` is the share of all cores that other processes used meanwhile, ``None`` where it is not known.
    ``front`` holds the plans of the time/workspace front, fastest first, and ``candidates`` what was tried, and
    ``runs`` the times of single runs of the plan; ``None`` where nobody asked.
    """

    problem: Problem
    plan: Plan | None = None
    reason: str = ""
    framework_ms: float | None = None
    planned_ms: float | None = None
    front: tuple[Plan, ...] | None = None
    candidates: tuple[Measurement, ...] | None = None
    framework_host_ms: float | None = None
    planned_host_ms: float | None = None
    load: float | None = None
    runs: RunTimes | None = None

    @property
    def busy(self) -> bool:
        """Whether the host was busy with other processes while these times or the plan's were taken."""
        return is_busy(self.load, self.problem.device) or (self.plan is not None and self.plan.busy)

    @property
    def replaced(self) -> bool:
        """Whether the plan takes the place of torch's own choice."""
        return self.plan is not None and not is_left(self.plan)

    @property
    def ratio(self) -> float | None:
        """How many times faster the plan is on the device: 1 where it is left to torch, ``None`` if unknown."""
        if self.plan is None:
            return None
        if not self.replaced:
            return 1.0
        if self.framework_ms is None or self.planned_ms is None:
            return None
        return self.framework_ms / self.planned_ms


def with_times(result: PassResult, framework_ms: float | None, framework_host_ms: float | None = None) -> PassResult:
    """``result`` with torch's times and its plan's, all in ms as measured while planning, and the load of then."""
    if framework_ms is None or result.plan is None:
        return result
    plan = result.plan
    planned = plan.time_ms if result.replaced and math.isfinite(plan.time_ms) else None
    return replace(
        result,
        framework_ms=framework_ms,
        planned_ms=planned,
        framework_host_ms=framework_host_ms,
        planned_host_ms=None if planned is None else plan.host_ms,
        load=plan.load,
    )


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A layer and the result of each of its passes; there are none where the layer is left to torch unplanned."""

    layer: Layer
    passes: tuple[PassResult, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Layer-passes of a network taken together; a layer that occurs n times counts n times.

    ``geometric_mean`` and ``worst`` are over the ``compared`` layer-passes, those with a time on both sides, of which
    the ones left to torch count 1.00; ``None`` where nothing was timed. So are the sums of times: the device's, and
    the host's, which are ``None`` where one of them is not known. ``busy`` counts layer-passes that were timed while
    other processes kept the host busy.
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
    framework_host_ms: float | None = None
    planned_host_ms: float | None = None
    busy: int = 0

    @property
    def share_replaced(self) -> float:
        """The share of layer-passes that were replaced, from 0 to 1."""
        return self.replaced / self.passes if self.passes else 0.0


def summarize(results: Iterable[LayerResult]) -> Summary:
    """Times, counts and sizes of all layer-passes of ``results`` together."""
    pass_results = [pass_result for result in results for _ in result.layer.names for pass_result in result.passes]
    with_both = [r for r in pass_results if r.framework_ms and r.ratio]
    compared = [(r.framework_ms, r.planned_ms, r.ratio) for r in with_both]
    hosts = [(r.framework_host_ms, r.planned_host_ms if r.replaced else r.framework_host_ms) for r in with_both]
    ratios = [ratio for _, _, ratio in compared if ratio is not None]
    return Summary(
        passes=len(pass_results),
        replaced=sum(result.replaced for result in pass_results),
        divided=sum(result.plan is not None and any(divisions(result.plan)) for result in pass_results),
        unplanned=sum(result.plan is None for result in pass_results),
        compared=len(compared),
        framework_ms=sum(framework or 0.0 for framework, _, _ in compared) if compared else None,
        planned_ms=sum(planned or framework or 0.0 for framework, planned, _ in compared) if compared else None,
        geometric_mean=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        worst=min(ratios, default=None),
        framework_host_ms=sum_known(framework for framework, _ in hosts) if hosts else None,
        planned_host_ms=sum_known(planned for _, planned in hosts) if hosts else None,
        busy=sum(result.busy for result in pass_results),
    )


def divisions(plan: Plan) -> Iterator[Plan]:
    """Every split in a plan, from the root down."""
    if not plan.leaf:
        yield plan
    for child in plan.children:
        yield from divisions(child)
