"""mu-cuDNN Figure 1: forward AlexNet, the fastest undivided algorithm against one byte less of workspace.

Oyama et al. 2018, Figure 1. ``best`` is the fastest undivided plan without a limit; ``one byte less`` the fastest one
that fits in its workspace less a byte: the cliff that micro-batches are for. Both are measured again here, with the
divided plan within the same limit.
"""

from __future__ import annotations

import math
from dataclasses import replace

from harness.layers import ALEXNET, by_name
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, framework_call, plan_line, planned_call, race

from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {"layers": "", "batch": "0", "rigor": "measure"}
QUICK = {"layers": "conv2", "batch": "2"}


def run(settings: Settings) -> Result:
    """One row a layer that has a workspace to take away."""
    planner, rows, notes = settings.planner(), [], []
    for layer in settings.chosen("layers", by_name(ALEXNET)):
        problem = layer.problem(Pass.FPROP, settings.device, batch=settings.integer("batch"))
        try:
            row = _row(layer.name, problem, planner, settings.planning(batch_sizes="undivided"))
        except NoPlanError as error:
            notes.append(f"{layer.name}: {error}")
            continue
        if row is None:
            notes.append(f"{layer.name}: its fastest undivided plan needs no workspace")
            continue
        rows.append(row)
        settings.say(f"  {layer.name}: one byte less costs {1 / row.ratio:.2f}x")
    return Result(rows, bars(rows), notes=notes)


def _row(name: str, problem: ConvProblem, planner: Planner, undivided: Options) -> Row | None:
    """The baseline is the plan with one byte less, ours the best one; the framework itself is timed beside them."""
    best = planner.plan(problem, undivided)
    if not best.workspace:
        return None
    limit = best.workspace - 1
    less = planner.plan(problem, replace(undivided, workspace=limit))
    divided = planner.plan(problem, replace(undivided, workspace=limit, batch_sizes="powers_of_two"))
    tensors = Tensors(problem)
    calls: list[Call] = [planned_call(problem, plan, tensors) for plan in (less, best, divided)]
    less_ms, best_ms, divided_ms, torch_ms = race(problem, [*calls, framework_call(problem, tensors)])
    front = [(plan.workspace, plan.time_ms, plan_line(plan)) for plan in planner.front(problem, undivided)]
    return Row(
        name,
        "one byte less",
        Side(plan_line(less), less_ms),
        Side(plan_line(best), best_ms),
        details={
            "best_workspace": best.workspace,
            "less_workspace": less.workspace,
            "divided": plan_line(divided),
            "divided_ms": divided_ms,
            "divided_workspace": divided.workspace,
            "torch_ms": torch_ms,
            "front": front,
            "plans": {n: p.to_json() for n, p in _named(best, less, divided)},
        },
    )


def _named(best: Plan, less: Plan, divided: Plan) -> list[tuple[str, Plan]]:
    return [("best", best), ("one byte less", less), ("divided", divided)]


def bars(rows: list[Row]) -> list[Bar]:
    """Reported, not judged: the figure shows a cliff, and how much of it micro-batches take away."""
    cliffs = [row.ratio for row in rows]
    left = [row.details["divided_ms"] / row.ours.value for row in rows]
    return [
        Bar("largest cost of one byte less", max(cliffs, default=math.nan), applies=False),
        Bar("largest cost of one byte less, divided", max(left, default=math.nan), applies=False),
    ]
