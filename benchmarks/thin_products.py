"""Products with few rows or columns: our thin kernels against torch's own call, by size of the short side.

The sizes are those of recurrent layers: a weight of H by H and N rows of activations (``linear``: ``F.linear``; ``nn``:
the gradient of its input), or N columns (``columns``: a weight times H x N). Both sides are called as a program calls
them, in turns, each with a new result; times are medians. Of our configs the fastest counts, as the planner takes it.
The bar holds for the geometric mean over sizes with N up to 65 on a CPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings

from tilewise import execute, solvers
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import make_operands

DEFAULTS = {
    "ops": "linear,nn,columns",
    "hidden": "256,512,1024,1760,2560",
    "short": "1,2,4,8,9,16,17,32,33,48,64,65",
    "rounds": "41",
}
QUICK = {"hidden": "64", "short": "3", "rounds": "3"}
LEAST, MOST_SHORT = 1.4, 65


def run(settings: Settings) -> Result:
    """One row an operation, size and length of the short side. Raises :class:`NothingToMeasure` on a GPU."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device={settings.device}: calls are timed by the host's clock; a CPU would do")
    rows: list[Row] = []
    for op in settings.chosen("ops", {name: name for name in ("linear", "nn", "columns")}):
        for hidden in settings.integers("hidden"):
            found = [row_of(settings, op, hidden, short) for short in settings.integers("short")]
            settings.say(f"  {op} {hidden}: " + ", ".join(f"{row.ratio:.2f}" for row in found))
            rows += found
    bars = []
    for op in settings.words("ops"):
        ratios = [row.ratio for row in rows if row.group == op and row.details["short"] <= MOST_SHORT]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        bars.append(Bar(f"{op}: geometric mean over torch", mean, least=LEAST, applies=not settings.quick))
    return Result(rows, bars)


def row_of(settings: Settings, op: str, hidden: int, short: int) -> Row:
    """Both times of one product."""
    name = device_name(settings.device)
    p = {
        "linear": GemmProblem(short, hidden, hidden, "NT", device=name),
        "nn": GemmProblem(short, hidden, hidden, "NN", device=name),
        "columns": GemmProblem(hidden, short, hidden, "NN", device=name),
    }[op]
    a, b = make_operands(p)
    solver = solvers.get("thin_gemm")
    plans = {str(c): Plan(p.key, solver.name, solver.version, c) for c in solver.configs(p)}
    calls: dict[str, Callable[[], object]] = {
        "torch": partial(torch.nn.functional.linear if op == "linear" else torch.mm, a, b)
    }
    calls |= {text: partial(execute.bind(plan, p, a, b).call, a, b) for text, plan in plans.items()}
    took: dict[str, list[float]] = {text: [] for text in calls}
    for turn in range(2 + settings.integer("rounds")):
        for text, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                took[text].append((time.perf_counter() - start) * 1e3)
    medians = {text: statistics.median(times) for text, times in took.items()}
    best = min(plans, key=lambda text: medians[text])
    details = {
        "short": short,
        "gflops": p.flops / medians[best] / 1e6,
        "torch_gflops": p.flops / medians["torch"] / 1e6,
    }
    return Row(f"{hidden} N={short}", op, Side("torch", medians["torch"]), Side(best, medians[best]), details=details)
