"""mu-cuDNN Figure 10: AlexNet's 15 convolution kernels, batch 256, fp32, within 8, 64 and 512 MiB.

Oyama et al. 2018, Figure 10 and Section IV-B (u, p, a: undivided, powerOfTwo, all). Two baselines are timed in turns
with the plans: ``legacy``, the paper's (cuDNN's legacy algorithms, undivided, within the limit; on a CPU, which has
none, the undivided plan stands in), and ``undivided``, the best undivided plan of any solver. Totals are sums over
kernels. Every plan's memory beyond operands and result is measured. A kernel that no undivided plan solves within a
limit has no baseline there: it is named in the notes and left out of the sums.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from harness.layers import ALEXNET, PASSES, by_name
from harness.legacy import fastest_legacy
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, is_framework, peak_workspace, plan_line, planned_call, plans_found, race

from tilewise.plan import Config, Plan
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "layers": "",
    "passes": "",
    "batch": "0",
    "limits": "8MiB,64MiB,512MiB",
    "policies": "powers_of_two,all",
    "rigor": "measure",
}
QUICK = {
    "layers": "conv2",
    "passes": "fprop,wgrad",
    "batch": "8",
    "limits": "16MiB",
    "policies": "powers_of_two",
    "rigor": "estimate",
}
JUDGED = "64MiB"
UNDIVIDED = "undivided"


@dataclass(frozen=True)
class Kernel:
    """One layer-pass within one limit, and its plan under each policy."""

    name: str
    limit: str
    limit_bytes: int
    problem: ConvProblem
    plans: dict[str, Plan]


def run(settings: Settings) -> Result:
    """One row a kernel, limit and policy."""
    kernels, notes = _planned(settings)
    rows: list[Row] = []
    for index, kernel in enumerate(kernels):
        rows += _rows(kernel)
        settings.say(f"  {index + 1}/{len(kernels)} {kernel.limit} {kernel.name}: {rows[-1].ratio:.2f}x")
    totals = {group: _totals([r for r in rows if r.group == group]) for group in dict.fromkeys(r.group for r in rows)}
    return Result(rows, bars(rows, totals, settings), facts={"totals": totals}, notes=notes)


def _planned(settings: Settings) -> tuple[list[Kernel], list[str]]:
    """Kernels with a plan under every policy, and sentences about the others."""
    layers = settings.chosen("layers", by_name(ALEXNET))
    passes = settings.chosen("passes", PASSES)
    problems = {
        f"{layer.name} {pass_.value}": layer.problem(pass_, settings.device, batch=settings.integer("batch"))
        for layer, pass_ in itertools.product(layers, passes)
    }
    planner, plans = settings.planner(), {}
    policies = (UNDIVIDED, *settings.policies("policies"))
    limits = settings.sizes("limits")
    for limit, policy in itertools.product(limits, policies):
        settings.say(f"planning {len(problems)} kernels within {limit}, {policy}")
        options = settings.planning(limits[limit], policy)
        plans[limit, policy] = plans_found(planner, problems.values(), options)
    kernels, notes = [], []
    for (limit, size), (name, problem) in itertools.product(limits.items(), problems.items()):
        found = {policy: plans[limit, policy][problem] for policy in policies if problem in plans[limit, policy]}
        if len(found) == len(policies):
            kernels.append(Kernel(name, limit, size, problem, found))
        else:
            notes.append(f"{name} within {limit}: no plan for {', '.join(p for p in policies if p not in found)}")
    return kernels, notes


def _rows(kernel: Kernel) -> list[Row]:
    """Legacy, undivided and each policy in turns; equal plans are run once and share their time."""
    problem, limit = kernel.problem, kernel.limit_bytes
    tensors = Tensors(problem)
    calls: dict[object, Call] = {_choice(p): planned_call(problem, p, tensors) for p in kernel.plans.values()}
    legacy = fastest_legacy(problem, tensors, limit)
    if legacy is not None:
        calls["legacy"] = legacy.run
    times = dict(zip(calls, race(problem, list(calls.values())), strict=True))
    peaks = {key: peak_workspace(problem, call) for key, call in calls.items() if key != "legacy"}
    undivided = Side(plan_line(kernel.plans[UNDIVIDED]), times[_choice(kernel.plans[UNDIVIDED])])
    baseline = undivided if legacy is None else Side(f"cudnn legacy {legacy.name}", times["legacy"])
    return [
        Row(
            kernel.name,
            f"{kernel.limit} {policy}",
            baseline,
            Side(plan_line(plan), times[_choice(plan)]),
            # A plan that is torch's own operator still differs from the paper's baseline, so it counts as it is.
            details={
                "framework": is_framework(plan),
                "divided": not plan.leaf,
                "undivided": undivided.what,
                "undivided_ms": undivided.value,
                "legacy_workspace": None if legacy is None else legacy.workspace,
                "limit": limit,
                "peak_workspace": peaks[_choice(plan)],
                "within_limit": peaks[_choice(plan)] <= limit,
                "planned_workspace": plan.workspace,
                "plan": plan.to_json(),
            },
        )
        for policy, plan in kernel.plans.items()
    ]


def _choice(plan: Plan) -> tuple[str, Config, tuple[object, ...], tuple[int, ...]]:
    """What a plan runs, whatever was measured of it: plans that run the same are equal here."""
    return plan.solver, plan.config, tuple(map(_choice, plan.children)), plan.counts


def _totals(rows: list[Row]) -> dict[str, float]:
    """Sums over the kernels of one limit and policy, and what they are over each baseline."""
    baseline = math.fsum(row.baseline.value for row in rows)
    undivided = math.fsum(row.details["undivided_ms"] for row in rows)
    ours = math.fsum(row.ours.value for row in rows)
    return {
        "baseline_ms": baseline,
        "undivided_ms": undivided,
        "ours_ms": ours,
        "over_baseline": baseline / ours,
        "over_undivided": undivided / ours,
        "kernels": len(rows),
        "divided": sum(row.details["divided"] for row in rows),
    }


def bars(rows: list[Row], totals: dict[str, dict[str, float]], settings: Settings) -> list[Bar]:
    """The paper's result (1.63x with ``all`` on P100 and V100) at 64 MiB, and the limit in every kernel."""
    applies = settings.device.type == "cuda" and not settings.quick
    powers, every = (totals.get(f"{JUDGED} {policy}", {}) for policy in ("powers_of_two", "all"))
    gained = powers.get("ours_ms", math.nan) / every.get("ours_ms", math.nan)
    over = max((row.details["peak_workspace"] / row.details["limit"] for row in rows), default=math.nan)
    return [
        Bar(
            f"{JUDGED}: powers_of_two over cuDNN's legacy algorithms",
            powers.get("over_baseline", math.nan),
            least=2.0,
            applies=applies,
        ),
        # Two runs of one plan differ by this much.
        Bar(
            f"{JUDGED}: powers_of_two over the best undivided",
            powers.get("over_undivided", math.nan),
            least=0.99,
            applies=applies,
        ),
        Bar(f"{JUDGED}: all over powers_of_two", gained, least=0.99, applies=applies),
        Bar("greatest measured workspace over its limit", over, most=1.0),
    ]
