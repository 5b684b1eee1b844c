"""Local response normalization of AlexNet on a CPU: our kernels against torch's function, forward and with backward.

The layers are AlexNet's first and second one (Krizhevsky et al. 2012, section 3.3) at several batches. Both sides are
called as a program calls them, in turns, each with a new result; times are medians. Of our configs the fastest counts,
as the planner takes it. Memory is kept between calls on both sides. A row's details have the least time of both sides,
which other processes disturb less, the larger L2 error of our config against float64, and the time of a copy of the
input, which moves the least memory that a forward can.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings

from tilewise import execute, solvers
from tilewise.plan import Plan
from tilewise.problems.lrn.checks import errors_of
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.operands import make_operands

LAYERS = {"norm1": ("norm1", 96, (55, 55)), "norm2": ("norm2", 256, (27, 27))}
"""Name, channels and space of AlexNet's two normalizations."""
DEFAULTS = {
    "layers": "norm1,norm2",
    "batches": "1,16,64",
    "tasks": "inference,training",
    "layout": "contiguous",
    "rounds": "15",
}
QUICK = {"layers": "norm2", "batches": "1", "rounds": "3"}
LEAST = 4.0
WARM_UP = 2


def run(settings: Settings) -> Result:
    """One row a layer, batch and task. Raises :class:`NothingToMeasure` on a GPU."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device={settings.device}: our kernels are for a CPU; a CPU would do")
    rows: list[Row] = []
    for task in settings.words("tasks"):
        for name, channels, space in settings.chosen("layers", LAYERS):
            for batch in settings.integers("batches"):
                layout = settings.words("layout")[0]
                rows.append(
                    row_of(settings, name, LrnProblem(batch, channels, space, 5, task=task, layout_name=layout))
                )
                settings.say(f"  {task} {name} batch {batch}: {rows[-1].ratio:.1f}")
    bars = []
    for task in settings.words("tasks"):
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows if row.group == task))
        bars.append(Bar(f"{task}: geometric mean over torch", mean, least=LEAST, applies=not settings.quick))
    return Result(rows, bars)


def row_of(settings: Settings, name: str, p: LrnProblem) -> Row:
    """Both times of one normalization, and that of a copy."""
    operands = make_operands(p)
    solver, torchs = solvers.get("channel_window"), solvers.get("aten_lrn")
    plans = {str(c): Plan(p.key, solver.name, solver.version, c) for c in solver.configs(p)}
    by_torch: Any = torchs.bind(p, next(iter(torchs.configs(p))), *operands, *(None for _ in p.results))
    calls: dict[str, Callable[[], object]] = {"torch": partial(by_torch, *operands), "copy": operands[0].clone}
    calls |= {text: partial(execute.bind(plan, p, *operands).call, *operands) for text, plan in plans.items()}
    took: dict[str, list[float]] = {text: [] for text in calls}
    for turn in range(WARM_UP + settings.integer("rounds")):
        for text, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= WARM_UP:
                took[text].append((time.perf_counter() - start) * 1e3)
    medians = {text: statistics.median(times) for text, times in took.items()}
    best = min(plans, key=lambda text: medians[text])
    small = replace(p, batch=1)
    bound = execute.bind(replace(plans[best], problem=small.key), small, *make_operands(small))
    count = len(p.operands)
    details = {
        "batch": p.batch,
        "megabytes": p.nbytes("x") / 1e6,
        "copy_ms": medians["copy"],
        "least_ms": min(took[best]),
        "torch_least_ms": min(took["torch"]),
        "error": errors_of(small, lambda *tensors: bound.call(*tensors[:count])).l2,
    }
    label = f"{name} N={p.batch}"
    return Row(label, p.task, Side("torch", medians["torch"]), Side(best, medians[best]), details=details)
