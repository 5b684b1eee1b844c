"""Whole training steps as people run them, torch and planned, in every way of running them.

A step is forward, loss (the mean of squares) and backward. ``cases`` are ``network@batch@mode`` with any name that
``tilewise time`` takes. The modes are ``fp32`` (without TF32), ``tf32`` and ``bf16`` (autocast). The ``ways`` are
``eager``, ``compiled`` (``torch.compile``), ``reduce-overhead`` (compiled, with CUDA graphs) and ``graph`` (the step
captured as a CUDA graph); on a CPU there are no graphs. torch runs in benchmark mode, contiguous and channels_last, and
the faster of the two is its side of the ratio; the plans run in the layout in which torch's eager step is the faster,
or in the ``layout`` that is given. Several steps are queued before each look at the clock, as in a training loop, so
that the host's time counts only where the device waits for it. With ``graphs=auto`` ours is in every way the step of a
model that :func:`tilewise.optimize` was given with ``graphs="auto"``, run as it is. All sides take turns. ``details``
has the interval that holds the true ratio in 95 of 100 cases, and the gain that the passes promise
(``predicted_gain_ms``) beside that of the step over torch in the same layout (``gain_ms``).

A row that an earlier run left in the result's file is kept, with the commit that it was measured at. So a long table is
made in several runs.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from harness.machine import commit
from harness.ranks import Replay
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.training import GPU_CASES, LAYOUTS, USUAL_LAYOUT, Case, Step, case_of, planned_in, step_of
from torch import nn

import tilewise
import tilewise.nn
from tilewise.machine.torch_state import framework_flags
from tilewise.nn.step.pairs import interval

DEFAULTS = {
    "cases": "",
    "ways": "eager,compiled,graph",
    "rigor": "measure",
    "goal": "step",
    "layout": "",
    "graphs": "never",
    "rounds": "21",
    "round_ms": "400",
    "seconds": "0",
}
QUICK = {"cases": "photonet@2@fp32", "ways": "eager", "rigor": "estimate", "rounds": "1", "round_ms": "1"}
CPU_CASES = (
    "torchvision:resnet18@8@fp32,torchvision:mobilenet_v3_large@8@fp32,timm:convnext_tiny@4@fp32,"
    "torchvision:efficientnet_b0@4@fp32,torchvision:densenet121@4@fp32"
)
COMPILED = {"compiled": "default", "reduce-overhead": "reduce-overhead"}
"""The modes of ``torch.compile`` by way."""
WAYS = ("eager", *COMPILED, "graph")
ON_GPUS = ("reduce-overhead", "graph")
LEAST = {"eager": 1.0, "compiled": 0.99, "reduce-overhead": 0.99, "graph": 0.99}
WARM_UP = 3


def run(settings: Settings) -> Result:
    """One row a case and way of running it."""
    deadline, ways = settings.deadline(), ways_of(settings)
    rows, notes = earlier_rows(settings), list[str]()
    cases = settings.text("cases") or (GPU_CASES if settings.device.type == "cuda" else CPU_CASES)
    for text in cases.split(","):
        case = case_of(text)
        missing = [way for way in ways if (case.name, way) not in rows]
        if deadline.passed and missing:
            notes.append(f"out of time before {text}")
            continue
        if not missing:
            continue
        precision = "tf32" if case.mode == "tf32" else "ieee"
        with framework_flags(settings.device.type, precision, deterministic=False):
            found = rows_of(settings, case, missing)
        for row in found:
            rows[row.name, row.group] = row
            settings.say(
                f"  {row.name}, {row.group}: {row.baseline.value:.2f} and {row.ours.value:.2f} ms, {row.ratio:.2f}x"
            )
        settings.keep(Result(list(rows.values()), notes=[*notes, f"ended after {text}"]))
    return Result(list(rows.values()), bars(rows, ways, settings), notes=notes)


def bars(rows: dict[tuple[str, str], Row], ways: list[str], settings: Settings) -> list[Bar]:
    """The least ratio of each way, and the mean of each mode run eagerly."""
    ratios = {way: [row.ratio for (_, group), row in rows.items() if group == way] for way in ways}
    found = [
        Bar(f"least step over torch, {way}", min(ratios[way], default=math.nan), least=LEAST[way],
            applies=not settings.quick)
        for way in ways
    ]  # fmt: skip
    gaps = [_gap(row.details) for (_, way), row in rows.items() if way == "graph" and "gain_ms" in row.details]
    if gaps:
        found.append(Bar("predicted gain beside the measured one, ms beyond 15 % or 0.3 ms, graph", max(gaps), most=0.0,
                         applies=not settings.quick))  # fmt: skip
    for mode in USUAL_LAYOUT:
        eager = [row.ratio for (_, way), row in rows.items() if way == "eager" and row.details["mode"] == mode]
        if eager:
            mean = statistics.geometric_mean(eager)
            found.append(Bar(f"geometric mean over torch, eager, {mode}", mean, applies=False))
    return found


def _gap(details: Mapping[str, Any]) -> float:
    """By how many ms the gain that the passes promise misses the step's in a graph, beyond what is allowed."""
    predicted, measured = details["predicted_gain_ms"], details["gain_ms"]
    return max(0.0, abs(predicted - measured) - max(0.15 * abs(measured), 0.3))


def ways_of(settings: Settings) -> list[str]:
    """The ways asked for that the device has. Raises :class:`BadInput`."""
    ways = settings.chosen("ways", {way: way for way in WAYS})
    return [way for way in ways if settings.device.type == "cuda" or way not in ON_GPUS]


def earlier_rows(settings: Settings) -> dict[tuple[str, str], Row]:
    """The rows of an earlier run that planned and measured in the same way, by name and way."""
    found = settings.earlier_with("rigor", "goal", "layout", "graphs", "round_ms")
    rows = [] if found is None else [Row.from_json(row) for row in found["rows"]]
    return {(row.name, row.group): row for row in rows}


def rows_of(settings: Settings, case: Case, ways: list[str]) -> list[Row]:
    """The case's rows: every side is built once, and run in each way."""
    own = case.network.module.to(settings.device).train()
    images = case.network.example_inputs(case.batch, settings.device)
    sides = {
        f"torch, {layout}": (copy.deepcopy(own).to(memory_format=kind), images.to(memory_format=kind))
        for layout, kind in LAYOUTS.items()
    }
    layout = settings.text("layout") or faster_layout(settings, case, sides)
    kind = LAYOUTS[layout]
    planned = copy.deepcopy(own).to(memory_format=kind)
    graphs = settings.text("graphs")
    planning_s = planned_in(settings, case, planned, images.to(memory_format=kind), graphs)
    report = tilewise.nn.report(planned)
    sides["planned"] = planned, images.to(memory_format=kind)
    passes = [one for _, _, one in report.passes()]
    predicted = [one.torch_ms - one.planned_ms for one in passes if one.replaced and one.torch_ms and one.planned_ms]
    details = {
        "batch": case.batch,
        "layout": layout,
        "mode": case.mode,
        "planning_s": planning_s,
        "passes": len(passes),
        "replaced_passes": sum(one.replaced for one in passes),
        "predicted_gain_ms": sum(predicted),
        "step": None if report.step is None else report.step.to_json(),
        "tilewise": commit(),
    }
    rows = []
    for way in ways:
        steps = {name: step_in(way, case, module, x) for name, (module, x) in sides.items()}
        if graphs != "never":
            steps["planned"] = step_in("eager", case, *sides["planned"])
        took = in_turns(steps, settings)
        del steps
        if way in COMPILED:
            torch._dynamo.reset()
        gc.collect()  # graphs and compiled code hold memory
        medians = {name: statistics.median(values) for name, values in took.items()}
        torch_side = min((name for name in took if name != "planned"), key=lambda name: medians[name])
        ratios = [a / b for a, b in zip(took[torch_side], took["planned"], strict=True)]
        spread = {name: {"ms": medians[name], "least": min(ms), "most": max(ms)} for name, ms in took.items()}
        least, _, most = interval(ratios)
        interval_of = [least, most] if math.isfinite(least) else None
        rows.append(
            Row(case.name, way, Side(torch_side, medians[torch_side]), Side("planned", medians["planned"]),
                details={**details, "sides": spread, "interval": interval_of,
                         "gain_ms": medians[f"torch, {layout}"] - medians["planned"]})
        )  # fmt: skip
    return rows


def faster_layout(settings: Settings, case: Case, sides: Mapping[str, tuple[nn.Module, torch.Tensor]]) -> str:
    """The layout in which torch's eager step is the faster."""
    steps = {name: step_of(case, module, images) for name, (module, images) in sides.items()}
    took = in_turns(steps, settings, rounds=3)
    return min(took, key=lambda name: statistics.median(took[name])).partition(", ")[2]


def step_in(way: str, case: Case, module: nn.Module, images: torch.Tensor) -> Step:
    """A step of ``module``, run in one way."""
    if way == "graph":
        return captured(step_of(case, module, images))
    if way in COMPILED:
        return step_of(case, torch.compile(module, mode=COMPILED[way]), images)  # type: ignore[arg-type]
    return step_of(case, module, images)


def captured(step: Step) -> Step:
    """The step as replays of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Replay(graph, step)


def in_turns(steps: dict[str, Step], settings: Settings, rounds: int = 0) -> dict[str, list[float]]:
    """Milliseconds of a step in each turn, by side; ``rounds`` turns, or as many as the option says."""

    def wait() -> None:
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)

    def took_ms(step: Step, count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) * 1e3 / count

    for step in steps.values():
        took_ms(step, WARM_UP)
    slowest = max(took_ms(step, 1) for step in steps.values())
    count = max(1, round(settings.integer("round_ms") / slowest))
    took: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds or max(1, settings.integer("rounds"))):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            took[name].append(took_ms(steps[name], count))
    return took
