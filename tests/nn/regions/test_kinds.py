"""Regions of five kinds of networks, of any options, beside the same network in float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewise
from tilewise import solvers
from tilewise.nn.regions.forward import regional_of
from tilewise.planner import Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.wisdom import Wisdom

pytestmark = pytest.mark.slow  # each draw plans a network

FEW = ("aten", "onednn_fused", "indirect", "winograd_last", "aten_gemm")
OTHERS = tuple(s.name for kind in (ConvProblem, GemmProblem) for s in solvers.solving(kind) if s.name not in FEW)
LIMIT = 2e-5
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish,
    "gelu": nn.GELU,
    "leaky": lambda: nn.LeakyReLU(0.2),
}
_planner: Planner


@pytest.fixture(scope="module", autouse=True)
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    """One for all tests, which then measure each problem once."""
    global _planner
    _planner = Planner(Wisdom(tmp_path_factory.mktemp("wisdom") / "wisdom.sqlite3"))
    yield _planner
    _planner.close()


class Waiting(nn.Module):
    """A network whose class also waits, so that a region of it is faster whatever else this machine does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.inner(x)


class Residual(nn.Module):
    """He et al. 2016: two convolutions with norms, and a shortcut that may be a convolution with stride."""

    def __init__(self, channels: int, act: Callable[[], nn.Module], stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, stride, 1, bias=False), nn.BatchNorm2d(2 * channels), act(),
            nn.Conv2d(2 * channels, 2 * channels, 3, 1, 1, bias=False), nn.BatchNorm2d(2 * channels, affine=False),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, stride), nn.BatchNorm2d(2 * channels))
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return self.act(y)


class Inverted(nn.Module):
    """Howard et al. 2019: an inverted residual with a depthwise convolution and squeeze-and-excite."""

    def __init__(self, channels: int, act: Callable[[], nn.Module], stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.wide = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.deep = nn.Sequential(
            nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False), nn.BatchNorm2d(wide), act()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, channels, 1), nn.ReLU(), nn.Conv2d(channels, wide, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.wide(x))
        y = self.narrow(y * self.squeeze(y))
        return x + y if x.shape == y.shape else y


class ConvNext(nn.Module):
    """Liu et al. 2022: a depthwise convolution, a norm over channels and two linear layers."""

    def __init__(self, channels: int, act: Callable[[], nn.Module], stride: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.act, self.narrow = nn.Linear(channels, 4 * channels), act(), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.narrow(self.act(self.wide(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


class Dense(nn.Module):
    """Huang et al. 2017: norms before convolutions, whose results are concatenated."""

    def __init__(self, channels: int, act: Callable[[], nn.Module], stride: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels + 4 * i), act(), nn.Conv2d(channels + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for part in self.parts:
            found.append(part(torch.cat(found, 1)))
        return torch.cat(found, 1)


class UNet(nn.Module):
    """Ronneberger et al. 2015: down, up, and a concatenation of both."""

    def __init__(self, channels: int, act: Callable[[], nn.Module], stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), act())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), act())
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.last = nn.Conv2d(2 * channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.cat([y, self.up(self.down(y))], 1))


def with_statistics(model: nn.Module) -> nn.Module:
    """The model with statistics and factors as if it had been trained."""
    drawn = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.num_features, generator=drawn) * 0.3)
            module.running_var.copy_(torch.rand(module.num_features, generator=drawn) + 0.5)
            if module.affine:
                with torch.no_grad():
                    module.weight.copy_(torch.rand(module.num_features, generator=drawn) + 0.5)
    return model.eval()


@pytest.mark.parametrize("kind", [Residual, Inverted, ConvNext, Dense, UNet], ids=lambda kind: kind.__name__)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    channels=st.sampled_from([8, 12, 16]), act=st.sampled_from(sorted(ACTIVATIONS)), stride=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 3]), size=st.sampled_from([(8, 8), (10, 14)]), last=st.booleans(), frozen=st.booleans(),
)  # fmt: skip
def test_regions_of_networks_compute_what_float64_does(
    kind: Callable[..., nn.Module], channels: int, act: str, stride: int, batch: int, size: tuple[int, int], last: bool,
    frozen: bool,
) -> None:  # fmt: skip
    torch.manual_seed(5)
    model = Waiting(with_statistics(kind(channels, ACTIVATIONS[act], stride))).eval()
    x = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(9), dtype=torch.float32)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
    tilewise.optimize(model, x, training=False, frozen=frozen, planner=_planner, exclude=OTHERS)
    regional = regional_of(model)
    assert regional is not None, str(tilewise.nn.report(model).regions)
    with torch.no_grad():
        for _ in range(2):
            found = model(x)
            assert found.stride() == model.inner(x).stride()
            assert float((found.double() - wanted).norm() / wanted.norm()) < LIMIT
    assert not regional.without
