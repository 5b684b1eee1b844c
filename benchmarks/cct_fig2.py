"""Caffe con Troll Figure 2: lowering as many images at a time as there are, by threads, with the memory it takes.

Hadjis et al. 2015, section 2.2: Caffe lowered one image at a time. Here each of AlexNet's convolutions takes ``batch``
images in blocks of 1, 2, 4, ... images, all by lowering type 1, and each row holds a block against one image at a time;
``total`` sums the layers. ``details`` have the bytes of the lowered matrices, and in groups of several thread numbers
the curve of Figure 2 (a).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness.configs import LostConfig, Runnable, runnable
from harness.layers import ALEXNET, PASSES, Layer, by_name
from harness.picture import Figure, speedup_lines
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from harness.sides import Tensors, race

from tilewise import solvers
from tilewise.plan import Config
from tilewise.problems.conv.problem import Pass

DEFAULTS = {
    "layers": "",
    "passes": "fprop",
    "batch": "256",
    "blocks": "1,4,16,64,256",
    "threads": "",
    "budget_ms": "1500",
    "seconds": "0",
}
QUICK = {"layers": "conv5", "batch": "2", "blocks": "1,2", "budget_ms": "5"}
SOLVER = "lowering_type1"


@dataclass(frozen=True)
class Timed:
    """One layer-pass in blocks of ``block`` images: milliseconds, and bytes of workspace."""

    layer: str
    block: int
    ms: float
    workspace: int


def run(settings: Settings) -> Result:
    """One row a number of threads, layer-pass and block of more than one image."""
    layers = settings.chosen("layers", by_name(ALEXNET))
    passes = settings.chosen("passes", PASSES)
    here = torch.get_num_threads()
    threads = settings.integers("threads") or sorted({1, here})
    if 0 in threads:
        raise BadInput("threads=0: one or more would do")
    deadline = settings.deadline()
    rows: list[Row] = []
    notes: list[str] = []
    try:
        for number in threads:
            torch.set_num_threads(number)
            found: list[Timed] = []
            for layer, pass_ in itertools.product(layers, passes):
                if deadline.passed:
                    notes.append(f"out of time before {layer.name} {pass_.value} on {number} threads")
                    continue
                found += _layer(settings, layer, pass_, notes)
                settings.say(f"  {number} threads, {layer.name} {pass_.value}")
            rows += _rows(found, number)
            settings.keep(Result(rows, notes=[*notes, f"ended after {number} threads"]))
    finally:
        torch.set_num_threads(here)
    return Result(rows, bars(rows, settings, max(threads)), notes=notes)


def _layer(settings: Settings, layer: Layer, pass_: Pass, notes: list[str]) -> list[Timed]:
    problem = layer.problem(pass_, settings.device, batch=settings.integer("batch"))
    solver, tensors = solvers.get(SOLVER), Tensors(problem)
    ready: dict[int, Runnable] = {}
    for block in settings.integers("blocks"):
        whole = block >= problem.batch
        config = Config(order="merged") if whole else Config(block=block, order="images" if block == 1 else "merged")
        try:
            ready[min(block, problem.batch)] = runnable(problem, solver, config, tensors)
        except LostConfig as error:
            notes.append(str(error))
    times = race(problem, [each.call for each in ready.values()], float(settings.integer("budget_ms")))
    name = f"{layer.name} {pass_.value}"
    return [
        Timed(name, block, ms, solver.workspace(problem, each.config))
        for (block, each), ms in zip(ready.items(), times, strict=True)
    ]


def _rows(found: list[Timed], threads: int) -> Iterator[Row]:
    """Each block against one image at a time; of the total where every layer has it."""
    names = list(dict.fromkeys(each.layer for each in found))
    by_layer = {name: {each.block: each for each in found if each.layer == name} for name in names}
    common = set.intersection(*(set(blocks) for blocks in by_layer.values())) if by_layer else set()
    total = {
        block: Timed(
            "total", block, sum(blocks[block].ms for blocks in by_layer.values()),
            max(blocks[block].workspace for blocks in by_layer.values()),
        )
        for block in sorted(common)
    }  # fmt: skip
    for name, blocks in {**by_layer, "total": total}.items():
        for block, each in blocks.items():
            if block == 1 or 1 not in blocks:
                continue
            yield Row(
                f"{name}, {block} images at a time",
                f"{threads} thread{'s' if threads > 1 else ''}",
                Side("one image at a time", blocks[1].ms),
                Side(f"{block} at a time", each.ms),
                details={
                    "layer": name,
                    "block": block,
                    "threads": threads,
                    "workspace": each.workspace,
                    "workspace_of_one": blocks[1].workspace,
                },
            )


def bars(rows: list[Row], settings: Settings, threads: int) -> list[Bar]:
    """Judged for all of AlexNet on a CPU, by the largest block."""
    totals = [row for row in rows if row.details["layer"] == "total" and row.details["threads"] == threads]
    best = max(totals, key=lambda row: row.details["block"], default=None)
    applies = settings.device.type == "cpu" and not settings.quick and not settings.words("layers")
    value = float("nan") if best is None else best.ratio
    return [Bar("all images at a time over one, AlexNet's convolutions", value, least=2.0, applies=applies)]


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up over the number of images, a panel for each number of threads."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "block", "layer")
