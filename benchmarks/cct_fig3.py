"""Caffe con Troll Figure 3: the batch in partitions that are computed at once, each with its share of the threads.

Hadjis et al. 2015, section 2.2: p partitions of a batch are lowered at once, each on a thread of its own, and each
partition's product has n / p of the n threads. Here each of AlexNet's convolutions takes ``batch`` images in 1, 2, ...
and ``threads`` partitions, all by lowering type 1, and each row holds a number of partitions against one image at a
time, which is Caffe's way and the paper's "None"; ``total`` sums the layers. ``details`` have the ratio over one
partition, the whole batch at once on all threads, and the bytes of workspace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness.configs import LostConfig, runnable, runnable_plan
from harness.layers import ALEXNET, PASSES, Layer, by_name
from harness.picture import Figure, speedup_lines
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from harness.sides import Tensors, race

from tilewise import execute, solvers
from tilewise.plan import Config, Plan
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Split

DEFAULTS = {
    "layers": "",
    "passes": "fprop",
    "batch": "256",
    "threads": "",
    "partitions": "",
    "budget_ms": "1500",
    "seconds": "0",
}
QUICK = {"layers": "conv5", "batch": "2", "threads": "2", "budget_ms": "5"}
SOLVER = "lowering_type1"
NONE = 0
"""Partitions of the way that takes one image at a time."""


@dataclass(frozen=True)
class Timed:
    """One layer-pass in so many partitions: milliseconds, and bytes of workspace of all together."""

    ms: float
    workspace: int


def run(settings: Settings) -> Result:
    """One row a layer-pass and number of partitions."""
    layers = settings.chosen("layers", by_name(ALEXNET))
    passes = settings.chosen("passes", PASSES)
    here = torch.get_num_threads()
    given = settings.integers("threads") or [here]
    if len(given) != 1 or given[0] < 1:
        raise BadInput(f"threads={settings.words('threads')}: one number of one or more would do")
    counts = settings.integers("partitions") or _counts(given[0])
    if not all(1 <= count <= given[0] for count in counts):
        raise BadInput(f"partitions={counts}: numbers from 1 to threads={given[0]} would do")
    deadline = settings.deadline()
    found: dict[str, dict[int, Timed]] = {}
    notes: list[str] = []
    torch.set_num_threads(given[0])
    try:
        for layer, pass_ in itertools.product(layers, passes):
            name = f"{layer.name} {pass_.value}"
            if deadline.passed:
                notes.append(f"out of time before {name}")
                continue
            found[name] = _layer(settings, layer, pass_, counts, notes)
            settings.say(f"  {name}")
            settings.keep(Result(list(_rows(found, given[0])), notes=[*notes, f"ended after {name}"]))
    finally:
        torch.set_num_threads(here)
    rows = list(_rows(found, given[0]))
    return Result(rows, bars(rows, settings), notes=notes)


def _counts(threads: int) -> list[int]:
    """Powers of two up to the number of threads, and that."""
    return sorted({2**n for n in range(threads.bit_length())} | {threads})


def _layer(settings: Settings, layer: Layer, pass_: Pass, counts: list[int], notes: list[str]) -> dict[int, Timed]:
    problem = layer.problem(pass_, settings.device, batch=settings.integer("batch"))
    solver, split, tensors = solvers.get(SOLVER), solvers.get("partition"), Tensors(problem)
    assert isinstance(split, Split)
    if reasons := split.why_not(problem):
        notes.append(f"{layer.name} {pass_.value} is not partitioned: {'; '.join(reasons)}")
        counts = [count for count in counts if count == 1]
    whole = Config(order="merged")
    ready: dict[int, tuple[Callable[[], object], int]] = {}
    for count in (NONE, *counts):
        try:
            if count in (NONE, 1):
                one = runnable(problem, solver, whole if count else Config(block=1, order="images"), tensors)
                ready[count] = one.call, solver.workspace(problem, one.config)
            elif count <= problem.batch:
                ready[count] = _partitioned(problem, split, count, whole, tensors)
        except LostConfig as error:
            notes.append(str(error))
    times = race(problem, [call for call, _ in ready.values()], float(settings.integer("budget_ms")))
    return {count: Timed(ms, took) for (count, (_, took)), ms in zip(ready.items(), times, strict=True)}


def _partitioned(
    problem: ConvProblem, split: Split, count: int, config: Config, tensors: Tensors
) -> tuple[Callable[[], object], int]:
    """A call in ``count`` partitions, each lowered as a whole, and its workspace."""
    sizes = next(sizes for sizes in split.divisions(problem, count) if len(sizes) == count)
    children = tuple(
        Plan(split.child(problem, size).key, SOLVER, solvers.get(SOLVER).version, config) for size in sizes
    )
    plan = Plan(problem.key, split.name, split.version, Config(sizes=sizes), children, (1,) * count)
    call = runnable_plan(problem, plan, tensors).call
    return call, execute.bind(plan, problem, *(tensors[role] for role in problem.operands)).workspace


def _rows(found: dict[str, dict[int, Timed]], threads: int) -> Iterator[Row]:
    """Each number of partitions against one image at a time; of the total where every layer has it."""
    common = set.intersection(*(set(each) for each in found.values())) if found else set()
    total = {
        count: Timed(
            sum(each[count].ms for each in found.values()), max(each[count].workspace for each in found.values())
        )
        for count in sorted(common)
    }
    for name, each in {**found, "total": total}.items():
        for count, timed in each.items():
            if count == NONE or NONE not in each:
                continue
            yield Row(
                f"{name}, {count} partition{'s' if count > 1 else ''}",
                f"{threads} thread{'s' if threads > 1 else ''}",
                Side("one image at a time", each[NONE].ms),
                Side(f"{count} at once", timed.ms),
                details={
                    "layer": name,
                    "partitions": count,
                    "threads": threads,
                    "over_one_partition": each[1].ms / timed.ms if 1 in each else None,
                    "workspace": timed.workspace,
                    "workspace_of_one_image": each[NONE].workspace,
                },
            )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged for all of AlexNet on a CPU, by the best number of partitions."""
    ratios = [row.ratio for row in rows if row.details["layer"] == "total"]
    applies = settings.device.type == "cpu" and not settings.quick and not settings.words("layers")
    text = "the best partitions over one image at a time, AlexNet's convolutions"
    return [Bar(text, max(ratios, default=float("nan")), least=2.0, applies=applies)]


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up over the number of partitions."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "partitions", "layer")
