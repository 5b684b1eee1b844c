"""Caffe con Troll 3.2, price analysis: what an iteration of CaffeNet costs here, and on another machine.

Hadjis et al. 2015 find an iteration on a CPU instance 2.6 times as expensive as on a GPU instance. Prices change, so
they are options: ``price`` for an hour of this machine, in any currency, and ``other_price`` for an hour of another one
on which an iteration takes ``other_ms``. A row holds the price of a thousand iterations by torch against planned; with
another machine given, its price against that of the planned iteration here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from cct_fig4 import step_of
from harness.result import Result, Row, Side
from harness.settings import BadInput, Settings

import tilewise
from tilewise.frontends.networks import load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {
    "network": "alexnet", "batch": "256", "rigor": "measure", "steps": "3", "budget_ms": "30000", "price": "",
    "other_price": "", "other_ms": "", "other": "another machine",
}  # fmt: skip
QUICK = {"batch": "1", "rigor": "estimate", "steps": "1", "budget_ms": "50", "price": "0.68", "other_price": "0.65",
         "other_ms": "100"}  # fmt: skip
HOUR_MS = 3_600_000
ITERATIONS = 1000


def run(settings: Settings) -> Result:
    """A row for this machine, and one for both where another one's price and time are given."""
    here = positive(settings, "price")
    if here is None:
        raise BadInput("price='': what an hour of this machine costs would do")
    other = (positive(settings, "other_price"), positive(settings, "other_ms"))
    if (other[0] is None) != (other[1] is None):
        raise BadInput("other_price and other_ms: both or neither would do")
    torch_ms, planned_ms = times(settings)
    batch = settings.integer("batch")
    details = {"batch": batch, "price_of_an_hour": here, "torch_ms": torch_ms, "planned_ms": planned_ms}
    name = f"{settings.text('network')}, batch {batch}"
    planned = Side("planned, here", price_of(planned_ms, here))
    rows = [
        Row(f"{name}: here", "here", Side("torch, here", price_of(torch_ms, here)), planned,
            unit="a thousand iterations", details=details)
    ]  # fmt: skip
    if other[0] is not None and other[1] is not None:
        there = Side(settings.text("other"), price_of(other[1], other[0]))
        more = {"other_ms": other[1], "other_price_of_an_hour": other[0]}
        rows.append(
            Row(f"{name}: {settings.text('other')}", "both", there, planned, unit="a thousand iterations",
                details={**details, **more})
        )  # fmt: skip
    return Result(rows)


def price_of(ms: float, hour: float) -> float:
    """The price of a thousand iterations of ``ms`` milliseconds, at so much an hour."""
    return ms * ITERATIONS / HOUR_MS * hour


def positive(settings: Settings, name: str) -> float | None:
    """An option as a positive number, ``None`` where it is empty. Raises ``BadInput``."""
    text = settings.text(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadInput(f"{name}={text!r}: a positive number would do")
    return value


def times(settings: Settings) -> tuple[float, float]:
    """Milliseconds of a training step by torch and planned, in turns."""
    network: Any = load_network(settings.text("network"))
    inputs = network.example_inputs(settings.integer("batch"), settings.device)
    own = network.module.to(settings.device).train()
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        planned = tilewise.optimize(
            copy.deepcopy(own), inputs, rigor=settings.text("rigor"), planner=settings.planner()
        )
        torch_ms, planned_ms = interleaved(
            [step_of(own, inputs), step_of(planned, inputs)], settings.device,
            budget_ms=float(settings.integer("budget_ms")), least=settings.integer("steps"),
        )  # fmt: skip
    if settings.device.type == "cuda":
        torch.cuda.synchronize()
    return torch_ms, planned_ms
