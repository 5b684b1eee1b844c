"""Pooling layers of AlexNet, GoogLeNet and ResNet-50 on a CPU: our kernel against torch's own function.

Both sides are called as a program calls them, in turns, each with a new result; times are medians. ``forward`` runs
without autograd, ``training`` is forward and backward. Of our configs the fastest counts, as the planner takes it. The
details have the bytes that must move, and the rate at which our kernel moves them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings

from tilewise import execute, solvers
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.problems.operands import make_operands
from tilewise.problems.pooling.notation import parse_pooling
from tilewise.problems.pooling.problem import PoolingProblem

LAYERS = {
    "alexnet pool1": "max_pool:n1c64i55x55k3x3s2x2",
    "alexnet pool2": "max_pool:n1c192i27x27k3x3s2x2",
    "alexnet pool5": "max_pool:n1c256i13x13k3x3s2x2",
    "resnet50 pool1": "max_pool:n1c64i112x112k3x3s2x2p1x1",
    "resnet50 pool5": "avg_pool:n1c2048i7x7k7x7",
    "googlenet pool1": "max_pool:n1c64i112x112k3x3s2x2+ceil",
    "googlenet pool2": "max_pool:n1c192i56x56k3x3s2x2+ceil",
    "googlenet 3a": "max_pool:n1c192i28x28k3x3s1x1p1x1",
    "googlenet pool3": "max_pool:n1c480i28x28k3x3s2x2+ceil",
    "googlenet 4a": "max_pool:n1c480i14x14k3x3s1x1p1x1",
    "googlenet pool4": "max_pool:n1c832i14x14k3x3s2x2+ceil",
    "googlenet 5b": "max_pool:n1c832i7x7k3x3s1x1p1x1",
}
DEFAULTS = {
    "layers": ",".join(LAYERS),
    "batches": "1,16",
    "tasks": "inference,training",
    "layouts": "contiguous,channels_last",
    "rounds": "21",
}
QUICK = {"layers": "alexnet pool5", "batches": "1", "rounds": "3"}


def run(settings: Settings) -> Result:
    """One row a layer, batch, task and layout. Raises :class:`NothingToMeasure` on a GPU."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device={settings.device}: calls are timed by the host's clock; a CPU would do")
    rows: list[Row] = []
    for layout in settings.chosen("layouts", {name: name for name in ("contiguous", "channels_last")}):
        for task in settings.chosen("tasks", {name: name for name in ("inference", "training")}):
            for batch in settings.integers("batches"):
                found = []
                for name in settings.chosen("layers", {name: name for name in LAYERS}):
                    p = parse_pooling(LAYERS[name], task=task, layout_name=layout, device=device_name(settings.device))
                    found.append(row_of(settings, name, replace(p, batch=batch)))
                settings.say(f"  {layout} {task} n{batch}: " + ", ".join(f"{row.ratio:.2f}" for row in found))
                rows += found
    bars = []
    for group in dict.fromkeys(row.group for row in rows):
        ratios = [row.ratio for row in rows if row.group == group]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        bars.append(Bar(f"{group}: geometric mean over torch", mean, least=1.0, applies=not settings.quick))
    return Result(rows, bars)


def row_of(settings: Settings, name: str, p: PoolingProblem) -> Row:
    """Both times of one layer."""
    operands = make_operands(p)
    torchs, ours = solvers.get("aten_pooling"), solvers.get("window_pooling")
    plans = {"torch": Plan(p.key, torchs.name, torchs.version, next(iter(torchs.configs(p))))}
    plans |= {str(c): Plan(p.key, ours.name, ours.version, c) for c in ours.configs(p)}
    calls: dict[str, Callable[[], object]] = {
        text: partial(execute.bind(plan, p, *operands).call, *operands) for text, plan in plans.items()
    }
    took: dict[str, list[float]] = {text: [] for text in calls}
    for turn in range(2 + settings.integer("rounds")):
        for text, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                took[text].append((time.perf_counter() - start) * 1e3)
    medians = {text: statistics.median(times) for text, times in took.items()}
    best = min((text for text in plans if text != "torch"), key=lambda text: medians[text])
    details = {"bytes": p.bytes, "gb_per_s": p.bytes / medians[best] / 1e6}
    label = f"{name} n{p.batch}"
    group = f"{p.layout_name} {p.task}"
    return Row(label, group, Side("torch", medians["torch"]), Side(best, medians[best]), details=details)
