"""mu-cuDNN Figure 8: the desirable configurations of a layer-pass, AlexNet's conv2 forward at batch 256 by default.

Oyama et al. 2018, III-C1 and Figure 8. A row is one point of the front of time against workspace: its time, measured
here in turns with all others and with torch, its workspace, measured too, and how it divides the mini-batch. The
paper's front has its points between two micro-batches of 128 (FFT_TILING) and many small ones within 120 MiB.
"""

from __future__ import annotations

import math

from harness.layers import ALEXNET, PASSES, by_name
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Tensors, framework_call, peak_workspace, plan_line, planned_call, race

DEFAULTS = {"layer": "conv2", "pass": "fprop", "batch": "0", "limit": "120MiB", "policy": "all", "rigor": "measure"}
QUICK = {"batch": "2", "limit": "32MiB", "policy": "undivided", "rigor": "estimate"}


def run(settings: Settings) -> Result:
    """One row a point of the front, fastest first."""
    (layer,) = settings.chosen("layer", by_name(ALEXNET))
    (pass_,) = settings.chosen("pass", PASSES)
    problem = layer.problem(pass_, settings.device, batch=settings.integer("batch"))
    (policy,) = settings.policies("policy")
    limit = settings.size("limit")
    front = settings.planner().front(problem, settings.planning(limit, policy))
    if not front:
        raise NothingToMeasure(f"{layer.name} {pass_.value} has no plan within {limit} bytes")
    tensors = Tensors(problem)
    calls = [planned_call(problem, plan, tensors) for plan in front]
    *times, torch_ms = race(problem, [*calls, framework_call(problem, tensors)], budget_ms=1000.0)
    rows = [
        Row(
            f"{plan.workspace / 2**20:.1f} MiB",
            f"{layer.name} {pass_.value}",
            Side("torch", torch_ms),
            Side(plan_line(plan), measured),
            details={
                "workspace": plan.workspace,
                "peak_workspace": peak_workspace(problem, call),
                "summed_ms": plan.time_ms,
                "plan": plan.to_json(),
            },
        )
        for plan, call, measured in zip(front, calls, times, strict=True)
    ]
    over = max(row.details["peak_workspace"] for row in rows) / limit
    apart = max(abs(math.log(row.details["summed_ms"] / row.ours.value)) for row in rows)
    bars = [
        Bar("points of the front", len(rows), applies=False),
        Bar("greatest measured workspace over the limit", over, most=1.0),
        Bar("greatest factor between a sum of parts and its time whole", math.exp(apart), applies=False),
    ]
    return Result(rows, bars, {"limit": limit, "torch_ms": torch_ms, "problem": problem.key})
