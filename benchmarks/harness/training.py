"""Training steps as people run them, for benchmarks: ``network@batch@mode`` names one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import tilewise
from harness.settings import BadInput, Settings
from tilewise.frontends.networks import Network, NetworkError, load_network

__all__ = [
    "GPU_CASES", "LAYOUTS", "USUAL_LAYOUT", "Case", "Step", "case_of", "planned_in", "precision", "step_of",
]  # fmt: skip

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
USUAL_LAYOUT = {"fp32": "contiguous", "tf32": "contiguous", "bf16": "channels_last"}
CORE = "torchvision:resnet50,torchvision:efficientnet_b0,timm:convnext_tiny"
GPU_CASES = ",".join(
    f"{network}@{batch}@{mode}"
    for mode, batch in (("fp32", 64), ("tf32", 64), ("bf16", 128))
    for network in CORE.split(",")
)
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


def case_of(text: str) -> Case:
    """What ``network@batch@mode`` names. Raises :class:`BadInput`."""
    words = text.rsplit("@", 2)
    if len(words) != 3 or not words[1].isdecimal() or words[2] not in USUAL_LAYOUT:
        raise BadInput(f"cases={text!r}: network@batch@mode with mode {', '.join(USUAL_LAYOUT)} would do")
    try:
        return Case(load_network(words[0]), int(words[1]), words[2])
    except NetworkError as error:
        raise BadInput(str(error)) from error


def planned_in(settings: Settings, case: Case, module: nn.Module, images: torch.Tensor, graphs: str = "never") -> float:
    """Plan ``module`` in place, with ``graphs`` as ``optimize`` takes it; the seconds that took."""
    start = time.perf_counter()
    with settings.cache_directory(), precision(case, images.device):
        options = {"rigor": settings.text("rigor"), "goal": settings.text("goal")}
        tilewise.optimize(module, images, planner=settings.planner(), graphs=graphs, **options)  # type: ignore[misc]
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
