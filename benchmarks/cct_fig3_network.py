"""Caffe con Troll Figure 3, end to end on a CPU: a network's training step with its batch in parts at once.

Hadjis et al. 2015, section 2.2: the batch is cut into p parts, all layers run on each part at once with n / p of the n
threads, and gradients are summed, which is ``tilewise.shared`` with equal shares. p = 1 is the whole batch on all
threads, and the paper's "None" is Caffe's way: convolutions lower and multiply one image after the other. ``linear`` is
that of ``tilewise.shared``: in the paper all layers are divided by images, ``never`` by outputs. ``way`` says how
convolutions are computed: ``torch`` by the framework, ``lowered`` by one lowering of the part's images (type 1) and one
product, as in the paper. All sides run in turns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cct_fig4 import one_image_at_a_time, step_of
from harness.picture import Figure, speedup_lines
from harness.result import Result, Row, Side
from harness.settings import BadInput, NothingToMeasure, Settings
from torch import nn

import tilewise
from tilewise.frontends.networks import load_network
from tilewise.machine.torch_state import framework_flags
from tilewise.planner.measuring.times import interleaved

DEFAULTS = {
    "network": "alexnet", "batch": "256", "ways": "torch,lowered", "threads": "", "partitions": "", "steps": "3",
    "linear": "never", "budget_ms": "30000",
}  # fmt: skip
QUICK = {"batch": "4", "threads": "2", "steps": "1", "budget_ms": "20"}
WAYS = ("torch", "lowered")


class LoweredConv2d(nn.Module):
    """A convolution by type 1: the columns of all images at once, and one product for each group."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer itself."""
        conv = self.layer
        sizes = [
            (n + 2 * int(p) - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(
                x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
            )
        ]
        columns = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
        groups = columns.unflatten(1, (conv.groups, -1)).permute(1, 2, 0, 3).flatten(2)
        found = torch.bmm(conv.weight.reshape(conv.groups, -1, groups.shape[1]), groups)
        y = found.flatten(0, 1).unflatten(1, (len(x), -1)).transpose(0, 1).unflatten(2, sizes)
        return y if conv.bias is None else y + conv.bias[:, None, None]


def lowered(module: nn.Module) -> nn.Module:
    """Replace the 2-D convolutions of a module, and return it."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d) and child.padding_mode == "zeros":
            setattr(module, name, LoweredConv2d(child))
        else:
            lowered(child)
    return module


def run(settings: Settings) -> Result:
    """A row for each way and number of parts, over one image at a time. Raises ``NothingToMeasure`` on a GPU."""
    if settings.device.type != "cpu":
        raise NothingToMeasure(f"device {settings.device}: this is about a CPU")
    here = torch.get_num_threads()
    threads = (settings.integers("threads") or [here])[0]
    counts = settings.integers("partitions") or sorted({2**n for n in range(threads.bit_length())} | {threads})
    batch = settings.integer("batch")
    if not all(1 <= count <= min(threads, batch) for count in counts):
        raise BadInput(f"partitions={counts}: numbers from 1 to threads={threads} would do")
    network: Any = load_network(settings.text("network"))
    own, inputs = network.module.train(), network.example_inputs(batch, settings.device)
    for layer in own.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()  # so that all sides compute the same numbers
    by_image = copy.deepcopy(own)
    one_image_at_a_time(by_image)
    steps: dict[tuple[str, int], Callable[[], torch.Tensor]] = {("none", 0): step_of(by_image, inputs)}
    for way in settings.chosen("ways", {way: way for way in WAYS}):
        module = copy.deepcopy(own) if way == "torch" else lowered(copy.deepcopy(own))
        for count in counts:
            shares, linear = (1,) * count, settings.text("linear")
            shared = module if count == 1 else tilewise.shared(module, parts=count, shares=shares, linear=linear)
            steps[way, count] = step_of(shared, inputs)
    torch.set_num_threads(threads)
    try:
        with framework_flags("cpu", "ieee", deterministic=False):
            losses = [float(step()) for step in steps.values()]
            times = interleaved(
                list(steps.values()), settings.device, budget_ms=float(settings.integer("budget_ms")),
                least=settings.integer("steps"),
            )  # fmt: skip
    finally:
        torch.set_num_threads(here)
    return Result(list(rows_of(dict(zip(steps, times, strict=True)), losses, batch, threads)))


def rows_of(times: dict[tuple[str, int], float], losses: list[float], batch: int, threads: int) -> list[Row]:
    """Each way and number of parts against one image at a time."""
    none, rows = times["none", 0], []
    error = max(abs(loss - losses[0]) for loss in losses) / (abs(losses[0]) or 1.0)
    for (way, count), ms in times.items():
        if not count:
            continue
        whole = times.get((way, 1), math.nan)
        details = {"way": way, "partitions": count, "threads": threads, "batch": batch, "over_one": whole / ms,
                   "loss_error": error}  # fmt: skip
        rows.append(
            Row(f"{way}, {count} part{'s' if count > 1 else ''}", way, Side("one image at a time", none),
                Side(f"{count} at once", ms), details=details)
        )  # fmt: skip
    return rows


def draw(document: dict[str, Any]) -> Figure:
    """Speed-up over the number of parts."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    return speedup_lines(document, groups, "partitions", "way")
