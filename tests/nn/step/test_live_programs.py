"""Programs that stay as they are: their steps are compared while planning is enabled, and what wins is kept."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import assert_same
from tests.nn.step.test_live_models import (
    EXTRA_S,
    Promising,
    _solvers_and_service,
    example,
    late,
    own_clock,
    step,
)
from tests.sampling import EVERY
from torch import nn

import tilewise
from tilewise.nn.script.session import Session
from tilewise.nn.step.live import LiveGoal
from tilewise.nn.step.result import StepReport

__all__ = ["_solvers_and_service", "own_clock"]
ROOT = Path(__file__).parents[3]


def planned(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__.startswith("PlannedConv")


class Network(nn.Module):
    """Takes ``EXTRA_S`` longer while it is computed by torch, where that is asked for."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3), late
        self.ways: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.training:
            self.ways.append(planned(y))
        if self.late and not planned(y):
            late(EXTRA_S)
        out: torch.Tensor = self.second(torch.relu(y))
        return out


class ByTorch(nn.Module):
    """A convolution by the function that stays torch's own."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, self.weight, self.bias)


def of_step(session: Session) -> StepReport:
    made = session.report().step
    assert made is not None
    return made


def trained(session: Session, model: nn.Module, x: torch.Tensor, most: int = 1200) -> None:
    """Train until it is decided."""
    for _ in range(most):
        if not of_step(session).pending:
            return
        step(model, x)
    raise AssertionError(f"nothing was decided: {of_step(session)}")


@pytest.mark.parametrize("wait", [True, False] if EVERY else [True])
def test_plans_that_are_slow_in_the_step_are_taken_back(wait: bool) -> None:
    x, model = example(), Network()
    plain = copy.deepcopy(model)
    plain.first, plain.second = (ByTorch(each) for each in (plain.first, plain.second))  # type: ignore[assignment]
    with tilewise.enabled(planner=Promising(), wait=wait) as session:
        for _ in range(3):
            assert_same(step(model, x), step(plain, x))
        session.wait()
        while of_step(session).pending:
            assert_same(step(model, x), step(plain, x))
            assert len(model.ways) < 500
        made = of_step(session)
        assert not made.kept
        assert made.speedup is not None
        assert made.speedup < 0.9
        assert True in model.ways
        assert "torch's stays" in str(session)
        assert not planned(F.conv2d(x, model.first.weight, model.first.bias))
        assert {p.note for _, _, p in session.report().passes()} == {"taken back: the step is not faster with it"}
        assert not session.watched


@pytest.mark.parametrize("wait", [False, True] if EVERY else [False])
def test_plans_that_gain_are_kept_and_nothing_is_watched_afterwards(wait: bool) -> None:
    x, model = example(), Network(late=True)
    with tilewise.enabled(planner=Promising("lowering_type1"), wait=wait) as session:
        for _ in range(3):
            step(model, x)
        session.wait()
        trained(session, model, x)
        made = of_step(session)
        assert made.kept
        assert made.least is not None
        assert made.least > 1.0
        assert False in model.ways[4:]
        assert not session.watched
        step(model, x)
        assert model.ways[-1]


def test_an_evaluation_between_epochs_is_no_step_that_counts() -> None:
    x, model = example(), Network(late=True)
    with tilewise.enabled(planner=Promising("lowering_type1"), wait=True) as session:
        for _ in range(40):
            for _ in range(7):
                step(model, x)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(x)
                    late(2e-3)
            model.train()
            if not of_step(session).pending and not session.watched:
                break
    assert of_step(session).kept
    assert model.ways[-1]


def test_steps_with_a_frozen_beginning_and_two_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers and second inputs are outside of any graph, but no step begins with them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)).requires_grad_(False)
            self.left, self.right = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.left(self.frozen(x)) + self.right(self.frozen(x * 2))
            return y

    seen: list[bool] = []
    take = LiveGoal._take
    monkeypatch.setattr(LiveGoal, "_take", lambda self, *step: [seen.append(True), take(self, *step)])
    x, model = example(10), Two()
    trainable = nn.ModuleList([model.left, model.right])
    with tilewise.enabled(planner=Promising(), wait=True) as session:
        for _ in range(1200):
            before = len(seen)
            model(x).square().mean().backward()
            trainable.zero_grad()
            assert len(seen) <= before + 1
            if session.plan_table.calls and not of_step(session).pending:
                break
    assert len(seen) > 40
    assert not of_step(session).kept


def test_a_step_that_raises_and_a_block_that_is_left_and_entered_again() -> None:
    x, model = example(), Network(late=True)
    session = tilewise.enabled(planner=Promising("lowering_type1"), wait=True)
    for index in range(1200):
        with session:
            step(model, x)
        if index % 9 == 4:
            with pytest.raises(RuntimeError), session:
                F.conv2d(x, model.second.weight)
        if index > 3 and not of_step(session).pending:
            break
    assert of_step(session).kept


def test_nothing_changes_while_a_graph_is_alive() -> None:
    x, model = example(), Network()
    with tilewise.enabled(planner=Promising(), wait=True) as session:
        while not (len(model.ways) > 4 and model.ways[-2:] == [True, False]):
            step(model, x)
        outputs = [model(x) for _ in range(12)]
        assert not any(map(planned, outputs))
        assert not any(model.ways[-12:])
        torch.stack(outputs).sum().backward()
        model.zero_grad()
        session.wait()  # and plans run
        model(x).sum().backward()
        assert model.ways[-1]


def test_shapes_that_come_later_are_compared_by_their_own_steps() -> None:
    small, large, model = example(), example(12), Network(late=True)
    with tilewise.enabled(planner=Promising("lowering_type1"), wait=True) as session:
        for _ in range(3):
            step(model, small)
        trained(session, model, small)
        assert of_step(session).kept
        session.plan_table.planner.solver = "slow"  # type: ignore[attr-defined]
        model.late = False
        for _ in range(1200):
            step(model, large)
            if len(session.plan_table.calls) > 2 and not session.watched:
                break
        assert not model.ways[-1]
        step(model, small)
        assert model.ways[-1]
        assert of_step(session).kept  # of the first steps


def test_calls_of_another_thread_are_no_steps() -> None:
    """It evaluates the same layers meanwhile, by whatever runs them at the moment."""
    x, model = example(), Network(late=True)
    other = copy.deepcopy(model).eval()
    want = torch.conv2d(x, other.first.weight, other.first.bias)
    stop = threading.Event()
    wrong: list[float] = []

    def evaluate() -> None:
        while not stop.is_set():
            with torch.no_grad():
                wrong.append(float((F.conv2d(x, other.first.weight, other.first.bias) - want).abs().max()))
            time.sleep(1e-3)

    with tilewise.enabled(planner=Promising("lowering_type1"), wait=True) as session:
        for _ in range(3):
            step(model, x)
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            trained(session, model, x)
        finally:
            stop.set()
            thread.join()
    assert of_step(session).kept
    assert len(wrong) > 20
    assert max(wrong) < 1e-4


def test_what_is_not_compared_says_why() -> None:
    x, model = example(), Network()
    with tilewise.enabled(planner=Promising("lowering_type1"), wait=True, workspace="64MiB") as session:
        for _ in range(20):
            step(model, x)
    assert "torch's own step need not keep workspace=" in of_step(session).reason
    assert all(model.ways[1:])
    assert not session.watched


PROGRAM = """
import torch
from torch import nn
from tests import toys
from tests.nn.step.test_live_models import Promising, Slow
import tilewise

torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3))
x = torch.randn(2, 2, 8, 8, dtype=torch.float32, device="cpu")
tilewise.nn.script.session.Planner = lambda progress: Promising()
with toys.installed(Slow()):
    session = tilewise.enable(wait={wait}, background_share=1.0)
    for index in range({steps}):
        model(x).square().mean().backward()
        model.zero_grad()
    print(session.report().step.pending, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "pending"), [(30, "True"), (300, "False")] if EVERY else [(30, "True")])
def test_a_process_that_ends_after_the_decision_or_in_the_middle(tmp_path: Path, steps: int, pending: str) -> None:
    program = PROGRAM.format(wait=True, steps=steps)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [pending]), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tilewise: step")]
    assert len(lines) == (pending == "False")
    assert all("plans are not surely faster" in line for line in lines)
