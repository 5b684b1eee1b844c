"""Caffe con Troll Figure 5, by layers: AlexNet's convolutions on one GPU, on a GPU and the CPU, and on two GPUs.

Hadjis et al. 2015, section 3.3: the paper has AlexNet end to end on 1 GPU, 1 GPU with the CPU (more than 15 % faster)
and 4 GPUs (more than 3x). Here each layer's batch is shared among the devices, its tensors on the first GPU, copies
included; shares are found by the planner, and equal GPUs get what they can hold up, not equal parts. A row holds the
best share against the GPU alone; ``achieved`` is the part of the rates of all devices together, each at the rate that
it has alone. With ``--device cpu`` the tensors lie on the host, and every device but the CPU is a GPU that helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from harness.layers import ALEXNET, PASSES, by_name
from harness.result import Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.shares import Shared, chosen_places, measured

DEFAULTS = {
    "layers": "",
    "passes": "fprop",
    "batch": "256",
    "devices": "",
    "rigor": "measure",
    "budget_ms": "2000",
    "seconds": "0",
}
QUICK = {"layers": "conv5", "batch": "8", "budget_ms": "20"}


def run(settings: Settings) -> Result:
    """One row a layer-pass and group of devices."""
    layers = settings.chosen("layers", by_name(ALEXNET))
    passes = settings.chosen("passes", PASSES)
    groups = [tuple(words.split("+")) for words in settings.words("devices")] or _groups(settings.device)
    planner, deadline, notes = settings.planner(), settings.deadline(), []
    found: list[tuple[str, tuple[str, ...], Shared]] = []
    for layer, pass_, group in itertools.product(layers, passes, groups):
        name = f"{layer.name} {pass_.value}"
        if deadline.passed:
            notes.append(f"out of time before {name} with {'+'.join(group)}")
            continue
        try:
            places = chosen_places(settings, group)
        except NothingToMeasure as error:
            notes.append(str(error))
            continue
        problem = layer.problem(pass_, settings.device, batch=settings.integer("batch"))
        shared = measured(settings, planner, problem, places, 0, float(settings.integer("budget_ms")))
        if shared.shares:
            found.append((name, group, shared))
        else:
            notes += [f"{name}: {m.reason}" for m in shared.log if m.solver == "devices"]
        settings.say(f"  {name} with {'+'.join(group)}")
        settings.keep(Result(list(_rows(found)), notes=[*notes, f"ended after {name}"]))
    return Result(list(_rows(found)), notes=list(dict.fromkeys(notes)))


def _groups(device: torch.device) -> list[tuple[str, ...]]:
    """Devices beside the tensors' own: the CPU, another GPU, and both; from the host the first GPU, and two."""
    count = torch.cuda.device_count()
    if device.type == "cpu":
        return [("cuda:0",), ("cuda:0", "cuda:1")][: max(1, min(count, 2))] if count else [("cpu",)]
    other = [f"cuda:{index}" for index in range(count) if index != device.index][:1]
    return [("cpu",), *([tuple(other), (*other, "cpu")] if other else [])]


def _rows(found: list[tuple[str, tuple[str, ...], Shared]]) -> Iterator[Row]:
    """The share that planning chose against the tensors' own device alone."""
    for name, group, shared in found:
        chosen = shared.chosen
        text = " + ".join(f"{n} on {place.partition('=')[0]}" for place, n in chosen.images.items())
        yield Row(
            f"{name}, with {' and '.join(group)}",
            f"with {' and '.join(group)}",
            Side("alone", shared.alone.ms),
            Side(text, chosen.ms),
            replaced=chosen is not shared.alone,
            details={
                "layer": name,
                "images": chosen.images,
                "achieved": shared.achieved(chosen),
                "over_the_best_single": chosen.ms / shared.best_single.ms,
                "alone_ms": {", ".join(each.images): each.ms for each in shared.single},
                "config": chosen.plan.config.to_json(),
                "parts": [f"{child.solver} {child.config}".strip() for child in chosen.plan.children],
            },
        )
