"""Caffe con Troll Figure 9: one layer on two devices, by the share of its batch that each computes.

Hadjis et al. 2015, section 2.3 and appendix B: each device computes a share of the images, both at the same time. The
paper varies the share p of the GPU, and labels the one that peak FLOPS would choose. Here each of AlexNet's
convolutions is shared between the device of its tensors (``--device``) and those of ``share_with``, copies included.
A row holds one share against the faster of the devices alone; ``achieved`` is its part of the rates of all devices
together, each at the rate that it has alone. ``found`` says whether the rule of FLOPS, measured rates or moving images
on led to it, or only the sweep. With ``--device cpu`` the tensors lie on the host and the GPU helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from harness.layers import ALEXNET, PASSES, by_name
from harness.picture import Figure, share_lines
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.shares import Shared, Timed, chosen_places, measured

DEFAULTS = {
    "layers": "conv1",
    "passes": "fprop",
    "batch": "256",
    "share_with": "",
    "steps": "16",
    "rigor": "measure",
    "budget_ms": "4000",
    "seconds": "0",
}
QUICK = {"layers": "conv5", "batch": "8", "steps": "4", "budget_ms": "20"}


def run(settings: Settings) -> Result:
    """One row a layer-pass and share."""
    layers = settings.chosen("layers", by_name(ALEXNET))
    passes = settings.chosen("passes", PASSES)
    places = chosen_places(settings, settings.words("share_with"))
    planner, deadline = settings.planner(), settings.deadline()
    notes = _notes(settings, places)
    found: dict[str, Shared] = {}
    for layer, pass_ in itertools.product(layers, passes):
        name = f"{layer.name} {pass_.value}"
        if deadline.passed:
            notes.append(f"out of time before {name}")
            continue
        problem = layer.problem(pass_, settings.device, batch=settings.integer("batch"))
        shared = measured(
            settings, planner, problem, places, settings.integer("steps"), float(settings.integer("budget_ms"))
        )
        if shared.shares:
            found[name] = shared
        else:
            notes += [f"{name}: {m.reason}" for m in shared.log if m.solver == "devices"]
        settings.say(f"  {name}")
        settings.keep(Result(list(_rows(found)), bars(found, settings), notes=[*notes, f"ended after {name}"]))
    return Result(list(_rows(found)), bars(found, settings), facts=_facts(found), notes=notes)


def _notes(settings: Settings, places: tuple[str, ...]) -> list[str]:
    """What is to be said of the devices."""
    if settings.device.type == "cpu" and places == ("cpu",):
        return ["there is no GPU: the CPU is shared with itself, each half on half of the threads"]
    return []


def _rows(found: dict[str, Shared]) -> Iterator[Row]:
    """Each share against the faster device alone."""
    for name, shared in found.items():
        best_single = shared.best_single
        for share in (shared.alone, *shared.shares):
            others = 1.0 - share.images.get("here", 0) / shared.problem.batch
            text = " + ".join(f"{n} on {place.partition('=')[0]}" for place, n in share.images.items())
            yield Row(
                f"{name}, {text} ({share.found})",
                name,
                Side(f"alone: {_where(best_single)}", best_single.ms),
                Side(text, share.ms),
                details={
                    "share_of_others": others,
                    "images": share.images,
                    "found": share.found,
                    "achieved": shared.achieved(share),
                    "over_the_best_share": share.ms / shared.best.ms,
                    "alone_ms": {_where(each): each.ms for each in shared.single},
                    "config": share.plan.config.to_json(),
                    "parts": [f"{child.solver} {child.config}".strip() for child in share.plan.children],
                },
            )


def _where(share: Timed) -> str:
    """The places of a share."""
    return ", ".join(place.partition("=")[0] for place in share.images)


def _facts(found: dict[str, Shared]) -> dict[str, Any]:
    """For each layer-pass: what planning chose, where the rule would have landed, and what both take."""
    facts: dict[str, Any] = {}
    for name, shared in found.items():
        rule = shared.by("flops")
        facts[name] = {
            "chosen": shared.chosen.images,
            "chosen_over_the_best": shared.chosen.ms / shared.best.ms,
            "chosen_over_the_best_single": shared.chosen.ms / shared.best_single.ms,
            "achieved": shared.achieved(shared.chosen),
            "rule": rule[0].images if rule else None,
            "rule_over_the_best": rule[0].ms / shared.best.ms if rule else None,
        }
    return facts


def bars(found: dict[str, Shared], settings: Settings) -> list[Bar]:
    """Judged where a CPU and a GPU share a layer, by the one layer that gains most."""
    places = chosen_places(settings, settings.words("share_with"))
    hybrid = (settings.device.type == "cpu") != ("cpu" in places)
    applies = hybrid and not settings.quick and bool(found)
    worst = max((each.chosen.ms / each.best.ms for each in found.values()), default=float("nan"))
    slower = max((each.chosen.ms / each.best_single.ms for each in found.values()), default=float("nan"))
    first = next(iter(found.values()), None)
    achieved = float("nan") if first is None else first.achieved(first.chosen)
    on_host = applies and settings.device.type == "cpu"
    return [
        Bar("the chosen share over the best of the sweep", worst, most=1.05, applies=applies),
        Bar("the chosen share over the best single device", slower, most=1.02, applies=applies),
        Bar("the part of the summed rates, first layer, tensors on the host", achieved, least=0.9, applies=on_host),
    ]


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up over the share of the other devices."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return share_lines(document, groups, "share_of_others", "the share of the other devices")
