"""Regions on a GPU: exact, by steps and by graphs; changed weights, streams, captures of others, what is no region."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tilewise
from tilewise import Planner
from tilewise.machine.device import conv_precision
from tilewise.machine.torch_state import framework_flags
from tilewise.nn.programs.program import Program
from tilewise.nn.regions.exactness.local import local_errors
from tilewise.nn.regions.forward import regional_of

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"training": False, "frozen": True}


class Residual(nn.Module):
    """Two convolutions with norms, and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.other(self.second(y)) + x)


def network(dtype: torch.dtype) -> nn.Module:
    """A small network with norms as if it had been trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), Residual(32), Residual(32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return model.eval().to("cuda", dtype)


def images(dtype: torch.dtype, batch: int = 4) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(batch, 3, 32, 32, device="cuda", generator=generator).to(dtype)


def right(model: Callable[..., Any], plain: nn.Module, x: torch.Tensor) -> None:
    """Compare with float64."""
    with torch.no_grad():
        want = copy.deepcopy(plain).double()(x.double())
        got, own = model(x).double(), plain(x).double()
    limit = max(1e-3 if conv_precision() == "tf32" else 2e-5, 2 * float((own - want).norm() / want.norm()))
    assert float((got - want).norm() / want.norm()) <= limit


@pytest.fixture(autouse=True)
def always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are right whatever their time."""
    monkeypatch.setattr("tilewise.nn.regions.choose.LEAST_SPEEDUP", 0.0)


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """What torch may do with fp32."""
    with framework_flags("cuda", str(request.param), deterministic=False):
        yield str(request.param)


@pytest.fixture(params=["never", "auto"])
def graphs(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_region_is_right(dtype: torch.dtype, graphs: str, precision: str) -> None:
    plain, x = network(dtype), images(dtype)
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=Planner(), graphs=graphs, **OPTIONS)
    (region,) = tilewise.nn.report(model).regions
    assert region.kept, region.reason
    assert region.fused >= 8
    assert ("graph" in region.why_not_native) == (graphs == "never")
    regional = regional_of(model)
    assert regional is not None
    right(model, plain, x)
    right(model, plain, images(dtype) + 1)
    assert not regional.without, precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_errors_are_measured_in_their_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are where no program is exact enough; here nothing can be."""
    found: list[dict[int, float]] = []

    def noted(program: Program, tensors: Sequence[torch.Tensor]) -> dict[int, float]:
        found.append(local_errors(program, tensors))
        return found[-1]

    monkeypatch.setattr("tilewise.nn.regions.region.local_errors", noted)
    monkeypatch.setattr("tilewise.nn.regions.choose.RegionPlanner._error_limit", lambda *_, **__: 1e-12)
    plain, x = network(dtype), images(dtype)
    with framework_flags("cuda", "ieee", deterministic=False):
        model = tilewise.optimize(copy.deepcopy(plain), x, planner=Planner(), graphs="never", **OPTIONS)
        (region,) = tilewise.nn.report(model).regions
        assert not region.kept
        torch.testing.assert_close(model(x), plain(x))
    least, most = (1e-9, 2e-6) if dtype == torch.float32 else (1e-4, 4e-3)
    assert len(found[0]) >= 5
    assert all(least < error < most for each in found for error in each.values()), found


def test_changed_weights_are_seen(graphs: str) -> None:
    plain, x = network(torch.float32), images(torch.float32)
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=Planner(), graphs=graphs, **OPTIONS)
    right(model, plain, x)
    for each in (plain, model):
        with torch.no_grad():
            each[0].weight.mul_(2)
            each[1].running_var.mul_(3)
    right(model, plain, x)
    regional = regional_of(model)
    assert regional is not None, tilewise.nn.report(model).regions
    assert not regional.without


def test_streams_do_not_disturb_each_other(graphs: str) -> None:
    plain, x = network(torch.float32), images(torch.float32)
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=Planner(), graphs=graphs, **OPTIONS)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad():
        want = [model(x + number).clone() for number in range(3)]
        torch.cuda.synchronize()
        for _ in range(20):
            found = []
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    stream.wait_stream(torch.cuda.default_stream())
                    found.append(model(x + number))
            torch.cuda.synchronize()
            for got, wanted in zip(found, want, strict=True):
                torch.testing.assert_close(got, wanted)


def test_a_capture_of_the_users_own(graphs: str) -> None:
    plain, x = network(torch.float32), images(torch.float32)
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=Planner(), graphs=graphs, **OPTIONS)
    with torch.no_grad():
        want = model(x).clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(x)
        model(x + 1)  # uses other memory than the graph does
        graph.replay()
        torch.cuda.synchronize()
    torch.testing.assert_close(got, want)


def test_weights_that_are_not_frozen_are_no_region() -> None:
    model = tilewise.optimize(network(torch.float32), images(torch.float32), training=False)
    (region,) = tilewise.nn.report(model).regions
    assert "frozen=True would do" in region.reason
