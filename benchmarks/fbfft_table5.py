"""fbfft Table 5: what the steps of a convolution by Fourier transforms take.

Vasilache et al. 2014, Section 8.1: transforms of both operands, their transposition, products, inverse. Table 4's
layers in the fastest configs of ``solver`` with the library's transforms and with its own, of the ``configs`` most
promising (0: of as many as the planner tries), the filter transformed in every call. Steps are timed inside the call by
events, without waiting between them; ``details.steps`` has them. The row's sides are torch in its better layout and the
whole call, unmarked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.configs import fastest, framework_result
from harness.layer_pass import LAYOUTS
from harness.layers import FBFFT_TABLE_4, PASSES, by_name
from harness.picture import Figure, stacked_bars
from harness.result import Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import Tensors, framework_call, race
from harness.steps import breakdown, can_mark

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Solver

DEFAULTS = {
    "solver": "fft",
    "layers": "",
    "passes": "",
    "batch": "0",
    "precision": "ieee",
    "configs": "0",
    "repeats": "15",
    "budget_ms": "100",
    "seconds": "0",
}
QUICK = {"layers": "L4", "passes": "fprop", "batch": "2", "repeats": "2", "budget_ms": "5"}


def run(settings: Settings) -> Result:
    """One row a layer-pass and kind of transform."""
    solver = settings.solver()
    if not can_mark(solver):
        raise NothingToMeasure(f"solver {solver.name} does not mark its steps: fft would do")
    rows: list[Row] = []
    notes: list[str] = []
    deadline = settings.deadline()
    for layer in settings.chosen("layers", by_name(FBFFT_TABLE_4)):
        for pass_ in settings.chosen("passes", PASSES):
            name = f"{layer.name} {pass_.value}"
            if deadline.passed:
                notes.append(f"out of time before {name}")
                return Result(rows, notes=notes)
            problem = layer.problem(
                pass_, settings.device, batch=settings.integer("batch"), precision=settings.text("precision")
            )
            found = list(_rows(settings, name, solver, problem, notes))
            if not found:
                notes.append(f"{name}: no config of {solver.name} runs here")
            rows += found
            settings.keep(Result(rows, notes=[*notes, f"ended after {name}"]))
    return Result(rows, notes=notes)


def _rows(settings: Settings, name: str, solver: Solver, problem: ConvProblem, notes: list[str]) -> Iterator[Row]:
    """One row for each kind of transform that has a config here."""
    configs: dict[str, list[Config]] = {}
    for config in solver.configs(problem):
        configs.setdefault(str(config.get("transform", "library")), []).append(config)
    for transform, listed in configs.items():
        row = _row(settings, f"{name} {transform}", solver, problem, listed, notes)
        if row is not None:
            times = ", ".join(f"{step} {ms:.3f}" for step, ms in row.details["steps"].items())
            settings.say(f"  {row.name}: {row.ours.value:.3f} ms: {times}")
            yield row


def _row(
    settings: Settings, name: str, solver: Solver, problem: ConvProblem, configs: list[Config], notes: list[str]
) -> Row | None:
    tensors = {layout: Tensors(problem, layout) for layout in LAYOUTS}
    own, budget = tensors["contiguous"], float(settings.integer("budget_ms"))
    best = fastest(problem, solver, configs, own, budget, notes, settings.integer("configs"))
    if best is None:
        return None
    calls = [framework_call(problem, tensors[layout]) for layout in LAYOUTS]
    *torch_ms, whole_ms = race(problem, [*calls, best.call], budget)
    operands = [own[role] for role in problem.operands]
    steps, result = breakdown(solver, problem, best.config, operands, max(1, settings.integer("repeats")))
    want = framework_result(problem, own)
    return Row(
        name,
        solver.name,
        Side("torch, better layout", min(torch_ms)),
        Side(f"{solver.name} {best.config}", whole_ms),
        details={
            "steps": steps,
            "sum_of_steps_ms": sum(steps.values()),
            "error": float((result - want).norm() / want.norm()),
            "config": str(best.config),
        },
    )


def draw(document: dict[str, Any]) -> Figure:
    """A bar a layer-pass."""
    return stacked_bars(document, "steps")
