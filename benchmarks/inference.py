"""Whole networks forward with frozen weights: torch against the same network planned with ``training=False``.

Both sides see the same inputs in turns, without gradients; on a CPU both with memory that stays. ``compile=1`` puts
``torch.compile`` around both sides, and with ``frozen=1`` the weights are promised to stay. ``details`` have how far
the outputs are apart and how many convolutions were replaced. ``peers`` names what else is measured in the same turns
on a CPU, each a row: ``compile`` (``torch.compile`` with freezing), ``onnxruntime`` and ``openvino``, where they are
installed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
from harness import peers
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from torch import nn

import tilewise
import tilewise.nn
from tilewise.frontends.networks import builtin_networks, load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {
    "networks": "resnet18,vgg16",
    "batches": "1,16",
    "rigor": "measure",
    "compile": "0",
    "frozen": "0",
    "peers": "",
    "budget_ms": "8000",
    "seconds": "0",
}
QUICK = {"networks": "photonet", "batches": "1", "rigor": "estimate", "budget_ms": "50"}
LEAST = {1: 1.25, 16: 1.35}
"""Of ResNet-18 and VGG-16 on a CPU, by batch."""
LEAST_COMPILED = 1.2


def run(settings: Settings) -> Result:
    """One row a network and batch."""
    names = settings.chosen("networks", {name: name for name in builtin_networks()})
    deadline = settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    for name, batch in itertools.product(names, settings.integers("batches")):
        if deadline.passed:
            notes.append(f"out of time before {name}, batch {batch}")
            continue
        found = _rows(settings, name, batch)
        rows += found
        for row in found:
            settings.say(f"  {row.name}, {row.baseline.what}: {row.ratio:.2f}x")
        settings.keep(Result(rows, notes=[*notes, f"ended after {rows[-1].name}"]))
    return Result(rows, bars(rows, settings), notes=notes)


def _rows(settings: Settings, name: str, batch: int) -> list[Row]:
    network = load_network(name)
    own = network.module.to(settings.device).eval()
    inputs = network.example_inputs(batch, settings.device)
    compiled = settings.integer("compile") > 0
    with torch.no_grad(), framework_flags(settings.device.type, "ieee", deterministic=False):
        planned = tilewise.optimize(
            copy.deepcopy(own),
            inputs,
            training=False,
            frozen=settings.integer("frozen") > 0,
            rigor=settings.text("rigor"),
            planner=settings.planner(),
        )
        said = tilewise.nn.report(planned)
        sides: list[nn.Module] = [own, planned]
        calls = [torch.compile(side) if compiled else side for side in sides]
        want, got = (_first(call(inputs)) for call in calls)
        apart = float((got.double() - want.double()).norm() / want.double().norm())
        others = _peers(settings)
        raced = {
            "torch": lambda: calls[0](inputs),
            "planned": lambda: calls[1](inputs),
            **{peer: build(own, inputs) for peer, build in others.items()},
        }
        budget_ms = float(settings.integer("budget_ms"))
        times = interleaved(list(raced.values()), settings.device, budget_ms=budget_ms, least=5)
        took = dict(zip(raced, times, strict=True))
    details = {
        "network": name,
        "batch": batch,
        "images_per_s": {side: batch / ms * 1e3 for side, ms in took.items()},
        "outputs_apart": apart,
        "convolutions": len(said.layers),
        "replaced": sum(layer.replaced for layer in said.layers),
    }
    return [
        Row(f"{name}, batch {batch}", "compiled" if compiled else "eager" if side == "torch" else "peer",
            Side(side, took[side]), Side("planned", took["planned"]), details=details)
        for side in ("torch", *others)
    ]  # fmt: skip


def _peers(settings: Settings) -> dict[str, Callable[[nn.Module, torch.Tensor], peers.Call]]:
    """What builds each peer that the options name. Raises :class:`BadInput`."""
    names = settings.words("peers")
    if names and (settings.device.type != "cpu" or settings.integer("compile")):
        raise BadInput(f"peers={settings.text('peers')!r}: they are measured on a CPU and with compile=0")
    return dict(zip(names, settings.chosen("peers", peers.PEERS), strict=True)) if names else {}


def _first(result: object) -> torch.Tensor:
    found = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(found, torch.Tensor)
    return found


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged on a CPU."""
    applies = settings.device.type == "cpu" and not settings.quick
    compiled = settings.integer("compile") > 0
    return [
        Bar(f"{row.name}, over torch", row.ratio, least=LEAST_COMPILED if compiled else LEAST[row.details["batch"]],
            applies=applies and row.details["network"] in ("resnet18", "vgg16"))
        for row in rows
        if row.group != "peer" and (compiled or row.details["batch"] in LEAST)
    ]  # fmt: skip
