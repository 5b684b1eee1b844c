"""mu-cuDNN Figure 11: convolutions of AlexNet, ResNet-50 and DenseNet-40 (k=40) within 8, 64 and 512 MiB a kernel.

Oyama et al. 2018, IV-B2, batches 256, 64 and 256. A row is one network, limit and policy: the sum over all its kernels
(equal ones counted as often as they occur) against cuDNN's legacy algorithms, undivided, within the same limit; kernels
are timed in turns with their baseline as in Figure 10. On a CPU, which has none of these, the best undivided plan
stands in.
"""

from __future__ import annotations

import math
from typing import Any

from harness.legacy import fastest_legacy
from harness.network_kernels import Kernel, kernels_of
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, plan_line, planned_call, plans_found, race

from tilewise.plan import Plan, format_bytes
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "networks": "",
    "batch": "0",
    "limits": "8MiB,64MiB,512MiB",
    "policies": "undivided,powers_of_two",
    "rigor": "measure",
    "kernels": "0",
}
QUICK = {
    "networks": "alexnet",
    "batch": "2",
    "limits": "64MiB",
    "policies": "undivided",
    "rigor": "estimate",
    "kernels": "2",
}
BATCHES = {"alexnet": 256, "resnet50": 64, "densenet40": 256}
UNDIVIDED = "undivided"


def run(settings: Settings) -> Result:
    """One row a network, limit and policy; saved after each network and limit."""
    planner, rows, notes = settings.planner(), [], []
    policies = list(dict.fromkeys((UNDIVIDED, *settings.policies("policies"))))
    for network in settings.chosen("networks", {name: name for name in BATCHES}):
        kernels = kernels_of(
            network, settings.integer("batch") or BATCHES[network], settings.device, settings.integer("kernels")
        )
        problems = [kernel.problem for kernel in kernels]
        for text, limit in settings.sizes("limits").items():
            plans = {}
            for policy in policies:
                settings.say(f"planning {network} within {text}, {policy}")
                plans[policy] = plans_found(planner, problems, settings.planning(limit, policy))
            fitting = [k for k in kernels if all(k.problem in found for found in plans.values())]
            notes += [f"{network} {k.name} within {text}: no plan" for k in kernels if k not in fitting]
            rows += _rows(network, text, limit, fitting, plans)
            settings.keep(Result(rows, _bars(rows), notes=notes))
            settings.say(f"  {network} {text}: " + ", ".join(f"{r.ratio:.2f}x" for r in rows[-len(policies) :]))
    return Result(rows, _bars(rows), notes=notes)


def _rows(
    network: str, text: str, limit: int, kernels: list[Kernel], plans: dict[str, dict[ConvProblem, Plan]]
) -> list[Row]:
    baseline, ours = 0.0, dict.fromkeys(plans, 0.0)
    layers: list[dict[str, Any]] = []
    for kernel in kernels:
        chosen = {policy: found[kernel.problem] for policy, found in plans.items()}
        name, times = _timed(kernel.problem, chosen, limit)
        baseline += kernel.count * times["baseline"]
        for policy in plans:
            ours[policy] += kernel.count * times[policy]
        layers.append({"kernel": kernel.name, "count": kernel.count, "baseline": name, "times_ms": times})
        layers[-1]["plans"] = {policy: plan_line(plan) for policy, plan in chosen.items()}
        layers[-1]["workspaces"] = {policy: plan.workspace for policy, plan in chosen.items()}
    return [
        Row(
            f"{text} {policy}",
            network,
            Side("cudnn legacy undivided", baseline),
            Side(policy, total),
            details={"limit": limit, "kernels": layers},
        )
        for policy, total in ours.items()
    ]


def _timed(problem: ConvProblem, plans: dict[str, Plan], limit: int) -> tuple[str, dict[str, float]]:
    """What the baseline is, and milliseconds of it and of each policy's plan, in turns; equal plans are run once."""
    tensors = Tensors(problem)
    lines = {policy: plan_line(plan) for policy, plan in plans.items()}
    calls: dict[str, Call] = {lines[policy]: planned_call(problem, plan, tensors) for policy, plan in plans.items()}
    legacy = fastest_legacy(problem, tensors, limit)
    if legacy is not None:
        calls["legacy"] = legacy.run
    took = dict(zip(calls, race(problem, list(calls.values()), budget_ms=60.0), strict=True))
    times = {policy: took[line] for policy, line in lines.items()}
    if legacy is None:
        return lines[UNDIVIDED], {"baseline": times[UNDIVIDED], **times}
    return f"{legacy.name}, {format_bytes(legacy.workspace)}", {"baseline": took["legacy"], **times}


def _bars(rows: list[Row]) -> list[Bar]:
    """The paper reports up to 1.21x (ResNet-50) and 1.56x (AlexNet) in 64 MiB; no bar is set here."""
    return [Bar("least over the baseline", min((row.ratio for row in rows), default=math.nan), applies=False)]
