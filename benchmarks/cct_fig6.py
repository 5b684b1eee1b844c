"""Caffe con Troll Figure 6: what the three lowerings cost by the model, beside what they take.

Hadjis et al. 2015, appendix A.1, counts for each type the data that are lowered, the product's arithmetic and its
size, and the additions of lifting. A solver's ``cost`` counts these and what the machine makes of them: how well a
product of that shape fills it, and what stays in its cache. Sweeps over input channels, output channels, kernel and
image with everything else fixed; a row is a layer and pass, with every type's estimate and time, and compares the type
that the model chooses with type 1. ``details`` have A.1's counts for FPROP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.layers import PASSES, Layer
from harness.lowerings import CLOSE, Lowered, measured, rank_correlation
from harness.picture import Figure, scattered
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import Settings

from tilewise.machine.device import device_name
from tilewise.planner.search.estimate import Profile, measure_profile
from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {
    "passes": "fprop",
    "batch": "16",
    "inputs": "4,16,64,256",
    "outputs": "4,16,64,256",
    "kernels": "3,5,7,11",
    "sizes": "13,27,55",
    "fixed": "64,64,5,27",
    "budget_ms": "500",
    "seconds": "0",
}
QUICK = {
    "batch": "1", "inputs": "2,8", "outputs": "2", "kernels": "3", "sizes": "6", "fixed": "4,4,3,8", "budget_ms": "5",
}  # fmt: skip
SWEEPS = {"inputs": "in_channels", "outputs": "out_channels", "kernels": "kernel", "sizes": "size"}


@dataclass(frozen=True)
class Counts:
    """Of one image, in numbers: A.1's terms of a type."""

    lowered: int
    product_flops: int
    product: int
    lifting_additions: int


def counts(p: ConvProblem) -> dict[str, Counts]:
    """Figure 6, with the image as it is padded."""
    (height, width), d, o = p.axes, p.in_channels, p.out_channels
    k, m = height.kernel, height.out
    n = m + k - 1
    assert height == width
    sizes = {1: (m * m, k * k, 1), 2: (n * m, k, k), 3: (n * n, 1, k * k)}
    return {
        f"lowering_type{kind}": Counts(
            places * taps * d, 2 * places * k * k * d * o, places * lifts * o, m * m * (lifts - 1) * o
        )
        for kind, (places, taps, lifts) in sizes.items()
    }


def layers(settings: Settings) -> Iterator[tuple[str, Layer]]:
    """A sweep's name and a layer of it; what several sweeps have is in the first of them."""
    inputs, outputs, kernel, size = settings.integers("fixed")
    base = Layer("", settings.integer("batch"), inputs, outputs, size, kernel)
    seen = set()
    for sweep, name in SWEEPS.items():
        for value in settings.integers(sweep):
            layer = replace(base, **{name: value})
            if layer not in seen:
                seen.add(layer)
                yield sweep, replace(layer, padding=layer.kernel // 2)


def run(settings: Settings) -> Result:
    """One row a layer and pass."""
    profile = measure_profile(device_name(settings.device))
    deadline = settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    for pass_ in settings.chosen("passes", PASSES):
        for sweep, layer in layers(settings):
            if deadline.passed:
                notes.append(f"out of time before {sweep} {layer} {pass_.value}")
                continue
            row = _row(settings, sweep, layer, pass_, profile, notes)
            if row is not None:
                rows.append(row)
                behind = row.details["of_the_fastest"]
                settings.say(f"  {row.name}: {row.ours.what}, {row.ratio:.2f}x, {behind:.2f} of the fastest")
                settings.keep(Result(rows, notes=[*notes, f"ended after {row.group} {row.name}"]))
    return Result(rows, bars(rows), facts(rows), notes)


def _row(settings: Settings, sweep: str, layer: Layer, pass_: Pass, profile: Profile, notes: list[str]) -> Row | None:
    problem = layer.problem(pass_, settings.device)
    found = {each.name: each for each in measured(problem, profile, float(settings.integer("budget_ms")), notes)}
    if "lowering_type1" not in found:
        return None
    usual = found["lowering_type1"]
    chosen = min(found.values(), key=lambda each: each.estimated_ms)
    fastest = min(found.values(), key=lambda each: each.ms)
    name = f"{layer.in_channels} to {layer.out_channels} k{layer.kernel} {layer.size}x{layer.size} {pass_.value}"
    return Row(
        name,
        f"{sweep} {pass_.value}",
        Side(usual.name, usual.ms),
        Side(chosen.name, chosen.ms),
        details={
            "sweep": sweep,
            "pass": pass_.value,
            "ms": {each.name: each.ms for each in found.values()},
            "estimated_ms": {each.name: each.estimated_ms for each in found.values()},
            "configs": {each.name: str(each.config) for each in found.values()},
            "model": {each.name: _model(each) for each in found.values()},
            "counts": {k: asdict(v) for k, v in counts(problem).items()} if pass_ is Pass.FPROP else {},
            "fastest": fastest.name,
            "of_the_fastest": chosen.ms / fastest.ms,
        },
    )


def _model(found: Lowered) -> dict[str, Any]:
    return asdict(found.cost)


def bars(rows: list[Row]) -> list[Bar]:
    """How far the model's choice is behind the fastest type; no bar is set."""
    behind = [row.details["of_the_fastest"] for row in rows]
    return [Bar("time of the model's choice over the fastest's, geometric mean",
                geometric_mean(behind) if behind else float("nan"), applies=False)]  # fmt: skip


def facts(rows: list[Row]) -> dict[str, Any]:
    """How well the model ranks times, of all types and layers together and of a layer's types, and how it chooses."""
    pairs = [(row.details["estimated_ms"][name], ms) for row in rows for name, ms in row.details["ms"].items()]
    if not pairs:
        return {}
    errors = [math.log(estimate / ms) for estimate, ms in pairs]
    behind = [row.details["of_the_fastest"] for row in rows]
    return {
        "points": len(rows),
        "rank_correlation": rank_correlation(*zip(*pairs, strict=True)),
        "fastest_chosen": sum(row.ours.what == row.details["fastest"] for row in rows),
        "within_10_percent": sum(each <= CLOSE for each in behind),
        "furthest_behind": max(behind),
        "estimate_over_time": math.exp(math.fsum(errors) / len(errors)),
        "estimate_off_by": math.exp(math.sqrt(math.fsum(e * e for e in errors) / len(errors))),
    }


def draw(document: dict[str, Any]) -> Figure:
    """Estimates over times, a panel a pass and a colour a type."""
    return scattered(document, "pass", "ms", "estimated_ms")
