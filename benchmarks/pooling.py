"""Pooling layers of AlexNet, GoogLeNet and ResNet-50: our kernels against torch's own function.

Both sides are called in turns, each with a new result; times are medians. ``inference`` runs without autograd,
``training`` is forward and backward. Of our configs the fastest counts, as the planner takes it. On a GPU calls wait in
its queue, so that the time to launch kernels does not count. The details have the bytes that must move, and the rate at
which our kernels move them.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from harness.one_problem import row_of
from harness.result import Bar, Result, Row
from harness.settings import Settings

from tilewise.machine.device import device_name
from tilewise.problems.pooling.notation import parse_pooling

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
    "dtypes": "",
    "rounds": "21",
}
"""Without ``dtypes`` fp32 on a CPU, fp32 and bf16 on a GPU."""
OURS = {"cpu": "window_pooling", "cuda": "window_tiles"}
QUICK = {"layers": "alexnet pool5", "batches": "1", "rounds": "3"}


def run(settings: Settings) -> Result:
    """One row a layer, batch, task, layout and type."""
    device, name_of = settings.device.type, device_name(settings.device)
    rows: list[Row] = []
    for dtype in settings.words("dtypes") or (("fp32",) if device == "cpu" else ("fp32", "bf16")):
        for layout in settings.chosen("layouts", {name: name for name in ("contiguous", "channels_last")}):
            for task in settings.chosen("tasks", {name: name for name in ("inference", "training")}):
                group = f"{layout} {task} {dtype}"
                for batch in settings.integers("batches"):
                    found = []
                    for name in settings.chosen("layers", {name: name for name in LAYERS}):
                        p = parse_pooling(LAYERS[name], task=task, layout_name=layout, dtype=dtype, device=name_of)
                        whole = replace(p, batch=batch)
                        found.append(row_of(settings, f"{name} n{batch}", group, whole, OURS[device]))
                    settings.say(f"  {group} n{batch}: " + ", ".join(f"{row.ratio:.2f}" for row in found))
                    rows += found
    bars = []
    for group in dict.fromkeys(row.group for row in rows):
        ratios = [row.ratio for row in rows if row.group == group]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        bars.append(Bar(f"{group}: geometric mean over torch", mean, least=1.0, applies=not settings.quick))
    return Result(rows, bars)
