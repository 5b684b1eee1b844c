"""Caffe con Troll 3.2, price analysis: what an iteration of CaffeNet costs here, and on another machine.

Hadjis et al. 2015 find an iteration on a CPU instance 2.6 times as expensive as on a GPU instance. Prices change, so
they are options: ``price`` for an hour of this machine, in any currency, and ``other_price`` for an hour of another one
on which an iteration takes ``other_ms``. A row holds the price of a thousand iterations by torch against planned. With
``devices``, such as ``cuda:0,cpu``, which a machine with a GPU has by default, a second row holds it by torch against
that of ``tilewise.shared`` on these. With another machine given, a row holds its price against the least one here.

The paper prints no prices. Its two ratios, 1.86 in time and 2.6 in price, imply that an hour of its CPU instance cost
1.40 times as much as one of its GPU instance. ``other_price=1 other_ms=1000 price=1.4`` are prices like that.
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
    "network": "alexnet", "batch": "256", "rigor": "measure", "steps": "3", "warm_up": "24", "budget_ms": "30000",
    "price": "", "devices": "", "other_price": "", "other_ms": "", "other": "another machine",
}  # fmt: skip
QUICK = {"batch": "1", "rigor": "estimate", "steps": "1", "warm_up": "1", "budget_ms": "50",
         "price": "0.68", "other_price": "0.65", "other_ms": "100"}  # fmt: skip
HOUR_MS = 3_600_000
ITERATIONS = 1000


def run(settings: Settings) -> Result:
    """A row for each way here, and one for both machines where another one's price and time are given."""
    here = positive(settings, "price")
    if here is None:
        raise BadInput("price='': what an hour of this machine costs would do")
    other = (positive(settings, "other_price"), positive(settings, "other_ms"))
    if (other[0] is None) != (other[1] is None):
        raise BadInput("other_price and other_ms: both or neither would do")
    devices = [name for name in settings.text("devices").split(",") if name]
    if not devices and settings.device.type == "cuda":
        devices = [str(settings.device), "cpu"]
    return Result(rows_of(settings, times(settings, devices), here, other))


def rows_of(
    settings: Settings, took: dict[str, float], here: float, other: tuple[float | None, float | None]
) -> list[Row]:
    """The prices of iterations that ``took`` so many milliseconds here, and of one on another machine.

    ``here`` is the price of an hour; ``other`` has the price and the milliseconds of the other machine, if any.
    """
    batch = settings.integer("batch")
    details: dict[str, Any] = {"batch": batch, "price_of_an_hour": here}
    details |= {f"{name.partition(' ')[0]}_ms": ms for name, ms in took.items()}
    name = f"{settings.text('network')}, batch {batch}"
    prices = {side: price_of(ms, here) for side, ms in took.items()}
    rows = [
        Row(f"{name}: {side}", "here", Side("torch, here", prices["torch"]), Side(f"{side}, here", prices[side]),
            unit="a thousand iterations", details=details)
        for side in took if side != "torch"
    ]  # fmt: skip
    if other[0] is not None and other[1] is not None:
        there = Side(settings.text("other"), price_of(other[1], other[0]))
        more = {"other_ms": other[1], "other_price_of_an_hour": other[0]}
        least = min(prices, key=lambda side: prices[side])
        rows.append(
            Row(f"{name}: {settings.text('other')}", "both", there, Side(f"{least}, here", prices[least]),
                unit="a thousand iterations", details={**details, **more})
        )  # fmt: skip
    return rows


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


def times(settings: Settings, devices: list[str]) -> dict[str, float]:
    """Milliseconds of a training step by torch, planned, and shared among ``devices`` if any, in turns."""
    network: Any = load_network(settings.text("network"))
    inputs = network.example_inputs(settings.integer("batch"), settings.device)
    own = network.module.to(settings.device).train()
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        planned = tilewise.optimize(
            copy.deepcopy(own), inputs, rigor=settings.text("rigor"), planner=settings.planner()
        )
        steps = {"torch": step_of(own, inputs), "planned": step_of(planned, inputs)}
        if devices:
            shared = step_of(tilewise.shared(copy.deepcopy(own), devices=devices), inputs)
            for _ in range(settings.integer("warm_up")):  # shares follow the rates of steps
                shared()
            steps[f"shared by {' and '.join(devices)}"] = shared
        found = interleaved(
            list(steps.values()), settings.device, budget_ms=float(settings.integer("budget_ms")),
            least=settings.integer("steps"),
        )  # fmt: skip
    if settings.device.type == "cuda":
        torch.cuda.synchronize()
    return dict(zip(steps, found, strict=True))
