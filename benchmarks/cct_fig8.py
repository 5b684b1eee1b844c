"""Caffe con Troll Figure 8: the three lowerings by numbers of channels, and what an estimate would choose.

Hadjis et al. 2015, appendix A: which type is fastest depends on the ratio of input to output channels. A sweep over
input channels, one over output channels and one over their ratio with the product of both fixed; in each row the
fastest type against type 1, which is what frameworks use. ``details`` have every type's time, and how much longer than
the fastest takes the one that the planner's cost model (Figure 6, in :mod:`tilewise.solvers`) estimates to be best.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.configs import LostConfig, Runnable, runnable
from harness.layers import PASSES, Layer
from harness.picture import Figure, speedup_lines
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import Settings
from harness.sides import Tensors, race

from tilewise import solvers
from tilewise.device import device_name
from tilewise.plan import Config
from tilewise.planner.estimate import Profile, estimate_ms, measure_profile
from tilewise.problem import ConvProblem, Pass

DEFAULTS = {
    "passes": "fprop",
    "batch": "32",
    "size": "27",
    "kernel": "5",
    "channels": "4,16,64,256",
    "fixed": "64",
    "budget_ms": "600",
    "seconds": "0",
}
QUICK = {"batch": "1", "size": "8", "kernel": "3", "channels": "2,8", "fixed": "4", "budget_ms": "5"}
TYPES = ("lowering_type1", "lowering_type2", "lowering_type3")


@dataclass(frozen=True)
class Point:
    """A layer of a sweep; ``at`` is what the sweep goes over."""

    sweep: str
    at: float
    inputs: int
    outputs: int


def points(settings: Settings) -> Iterator[Point]:
    """The three sweeps."""
    fixed, channels = settings.integer("fixed"), settings.integers("channels")
    for number in channels:
        yield Point("input channels", number, number, fixed)
    for number in channels:
        yield Point("output channels", number, fixed, number)
    for number in channels:
        outputs = max(1, fixed * fixed // number)
        yield Point("input over output channels", number / outputs, number, outputs)


def run(settings: Settings) -> Result:
    """One row a point of a sweep and pass."""
    profile = measure_profile(device_name(settings.device))
    deadline = settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    for pass_ in settings.chosen("passes", PASSES):
        for point in points(settings):
            if deadline.passed:
                notes.append(f"out of time before {point.sweep} {point.at:g} {pass_.value}")
                continue
            row = _row(settings, point, pass_, profile, notes)
            if row is not None:
                rows.append(row)
                settings.say(f"  {row.group} {row.name}: {row.ours.what}, {row.ratio:.2f}x")
                settings.keep(Result(rows, notes=[*notes, f"ended after {row.group} {row.name}"]))
    return Result(rows, bars(rows), facts(rows), notes)


def _row(settings: Settings, point: Point, pass_: Pass, profile: Profile, notes: list[str]) -> Row | None:
    layer = Layer("", settings.integer("batch"), point.inputs, point.outputs, settings.integer("size"),
                  settings.integer("kernel"), padding=settings.integer("kernel") // 2)  # fmt: skip
    problem = layer.problem(pass_, settings.device)
    tensors = Tensors(problem)
    ready: dict[str, Runnable] = {}
    estimates: dict[str, float] = {}
    for name in TYPES:
        config, estimates[name] = _best(name, problem, profile)
        try:
            ready[name] = runnable(problem, solvers.get(name), config, tensors)
        except LostConfig as error:
            notes.append(str(error))
    if TYPES[0] not in ready:
        return None
    times = race(problem, [each.call for each in ready.values()], float(settings.integer("budget_ms")))
    took = dict(zip(ready, times, strict=True))
    best, guess = min(took, key=took.__getitem__), min(took, key=estimates.__getitem__)
    return Row(
        f"{point.inputs} to {point.outputs} channels {pass_.value}",
        point.sweep,
        Side(TYPES[0], took[TYPES[0]]),
        Side(best, took[best]),
        details={
            "pass": pass_.value,
            "at": point.at,
            "ms": took,
            "configs": {name: str(each.config) for name, each in ready.items()},
            "estimated_ms": estimates,
            "estimate_chooses": guess,
            "of_the_fastest": took[guess] / took[best],
        },
    )


def _best(name: str, problem: ConvProblem, profile: Profile) -> tuple[Config, float]:
    """A type's config with the least estimate."""
    solver = solvers.get(name)
    estimate = functools.partial(estimate_ms, problem, profile=profile)
    config = min(solver.configs(problem), key=lambda c: estimate(solver.cost(problem, c)))
    return config, estimate(solver.cost(problem, config))


def bars(rows: list[Row]) -> list[Bar]:
    """How far the estimate's choice is behind the fastest type; no bar is set."""
    behind = [row.details["of_the_fastest"] for row in rows]
    return [Bar("time of the estimate's choice over the fastest's, geometric mean",
                geometric_mean(behind) if behind else float("nan"), applies=False)]  # fmt: skip


def facts(rows: list[Row]) -> dict[str, Any]:
    """How often the estimate chose the fastest type, and the greatest difference between types."""
    right = sum(row.details["estimate_chooses"] == row.ours.what for row in rows)
    apart = max((max(row.details["ms"].values()) / min(row.details["ms"].values()) for row in rows), default=1.0)
    return {"estimate_right": right, "points": len(rows), "greatest_difference": apart}


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up of the fastest type over type 1, a panel a sweep."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "at", "pass")
