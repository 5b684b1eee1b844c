"""fbfft 5.4: own transforms in place of the library's inside one FFT convolution, kernels of 3x3.

Vasilache et al. 2014, Section 5.4: images of 13 to 64 pixels and S = f = f' of 16 to 128, three passes; 1.51x on
average there. The baseline is the fastest config of ``solver`` with the library's transforms, ours the fastest with its
own (``transform=own``), found by the same short race; a basis may differ, as own transforms have fewer sizes. Where a
solver has no such config here this is an error: there is nothing to compare.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness.configs import Runnable, fastest
from harness.layers import PASSES, Layer
from harness.picture import Figure, speedup_lines
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Tensors, race

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Solver

DEFAULTS = {
    "solver": "fft",
    "sizes": "13,16,27,32,57,64",
    "planes": "16,32,64,128",
    "passes": "",
    "kernel": "3",
    "precision": "ieee",
    "budget_ms": "60",
    "seconds": "0",
}
QUICK = {"sizes": "13", "planes": "16", "passes": "fprop", "budget_ms": "5"}
OWN = "own"


def run(settings: Settings) -> Result:
    """One row a size and pass."""
    solver = settings.solver()
    rows: list[Row] = []
    notes: list[str] = []
    deadline = settings.deadline()
    for pass_ in settings.chosen("passes", PASSES):
        for planes in settings.integers("planes"):
            for size in settings.integers("sizes"):
                layer = Layer(f"p={planes} x={size}", planes, planes, planes, size, settings.integer("kernel"))
                if deadline.passed:
                    notes.append(f"out of time before {layer.name} {pass_.value}")
                    return _result(rows, notes)
                problem = layer.problem(pass_, settings.device, precision=settings.text("precision"))
                row = _row(settings, layer, solver, problem, notes)
                if row is None:
                    notes.append(f"{layer.name} {pass_.value}: one of the sides has no config that runs here")
                    continue
                rows.append(row)
                settings.say(f"  {row.name} {row.group}: {row.ratio:.2f}x")
                settings.keep(_result(rows, [*notes, f"ended after {row.name} {row.group}"]))
    if not rows:
        raise NothingToMeasure(
            f"no config of solver {solver.name} has transform={OWN} for any of these layers on {settings.device}"
            f"{''.join(f'; {note}' for note in notes[:1])}"
        )
    return _result(rows, notes)


def _row(settings: Settings, layer: Layer, solver: Solver, problem: ConvProblem, notes: list[str]) -> Row | None:
    if solver.why_not(problem):
        return None
    configs = list(solver.configs(problem))
    own = [c for c in configs if c.get("transform") == OWN]
    library = [c for c in configs if c.get("transform") != OWN]
    if not own or not library:
        return None
    tensors, budget = Tensors(problem), float(settings.integer("budget_ms"))
    sides: list[Runnable] = []
    for side in (library, own):
        found = fastest(problem, solver, side, tensors, budget, notes)
        if found is None:
            return None
        sides.append(found)
    library_ms, own_ms = race(problem, [side.call for side in sides], budget)
    return Row(
        layer.name,
        problem.pass_.value,
        Side(f"{solver.name} {sides[0].config}", library_ms),
        Side(f"{solver.name} {sides[1].config}", own_ms),
        details={"size": layer.size, "planes": layer.batch, "errors": [side.error for side in sides]},
    )


def _result(rows: list[Row], notes: list[str]) -> Result:
    """The paper's three numbers: mean, geometric mean (in the groups) and least."""
    ratios = [row.ratio for row in rows]
    bars = [Bar("least ratio", min(ratios), applies=False)] if rows else []
    facts = {"mean": statistics.mean(ratios), "standard deviation": statistics.pstdev(ratios)} if rows else {}
    return Result(rows, bars, facts, notes)


def draw(document: dict[str, Any]) -> Figure:
    """A panel a pass."""
    passes = tuple(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, passes, x="size", line="planes")
