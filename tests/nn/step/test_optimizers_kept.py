"""A step that holds an optimizer is timed, and training goes on as if it had not been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nn.test_step_goal import Promising, network
from torch import nn
from torch.optim import lr_scheduler

import tilewise
from tilewise.nn.step.step import Step

Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam, rates as tensors": lambda p: torch.optim.Adam(
        [{"params": p[:1]}, {"params": p[1:], "lr": torch.tensor(0.02, dtype=torch.float32, device="cpu")}],
        torch.tensor(0.01, dtype=torch.float32, device="cpu"),
    ),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=2),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        [3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    ),
}


class Program:
    """A training program, always the same: a model, a loss with a parameter of its own, an optimizer, a schedule."""

    def __init__(self, made: Made, scheduled: Callable[[torch.optim.Optimizer], Any], scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
        self.optimizer = made([*self.model.parameters(), self.weight])
        self.scheduler = scheduled(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=2)
        self.inputs = torch.randn(6, 4, dtype=torch.float32, device="cpu")

    def step(self, model: nn.Module) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            self.loss = (model(self.inputs) - 1).square().mean() * self.weight.square().sum()
            self.scaler.scale(self.loss).backward()
            return self.loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self.loss.detach())
        elif self.scheduler is not None:
            self.scheduler.step()

    def states(self) -> list[Any]:
        """Everything that training changes."""
        states = [self.model.state_dict(), self.weight, self.optimizer.state_dict(), self.scaler.state_dict()]
        return copy.deepcopy([*states, self.scheduler.state_dict() if self.scheduler is not None else None])


def assert_alike(got: Any, wanted: Any) -> None:
    """Equal in every bit, through dictionaries and lists."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert [*got] == [*wanted]
        for name in wanted:
            assert_alike(got[name], wanted[name])
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_alike(one, other)
    elif isinstance(wanted, lr_scheduler.LRScheduler):
        assert_alike(got.state_dict(), wanted.state_dict())
    else:
        assert got == wanted or callable(wanted)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("optimizer", "scheduler", "scaled"),
    [
        *((name, "none", False) for name in OPTIMIZERS),
        *(("adam", name, False) for name in SCHEDULERS if name != "none"),
        ("sgd", "steps", True),
    ],
)
def test_training_goes_on_as_if_no_step_had_been_timed(
    optimizer: str, scheduler: str, scaled: bool, before: int
) -> None:
    timed, twin = (Program(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], scaled) for _ in range(2))
    for program in (timed, twin):
        for _ in range(before):
            program.step(program.model)
    state = {p: dict(values) for p, values in timed.optimizer.state.items()}
    wanted = timed.states()
    step = Step(timed.model, [timed.inputs], timed.step, training=True)
    with step.repeatable():
        for _ in range(3):
            step()
        assert not torch.equal(timed.weight, wanted[1])
    assert_alike(timed.states(), wanted)
    assert timed.optimizer.state.keys() == state.keys()
    for p, values in state.items():
        kept = timed.optimizer.state[p]
        assert all(kept[name] is value for name, value in values.items() if isinstance(value, torch.Tensor))
    for program in (timed, twin):
        for _ in range(3):
            program.step(program.model)
    assert_alike(timed.states(), twin.states())


def test_what_belongs_to_another_model_is_left_alone() -> None:
    timed, other = (Program(OPTIMIZERS["adam"], SCHEDULERS["steps"]) for _ in range(2))

    def both(model: nn.Module) -> None:
        timed.step(model)
        other.step(other.model)

    step = Step(timed.model, [timed.inputs], both, training=True)
    with step.repeatable():
        step()
    assert not timed.optimizer.state
    assert other.optimizer.state
    assert other.scheduler.last_epoch == 1


def test_it_is_put_back_where_a_step_fails() -> None:
    timed = Program(OPTIMIZERS["adam"], SCHEDULERS["steps"])
    wanted = timed.states()

    def failing(model: nn.Module) -> None:
        timed.step(model)
        raise ZeroDivisionError

    step = Step(timed.model, [timed.inputs], failing, training=True)
    with pytest.raises(ZeroDivisionError), step.repeatable():
        step()
    assert_alike(timed.states(), wanted)


def test_what_did_not_change_is_not_written() -> None:
    timed = Program(OPTIMIZERS["adam"], SCHEDULERS["steps"])
    timed.step(timed.model)
    tensors = [value for values in timed.optimizer.state.values() for value in values.values()]
    versions = [tensor._version for tensor in tensors]
    with Step(timed.model, [timed.inputs], timed.step, training=True).repeatable():
        pass
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("limit", [None, pytest.param("64MiB", marks=pytest.mark.slow)])
def test_optimize_leaves_the_optimizer_as_it_was(limit: str | None) -> None:
    model = network()
    x = torch.randn(2, 3, 20, 20, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    ran = 0

    def step(net: nn.Module) -> None:
        nonlocal ran
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        ran += 1

    step(model)
    wanted = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict(), model.state_dict()])
    tilewise.optimize(model, x, step=step, planner=Promising(), memory_limit=limit)
    assert ran > 3
    assert_alike([optimizer.state_dict(), scheduler.state_dict(), model.state_dict()], wanted)
