"""mu-cuDNN Figure 9: AlexNet's conv2, forward, in 64 MiB: undivided, powers_of_two, all.

Oyama et al. 2018, Figure 9 and Section IV-A: micro-batches let the FFT into the limit (2.33x over undivided on a P100).
"""

from __future__ import annotations

from harness.layers import ALEXNET, by_name
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Tensors, framework_call, peak_workspace, plan_line, planned_call, race

from tilewise.problems.conv.problem import Pass

DEFAULTS = {"layer": "conv2", "batch": "0", "limit": "64MiB", "policies": "powers_of_two,all", "rigor": "measure"}
QUICK = {"batch": "8", "limit": "16MiB"}


def run(settings: Settings) -> Result:
    """The undivided plan is the baseline of one row for each policy."""
    layer = settings.chosen("layer", by_name(ALEXNET))[0]
    problem = layer.problem(Pass.FPROP, settings.device, batch=settings.integer("batch"))
    limit = settings.size("limit")
    planner, plans = settings.planner(), {}
    for policy in ("undivided", *settings.policies("policies")):
        settings.say(f"planning {layer.name} fprop, {policy}, {settings.text('limit')}")
        plans[policy] = planner.plan(problem, settings.planning(limit, policy))
    tensors = Tensors(problem)
    calls = {name: planned_call(problem, plan, tensors) for name, plan in plans.items()}
    *times, torch_ms = race(problem, [*calls.values(), framework_call(problem, tensors)])
    measured = dict(zip(calls, times, strict=True))
    peaks = {name: peak_workspace(problem, call) for name, call in calls.items()}
    baseline = Side(plan_line(plans["undivided"]), measured["undivided"])
    rows = [
        Row(
            f"{layer.name} fprop",
            policy,
            baseline,
            Side(plan_line(plan), measured[policy]),
            details={
                "limit": limit,
                "peak_workspace": peaks[policy],
                "undivided_peak_workspace": peaks["undivided"],
                "torch_ms": torch_ms,
                "plan": plan.to_json(),
            },
        )
        for policy, plan in plans.items()
        if policy != "undivided"
    ]
    over = max(peaks.values()) / limit
    return Result(rows, [Bar("greatest measured workspace over the limit", over, most=1.0)])
