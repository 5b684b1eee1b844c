"""Times of layer-passes and of training steps: what is measured and what is left as it was, never how fast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilewise.plan import Config, Plan
from tilewise.problems.conv.notation import parse_layer
from tilewise.report.layer_time import time_pass
from tilewise.report.network_time import time_training_steps
from tilewise.report.values import PassResult
from tilewise.solvers import baseline

ATEN = baseline(parse_layer("mb4ic3ih12oc8oh12kh3ph1"))
LAYER = "mb4ic3ih12oc8oh12kh3ph1"


def divided(problem) -> Plan:
    leaf = Plan("", ATEN.name, ATEN.version)
    return Plan(problem.key, "micro_batch", 1, Config(sizes=(2, 2)), (leaf,), (2,))


def test_both_sides_of_a_replaced_pass_are_timed():
    problem = parse_layer(LAYER)
    found = time_pass(PassResult(problem, divided(problem)), iterations=1)
    assert found.framework_ms is not None
    assert found.planned_ms is not None
    assert found.ratio == pytest.approx(found.framework_ms / found.planned_ms)


@pytest.mark.parametrize("plan", [None, Plan("", ATEN.name, ATEN.version)])
def test_only_the_framework_is_timed_where_nothing_replaces_it(plan):
    found = time_pass(PassResult(parse_layer(LAYER), plan), iterations=1)
    assert found.framework_ms is not None
    assert found.planned_ms is None


def test_padding_that_torchs_operator_does_not_take_has_no_framework_time():
    problem = parse_layer("mb4ic3ih12oc8oh12kh4")
    assert problem.axes[0].before != problem.axes[0].after
    found = time_pass(PassResult(problem), iterations=1)
    assert found.framework_ms is None


class Counting(nn.Module):
    """Counts its forwards and draws random numbers, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return nn.functional.dropout(self.conv(x))


def test_training_steps_of_both_sides_in_turns():
    plain, planned = Counting(), Counting()
    planned.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 8, 8)
    found = time_training_steps(plain, planned, x, lambda y: y.square().mean(), iterations=3)
    assert found.iterations == 3
    assert plain.forwards == planned.forwards == 4 + 3  # to warm up, twice for the peak, to count, and timed
    assert found.framework.loss == found.planned.loss
    assert found.framework.forward_ms > 0
    assert found.framework.backward_ms > 0
    assert all(p.grad is None for module in (plain, planned) for p in module.parameters())
