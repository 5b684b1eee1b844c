"""Modules that pool and normalize on a GPU by plans: results and gradients as torch's, in every type and layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise.nn.layers.kinds import kind_of, run_by_plans
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.plan import Plan
from tilewise.planner import Options
from tilewise.solvers import get

pytestmark = pytest.mark.gpu
OURS = {"pool": "window_tiles", "lrn": "channel_tiles"}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Forced(PlanTable):
    """A table whose plans are those of our kernels."""

    def __init__(self) -> None:
        super().__init__(Options(), "plan")
        self.asked: list[str] = []

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            solver = get(OURS[p.kind])
            assert not solver.why_not(p)
            self.asked.append(p.task)
            self.learn(p, deterministic, Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p)))))


def forced(module: nn.Module) -> tuple[nn.Module, Forced]:
    twin, table = copy.deepcopy(module), Forced()
    kind = kind_of(twin)
    assert kind is not None
    run_by_plans(twin, kind.layers(table, Weights.CHANGING))
    return twin, table


def with_gradient(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


def close(got: Any, want: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    "module", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.LocalResponseNorm(5, 0.1)], ids=str
)
def test_results_and_gradients_are_those_in_float64(
    module: nn.Module, order: torch.memory_format, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 24, 19, 23, device="cuda", dtype=dtype).contiguous(memory_format=order)
    dy = torch.randn_like(module(x))
    twin, table = forced(module)
    got, wide = with_gradient(twin, x, dy), with_gradient(module, x.cpu().double(), dy.cpu().double())
    close(got, tuple(t.to("cuda", dtype) for t in wide), dtype)
    assert got[0].stride() == module(x).stride()
    with torch.no_grad():
        close(twin(x), module(x), dtype)
    assert table.asked == ["training", "inference"]


@pytest.mark.parametrize("module", [nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5, 0.1)], ids=str)
def test_an_input_at_an_odd_address_and_a_gradient_that_lies_otherwise(module: nn.Module) -> None:
    base = torch.randn(2 * 4 * 9 * 11 + 1, device="cuda", dtype=torch.float32)
    x = base[1:].view(2, 4, 9, 11)
    twin, _ = forced(module)
    dy = torch.randn_like(module(x)).contiguous(memory_format=torch.channels_last)
    close(with_gradient(twin, x, dy), with_gradient(module, x, dy), torch.float32)


def test_a_call_on_another_stream_and_in_a_graph() -> None:
    module = nn.MaxPool2d(3, 2, 1)
    twin, _ = forced(module)
    x = torch.randn(2, 8, 19, 23, device="cuda", dtype=torch.float32)
    with torch.no_grad():
        want = module(x)
        twin(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = twin(x)
        x.mul_(-1)
        graph.replay()
        close(y, module(x), torch.float32)
        x.mul_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = twin(x)
        torch.cuda.current_stream().wait_stream(stream)
        close(again, want, torch.float32)


def test_a_model_is_planned_and_computes_as_torch() -> None:
    """Whatever wins, the model's results stay torch's, and the report has every problem."""
    model = nn.Sequential(nn.LocalResponseNorm(5, 0.1), nn.MaxPool2d(3, 2), nn.AvgPool2d(2)).cuda()
    x = torch.randn(4, 32, 27, 27, device="cuda", dtype=torch.float32, requires_grad=True)
    want = torch.autograd.grad(model(x).square().sum(), x)
    planned = copy.deepcopy(model)
    tilewise.optimize(planned, x)
    close(torch.autograd.grad(planned(x).square().sum(), x), want, torch.float32)
    found = [one.problem for _, _, one in tilewise.nn.report(planned).passes()]
    assert {p.kind for p in found} == {"pool", "lrn"}
    assert {p.task for p in found} == {"training"}
