"""mu-cuDNN Figure 13: the convolutions of AlexNet and ResNet-50 within one workspace budget.

Oyama et al. 2018, Figure 13. Batches 256 and 32, fp32. Every total is divided among all kernels by each policy
(``paper_wd``: a segment for every kernel; ``arena``: one that they share) and the plans are timed in turns with the
paper's baseline: cuDNN's legacy algorithms, undivided, each kernel with an equal part of the total (on a CPU, which has
none, the best undivided plan stands in). Sums count every occurrence of a layer. The bars compare as the issue's table
does: ResNet-50 with half the memory of its baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.budgets import NETWORKS, Division, Names, divided, kernels_of, options_of
from harness.legacy import fastest_legacy
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, is_framework, peak_workspace, plan_line, planned_call, plans_found, race

from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.planner.budget import POLICIES
from tilewise.problem import ConvProblem

DEFAULTS = {
    "networks": "",
    "alexnet": "120MiB,960MiB",
    "resnet50": "2544MiB,5088MiB",
    "layers": "",
    "passes": "",
    "batch": "0",
    "policies": "",
    "batch_sizes": "powers_of_two",
    "rigor": "measure",
}
QUICK = {
    "networks": "alexnet",
    "alexnet": "64MiB",
    "layers": "conv3",
    "passes": "fprop,wgrad",
    "batch": "2",
    "batch_sizes": "undivided",
    "rigor": "estimate",
}
JUDGED = {"alexnet": ("120MiB", "120MiB", 2.0), "resnet50": ("2544MiB", "5088MiB", 1.2)}
"""By network: the total of ``paper_wd``, the baseline's, and the least ratio."""


def run(settings: Settings) -> Result:
    """One row a distinct kernel, total and policy."""
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    notes: list[str] = []
    for network in settings.chosen("networks", {name: name for name in NETWORKS}):
        names, planner, options = kernels_of(network, settings), settings.planner(), options_of(settings)
        totals = settings.sizes(network)
        divisions = []
        for total, size in totals.items():
            for policy in settings.chosen("policies", {policy: policy for policy in POLICIES}):
                settings.say(f"{network}: dividing {total} among {len(names)} kernels, {policy}")
                divisions.append(divided(network, names, total, size, policy, planner, options))
                facts[divisions[-1].group] = dict(divisions[-1].facts)
        occurrences = sum(map(len, names.values()))
        limits = {total: size // occurrences for total, size in totals.items()}
        undivided = _undivided(settings, names, limits, planner, options)
        for index, problem in enumerate(names):
            try:
                rows += _rows(problem, names, divisions, limits, undivided)
            except LookupError as error:
                notes.append(str(error.args[0]))
                continue
            settings.say(f"  {index + 1}/{len(names)} {rows[-1].name}: {rows[-1].ratio:.2f}x")
            settings.keep(_result(rows, facts, [*notes, f"ended after {network} {rows[-1].name}"], settings))
    return _result(rows, facts, notes, settings)


def _undivided(
    settings: Settings, names: Names, limits: Mapping[str, int], planner: Planner, options: Options
) -> dict[str, dict[ConvProblem, Plan]]:
    """The stand-in for the legacy algorithms where there are none, by total."""
    if settings.device.type == "cuda":
        return {total: {} for total in limits}
    return {
        total: plans_found(planner, names, settings.planning(limit, "undivided")) for total, limit in limits.items()
    }


def _rows(
    problem: ConvProblem,
    names: Names,
    divisions: list[Division],
    limits: Mapping[str, int],
    undivided: Mapping[str, Mapping[ConvProblem, Plan]],
) -> Iterator[Row]:
    """All plans of a kernel and its baseline within each limit, in turns; equal calls are run once."""
    tensors, calls = Tensors(problem), dict[object, Call]()
    baselines: dict[str, tuple[object, str, int]] = {}
    for total, limit in limits.items():
        legacy = fastest_legacy(problem, tensors, limit)
        if legacy is not None:
            key: object = ("legacy", legacy.name)
            calls[key] = legacy.run
            baselines[total] = key, f"cudnn legacy {legacy.name}", legacy.workspace
        elif problem in undivided[total]:
            plan = undivided[total][problem]
            key = plan_line(plan)
            calls[key] = planned_call(problem, plan, tensors)
            baselines[total] = key, f"undivided {key}", plan.workspace
        else:
            raise LookupError(f"{names[problem][0]} {problem.pass_.value} within {limit} bytes: no undivided plan")
    for division in divisions:
        plan = division.plans[problem]
        calls.setdefault(plan_line(plan), planned_call(problem, plan, tensors))
    times = dict(zip(calls, race(problem, list(calls.values())), strict=True))
    for division in divisions:
        plan = division.plans[problem]
        key, what, workspace = baselines[division.total]
        yield Row(
            f"{names[problem][0]} {problem.pass_.value}",
            division.group,
            Side(what, times[key]),
            Side(plan_line(plan), times[plan_line(plan)]),
            details={
                "names": list(names[problem]),
                "count": len(names[problem]),
                "framework": is_framework(plan),
                "divided": not plan.leaf,
                "baselines_ms": {total: times[found[0]] for total, found in baselines.items()},
                "baseline_limit": limits[division.total],
                "baseline_workspace": workspace,
                "planned_workspace": plan.workspace,
                "peak_workspace": peak_workspace(problem, calls[plan_line(plan)]),
                "plan": plan.to_json(),
            },
        )


def _result(rows: list[Row], divisions: Mapping[str, Any], notes: list[str], settings: Settings) -> Result:
    groups = dict.fromkeys(row.group for row in rows)
    totals = {group: sums([row for row in rows if row.group == group]) for group in groups}
    facts = {"totals": totals, "budgets": dict(divisions)}
    return Result(rows, bars(totals, divisions, settings), facts, notes)


def sums(rows: list[Row]) -> dict[str, Any]:
    """Sums over all occurrences of the kernels of one network, total and policy."""
    ours = math.fsum(row.ours.value * row.details["count"] for row in rows)
    baselines = {
        total: math.fsum(row.details["baselines_ms"][total] * row.details["count"] for row in rows)
        for total in rows[0].details["baselines_ms"]
    }
    peaks = [row.details["peak_workspace"] for row in rows]
    return {
        "ours_ms": ours,
        "baselines_ms": baselines,
        "over_baselines": {total: value / ours for total, value in baselines.items()},
        "kernels": sum(row.details["count"] for row in rows),
        "divided": sum(row.details["divided"] * row.details["count"] for row in rows),
        "peak_sum": sum(peak * row.details["count"] for peak, row in zip(peaks, rows, strict=True)),
        "peak_largest": max(peaks),
    }


def bars(totals: Mapping[str, Mapping[str, Any]], budgets: Mapping[str, Any], settings: Settings) -> list[Bar]:
    """The paper's two results, arena beside ``paper_wd``, and the totals kept as measured."""
    applies = settings.device.type == "cuda" and not settings.quick
    found = []
    for network, (total, of_baseline, least) in JUDGED.items():
        over = totals.get(f"{network} {total} paper_wd", {}).get("over_baselines", {}).get(of_baseline, math.nan)
        text = f"{network}: paper_wd {total} over cuDNN's legacy algorithms with {of_baseline}"
        found.append(Bar(text, over, least=least, applies=applies))
    ratios = [
        totals[group]["ours_ms"] / totals[group.replace("paper_wd", "arena")]["ours_ms"]
        for group in totals
        if group.endswith("paper_wd") and group.replace("paper_wd", "arena") in totals
    ]
    # Two runs of one plan differ by this much.
    found.append(Bar("least arena over paper_wd", min(ratios, default=math.nan), least=0.99, applies=applies))
    kept = [
        totals[group]["peak_sum" if group.endswith("paper_wd") else "peak_largest"] / budgets[group]["total"]
        for group in totals
    ]
    found.append(Bar("greatest measured workspace over its total", max(kept, default=math.nan), most=1.0))
    return found
