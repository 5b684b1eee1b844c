"""Whole training steps as people run them: torch eagerly and from a CUDA graph, against the same network planned.

A step is forward, loss (the mean of squares) and backward. ``cases`` are ``network@batch@mode`` with any name that
``tilewise time`` takes; ``fp32`` is plain single precision without TF32, ``bf16`` is autocast. torch runs in benchmark
mode, contiguous and channels_last, and the faster of the two is its side of the ratio; the plans run in the layout that
is usual for the mode (fp32 contiguous, bf16 channels_last). Several steps are queued before each look at the clock, as
in a training loop, so that the host's time counts only where the device waits for it. All sides take turns.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from torch import nn

import tilewise
import tilewise.nn
from tilewise.frontends.networks import Network, NetworkError, load_network
from tilewise.machine.torch_state import framework_flags

DEFAULTS = {
    "cases": "",
    "ways": "eager,graph",
    "rigor": "measure",
    "goal": "step",
    "rounds": "15",
    "round_ms": "400",
    "seconds": "0",
}
QUICK = {"cases": "photonet@2@fp32", "rigor": "estimate", "rounds": "1", "round_ms": "1"}
GPU_CASES = (
    "alexnet@256@fp32,vgg16@64@fp32,resnet50@64@fp32,torchvision:efficientnet_b0@64@fp32,"
    "torchvision:convnext_tiny@64@fp32,resnet50@128@bf16,torchvision:convnext_tiny@128@bf16"
)
CPU_CASES = "alexnet@8@fp32,vgg16@8@fp32,resnet18@8@fp32,resnet50@8@fp32,googlenet@8@fp32,densenet40@32@fp32"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
USUAL_LAYOUT = {"fp32": "contiguous", "bf16": "channels_last"}
WARM_UP = 3
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One network with its batch and mode."""

    network: Network
    batch: int
    mode: str

    @property
    def name(self) -> str:
        """As in tables: ``resnet50, batch 64, fp32``."""
        return f"{self.network.name.partition(':')[2] or self.network.name}, batch {self.batch}, {self.mode}"


def run(settings: Settings) -> Result:
    """One row a case and way of running it."""
    deadline = settings.deadline()
    ways = settings.words("ways")
    rows: list[Row] = []
    notes: list[str] = []
    for text in (settings.text("cases") or (GPU_CASES if settings.device.type == "cuda" else CPU_CASES)).split(","):
        if deadline.passed:
            notes.append(f"out of time before {text}")
            continue
        case = case_of(text)
        with framework_flags(settings.device.type, "ieee", deterministic=False):
            found = rows_of(settings, case, ways)
        rows += found
        for row in found:
            settings.say(
                f"  {row.name}, {row.group}: {row.baseline.value:.2f} and {row.ours.value:.2f} ms, {row.ratio:.2f}x"
            )
        settings.keep(Result(rows, notes=[*notes, f"ended after {text}"]))
    bars = [Bar(f"least step over torch, {way}", min((r.ratio for r in rows if r.group == way), default=float("nan")),
                least=1.0, applies=not settings.quick) for way in ways]  # fmt: skip
    return Result(rows, bars, notes=notes)


def case_of(text: str) -> Case:
    """What ``network@batch@mode`` names. Raises :class:`BadInput`."""
    words = text.rsplit("@", 2)
    if len(words) != 3 or not words[1].isdecimal() or words[2] not in USUAL_LAYOUT:
        raise BadInput(f"cases={text!r}: network@batch@mode with mode fp32 or bf16 would do")
    try:
        return Case(load_network(words[0]), int(words[1]), words[2])
    except NetworkError as error:
        raise BadInput(str(error)) from error


def rows_of(settings: Settings, case: Case, ways: list[str]) -> list[Row]:
    """The case's rows: every side is built once and run in each way."""
    own = case.network.module.to(settings.device).train()
    images = case.network.example_inputs(case.batch, settings.device)
    planned = copy.deepcopy(own).to(memory_format=LAYOUTS[USUAL_LAYOUT[case.mode]])
    planned_images = images.to(memory_format=LAYOUTS[USUAL_LAYOUT[case.mode]])
    planning_s = planned_in(settings, case, planned, planned_images)
    report = tilewise.nn.report(planned)
    steps = {
        f"torch, {layout}": step_of(case, copy.deepcopy(own).to(memory_format=kind), images.to(memory_format=kind))
        for layout, kind in LAYOUTS.items()
    }
    steps["planned"] = step_of(case, planned, planned_images)
    passes = [one for _, _, one in report.passes()]
    details = {
        "batch": case.batch,
        "mode": case.mode,
        "planning_s": planning_s,
        "passes": len(passes),
        "replaced_passes": sum(one.replaced for one in passes),
        "step": None if report.step is None else report.step.to_json(),
    }
    rows = []
    for way in ways:
        if way == "graph" and settings.device.type != "cuda":
            continue
        ready = {name: captured(step) if way == "graph" else step for name, step in steps.items()}
        took = in_turns(ready, settings)
        torch_side = min((name for name in took if name != "planned"), key=lambda name: took[name][0])
        spread = {name: {"ms": ms, "least": least, "most": most} for name, (ms, least, most) in took.items()}
        rows.append(
            Row(case.name, way, Side(torch_side, took[torch_side][0]), Side("planned", took["planned"][0]),
                details={**details, "sides": spread})
        )  # fmt: skip
    return rows


def planned_in(settings: Settings, case: Case, module: nn.Module, images: torch.Tensor) -> float:
    """Plan ``module`` in place; the seconds that took."""
    start = time.perf_counter()
    with settings.cache_directory(), precision(case, images.device):
        options = {"rigor": settings.text("rigor"), "goal": settings.text("goal")}
        tilewise.optimize(module, images, planner=settings.planner(), **options)  # type: ignore[misc]
    return time.perf_counter() - start


@contextlib.contextmanager
def precision(case: Case, device: torch.device) -> Iterator[None]:
    """Autocast where the case's mode asks for it."""
    with torch.autocast(device.type, torch.bfloat16, enabled=case.mode == "bf16"):
        yield


def step_of(case: Case, module: nn.Module, images: torch.Tensor) -> Step:
    """One training step of ``module``."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with precision(case, images.device):
            loss = case.network.loss(module(images))
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def captured(step: Step) -> Step:
    """The step as replays of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def in_turns(steps: dict[str, Step], settings: Settings) -> dict[str, tuple[float, float, float]]:
    """Median, least and most milliseconds of a step, by side."""

    def wait() -> None:
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)

    def took_ms(step: Step, count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) * 1e3 / count

    for step in steps.values():
        took_ms(step, WARM_UP)
    slowest = max(took_ms(step, 1) for step in steps.values())
    count = max(1, round(settings.integer("round_ms") / slowest))
    took: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(max(1, settings.integer("rounds"))):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            took[name].append(took_ms(steps[name], count))
    return {name: (statistics.median(values), min(values), max(values)) for name, values in took.items()}
