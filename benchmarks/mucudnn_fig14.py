"""mu-cuDNN Figure 14: how one workspace budget is divided among kernels, and the integer programs that divide it.

Oyama et al. 2018, Figure 14 (AlexNet, batch 256, 120 MiB) and section IV-D (562 variables and 5.46 ms for ResNet-50,
batch 32, 5,088 MiB). One row a distinct kernel: the fastest point of its front within an equal part of the total
against the point that it was given. Times are those of the fronts. Each program is solved again and again by HiGHS
and by the exact method that stands behind it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from harness.budgets import NETWORKS, Names, kernels_of, options_of
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import plan_line

from tilewise.plan import Plan
from tilewise.planner.budget import POLICIES, TIME_LIMIT_S, Allocation, Kernel, allocate
from tilewise.problem import ConvProblem

DEFAULTS = {
    "networks": "",
    "alexnet": "120MiB",
    "resnet50": "2544MiB,5088MiB",
    "layers": "",
    "passes": "",
    "batch": "0",
    "policies": "paper_wd",
    "batch_sizes": "powers_of_two",
    "rigor": "measure",
    "solves": "11",
}
QUICK = {
    "networks": "alexnet",
    "alexnet": "64MiB",
    "layers": "conv3",
    "passes": "fprop,wgrad",
    "batch": "2",
    "batch_sizes": "undivided",
    "rigor": "estimate",
    "solves": "3",
}
METHODS = {"milp": TIME_LIMIT_S, "exact": 0.0}
"""By the time limit of HiGHS that asks for them."""
MOST_MS = 20.0


def run(settings: Settings) -> Result:
    """One row a distinct kernel, total and policy."""
    rows: list[Row] = []
    programs: dict[str, Any] = {}
    planner, options = settings.planner(), options_of(settings)
    for network in settings.chosen("networks", {name: name for name in NETWORKS}):
        names = kernels_of(network, settings)
        for total, size in settings.sizes(network).items():
            settings.say(f"{network}: fronts of {len(names)} kernels within {total}")
            fronts = planner.fronts(names, replace(options, workspace=size))
            for policy in settings.chosen("policies", {policy: policy for policy in POLICIES}):
                group = f"{network} {total} {policy}"
                kernels = [
                    Kernel(own[0], tuple((plan.time_ms, plan.workspace) for plan in fronts[problem]), len(own))
                    for problem, own in names.items()
                ]
                found, programs[group] = _solved(kernels, size, policy, settings.integer("solves"))
                rows += _rows(group, names, fronts, found)
                settings.say(f"  {group}: {programs[group]}")
                settings.keep(Result(rows, bars(programs, settings), {"programs": programs}, [f"ended after {group}"]))
    return Result(rows, bars(programs, settings), {"programs": programs})


def _solved(kernels: Sequence[Kernel], size: int, policy: str, solves: int) -> tuple[Allocation, dict[str, Any]]:
    """The division, and what each method takes to find it (medians, milliseconds)."""
    found = allocate(kernels, size, policy)
    facts: dict[str, Any] = {
        **asdict(found.program),
        "desirable": sum(len(kernel.points) for kernel in kernels),
        "kernels": sum(kernel.count for kernel in kernels),
        "used": found.used,
        "least": found.least,
        "time_ms": found.time_ms,
    }
    for method, limit in METHODS.items():
        again = [allocate(kernels, size, policy, time_limit_s=limit) for _ in range(max(1, solves))]
        facts[f"{method}_ms"] = statistics.median(each.program.solve_ms for each in again)
        facts[f"{method}_by"] = again[-1].program.method
        facts[f"{method}_time_ms"] = again[-1].time_ms
    return found, facts


def _rows(group: str, names: Names, fronts: Mapping[ConvProblem, Sequence[Plan]], found: Allocation) -> list[Row]:
    equal = found.total // sum(map(len, names.values()))
    rows = []
    for (problem, own), choice in zip(names.items(), found.choices, strict=True):
        front = fronts[problem]
        within = next((plan for plan in front if plan.workspace <= equal), front[-1])
        rows.append(
            Row(
                f"{own[0]} {problem.pass_.value}",
                group,
                Side(f"within {equal} bytes: {plan_line(within)}", within.time_ms),
                Side(plan_line(front[choice]), front[choice].time_ms),
                details={
                    "names": list(own),
                    "count": len(own),
                    "workspace": front[choice].workspace,
                    "share": front[choice].workspace * len(own) / found.used if found.used else 0.0,
                    "equal_part": equal,
                    "front": [[plan.time_ms, plan.workspace, plan_line(plan)] for plan in front],
                },
            )
        )
    return rows


def bars(programs: Mapping[str, Mapping[str, Any]], settings: Settings) -> list[Bar]:
    """ResNet-50's program: in time, with a proof, and the same solution by both methods."""
    solved = [facts for group, facts in programs.items() if group.startswith("resnet50")]
    slowest = max((facts["milp_ms"] for facts in solved), default=math.nan)
    proven = min((float(facts["optimal"]) for facts in programs.values()), default=math.nan)
    differ = max(
        (abs(f["milp_time_ms"] / f["exact_time_ms"] - 1) for f in programs.values() if f["exact_time_ms"]),
        default=math.nan,
    )
    return [
        Bar("resnet50: milliseconds to solve the program", slowest, most=MOST_MS, applies=not settings.quick),
        Bar("programs proven optimal", proven, least=1.0),
        Bar("greatest difference between methods", differ, most=1e-6),
    ]
