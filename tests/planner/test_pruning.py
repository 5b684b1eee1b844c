"""Which candidates are not measured, by times and estimates that are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import toys
from tests.planner.simulated import PROFILE, Clock, Simulated, reasons, search, simulated, world

from tilewise.plan import Config
from tilewise.planner.measuring.repeats import LOSES
from tilewise.planner.search.benchmark import FAR, FEW, WORTH_MS
from tilewise.planner.search.known import Store
from tilewise.planner.search.rates import LOST, Rates
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import Prepare, Run, Solver, SolverUnavailable


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
        lost = [m.config["i"] for m in found.log if m.reason.startswith("not measured: 3 of many")]
        assert lost == [3, 4]
        assert search(toys.small(), store, rigor="patient", batch_sizes="undivided").best().config == Config(i=4)


def test_a_candidate_that_lost_twice_is_not_repeated(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSES, "cpu", 1.2)
    rising = {"best": 0.1, "near": 0.115, "behind": 0.125}
    each = [simulated(clock, name, lambda p, c, ms=ms: ms) for name, ms in rising.items()]  # type: ignore[misc]
    with world(clock, *each):
        trial = search(toys.small(), batch_sizes="undivided")
        trial.survey()
        found = {m.solver: m.time_ms for m in trial.log if m.solver in rising}
    batch = toys.small().batch
    assert found == {name: pytest.approx(ms) for name, ms in rising.items()}
    assert {name: clock.runs[name, batch] for name in rising} == {"best": 5, "near": 5, "behind": 2}


class Settling(Simulated):
    """Its first three runs are slower, by nine tenths, a half and a quarter."""

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        run = super().bind(p, c, a, b, out)

        def settling(*operands: Any) -> torch.Tensor:
            begun = self.clock.runs.get((self.name, p.batch), 0)
            self.clock.now_ms += [3.6, 2.0, 1.0, 0.0][min(begun, 3)]
            return run(*operands)

        return settling


def test_the_first_runs_on_a_cpu_are_not_a_candidates_time(clock: Clock) -> None:
    """Of four the later two count, and one that settles as the best is not given up for the others."""
    settling: Solver = type("Some", (Settling,), {"clock": clock, "name": "settling", "ms": lambda p, c: 4.0})()
    with world(clock, simulated(clock, "settled", lambda p, c: 4.8, estimate=lambda p, c: 1.0), settling):
        found = search(toys.small(), batch_sizes="undivided")
        found.survey()
        assert {m.solver: m.time_ms for m in found.log if not m.reason}["settling"] == pytest.approx(4.5)
        assert found.best().solver == "settling"


class Families(Simulated):
    """Odd and even configs are two families."""

    def family(self, c: Config) -> str:
        return f"{self.name} {int(c['i']) % 2}"


def test_the_best_of_each_family_are_run(clock: Clock) -> None:
    traits = {"clock": clock, "name": "many", "ms": staticmethod(lambda p, c: 10.0 + int(c["i"]) / 10),
              "choices": tuple(Config(i=i) for i in (0, 2, 4, 6, 1, 3, 5)), "most_configs": 2}  # fmt: skip
    many: Solver = type("Some", (Families,), traits)()
    with world(clock, many):
        found = search(toys.small(), batch_sizes="undivided")
        found.best()
    lost = {m.config["i"]: m.reason for m in found.log if m.reason and m.solver == "many"}
    assert set(lost) == {4, 5, 6}
    assert lost[5] == "not measured: 2 of many 1 with better estimates were"


@pytest.mark.parametrize("adds_bias", [False, True])
def test_a_division_counts_the_pass_that_adds_a_bias(clock: Clock, adds_bias: bool) -> None:
    """Its parts were measured without one."""
    sixteenth = simulated(clock, "sixteenth", lambda p, c: p.batch / 16 + (p.batch > 8), adds_bias=adds_bias)
    problem = replace(toys.small(batch=16), bias=True)
    with world(clock, sixteenth):
        (division,) = (plan for plan in search(problem).candidates.ranked() if plan.config.get("sizes") == (8, 8))
    pass_ms = 2 * problem.nbytes("y") / PROFILE["copy"]
    assert division.time_ms == pytest.approx(1.0 + (0.0 if adds_bias else pass_ms))


@pytest.mark.parametrize("limit", [None, 2**20])
def test_a_solver_that_offers_nothing_keeps_that_as_its_reason(clock: Clock, limit: int | None) -> None:
    with world(
        clock, simulated(clock, "mute", lambda p, c: 1.0, choices=()), simulated(clock, "other", lambda p, c: 1.0)
    ):
        found = search(toys.small(), batch_sizes="undivided", workspace=limit)
        assert found.best().solver == "other"
        assert reasons(found.log)["mute"] == "offers no config" + (" in 1.0 MiB of workspace" if limit else "")


def unpredicted(clock: Clock, ms: Callable[[ConvProblem, Config], float], **traits: Any) -> Solver:
    """One that is estimated to take a tenth of a millisecond."""
    return simulated(
        clock, "loops", ms, estimate=lambda p, c: 0.1, unpredicted=lambda self, p, c: True,
        accumulates=True, **traits,
    )  # fmt: skip


@pytest.mark.parametrize("pass_", list(Pass))
def test_what_nothing_predicts_is_run_on_a_few_images_first(clock: Clock, pass_: Pass) -> None:
    batch = 2 * FEW + 1
    loops = unpredicted(clock, lambda p, c: 100.0 * p.batch)
    plain = simulated(clock, "plain", lambda p, c: 1.0 * p.batch, accumulates=True, estimate=lambda p, c: 0.01)
    with world(clock, loops, plain):
        found = search(toys.small(batch=batch, pass_=pass_))
        assert found.best().solver == "plain"
        said = (
            f"took {100 * batch} ms by its rate on 2 of {batch} items of the batch, the best so far takes {batch}.000"
        )
        assert reasons(found.log)["loops"] == said
        assert clock.runs["loops", 2] == 2
        assert {size for name, size in clock.runs if name == "loops"} == {2}


def test_what_keeps_up_on_a_few_images_is_measured_whole(clock: Clock) -> None:
    loops = unpredicted(clock, lambda p, c: 0.9 * p.batch)
    plain = simulated(clock, "plain", lambda p, c: 1.0 * p.batch, estimate=lambda p, c: 0.01)
    with world(clock, loops, plain):
        assert search(toys.small(batch=2 * FEW), batch_sizes="undivided").best().solver == "loops"
        assert clock.runs["loops", 2] == 2


def test_what_takes_no_few_images_is_measured_whole(clock: Clock) -> None:
    class Whole(Simulated):
        def unpredicted(self, p: ConvProblem, c: Config) -> bool:
            return True

        def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
            if p.batch < 2 * FEW:
                raise SolverUnavailable("takes many images")
            return super().bind(p, c, a, b, out)

    loops: Solver = type("Some", (Whole,), {"clock": clock, "name": "loops", "ms": staticmethod(lambda p, c: 0.9)})()
    with world(clock, loops, simulated(clock, "plain", lambda p, c: 1.0, estimate=lambda p, c: 0.01)):
        assert search(toys.small(batch=2 * FEW), batch_sizes="undivided").best().solver == "loops"


@pytest.mark.parametrize(
    ("batch", "best_ms", "options"),
    [(FEW - 1, 100.0, {}), (FEW, 0.9 * WORTH_MS, {}), (FEW, 100.0, {"rigor": "patient"})],
)
def test_few_images_are_not_run_where_that_is_worth_nothing(
    clock: Clock, batch: int, best_ms: float, options: dict[str, Any]
) -> None:
    loops = unpredicted(clock, lambda p, c: 2 * FAR * best_ms * p.batch / batch)
    with world(clock, loops, simulated(clock, "plain", lambda p, c: best_ms, estimate=lambda p, c: 0.01)):
        search(toys.small(batch=batch), batch_sizes="undivided", **options).best()
        assert {size for name, size in clock.runs if name == "loops"} == {batch}


def test_what_lost_by_far_is_not_run_again_at_half_nor_at_a_quarter(clock: Clock) -> None:
    """What lost by less is, at a quarter: the whole says less of it."""
    times = {"far": 1.01 * LOST**2, "near": 1.01 * LOST}
    others = [
        simulated(clock, name, lambda p, c, each=each: each * p.batch, estimate=lambda p, c: 0.9 * p.batch)
        for name, each in times.items()
    ]  # fmt: skip
    with world(clock, *others, simulated(clock, "plain", lambda p, c: 0.9 ** (6 - p.batch.bit_length()) * p.batch)):
        search(toys.small(batch=32)).best()
    assert {size for name, size in clock.runs if name == "far"} == {32, 4}
    assert {size for name, size in clock.runs if name == "near"} == {32, 8, 1}


def test_rates_are_those_last_seen() -> None:
    seen, fast, slow = Rates(), ("fast", 1, Config()), ("slow", 1, Config())
    seen.note({fast: 8.0, slow: 32.0}, 1, 64)
    seen.note({fast: 3.0}, 2, 32)
    assert seen.at(16, 4) == {fast: 1.5, slow: pytest.approx(8.0 / LOST)}
    assert seen.at(8, 8) == {fast: pytest.approx(0.75 / LOST), slow: pytest.approx(4.0 / LOST**2)}
