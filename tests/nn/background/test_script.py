"""Programs that stay as they are, planned in the background."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.nn.background.test_training import Clock, InPieces, Network, example, step
from tests.nn.dividing import assert_same

import tilewise
from tilewise.nn.background import service as service_module
from tilewise.nn.background.service import Service
from tilewise.nn.step.result import StepReport
from tilewise.settings import Settings


@pytest.fixture(autouse=True)
def _own_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = Service(Clock())
    monkeypatch.setattr(service_module, "_service", own)
    yield
    own.stop()


def test_a_recorded_step_is_planned_between_the_next_ones() -> None:
    model, planner, x = Network(), InPieces(), example()
    plain, losses = copy.deepcopy(model), []
    with tilewise.enabled(planner=planner, wait=False, background_share=0.25) as session:
        losses = [step(model, x) for _ in range(2)]
        assert session.report().pending == 5
        done = [0]
        for _ in range(60):
            losses.append(step(model, x))
            done.append(5 - session.report().pending)
    assert done == sorted(done)
    assert done[-1] == 5
    assert set(done) & {1, 2, 3, 4}
    assert all(planner.behind)
    assert {p.plan.solver for _, _, p in session.report().passes() if p.plan} == {"micro_batch"}
    for loss in losses:
        assert_same(loss, step(plain, x))


def test_nothing_changes_before_the_backward_of_a_step() -> None:
    model, planner, x = Network(), InPieces(1), example()
    with tilewise.enabled(planner=planner, wait=False, background_share=0.25) as session:
        step(model, x)
        outputs = []
        for _ in range(10):
            Clock.now += 1e-2
            outputs.append(model(x))
        count = len(planner.behind)
        assert count <= 3  # a turn before the first of them
        with pytest.raises(RuntimeError, match="call it after backward"):
            session.wait()
        torch.stack(outputs).sum().backward()
        session.wait()
        assert session.report().pending == 0


def test_evaluation_has_steps_too() -> None:
    model, planner, x = Network(), InPieces(), example()
    with torch.no_grad(), tilewise.enabled(planner=planner, wait=False, background_share=0.25) as session:
        want = model(x)
        for _ in range(40):
            Clock.now += 1e-2
            assert_same(model(x), want)
    assert session.report().pending == 0
    assert len(planner.planned) == 2


def test_planning_is_in_the_background_unless_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tilewise.enabled().work is not None
    assert tilewise.enabled(settings=Settings()).work is not None
    assert tilewise.enabled(settings=Settings(wait=True)).work is None
    assert tilewise.enabled(wait=True).work is None
    monkeypatch.setenv("TILEWISE_WAIT", "1")
    assert tilewise.enabled().work is None
    assert tilewise.enabled(wait=False).work is not None


def test_variables_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_WAIT", "0")
    monkeypatch.setenv("TILEWISE_BACKGROUND_SHARE", "0.1")
    work = tilewise.enabled().work
    assert work is not None
    assert work.share == 0.1
    monkeypatch.setenv("TILEWISE_BACKGROUND_SHARE", "2")
    with pytest.raises(ValueError, match="TILEWISE_BACKGROUND_SHARE='2': a number above 0"):
        tilewise.enabled()
    monkeypatch.delenv("TILEWISE_BACKGROUND_SHARE")
    monkeypatch.setenv("TILEWISE_GOAL", "passes")
    assert tilewise.enabled().report().step == StepReport(reason="goal='passes'")
    monkeypatch.setenv("TILEWISE_GOAL", "speed")
    with pytest.raises(ValueError, match="TILEWISE_GOAL='speed'"):
        tilewise.enabled()
