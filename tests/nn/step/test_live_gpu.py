"""Steps of a program on a GPU are compared by events in its stream."""

from __future__ import annotations

import time

import pytest
import torch
from tests import toys
from tests.nn.step.test_live_models import Promising, Slow
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.kinds import is_planned

pytestmark = pytest.mark.gpu
HOST_S = 5e-3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)).to("cuda")


def test_what_the_host_takes_counts_and_slow_plans_are_taken_back() -> None:
    x = torch.randn(2, 4, 16, 16, dtype=torch.float32, device="cuda")
    model = network()
    with toys.installed(Slow()):
        tilewise.optimize(model, x, wait=False, planner=Promising())
        tilewise.wait(model)
        for _ in range(600):
            model.zero_grad()
            model(x).square().mean().backward()
            time.sleep(HOST_S)
            made = report(model).step
            assert made is not None
            if not made.pending:
                break
    assert not made.kept, str(made)
    assert made.torch_ms is not None
    assert made.torch_ms >= 1e3 * HOST_S
    assert not is_planned(model[0])
