"""fbfft Figures 1-6: speed-up over Table 2's 8,232 configurations, a heat map for each kernel size.

Vasilache et al. 2014, Table 2 and Figures 1-6: mini-batch, input and output planes, kernel and output size; as there a
configuration's three passes are taken together. The ratio is torch's time, in the better layout of each pass and in
benchmark mode, over the plan's; a pass that is left to torch counts the same on both sides. On a GPU ``details`` also
have both without the host, which launches small ones slower than they run; the bars are on those, as in the paper.

A seeded sample of ``sample`` configurations is measured, dealt evenly over kernel sizes; a larger sample holds the
smaller ones. What an earlier run on this machine left in the result's file is kept and not measured again, so that runs
of some minutes (``seconds``) come to all of them (``sample=8232``). A configuration that failed is black in the picture
and named in the facts. ``ahead`` configurations are planned together, so that kernels are compiled while others are
measured. Several GPUs of one kind measure side by side: one process each, with ``--device cuda:1``, a ``--label`` and
``part=1/2``, or ``part=1+2/3`` where one has more time than another. A run takes the rows of those beside it that
measured in the same way, so a last one has all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.layer_pass import timed, total
from harness.layers import PASSES, Layer
from harness.machine import commit
from harness.picture import Figure, heat_maps
from harness.result import Bar, Result, Row, geometric_mean, least_replaced
from harness.settings import BadInput, Settings

from tilewise.planner import NoPlanError, Planner
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {
    "sample": "60",
    "minibatches": "1,16,64,128",
    "inputs": "1,4,16,64,96,128,256",
    "outputs": "1,4,16,64,96,128,256",
    "kernels": "3,5,7,9,11,13",
    "sizes": "1,2,4,8,16,32,64",
    "precision": "ieee",
    "rigor": "measure",
    "budget_ms": "60",
    "ahead": "12",
    "part": "0/1",
    "seconds": "0",
}
QUICK = {
    "sample": "3",
    "minibatches": "1,16",
    "inputs": "1,4",
    "outputs": "1,4",
    "sizes": "1,4",
    "rigor": "estimate",
    "budget_ms": "5",
}
SEED = 1412
LEAST_MS = 0.02
"""Of torch, for what is judged."""


@dataclass(frozen=True)
class Configuration:
    """One point of Table 2; ``size`` is of the output."""

    minibatch: int
    inputs: int
    outputs: int
    kernel: int
    size: int

    @property
    def name(self) -> str:
        """Its five numbers."""
        return f"S={self.minibatch} f={self.inputs} f'={self.outputs} k={self.kernel} y={self.size}"

    @property
    def details(self) -> dict[str, Any]:
        """The numbers and the product that the figures have on their axis."""
        numbers = asdict(self)
        size = numbers.pop("size")
        return {**numbers, "output size": size, "problem size": self.minibatch * self.inputs * self.outputs}

    @property
    def layer(self) -> Layer:
        """Without padding: the image is as large as the output asks for."""
        image = self.size + self.kernel - 1
        return Layer(self.name, self.minibatch, self.inputs, self.outputs, image, self.kernel)


def configurations(settings: Settings) -> Iterator[Configuration]:
    """All of the grid in an order that only the grid decides: shuffled, and kernel sizes in turns."""
    axes = [settings.integers(name) for name in ("minibatches", "inputs", "outputs", "sizes")]
    decks = []
    for kernel in settings.integers("kernels"):
        deck = [Configuration(s, i, o, kernel, size) for s, i, o, size in itertools.product(*axes)]
        random.Random(SEED + kernel).shuffle(deck)
        decks.append(deck)
    return itertools.chain.from_iterable(zip(*decks, strict=True))


def run(settings: Settings) -> Result:
    """One row a configuration, those of earlier runs included."""
    rows, failed, begun = _earlier(settings)
    deadline, planner = settings.deadline(), settings.planner()
    wanted = list(itertools.islice(configurations(settings), settings.integer("sample")))
    waiting = [each for each in wanted if each.name not in rows and each.name not in failed]
    waiting.sort(key=lambda each: each.name in begun)
    waiting = _share(settings, waiting)
    settings.say(f"{len(wanted)} configurations, {len(waiting)} to measure")
    ahead = max(1, settings.integer("ahead"))
    for number, each in enumerate(waiting):
        if deadline.passed:
            settings.say(f"out of time: {len(waiting) - number} configurations are left")
            break
        if number % ahead == 0 and ahead > 1:
            _plan(settings, planner, waiting[number : number + ahead])
        settings.keep(_result(rows, failed, wanted, begun | {each.name}))
        try:
            rows[each.name] = _row(settings, planner, each)
        except (NoPlanError, torch.OutOfMemoryError) as error:
            failed[each.name] = {**each.details, "reason": str(error).split("\n")[0]}
            settings.say(f"  {each.name}: {failed[each.name]['reason']}")
            if settings.device.type == "cuda":
                torch.cuda.empty_cache()  # what is left in pieces must not fail the next one
        else:
            settings.say(f"  {number + 1}/{len(waiting)} {each.name}: {rows[each.name].ratio:.2f}x")
    return _result(rows, failed, wanted, begun)


def _earlier(settings: Settings) -> tuple[dict[str, Row], dict[str, dict[str, Any]], set[str]]:
    """Rows and failures of earlier runs that planned and measured in the same way, and what they were ended in."""
    rows: dict[str, Row] = {}
    failed: dict[str, dict[str, Any]] = {}
    begun: set[str] = set()
    for found in settings.found_with("precision", "rigor"):
        device, facts = settings.device.type == "cuda", found["summary"]["facts"]
        known = (row for row in found["rows"] if not device or "torch_device_ms" in row["details"])
        rows |= {row["name"]: Row.from_json(row) for row in known}
        failed |= facts["failed"]
        begun |= set(facts.get("begun", ()))
    return rows, failed, begun


def _share(settings: Settings, waiting: list[Configuration]) -> list[Configuration]:
    """Those that this process measures, of all that wait: some of every kernel size. Raises :class:`BadInput`."""
    numbers, _, count = settings.text("part").partition("/")
    parts = numbers.split("+")
    if not (count.isdecimal() and all(part.isdecimal() and int(part) < int(count) for part in parts)):
        raise BadInput(
            f"part={settings.text('part')!r}: 0/2 for the first of two processes, 1/2 for the other would do, "
            "and 1+2/3 for one that measures twice as much as the first"
        )
    wanted, kernels = {int(part) for part in parts}, len(settings.integers("kernels"))
    return [each for place, each in enumerate(waiting) if place // kernels % int(count) in wanted]


def _plan(settings: Settings, planner: Planner, several: list[Configuration]) -> None:
    """Plan some configurations together, into wisdom. One that cannot be planned says so in its turn."""
    problems = [problem for each in several for problem in _problems(settings, each).values()]
    with contextlib.suppress(NoPlanError, torch.OutOfMemoryError):
        planner.plan_many(problems, settings.planning())


def _problems(settings: Settings, each: Configuration) -> dict[str, ConvProblem]:
    """The three passes by name."""
    return {
        name: each.layer.problem(pass_, settings.device, precision=settings.text("precision"))
        for name, pass_ in PASSES.items()
    }


def _row(settings: Settings, planner: Planner, each: Configuration) -> Row:
    problems = _problems(settings, each)
    plans = planner.plan_many(list(problems.values()), settings.planning())
    budget = float(settings.integer("budget_ms"))
    passes = [timed(name, problem, plans[problem], budget) for name, problem in problems.items()]
    return total(each.name, f"{each.kernel}x{each.kernel}", passes, {**each.details, "tilewise": commit()})


def _result(
    rows: dict[str, Row], failed: dict[str, dict[str, Any]], wanted: list[Configuration], begun: set[str]
) -> Result:
    """``begun`` are those that a run was ended in: the next one leaves them to the last, as they may take minutes."""
    left = sum(each.name not in rows and each.name not in failed for each in wanted)
    notes = [f"{left} of {len(wanted)} configurations are not measured yet"] if left else []
    found = list(rows.values())
    facts = {"failed": failed, "left": left, "begun": sorted(begun - rows.keys() - failed.keys())}
    return Result(found, _bars(found), facts=facts, notes=notes)


def _bars(rows: list[Row]) -> list[Bar]:
    """By the GPU's time alone, as in the paper, of what takes torch long enough; single rows by all that they take."""
    timed_alone = [row.details for row in rows if row.details.get("torch_device_ms", 0.0) >= LEAST_MS]
    gains = [each["torch_device_ms"] / each["device_ms"] for each in timed_alone]
    return [
        Bar("geometric mean on the GPU, from 20 us on", geometric_mean(gains), least=2, applies=bool(gains)),
        Bar("largest on the GPU", max(gains, default=math.nan), least=20, applies=bool(gains)),
        Bar("least replaced", least_replaced(rows), least=0.97, applies=bool(gains)),
    ]


def draw(document: dict[str, Any]) -> Figure:
    """Six panels: speed-up over output size and problem size."""
    failed = list(document["summary"]["facts"]["failed"].values())
    return heat_maps(document, "kernel", "output size", "problem size", failed)
