"""Caffe con Troll Figure 4, its CPU half: a network's training step, beside lowering one image at a time.

Hadjis et al. 2015, section 3.2. A step is forward and backward of a whole network. Sides, in turns and with memory that
stays: torch, the same network planned, and the same network with Caffe's way for its convolutions, which lowers, and
multiplies, one image after another. Torch as it is installed, whose large tensors are faulted in at each step, has a
process of its own, before and after the others.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.process import MALLOC
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from torch import nn

import tilewise
import tilewise.nn
from tilewise.frontends.networks import builtin_networks, load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {"networks": "alexnet", "batch": "64", "rigor": "measure", "steps": "3", "budget_ms": "30000"}
QUICK = {"networks": "alexnet", "batch": "1", "rigor": "estimate", "steps": "1", "budget_ms": "50"}
LEAST = {"torch": 1.25, "torch as installed": 2.0, "one image at a time": 3.0}
"""Of AlexNet with 64 images."""


class OneImage(torch.autograd.Function):
    """Caffe's convolution: im2col of an image, one product; backward the same, and col2im."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: nn.Conv2d) -> torch.Tensor:
        """(n, out, h, w), without bias."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        matrix = weight.flatten(1)
        results = [matrix @ F.unfold(image, **_window(layer))[0] for image in x.split(1)]
        return torch.stack(results).unflatten(2, _places(layer, x))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        """Of the images, unless nobody asks, and of the filters."""
        x, weight = ctx.saved_tensors
        layer, dy = ctx.layer, gradients[0].flatten(2)
        matrix, total = weight.flatten(1), torch.zeros_like(weight).flatten(1)
        images = []
        for image, its in zip(x.split(1), dy, strict=True):
            total.addmm_(its, F.unfold(image, **_window(layer))[0].T)
            if ctx.needs_input_grad[0]:
                images.append(F.fold((matrix.T @ its)[None], x.shape[2:], **_window(layer)))
        return torch.cat(images) if images else None, total.view_as(weight), None


class OneImageConv2d(nn.Module):
    """A layer of ``F.conv2d`` by :class:`OneImage`."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer itself."""
        found: torch.Tensor = OneImage.apply(x, self.layer.weight, self.layer)  # type: ignore[no-untyped-call]
        return found if self.layer.bias is None else found + self.layer.bias[:, None, None]


def _window(layer: nn.Conv2d) -> dict[str, Any]:
    return {
        "kernel_size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation,
    }  # fmt: skip


def _places(layer: nn.Conv2d, x: torch.Tensor) -> tuple[int, ...]:
    with torch.device("meta"):
        shape = F.conv2d(x[:1].to("meta"), layer.weight.to("meta"), None, layer.stride, layer.padding, layer.dilation)
    return tuple(shape.shape[2:])


def one_image_at_a_time(module: nn.Module) -> int:
    """Replace the 2-D convolutions of a module, those without groups; how many there were."""
    count = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d) and child.groups == 1 and child.padding_mode == "zeros":
            setattr(module, name, OneImageConv2d(child))
            count += 1
        else:
            count += one_image_at_a_time(child)
    return count


def step_of(module: nn.Module, inputs: Any) -> Callable[[], torch.Tensor]:
    """Forward and backward of all parameters."""

    def step() -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        result = module(inputs)
        loss = (result[0] if isinstance(result, (tuple, list)) else result).square().mean()
        loss.backward()
        found: torch.Tensor = loss.detach()
        return found

    return step


def run(settings: Settings) -> Result:
    """Three rows a network: the planned step against each of the others."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device {settings.device}: this is about a CPU")
    rows: list[Row] = []
    for name in settings.chosen("networks", {name: name for name in builtin_networks()}):
        rows += _rows(settings, name)
        settings.keep(Result(rows, notes=[f"ended after {name}"]))
    return Result(rows, bars(rows, settings))


def _rows(settings: Settings, name: str) -> list[Row]:
    batch, network = settings.integer("batch"), load_network(name)
    own, inputs = network.module.train(), network.example_inputs(batch, settings.device)
    before = installed(name, batch, settings.integer("steps"))
    by_image = copy.deepcopy(own)
    lowered = one_image_at_a_time(by_image)
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        planned = tilewise.optimize(
            copy.deepcopy(own), inputs, rigor=settings.text("rigor"), planner=settings.planner()
        )
        said = tilewise.nn.report(planned)
        settings.say(f"  {name}: {sum(layer.replaced for layer in said.layers)} layer-passes replaced")
        steps = [step_of(module, inputs) for module in (own, by_image, planned)]
        torch_ms, image_ms, ours = interleaved(
            steps, settings.device, budget_ms=float(settings.integer("budget_ms")), least=settings.integer("steps")
        )
    after = installed(name, batch, settings.integer("steps"))
    times = {"torch": torch_ms, "torch as installed": statistics.median([*before, *after]),
             "one image at a time": image_ms}  # fmt: skip
    details = {"network": name, "batch": batch, "convolutions": lowered, "threads": torch.get_num_threads()}
    return [
        Row(f"{name}, batch {batch}, over {what}", name, Side(what, ms), Side("planned", ours),
            details={**details, "over": what})
        for what, ms in times.items()
    ]  # fmt: skip


INSTALLED = """
import json, sys
import cct_fig4
name, batch, steps = sys.argv[1:]
print(json.dumps(cct_fig4.alone(name, int(batch), int(steps))))
"""


def installed(name: str, batch: int, steps: int) -> list[float]:
    """Milliseconds of torch's own steps in a process with the allocator's defaults."""
    environment = {key: value for key, value in os.environ.items() if key not in MALLOC}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    words = [sys.executable, "-c", INSTALLED, name, str(batch), str(steps)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torch as installed: {done.stderr.strip().splitlines()[-1:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def alone(name: str, batch: int, steps: int) -> list[float]:
    """Milliseconds of torch's own steps here, after one that is not counted."""
    network = load_network(name)
    step = step_of(network.module.train(), network.example_inputs(batch, torch.device("cpu")))
    step()
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged for AlexNet with 64 images."""
    return [
        Bar(row.name, row.ratio, least=LEAST[row.details["over"]],
            applies=not settings.quick and (row.details["network"], row.details["batch"]) == ("alexnet", 64))
        for row in rows
    ]  # fmt: skip
