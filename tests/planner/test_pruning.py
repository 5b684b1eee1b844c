"""Which candidates are not measured, by times and estimates that are given."""

from __future__ import annotations

import pytest
from tests import toys
from tests.planner.simulated import Clock, reasons, search, simulated, world

from tilewise.plan import Config
from tilewise.planner.search import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_candidate_with_a_hopeless_estimate_is_not_run_unless_patient(clock: Clock) -> None:
    slow = simulated(clock, "slow", lambda p, c: 5.0, estimate=lambda p, c: 500.0)
    fast = simulated(clock, "fast", lambda p, c: 10.0)
    with world(clock, slow, fast):
        found = search(toys.small(), batch_sizes="undivided")
        assert found.best().solver == "fast"
        assert reasons(found.log)["slow"].startswith("not measured: estimated 500.000 ms")
        assert search(toys.small(), batch_sizes="undivided", rigor="patient").best().solver == "slow"


def test_a_candidate_far_behind_its_kin_is_not_run_unless_patient(clock: Clock) -> None:
    """Where estimates err alike the better one wins, so that the other need not even be compiled."""
    first = simulated(clock, "first", lambda p, c: 10.0, estimate=lambda p, c: 10.0, kin="transforms")
    second = simulated(clock, "second", lambda p, c: 9.0, estimate=lambda p, c: 13.0, kin="transforms")
    apart = simulated(clock, "apart", lambda p, c: 11.0, estimate=lambda p, c: 13.0)
    with world(clock, first, second, apart):
        found = search(toys.small(), batch_sizes="undivided")
        assert found.best().solver == "first"
        assert reasons(found.log)["second"] == "not measured: estimated 13.000 ms, the best of transforms 10.000"
        assert "apart" not in reasons(found.log)
        assert search(toys.small(), batch_sizes="undivided", rigor="patient").best().solver == "second"


def test_a_front_keeps_slower_kin_that_take_less_workspace(clock: Clock) -> None:
    large = simulated(clock, "large", lambda p, c: 10.0, estimate=lambda p, c: 10.0, kin="transforms",
                      bytes=lambda p, c: 2**20)  # fmt: skip
    small = simulated(clock, "small", lambda p, c: 15.0, estimate=lambda p, c: 15.0, kin="transforms")
    with world(clock, large, small):
        assert [plan.solver for plan in search(toys.small(), batch_sizes="undivided").front()] == ["large", "small"]


def test_only_the_best_configs_of_a_solver_are_run_unless_patient(clock: Clock) -> None:
    many = simulated(
        clock, "many", lambda p, c: 10.0 - int(c["i"]) / 10, choices=tuple(Config(i=i) for i in range(5)),
        estimate=lambda p, c: 10.0 + int(c["i"]) / 10, most_configs=3,
    )  # fmt: skip
    with world(clock, many):
        store = Store(lambda p: {})
        for _ in range(3):  # also when they are known already
            found = search(toys.small(), store, batch_sizes="undivided")
            assert found.best().config == Config(i=2)
        lost = [m.config["i"] for m in found.log if m.reason.startswith("not measured: 3 of this solver")]
        assert lost == [3, 4]
        assert search(toys.small(), store, rigor="patient", batch_sizes="undivided").best().config == Config(i=4)


@pytest.mark.parametrize("limit", [None, 2**20])
def test_a_solver_that_offers_nothing_keeps_that_as_its_reason(clock: Clock, limit: int | None) -> None:
    with world(
        clock, simulated(clock, "mute", lambda p, c: 1.0, choices=()), simulated(clock, "other", lambda p, c: 1.0)
    ):
        found = search(toys.small(), batch_sizes="undivided", workspace=limit)
        assert found.best().solver == "other"
        assert reasons(found.log)["mute"] == "offers no config" + (" in 1.0 MiB of workspace" if limit else "")
