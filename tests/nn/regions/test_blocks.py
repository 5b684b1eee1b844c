"""Depthwise convolutions that are computed together with the pointwise ones around them."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.regions.kept import First, keep
from torch import Tensor, nn

import tilewise
from tilewise.nn.layers.weights import Weights
from tilewise.nn.regions import region
from tilewise.nn.regions.forward import regional_of
from tilewise.nn.regions.layouts import Way, is_deferred
from tilewise.nn.regions.region import Planning, plan_region
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.together import blocks
from tilewise.nn.regions.together.blocks import blocks_of
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.units import units_of
from tilewise.nn.regions.ways import Deferred, Planned, Times
from tilewise.plan import Error, Measurement, Plan
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.solvers import get

pytest.importorskip("numba")


def layers(*each: nn.Module) -> nn.Sequential:
    """Modules in a row for inference, with weights and statistics of their own."""
    torch.manual_seed(5)
    model = nn.Sequential(*each).eval()
    generator = torch.Generator("cpu").manual_seed(3)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0, generator=generator)
    return model


class Inverted(nn.Module):
    """A block of MobileNetV2: expansion, depthwise convolution and projection, with norms, around a residual."""

    def __init__(self, channels: int = 6, wide: int = 20, *, bias: bool = False) -> None:
        super().__init__()
        self.expand, self.first = nn.Conv2d(channels, wide, 1, bias=bias), nn.BatchNorm2d(wide)
        self.filter, self.second = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=bias), nn.BatchNorm2d(wide)
        self.project, self.third = nn.Conv2d(wide, channels, 1, bias=bias), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.first(self.expand(x)))
        y = nn.functional.hardswish(self.second(self.filter(y)))
        return x + self.third(self.project(y))


class Gated(Inverted):
    """A block whose channels are weighted by their means, so that the projection reads more than the convolution."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.first(self.expand(x)))
        y = nn.functional.silu(self.second(self.filter(y)))
        return x + self.third(self.project(y * y.mean((2, 3), keepdim=True).sigmoid()))


class Shared(Inverted):
    """What the expansion gives is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(x)
        return x + self.project(self.filter(y) + y)


def depthwise(channels: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, options.pop("out", channels), 3, groups=channels, **options)


def pointwise(into: int, outof: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(into, outof, 1, **options)


def images(channels: int = 6, size: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(2, channels, size, size, generator=generator, dtype=dtype, device="cpu")


def problems_of(model: nn.Module, x: Tensor) -> list[SeparableProblem]:
    """The problems of a network's blocks."""
    traced = trace(model, (x,), {})
    rewrite(traced.graph)
    found = [block.product.problem for block in blocks_of(units_of(traced.graph, traced.names))]
    assert all(isinstance(problem, SeparableProblem) for problem in found)
    return found  # type: ignore[return-value]


def text(model: nn.Module, x: Tensor) -> list[str]:
    """What blocks consist of, as their keys say."""
    return [" ".join(problem.key.split(" ")[3:-1]) for problem in problems_of(model, x)]


def test_blocks_of_networks() -> None:
    assert text(layers(Inverted()), images()) == ["pw=relu6>dw=hardswish>pw=none residual"]
    assert text(layers(Gated()), images()) == ["pw=silu>dw=silu"]
    assert text(layers(depthwise(6), nn.ReLU(), pointwise(6, 8)), images()) == ["dw=relu>pw=none"]


def test_a_row_of_depthwise_and_pointwise_layers_has_blocks_of_both_kinds() -> None:
    """Of blocks that share a layer one can be computed, so that those of two layers are there as well."""
    model = layers(depthwise(6), pointwise(6, 8), depthwise(8), pointwise(8, 4))
    assert text(model, images()) == ["dw=none>pw=none", "pw=none>dw=none>pw=none", "dw=none>pw=none"]


@pytest.mark.parametrize(
    "model",
    [
        Shared(),
        layers(pointwise(6, 8, stride=2), depthwise(8), nn.Conv2d(8, 4, 3)),
        layers(pointwise(6, 8, padding=1), depthwise(8), pointwise(8, 4, stride=2)),
        layers(pointwise(6, 8, groups=2), depthwise(8), pointwise(8, 4, groups=4)),
        layers(pointwise(6, 8), depthwise(8, out=16), pointwise(16, 4)),
        layers(pointwise(6, 8), depthwise(8), nn.MaxPool2d(2), pointwise(8, 4))[:2],
    ],
    ids=["read twice", "strides", "padding", "groups", "several filters", "no layer behind"],
)
def test_what_is_no_block(model: nn.Module) -> None:
    found = text(model.eval(), images())
    assert found in ([], ["pw=none>dw=none"])
    assert bool(found) == (isinstance(model, nn.Sequential) and len(model) == 2)


def test_other_types_have_no_blocks() -> None:
    assert problems_of(layers(Inverted()).double(), images(dtype=torch.float64)) == []
    assert problems_of(layers(Inverted()).bfloat16(), images(dtype=torch.bfloat16)) == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_gpu_takes_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a solver takes 16 bits and no expansion: of three layers the last two are a block."""
    monkeypatch.setattr(blocks, "device_name", lambda device: "cuda:any")
    model, x = layers(Inverted(), Gated()), images()
    assert problems_of(model, x) == []
    found = problems_of(model.bfloat16(), x.bfloat16())
    assert [problem.key.split(" ")[1:2] + problem.key.split(" ")[3:] for problem in found] == [
        ["bf16", "dw=hardswish>pw=none", "residual", "cuda:any"]
    ]


class Plans:
    """Plans that say how long blocks take beside 1 ms for each layer; with ``without``, blocks have torch's alone."""

    def __init__(self, ms: float = 0.5, *, without: bool = False) -> None:
        self.ms, self.without = ms, without

    def _plan(self, problem: Problem, name: str, ms: float) -> Plan:
        solver = get(name)
        config = next(iter(solver.configs(problem)))
        return leaf_plan(problem, Measurement(name, solver.version, config, ms, 0, Error(1e-7, 1e-7)))

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {p: [self._plan(p, "aten", 1.0)] for p in problems if isinstance(p, ConvProblem)}

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        name = "aten_separable" if self.without else "separable_last"
        return {p: [self._plan(p, name, self.ms)] for p in problems}

    def error(self, problem: Problem, plan: Plan) -> float | None:
        return 1e-7

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        return ()


def planned(model: nn.Module, x: Tensor, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> Planning:
    """A region whose steps take what is written in their plans."""
    monkeypatch.setattr(region, "timed_in_place", lambda units, ways, *_: list(ways))
    return plan_region(
        trace(model, (x,), {}), [x], plans, lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN
    )


def runs(planning: Planning) -> list[str]:
    return [line.runs.split(":")[0] for line in planning.lines if "layout" not in line.name]


@pytest.mark.parametrize("block", [Inverted, Gated])
@pytest.mark.parametrize("size", [9, 1, 14])
def test_a_block_is_one_step(block: type[nn.Module], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(block(), block()), images(size=size)
    planning = planned(model, x, Plans(), monkeypatch)
    last = "project" if block is Inverted else "filter"
    assert runs(planning).count("separable_last") == 2
    assert runs(planning).count(f"within 0.{last}") == (2 if block is Inverted else 1)
    assert sum("separable_last" in str(step.plan and step.plan.plan) for step in planning.program.steps) == 2
    with torch.no_grad():
        torch.testing.assert_close(planning.program(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_slow_block_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of 1 ms are faster than a block of 4, and torch's own block is no gain whatever it takes."""
    model, x = layers(Inverted()), images()
    for plans in (Plans(4.0), Plans(0.1, without=True)):
        planning = planned(model, x, plans, monkeypatch)
        assert "separable_last" not in runs(planning)
        with torch.no_grad():
            torch.testing.assert_close(planning.program(x), model(x), rtol=1e-4, atol=1e-5)


def test_of_blocks_that_share_a_layer_the_best_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(depthwise(6), pointwise(6, 8), depthwise(8), pointwise(8, 4)), images()
    planning = planned(model, x, Plans(), monkeypatch)
    assert runs(planning) == ["within 1", "separable_last", "within 3", "separable_last"]
    with torch.no_grad():
        torch.testing.assert_close(planning.program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [layers(Inverted(), Gated()), layers(*[depthwise(6), pointwise(6, 6)] * 3)])
def test_blocks_are_timed_where_they_run(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share a layer in programs of their own; parts that are left to others take no time."""
    x, original = images(), region.timed_in_place
    seen: list[tuple[Way, ...]] = []

    def spied(*given: Any) -> Any:
        seen.extend(original(*given))
        return list(seen)

    monkeypatch.setattr(region, "timed_in_place", spied)
    planning = plan_region(
        trace(model, (x,), {}), [x], Plans(), lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN
    )
    blocks = [w for ways in seen for w in ways if isinstance(w.what, Planned) and w.what.weight is not None]
    left = [w for ways in seen for w in ways if isinstance(w.what, Deferred)]
    assert len(blocks) == (2 if len(model) == 2 else 5)
    assert all(way.ms not in (0.5, 1.0) and 0 < way.ms < 1e3 for way in blocks)
    assert len(left) >= len(blocks)
    assert all(way.ms == 0.0 and is_deferred(way.gives) for way in left)
    with torch.no_grad():
        torch.testing.assert_close(planning.program(x), model(x), rtol=1e-4, atol=1e-5)


def kept(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network that runs by its blocks, the same by torch, and images."""
    model, x = layers(Inverted(bias=True), Gated()), images()
    plain = copy.deepcopy(model)
    original = region.timed_in_place

    def blocks_first(units: Any, ways: Any, *rest: Any) -> Any:
        found = original(units, ways, *rest)
        return [
            tuple(
                way if not isinstance(way.what, Planned) or way.what.weight is None else Way(
                    way.reads, way.gives, 1e-6, way.what, way.error
                )
                for way in each
            )
            for each in found
        ]  # fmt: skip

    monkeypatch.setattr(region, "timed_in_place", blocks_first)
    keep(monkeypatch, model, x, **options)
    lines = tilewise.nn.report(model).regions[0].lines
    assert sum("separable" in line.runs for line in lines) == 2
    assert sum(line.runs.startswith("within") for line in lines) == 3
    return model, plain, x


@pytest.mark.parametrize("frozen", [False, True])
def test_filters_that_change_are_seen(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight, a bias, a statistic, and a parameter in another's place; then the layers come back."""
    model, plain, x = kept(monkeypatch, frozen=frozen)

    def same() -> None:
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)

    same()
    for each in (model, plain):
        with torch.no_grad():
            each[0].filter.weight.mul_(2.0)
            each[0].project.bias.add_(1.0)
            each[1].second.running_mean.add_(0.5)
    same()
    for each in (model, plain):
        each[0].expand.weight = nn.Parameter(torch.full_like(each[0].expand.weight, 0.25))
    same()
    regional = regional_of(model)
    assert regional is not None
    assert not regional.without
    tilewise.restore(model)
    assert torch.equal(model(x), plain(x))


def test_an_exported_network_has_its_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, plain, x = kept(monkeypatch, frozen=True)
    path = tmp_path / "blocks.tilewise"
    tilewise.export(tilewise.restore(model), x, path, planner=First())
    assert b"separable fp32" in path.read_bytes()
    loaded = tilewise.load_exported(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), plain(x), rtol=1e-4, atol=1e-5)
