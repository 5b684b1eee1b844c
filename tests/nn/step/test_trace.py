"""The recorded step, and the model that is made of it: on a real network of a CPU, and on profiles made by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.nn.test_step_goal import Promising, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.weights import Weights
from tilewise.nn.modules import PlannedModules
from tilewise.nn.step.goal import StepGoal
from tilewise.nn.step.modelled import Cost, StepModel
from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs
from tilewise.nn.step.search import Asked, search
from tilewise.nn.step.step import Step
from tilewise.nn.step.trace import Event, Operator, Trace, operators_of, trace_step
from tilewise.problems.conv.problem import Pass

CPU = torch.device("cpu")


def example() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20, dtype=torch.float32, device="cpu")


def planned(model: nn.Module, x: torch.Tensor) -> PlannedModules:
    from tilewise.nn.layers.plan_table import PlanTable
    from tilewise.planner import Options

    modules = PlannedModules(model, PlanTable(Options(), "torch", Promising()), Weights.CHANGING)
    modules.record([x])
    modules.plan_table.plan(modules.problems(), False)
    modules.install({})
    return modules


def traced(model: nn.Module, run: Any, modules: PlannedModules) -> Trace:
    by_torch, by_plans = modules.switches()
    by_torch()
    try:
        trace = trace_step(run, modules, CPU)
    finally:
        by_plans()
    assert trace is not None
    return trace


def passes_of(trace: Trace) -> list[list[tuple[Any, Any]]]:
    """The passes of each operator that has any, as (pass, channels in) pairs."""
    return [[(p.pass_, p.in_channels) for p, _ in operator.passes] for operator in trace.operators if operator.passes]


def test_a_real_step_has_its_operators_in_order_and_its_passes() -> None:
    model, x = network(), example()
    modules = planned(model, x)
    calls = itertools.count()

    def run() -> None:
        next(calls)
        model.zero_grad()
        model(x).square().mean().backward()

    trace = traced(model, run, modules)
    assert next(calls) == 3
    names = [operator.name for operator in trace.operators]
    for operator in ("aten::batch_norm", "aten::dropout", "aten::mean", "ReluBackward0"):
        assert operator in names
    assert not any("conv" in name for name in names)  # each is a pass
    assert names.index("aten::batch_norm") < names.index("aten::dropout") < names.index("aten::mean")
    assert all(operator.host_ms >= 0 and operator.device_ms == 0 for operator in trace.operators)
    assert not trace.on_device
    first, second, third = (module.in_channels for module in model if isinstance(module, nn.Conv2d))
    assert passes_of(trace) == [
        [(Pass.FPROP, first)], [(Pass.FPROP, second)], [(Pass.FPROP, third)],
        [(Pass.DGRAD, third), (Pass.WGRAD, third)], [(Pass.DGRAD, second), (Pass.WGRAD, second)],
        [(Pass.WGRAD, first)],
    ]  # fmt: skip
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_other_time_of_the_profiler_is_taken_off() -> None:
    trace = Trace((Operator("a", 2.0, 5.0), Operator("b", 2.0)))
    assert [operator.host_ms for operator in trace.at_host_ms(1.0).operators] == [0.5, 0.5]
    assert [operator.device_ms for operator in trace.at_host_ms(1.0).operators] == [5.0, 0.0]
    assert trace.at_host_ms(8.0) == trace


def test_a_checkpoint_computes_its_forward_twice() -> None:
    model, x = network(), example()
    modules = planned(model, x)

    def run() -> None:
        model[4:](checkpoint(model[:4], x, use_reentrant=False)).square().mean().backward()

    forwards = [p for p in passes_of(traced(model, run, modules)) if p == [(Pass.FPROP, 3)]]
    assert len(forwards) == 2


def test_a_step_with_other_calls_each_time_is_not_modelled() -> None:
    model, x, count = network(), example(), itertools.count()
    modules = planned(model, x)

    def run() -> None:
        for _ in range(1 + next(count)):
            model(x).square().mean().backward()

    assert trace_step(run, modules, CPU) is None


def test_a_step_that_raises_raises_and_leaves_no_hooks() -> None:
    model, x, count = network(), example(), itertools.count()
    modules = planned(model, x)

    def run() -> None:
        if next(count) == 2:
            raise ArithmeticError("diverged")
        model(x).square().mean().backward()

    with pytest.raises(ArithmeticError, match="diverged"):
        trace_step(run, modules, CPU)
    assert not torch._C._autograd._profiler_enabled()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_report_has_the_modelled_step_beside_the_measured() -> None:
    model, x = network(), example()
    tilewise.optimize(model, x, planner=Promising())
    made = report(model).step
    assert made is not None
    assert made.modelled_torch_ms is not None
    assert made.modelled_planned_ms is not None
    assert made.modelled_planned_ms < made.modelled_torch_ms  # each plan promises to gain
    expected = f"expects {made.modelled_torch_ms:.4g} -> {made.modelled_planned_ms:.4g} ms"
    assert expected in str(report(model))
    assert made.to_json()["modelled_torch_ms"] == made.modelled_torch_ms


def test_beside_another_profiler_steps_are_compared_without_a_model() -> None:
    model, x = network(), example()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        tilewise.optimize(model, x, planner=Promising())
    made = report(model).step
    assert made is not None
    assert made.reason == ""
    assert made.modelled_torch_ms is None
    assert "modelled" not in str(made)


def on_gpu() -> list[Event]:
    """A profile of a GPU: two launches of a pass, one of another operator, a wait, and the gradient's launch."""
    return [
        Event("tilewise::step", 0.0, 20.0),
        Event("tilewise::begin 0", 1.0, 1.1), Event("aten::conv2d", 1.2, 3.0),
        Event("cudaLaunchKernel", 1.5, 1.6, launch=11), Event("cuLaunchKernelEx", 2.0, 2.1, launch=12),
        Event("tilewise::end 0", 3.0, 3.1),
        Event("cudaLaunchKernel", 4.0, 9.0, launch=13),  # it waited for room in the queue
        Event("cudaMemcpyAsync", 9.5, 9.6, launch=14), Event("cudaStreamSynchronize", 9.7, 12.0),
        Event("autograd::engine::evaluate_function: ConvolutionBackward0", 13.0, 15.0),
        Event("tilewise::begin 1", 13.1, 13.2), Event("cudaLaunchKernel", 14.0, 14.2, launch=15),
        Event("tilewise::end 1", 14.9, 15.0), Event("cudaGetDevice", 16.0, 16.1, launch=99),
        Event("conv", 2.0, 5.0, True, 11), Event("conv", 5.0, 6.0, True, 12), Event("relu", 9.0, 9.5, True, 13),
        Event("Memcpy DtoH", 9.7, 9.8, True, 14), Event("dgrad", 14.3, 18.0, True, 15),
        Event("tilewise::step", 2.0, 18.0, True, 0), Event("before", -2.0, -1.0, True, 3),
    ]  # fmt: skip


def test_launches_of_a_gpu_are_told_with_their_kernels() -> None:
    keys: Any = ([("forward", False)], [("dgrad", False), ("wgrad", False)])
    found = operators_of(on_gpu(), [keys], on_gpu=True)
    assert [(o.name, o.device_ms, o.waits, o.passes) for o in found] == [
        ("cudaLaunchKernel", pytest.approx(4.0), False, tuple(keys[0])),
        ("cudaLaunchKernel", pytest.approx(0.5), False, ()),
        ("cudaMemcpyAsync", pytest.approx(0.1), False, ()),
        ("cudaStreamSynchronize", 0.0, True, ()),
        ("cudaLaunchKernel", pytest.approx(3.7), False, tuple(keys[1])),
        ("end", 0.0, False, ()),
    ]
    assert [o.host_ms for o in found] == pytest.approx([2.1, 2.1, 5.4, 0.1, 2.2, 5.8])


def test_without_kernels_or_an_end_there_is_nothing_to_tell() -> None:
    keys: Any = ([], [])
    assert operators_of([e for e in on_gpu() if not e.on_device], [keys], on_gpu=True) == []
    assert operators_of(on_gpu()[1:], [keys], on_gpu=True) == []


def key(name: str) -> Any:
    return name, False


def step_model(host_ms: float, device_ms: float, costs: dict[str, tuple[float, float]]) -> StepModel:
    """A step in which each pass comes once, after an operator of the rest of the network."""
    operators = []
    for name in costs:
        operators += [Operator("rest", host_ms, device_ms / 2), Operator(name, host_ms, device_ms, passes=(key(name),))]
    return StepModel(Trace(tuple(operators)), {key(name): Cost(*cost) for name, cost in costs.items()})


def test_where_the_host_is_ahead_the_choice_is_that_of_the_gains() -> None:
    model = step_model(0.1, 4.0, {"a": (0.5, -2.0), "b": (0.5, -0.01), "c": (0.0, -1.0)})
    assert model.to_withhold() == frozenset()
    assert model.torch_ms == pytest.approx(0.1 + 3 * 6.0)
    assert model.step_ms({key("b")}) == pytest.approx(model.torch_ms - 3.0)


def test_what_does_not_reach_a_step_that_waits_for_the_host_stays_torchs() -> None:
    costs = {"a": (0.0, -0.05), "b": (0.3, -0.05), "c": (0.0, -20.0)}
    model = step_model(1.0, 0.2, costs)
    long = Operator("c", 0.1, 25.0, passes=(key("c"),))
    model = StepModel(Trace((*model.trace.operators, long)), model.costs)
    assert model.to_withhold() == {key("a"), key("b")}


def test_where_nothing_is_expected_to_gain_steps_decide() -> None:
    assert step_model(1.0, 0.2, {"a": (0.3, -0.05), "b": (0.3, -0.1)}).to_withhold() == frozenset()


def test_on_a_cpu_each_pass_that_gains_reaches_the_step() -> None:
    operators = Operator("rest", 3.0), Operator("a", 2.0, passes=(key("a"),)), Operator("b", 1.0, passes=(key("b"),))
    model = StepModel(Trace(operators), {key("a"): Cost(0.0, -1.5), key("b"): Cost(0.0, -4.0)})
    assert model.to_withhold() == frozenset()
    assert model.torch_ms == pytest.approx(6.0)
    assert model.step_ms(()) == pytest.approx(3.0 + 0.5)  # no pass takes less than nothing


def times(ms: float) -> Pairs:
    return Pairs((10.0,) * LEAST_PAIRS, (ms,) * LEAST_PAIRS)


@pytest.mark.parametrize("model_is_right", [True, False])
def test_the_search_begins_with_what_the_model_has_chosen(model_is_right: bool) -> None:
    gains = {key(name): 1.0 for name in "abcd"}
    start = frozenset({key("a"), key("b")})
    searching = search(gains, lambda _: 3, 6, start, lambda withheld: 4.0 - len(withheld))
    assert next(searching) == Asked(start, LEAST_PAIRS)
    assert searching.send(times(8.0)) == Asked(frozenset(), 6)
    if not model_is_right:  # without anything taken back it gains what it promises: it is timed by enough pairs
        assert searching.send(times(6.0)) == Asked(frozenset(), LEAST_PAIRS)
    with pytest.raises(StopIteration) as over:
        searching.send(times(9.0 if model_is_right else 6.0))
    assert over.value.value.withheld == (start if model_is_right else frozenset())


def test_a_goal_without_traced_modules_has_no_model() -> None:
    step = Step(nn.Linear(1, 1), [torch.zeros(1)], lambda _: None, training=True)
    assert StepGoal(step, planned(network(), example()))._modelled() is None
