"""Training steps of a network that knows nothing of tilewise: plain, and with ``tilewise.enabled()``, in turns.

A bar, not a figure: where nothing is gained a step takes at most 1 % longer. That is measured twice: with every call
known and left to torch, and with every call unknown because nothing more may be planned. A third row has the plans that
the planner finds, which should gain. A step is forward, loss (the mean of squares) and backward. What ``call`` adds is
measured besides: one convolution of a single element, whose time is the host's.
"""

from __future__ import annotations

import statistics
import timeit
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from call_overhead import Fixed
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings

import tilewise
from tilewise.frontends.networks import load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.nn import Session
from tilewise.planner import Planner
from tilewise.planner.measuring.times import rounds

DEFAULTS = {"network": "resnet50", "batch": "64", "rigor": "measure", "rounds": "41", "planned": "1"}
QUICK = {"network": "photonet", "batch": "2", "rigor": "estimate", "rounds": "2"}
MOST = 1.01


def run(settings: Settings) -> Result:
    """One row a session; ``baseline`` is the same model without any."""
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        return _run(settings)


def _run(settings: Settings) -> Result:
    network = load_network(settings.text("network"))
    module = network.module.to(settings.device).train()
    images = network.example_inputs(settings.integer("batch"), settings.device)

    def step() -> None:
        output = module(images)
        loss = sum(y.square().mean() for y in (output if isinstance(output, tuple) else (output,)))
        loss.backward()
        module.zero_grad(set_to_none=True)

    planner = settings.planner()
    sessions = {
        "every call left to torch": tilewise.enabled(wait=True, goal="passes", planner=Fixed(planner, "", 0)),
        "nothing may be planned": tilewise.enabled(wait=True, goal="passes", planner=planner, most_plans=0),
    }
    if settings.integer("planned"):
        sessions["planned"] = tilewise.enabled(wait=True, goal="passes", planner=planner, rigor=settings.text("rigor"))
    with warnings.catch_warnings(), settings.cache_directory():
        warnings.simplefilter("ignore")  # that most_plans=0 is reached is what is measured
        for session in sessions.values():
            with session:
                for _ in range(3):
                    step()
        calls: list[Callable[[], None]] = [step, *(_within(session, step) for session in sessions.values())]
        took = rounds(calls, settings.device, repeats=settings.integer("rounds"))
    plain, *enabled = ([one.ms for one in values] for values in took)
    rows = [
        Row(
            name,
            "training step",
            Side("plain", statistics.median(plain)),
            Side("enabled", statistics.median(times)),
            details={
                "replaced_passes": sum(one.replaced for _, _, one in session.report().passes()),
                # Of each round: what disturbs the machine disturbs both.
                "median_ratio": statistics.median(b / a for a, b in zip(plain, times, strict=True)),
            },
        )
        for (name, session), times in zip(sessions.items(), enabled, strict=True)
    ]
    rows += _call_rows(settings, planner)
    applies = settings.device.type == "cuda" and not settings.quick
    bars = [Bar(f"step over plain, {row.name}", row.details["median_ratio"], most=MOST, applies=applies)
            for row in rows[:2]]  # fmt: skip
    return Result(rows, bars)


def _within(session: Session, step: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with session:
            step()

    return call


def _call_rows(settings: Settings, planner: Planner) -> list[Row]:
    """Host microseconds of one call on a single element, plain and left to torch, and of one that is recorded."""
    x = torch.randn(1, 1, 1, 1, device=settings.device)
    weights = [torch.randn(1, 1, 1, 1, device=settings.device) for _ in range(50)]
    count = 20 if settings.quick else 300

    def once(w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, None, (1, 1), (0, 0), (1, 1), 1)

    def us(number: int) -> float:
        return timeit.timeit(lambda: once(weights[0]), number=number) / number * 1e6

    session, recording = (tilewise.enabled(wait=True, goal="passes", planner=Fixed(planner, "", 0)) for _ in range(2))
    with session:
        us(3)
    plain, left = [], []
    for _ in range(2 if settings.quick else 101):
        plain.append(us(count))
        with session:
            left.append(us(count))
    with recording:
        recorded = timeit.timeit(lambda: [once(w) for w in weights], number=1) / len(weights) * 1e6
    base = Side("F.conv2d", statistics.median(plain))
    more = statistics.median(b - a for a, b in zip(plain, left, strict=True))
    return [
        Row("left to torch", "call", base, Side("enabled", statistics.median(left)), "us", details={"more_us": more}),
        Row("recorded", "call", base, Side("enabled", recorded), "us"),
    ]
