"""A small network that is kept as a region whatever its speed, and a way to see which calls run its Python code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tilewise
from tilewise.nn.regions import choose
from tilewise.nn.regions.forward import regional_of
from tilewise.plan import Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.options import Options
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of
from tilewise.solvers import get

__all__ = ["Net", "assert_by_program", "assert_by_torch", "images", "keep", "net"]


class First(Planner):
    """Plans by the first of a few solvers that can compute a problem, without measuring: tests of regions are short."""

    def plan(self, problem: Problem, options: Options | None = None) -> Plan:
        for name in ("onednn_fused", "indirect", "separable_last", "window_pooling"):
            solver = get(name)
            if isinstance(problem, solver.solves) and not solver.unsupported(problem):
                config = next(iter(solver.configs(problem)))
                return leaf_plan(problem, Measurement(name, solver.version, config, 0.1, 0))
        baseline = kind_of(problem).baseline
        return Plan(problem.key, baseline, get(baseline).version)


class Net(nn.Module):
    """Two convolutions with norms, a residual that is added in place, and a linear layer."""

    ran = 0
    """How often the Python code of a forward ran: a program runs none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        Net.ran += 1
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        y = self.again(self.second(x))
        y += x
        return self.last(functional.hardswish(y).mean((2, 3))) * scale


def net() -> Net:
    """A network with statistics of its own, for inference."""
    model = Net().eval()
    generator = torch.Generator("cpu").manual_seed(3)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0, generator=generator)
    return model


def images(count: int = 2, size: int = 9, seed: int = 0) -> torch.Tensor:
    """Random images of three channels."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator, dtype=torch.float32, device="cpu")


def keep(monkeypatch: pytest.MonkeyPatch, model: nn.Module, example: Any, **options: Any) -> nn.Module:
    """``model`` as a region. Which side is faster on so small a network is a matter of the machine, so it is not asked.

    Fails where the whole model did not become a region.
    """
    monkeypatch.setattr(choose, "LEAST_SPEEDUP", 0.0)
    tilewise.optimize(model, example, training=False, planner=First(), **options)
    assert regional_of(model) is not None, tilewise.nn.report(model)
    return model


def plain(model: nn.Module) -> nn.Module:
    """A copy that computes as its class does."""
    return tilewise.restore(copy.deepcopy(model))


def assert_by_program(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A call runs no Python code of the network, and its results are those of the class."""
    _assert_alike(model, args, kwargs, 0)


def assert_by_torch(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """A call runs the Python code of the network once."""
    _assert_alike(model, args, kwargs, 1)


def _assert_alike(model: nn.Module, args: Any, kwargs: Any, times: int) -> None:
    want = plain(model)
    with torch.no_grad():
        wanted = want(*args, **kwargs)
        first = model(*args, **kwargs)  # where something has changed, this call may trace the module anew
        before = Net.ran
        got = model(*args, **kwargs)
    assert Net.ran - before == times, dict(getattr(regional_of(model), "without", {}))
    torch.testing.assert_close((first, got), (wanted, wanted), rtol=1e-4, atol=1e-5)
