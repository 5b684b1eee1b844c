"""When a plan replaces torch's choice: what it must gain, how surely, and on which hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests import toys
from tests.planner.simulated import Clock, search, simulated, torchs_own, world

from tilewise.machine import load
from tilewise.planner.measuring import replacing
from tilewise.planner.measuring.times import Took
from tilewise.planner.search import finals
from tilewise.planner.search.benchmark import Benchmark
from tilewise.planner.search.known import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_torchs_choice_stays_where_it_wins(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    for ms, winner in ((8.7, "other"), (8.9, "aten"), (20.0, "aten")):
        with world(clock, own, simulated(clock, "other", lambda p, c, ms=ms: ms)):  # type: ignore[misc]
            found = search(toys.small(), batch_sizes="undivided")
            plan = found.best()
            assert plan.solver == winner
            other = [m for m in found.log if m.solver == "other"][-1]
            assert (other.reason, other.time_ms) == ("", pytest.approx(ms))


@pytest.mark.parametrize(("rounds", "winner"), [([8.0] * 6 + [12.0], "other"), ([8.0] * 5 + [12.0] * 2, "aten")])
def test_a_plan_must_win_most_rounds(clock: Clock, rounds: list[float], winner: str) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    with world(clock, own, simulated(clock, "other", lambda p, c: 8.0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(finals, "rounds", lambda *_, **__: [[Took(ms, 0.0) for ms in rounds], [Took(10.0, 0.0)] * 7])
        assert search(toys.small(), batch_sizes="undivided").best().solver == winner


@pytest.mark.parametrize(("shares", "winner"), [((8.0, 8.0), "other"), ((8.0, 9.5), "aten"), ((6.0, 9.5), "other")])
def test_a_small_gain_must_come_out_twice(clock: Clock, shares: tuple[float, float], winner: str) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    looks = iter(shares)
    with world(clock, own, simulated(clock, "other", lambda p, c: 8.0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            finals, "rounds", lambda *_, **__: [[Took(next(looks), 0.0)] * 7, [Took(10.0, 0.0)] * 7]
        )  # what was decided at once leaves the second look untaken
        assert search(toys.small(), batch_sizes="undivided").best().solver == winner
    assert next(looks, None) == (9.5 if shares[0] == 6.0 else None)


@pytest.mark.parametrize(
    ("plan_ms", "decided"),
    [
        ([20.0], True),
        ([30.0], False),
        ([20.0] * 2, False),
        ([60.0] * 3, True),
        ([70.0] * 3, False),
        ([160.0] * 3, True),
    ],
)
def test_rounds_are_few_where_one_side_is_far_ahead(plan_ms: list[float], decided: bool) -> None:
    torchs = [Took(100.0, 0.0)] * len(plan_ms)
    times = [[Took(ms, 0.0) for ms in plan_ms], torchs]
    assert replacing.decided_on_cpu(times) is decided
    assert not replacing.decided_on_cpu([*times[:1], torchs, torchs])


@pytest.mark.parametrize(("host_ms", "winner"), [(3.0, "other"), (5.1, "other"), (5.2, "aten"), (7.9, "aten")])
def test_a_plan_must_not_lose_on_a_busy_host(clock: Clock, host_ms: float, winner: str) -> None:
    """Torch launches one kernel; eight small ones are lost where the host has other work."""
    own = torchs_own(clock, lambda p, c: 10.0)
    with world(clock, own, simulated(clock, "other", lambda p, c: 8.0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(finals, "rounds", lambda *_, **__: [[Took(8.0, host_ms)] * 7, [Took(10.0, 1.0)] * 7])
        plan = search(toys.small(), batch_sizes="undivided").best()
        assert plan.solver == winner
        assert plan.time_ms == (8.0 if winner == "other" else 10.0)


@pytest.mark.parametrize(
    ("quick", "slow", "winner"),
    [((5.0, 18.0), (12.0, 18.0), "quick"), ((5.0, 30.0), (5.1, 17.0), "quick"), ((5.0, 42.0), (12.0, 18.0), "slow")],
)
def test_of_plans_that_do_not_lose_by_launches_the_fastest_on_the_device_is_taken(
    clock: Clock, quick: tuple[float, float], slow: tuple[float, float], winner: str
) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    others = [simulated(clock, name, lambda p, c: 8.0) for name in ("quick", "slow")]
    with world(clock, own, *others), pytest.MonkeyPatch.context() as patch:
        times = [[Took(*each)] * 7 for each in (quick, slow, (25.0, 40.0))]
        patch.setattr(finals, "rounds", lambda *_, **__: times)
        plan = search(toys.small(), batch_sizes="undivided").best()
    assert plan.solver == winner
    assert (plan.device_ms, plan.host_ms) == {"quick": quick, "slow": slow}[winner]
    assert plan.time_ms == plan.device_ms


@pytest.mark.parametrize(("device_ms", "winner"), [(8.7, "other"), (8.9, "aten"), (10.2, "aten")])
def test_a_plan_must_gain_where_launches_are_hidden(clock: Clock, device_ms: float, winner: str) -> None:
    """As in a CUDA graph: there, what the host saves by one kernel in place of two is no gain."""
    own = torchs_own(clock, lambda p, c: 10.0)
    with world(clock, own, simulated(clock, "other", lambda p, c: 8.0)), pytest.MonkeyPatch.context() as patch:
        times = [[Took(device_ms, 5.0)] * 7, [Took(10.0, 40.0)] * 7]
        patch.setattr(finals, "rounds", lambda *_, **__: times)
        assert search(toys.small(), batch_sizes="undivided").best().solver == winner


def test_the_next_finalist_is_taken_where_the_first_may_not_replace_torchs_choice(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    others = [simulated(clock, name, lambda p, c: 8.0) for name in ("first", "second")]
    with world(clock, own, *others), pytest.MonkeyPatch.context() as patch:
        times = [[Took(11.0, 5.0)] * 7, [Took(5.0, 18.0)] * 7, [Took(10.0, 40.0)] * 7]
        patch.setattr(finals, "rounds", lambda *_, **__: times)
        assert search(toys.small(), batch_sizes="undivided").best().solver == "second"


@pytest.mark.parametrize(
    ("first", "second", "decided"),
    [
        ([3.0] * 5, [4.0] * 5, True),
        ([3.0] * 4, [4.0] * 4, False),
        ([3.0] * 4 + [5.0], [4.0] * 5, False),
        ([8.0] * 5, [8.5] * 5, True),
        ([8.0] * 5, [9.0] * 5, False),
        ([3.0] * 4 + [9.0], [10.0] * 5, False),
    ],
)
def test_a_gpu_is_done_where_one_plan_leads_from_far_ahead(
    first: list[float], second: list[float], decided: bool
) -> None:
    """In too few rounds, with another leader in one, or near torch's choice it goes on."""
    plans = [[Took(ms, 0.0) for ms in values] for values in (first, second)]
    assert replacing.decided_on_gpu([*plans, [Took(10.0, 0.0)] * len(first)]) is decided


def test_what_loses_by_its_launches_keeps_no_other_from_being_timed(clock: Clock) -> None:
    """Fastest on the device, but of so many launches that the others would not be near enough to be finalists."""
    own = torchs_own(clock, lambda p, c: 10.0)
    others = [simulated(clock, name, lambda p, c, ms=ms: ms) for name, ms in (("many", 2.0), ("one", 8.0))]  # type: ignore[misc]
    hosts = {"aten": 6.0, "many": 40.0, "one": 6.0}
    with world(clock, own, *others):
        found = search(toys.small(), batch_sizes="undivided")
        measure = Benchmark.measure
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Benchmark,
                "measure",
                lambda self, plan, *rest: replace(measure(self, plan, *rest), host_ms=hosts[plan.solver]),
            )
            plan = found.best()
    assert plan.solver == "one"
    (many,) = (m for m in found.log if m.solver == "many")
    assert (many.device_ms, many.host_ms, many.reason) == (pytest.approx(2.0), 40.0, "")


def test_times_of_a_whole_plan_are_kept_with_how_sure_they_are(clock: Clock) -> None:
    own = torchs_own(clock, lambda p, c: 10.0)
    store = Store(lambda p: {})
    with world(clock, own, simulated(clock, "other", lambda p, c: 8.0)), pytest.MonkeyPatch.context() as patch:
        times = [[Took(ms, ms - 1.0) for ms in (4.0, 5.0, 6.0, 5.0, 5.5)], [Took(10.0, 3.0)] * 5]
        patch.setattr(finals, "rounds", lambda *_, **__: times)
        patch.setattr(load, "others_since", lambda moment: 0.5)
        plan = search(toys.small(), store, batch_sizes="undivided").best()
    assert (plan.device_ms, plan.host_ms, plan.load, plan.busy) == (5.0, 3.0, 0.5, True)
    kept = {m.solver: m for m in store.of(toys.small()).values()}
    other, aten = kept["other"], kept["aten"]
    assert (other.device_ms, other.host_ms, other.runs, other.load) == (5.0, 3.0, 5, 0.5)
    assert (other.baseline_ms, other.baseline_host_ms) == (10.0, 3.0)
    assert other.dispersion == pytest.approx(0.1)
    assert (aten.device_ms, aten.host_ms, aten.dispersion, aten.runs, aten.load) == (10.0, 3.0, 0.0, 5, 0.5)
