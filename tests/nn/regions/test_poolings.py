"""Poolings within a region run by plans where those are faster, in both layouts, and are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.nn.regions.kept import keep
from torch import Tensor, nn

import tilewise
from tilewise.nn.regions import ways
from tilewise.nn.regions.gates import pooling_products
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.units import units_of
from tilewise.problems.pooling.problem import PoolingProblem

X = torch.randn(2, 3, 13, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "as in ResNet": lambda: nn.MaxPool2d(3, 2, 1),
    "dilated": lambda: nn.MaxPool2d((3, 2), 2, 1, dilation=(1, 2)),
    "rounded up": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "average": lambda: nn.AvgPool2d((2, 3)),
    "average without padding": lambda: nn.AvgPool2d(3, (2, 1), 1, count_include_pad=False),
    "average of five": lambda: nn.AvgPool2d(3, 2, divisor_override=5),
}


def net(pooling: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), pooling, nn.Conv2d(5, 4, 1)).eval()


def problems(model: nn.Module, x: Tensor) -> list[PoolingProblem]:
    traced = trace(model, (x,), {})
    rewrite(traced.graph)
    units = units_of(traced.graph, traced.names)
    return [product.problem for unit in units for product in pooling_products(unit)]  # type: ignore[misc]


def test_the_problem_is_that_of_the_module() -> None:
    both = problems(net(nn.MaxPool2d(3, 2, 1)), X)
    want = PoolingProblem("max", 2, 5, (13, 11), (3, 3), (2, 2), (1, 1))
    assert both == [want, PoolingProblem.from_key(want.key.replace("contiguous", "channels_last"))]
    (volume,) = problems(nn.Sequential(nn.Conv3d(1, 2, 1), nn.AvgPool3d(2, ceil_mode=True)).eval(), X.unsqueeze(1))
    assert volume == PoolingProblem("avg", 2, 2, (3, 13, 11), (2, 2, 2), (2, 2, 2), ceil_mode=True)


class Indices(nn.Module):
    """Its result is where the largest numbers are."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(x, 2, return_indices=True)[1].float()


def test_indices_and_float64_stay_with_torch() -> None:
    assert problems(net(Indices()), X) == []
    assert problems(net(nn.MaxPool2d(2)).double(), X.double()) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [("as in ResNet", torch.contiguous_format), *((name, torch.channels_last) for name in POOLINGS)],
)
def test_results(name: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of poolings are told to be the fastest, so that they are taken."""
    model, x = net(POOLINGS[name]()), X.to(memory_format=layout)
    with torch.no_grad():
        want = net(POOLINGS[name]()).double()(x.double())
    monkeypatch.setattr(ways.Times, "of", lambda self, key, run: 0.0 if isinstance(key[0], PoolingProblem) else 1e3)
    keep(monkeypatch, model, x)
    (region,) = tilewise.nn.report(model).regions
    assert any(line.runs.startswith("window_pooling: pool") for line in region.lines), region.lines
    with torch.no_grad():
        got = model(x)
    assert float((got.double() - want).norm() / want.norm()) < 1e-6
