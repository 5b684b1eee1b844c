"""Parallel branches on streams at once against in sequence: GoogLeNet's regions, training steps and inference.

Each row is one batch. ``sequence`` is torch's network, or the planned one, with its branches one after the other;
``streams`` the same with those regions on streams that were measured faster. ``details`` have every region's times,
both ways, and what the allocator held for it. ``layers`` says which layers run: ``torch``'s own or the ``planned``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from torch import nn

import tilewise
import tilewise.nn
from tilewise.frontends.networks import Network, builtin_networks, load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.nn.branches import choose as branch_times
from tilewise.nn.branches.streams import in_sequence
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {
    "networks": "googlenet",
    "batches": "1,16,32,128",
    "modes": "step,inference",
    "layers": "torch,planned",
    "rigor": "measure",
    "budget_ms": "2000",
    "seconds": "0",
}
QUICK = {"batches": "1", "layers": "torch", "rigor": "estimate", "budget_ms": "50"}


def run(settings: Settings) -> Result:
    """One row a network, mode, kind of layers and batch."""
    names = settings.chosen("networks", {name: name for name in builtin_networks()})
    modes = settings.chosen("modes", {"step": True, "inference": False})
    layers = settings.chosen("layers", {"torch": False, "planned": True})
    batches = settings.integers("batches")
    if settings.device.type != "cuda":
        found = {name: len(branch_times.find(load_network(name).module)) for name in names}
        counts = ", ".join(f"{name} has {count} modules that fork" for name, count in found.items())
        raise NothingToMeasure(f"device {settings.device} has no streams, its branches run in sequence; {counts}")
    deadline = settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    for name, training, planned, batch in itertools.product(names, modes, layers, batches):
        if deadline.passed:
            notes.append(f"out of time before {name}, batch {batch}, training={training}, planned={planned}")
            continue
        rows.append(_row(settings, load_network(name), batch, training=training, planned=planned))
        settings.say(f"  {rows[-1].name}: {rows[-1].ratio:.3f}x")
        settings.keep(Result(rows, notes=[*notes, f"ended after {rows[-1].name}"]))
    return Result(rows, bars(rows), notes=notes)


def _row(settings: Settings, network: Network, batch: int, *, training: bool, planned: bool) -> Row:
    model = network.module.to(settings.device).train(training)
    inputs = network.example_inputs(batch, settings.device)
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        if planned:
            options: dict[str, Any] = {"rigor": settings.text("rigor"), "planner": settings.planner()}
            tilewise.optimize(model, inputs, training=training, branches="measured", **options)
            told = tilewise.nn.report(model).branches
        else:
            told = branch_times.choose_branches(model, [inputs], "measured", training=training, workspaces={})
        took = interleaved(
            calls(network, model, inputs, training=training), settings.device,
            budget_ms=float(settings.integer("budget_ms")),
        )  # fmt: skip
    kind, mode = "planned" if planned else "torch", "step" if training else "inference"
    return Row(
        f"{network.name} {mode}, batch {batch}, {kind} layers",
        f"{mode}, {kind}",
        Side("in sequence", took[1]),
        Side("streams", took[0]),
        replaced=any(one.on_streams for one in told),
        details={
            "network": network.name,
            "batch": batch,
            "on_streams": sum(one.on_streams for one in told),
            "regions": [_region(one) for one in told],
        },
    )


def calls(network: Network, model: nn.Module, inputs: torch.Tensor, *, training: bool) -> list[Any]:
    """The network on streams, where it has been forked, and in sequence."""

    def streams() -> None:
        with torch.set_grad_enabled(training):
            outputs = model(inputs)
            if training:
                network.loss(outputs).backward()
                model.zero_grad(set_to_none=True)

    def sequence() -> None:
        with in_sequence():
            streams()

    return [streams, sequence]


def _region(one: tilewise.nn.BranchReport) -> dict[str, Any]:
    return {
        "name": one.name,
        "on_streams": one.on_streams,
        "streams_ms": one.streams_ms,
        "sequence_ms": one.sequence_ms,
        "streams_peak": one.streams_peak,
        "sequence_peak": one.sequence_peak,
        "reason": one.reason,
    }


def bars(rows: list[Row]) -> list[Bar]:
    """Nothing may be slower than in sequence, by more than two runs of one thing differ."""
    return [Bar(f"{row.name}: over in sequence", row.ratio, least=0.97) for row in rows]
