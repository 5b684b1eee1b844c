"""Images in spatial tiles: past 2^31 elements against a small image, and under a limit that the whole does not keep.

``past``: one sample of more than 2^31 elements (pytorch/pytorch issues 128947 and 95024: far slower or an error
there), planned within ``workspace``; the baseline is the better of torch and the planned layer on ``small`` x ``small``
pixels, values are nanoseconds an element of the image. On a GPU, whose memory holds the layer. ``limit``: a large image
within ``limit`` against torch where that keeps it, else against the fastest plan of the whole image that does, else
against torch without the limit; values are milliseconds.
"""

from __future__ import annotations

import math

from harness.layers import PASSES, Layer
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import (
    Tensors,
    framework_call,
    is_framework,
    peak_workspace,
    plan_line,
    planned_call,
    plans_found,
    race,
)

from tilewise.plan import Plan
from tilewise.planner import Planner
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "parts": "past,limit",
    "channels": "64",
    "size": "5800",
    "small": "725",
    "dtype": "bf16",
    "workspace": "1GiB",
    "layout": "contiguous",
    "limited_channels": "32",
    "limited_size": "1024",
    "kernels": "3,7",
    "limit": "16MiB",
    "passes": "fprop,dgrad,wgrad",
    "rigor": "measure",
}
QUICK = {
    "channels": "4",
    "size": "48",
    "small": "24",
    "dtype": "fp32",
    "workspace": "256KiB",
    "limited_channels": "8",
    "limited_size": "64",
    "kernels": "3",
    "limit": "256KiB",
    "passes": "fprop",
    "rigor": "estimate",
}
PARTS = {"past": "past", "limit": "limit"}


def run(settings: Settings) -> Result:
    """One row a pass of each part, and of each kernel of the second."""
    planner, rows = settings.planner(), []
    parts, notes = settings.chosen("parts", PARTS), []
    if "past" in parts:
        if settings.device.type == "cuda" or settings.quick:
            rows += _past(settings, planner)
        else:
            notes.append("a sample past 2^31 elements is measured on a GPU alone: a CPU would take minutes a pass")
    if "limit" in parts:
        rows += _limited(settings, planner)
    return Result(rows, bars(rows, settings), notes=notes)


def _past(settings: Settings, planner: Planner) -> list[Row]:
    channels, limit, rows = settings.integer("channels"), settings.size("workspace"), []
    for pass_ in settings.chosen("passes", PASSES):
        values, problems = [], []
        for size in (settings.integer("size"), settings.integer("small")):
            layer = Layer(f"{size} x {size}", 1, channels, channels, size, 3, padding=1)
            problem = layer.problem(
                pass_, settings.device, dtype=settings.text("dtype"), layout=settings.text("layout")
            )
            settings.say(f"planning {pass_.value} of {layer.name}")
            plan = planner.plan(problem, settings.planning(limit))
            problems.append((problem, plan))
            tensors = Tensors(problem)
            calls = [planned_call(problem, plan, tensors)]
            if len(values) == 1:  # past 2^31 elements torch may take minutes: its time is the planner's
                calls.append(framework_call(problem, tensors))
            values.append([1e6 * ms / math.prod(problem.shape("x")) for ms in race(problem, calls)])
        (large, plan), (small, _) = problems
        torch_ms = planner.torch_ms([large]).get(large)
        rows.append(
            Row(
                f"past 2^31 {pass_.value}",
                "past 2^31 elements",
                Side(
                    f"{'torch' if values[1][1] <= values[1][0] else 'planned'} on {small.axes[0].size}^2",
                    min(values[1]),
                ),
                Side(plan_line(plan), values[0][0]),
                unit="ns/element",
                details={
                    "elements": math.prod(large.shape("x")),
                    "workspace": plan.workspace,
                    "torch_ms": torch_ms,
                    "planned_small": values[1][0],
                    "torch_small": values[1][1],
                    "plan": plan.to_json(),
                },
            )
        )
    return rows


def _limited(settings: Settings, planner: Planner) -> list[Row]:
    channels, size, limit = (
        settings.integer("limited_channels"),
        settings.integer("limited_size"),
        settings.size("limit"),
    )
    rows = []
    for kernel in settings.integers("kernels"):
        layer = Layer(f"k={kernel}", 1, channels, channels, size, kernel, padding=kernel // 2)
        problems = [layer.problem(pass_, settings.device) for pass_ in settings.chosen("passes", PASSES)]
        settings.say(f"planning {layer.name} within {settings.text('limit')}")
        plans = plans_found(planner, problems, settings.planning(limit))
        wholes = plans_found(planner, problems, settings.planning(limit, "undivided"))
        rows += [
            _limited_row(f"{layer.name} {p.pass_.value}", p, plans[p], wholes.get(p), limit)
            for p in problems
            if p in plans
        ]
    return rows


def _limited_row(name: str, problem: ConvProblem, plan: Plan, whole: Plan | None, limit: int) -> Row:
    tensors = Tensors(problem)
    framework = framework_call(problem, tensors)
    takes = peak_workspace(problem, framework)
    whole = None if whole is None or is_framework(whole) else whole
    calls = [planned_call(problem, plan, tensors), framework]
    if whole is not None:
        calls.append(planned_call(problem, whole, tensors))
    ours, torch_ms, *others = race(problem, calls)
    if takes <= limit:
        baseline = Side("torch", torch_ms)
    elif whole is not None:
        baseline = Side(plan_line(whole), others[0])
    else:
        baseline = Side(f"torch, {takes / limit:.1f} times the limit", torch_ms)
    return Row(
        name,
        "under a limit",
        baseline,
        Side(plan_line(plan), ours),
        replaced=not is_framework(plan),
        details={
            "workspace": plan.workspace,
            "torch_ms": torch_ms,
            "torch_workspace": takes,
            "whole_ms": others[0] if others else None,
            "plan": plan.to_json(),
        },
    )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """An element of the large sample takes at most 1.2 times as long as one of the small."""
    applies = settings.device.type == "cuda" and not settings.quick
    return [
        Bar(f"{row.name}: time an element over a small sample", 1 / row.ratio, most=1.2, applies=applies)
        for row in rows
        if row.unit == "ns/element"
    ]
