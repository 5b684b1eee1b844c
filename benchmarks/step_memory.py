"""A whole step under a memory limit: measured peaks against limits, and the largest batch of ResNet-50 at 16 GiB.

Of each network ``limits`` limits lie evenly from the least that its step needs to what torch takes with its benchmark
mode; a row's ratio is the limit over the peak of a step run afterwards, not below 1. The largest batch is found by
``tilewise.largest_batch`` and, for torch, by halving over steps run in an allocator that has no more; each is timed at
its own batch, one after the other. One planner serves all, so that a limit costs little after the first. ``largest`` is
empty where only the sweep is wanted, ``networks`` is ``none`` where only the largest batch is. On a CPU, what is
counted is tensors and workspaces.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from torch import nn

import tilewise
from tilewise.frontends.networks import builtin_networks, load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.nn import report
from tilewise.nn.memory.meter import allocator_cap, meter_of
from tilewise.nn.step.step import Step
from tilewise.planner import Planner
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {
    "networks": "alexnet,resnet18,resnet50,densenet40",
    "batches": "256,128,32,64",
    "limits": "5",
    "largest": "resnet50",
    "limit": "16GiB",
    "precision": "ieee",
    "rigor": "measure",
    "batch_sizes": "powers_of_two",
}
QUICK = {"networks": "photonet", "batches": "2", "limits": "1", "largest": "", "limit": "48MiB"}
QUICK |= {"rigor": "estimate", "batch_sizes": "undivided"}
MIB = 1 << 20
NONE = "none"


def run(settings: Settings) -> Result:
    """One row a limit, and one for the largest batch."""
    planner, rows, facts = settings.planner(), [], {}
    with framework_flags(settings.device.type, settings.text("precision"), deterministic=False):
        if settings.text("networks") != NONE:
            names = settings.chosen("networks", {name: name for name in builtin_networks()})
            for name, batch in zip(names, settings.integers("batches"), strict=True):
                found, facts[name] = sweep(settings, planner, name, batch)
                rows += found
                settings.keep(Result(rows, bars(rows, settings), facts))
        if settings.text("largest"):
            row, facts["largest"] = largest(settings, planner)
            rows.append(row)
    return Result(rows, bars(rows, settings), facts)


def sweep(settings: Settings, planner: Planner, name: str, batch: int) -> tuple[list[Row], dict[str, Any]]:
    """The limits of one network, and what its step takes at least and by torch."""
    network = load_network(name)
    model = network.module.to(settings.device).train()
    inputs = network.example_inputs(batch, settings.device)
    by_torch = taken(settings.device, model, inputs)
    torch_ms = time_of(settings.device, model, inputs)
    settings.say(f"{name}, batch {batch}: torch takes {by_torch / MIB:.0f} MiB and {torch_ms:.2f} ms")
    free = limited(settings, planner, model, inputs, 2 * by_torch)
    least, count = free["least"], settings.integer("limits")
    most = max(by_torch, least)
    rows = []
    for index in range(count):
        limit = least + (most - least) * index // max(1, count - 1)
        facts = limited(settings, planner, model, inputs, limit)
        peak = taken(settings.device, model, inputs)
        step_ms = time_of(settings.device, model, inputs)
        settings.say(f"  limit {limit / MIB:.0f} MiB: peak {peak / MIB:.0f} MiB, {step_ms:.2f} ms")
        details = {"limit": limit, "peak": peak, "told": facts["peak"], "step_ms": step_ms, "torch_ms": torch_ms}
        sides = Side("limit", limit / MIB), Side("peak", peak / MIB)
        rows.append(Row(f"{name} {index}", name, *sides, unit="MiB", details=details))
    tilewise.restore(model)
    return rows, {"batch": batch, "least": least, "torch": by_torch, "torch_ms": torch_ms, "free_peak": free["peak"]}


def limited(settings: Settings, planner: Planner, model: nn.Module, inputs: torch.Tensor, limit: int) -> dict[str, Any]:
    """Plan within ``limit`` bytes and return what is told of the step."""
    tilewise.optimize(model, inputs, memory_limit=limit, planner=planner, **options(settings))
    return dict(report(model).facts["step_memory"])


def options(settings: Settings) -> dict[str, Any]:
    """What planning is told everywhere."""
    return {name: settings.text(name) for name in ("rigor", "batch_sizes")}


def step_of(model: nn.Module, inputs: torch.Tensor) -> Step:
    """A training step without an optimizer."""
    return Step(model, [inputs], None, training=True)


def taken(device: torch.device, model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes at the peak of two steps: by the allocator's own count on a GPU."""
    step = step_of(model, inputs)
    gc.collect()
    with step.repeatable():
        if device.type != "cuda":
            return meter_of(device, step.held).traced(step, step).peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        step()
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)


def time_of(device: torch.device, model: nn.Module, inputs: torch.Tensor) -> float:
    """Median milliseconds of a step."""
    step = step_of(model, inputs)
    with step.repeatable():
        return interleaved([step], device, budget_ms=1000.0, least=3, most=15)[0]


def largest(settings: Settings, planner: Planner) -> tuple[Row, dict[str, Any]]:
    """The largest batches at ``limit``; the row compares the time an image of each at its own."""
    name, limit = settings.text("largest"), settings.size("limit")
    network = load_network(name)
    model = network.module.to(settings.device).train()
    plain = copy.deepcopy(model)

    def make_inputs(batch: int) -> torch.Tensor:
        return network.example_inputs(batch, settings.device)

    model.to("cpu")  # beside torch's it is not to count
    by_torch = torch_batch(settings, plain, make_inputs, limit)
    torch_ms = time_of(settings.device, plain, make_inputs(by_torch)) / by_torch
    settings.say(f"{name} at {settings.text('limit')}: torch takes {by_torch} images, {torch_ms:.3f} ms an image")
    plain.to("cpu")
    model.to(settings.device)
    found = tilewise.largest_batch(model, make_inputs, limit, planner=planner, **options(settings))
    settings.say(f"  planned: {found.batch} images, {found.image_ms:.3f} ms an image")
    facts = {
        "limit": limit,
        "torch_batch": by_torch,
        "batch": found.batch,
        "peak": found.step["peak"],
        "torch_ms_per_image": torch_ms,
        "ms_per_image": found.image_ms,
    }
    sides = Side(f"torch, {by_torch} images", torch_ms), Side(f"planned, {found.batch} images", found.image_ms)
    return Row(f"{name} at {settings.text('limit')}", "largest batch", *sides, unit="ms/image", details=facts), facts


def torch_batch(settings: Settings, model: nn.Module, make_inputs: Callable[[int], torch.Tensor], limit: int) -> int:
    """The largest batch that torch trains within ``limit``: doubling, then halving what is left."""

    def fits(batch: int) -> bool:
        step = step_of(model, make_inputs(batch))
        gc.collect()
        if settings.device.type != "cuda":
            with step.repeatable():
                return meter_of(settings.device, step.held).traced(step, step).peak <= limit
        try:
            with step.repeatable(), allocator_cap(limit, settings.device):
                step()
                step()
                torch.cuda.synchronize(settings.device)
        except torch.OutOfMemoryError:
            return False
        return True

    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Every peak within its limit; a batch no smaller than torch's and no slower an image."""
    applies = settings.device.type == "cuda" and not settings.quick
    swept = [row for row in rows if row.unit == "MiB"]
    found = []
    if swept:
        kept = sum(row.details["peak"] <= row.details["limit"] for row in swept) / len(swept)
        found.append(Bar("share of limits kept", kept, least=1.0))
    for row in rows:
        if row.unit != "MiB":
            d = row.details
            found.append(Bar("largest batch over torch's", d["batch"] / d["torch_batch"], least=1.0, applies=applies))
            found.append(Bar("time an image: torch over planned", row.ratio, least=1.0, applies=applies))
    return found
