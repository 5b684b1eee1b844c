"""Planned linear layers within ``torch.compile``: one operator where a plan is there, torch's own otherwise."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.fresh_dynamo import fresh_dynamo as fresh_dynamo
from tests.nn.product_plans import Thin
from tests.nn.test_linear import Given, with_gradients
from torch import nn

import tilewise
from tilewise.nn import functional
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.traced import trace

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BY_TORCH = torch._C._nn.linear


class Graphs:
    """A backend that keeps the graphs it was given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def operators(self) -> list[int]:
        """How many planned operators each graph has."""
        return [str(g.code).count("torch.ops.tilewise.linear(") for g in self.graphs]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 10, bias=False))


def pair(*tasks: str, x: torch.Tensor | None = None) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    want, x = network(), torch.randn(7, 24) if x is None else x
    return tilewise.optimize(copy.deepcopy(want), x, planner=Thin(*tasks), goal="passes"), want, x


def operators(profile: Any) -> set[str]:
    """The names of planned operators that ran."""
    return {event.name for event in profile.events() if event.name.startswith("tilewise::")}


def called(module: nn.Module, x: torch.Tensor) -> set[str]:
    """The names of planned operators in what Inductor compiles of ``module``, whose results must be its own."""
    torch._dynamo.reset()
    want, program = module(x), torch.compile(module, fullgraph=True)
    program(x)
    with torch.profiler.profile() as profile:
        assert_close(program(x), want)
    return operators(profile)


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=[COMPILER, pytest.mark.slow])]
)
def test_full_graphs(backend: str) -> None:
    got, want, x = pair()
    compiled = torch.compile(got, fullgraph=True, backend=backend)
    with torch.profiler.profile() as profile:
        y = compiled(x)
    assert "tilewise::linear" in operators(profile)
    expected = want(x)
    assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, its in zip(got.parameters(), want.parameters(), strict=True):
        assert_close(mine.grad, its.grad)


def test_only_planned_calls_are_operators() -> None:
    graphs = Graphs()
    got, want, x = pair()
    compiled = torch.compile(got, fullgraph=True, backend=graphs, dynamic=False)
    assert_close(compiled(x), want(x))
    with torch.no_grad():
        assert_close(compiled(x), want(x))
    assert_close(compiled(x[:3]), want(x[:3]))
    assert graphs.operators() == [2, 2, 0]


def test_where_torchs_own_wins_the_graph_is_plain() -> None:
    graphs = Graphs()
    got, want, x = pair("none")
    assert_close(torch.compile(got, fullgraph=True, backend=graphs)(x), want(x))
    assert graphs.operators() == [0]
    assert "linear" in str(graphs.graphs[0].code)


def test_one_pass_by_plan_is_enough() -> None:
    graphs = Graphs()
    got, want, x = pair("tn")
    compiled = torch.compile(got, fullgraph=True, backend=graphs)
    compiled(x).sum().backward()
    want(x).sum().backward()
    assert graphs.operators() == [2]
    assert_close([p.grad for p in got.parameters()], [p.grad for p in want.parameters()])


@pytest.mark.slow
@COMPILER
def test_inductor_with_frozen_weights_has_them_itself() -> None:
    model = network().eval()
    x = torch.randn(7, 24)
    got = tilewise.optimize(copy.deepcopy(model), x, planner=Thin(), goal="passes", training=False)
    graphs = Graphs()
    with torch.no_grad():
        assert_close(torch.compile(got, fullgraph=True, backend=graphs)(x), model(x))
        assert graphs.operators() == [2]
        assert called(got, x) == {"tilewise::linear"}, "weights that are not frozen are left to plans"
        with torch._inductor.config.patch(freezing=True):  # an option of torch.compile alone freezes nothing
            assert called(got, x) == set()


def test_autocast() -> None:
    want, x, graphs = network(), torch.randn(7, 24), Graphs()
    got = copy.deepcopy(want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tilewise.optimize(got, x, planner=Thin(), goal="passes")
        y, expected = torch.compile(got, fullgraph=True, backend=graphs)(x), want(x)
    assert graphs.operators() == [2]
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=5e-2, atol=5e-2)
    y.float().sum().backward()
    assert got[0].weight.grad.dtype is torch.float32


def test_functions_and_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_defaults", functional.Table(Given()))
    x, w, b = torch.randn(7, 24), torch.randn(40, 24), torch.randn(40)
    graphs = Graphs()
    compiled = torch.compile(lambda: tilewise.linear(x, w, b).relu(), fullgraph=True, backend=graphs)
    assert_close(compiled(), BY_TORCH(x, w, b).relu())  # nothing is planned while tracing
    torch._dynamo.reset()
    tilewise.linear(x, w, b)
    assert_close(compiled(), BY_TORCH(x, w, b).relu())
    torch._dynamo.reset()
    with tilewise.enabled(wait=True, planner=Thin()):
        for _ in range(2):
            F.linear(x, w, b)
        named = torch.compile(lambda: F.linear(x, w, b).relu(), fullgraph=True, backend=graphs)
        assert_close(named(), BY_TORCH(x, w, b).relu())
    assert graphs.operators() == [0, 1, 1]


def test_exported_and_scripted_programs_are_plain() -> None:
    got, want, x = pair()
    for strict in (False, True):
        program = torch.export.export(got, (x,), strict=strict)
        assert "tilewise" not in str(program.graph)
        assert_close(program.module()(x), want(x))


def named(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> str:
    layer = LinearLayer(Given())
    layer(x, w, b)
    (known,) = layer.known
    return known.plans


@pytest.mark.parametrize("turned", [False, True])
def test_opcheck(turned: bool) -> None:
    x, b = torch.randn(2, 3, 8, requires_grad=True), torch.randn(6, requires_grad=True)
    stored = torch.randn((8, 6) if turned else (6, 8))
    w = (stored.t() if turned else stored).requires_grad_()
    name = named(x, w, b)
    torch.library.opcheck(torch.ops.tilewise.linear.default, (x, w, b, name))
    y = BY_TORCH(x, w, b)
    dy = torch.randn_like(y).detach()
    for mask in ([True, True, True], [True, False, True]):
        torch.library.opcheck(torch.ops.tilewise.linear_backward.default, (dy, x.detach(), w.detach(), name, mask))
    assert_close(
        with_gradients(lambda x, w, b: torch.ops.tilewise.linear(x, w, b, name), (x, w, b)),
        with_gradients(BY_TORCH, (x, w, b)),
    )
    first = torch.autograd.grad(torch.ops.tilewise.linear(x, w, b, name).square().sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))
    by_torch = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
    for mine, its in zip(second, torch.autograd.grad(sum(g.square().sum() for g in by_torch), (x, w)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-2)


def test_operators_take_any_layout_and_heed_changed_flags() -> None:
    x, w, b = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40)
    name, want = named(x, w, b), BY_TORCH(x, w, b)
    for other in (x.t().contiguous().t(), torch.randn(5, 48)[:, ::2].copy_(x)):
        y = torch.ops.tilewise.linear(other, w.t().contiguous().t(), b, name)
        assert y.is_contiguous()
        assert_close(y, want)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(torch.ops.tilewise.linear(x, w, b, name), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_operators_refuse_other_operands_and_unknown_names() -> None:
    x, w, b = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40)
    name = named(x, w, b)
    for operands in ((x[:1], w, b), (x, w[:2], b), (x, w, b[:2])):
        with pytest.raises(RuntimeError, match=r"are for operands of \(5, 24\) and \(40, 24\)"):
            torch.ops.tilewise.linear(*operands, name)
    with pytest.raises(RuntimeError, match="plans='nowhere' are not known"):
        torch.ops.tilewise.linear(x, w, b, "nowhere")


def test_nothing_is_found_for_other_tensors() -> None:
    layer = LinearLayer(Given())
    x, w, b = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40)
    assert trace(layer, x, w, b) is None
    layer(x, w, b)
    for other in (
        (x[:2], w, b), (x, w[:3], b[:3]), (x, w, None), (x.double(), w.double(), b.double()),
        (x, w.t().contiguous().t(), b), (x.t().contiguous().t(), w, b), (x, w, b.double()), (x[None], w, b),
    ):  # fmt: skip
        assert trace(layer, *other) is None
    assert_close(trace(layer, x, w, b), BY_TORCH(x, w, b))
    layer.forget()
    assert trace(layer, x, w, b) is None
