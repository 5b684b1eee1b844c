"""Planned layers on a GPU: graph capture, streams, layouts, precision flags and autocast."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn

import tilewise
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn import report

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with fp32_precision("cuda", "conv", "ieee"):
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
    )
    return nn.Sequential(*layers).cuda()


def example(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16, device="cuda")


def pair(planner: Dividing | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    want = network()
    return tilewise.optimize(copy.deepcopy(want), example(), planner=planner or Dividing(), **options), want


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_results_and_gradients() -> None:
    got, want = pair()
    assert all(layer.replaced for layer in report(got).layers)
    x = example()
    for layout in (torch.contiguous_format, torch.channels_last):
        results = []
        for model in (got, want):
            model.zero_grad()
            model.to(memory_format=layout)
            xi = x.to(memory_format=layout, copy=True).requires_grad_()
            y = model(xi)
            y.square().sum().backward()
            results.append([y, xi.grad, *(p.grad for p in model.parameters())])
        assert results[0][0].stride() == results[1][0].stride()
        for mine, its in zip(*results, strict=True):
            close(mine, its, 1e-3)


def test_inference_is_captured_in_a_graph() -> None:
    planner = Dividing()
    got, want = pair(planner)
    static = example()
    before = len(planner.planned)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got(static)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            y = got(static)
        for _ in range(2):
            x = example()
            static.copy_(x)
            graph.replay()
            close(y, want(x))
    assert len(planner.planned) == before


def test_a_step_is_captured_in_a_graph() -> None:
    got, want = pair()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(got), (example().requires_grad_(),))
    x = example().requires_grad_()
    results = []
    for model in (graphed, want):
        y = model(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))])
    for mine, its in zip(*results, strict=True):
        close(mine, its, 1e-3)


def test_nothing_is_planned_in_a_capture() -> None:
    planner = Dividing()
    got, want = pair(planner)
    static = example(2)
    before = len(planner.planned)
    want(static)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = got(static)
    graph.replay()
    with torch.no_grad():
        close(y, want(static))
        assert len(planner.planned) == before
        got(static)
        assert len(planner.planned) > before


def test_a_plan_follows_the_precision_flag() -> None:
    planner = Dividing()
    got, _ = pair(planner)
    x = example()
    got(x)
    assert {p.precision for p in planner.planned} == {"ieee"}
    before = len(planner.planned)
    with fp32_precision("cuda", "conv", "tf32"):
        got(x)
    assert {p.precision for p in planner.planned[before:]} == {"tf32"}
    after = len(planner.planned)
    for precision in ("ieee", "tf32"):
        with fp32_precision("cuda", "conv", precision):
            got(x)
    assert len(planner.planned) == after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    want = network()
    got, planner, x = copy.deepcopy(want), Dividing(), example()
    with torch.autocast("cuda", dtype=dtype):
        tilewise.optimize(got, x, planner=planner, unplanned="torch")
    assert {p.dtype for p in planner.planned} == {"bf16" if dtype is torch.bfloat16 else "fp16"}
    results = []
    for model in (got, want):
        with torch.autocast("cuda", dtype=dtype):
            y = model(x)
            loss = y.float().square().mean()
        loss.backward()
        results.append([y, *(p.grad for p in model.parameters())])
    assert results[0][0].dtype is dtype
    for mine, its in zip(*results, strict=True):
        close(mine, its, 3e-2)


def test_moving_between_devices() -> None:
    got, want = pair()
    x = example()
    close(got.cpu()(x.cpu()), want.cpu()(x.cpu()))
    close(got.cuda()(x), want.cuda()(x))
    with pytest.raises(RuntimeError, match="same"):
        got(x.cpu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    torch._dynamo.reset()
    got, want = pair()
    x = example()
    compiled = torch.compile(got, fullgraph=True, backend=backend)
    results = []
    for run, model in ((compiled, got), (want, want)):
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for mine, its in zip(*results, strict=True):
        close(mine, its, 1e-3)


def test_the_real_planner_keeps_its_limit() -> None:
    want = nn.Sequential(nn.Conv2d(3, 16, 9), nn.Conv2d(16, 16, 5, padding=2)).cuda()
    got, x = copy.deepcopy(want), torch.randn(16, 3, 48, 48, device="cuda")
    tilewise.optimize(got, x, workspace="4MiB")
    for *_, one in report(got).passes():
        assert one.plan is not None
        assert one.plan.workspace <= 4 * 2**20
    results = []
    for model in (got, want):
        y = model(x)
        y.square().mean().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for mine, its in zip(*results, strict=True):
        close(mine, its, 1e-3)
