"""What a step takes the host before it has queued all: torch's and the planned one, eager, layer after layer.

A hot loop of one layer shows little of it, because its objects stay in the processor's caches. Here a whole network's
step runs, so that every layer's objects are cold, as they are in training. The clock stops when backward returns, with
the GPU still at work; each step begins with the GPU idle and its queue empty. ``cases`` are those of ``steps``. The
sides take turns in one layout, the usual one for the mode. ``details`` has forward and backward apart, and what a
replaced pass costs more than torch's, in microseconds. On a CPU the host also computes, so there is nothing to measure.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from harness.machine import commit
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.training import GPU_CASES, LAYOUTS, USUAL_LAYOUT, Case, case_of, planned_in, precision
from torch import nn

import tilewise.nn
from tilewise.kernels.native import autograd
from tilewise.machine.torch_state import framework_flags

DEFAULTS = {"cases": GPU_CASES, "rigor": "measure", "goal": "step", "rounds": "41"}
QUICK = {"cases": "photonet@2@fp32", "rigor": "estimate", "rounds": "3"}
MOST_RATIO, MOST_US = 1.05, 5.0
WARM_UP = 5


def run(settings: Settings) -> Result:
    """One row a case. Raises :class:`NothingToMeasure` on a CPU."""
    if settings.device.type != "cuda":
        raise NothingToMeasure(f"device={settings.device}: the host computes there; a GPU would do")
    rows = []
    for text in settings.words("cases"):
        case = case_of(text)
        with framework_flags("cuda", "tf32" if case.mode == "tf32" else "ieee", deterministic=False):
            rows.append(row_of(settings, case))
        settings.say(f"  {rows[-1].name}: {rows[-1].baseline.value:.2f} and {rows[-1].ours.value:.2f} ms")
    costs = [row.details["us_a_replaced_pass"] for row in rows if row.details["replaced_passes"]]
    bars = [
        Bar("most host time of a planned step over torch's", max(1 / row.ratio for row in rows), most=MOST_RATIO,
            applies=not settings.quick),
        Bar("most host time that a replaced pass costs more, us", max(costs, default=0.0), most=MOST_US,
            applies=not settings.quick),
    ]  # fmt: skip
    return Result(rows, bars)


def row_of(settings: Settings, case: Case) -> Row:
    """The host's time of both sides."""
    usual = LAYOUTS[USUAL_LAYOUT[case.mode]]
    own = case.network.module.to(settings.device).train().to(memory_format=usual)
    images = case.network.example_inputs(case.batch, settings.device).to(memory_format=usual)
    planned = copy.deepcopy(own)
    planned_in(settings, case, planned, images)
    from_python = autograd.why_not()  # waits until it is compiled
    sides = {"torch": own, "planned": planned}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(WARM_UP + settings.integer("rounds")):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            times = host_ms(case, sides[name], images)
            if turn >= WARM_UP:
                took[name].append(times)
    medians = {name: [statistics.median(part) for part in zip(*times, strict=True)] for name, times in took.items()}
    total = {name: statistics.median(map(sum, times)) for name, times in took.items()}
    replaced = sum(one.replaced for _, _, one in tilewise.nn.report(planned).passes())
    details = {
        "mode": case.mode,
        "forward_ms": {name: forward for name, (forward, _) in medians.items()},
        "backward_ms": {name: backward for name, (_, backward) in medians.items()},
        "replaced_passes": replaced,
        "us_a_replaced_pass": (total["planned"] - total["torch"]) * 1e3 / max(1, replaced),
        "from_python": from_python,
        "tilewise": commit(),
    }
    return Row(case.name, "host", Side("torch", total["torch"]), Side("planned", total["planned"]), details=details)


def host_ms(case: Case, module: nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """Milliseconds until forward and loss are queued, and until backward is."""
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize(images.device)
    start = time.perf_counter()
    with precision(case, images.device):
        loss = case.network.loss(module(images))
    middle = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    torch.cuda.synchronize(images.device)
    return (middle - start) * 1e3, (end - middle) * 1e3
