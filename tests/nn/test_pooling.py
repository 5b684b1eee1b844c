"""Modules that pool by plans: results and gradients as torch's, in every layout, and what stays torch's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tilewise.nn.layers.kinds import kind_of, run_by_plans
from tilewise.nn.layers.one_input.pooling import PoolingLayer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers import get

pytest.importorskip("numba")
MAXIMA: tuple[Any, ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGES: tuple[Any, ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


NARROW = Config(lanes=4, threads=1)
"""One config for all, as kernels are compiled for each number of lanes."""


class Forced(PlanTable):
    """A table whose plans are those of our kernel wherever it can solve a problem."""

    def __init__(self) -> None:
        super().__init__(Options(), "plan")
        self.asked: list[Any] = []

    def plan(self, problems: Any, deterministic: bool) -> None:
        for p in self.missing(problems, deterministic):
            self.asked.append(p)
            solver = get("window_pooling")
            if solver.why_not(p):
                self.refuse(p, deterministic, "not ours")
            else:
                self.learn(p, deterministic, Plan(p.key, solver.name, solver.version, NARROW))


def forced(module: nn.Module) -> tuple[nn.Module, Forced]:
    twin, table = copy.deepcopy(module), Forced()
    run_by_plans(twin, PoolingLayer(table))
    return twin, table


def with_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy)]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_results_and_gradients_are_torchs(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3), "axes")
    kind = data.draw(st.sampled_from((MAXIMA[dims - 1], AVERAGES[dims - 1])), "class")
    kernel = data.draw(st.integers(1, 4), "kernel")
    options: dict[str, Any] = {
        "stride": 2,
        "padding": data.draw(st.integers(0, kernel // 2), "padding"),
        "ceil_mode": data.draw(st.booleans(), "ceil_mode"),
    }
    if kind in AVERAGES:
        options["count_include_pad"] = data.draw(st.booleans(), "count_include_pad")
    module = kind(kernel, **options)
    shape = [data.draw(st.integers(1, 5), "channels"), *(data.draw(st.integers(4, 19), "space") for _ in range(dims))]
    if data.draw(st.booleans(), "batched"):
        shape.insert(0, data.draw(st.integers(1, 3), "batch"))
    x = torch.randint(-3, 4, shape, dtype=torch.int64).float()
    if kind in MAXIMA:
        x[x == 3] = math.inf
        x[x == -3] = -math.inf
        x.view(-1)[data.draw(st.integers(0, x.numel() - 1), "NaN")] = math.nan
    if x.dim() == dims + 2 and dims > 1 and data.draw(st.booleans(), "channels_last"):
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
        if dims == 3:  # where a window has nothing but -inf torch's gradient goes to another element there
            x[x == -math.inf] = -4.0
    twin, table = forced(module)
    got, want = with_gradients(twin, x), with_gradients(module, x)
    close(got, want)
    assert got[0].stride() == want[0].stride() or 1 in got[0].shape
    with torch.no_grad():
        close(twin(x), module(x))
    assert [p.task for p in table.asked if isinstance(p, PoolingProblem)] == ["training", "inference"]


@pytest.mark.parametrize("module", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)])
def test_gradients_of_gradients_are_torchs(module: nn.Module) -> None:
    twin, _ = forced(module)
    x = torch.randn(2, 3, 9, 11, requires_grad=True)

    def penalty(module: nn.Module) -> list[Tensor]:
        y = module(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return [gradient, *torch.autograd.grad(gradient.square().sum(), x)]

    close(penalty(twin), penalty(module))


@pytest.mark.parametrize("module", [nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)])
def test_a_batch_of_gradients_is_torchs(module: nn.Module) -> None:
    twin, _ = forced(module)
    x = torch.randn(1, 2, 5, 5, requires_grad=True)

    def rows(module: nn.Module) -> Tensor:
        y = module(x).flatten()
        return torch.autograd.grad(y, x, torch.eye(y.numel()), is_grads_batched=True)[0]

    close(rows(twin), rows(module))


def test_an_input_that_changes_before_the_backward_is_noticed() -> None:
    twin, _ = forced(nn.MaxPool2d(2))
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    between = x * 1
    y = twin(between)
    between.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.MaxPool2d(2), torch.ones(1, 1, 4, 4, dtype=torch.float64)),
        (nn.MaxPool2d(2), torch.ones(0, 1, 4, 4, dtype=torch.float32)),
        (nn.AvgPool2d(2), torch.ones(1, 1, 4, 4, dtype=torch.bfloat16)),
    ],
)
def test_other_types_and_empty_tensors_are_torchs(module: nn.Module, x: Tensor) -> None:
    twin, _ = forced(module)
    close(twin(x), module(x))


def test_what_is_not_torchs_own_pooling_cannot_be_swapped() -> None:
    class Derived(nn.MaxPool2d):
        pass

    kind = kind_of(nn.MaxPool2d(2))
    assert kind is not None
    assert kind.obstacle(nn.MaxPool2d(2)) == ""
    assert "return_indices" in kind.obstacle(nn.MaxPool2d(2, return_indices=True))
    assert "Derived" in kind.obstacle(Derived(2))
    assert kind_of(nn.AdaptiveMaxPool2d(2)) is None


def test_errors_are_torchs() -> None:
    twin, _ = forced(nn.MaxPool2d(7))
    with pytest.raises(RuntimeError, match="Output size is too small"):
        twin(torch.ones(1, 1, 3, 3, dtype=torch.float32))


def test_a_compiled_module_and_one_under_autocast_are_torchs() -> None:
    module = nn.AvgPool2d(2)
    twin, table = forced(module)
    x = torch.randn(1, 2, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(twin(x), module(x))
    close(torch.func.vmap(twin)(x[None]), module(x)[None])
    assert table.asked == []
