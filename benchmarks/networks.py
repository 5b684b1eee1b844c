"""Every built-in network, as ``tilewise time`` measures it: each layer-pass, and whole training steps.

A bar, not a figure: no replaced layer-pass below 0.97 of torch, on a CPU or a GPU, without a memory limit. Layers left
to torch count 1.00; the share replaced is reported. ``batch`` is each network's batch (0: the one in ``GPU_BATCHES`` or
``CPU_BATCHES``). A replaced layer-pass that comes out below 0.97 is timed again for longer, and the longer run counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

from harness.result import Bar, Result, Row, Side, least_replaced
from harness.settings import Settings
from harness.sides import Tensors, framework_call, plan_line, planned_call, race

from tilewise.cli import cli
from tilewise.frontends.networks import builtin_networks
from tilewise.plan import Plan
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import Pass

DEFAULTS = {"networks": "", "batch": "0", "precision": "ieee", "rigor": "measure", "iterations": "0"}
QUICK = {"networks": "photonet", "batch": "2", "rigor": "estimate", "iterations": "1"}
LEAST = 0.97
LONGER_MS, QUICK_MS = 2000.0, 20.0
GPU_BATCHES = {
    "alexnet": 256,
    "overfeat_fast": 128,
    "vgg16": 64,
    "resnet18": 128,
    "resnet50": 64,
    "densenet40": 256,
    "googlenet": 128,
    "replknet31_stage": 64,
    "photonet": 128,
}
CPU_BATCHES = dict.fromkeys(GPU_BATCHES, 8) | {"replknet31_stage": 2, "densenet40": 32, "photonet": 32}


def run(settings: Settings) -> Result:
    """One row a layer-pass of each network, and one for its training step."""
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for name in settings.chosen("networks", {name: name for name in builtin_networks()}):
        document = timed(settings, name)
        facts[name] = document["summary"]
        layers = [
            timed_longer(row, QUICK_MS if settings.quick else LONGER_MS) if row.replaced and row.ratio < LEAST else row
            for row in layer_rows(name, document)
        ]
        rows += [*layers, step_row(name, document)]
        settings.say(f"  {name}: {document['summary']['geometric_mean']:.2f}x over its layer-passes")
    layers = [row for row in rows if row.group != "training step"]
    steps = [row.ratio for row in rows if row.group == "training step"]
    bars = [
        Bar("least replaced layer-pass over torch", least_replaced(layers), least=LEAST, applies=not settings.quick),
        Bar("least training step over torch", min(steps), applies=False),
    ]
    return Result(rows, bars, facts)


def timed(settings: Settings, network: str) -> dict[str, Any]:
    """The document of ``tilewise time``. Raises ``RuntimeError`` when a layer-pass has no plan at all."""
    batches = GPU_BATCHES if settings.device.type == "cuda" else CPU_BATCHES
    batch = settings.integer("batch") or batches[network]
    words = ["time", network, "--json", "--batch", str(batch), "--device", str(settings.device)]
    words += ["--precision", settings.text("precision"), "--rigor", settings.text("rigor")]
    if settings.integer("iterations"):
        words += ["--iterations", settings.text("iterations")]
    settings.say("tilewise " + " ".join(words))
    printed = io.StringIO()
    with settings.cache_directory(), contextlib.redirect_stdout(printed):
        cli.main(words, prog_name="tilewise", standalone_mode=False)
    document: dict[str, Any] = json.loads(printed.getvalue())
    if document["summary"]["unplanned"]:
        raise RuntimeError(f"{network}: {document['summary']['unplanned']} layer-passes have no plan")
    return document


def layer_rows(network: str, document: dict[str, Any]) -> list[Row]:
    """Every pass of every distinct layer."""
    return [
        Row(
            f"{layer['names'][0]} {found['problem']['pass']}",
            network,
            Side("torch", found["framework_ms"]),
            Side(plan_line(Plan.from_json(found["plan"])), found["planned_ms"] or found["framework_ms"]),
            replaced=found["replaced"],
            details={"layers": layer["names"], "problem": found["problem"], "plan": found["plan"]},
        )
        for layer in document["layers"]
        for found in layer["passes"]
    ]


def timed_longer(row: Row, budget_ms: float) -> Row:
    """The row timed again for that long; as it is where its layer cannot be written down."""
    found, plan = row.details["problem"], Plan.from_json(row.details["plan"])
    if found["layer"] is None:
        return row
    facts = {name: found[name] for name in ("dtype", "precision", "device")}
    problem = parse_layer(found["layer"], pass_=Pass(found["pass"]), **facts)
    problem = dataclasses.replace(problem, layouts=tuple(found["layouts"]))
    tensors = Tensors(problem)
    plan = dataclasses.replace(plan, problem=problem.key)  # the layer's bias is left out on both sides
    calls = [framework_call(problem, tensors), planned_call(problem, plan, tensors)]
    framework_ms, planned_ms = race(problem, calls, budget_ms=budget_ms)
    return dataclasses.replace(
        row,
        baseline=Side(row.baseline.what, framework_ms),
        ours=Side(row.ours.what, planned_ms),
        details={**row.details, "first_ratio": row.ratio},
    )


def step_row(network: str, document: dict[str, Any]) -> Row:
    """Forward, loss and backward of the whole network."""
    step = document["training_step"]
    sides = step["framework"], step["planned"]
    return Row(
        network,
        "training step",
        Side("torch", sides[0]["step_ms"]),
        Side("planned", sides[1]["step_ms"]),
        details={"framework": sides[0], "planned": sides[1], "iterations": step["iterations"]},
    )
