"""Every config of one solver on some layers: time and error beside torch, to see what a new kernel is worth.

``layers`` are names of :data:`NAMED` or texts in benchdnn's notation, separated by commas. Configs are compiled by
``jobs`` threads before anything is timed; those that cannot run or are wrong are named in the notes. With
``constant=1`` filters are constant, as with ``training=False, frozen=True``. The planner's own choice is not asked for.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from harness.configs import LostConfig, Runnable, runnable
from harness.layer_pass import LAYOUTS
from harness.layers import PASSES
from harness.result import Result, Row, Side
from harness.settings import BadInput, NothingToMeasure, Settings
from harness.sides import Tensors, framework_call, race

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Solver

DEFAULTS = {
    "solver": "tiled_fft",
    "layers": "L3,L2,L4,L5,L1",
    "passes": "",
    "dtype": "fp32",
    "precision": "ieee",
    "constant": "0",
    "most": "8",
    "jobs": "8",
    "budget_ms": "80",
    "seconds": "0",
}
QUICK = {"solver": "fft", "layers": "mb2ic3ih8oc4kh3ph1", "most": "2", "budget_ms": "5"}
NAMED = {
    "L1": "mb128ic3ih128oc96kh11ph0",
    "L2": "mb128ic64ih64oc64kh9ph0",
    "L3": "mb128ic128ih32oc128kh9ph0",
    "L4": "mb128ic128ih16oc128kh7ph0",
    "L5": "mb128ic384ih13oc384kh3ph0",
    "depthwise31": "g128mb64ic128ih56oc128kh31ph15",
    "depthwise31s2": "g128mb64ic128ih56oc128kh31sh2ph15",
    "depthwise7": "g96mb64ic96ih56oc96kh7ph3",
    "depthwise7small": "g384mb64ic384ih14oc384kh7ph3",
    "dense101": "mb32ic64iw8192oc64kw101pw50",
    "long1025": "g768mb8ic768iw8192oc768kw1025pw512",
    "long8192": "g768mb8ic768iw8192oc768kw8192pw4096",
}
"""fbfft's Table 4, and layers of ``large_kernels``."""


def run(settings: Settings) -> Result:
    """One row a layer and pass: torch's better layout and the fastest config; the others are in its details."""
    solver = settings.solver()
    rows: list[Row] = []
    notes: list[str] = []
    deadline = settings.deadline()
    for layer in settings.words("layers"):
        for pass_ in settings.chosen("passes", PASSES):
            if deadline.passed:
                notes.append(f"out of time before {layer} {pass_.value}")
                break
            try:
                problem = parse_layer(
                    NAMED.get(layer, layer), pass_=pass_, dtype=settings.text("dtype"),
                    precision=settings.text("precision"), device=device_name(settings.device),
                )  # fmt: skip
            except ValueError as error:
                raise BadInput(f"layers={layer!r}: {error}") from error
            constant = settings.integer("constant") > 0 and pass_ is not Pass.WGRAD
            problem = replace(problem, constant_weight=constant)
            reasons = solver.why_not(problem)
            if reasons:
                notes.append(f"{layer} {pass_.value}: {'; '.join(reasons)}")
                continue
            row = _row(settings, layer, solver, problem, notes)
            if row is not None:
                rows.append(row)
                settings.say(f"  {row.name}: {row.ratio:.2f}x {row.ours.value:.4f} ms {row.ours.what}")
    if not rows:
        raise NothingToMeasure(f"no config of {solver.name} runs: {'; '.join(notes[:3])}")
    return Result(rows, notes=notes)


def _row(settings: Settings, layer: str, solver: Solver, problem: ConvProblem, notes: list[str]) -> Row | None:
    configs = list(itertools.islice(solver.configs(problem), settings.integer("most")))
    seconds = _compiled(solver, problem, configs, settings.integer("jobs"))
    tensors = {layout: Tensors(problem, layout) for layout in (LAYOUTS if problem.dims == 2 else LAYOUTS[:1])}
    found: list[Runnable] = []
    for config in configs:
        try:
            found.append(runnable(problem, solver, config, tensors["contiguous"]))
        except LostConfig as error:
            notes.append(str(error))
    if not found:
        return None
    calls = [framework_call(problem, each) for each in tensors.values()]
    times = race(problem, [*calls, *(each.call for each in found)], float(settings.integer("budget_ms")))
    torch_ms = dict(zip(tensors, times, strict=False))
    own_ms = times[len(calls) :]
    best = min(range(len(found)), key=own_ms.__getitem__)
    layout = min(torch_ms, key=torch_ms.__getitem__)
    return Row(
        f"{layer} {problem.pass_.value}",
        solver.name,
        Side(f"torch {layout}", torch_ms[layout]),
        Side(str(found[best].config), own_ms[best]),
        details={
            **{f"torch_{name}_ms": ms for name, ms in torch_ms.items()},
            "compiled_s": seconds,
            "configs": [
                {"config": each.config.to_json(), "ms": ms, "error": each.error,
                 "workspace": solver.workspace(problem, each.config)}
                for ms, each in sorted(zip(own_ms, found, strict=True), key=lambda pair: pair[0])
            ],
        },
    )  # fmt: skip


def _compiled(solver: Solver, problem: ConvProblem, configs: list[Config], jobs: int) -> float:
    """Seconds to compile what the configs need; what cannot be is met again, with its reason, when it is run."""
    device = torch.device(problem.device_type)
    a, b, out = (
        torch.empty(problem.shape(role), dtype=problem.torch_dtype(role), device=device)
        for role in (*problem.operands, problem.result)
    )

    def bind(config: Config) -> str:
        try:
            solver.bind(problem, config, a, b, out)
        except Exception as error:  # whatever a compiler raises
            return str(error)
        return ""

    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(bind, configs))
    return time.perf_counter() - start
