"""One problem by torch and by all configs of one of our solvers: calls in turns, and the fastest config counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from harness import queued
from harness.result import Row, Side
from harness.settings import Settings
from tilewise import execute, solvers
from tilewise.plan import Plan
from tilewise.problems.operands import make_operands

__all__ = ["row_of", "times_of"]

Call = Callable[[], object]
WARM_UP = 2
BUDGET_MS = 300.0
"""What all calls of a problem may take together on a GPU after ``rounds`` of them, of which 5 are made in any case."""


def times_of(settings: Settings, calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, in turns.

    On a CPU by the host's clock, as a program waits for them. On a GPU by events: calls wait in its queue, so that the
    time to launch kernels counts on no side, and the L2 cache is cold.
    """
    count = settings.integer("rounds")
    if settings.device.type == "cuda":
        took = queued.rounds(list(calls.values()), settings.device, budget_ms=BUDGET_MS, least=5, most=count)
        return {text: [one.device_ms for one in each] for text, each in zip(calls, took, strict=True)}
    found: dict[str, list[float]] = {text: [] for text in calls}
    for turn in range(WARM_UP + count):
        for text, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= WARM_UP:
                found[text].append((time.perf_counter() - start) * 1e3)
    return found


def row_of(settings: Settings, label: str, group: str, p: Any, ours: str) -> Row:
    """Both medians of one problem, ``ours`` by the solver of that name, each call with a new result.

    Details have the least times of both, the time of a copy of the first operand, and the rate at which our config
    moves the least bytes that must move.
    """
    operands = make_operands(p)
    solver, torchs = solvers.get(ours), solvers.baseline(p)
    by_torch: Any = torchs.bind(p, next(iter(torchs.configs(p))), *operands, *(None for _ in p.results))
    plans = {str(c): Plan(p.key, solver.name, solver.version, c) for c in solver.configs(p)}
    calls: dict[str, Call] = {
        "torch": partial(by_torch, *operands, *(None for _ in p.results), None),
        "copy": operands[0].clone,
    }
    calls |= {text: partial(execute.bind(plan, p, *operands).call, *operands) for text, plan in plans.items()}
    took = times_of(settings, calls)
    medians = {text: statistics.median(times) for text, times in took.items()}
    best = min(plans, key=lambda text: medians[text])
    details = {
        "bytes": p.bytes,
        "gb_per_s": p.bytes / medians[best] / 1e6,
        "copy_ms": medians["copy"],
        "least_ms": min(took[best]),
        "torch_least_ms": min(took["torch"]),
        "config": plans[best].config.key,
    }
    return Row(label, group, Side("torch", medians["torch"]), Side(best, medians[best]), details=details)
