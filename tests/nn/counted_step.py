"""What a step takes from malloc under a limit, as lines of JSON. Run under ``tests/solvers/counted.c``."""

from __future__ import annotations

import ctypes
import json
import sys

import torch
from torch import nn

import tilewise
from tilewise.execute import release_workspaces
from tilewise.nn import report
from tilewise.nn.memory.meter import storage_bytes
from tilewise.planner import NoPlanError

LIMITS = "1GiB", 0.97, 0.9
"""A limit, and parts of what the step took under the one before."""


def network() -> nn.Module:
    """Layers that oneDNN takes, grouped and strided ones, and others."""
    return nn.Sequential(
        nn.Conv2d(3, 18, 5, padding=2), nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 40, 5, stride=2, groups=2),
        nn.ReLU(), nn.Conv2d(40, 24, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 14 * 14, 10),
    )  # fmt: skip


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad(set_to_none=True)


def taken(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes at the peak of two steps, what was there before included."""
    counter = ctypes.CDLL(None)
    counter.counted_alive.restype = counter.counted_most.restype = ctypes.c_longlong
    step(model, x)
    release_workspaces()
    held = storage_bytes([*model.parameters(), *model.buffers(), x])
    before = counter.counted_alive()
    counter.counted_anew()
    step(model, x)
    step(model, x)
    return held + int(counter.counted_most()) - before


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 64, 64, dtype=torch.float32, device="cpu")
    limit: int | str = LIMITS[0]
    took = 0
    for one in LIMITS:
        limit = one if isinstance(one, str) else int(one * took)
        model = network()
        try:
            tilewise.optimize(model, x, memory_limit=limit)
        except NoPlanError as error:
            sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")
            continue
        took = taken(model, x)
        facts = report(model).facts["step_memory"]
        sys.stdout.write(json.dumps({"taken": took, "peak": facts["peak"], "limit": facts["limit"]}) + "\n")


if __name__ == "__main__":
    main()
