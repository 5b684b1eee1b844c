"""Filters that are kept in the layers of models, frozen or not, and by the plans that say so."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.execute.kept_filters import FFT, LAYERS, frozen
from torch import nn

import tilewise
from tilewise.plan import Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.options import Options
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get


class ByTransform(Planner):
    """Plans every forward pass by the transforms, however fast they are; the gradients stay torch's."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        if problem.pass_ is not Pass.FPROP:
            return Plan(problem.key, "aten", get("aten").version)
        found = Measurement(FFT.name, FFT.version, next(iter(FFT.configs(problem))), 1.0, 0)
        return leaf_plan(problem, found)


def test_a_plan_says_what_it_keeps() -> None:
    p = LAYERS["dense"]
    plan = ByTransform().plan(p)
    assert plan.constant == FFT.constant(p, plan.config) + p.nbytes("w") > p.nbytes("w")
    assert ByTransform().plan(frozen(p)).constant == FFT.constant(p, plan.config)
    assert ByTransform().plan(replace(p, constant_weight=False)).constant == 0
    assert Plan.from_json(plan.to_json()).constant == plan.constant


@pytest.mark.parametrize("frozen", [False, True])
def test_inference_keeps_what_training_does_not(frozen: bool, prepared: list[object]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(16, 16, 15, padding=7, groups=16)).eval()
    x = torch.randn(2, 16, 24, 24)
    weight = model[0].weight
    tilewise.optimize(model, x, training=False, frozen=frozen, regions=False, planner=ByTransform())
    prepared.clear()
    with torch.no_grad():
        want = copy.deepcopy(model)
        tilewise.restore(want)
        for _ in range(3):
            torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-4)
        assert len(prepared) == 1
        weight.mul_(3)
        want[0].weight.mul_(3)
        torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-4)
    # Training it all the same is right, too.
    model(x).square().sum().backward()
    want(x).square().sum().backward()
    torch.testing.assert_close(weight.grad, want[0].weight.grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        weight -= 1e-3 * weight.grad
        torch.testing.assert_close(
            model(x), torch.conv2d(x, weight, model[0].bias, padding=7, groups=16), rtol=1e-4, atol=1e-4
        )


def test_adapters_may_be_merged_and_averages_swapped_in() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2)).eval()
    x = torch.randn(2, 8, 16, 16)
    tilewise.optimize(model, x, training=False, planner=ByTransform())
    plain = tilewise.restore(copy.deepcopy(model))
    averages = [torch.randn_like(p) for p in plain.parameters()]

    def merge(one: nn.Sequential) -> None:
        one[0].weight.data += 0.25

    def swap_in(one: nn.Sequential) -> None:
        for parameter, average in zip(one.parameters(), averages, strict=True):
            parameter.data = average

    def edit_average(one: nn.Sequential) -> None:
        averages[2].numpy()[0, 0, 0, 0] = 7 if one is model else averages[2][0, 0, 0, 0]

    with torch.no_grad():
        for change in (merge, swap_in, edit_average, merge):
            for one in (model, plain):
                change(one)
            want = plain(x)
            # A transform rounds by the largest of its operands; a stale filter would be off by far more.
            torch.testing.assert_close(model(x), want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_weights_that_are_trained_cannot_be_frozen() -> None:
    with pytest.raises(ValueError, match="frozen=True: training changes weights"):
        tilewise.optimize(nn.Conv2d(4, 4, 3), torch.randn(1, 4, 8, 8), frozen=True)
