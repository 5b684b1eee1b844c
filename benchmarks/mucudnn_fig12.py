"""mu-cuDNN Figure 12: memory of each layer at no more than 1.1 times the time, AlexNet and ResNet-18.

Oyama et al. 2018, IV-C, batches 256 and 128: up to 3.43 and 2.73 times less for a layer in all. For each kernel the
baseline is the fastest of cuDNN's legacy algorithms within 512 MiB; ours is the plan of least workspace whose time,
measured in turns with it, is at most 1.1 times the baseline's. Values are MiB of operands, result and workspace;
``details`` has the workspace of both (ours as measured), and times.
"""

from __future__ import annotations

import math

from harness.legacy import fastest_legacy
from harness.network_kernels import Kernel, kernels_of
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Tensors, peak_workspace, plan_line, planned_call, race

from tilewise.plan import Plan

DEFAULTS = {"networks": "", "batch": "0", "baseline": "512MiB", "policy": "powers_of_two", "rigor": "measure"}
QUICK = {"networks": "alexnet", "batch": "2", "policy": "undivided", "rigor": "estimate"}
BATCHES = {"alexnet": 256, "resnet18": 128}
MOST_TIME = 1.1
MIB = 2**20


def run(settings: Settings) -> Result:
    """One row a kernel; saved after each."""
    if settings.device.type != "cuda":
        raise NothingToMeasure("cuDNN's legacy algorithms are there on a GPU only")
    planner, rows = settings.planner(), []
    (policy,) = settings.policies("policy")
    for network in settings.chosen("networks", {name: name for name in BATCHES}):
        kernels = kernels_of(network, settings.integer("batch") or BATCHES[network], settings.device)
        for kernel in kernels:
            front = planner.front(kernel.problem, settings.planning(batch_sizes=policy))
            rows.append(_row(network, kernel, front, settings.size("baseline")))
            settings.keep(Result(rows, bars(rows)))
            before, after = rows[-1].baseline.value, rows[-1].ours.value
            settings.say(f"  {network} {kernel.name}: {before:.1f} to {after:.1f} MiB")
    return Result(rows, bars(rows))


def _row(network: str, kernel: Kernel, front: tuple[Plan, ...], limit: int) -> Row:
    problem = kernel.problem
    tensors = Tensors(problem)
    legacy = fastest_legacy(problem, tensors, limit)
    assert legacy is not None
    calls = [planned_call(problem, plan, tensors) for plan in front]
    legacy_ms, *times = race(problem, [legacy.run, *calls], budget_ms=100.0)
    keeping = [i for i, ms in enumerate(times) if ms <= MOST_TIME * legacy_ms]
    chosen = keeping[-1] if keeping else min(range(len(times)), key=lambda i: times[i])
    workspace = peak_workspace(problem, calls[chosen])
    return Row(
        kernel.name,
        network,
        Side(f"cudnn legacy {legacy.name}", (problem.bytes + legacy.workspace) / MIB),
        Side(plan_line(front[chosen]), (problem.bytes + workspace) / MIB),
        unit="MiB",
        details={
            "count": kernel.count,
            "tensors": problem.bytes,
            "baseline_workspace": legacy.workspace,
            "workspace": workspace,
            "baseline_ms": legacy_ms,
            "ours_ms": times[chosen],
            "keeps_time": bool(keeping),
            "problem": problem.key,
        },
    )


def bars(rows: list[Row]) -> list[Bar]:
    """Sums over kernels of a network, equal layers counted once as in the figure."""
    found = []
    for network in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == network]
        tensors, before, after = (
            math.fsum(row.details[name] for row in own) for name in ("tensors", "baseline_workspace", "workspace")
        )
        share = after / before if before else math.nan
        slower = max(row.details["ours_ms"] / row.details["baseline_ms"] for row in own)
        found += [
            Bar(f"{network}: share of the baseline's summed workspace", share, most=1 / 6),
            Bar(f"{network}: operands, results and workspace over operands and results", 1 + after / tensors, most=1.1),
            Bar(f"{network}: greatest time of a kernel over its baseline", slower, most=MOST_TIME),
        ]
    return found
