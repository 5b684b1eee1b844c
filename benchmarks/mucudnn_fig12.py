"""mu-cuDNN Figure 12: memory of each layer at no more than 1.1 times the time, AlexNet and ResNet-18.

Oyama et al. 2018, IV-C, batches 256 and 128: up to 3.43 and 2.73 times less for a layer in all. For each kernel the
baseline is the fastest of cuDNN's legacy algorithms within 512 MiB; ours is the plan of least workspace whose time,
measured in turns with it, is at most 1.1 times the baseline's. Values are MiB of operands, result and workspace;
``details`` has the workspace of both (ours as measured), times, and the commit. Rows that an earlier run left in the
result's file are kept and not measured again, so that runs may be ended; bars are judged of whole networks.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from harness.legacy import fastest_legacy
from harness.machine import commit
from harness.network_kernels import Kernel, kernels_of
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Tensors, peak_workspace, plan_line, planned_call, race

from tilewise.plan import Plan

DEFAULTS = {"networks": "", "batch": "0", "baseline": "512MiB", "policy": "powers_of_two", "rigor": "measure",
            "seconds": "0"}  # fmt: skip
QUICK = {"networks": "alexnet", "batch": "2", "policy": "undivided", "rigor": "estimate"}
BATCHES = {"alexnet": 256, "resnet18": 128}
MOST_TIME = 1.1
MIB = 2**20


def run(settings: Settings) -> Result:
    """One row a kernel; saved after each."""
    if settings.device.type != "cuda":
        raise NothingToMeasure("cuDNN's legacy algorithms are there on a GPU only")
    planner, deadline, known = settings.planner(), settings.deadline(), _earlier(settings)
    rows: list[Row] = []
    left: dict[str, int] = {}
    (policy,) = settings.policies("policy")
    for network in settings.chosen("networks", {name: name for name in BATCHES}):
        kernels = kernels_of(network, settings.integer("batch") or BATCHES[network], settings.device)
        left[network] = len(kernels)
        for kernel in kernels:
            row = known.get((network, kernel.name, kernel.problem.key))
            if row is None and not deadline.passed:
                front = planner.front(kernel.problem, settings.planning(batch_sizes=policy))
                row = _row(network, kernel, front, settings.size("baseline"))
                settings.say(f"  {network} {kernel.name}: {row.baseline.value:.1f} to {row.ours.value:.1f} MiB")
            if row is not None:
                rows.append(row)
                left[network] -= 1
                settings.keep(_result(rows, left))
    return _result(rows, left)


def _earlier(settings: Settings) -> dict[tuple[str, str, str], Row]:
    """Rows of an earlier run with the same options, by network, kernel and problem."""
    found = settings.earlier_with("batch", "baseline", "policy", "rigor")
    rows = [Row.from_json(row) for row in found["rows"]] if found is not None else []
    return {(row.group, row.name, row.details["problem"]): row for row in rows}


def _result(rows: list[Row], left: dict[str, int]) -> Result:
    notes = [f"{network}: {count} kernels are not measured yet" for network, count in left.items() if count]
    return Result(rows, bars(rows, [network for network, count in left.items() if not count]), notes=notes)


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
            "tilewise": commit(),
        },
    )


def bars(rows: list[Row], whole: Collection[str]) -> list[Bar]:
    """Sums over kernels of a network, equal layers counted once as in the figure; judged where they are ``whole``."""
    found = []
    for network in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == network]
        tensors, before, after = (
            math.fsum(row.details[name] for row in own) for name in ("tensors", "baseline_workspace", "workspace")
        )
        share = after / before if before else math.nan
        slower = max(row.details["ours_ms"] / row.details["baseline_ms"] for row in own)
        found += [
            Bar(f"{network}: {text}", value, most=most, applies=network in whole)
            for text, value, most in (
                ("share of the baseline's summed workspace", share, 1 / 6),
                ("operands, results and workspace over operands and results", 1 + after / tensors, 1.1),
                ("greatest time of a kernel over its baseline", slower, MOST_TIME),
            )
        ]
    return found
