"""Models that are planned in the background: their programs' own steps are compared, and what wins is kept."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from tests import toys
from tests.nn.dividing import assert_same
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.nn import report
from tilewise.nn.background import service as service_module
from tilewise.nn.background.service import Service, service
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.notices.channel import LOGGER
from tilewise.nn.step.result import StepReport
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.settings import Settings

SLOW_S, EXTRA_S = 2e-3, 1e-2
"""What each call of the slow solver takes at least, and what a program takes longer that runs by torch."""


class Clock:
    """A clock that only :func:`late` and looks at it move on, so that a busy machine changes nothing.

    Where it is not set, in processes of their own, time is real.
    """

    now: ClassVar[float | None] = None

    @classmethod
    def look(cls, *_: object) -> float:
        assert cls.now is not None
        cls.now += 1e-3
        return cls.now


def late(seconds: float) -> None:
    """Take so long."""
    if Clock.now is None:
        time.sleep(seconds)
    else:
        Clock.now += seconds


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what :func:`late` says."""
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr("tilewise.nn.step.live.moment", Clock.look)


class Slow(toys.Plain):
    """As torch computes it, but late."""

    name, version = "slow", 1

    def compute(self, p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        late(SLOW_S)
        return super().compute(p, a, b)


class Promising(Planner):
    """Plans everything by ``solver``, which promises to take half of torch's time."""

    def __init__(self, solver: str = "slow") -> None:
        super().__init__()
        self.solver = solver

    def plan(self, problem: Any, options: Options | None = None) -> Plan:
        solver = solvers.get(self.solver)
        config = next(iter(solver.configs(problem)), Config())
        workspace = solver.workspace(problem, config)
        return Plan(problem.key, solver.name, solver.version, config, time_ms=1.0, workspace=workspace)

    def torch_ms(self, problems: Any) -> dict[Any, float]:
        return dict.fromkeys(problems, 2.0)


@pytest.fixture(autouse=True)
def _solvers_and_service(monkeypatch: pytest.MonkeyPatch, own_clock: None) -> Iterator[None]:
    """The slow solver, one thread, and a service of the test's own whose turns are long."""
    own = Service()
    monkeypatch.setattr(service_module, "_service", own)
    with toys.installed(Slow()), toys.one_thread():
        yield
    own.stop()


class Network(nn.Module):
    """Takes ``EXTRA_S`` longer while a layer runs by torch, where that is asked for."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3), late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late and not is_planned(self.first):
            late(EXTRA_S)
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return y


def example(size: int = 8) -> torch.Tensor:
    return torch.randn(2, 2, size, size, dtype=torch.float32, device="cpu")


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.01 * p.grad
            p.grad = None
    return loss.detach()


def begun(model: nn.Module, x: torch.Tensor, solver: str = "slow", **options: Any) -> nn.Module:
    """The model with all its plans in place, and its steps still to be compared."""
    tilewise.optimize(model, x, planner=Promising(solver), wait=False, **options)
    tilewise.wait(model)
    return model


def of_step(model: nn.Module) -> StepReport:
    made = report(model).step
    assert made is not None
    return made


def trained(model: nn.Module, x: torch.Tensor, most: int = 1200) -> int:
    """Steps until it is decided."""
    for count in range(most):
        if not of_step(model).pending:
            return count
        step(model, x)
    raise AssertionError(f"nothing was decided: {of_step(model)}")


def switched(model: Network, x: torch.Tensor) -> None:
    """Train until a step of torch's is due among the planned ones."""
    while is_planned(model.first):
        step(model, x)
    assert of_step(model).pending


def test_plans_that_are_slow_in_the_step_are_taken_back() -> None:
    x, model = example(), Network()
    plain = copy.deepcopy(model)
    begun(model, x)
    assert is_planned(model.first)
    assert of_step(model).pending
    assert "still to be compared" in str(report(model))
    while of_step(model).pending:
        assert_same(step(model, x), step(plain, x))
    made = of_step(model)
    assert not made.kept
    assert made.speedup is not None
    assert made.speedup < 0.9
    assert "torch's stays" in str(report(model))
    assert not is_planned(model.first)
    assert not is_planned(model.second)
    assert {p.note for _, _, p in report(model).passes()} == {"taken back: the step is not faster with it"}
    assert_same(step(model, x), step(plain, x))


def test_plans_that_gain_are_kept_and_nothing_is_watched_afterwards() -> None:
    x, model = example(), Network(late=True)
    begun(model, x, "lowering_type1")
    trained(model, x)
    made = of_step(model)
    assert made.kept
    assert made.least is not None
    assert made.least > 1.0
    assert is_planned(model.first)
    graphs = service().graphs._count
    for _ in range(30):
        step(model, x)
        assert is_planned(model.first)
    assert service().graphs._count == graphs


def test_one_line_says_it_where_nobody_else_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: False)  # those of pytest
    x, model = example(), Network()
    begun(model, x)
    trained(model, x)
    assert capsys.readouterr().err == ""  # a planner was given
    monkeypatch.setattr("tilewise.nn.layers.plan_table.Planner", lambda progress: Promising())
    model = Network()
    tilewise.optimize(model, x, wait=False)
    first = capsys.readouterr().err
    assert first.startswith("tilewise: ")
    assert "are planned in the background, between the program's steps; tilewise.summary(model)" in first
    tilewise.wait(model)
    assert capsys.readouterr().err == ""
    trained(model, x)
    assert capsys.readouterr().err == f"tilewise: {of_step(model)}\n"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"goal": "passes"}, "goal='passes'"),
        ({"workspace": "64MiB"}, "torch's own step need not keep workspace="),
        ({"deterministic": True}, "torch's own step need not keep deterministic=True"),
        ({"rigor": "estimate"}, "rigor='estimate' measures nothing"),
    ],
)
def test_what_is_not_compared_says_why(option: dict[str, Any], reason: str) -> None:
    x, model = example(), Network()
    begun(model, x, "lowering_type1", **option)
    for _ in range(20):
        step(model, x)
        assert is_planned(model.first)
    assert reason in of_step(model).reason
    assert not of_step(model).pending


def test_an_evaluation_in_the_middle_runs_by_plans_and_changes_nothing() -> None:
    x, model = example(), Network(late=True)
    begun(model, x, "lowering_type1")
    switched(model, x)
    with torch.no_grad():
        for _ in range(6):
            model(x)
        assert is_planned(model.first)
        for _ in range(6):
            model(x)
            assert is_planned(model.first)
    trained(model, x)
    assert of_step(model).kept


def test_layers_stay_while_a_graph_is_alive_or_a_step_has_failed() -> None:
    x, model = example(), Network()
    begun(model, x)
    switched(model, x)
    outputs = [model(x) for _ in range(12)]
    assert not is_planned(model.first)
    torch.stack(outputs).sum().backward()
    for p in model.parameters():
        p.grad = None
    for index in range(300):
        if not of_step(model).pending:
            break
        if index % 5 == 0:
            with pytest.raises(RuntimeError, match="channels"):
                model(x.transpose(0, 1).repeat(1, 2, 1, 1))
        step(model, x)
    assert not of_step(model).kept


def test_steps_of_ever_changing_shapes_leave_the_choice_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.nn.step.course.MOST_STEPS", 30)
    model = Network()
    begun(model, example(), unplanned="torch")
    for size in range(8, 50):
        step(model, example(size))
    assert "too irregular" in of_step(model).reason
    assert is_planned(model.first)


def test_another_thread_changes_nothing() -> None:
    """It evaluates the model meanwhile, and its forwards are no steps."""
    x, model = example(), Network(late=True)
    begun(model, x, "lowering_type1")
    want = copy.deepcopy(model)
    tilewise.restore(want)
    stop = threading.Event()
    wrong: list[str] = []

    def evaluate() -> None:
        other = copy.deepcopy(want)
        while not stop.is_set():
            with torch.no_grad():
                got, plain = model(x * 0), other(x * 0)
                if got.shape != plain.shape:
                    wrong.append(f"{got.shape}")

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        trained(model, x)
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    assert not of_step(model).pending


def test_restore_wait_copies_and_a_new_plan_in_the_middle() -> None:
    x, model = example(), Network()
    plain = copy.deepcopy(model)
    begun(model, x)
    switched(model, x)
    twin = copy.deepcopy(model)
    tilewise.wait(model)
    assert is_planned(model.first)
    switched(model, x)
    tilewise.optimize(model, x, planner=Promising("lowering_type1"), goal="passes")
    assert is_planned(model.first)
    assert of_step(model).reason == "goal='passes'"
    begun(model, x)
    switched(model, x)
    tilewise.restore(model)
    for _ in range(20):
        step(model, x)
        assert not is_planned(model.first)
    assert "forward" not in model.__dict__
    assert_same(twin(x), copy.deepcopy(twin)(x))
    model.load_state_dict(plain.state_dict())
    assert_same(step(model, x), step(plain, x))


def test_a_forward_that_is_set_meanwhile_stays() -> None:
    x, model = example(), Network()
    begun(model, x)
    switched(model, x)
    own = type(model.first).forward.__get__(model.first)
    model.first.forward = own  # type: ignore[method-assign]
    for _ in range(200):
        step(model, x)
        assert model.first.forward is own
    assert not of_step(model).pending


def test_a_model_that_is_gone_in_the_middle_lets_the_next_one_go_on() -> None:
    x, model = example(), Network()
    begun(model, x)
    switched(model, x)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    other = begun(Network(), x)
    trained(other, x)
    assert not of_step(other).kept


def test_a_model_whose_steps_are_not_seen_is_not_compared() -> None:
    model = begun(nn.Conv2d(2, 3, 3), example())
    assert "its steps are not seen: it is a layer itself" in of_step(model).reason
    assert is_planned(model)


def test_planning_comes_first_and_the_comparison_after_it() -> None:
    x, model = example(), Network()
    tilewise.optimize(model, x, planner=Promising(), settings=Settings(wait=False, background_share=1.0))
    assert report(model).pending
    assert of_step(model) == StepReport(reason="still to be compared, once all is planned", pending=True)
    trained(model, x)
    assert not report(model).pending
    assert not of_step(model).kept
