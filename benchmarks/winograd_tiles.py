"""Winograd's tile sizes: the time and the error of each, by kernel.

Larger tiles take fewer multiplications and round at the scale of larger numbers. Each row is a layer-pass and a tile
size: torch's better layout against the fastest of that tile's most promising configs. ``details`` have the relative L2
error against float64, the worse of normal data and of data over many octaves, and torch's own beside it.
"""

from __future__ import annotations

import itertools

import torch
from harness.configs import LostConfig, Runnable, runnable
from harness.layer_pass import LAYOUTS
from harness.layers import PASSES
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Call, Tensors, framework_call, race

from tilewise import solvers
from tilewise.execute import bind
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands

NAMED = {
    "3x3": "mb16ic64ih56oc64kh3ph1",
    "5x5": "mb16ic64ih28oc64kh5ph2",
    "7x7": "mb16ic32ih28oc32kh7ph3",
    "5 taps": "mb16ic64iw4096oc64kw5pw2",
    "3x3x3": "mb2ic32id16ih28iw28oc32kd3kh3kw3pd1ph1pw1",
}
DEFAULTS = {"layers": "", "passes": "", "most": "2", "budget_ms": "300", "seconds": "0"}
QUICK = {"layers": "3x3", "passes": "fprop", "most": "1", "budget_ms": "5"}
MOST_ERROR = 1e-5
SOLVER = "winograd"


def run(settings: Settings) -> Result:
    """One row a layer-pass and tile."""
    solver = solvers.get(SOLVER)
    rows: list[Row] = []
    notes: list[str] = []
    deadline = settings.deadline()
    layers = settings.chosen("layers", {name: name for name in NAMED})
    for layer, pass_ in itertools.product(layers, settings.chosen("passes", PASSES)):
        if deadline.passed:
            notes.append(f"out of time before {layer} {pass_.value}")
            continue
        problem = parse_layer(NAMED[layer], pass_=pass_, device=device_name(settings.device))
        if reasons := solver.why_not(problem):
            raise NothingToMeasure(f"{layer} {pass_.value}: {'; '.join(reasons)}")
        tiles: dict[int, list[Config]] = {}
        for config in solver.configs(problem):
            tiles.setdefault(int(str(config["tile"])), []).append(config)
        for tile in sorted(tiles):
            row = _row(settings, f"{layer} {pass_.value}, tiles of {tile}", problem, tiles[tile], notes)
            if row is not None:
                rows.append(row)
                settings.say(f"  {row.name}: {row.ratio:.2f}x, error {row.details['error']:.1e}")
        settings.keep(Result(rows, notes=[*notes, f"ended after {layer} {pass_.value}"]))
    worst = max((row.details["error"] for row in rows), default=float("nan"))
    return Result(rows, [Bar("greatest error", worst, most=MOST_ERROR, applies=bool(rows))], notes=notes)


def _row(settings: Settings, name: str, problem: ConvProblem, configs: list[Config], notes: list[str]) -> Row | None:
    solver = solvers.get(SOLVER)
    tensors = {layout: Tensors(problem, layout) for layout in (LAYOUTS if problem.dims == 2 else LAYOUTS[:1])}
    found: list[Runnable] = []
    for config in configs[: settings.integer("most")]:
        try:
            found.append(runnable(problem, solver, config, tensors["contiguous"]))
        except LostConfig as error:
            notes.append(str(error))
    if not found:
        return None
    layouts: list[Call] = [framework_call(problem, each) for each in tensors.values()]
    times = race(problem, [*layouts, *(each.call for each in found)], float(settings.integer("budget_ms")))
    torch_ms, own = times[: len(layouts)], times[len(layouts) :]
    best = min(range(len(found)), key=own.__getitem__)
    config = found[best].config
    return Row(
        name,
        problem.pass_.value,
        Side("torch, better layout", min(torch_ms)),
        Side(str(config), own[best]),
        details={
            "error": _error(problem, Plan(problem.key, SOLVER, solver.version, config)),
            "torch_error": _error(problem, None),
            "config": config.to_json(),
        },
    )


def _error(problem: ConvProblem, plan: Plan | None) -> float:
    """The relative L2 error of a plan, or of torch, the worse of two kinds of data."""
    worst = 0.0
    for wide in (False, True):
        a, b = make_operands(problem, wide=wide)
        want = problem.reference(a, b)
        got = _by_torch(problem, a, b) if plan is None else bind(plan, problem, a, b)(a, b)
        worst = max(worst, float((got.double() - want).norm() / want.norm()))
    return worst


def _by_torch(problem: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    given = Tensors(problem)
    for role, tensor in zip(problem.operands, (a, b), strict=True):
        given[role].copy_(tensor)
    found = framework_call(problem, given)()
    if problem.pass_ is Pass.FPROP:
        assert isinstance(found, torch.Tensor)
        return found
    assert isinstance(found, (list, tuple))
    return next(each for each in found if each is not None)
