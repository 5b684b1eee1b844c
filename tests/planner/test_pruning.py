"""Which candidates are not measured, by times and estimates that are given."""

from __future__ import annotations

import pytest
import torch
from tests import toys
from tests.planner.simulated import Clock, Simulated, reasons, search, simulated, world

from tilewise.plan import Config
from tilewise.planner.store import Store
from tilewise.problem import ConvProblem
from tilewise.solvers import Prepare, Run, Solver


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


class Keeps(Simulated):
    """Prepares its filter in 100 ms, once."""

    def constant(self, p: ConvProblem, c: Config) -> int:
        return p.nbytes("w")

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        def prepared(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            self.clock.now_ms += 100.0
            kept.view(weight.dtype)[: weight.numel()].copy_(weight.flatten())

        return prepared

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        run, shape = super().bind(p, c, a, b, out), b.shape
        return lambda a, b, out, workspace: run(a, b.view(a.dtype)[: shape.numel()].view(shape), out, workspace)


def test_preparing_a_filter_that_is_kept_is_no_part_of_a_candidates_time(clock: Clock) -> None:
    traits = {"clock": clock, "name": "keeps", "ms": staticmethod(lambda p, c: 5.0)}
    keeps: Solver = type("Some", (Keeps,), traits)()
    with world(clock, keeps, simulated(clock, "plain", lambda p, c: 10.0, estimate=lambda p, c: 4.0)):
        found = search(toys.small(constant_weight=True), batch_sizes="undivided").best()
        assert (found.solver, found.time_ms) == ("keeps", 5.0)


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
