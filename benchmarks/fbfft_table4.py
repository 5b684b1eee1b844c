"""fbfft Table 4: five representative layers, three passes, against torch with cudnn.benchmark.

Vasilache et al. 2014, Table 4 (S = 128) compares a Fourier convolution with cuDNN. Here the planned layer is compared
with torch, in fp32 (``ieee``), in fp32 with TF32 allowed (``tf32``) and in ``bf16``, without a memory limit. Torch gets
the better of contiguous and channels_last tensors, conversion not counted. With ``engines=1`` the fastest of all
cuDNN's engines that are right is timed too, on contiguous tensors. The planner solves the layouts given by
``layouts``: contiguous alone for fp32, both for bf16, whose engines are made for channels_last; its better one counts.
On a GPU times are the device's, as the paper's are; what the host takes to launch a pass is in ``details``.
"""

from __future__ import annotations

import itertools
import math

from harness import queued
from harness.configs import Runnable, fastest
from harness.layers import FBFFT_TABLE_4, PASSES, Layer, by_name
from harness.result import Bar, Result, Row, Side, geometric_mean, least_replaced
from harness.settings import Settings
from harness.sides import Tensors, framework_call, is_framework, plan_line, planned_call

from tilewise import solvers
from tilewise.plan import Plan
from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {
    "modes": "ieee,tf32,bf16",
    "layers": "",
    "passes": "",
    "batch": "0",
    "layouts": "contiguous",
    "rigor": "measure",
    "engines": "0",
    "seconds": "0",
}
QUICK = {"modes": "ieee", "layers": "L4", "batch": "2"}
MODES = {"ieee": ("fp32", "ieee"), "tf32": ("fp32", "tf32"), "bf16": ("bf16", "ieee")}
MOST_ENGINES = 200
"""More than cuDNN has."""
ENGINE_BUDGET_MS = 30.0
LAYOUTS = ("contiguous", "channels_last")


def run(settings: Settings) -> Result:
    """All chosen layers, passes and modes."""
    layers = settings.chosen("layers", by_name(FBFFT_TABLE_4))
    passes = settings.chosen("passes", PASSES)
    planner, deadline = settings.planner(), settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    for mode in settings.chosen("modes", {name: name for name in MODES}):
        for layer, pass_ in itertools.product(layers, passes):
            name = f"{layer.name} {pass_.value}"
            if deadline.passed:
                notes.append(f"out of time before {mode} {name}")
                continue
            group = _problems(settings, mode, layer, pass_)
            plans = planner.plan_many(group, settings.planning())
            rows.append(_row(name, mode, group, plans, engines=settings.integer("engines") > 0))
            settings.say(f"  {mode} {name}: {rows[-1].ratio:.2f}x")
            settings.keep(Result(rows, bars(rows, settings), facts(rows), notes=[*notes, f"ended after {mode} {name}"]))
    return Result(rows, bars(rows, settings), facts(rows), notes=notes)


def _problems(settings: Settings, mode: str, layer: Layer, pass_: Pass) -> list[ConvProblem]:
    dtype, precision = MODES[mode]
    layouts = LAYOUTS if mode == "bf16" else settings.chosen("layouts", {name: name for name in LAYOUTS})
    return [
        layer.problem(
            pass_,
            settings.device,
            batch=settings.integer("batch"),
            dtype=dtype,
            precision=precision,
            layout=layout,
        )
        for layout in layouts
    ]


def _row(name: str, mode: str, problems: list[ConvProblem], plans: dict[ConvProblem, Plan], *, engines: bool) -> Row:
    """Torch in both layouts, each planned problem and cuDNN's fastest engine, in turns."""
    tensors = {layout: Tensors(problems[0], layout) for layout in LAYOUTS}
    calls = [framework_call(problems[0], tensors[layout]) for layout in LAYOUTS]
    calls += [planned_call(p, plans[p], tensors[p.layout("x")]) for p in problems]
    engine = _engine(problems[0], tensors["contiguous"]) if engines else None
    calls += [] if engine is None else [engine.call]
    took = queued.medians(problems[0], calls)
    times = [each.device_ms for each in took]
    torch_ms, planned_ms = dict(zip(LAYOUTS, times[:2], strict=True)), times[2 : 2 + len(problems)]
    best = min(range(len(problems)), key=planned_ms.__getitem__)
    layout = problems[best].layout("x")
    plan = plans[problems[best]]
    torch_layout = min(torch_ms, key=torch_ms.__getitem__)
    replaced = not is_framework(plan)
    return Row(
        name,
        mode,
        Side(f"torch {torch_layout}", torch_ms[torch_layout]),
        Side(plan_line(plan), planned_ms[best]),
        replaced=replaced,
        details={
            "torch_contiguous_ms": torch_ms["contiguous"],
            "torch_channels_last_ms": torch_ms["channels_last"],
            "layout": layout,
            "ratio_same_layout": torch_ms[layout] / planned_ms[best] if replaced else 1.0,
            "ratio_contiguous": torch_ms["contiguous"] / planned_ms[best] if replaced else 1.0,
            "host_ms": took[2 + best].host_ms,
            "torch_host_ms": took[LAYOUTS.index(torch_layout)].host_ms,
            "workspace": plan.workspace,
            "error": None if plan.error is None else plan.error.l2,
            "engine": None if engine is None else str(engine.config),
            "engine_ms": None if engine is None else times[-1],
            "ratio_engine": None if engine is None else times[-1] / planned_ms[best],
            "plan": plan.to_json(),
        },
    )


def _engine(problem: ConvProblem, tensors: Tensors) -> Runnable | None:
    solver = solvers.get("cudnn")
    if solver.why_not(problem):
        return None
    return fastest(problem, solver, solver.configs(problem), tensors, ENGINE_BUDGET_MS, [], most=MOST_ENGINES)


def facts(rows: list[Row]) -> dict[str, float]:
    """Geometric means against contiguous torch alone: the baseline of the tables this benchmark started from."""
    modes = dict.fromkeys(row.group for row in rows)
    return {
        f"{mode} geometric mean over torch contiguous": geometric_mean(
            [row.details["ratio_contiguous"] for row in rows if row.group == mode]
        )
        for mode in modes
    }


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """What these layers must reach. Single layers are held against contiguous torch, as their bars were set."""
    applies = settings.device.type == "cuda" and not settings.quick

    def against_contiguous(mode: str, name: str) -> float:
        found = [r.details["ratio_contiguous"] for r in rows if (r.group, r.name) == (mode, name)]
        return found[0] if found else math.nan

    def gain(mode: str) -> float:
        return geometric_mean([row.ratio for row in rows if row.group == mode])

    engines = [r.details["ratio_engine"] for r in rows if r.group == "ieee" and r.details["ratio_engine"]]
    same_layout = min((row.details["ratio_same_layout"] for row in rows if row.replaced), default=math.nan)
    return [
        Bar("ieee: geometric mean over torch's better layout", gain("ieee"), least=3, applies=applies),
        Bar("ieee: geometric mean over cuDNN's fastest engine", geometric_mean(engines), least=1.3, applies=applies),
        Bar("tf32: geometric mean over torch's better layout", gain("tf32"), least=1.8, applies=applies),
        Bar("bf16: geometric mean over torch's better layout", gain("bf16"), least=1.3, applies=applies),
        Bar("ieee: L3 fprop over contiguous", against_contiguous("ieee", "L3 fprop"), least=10, applies=applies),
        Bar("tf32: L1 dgrad over contiguous", against_contiguous("tf32", "L1 dgrad"), least=2.5, applies=applies),
        Bar("tf32: L3 fprop over contiguous", against_contiguous("tf32", "L3 fprop"), least=2, applies=applies),
        Bar("least replaced over torch in the same layout", same_layout, least=0.97),
        Bar("least replaced over torch's better layout", least_replaced(rows), applies=False),
    ]
