"""mu-cuDNN Figure 13: one workspace budget for all of a network's convolutions, AlexNet and ResNet-50.

Oyama et al. 2018, IV-D, batches 256 and 32, fp32. A row is one network, budget in all and policy: ``paper_wd`` gives
every kernel a segment of its own, ``arena`` lets kernels that run one after the other share. The baseline is cuDNN's
legacy algorithms, undivided, each within its own limit: as much for all kernels together as the budget, or for
ResNet-50's judged row twice that, as in the paper. Every kernel's plans and baselines are timed in turns; sums count
equal layers as often as they occur. On a CPU the best undivided plan within the limit stands in for the baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from harness.legacy import fastest_legacy
from harness.network_kernels import Kernel, kernels_of
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.sides import Call, Tensors, plan_line, planned_call, race

from tilewise.plan import Plan
from tilewise.planner.budget.allocate import POLICIES, Allocation, allocate
from tilewise.planner.budget.allocate import Kernel as Item
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "networks": "",
    "batch": "0",
    "budgets": "",
    "batch_sizes": "powers_of_two",
    "rigor": "measure",
    "kernels": "0",
}
QUICK = {
    "networks": "alexnet",
    "batch": "2",
    "budgets": "960MiB",
    "batch_sizes": "undivided",
    "rigor": "estimate",
    "kernels": "2",
}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A network's batch, the kernels that the paper counts, and budgets with the baseline's own; MiB in all."""

    batch: int
    kernels: int
    budgets: tuple[tuple[int, int], ...]
    least: float
    """The bar of the first budget."""


CASES = {
    "alexnet": Case(256, 15, ((120, 120), (960, 960), (7680, 7680)), 2.0),
    "resnet50": Case(32, 159, ((2544, 5088), (2544, 2544), (5088, 5088)), 1.2),
}


def run(settings: Settings) -> Result:
    """Rows of a network once all its kernels are timed; saved after each network."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for network in settings.chosen("networks", {name: name for name in CASES}):
        found, judged = _network(settings, network)
        rows += found
        bars += judged
        settings.keep(Result(rows, bars))
    return Result(rows, bars)


def _network(settings: Settings, network: str) -> tuple[list[Row], list[Bar]]:
    case = CASES[network]
    (batch_sizes,) = settings.policies("batch_sizes")
    asked = [size // MIB for size in settings.sizes("budgets").values()] if settings.text("budgets") else []
    budgets = [pair for pair in case.budgets if not asked or pair[0] in asked]
    kernels = kernels_of(network, settings.integer("batch") or case.batch, settings.device, settings.integer("kernels"))
    planner, fronts = settings.planner(), {}
    for kernel in kernels:
        fronts[kernel.problem] = planner.front(kernel.problem, settings.planning(batch_sizes=batch_sizes))
        settings.say(f"  {network} {kernel.name}: {len(fronts[kernel.problem])} points")
    items = [Item(k.name, tuple((p.time_ms, p.workspace) for p in fronts[k.problem]), k.count) for k in kernels]
    found = {(budget, policy): allocate(items, budget * MIB, policy) for budget, _ in budgets for policy in POLICIES}
    limits = sorted({own * MIB // case.kernels for _, own in budgets})
    times, names = _timed(kernels, fronts, found, limits)
    rows = []
    for budget, own in budgets:
        limit = own * MIB // case.kernels
        baseline = math.fsum(k.count * times[k.problem][limit] for k in kernels)
        for policy in POLICIES:
            allocation = found[budget, policy]
            chosen = [fronts[k.problem][i] for k, i in zip(kernels, allocation.choices, strict=True)]
            ours = math.fsum(k.count * times[k.problem][plan_line(p)] for k, p in zip(kernels, chosen, strict=True))
            rows.append(
                Row(
                    f"{budget} MiB {policy} over {own} MiB",
                    network,
                    Side(f"cudnn legacy undivided, {limit / MIB:.0f} MiB each", baseline),
                    Side(policy, ours),
                    details={
                        **_facts(allocation),
                        "kernels": [
                            {
                                "kernel": k.name,
                                "count": k.count,
                                "baseline": names[k.problem][limit],
                                "baseline_ms": times[k.problem][limit],
                                "plan": plan_line(p),
                                "ms": times[k.problem][plan_line(p)],
                                "workspace": p.workspace,
                            }
                            for k, p in zip(kernels, chosen, strict=True)
                        ],
                    },
                )
            )
            settings.say(f"  {network} {rows[-1].name}: {rows[-1].ratio:.2f}x")
    return rows, _bars(network, rows, case, settings)


def _facts(allocation: Allocation) -> dict[str, Any]:
    program = allocation.program
    return {
        "used": allocation.used,
        "least": allocation.least,
        "variables": program.variables,
        "rows": program.rows,
        "solve_ms": program.solve_ms,
        "optimal": program.optimal,
        "method": program.method,
    }


def _timed(
    kernels: list[Kernel],
    fronts: dict[ConvProblem, tuple[Plan, ...]],
    found: dict[tuple[int, str], Allocation],
    limits: list[int],
) -> tuple[dict[ConvProblem, dict[Any, float]], dict[ConvProblem, dict[int, str]]]:
    """Milliseconds of each kernel's chosen plans by their lines and of its baselines by their limits, in turns."""
    times: dict[ConvProblem, dict[Any, float]] = {}
    names: dict[ConvProblem, dict[int, str]] = {}
    for index, kernel in enumerate(kernels):
        problem, front = kernel.problem, fronts[kernel.problem]
        tensors = Tensors(problem)
        plans = {plan_line(front[a.choices[index]]): front[a.choices[index]] for a in found.values()}
        calls: dict[Any, Call] = {line: planned_call(problem, plan, tensors) for line, plan in plans.items()}
        names[problem] = {}
        for limit in limits:
            legacy = fastest_legacy(problem, tensors, limit)
            undivided = [plan for plan in front if plan.leaf and plan.workspace <= limit] or [front[-1]]
            calls[limit] = planned_call(problem, undivided[0], tensors) if legacy is None else legacy.run
            names[problem][limit] = plan_line(undivided[0]) if legacy is None else legacy.name
        times[problem] = dict(zip(calls, race(problem, list(calls.values()), budget_ms=60.0), strict=True))
    return times, names


def _bars(network: str, rows: list[Row], case: Case, settings: Settings) -> list[Bar]:
    applies = settings.device.type == "cuda" and not settings.quick
    budget, own = case.budgets[0]
    at = {row.name: row for row in rows}
    paper = at.get(f"{budget} MiB paper_wd over {own} MiB")
    pairs = [(at[row.name.replace("arena", "paper_wd")], row) for row in rows if " arena " in row.name]
    solve = max(row.details["solve_ms"] for row in rows)
    return [
        Bar(
            f"{network}: paper_wd {budget} MiB over cuDNN's legacy algorithms within {own} MiB in all",
            math.nan if paper is None else paper.ratio,
            least=case.least,
            applies=applies,
        ),
        # Two runs of one plan differ by this much.
        Bar(
            f"{network}: least of arena over paper_wd",
            min(p.ours.value / a.ours.value for p, a in pairs),
            least=0.99,
            applies=applies,
        ),
        Bar(f"{network}: ms to solve the greatest program", solve, most=20.0),
        Bar(f"{network}: programs proven optimal", float(all(row.details["optimal"] for row in rows)), least=1.0),
    ]
