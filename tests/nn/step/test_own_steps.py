"""A program's own step, given to ``optimize``: what it may do, and what becomes of one that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nn.test_step_goal import Promising, network
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn import report
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.step.pairs import LEAST_PAIRS
from tilewise.nn.step.result import StepReport


def example() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20, dtype=torch.float32, device="cpu")


def compared(model: nn.Module, step: Callable[[Any], object]) -> StepReport:
    """The report of the model's step after ``optimize``, which must have left its state and random numbers alone."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = example()
    state = torch.get_rng_state()
    tilewise.optimize(model, x, step=step, planner=Promising())
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    made = report(model).step
    assert made is not None
    return made


def is_any_planned(model: nn.Module) -> bool:
    return any(is_planned(module) for module in model.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.slow
def test_a_step_may_accumulate_gradients_of_several_batches() -> None:
    model, batches, stepped = network(), [example() for _ in range(3)], itertools.count()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(net: nn.Module) -> None:
        optimizer.zero_grad()
        for x in batches:
            (net(x).square().mean() / len(batches)).backward()
        optimizer.step()
        next(stepped)

    made = compared(model, step)
    assert made.reason == ""
    assert made.pairs >= LEAST_PAIRS
    assert next(stepped) >= 2 * LEAST_PAIRS
    assert is_any_planned(model) == made.kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_step_may_compute_activations_again(reentrant: bool) -> None:
    model, x = network(), example().requires_grad_()

    def step(net: Any) -> None:
        net.zero_grad()
        y = checkpoint(net[:4], x, use_reentrant=reentrant)
        net[4:](y).square().mean().backward()

    made = compared(model, step)
    assert made.reason == ""
    assert is_any_planned(model) == made.kept


def test_a_step_may_change_its_shapes() -> None:
    """Sizes that the example did not show run within the step, too."""
    model, sizes = network(), itertools.cycle([20, 14, 17])

    def step(net: nn.Module) -> None:
        net(torch.randn(1, 3, next(sizes), 20)).square().mean().backward()

    assert compared(model, step).reason == ""


def test_a_step_may_take_other_ways_by_its_data() -> None:
    """Which branch runs depends on a random number that is drawn in the step."""
    model, taken = network(), set()

    def step(net: Any) -> None:
        far = bool(torch.rand(()) > 0.5)
        taken.add(far)
        y = net(example())
        (y.square() if far else y.abs()).mean().backward()

    assert compared(model, step).reason == ""
    assert taken == {False, True}


def test_a_step_without_a_convolution_is_not_compared() -> None:
    model, stepped = nn.Sequential(nn.Flatten(), nn.Linear(1200, 2)), itertools.count()
    made = compared(model, lambda net: next(stepped))
    assert made.reason == "no pass runs by plan"
    assert next(stepped) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("at", [0, 7, 30])
def test_a_step_that_raises_leaves_torchs_layers_and_the_state(error: type[BaseException], at: int) -> None:
    model, x, counted = network(), example(), itertools.count()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()

    def step(net: nn.Module) -> None:
        if next(counted) == at:
            raise error("in the step")
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1.0)
        net(x).square().mean().backward()

    with pytest.raises(error):
        tilewise.optimize(model, x, step=step, planner=Promising())
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    if error is ZeroDivisionError:
        assert not is_any_planned(model)


def test_a_made_up_step_that_is_interrupted_is_an_interrupt() -> None:
    """Ctrl-C in the forward while steps are compared reaches the caller, and the model computes as before."""

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.calls = nn.Conv2d(3, 24, 5, padding=2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 12:
                raise KeyboardInterrupt
            y: torch.Tensor = self.conv(x)
            return y

    model, x = Interrupted(), example()
    with pytest.raises(KeyboardInterrupt):
        tilewise.optimize(model, x, planner=Promising())
    plain = torch.nn.functional.conv2d(x, model.conv.weight, model.conv.bias, padding=2)
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-4)
