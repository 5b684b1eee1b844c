"""Caffe con Troll Figure 8: the three lowerings by numbers of channels, and what an estimate would choose.

Hadjis et al. 2015, appendix A: which type is fastest depends on the ratio of input to output channels. A sweep over
input channels, one over output channels and one over their ratio with the product of both fixed; in each row the
fastest type against type 1, which is what frameworks use. ``details`` have every type's time, and how much longer than
the fastest takes the one that the planner's cost model (``cct_fig6``) estimates to be best, as ``rigor="estimate"``
chooses. The facts say how often that model and the paper's rule (type 3 where inputs are more than outputs, else type
1) agree with each other and with what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.layers import PASSES, Layer
from harness.lowerings import CLOSE, TYPES, measured
from harness.picture import Figure, speedup_lines
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import Settings

from tilewise.machine.device import device_name
from tilewise.planner.search.estimate import Profile, measure_profile
from tilewise.problems.conv.problem import Pass

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
    found = {each.name: each for each in measured(problem, profile, float(settings.integer("budget_ms")), notes)}
    if TYPES[0] not in found:
        return None
    took = {name: each.ms for name, each in found.items()}
    estimates = {name: each.estimated_ms for name, each in found.items()}
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
            "configs": {name: str(each.config) for name, each in found.items()},
            "estimated_ms": estimates,
            "estimate_chooses": guess,
            "rule_chooses": _by_ratio(point, pass_),
            "of_the_fastest": took[guess] / took[best],
        },
    )


def _by_ratio(point: Point, pass_: Pass) -> str:
    """Appendix A's rule for FPROP. DGRAD's inputs are the layer's outputs; WGRAD lowers either image as FPROP does."""
    inputs, outputs = (point.outputs, point.inputs) if pass_ is Pass.DGRAD else (point.inputs, point.outputs)
    return TYPES[2] if inputs > outputs else TYPES[0]


def bars(rows: list[Row]) -> list[Bar]:
    """How far the estimate's choice is behind the fastest type; no bar is set."""
    behind = [row.details["of_the_fastest"] for row in rows]
    return [Bar("time of the estimate's choice over the fastest's, geometric mean",
                geometric_mean(behind) if behind else float("nan"), applies=False)]  # fmt: skip


def facts(rows: list[Row]) -> dict[str, Any]:
    """How often estimate, rule and measurement agree, of all types and of the two that the rule knows."""
    close = sum(row.details["of_the_fastest"] <= CLOSE for row in rows)
    two = [{name: row.details["ms"][name] for name in TYPES[::2] if name in row.details["ms"]} for row in rows]
    rules, either = [row.details["rule_chooses"] for row in rows], [min(ms, key=ms.__getitem__) for ms in two]
    guesses = [min(ms, key=row.details["estimated_ms"].__getitem__) for row, ms in zip(rows, two, strict=True)]
    apart = max((max(row.details["ms"].values()) / min(row.details["ms"].values()) for row in rows), default=1.0)
    return {
        "points": len(rows),
        "estimate_right": sum(row.details["estimate_chooses"] == row.ours.what for row in rows),
        "estimate_within_10_percent": close,
        "rule_right": sum(row.details["rule_chooses"] == row.ours.what for row in rows),
        "rule_right_of_types_1_and_3": sum(map(str.__eq__, rules, either)),
        "estimate_right_of_types_1_and_3": sum(map(str.__eq__, guesses, either)),
        "rule_and_estimate_agree_of_types_1_and_3": sum(map(str.__eq__, rules, guesses)),
        "greatest_difference": apart,
    }


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up of the fastest type over type 1, a panel a sweep."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "at", "pass")
