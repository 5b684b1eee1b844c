"""Caffe con Troll Figure 4(a): AlexNet's first convolution, forward and backward, of 48 and of 96 outputs.

Hadjis et al. 2015, section 3.3, run the first convolution "with grouping 1 (depth=48) and 2 (depth=96)". AlexNet's two
groups are two halves of 48 outputs that see all of the image, so that both together are one convolution of 96 outputs;
that is how they are read here. Sides, in turns and with memory that stays: torch, planned, and Caffe's way, one image
lowered after the other. The images need no gradient, as a network's first layer never computes one.
"""

from __future__ import annotations

import copy

import torch
from cct_fig4 import one_image_at_a_time, step_of
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from torch import nn

import tilewise
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {"groups": "1,2", "batch": "256", "size": "227", "rigor": "measure", "steps": "3", "budget_ms": "10000"}
QUICK = {"batch": "2", "size": "67", "rigor": "estimate", "steps": "1", "budget_ms": "20"}
OUTPUTS = 48
"""Of one group."""


def run(settings: Settings) -> Result:
    """Two rows for each number of groups: planned over torch, and over one image at a time."""
    rows: list[Row] = []
    for groups in settings.integers("groups"):
        rows += _rows(settings, groups)
        settings.keep(Result(rows, notes=[f"ended after {groups} groups"]))
    least = min((row.ratio for row in rows if row.details["over"] == "torch"), default=float("nan"))
    applies = settings.device.type == "cpu" and not settings.quick
    return Result(rows, [Bar("planned over torch, the lesser", least, least=1.0, applies=applies)])


def _rows(settings: Settings, groups: int) -> list[Row]:
    batch, size = settings.integer("batch"), settings.integer("size")
    layer = nn.Conv2d(3, OUTPUTS * groups, 11, stride=4, device=settings.device, dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(groups)
    images = torch.randn(batch, 3, size, size, dtype=torch.float32, device="cpu", generator=generator)
    images = images.to(settings.device)
    own = nn.Sequential(layer)
    by_image = copy.deepcopy(own)
    one_image_at_a_time(by_image)
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        planned = tilewise.optimize(
            copy.deepcopy(own), images, rigor=settings.text("rigor"), planner=settings.planner()
        )
        steps = [step_of(module, images) for module in (own, by_image, planned)]
        torch_ms, image_ms, ours = interleaved(
            steps, settings.device, budget_ms=float(settings.integer("budget_ms")), least=settings.integer("steps")
        )
    error = _error(own, planned, images)
    name = f"conv1, {groups} group{'s' if groups > 1 else ''} ({OUTPUTS * groups} outputs), batch {batch}"
    details = {"groups": groups, "batch": batch, "threads": torch.get_num_threads(), "gradient_error": error}
    return [
        Row(
            f"{name}, over {what}",
            f"{groups}",
            Side(what, ms),
            Side("planned", ours),
            details={**details, "over": what},
        )
        for what, ms in {"torch": torch_ms, "one image at a time": image_ms}.items()
    ]


def _error(own: nn.Module, planned: nn.Module, images: torch.Tensor) -> float:
    """The largest relative L2 difference of gradients, planned against torch's in fp64."""
    exact = copy.deepcopy(own).double()
    step_of(exact, images[:4].double())()
    step_of(planned, images[:4])()
    pairs = zip(planned.parameters(), exact.parameters(), strict=True)
    errors = []
    for mine, its in pairs:
        assert mine.grad is not None
        assert its.grad is not None
        errors.append(float((mine.grad.double() - its.grad).norm() / its.grad.norm()))
    return max(errors)
