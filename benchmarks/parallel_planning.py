"""Planning time on one device and on several: AlexNet within 64 MiB, ResNet-50 with every micro-batch.

mu-cuDNN measures on all GPUs of a node (Oyama et al. 2018, Section III-D); for AlexNet in 64 MiB it needed 3.82 s
(powerOfTwo) and 34.16 s (all) on a P100 (IV-B1). Bars: 3.5 s and 20 s on one H100, with plans within 2 % of those found
by measuring everything, and ResNet-50 three times faster on four devices than on one, workers started. Wisdom is empty
each time. Kernels are compiled by runs before, until one has compiled nothing; that time is listed apart.

``parts``: ``alexnet`` plans in this process, as ``planner_time`` does; ``network`` plans in a fresh process for each
number of ``devices``, with the workers' start in the time and without; ``exhaustive`` compares AlexNet's plans, run in
turns, with those of rigor ``patient`` under the policies ``exhaustive``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.layers import ALEXNET, PASSES, by_name
from harness.planning import apart, kernels, seconds, start_device
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Progress, Settings
from harness.sides import Tensors, plan_line, planned_call, race

from tilewise.cli.target import layers_of
from tilewise.frontends.networks import load_network
from tilewise.machine.device import device_name
from tilewise.planner import Options, Planner
from tilewise.problems.conv.notation import looks_like_layer, parse_layer
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom

DEFAULTS = {
    "parts": "alexnet,network,exhaustive",
    "layers": "",
    "passes": "",
    "batch": "0",
    "limit": "64MiB",
    "policies": "powers_of_two,all",
    "exhaustive": "powers_of_two",
    "network": "resnet50",
    "network_batch": "32",
    "dtype": "fp32",
    "devices": "1,2,4",
    "start": "before,counted",
    "rigor": "measure",
    "runs": "5",
}
QUICK = {
    "parts": "network",
    "layers": "conv5",
    "batch": "2",
    "network": "mb4ic2oc2iw6kw3",
    "dtype": "bf16",
    "devices": "1,2",
    "start": "before",
    "runs": "1",
}
BARS = {"powers_of_two": 3.5, "all": 20.0}
SHORT_MS = 20.0


def run(settings: Settings) -> Result:
    """Rows of each part."""
    rows: list[Row] = []
    bars: list[Bar] = []
    notes: list[str] = []
    start_device(settings.device)
    parts = {"alexnet": alexnet, "network": network, "exhaustive": exhaustive}
    for part in settings.chosen("parts", parts):
        for result in part(settings):
            found = Result([*rows, *result.rows], [*bars, *result.bars], notes=[*notes, *result.notes])
            settings.keep(found)
        rows, bars, notes = found.rows, found.bars, found.notes
    return Result(rows, bars, notes=notes)


def alexnet_problems(settings: Settings) -> list[ConvProblem]:
    """The paper's ``layers`` in the ``passes``, all where none are named."""
    return [
        layer.problem(pass_, settings.device, batch=settings.integer("batch"))
        for layer in settings.chosen("layers", by_name(ALEXNET))
        for pass_ in settings.chosen("passes", PASSES)
    ]


def alexnet(settings: Settings) -> Iterator[Result]:
    """Planning in this process, one row a policy: a first time, which compiles, against the least when nothing is."""
    problems, rows = alexnet_problems(settings), []
    for policy in settings.policies("policies"):
        options = settings.planning(settings.size("limit"), policy)
        settings.say(f"AlexNet: {len(problems)} kernels, {policy}, {settings.text('limit')}, one device")
        took: list[float] = []
        compiled: list[int] = []
        with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
            while len(took) < 2 or (len(took) <= settings.integer("runs") and compiled[-1]):
                before = kernels()
                took.append(seconds(Path(folder) / f"{len(took)}.sqlite3", problems, options, Progress()))
                compiled.append(kernels() - before)
        sides = Side("the first time, compiling", took[0]), Side("nothing to compile", min(took[1:]))
        details = {"cold_s": took, "compiled": compiled, "limit": settings.text("limit")}
        rows.append(Row(f"AlexNet {policy}", "AlexNet on one device", *sides, unit="s", details=details))
    applies = settings.device.type == "cuda" and not settings.quick
    bars = [
        Bar(f"seconds of planning AlexNet, {policy}", row.ours.value, most=BARS.get(policy), applies=applies)
        for policy, row in zip(settings.policies("policies"), rows, strict=True)
    ]
    yield Result(rows, bars)


def network_problems(settings: Settings) -> list[ConvProblem]:
    """What training the network, or one layer in benchdnn's notation, asks to be planned."""
    text, batch = settings.text("network"), settings.integer("network_batch")
    if looks_like_layer(text):
        facts: dict[str, Any] = {"dtype": settings.text("dtype"), "device": device_name(settings.device)}
        return [parse_layer(text, pass_=pass_, **facts) for pass_ in Pass]
    if settings.text("dtype") != "fp32":
        raise BadInput(f"dtype={settings.text('dtype')!r}: a network is planned in fp32; fp32 would do")
    found = load_network(text)
    module = found.module.to(settings.device).train()
    inputs = found.example_inputs(batch, settings.device, torch.float32)
    layers = layers_of(module, inputs, "ieee", ())
    return list(dict.fromkeys(problem for layer in layers for problem in layer.problems))


def network(settings: Settings) -> Iterator[Result]:
    """Planning in fresh processes with every micro-batch, on one device and on more."""
    problems, options = network_problems(settings), settings.planning(None, "all")
    if options.rigor not in ("measure", "patient"):
        raise BadInput(f"rigor={options.rigor!r}: measure or patient would do, as others measure nothing")
    here = torch.cuda.device_count() if settings.device.type == "cuda" else 0
    counts = [n for n in settings.integers("devices") if n <= here or not here]
    notes = [f"{n} devices were not tried: there are {here}" for n in settings.integers("devices") if n not in counts]
    profile = settings.planner().profile(device_name(settings.device))
    if 1 not in counts:
        raise BadInput(f"devices={settings.text('devices')!r}: 1 is what the others are compared with")
    starts = settings.chosen("start", {"before": True, "counted": False})
    order = [(1, True), *((count, started) for count in counts if count > 1 for started in starts)]
    alone: dict[str, Any] = {}
    rows: list[Row] = []
    for count, started in order:
        devices: list[int | str] = list(range(count)) if here else ["cpu"] * count
        group = "workers started" if started else "start counted"
        settings.say(f"{settings.text('network')}: {len(problems)} kernels, all, {count} devices, {group}")
        runs = [apart(problems, options, devices, profile, started=started)]
        while runs[-1]["compiled"] and len(runs) <= settings.integer("runs"):
            runs.append(apart(problems, options, devices, profile, started=started))
        found = {**runs[-1], "first_s": runs[0]["seconds"], "first_compiled": runs[0]["compiled"]}
        if count == 1:
            alone = found
            continue
        sides = Side("one device", alone["seconds"]), Side(f"{count} devices", found["seconds"])
        details = {"kernels": len(problems), "one": alone, "several": found}
        rows.append(Row(f"{settings.text('network')} on {count} devices", group, *sides, unit="s", details=details))
        yield Result(rows, _bars(rows, applies=bool(here) and not settings.quick), notes=notes)
    if not rows:
        yield Result([], [], notes=notes)


def _bars(rows: list[Row], *, applies: bool) -> list[Bar]:
    """Of four devices; with the start counted the ratio is told and not judged."""
    return [
        Bar(
            f"planning on 4 devices over one, {row.group}",
            row.ratio,
            least=3.0,
            applies=applies and row.group == "workers started",
        )
        for row in rows
        if row.name.endswith("on 4 devices")
    ]


def exhaustive(settings: Settings) -> Iterator[Result]:
    """The plans against those found when everything is measured, run in turns; a result after each kernel."""
    rows: list[Row] = []
    applies = settings.device.type == "cuda" and not settings.quick
    for policy in settings.policies("exhaustive"):
        options = settings.planning(settings.size("limit"), policy)
        for problem in alexnet_problems(settings):
            settings.say(f"measuring everything, {policy}: {problem.key}")
            with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
                planner = Planner(Wisdom(Path(folder) / "quick.sqlite3"))
                plan = planner.plan(problem, options)
                patient = Options(options.workspace, policy, "patient")
                best = Planner(Wisdom(Path(folder) / "patient.sqlite3")).plan(problem, patient)
            tensors = Tensors(problem)
            calls = [planned_call(problem, found, tensors) for found in (best, plan)]
            times = race(problem, calls, budget_ms=SHORT_MS if settings.quick else 500.0)
            sides = Side(f"patient: {plan_line(best)}", times[0]), Side(plan_line(plan), times[1])
            rows.append(Row(f"{problem.pass_.value} {problem.key}", f"measuring everything, {policy}", *sides))
            share = sum(row.baseline.value for row in rows) / sum(row.ours.value for row in rows)
            bar = Bar("time of the plans of patient over these plans'", share, least=0.98, applies=applies)
            yield Result(rows, [bar])
