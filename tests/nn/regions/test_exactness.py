"""How errors grow within a region, and how much error all plans together may have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from tilewise.nn.regions.exactness.gains import gains_of
from tilewise.nn.regions.exactness.limits import Limits
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import Traced, trace
from tilewise.nn.regions.units import PRODUCT, units_of


class Residual(nn.Module):
    """A convolution, a residual block behind a norm, a pooling and a linear layer."""

    def __init__(self, channels: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)
        self.last = nn.Linear(channels, 40)
        for tensor in (*self.parameters(), self.norm.running_var):
            assert tensor is not None
            nn.init.uniform_(tensor, 0.1, 1.0, generator=generator)
        for each in (self.first, self.second, self.last):
            each.weight.data.sub_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.norm(self.second(x)).add(x).relu()
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


class Disturbed(fx.Interpreter):
    """Runs a graph in float64 with noise of a relative size added to one node's result."""

    def __init__(self, traced: Traced, node: fx.Node | None, relative: float, generator: torch.Generator) -> None:
        super().__init__(traced.module, graph=traced.graph)
        self.sources, self.node, self.relative, self.generator = traced.sources, node, relative, generator

    def fetch_attr(self, target: str) -> Tensor:
        return self.sources[target].detach().double()

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n is not self.node:
            return result
        assert isinstance(result, Tensor)
        noise = torch.randn(result.shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return result + noise * (self.relative * result.norm() / noise.norm())


@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_gains_are_how_noise_grows(channels: int, images: int, seed: int) -> None:
    generator = torch.Generator("cpu").manual_seed(seed)
    model = Residual(channels, generator).eval()
    x = torch.randn(images, 3, 9, 7, generator=generator, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        traced = trace(model, (x,), {})
        rewrite(traced.graph)
        nodes = [unit.node for unit in units_of(traced.graph, traced.names) if unit.kind == PRODUCT]
        gains = gains_of(traced, nodes, [x], probes=100)
        assert gains is not None
        assert list(gains) == nodes
        (want,) = Disturbed(traced, None, 0.0, generator).run(x.double())
        for node in nodes:
            squares = []
            for _ in range(100):
                (result,) = Disturbed(traced, node, 1e-5, generator).run(x.double())
                squares.append(float(((result - want).norm() / want.norm() / 1e-5) ** 2))
            # With a Jacobian of rank 2 (two channels) both sides have a standard deviation of 5 %.
            assert gains[node] == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=0.4)


def test_one_probe_is_exact_for_a_single_result() -> None:
    layer = nn.Linear(4, 1, dtype=torch.float32, device="cpu")
    x = torch.randn(1, 4, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        traced = trace(nn.Sequential(layer, nn.Softplus()).eval(), (x,), {})
        rewrite(traced.graph)
        nodes = [unit.node for unit in units_of(traced.graph, traced.names) if unit.kind == PRODUCT]
        y = layer(x).double()
        want = (y.sigmoid() * y / nn.functional.softplus(y)).abs().item()
    gains = gains_of(traced, nodes, [x], probes=1)
    assert gains is not None
    assert list(gains.values()) == pytest.approx([want], rel=1e-5)


def test_inputs_made_in_inference_mode_and_what_is_not_read() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.unread = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.read(x), self.unread(x) > 1.0

    with torch.inference_mode():
        x = torch.ones(2, 4, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        traced = trace(Unread().eval(), (x,), {})
        rewrite(traced.graph)
    read, unread = (unit.node for unit in units_of(traced.graph, traced.names) if unit.kind == PRODUCT)
    gains = gains_of(traced, [read, unread], [x])
    assert gains is not None
    assert gains[read] == pytest.approx(1.0, abs=0.7)
    assert gains[unread] == 0.0


def test_without_a_derivative_there_are_no_gains() -> None:
    class Gamma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.igamma(self.layer(x).exp(), x)

    x = torch.ones(2, 4, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        traced = trace(Gamma().eval(), (x,), {})
        rewrite(traced.graph)
    nodes = [unit.node for unit in units_of(traced.graph, traced.names) if unit.kind == PRODUCT]
    assert len(nodes) == 1
    assert gains_of(traced, nodes, [x]) is None


@given(
    st.lists(st.tuples(st.floats(1e-7, 1e-5), st.floats(1.5, 100.0)), min_size=8, max_size=40),
    st.floats(0.0, 0.7),
    st.floats(0.05, 0.9),
)
@settings(max_examples=200, deadline=None)
def test_limits_come_close_to_what_is_allowed(plans: list[tuple[float, float]], other: float, share: float) -> None:
    """Layers with an exact and a less exact plan each; the whole errs by their squares and by ``other``."""
    fast = sorted(((exact * factor) ** 2, exact**2) for exact, factor in plans)
    least, most = sum(exact for _, exact in fast), sum(error for error, _ in fast)
    enough = least + share * (most - least)
    """The plans' squares at which the whole errs as much as it may."""

    def within(limit: float) -> float:
        """The sum for as many fast plans as a limit allows, least errors first."""
        total = least
        for error, exact in fast:
            if total + error - exact <= limit:
                total += error - exact
        return total

    limits, limit, best = Limits(), math.inf, 0.0
    for _ in range(16):
        squares = within(limit)
        limits.note(squares, math.sqrt(other + (1.0 - other) * squares / enough))
        if squares <= enough:
            best = max(best, squares)
        if limits.empty:
            break
        limit = limits.next()
        assert limits.allowed < limit < limits.refused
    reachable = max((within(enough * part) for part in (1.0, 0.95, 0.9)), default=0.0)
    assert best <= enough
    assert best >= 0.5 * reachable
