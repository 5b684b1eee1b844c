"""Solvers that are left out: no plan uses them, whole, as a part or inside another, and nothing forgets why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests import toys
from tests.planner.simulated import PROFILE, Clock, reasons, search, simulated, torchs_own, world
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.machine.device import environment
from tilewise.nn import report
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner, Schedule
from tilewise.planner.options import EXCLUDED
from tilewise.planner.processes.messages import Job
from tilewise.planner.remembered import plan_text
from tilewise.planner.schedules.follow import follow
from tilewise.wisdom import Wisdom, WisdomWarning

SMALL = toys.small(batch=8, channels=1, size=3)


def used(plan: Plan) -> set[str]:
    """The solvers of a plan, of its parts, and those that they compute with."""
    inner = {solvers.get(leaf.solver).computes_with(leaf.config) for leaf in plan.leaves()}
    return ({plan.solver, *(leaf.solver for leaf in plan.leaves())} | inner) - {""}


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    return Planner(Wisdom(tmp_path / "wisdom.sqlite3"))


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A fast algorithm, one of twice its time, and a torch between them."""
    clock = Clock()
    fast = simulated(
        clock, "fast", lambda p, c: 1.0 + 2.0 * p.batch, bytes=lambda p, c: 1024 * p.batch, accumulates=True
    )
    slow = simulated(clock, "slow", lambda p, c: 1.0 + 4.0 * p.batch, accumulates=True)
    with world(clock, torchs_own(clock, lambda p, c: 1.0 + 3.0 * p.batch), fast, slow):
        yield clock


def test_names_are_sorted_once_each() -> None:
    assert Options(exclude=["fft", "aten", "fft"]).exclude == ("aten", "fft")  # type: ignore[arg-type]
    assert Options(exclude=("fft", "aten")) == Options(exclude=("aten", "fft"))
    assert Options(exclude=("aten",)) != Options()


def test_a_name_that_stands_alone_is_told_how_to_be_given() -> None:
    with pytest.raises(ValueError, match=r"exclude='fft': \('fft',\) would do"):
        Options(exclude="fft")


@pytest.mark.parametrize("exclude", [("nonsense",), ("aten", "Aten"), ("",), (3,), "aten", 5, None, [["aten"]]])
def test_other_names_are_refused(exclude: Any) -> None:
    with pytest.raises(ValueError, match="exclude") as raised:
        Options(exclude=exclude)
    assert "aten" in str(raised.value)


@given(exclude=st.sets(st.sampled_from(["aten", "fast", "micro_batch", "slow"])), limited=st.booleans())
def test_no_plan_uses_what_is_left_out(exclude: set[str], limited: bool) -> None:
    clock = Clock()
    fast = simulated(
        clock, "fast", lambda p, c: 1.0 + 2.0 * p.batch, bytes=lambda p, c: 1024 * p.batch, accumulates=True
    )
    slow = simulated(clock, "slow", lambda p, c: 1.0 + 4.0 * p.batch, accumulates=True)
    with world(clock, torchs_own(clock, lambda p, c: 1.0 + 3.0 * p.batch), fast, slow):
        asked = {"exclude": tuple(exclude), "workspace": 4096 if limited else None}
        leaves = [name for name in ("fast", "aten", "slow") if name not in exclude]
        whole = [name for name in leaves if not (limited and name == "fast")]
        one = search(SMALL, **asked)
        if not whole and (not leaves or "micro_batch" in exclude):
            with pytest.raises(NoPlanError) as raised:
                one.best()
            for name in exclude:
                assert f"{name} : {EXCLUDED}" in str(raised.value)
            assert search(SMALL, **asked).front() == ()
            return
        plan = one.best()
        assert not used(plan) & exclude
        in_parts = limited and "fast" in leaves and "micro_batch" not in exclude
        assert plan.solver == ("micro_batch" if in_parts else whole[0])
        told = reasons(one.log)
        assert all(told[name] == EXCLUDED for name in exclude)
        front = search(SMALL, **asked).front()
        assert front
        assert not any(used(point) & exclude for point in front)


def test_a_front_without_a_solver_is_never_taken_for_a_full_one(clock: Clock, tmp_path: Path) -> None:
    """Nor the other way round, in this process or from wisdom in the next one."""
    path = tmp_path / "wisdom.sqlite3"
    Wisdom(path).remember_profile(environment("cpu").key, PROFILE)
    for _ in range(2):
        one = Planner(Wisdom(path))
        for exclude in ((), ("fast",), ("aten", "fast"), ("aten",)):
            best = next(name for name in ("fast", "aten", "slow") if name not in exclude)
            assert one.plan(SMALL, Options(exclude=exclude)).solver == best
            assert one.front(SMALL, Options(exclude=exclude))[0].solver == best
    with pytest.raises(NoPlanError, match="no wisdom"):
        one.plan(SMALL, Options(rigor="wisdom_only", exclude=("slow",)))


@pytest.mark.parametrize("own", [True, False], ids=["by this user", "by somebody else"])
def test_a_remembered_plan_with_a_solver_that_is_left_out_is_not_used(clock: Clock, tmp_path: Path, own: bool) -> None:
    """Whoever wrote it down under such constraints."""
    path = tmp_path / "wisdom.sqlite3"
    wisdom = Wisdom(path)
    wisdom.remember_profile(environment("cpu").key, PROFILE)
    plan = Planner(wisdom).plan(SMALL)
    assert plan.solver == "fast"
    options = Options(exclude=("fast",))
    wisdom.remember(environment("cpu").key, SMALL.key, plan_text(options), plan, own=own)
    said = contextlib.nullcontext() if own else pytest.warns(WisdomWarning, match="left out by exclude")
    with said:
        assert Planner(Wisdom(path)).plan(SMALL, options).solver == "aten"


def test_options_pass_through_json(clock: Clock) -> None:
    job = Job(SMALL, Options(exclude=("slow", "fast")))
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    schedule = Schedule("net", "cpu", "device=cpu", job.options, 8, "fp32", "ieee", "contiguous", ())
    assert Schedule.from_json(schedule.to_json()).options == job.options
    document = json.loads(json.dumps(schedule.to_json()))
    assert Schedule.from_json(document).options == job.options
    del document["options"]["exclude"]  # as earlier versions wrote it
    assert Schedule.from_json(document).options == Options()


@pytest.mark.parametrize("exclude", [["nonsense"], "fast", [["fast"]], None, {}])
def test_schedules_that_leave_out_what_there_is_not_are_refused(clock: Clock, exclude: object) -> None:
    schedule = Schedule("net", "cpu", "device=cpu", Options(), 8, "fp32", "ieee", "contiguous", ())
    document = schedule.to_json()
    document["options"]["exclude"] = exclude
    with pytest.raises(tilewise.ScheduleError, match="exclude"):
        Schedule.from_json(document)


def test_a_schedules_plan_is_held_to_it(planner: Planner) -> None:
    """A document that says one thing and does another."""
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    tilewise.optimize(model, x, planner=planner, rigor="estimate", exclude=("winograd", "fused_lowering"))
    made = tilewise.schedule(model)
    assert made.options.exclude == ("fused_lowering", "winograd")
    for problem, entry in made.kernels.items():
        assert entry.plan is not None
        assert follow(made, problem, made.options, planner).plan is not None
        found = follow(made, problem, replace(made.options, exclude=(entry.plan.solver,)), planner)
        assert found.plan is None
        assert EXCLUDED in found.note


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_torchs_choice_every_pass_is_planned(planner: Planner, dtype: torch.dtype) -> None:
    model, x = nn.Conv2d(4, 6, 3, padding=1).to(dtype), torch.randn(2, 4, 9, 9, dtype=dtype)
    tilewise.optimize(model, x, planner=planner, rigor="estimate", exclude=("aten",))
    for _, _, one in report(model).passes():
        assert one.replaced, one
        assert one.plan is not None
        assert "aten" not in used(one.plan)


def test_a_solver_left_out_is_not_used_inside_another(planner: Planner) -> None:
    problem = toys.small(dtype="bf16")
    tried = planner.explain(problem, Options(rigor="estimate", exclude=("winograd",)))
    inner = [m for m in tried if solvers.get(m.solver).computes_with(m.config) == "winograd"]
    assert inner
    assert all(m.reason == EXCLUDED for m in inner)
    assert not any(m.reason == EXCLUDED for m in tried if m not in inner and m.solver != "winograd")


@pytest.mark.parametrize("workspace", [None, "64MiB"])
def test_what_no_other_solver_solves_stays_torchs(planner: Planner, workspace: str | None) -> None:
    names = [solver.name for solver in solvers.all_solvers() if solver.name not in ("widened", "gemm")]
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    want = model(x)
    tilewise.optimize(model, x, planner=planner, rigor="estimate", exclude=names, workspace=workspace)
    assert "forward" not in model.__dict__
    assert torch.equal(model(x), want)
    for _, _, one in report(model).passes():
        assert one.plan is None
        assert f"aten : {EXCLUDED}" in one.reason
        assert "gemm" in one.reason
    assert f"no solver but aten, {EXCLUDED}, can compute it" in str(report(model))


def test_a_limit_that_torch_breaks_too_is_an_error(planner: Planner) -> None:
    """Leaving such a layer to torch would take more than the caller allows."""
    clock = Clock()
    own = torchs_own(clock, lambda p, c: 3.0, bytes=lambda p, c: 1 << 20)
    big = simulated(clock, "big", lambda p, c: 2.0, bytes=lambda p, c: 1 << 20)
    with world(clock, own, big):
        planner.wisdom.remember_profile(environment("cpu").key, PROFILE)
        model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
        with pytest.raises(NoPlanError, match=EXCLUDED):
            tilewise.optimize(model, x, planner=planner, workspace=4096, exclude=("aten",))


def test_enabled_takes_it_and_its_variable(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    with tilewise.enabled(wait=True, planner=planner, rigor="estimate", exclude=("aten",)) as session:
        results = [F.conv2d(x, w) for _ in range(3)]
    (found,) = [one for _, _, one in session.report().passes()]
    assert found.replaced
    for y in results:
        torch.testing.assert_close(y, results[0])
    monkeypatch.setenv("TILEWISE_EXCLUDE", "fft, aten")
    assert tilewise.enabled().plan_table.options.exclude == ("aten", "fft")
    assert tilewise.enabled(exclude=()).plan_table.options.exclude == ()
    monkeypatch.setenv("TILEWISE_EXCLUDE", "nonsense")
    with pytest.raises(ValueError, match=r"TILEWISE_EXCLUDE='nonsense': exclude: 'nonsense' is no solver; .*aten"):
        tilewise.enabled()
    with pytest.raises(ValueError, match="exclude"):
        tilewise.enabled(exclude=("nonsense",))
