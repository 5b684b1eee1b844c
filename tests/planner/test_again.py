"""What was measured on a busy host is measured again: on a quiet one, once, and never where nothing may be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests import toys
from tests.planner.simulated import PROFILE, Clock, simulated, torchs_own, world

from tilewise.machine import load
from tilewise.machine.device import environment
from tilewise.plan import Config, Measurement, device_of
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.caches.again import Again
from tilewise.planner.planner import settle
from tilewise.planner.search.trial import Trial
from tilewise.wisdom import Wisdom

SMALL = toys.small()
BUSY, QUIET = 0.6, 0.01
UNDIVIDED = Options(batch_sizes="undivided")


class Machine:
    """A host whose load is set by hand, and how long the plans on it take."""

    def __init__(self) -> None:
        self.load: float | None = BUSY
        self.fft_ms, self.own_ms = 9.0, 10.0
        self.clock = Clock()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Here torch's own choice takes ``own_ms`` and ``fft`` takes ``fft_ms``."""
    machine = Machine()
    monkeypatch.setattr(load, "others_since", lambda moment: machine.load)
    monkeypatch.setattr(load, "others_now", lambda: machine.load)
    own = torchs_own(machine.clock, lambda p, c: machine.own_ms)
    with toys.one_thread(), world(machine.clock, own, simulated(machine.clock, "fft", lambda p, c: machine.fft_ms)):
        yield machine


@pytest.fixture
def path(tmp_path: Path, machine: Machine) -> Path:
    wisdom = Wisdom(tmp_path / "wisdom.sqlite3")
    wisdom.remember_profile(environment("cpu").key, PROFILE)
    return wisdom.path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many candidates were measured."""
    count = [0]
    monkeypatch.setattr(Trial, "measure", toys.counting(Trial.measure, count))
    return count


def kept(path: Path) -> dict[str, Measurement]:
    return {m.solver: m for m in Wisdom(path).measurements(environment("cpu").key, SMALL.key)}


@pytest.mark.parametrize("first", ["fft", "aten"])
def test_a_plan_of_a_busy_host_is_made_again_on_a_quiet_one(
    machine: Machine, path: Path, measured: list[int], first: str
) -> None:
    """Whichever won then: the other one does now."""
    machine.fft_ms = {"fft": 5.0, "aten": 20.0}[first]
    plan = Planner(Wisdom(path)).plan(SMALL, UNDIVIDED)
    assert (plan.solver, plan.load, plan.busy) == (first, BUSY, True)
    assert {m.load for m in kept(path).values()} == {BUSY}
    machine.load, machine.fft_ms, measured[0] = QUIET, 25.0 - machine.fft_ms, 0
    planner = Planner(Wisdom(path))
    again = planner.plan(SMALL, UNDIVIDED)
    assert (again.solver, again.load, again.busy) == ({"fft": "aten", "aten": "fft"}[first], QUIET, False)
    assert measured[0] == 2
    assert {m.load for m in kept(path).values()} == {QUIET}
    measured[0] = 0
    assert planner.plan(SMALL, UNDIVIDED) == Planner(Wisdom(path)).plan(SMALL, UNDIVIDED) == again
    assert measured[0] == 0


def test_a_plan_that_was_shown_stays_for_what_runs_next(machine: Machine, path: Path, measured: list[int]) -> None:
    """Else ``tilewise time`` shows one plan for a layer, and its step runs by another."""
    machine.fft_ms = 5.0
    planner = Planner(Wisdom(path))
    plan = planner.plan(SMALL, UNDIVIDED)
    assert (plan.solver, plan.busy) == ("fft", True)
    settle(planner, [SMALL])
    machine.load, machine.fft_ms, measured[0] = QUIET, 20.0, 0
    assert planner.plan(SMALL, UNDIVIDED) == plan
    assert measured[0] == 0
    assert Planner(Wisdom(path)).plan(SMALL, UNDIVIDED).solver == "aten"  # another planner looks again


@pytest.mark.parametrize("share", [BUSY, None])
def test_where_the_host_is_not_known_to_be_quiet_nothing_is_measured_again(
    machine: Machine, path: Path, measured: list[int], share: float | None
) -> None:
    plan = Planner(Wisdom(path)).plan(SMALL, UNDIVIDED)
    machine.load, measured[0] = share, 0
    assert Planner(Wisdom(path)).plan(SMALL, UNDIVIDED) == plan
    assert measured[0] == 0


def test_a_host_that_is_busy_again_is_no_loop_and_the_newer_is_kept(
    machine: Machine, path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is quiet when the planner looks, and busy when it measures."""
    machine.fft_ms = 5.0
    assert Planner(Wisdom(path)).plan(SMALL, UNDIVIDED).time_ms == 5.0
    monkeypatch.setattr(load, "others_now", lambda: QUIET)
    machine.fft_ms, measured[0] = 4.0, 0
    planner = Planner(Wisdom(path))
    again = planner.plan(SMALL, UNDIVIDED)
    assert (again.time_ms, again.busy, measured[0]) == (4.0, True, 2)
    measured[0] = 0
    for _ in range(3):
        assert planner.plan(SMALL, UNDIVIDED) == again
        assert planner.plan_many([SMALL], UNDIVIDED) == {SMALL: again}
    assert measured[0] == 0
    assert kept(path)["fft"].time_ms == 4.0


@pytest.mark.parametrize("rigor", ["wisdom_only", "estimate"])
def test_where_nothing_may_be_measured_the_plan_is_used_as_it_is(
    machine: Machine, path: Path, measured: list[int], rigor: str
) -> None:
    plan = Planner(Wisdom(path)).plan(SMALL, UNDIVIDED)
    machine.load, measured[0] = QUIET, 0
    planner = Planner(Wisdom(path))
    assert planner.plan(SMALL, replace(UNDIVIDED, rigor=rigor)) == plan
    told = {m.solver: m for m in planner.explain(SMALL, replace(UNDIVIDED, rigor="wisdom_only")) if m.time_ms}
    assert {m.load for m in told.values()} == {BUSY}
    assert measured[0] == 0
    assert planner.plan(SMALL, UNDIVIDED).load == QUIET  # which knew the old ones already
    assert measured[0] == 2


def test_a_front_of_a_busy_host_is_looked_for_again(machine: Machine, path: Path, measured: list[int]) -> None:
    (plan,) = Planner(Wisdom(path)).front(SMALL, UNDIVIDED)
    assert plan.busy
    machine.load, machine.fft_ms, measured[0] = QUIET, 3.0, 0
    planner = Planner(Wisdom(path))
    (again,) = planner.front(SMALL, UNDIVIDED)
    assert (again.time_ms, again.load, measured[0]) == (3.0, QUIET, 2)
    assert planner.front(SMALL, UNDIVIDED) == (again,)
    assert measured[0] == 2


def test_where_no_newer_plan_is_found_the_known_one_stays(
    machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Planner(Wisdom(path)).plan(SMALL, UNDIVIDED)
    machine.load = QUIET

    def fail(*_: object) -> None:
        raise NoPlanError("no memory to measure with")

    monkeypatch.setattr(Planner, "_found", fail)
    assert Planner(Wisdom(path)).plan(SMALL, UNDIVIDED) == plan


CONFIG = Config()
GPU = "conv fprop fp32 cuda:NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("host_ms", "reason", "dropped"), [(None, "", True), (0.1, "", False), (None, "raised", False)]
)
def test_times_of_a_gpu_that_hold_a_part_of_the_hosts_are_measured_again(
    machine: Machine, host_ms: float | None, reason: str, dropped: bool
) -> None:
    """As earlier versions kept them; whatever the load, but not where nothing may be measured."""
    m = Measurement("fft", 1, CONFIG, 1.5, 0, reason=reason, host_ms=host_ms)
    assert device_of(GPU) == "cuda:NVIDIA H100 80GB HBM3"
    for rigor, gone in (("wisdom_only", False), ("measure", dropped)):
        known = {("fft", 1, CONFIG): m}
        Again().drop(GPU, known, Options(rigor=rigor))
        assert (not known) is gone
    known = {("fft", 1, CONFIG): m}
    Again().drop(SMALL.key, known, Options())
    assert known


@pytest.mark.parametrize("rigor", ["measure", "wisdom_only"])
def test_a_plan_that_torch_has_overtaken_is_decided_anew(machine: Machine, path: Path, rigor: str) -> None:
    """One search keeps torch's new time for all: a plan of other options must not stay beside a faster torch."""
    machine.load, machine.fft_ms = QUIET, 5.0
    limited = replace(UNDIVIDED, workspace=1 << 30)
    assert Planner(wisdom=Wisdom(path)).plan_many([SMALL], limited)[SMALL].solver == "fft"
    machine.own_ms = 3.0
    assert Planner(wisdom=Wisdom(path)).plan(SMALL, UNDIVIDED).solver == "aten"
    assert kept(path)["aten"].time_ms == 3.0
    planner = Planner(wisdom=Wisdom(path))
    plan = planner.plan_many([SMALL], replace(limited, rigor=rigor))[SMALL]
    if rigor == "measure":
        assert (plan.solver, plan.time_ms) == ("aten", 3.0)
        assert planner.plan(SMALL, limited) is plan
    else:  # nothing may be measured
        assert (plan.solver, plan.time_ms) == ("fft", 5.0)


def test_a_plan_is_not_decided_anew_for_noise_or_where_torch_may_not_be_taken(
    machine: Machine, path: Path, measured: list[int]
) -> None:
    machine.load, machine.fft_ms = QUIET, 5.0
    limits = [replace(UNDIVIDED, workspace=1 << 30), replace(UNDIVIDED, exclude=("aten",))]
    for options in limits:
        assert Planner(wisdom=Wisdom(path)).plan_many([SMALL], options)[SMALL].solver == "fft"
    for own_ms, options in ((4.9, limits[0]), (3.0, limits[1])):
        machine.own_ms = own_ms
        Planner(wisdom=Wisdom(path)).plan(SMALL, UNDIVIDED if own_ms == 4.9 else replace(UNDIVIDED, workspace=1 << 31))
        measured[0] = 0
        assert Planner(wisdom=Wisdom(path)).plan_many([SMALL], options)[SMALL].solver == "fft"
        assert not measured[0]
