"""Planned layers under torch.compile and torch.export, and the operators behind them."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing, assert_same
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from torch import nn

import tilewise
from tilewise import nn as planned
from tilewise.nn import report
from tilewise.nn.layers.convolution import geometry_of
from tilewise.nn.layers.layer import Layer
from tilewise.problems.conv.problem import Pass

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=COMPILER)]


class Graphs:
    """A backend that keeps the graphs it was given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        """How many planned operators each graph has."""
        return [str(g.code).count("torch.ops.tilewise.conv(") for g in self.graphs]


def network(channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(6, 3, 2, stride=2, bias=False),
    )  # fmt: skip


def layer_of(conv: nn.Module) -> Layer:
    """The planned layer by which a module computes."""
    layer: Layer = conv.forward.__func__._tilewise_planned(geometry_of(conv))
    return layer


def pair(planner: Dividing | None = None, **options: Any) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    want = network()
    x = torch.randn(3, 3, 7, 7)
    return tilewise.optimize(copy.deepcopy(want), x, planner=planner or Dividing(), **options), want, x


@pytest.mark.parametrize("backend", BACKENDS)
def test_full_graphs(backend: str) -> None:
    want = network()[0] if backend == "inductor" else network()
    x = torch.randn(3, 3, 7, 7)
    got = tilewise.optimize(copy.deepcopy(want), x, planner=Dividing())
    compiled = torch.compile(got, fullgraph=True, backend=backend)
    y, expected = compiled(x), want(x)
    assert_same(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, its in zip(got.parameters(), want.parameters(), strict=True):
        assert_same(mine.grad, its.grad)
    with torch.no_grad():
        assert_same(compiled(x), expected)


def test_planned_shapes_are_operators_and_others_torch() -> None:
    planner, graphs = Dividing(), Graphs()
    got, want, x = pair(planner)
    planned_before = len(planner.planned)
    compiled = torch.compile(got, fullgraph=True, backend=graphs)
    assert_same(compiled(x), want(x))
    assert graphs.operators() == [3]
    for batch in (2, 5, 4):
        other = torch.randn(batch, 3, 7, 7)
        assert_same(compiled(other), want(other))
    assert set(graphs.operators()[1:]) == {0}
    assert_same(compiled(x), want(x))
    assert len(planner.planned) == planned_before


def test_shapes_planned_in_between_are_found() -> None:
    graphs = Graphs()
    got, want, _ = pair()
    compiled = torch.compile(got, fullgraph=True, backend=graphs, dynamic=False)
    other = torch.randn(2, 3, 7, 7)
    assert_same(compiled(other), want(other))
    got(other)
    assert_same(compiled(other), want(other))
    assert graphs.operators() == [0, 3]


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    got, want, _ = pair()
    compiled = torch.compile(got, fullgraph=True, backend="eager", dynamic=True)
    for batch in (3, 2, 5):
        other = torch.randn(batch, 3, 7, 7)
        assert_same(compiled(other), want(other))


def test_autocast() -> None:
    want = network()
    x = torch.randn(3, 3, 7, 7)
    got, graphs = copy.deepcopy(want), Graphs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tilewise.optimize(got, x, planner=Dividing())
    compiled = torch.compile(got, fullgraph=True, backend=graphs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = compiled(x), want(x)
    assert graphs.operators() == [3]
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)


def test_channels_last() -> None:
    want = network().to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 7, 7).to(memory_format=torch.channels_last)
    got = tilewise.optimize(copy.deepcopy(want), x, planner=Dividing())
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        y = torch.compile(got, fullgraph=True, backend=backend)(x)
        assert y.stride() == want(x).stride()
        assert_same(y, want(x))
    contiguous = x.contiguous()
    assert_same(torch.compile(got, fullgraph=True, backend="eager")(contiguous), want(contiguous))


def test_functional_operators() -> None:
    planned.set_defaults(planner=Dividing())
    x, w = torch.randn(3, 2, 7, 7), torch.randn(4, 2, 3, 3)
    planned.conv2d(x, w, stride=2)
    graphs = Graphs()

    def function(x: torch.Tensor) -> torch.Tensor:
        return planned.conv2d(x, w, stride=2) + planned.conv_transpose2d(x, w.transpose(0, 1), padding=3)

    y = torch.compile(function, fullgraph=True, backend=graphs)(x)
    assert graphs.operators() == [1]
    assert_same(y, function(x))
    planned.set_defaults()


def test_export_is_plain_torch() -> None:
    got, want, x = pair()
    for strict in (False, True):
        program = torch.export.export(got, (x,), strict=strict)
        assert "tilewise" not in str(program.graph)
        assert_same(program.module()(x), want(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "transposed"), [(tuple(Pass), False), ((Pass.FPROP,), True), ((Pass.WGRAD,), False)]
)
def test_opcheck(passes: tuple[Pass, ...], transposed: bool) -> None:
    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(2, 3, 2, stride=2)
    x = torch.randn(3, 2, 6, 6, requires_grad=True)
    tilewise.optimize(conv, x, planner=Dividing(passes))
    layer = layer_of(conv)
    name = next(known.plans for known in layer.known if any(known.needs))
    w, b = (p.detach().requires_grad_() for p in (conv.weight, conv.bias))
    torch.library.opcheck(torch.ops.tilewise.conv.default, (x, w, b, name))
    dy = torch.randn_like(conv(x)).detach()
    for mask in ([True, True, True], [True, False, True]):
        torch.library.opcheck(torch.ops.tilewise.conv_backward.default, (dy, x.detach(), w.detach(), name, mask))
    first = torch.autograd.grad(torch.ops.tilewise.conv(x, w, b, name).square().sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))
    y = (nn.functional.conv_transpose2d if transposed else nn.functional.conv2d)(x, w, b, stride=2)
    first_by_torch = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
    second_by_torch = torch.autograd.grad(sum(g.square().sum() for g in first_by_torch), (x, w))
    for mine, its in zip(second, second_by_torch, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-2)


def test_operators_take_any_layout_and_heed_changed_flags() -> None:
    conv = nn.Conv2d(2, 3, 3)
    x = torch.randn(3, 2, 8, 8)
    tilewise.optimize(conv, x.clone().requires_grad_(), planner=Dividing())
    name = layer_of(conv).known[0].plans
    w, b = conv.weight.detach(), conv.bias.detach()
    want = nn.functional.conv2d(x, w, b)
    others = (
        x.to(memory_format=torch.channels_last),
        torch.randn(3, 2, 8, 16)[..., ::2].copy_(x),
        torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x),
    )
    for other in others:
        y = torch.ops.tilewise.conv(other, w, b, name)
        assert y.is_contiguous()
        assert_same(y, want)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(torch.ops.tilewise.conv(x, w, b, name), nn.functional.conv2d(x, w, b))
    finally:
        torch.use_deterministic_algorithms(False)


def test_operators_refuse_operands_of_other_sizes() -> None:
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 7, 7)
    tilewise.optimize(conv, x, planner=Dividing())
    name = layer_of(conv).known[0].plans
    w, b = conv.weight, conv.bias
    assert b is not None
    for operands in ((x[:1], w, b), (x, w[:2], b), (x, w[..., :2], b), (x, w, b[:2])):
        with pytest.raises(RuntimeError, match=r"are for operands of \(2, 3, 7, 7\) and \(4, 3, 3, 3\)"):
            torch.ops.tilewise.conv(*operands, name)


def test_functions_in_graphs_heed_the_weights_size() -> None:
    x = torch.randn(2, 3, 7, 7)
    planned.set_defaults(planner=Dividing())
    try:
        planned.conv2d(x, torch.randn(4, 3, 3, 3))
        compiled = torch.compile(planned.conv2d, backend="eager")
        for shape in ((6, 3, 3, 3), (4, 3, 3, 3), (2, 3, 3, 3)):
            w = torch.randn(shape)
            assert_same(compiled(x, w), torch.nn.functional.conv2d(x, w))
    finally:
        planned.set_defaults()


def test_unknown_plans_are_named() -> None:
    with pytest.raises(RuntimeError, match="plans='nowhere' are not known"):
        torch.ops.tilewise.conv(torch.randn(1, 1, 3, 3), torch.randn(1, 1, 3, 3), None, "nowhere")


def test_names_tell_layers_apart() -> None:
    got, _, _ = pair()
    names = [known.plans for m in got if "forward" in m.__dict__ for known in layer_of(m).known]
    assert len(names) == len(set(names)) == 6  # three layers, with gradients and without


def test_optimizing_a_compiled_model() -> None:
    want = network()
    x = torch.randn(3, 3, 7, 7)
    compiled = torch.compile(copy.deepcopy(want), fullgraph=True, backend="eager")
    assert tilewise.optimize(compiled, x, planner=Dividing()) is compiled
    assert all(layer.replaced for layer in report(compiled).layers)
    assert_same(compiled(x), want(x))
