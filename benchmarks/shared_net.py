"""Caffe con Troll Figure 5 end to end: training steps of a network shared among GPUs (section 3.3).

A row holds the step of one GPU, captured as a CUDA graph in torch's better layout,
against that of ``tilewise.shared`` on as many GPUs as ``gpus`` says. With ``busy``, a percentage of multiprocessors, a
second row has the last GPU with these kept busy by another kernel; its baseline is the time that the measured rates of
all GPUs alone would give together, so that its ratio is the part of the summed rates that is reached. On a CPU (section
2.2, Figure 3) each row holds the whole batch at once against so many ``parts`` of it, each with its share of the
threads. A step is the gradients set to none, forward, loss, backward and SGD. Both sides take turns. ``details`` has
the report of the shared model, and the distance of its gradients from those of one device.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from harness.picture import Figure, speedup_lines
from harness.ranks import graphed
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, NothingToMeasure, Settings
from harness.training import LAYOUTS, USUAL_LAYOUT, Case, case_of, precision
from torch import nn

import tilewise
from tilewise.machine.torch_state import framework_flags

DEFAULTS = {
    "cases": "",
    "gpus": "2",
    "busy": "50",
    "graphs": "auto",
    "linear": "auto",
    "sums": "early",
    "warm_up": "40",
    "rounds": "15",
    "round_ms": "400",
    "seconds": "0",
}
QUICK = {"cases": "photonet@4@fp32", "warm_up": "1", "rounds": "1", "round_ms": "1"}
GPU_CASES = "alexnet@512@fp32,resnet50@256@fp32,alexnet@512@tf32,resnet50@256@tf32"
LEAST, LEAST_OF_RATES = 1.8, 0.9
RATE = 1e-6
"""Learning rate: weights change in every step, and hardly."""
Step = Callable[[], None]


def run(settings: Settings) -> Result:
    """A row for each case with its GPUs free, and one with the last of them busy."""
    if settings.device.type != "cuda":
        raise NothingToMeasure(f"device {settings.device}: this is about GPUs; cct_fig3_network has parts of a CPU")
    if torch.cuda.device_count() < settings.integer("gpus"):
        raise NothingToMeasure(f"{torch.cuda.device_count()} GPUs here, gpus={settings.text('gpus')}")
    if not 0 <= settings.integer("busy") <= 100:
        raise BadInput(f"busy={settings.text('busy')}: a percentage would do")
    deadline, rows, notes = settings.deadline(), list[Row](), list[str]()
    for text in (settings.text("cases") or GPU_CASES).split(","):
        if deadline.passed:
            notes.append(f"out of time before {text}")
            continue
        case = case_of(text)
        with framework_flags(settings.device.type, "tf32" if case.mode == "tf32" else "ieee", deterministic=False):
            found = gpu_rows(settings, case)
        rows += found
        for row in found:
            settings.say(
                f"  {row.name}, {row.group}: {row.baseline.value:.2f} and {row.ours.value:.2f} ms, {row.ratio:.2f}x"
            )
        settings.keep(Result(rows, notes=[*notes, f"ended after {text}"]))
        gc.collect()
    return Result(rows, bars(rows, settings), notes=notes)


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """The least gain of two GPUs, and the least part of the summed rates beside a busy one."""
    two = [row.ratio for row in rows if row.group == "free"]
    busy = [row.ratio for row in rows if row.group == "busy"]
    applies = settings.device.type == "cuda" and not settings.quick and settings.integer("gpus") == 2
    text = "the part of the summed rates of all GPUs that is reached"
    return [
        Bar("the least step over that of one GPU's graph", min(two, default=math.nan), least=LEAST, applies=applies),
        Bar(f"{text}, free", min((_of_rates(row) for row in rows if row.group == "free"), default=math.nan),
            applies=False),
        Bar(f"{text}, one busy", min(busy, default=math.nan), least=LEAST_OF_RATES, applies=applies),
    ]  # fmt: skip


def _of_rates(row: Row) -> float:
    """Which part of the summed rates of GPUs that are alike a row reaches."""
    return row.ratio / float(row.details["gpus"])


def gpu_rows(settings: Settings, case: Case) -> list[Row]:
    """One GPU against several, and where asked for with the last one busy."""
    count = settings.integer("gpus")
    devices = [torch.device("cuda", index) for index in range(count)]
    layout = faster_layout(settings, case, devices[0])
    steps = {str(device): captured(step_of(case, *built(case, layout, device)), device) for device in devices}
    model, images = built(case, layout, devices[0])
    twin = copy.deepcopy(model)
    options = {name: settings.text(name) for name in ("graphs", "linear", "sums")}
    shared = tilewise.shared(model, devices=devices, **options)
    steps["shared"] = step_of(case, shared, images)
    rows = []
    for busy in [0, settings.integer("busy")] if settings.integer("busy") else [0]:
        multiprocessors = torch.cuda.get_device_properties(devices[-1]).multi_processor_count * busy // 100
        with _busy(devices[-1], multiprocessors):
            repeat(steps["shared"], settings.integer("warm_up") * (4 if busy else 1))
            took = in_turns(steps, settings, devices)
        alone = [took[str(device)] for device in devices]
        report = shared.report()
        details = {
            "batch": case.batch,
            "mode": case.mode,
            "layout": layout,
            "gpus": count,
            "busy_multiprocessors": multiprocessors,
            "alone_ms": alone,
            "sizes": report.sizes,
            "report": str(report),
            "apart": apart(case, shared, twin, images),
        }
        if busy:
            ideal = Side("summed rates of all GPUs alone", 1 / sum(1 / ms for ms in alone))
            rows.append(Row(case.name, "busy", ideal, Side(f"shared, {count} GPUs", took["shared"]), details=details))
        else:
            one = Side(f"one GPU, a graph, {layout}", alone[0])
            rows.append(Row(case.name, "free", one, Side(f"shared, {count} GPUs", took["shared"]), details=details))
    return rows


def _busy(device: torch.device, multiprocessors: int) -> Any:
    if not multiprocessors:
        return nullcontext()
    from harness.busy import kept_busy

    return kept_busy(device, multiprocessors)


def built(case: Case, layout: str, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The network and a batch on ``device``."""
    model = copy.deepcopy(case.network.module).to(device).train()
    images = case.network.example_inputs(case.batch, device)
    return model.to(memory_format=LAYOUTS[layout]), images.to(memory_format=LAYOUTS[layout])


def step_of(case: Case, model: nn.Module, images: torch.Tensor) -> Step:
    """A training step with its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision(case, images.device):
            loss = case.network.loss(model(images))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def captured(step: Step, device: torch.device) -> Callable[[], object]:
    """The step as replays of a CUDA graph."""
    with torch.cuda.device(device):
        return graphed(device, [step])[0]


def repeat(step: Step, count: int) -> None:
    """Run a step so many times."""
    for _ in range(count):
        step()


def faster_layout(settings: Settings, case: Case, device: torch.device) -> str:
    """The layout in which one device's step is the faster: captured on a GPU."""
    if settings.quick:
        return USUAL_LAYOUT[case.mode]
    steps = {layout: step_of(case, *built(case, layout, device)) for layout in LAYOUTS}
    if device.type == "cuda":
        steps = {layout: captured(step, device) for layout, step in steps.items()}
    took = in_turns(steps, settings, [device], rounds=3)
    return min(took, key=lambda layout: took[layout])


def in_turns(
    steps: Mapping[str, Step], settings: Settings, devices: list[torch.device], rounds: int = 0
) -> dict[str, float]:
    """The median milliseconds of each step, in turns; several steps are queued before each look at the clock."""

    def wait() -> None:
        for device in devices:
            if device.type == "cuda":
                # Not the whole device, on which another program's kernels may be queued without end.
                torch.cuda.current_stream(device).synchronize()

    def took_ms(step: Step, count: int) -> float:
        wait()
        start = time.perf_counter()
        repeat(step, count)
        wait()
        return (time.perf_counter() - start) * 1e3 / count

    slowest = max(took_ms(step, 1) for step in steps.values())
    count = max(1, round(settings.integer("round_ms") / slowest))
    took: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds or max(1, settings.integer("rounds"))):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            took[name].append(took_ms(steps[name], count))
    return {name: statistics.median(values) for name, values in took.items()}


def apart(case: Case, shared: nn.Module, twin: nn.Module, images: torch.Tensor) -> float | None:
    """The relative distance of the shared gradients from those of one device; ``None`` where they must differ.

    That is for models that draw random numbers, or whose batch norms see a part of the batch each.
    """
    parts = [*twin.modules()]
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in parts) or any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in parts
    ):
        return None
    twin.load_state_dict(shared.state_dict())
    found = []
    for model in (shared, twin):
        model.zero_grad(set_to_none=True)
        with precision(case, images.device):
            loss = case.network.loss(model(images))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
    return float((found[0] - found[1]).norm() / found[1].norm())


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up over the number of GPUs."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "gpus", "batch")
