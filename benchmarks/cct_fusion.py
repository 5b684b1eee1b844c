"""Caffe con Troll 2.1, Fusion: lowering with its matrix in a cache alone, against the same type with it in memory.

Hadjis et al. 2015, section 2.1. Each row is a layer-pass and a type: the fastest of the most promising configs of
``lowering_type1`` to ``3`` and of ``fused_lowering`` with that type, in turns, beside torch in its better layout in
``details``, with bytes of workspace. A type whose first unfused run takes ``most_ms`` is left out and named: it
multiplies a stride's zeros, or products that no output uses.
"""

from __future__ import annotations

import itertools

import torch
from harness.configs import LostConfig, Runnable, runnable
from harness.layer_pass import LAYOUTS
from harness.layers import PASSES
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import BadInput, NothingToMeasure, Settings
from harness.sides import Tensors, framework_call, race

from tilewise import solvers
from tilewise.machine.device import device_name
from tilewise.planner.measuring import times as measure
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem

NAMED = {
    "AlexNet 11x11 stride 4": "mb8ic3ih224oc96kh11sh4ph2",
    "ResNet 7x7 stride 2": "mb8ic3ih224oc64kh7sh2ph3",
    "64 to 64 3x3": "mb8ic64ih56oc64kh3ph1",
    "64 to 192 5x5": "mb8ic64ih27oc192kh5ph2",
    "96 to 256 5x5": "mb8ic96ih28oc256kh5ph0",
    "16 to 32 3x3": "mb8ic16ih112oc32kh3ph1",
}
DEFAULTS = {"layers": "", "passes": "", "types": "1,2,3", "most": "3", "most_ms": "400", "budget_ms": "400",
            "seconds": "0"}  # fmt: skip
QUICK = {"layers": "64 to 64 3x3", "passes": "fprop", "types": "1", "most": "1", "budget_ms": "5"}
LEAST = 1.3


def run(settings: Settings) -> Result:
    """One row a layer-pass and type."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device {settings.device}: fused lowering runs on a CPU")
    rows: list[Row] = []
    notes: list[str] = []
    deadline = settings.deadline()
    chosen = itertools.product(
        settings.chosen("layers", {name: name for name in NAMED}), settings.chosen("passes", PASSES)
    )
    for layer, pass_ in chosen:
        if deadline.passed:
            notes.append(f"out of time before {layer} {pass_.value}")
            continue
        problem = parse_layer(NAMED[layer], pass_=pass_, device=device_name(settings.device))
        for kind in settings.integers("types"):
            if kind not in (1, 2, 3):
                raise BadInput(f"types={kind}: 1, 2 and 3 would do")
            row = _row(settings, f"{layer} {pass_.value}", problem, kind, notes)
            if row is not None:
                rows.append(row)
                settings.say(f"  {row.name} {row.group}: {row.ratio:.2f}x")
        settings.keep(Result(rows, notes=[*notes, f"ended after {layer} {pass_.value}"]))
    return Result(rows, bars(rows, settings), notes=notes)


def _row(settings: Settings, name: str, problem: ConvProblem, kind: int, notes: list[str]) -> Row | None:
    tensors = {layout: Tensors(problem, layout) for layout in LAYOUTS}
    sides: list[list[Runnable]] = []
    for solver_name in (f"lowering_type{kind}", "fused_lowering"):
        solver = solvers.get(solver_name)
        reasons = solver.why_not(problem)
        configs = [] if reasons else [c for c in solver.configs(problem) if c.get("type", kind) == kind]
        found: list[Runnable] = []
        for config in configs[: settings.integer("most")]:
            try:
                each = runnable(problem, solver, config, tensors["contiguous"])
            except LostConfig as error:
                notes.append(str(error))
                continue
            if measure.Timer(settings.device).time_ms(each.call) > settings.integer("most_ms"):
                reasons.append(f"{config} takes over {settings.text('most_ms')} ms")
                continue
            found.append(each)
        if not found:
            notes.append(f"{name}, type {kind}: {solver_name}: {'; '.join(reasons) or 'has no config'}")
            return None
        sides.append(found)
    unfused, fused = sides
    layouts = [framework_call(problem, each) for each in tensors.values()]
    calls = [*layouts, *(each.call for each in unfused), *(each.call for each in fused)]
    times = race(problem, calls, float(settings.integer("budget_ms")))
    ours = dict(zip(fused, times[len(layouts) + len(unfused) :], strict=True))
    theirs = dict(zip(unfused, times[len(layouts) :], strict=False))
    best, other = min(ours, key=ours.__getitem__), min(theirs, key=theirs.__getitem__)
    return Row(
        name,
        f"type {kind}",
        Side(f"unfused {other.config}", theirs[other]),
        Side(f"fused {best.config}", ours[best]),
        details={
            "torch_ms": min(times[: len(layouts)]),
            "workspace": solvers.get("fused_lowering").workspace(problem, best.config),
            "unfused_workspace": solvers.get(f"lowering_type{kind}").workspace(problem, other.config),
            "threads": torch.get_num_threads(),
        },
    )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged where the unfused side keeps more than a core's cache beside it."""
    large = [row for row in rows if row.details["unfused_workspace"] > 2**21]
    mean = geometric_mean([row.ratio for row in large])
    least = min((row.ratio for row in large), default=float("nan"))
    applies = not settings.quick and bool(large)
    return [
        Bar("least over unfused, matrices beyond the cache", least, least=LEAST, applies=applies),
        Bar("geometric mean of those", mean, least=LEAST, applies=applies),
    ]
