"""A step of a GPU is recorded with its kernels, modelled, and compared in each way in which it may run."""

from __future__ import annotations

import pytest
import torch
from tests import toys
from tests.nn.step.test_live_models import Promising, Slow
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.nn.modules import PlannedModules
from tilewise.nn.step.trace import trace_step
from tilewise.planner import Options
from tilewise.planner.budget.queue import Launch, queue_ms
from tilewise.problems.conv.problem import Pass

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (3, 16, 24):
        wider = {3: 16, 16: 24, 24: 8}[channels]
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
    return nn.Sequential(*layers).to(CUDA, torch.float32)


def example() -> torch.Tensor:
    return torch.randn(8, 3, 48, 48, dtype=torch.float32, device=CUDA)


def recorded(model: nn.Module, x: torch.Tensor) -> PlannedModules:
    """The modules of the model, whose calls are known and not planned."""
    modules = PlannedModules(model, PlanTable(Options(), "torch", None), Weights.CHANGING)
    modules.record([x])
    return modules


def test_a_recorded_step_has_the_kernels_of_its_passes_in_order() -> None:
    model, x = network(), example()
    trace = trace_step(lambda: model(x).square().mean().backward(), recorded(model, x), CUDA)
    assert trace is not None
    assert trace.on_device
    passes = [operator for operator in trace.operators if operator.passes]
    assert [[(p.pass_, p.in_channels) for p, _ in operator.passes] for operator in passes] == [  # type: ignore[attr-defined]
        [(Pass.FPROP, 3)], [(Pass.FPROP, 16)], [(Pass.FPROP, 24)],
        [(Pass.DGRAD, 24), (Pass.WGRAD, 24)], [(Pass.DGRAD, 16), (Pass.WGRAD, 16)], [(Pass.WGRAD, 3)],
    ]  # fmt: skip
    assert all(operator.device_ms > 0 for operator in passes)
    assert sum(operator.device_ms > 0 for operator in trace.operators) > len(passes) + 6  # norms, activations, the loss
    host, device = (sum(getattr(o, name) for o in trace.operators) for name in ("host_ms", "device_ms"))
    step_ms = queue_ms([Launch(o.host_ms, o.device_ms, o.waits) for o in trace.operators])
    assert max(host, device) <= step_ms * (1 + 1e-9)
    assert step_ms <= host + device


def test_a_host_that_waits_is_told() -> None:
    model, x = network(), example()

    def step() -> None:
        loss = model(x).square().mean()
        loss.item()
        loss.backward()

    trace = trace_step(step, recorded(model, x), CUDA)
    assert trace is not None
    assert any(operator.waits for operator in trace.operators)


def test_the_report_has_modelled_and_measured_times(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = network(), example()
    tilewise.optimize(model, x)
    made = report(model).step
    assert made is not None
    if not made.reason:
        assert made.way == "eager"
        assert made.modelled_torch_ms is not None
        assert made.modelled_planned_ms is not None
        assert made.torch_host_ms is not None
    assert "USDT" not in capfd.readouterr().err


def test_a_compiled_model_is_compared_compiled() -> None:
    model, x = network(), example()
    compiled = torch.compile(model)
    compiled(x).square().mean().backward()
    with toys.installed(Slow()):
        tilewise.optimize(compiled, x, planner=Promising())
    made = report(compiled).step
    assert made is not None
    assert made.reason == ""
    assert made.way == "compiled"
    assert made.modelled_torch_ms is None


def test_replays_are_compared_with_the_step_as_it_came_in() -> None:
    model, x = network(), example()
    with toys.installed(Slow()):
        tilewise.optimize(model, x, planner=Promising(), graphs="auto")
    made, facts = report(model).step, report(model).facts["graphs"]
    assert made is not None
    assert made.reason == ""
    if made.way == "graph":
        assert facts["kept"] == made.kept
    else:
        assert not facts["kept"]
