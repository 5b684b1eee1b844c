"""What explaining says of each candidate beside its measurement: the estimate by which the planner went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import toys
from tests.planner.simulated import PROFILE, Clock, Simulated, simulated, torchs_own, world

from tilewise.machine.device import environment
from tilewise.plan import Config
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Run, Solver
from tilewise.wisdom import Wisdom

SMALL = toys.small(batch=4, channels=1, size=3)
UNDIVIDED = Options(batch_sizes="undivided")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with toys.one_thread():
        yield


@pytest.fixture
def planner(tmp_path: Path) -> Callable[[], Planner]:
    """Makes planners over one store, as one process after another would."""
    path = tmp_path / "wisdom.sqlite3"
    Wisdom(path).remember_profile(environment("cpu").key, PROFILE)
    return lambda: Planner(Wisdom(path))


def buried(clock: Clock, **traits: object) -> Solver:
    """The fastest of all, whose estimates are so poor that the planner leaves it out: three configs in 2 to 4 ms."""
    choices = tuple(Config(tile=n) for n in (2, 3, 4))
    return simulated(
        clock, "buried", lambda p, c: float(str(c["tile"])), estimate=lambda p, c: 500.0 + float(str(c["tile"])),
        choices=choices, **traits,
    )  # fmt: skip


def test_the_estimate_stands_beside_the_measurement(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    fast = simulated(clock, "fast", lambda p, c: 10.0, estimate=lambda p, c: 12.0)
    with world(clock, fast, buried(clock), torchs_own(clock, lambda p, c: 40.0, estimate=lambda p, c: 30.0)):
        for one in (planner(), planner()):  # the second knows all times from wisdom, which keeps no estimates
            found = {(m.solver, m.config): m for m in one.explain(SMALL, UNDIVIDED)}
            assert found["fast", Config()].time_ms == 10.0
            assert found["fast", Config()].estimate_ms == 12.0
            assert found["aten", Config()].estimate_ms == 30.0
            assert found["buried", Config(tile=3)].estimate_ms == 503.0
            assert found["buried", Config(tile=3)].time_ms is None
            assert found["buried", Config(tile=3)].reason == (
                "not measured: estimated 503.000 ms, the best so far takes 10.000"
            )
            assert found["micro_batch", Config()].estimate_ms is None


def test_what_is_over_the_limit_has_an_estimate_and_what_is_ruled_out_has_none(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    large = simulated(clock, "large", lambda p, c: 10.0, estimate=lambda p, c: 12.0, bytes=lambda p, c: 1 << 20)
    cannot = simulated(clock, "cannot", lambda p, c: 10.0, unsupported=lambda self, p: ["not this one"])
    with world(clock, large, cannot):
        found = {m.solver: m for m in planner().explain(SMALL, Options(workspace=1024, batch_sizes="undivided"))}
        assert found["large"].estimate_ms == 12.0
        assert found["large"].reason.startswith("needs 1.0 MiB")
        assert found["cannot"].estimate_ms is None
        assert found["cannot"].reason == "not this one"


def test_every_config_of_a_named_solver_is_measured_and_checked(planner: Callable[[], Planner]) -> None:
    """The others stay as they were, and the next plan knows what was found."""
    clock = Clock()
    fast = simulated(clock, "fast", lambda p, c: 10.0)
    other = simulated(clock, "other", lambda p, c: 1.0, estimate=lambda p, c: 500.0)
    with world(clock, fast, other, buried(clock, most_configs=1)):
        one = planner()
        told: list[tuple[int, int, str]] = []
        one.progress = lambda *step: told.append(step)
        found = {(m.solver, m.config): m for m in one.explain(SMALL, UNDIVIDED, every_config_of=("buried",))}
        for tile in (2, 3, 4):
            m = found["buried", Config(tile=tile)]
            assert (m.reason, m.time_ms, m.estimate_ms) == ("", tile, 500.0 + tile)
            assert m.error is not None
        assert found["other", Config()].reason.startswith("not measured: estimated 500.000 ms")
        assert told == [(0, 1, "every config of buried")]
        assert planner().plan(SMALL, UNDIVIDED).solver == "buried"
        runs = clock.runs["buried", SMALL.batch]
        again = planner().explain(SMALL, UNDIVIDED, every_config_of=("buried",))
        assert [m.time_ms for m in again if m.solver == "buried"] == [2, 3, 4]
        assert clock.runs["buried", SMALL.batch] > runs  # checked again, though not timed again


def test_a_named_solver_that_is_wrong_is_lost_in_every_config(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    with world(clock, simulated(clock, "fast", lambda p, c: 10.0),
               buried(clock, compute=lambda p, a, b: 1.01 * p.reference(a, b))):  # fmt: skip
        found = planner().explain(SMALL, UNDIVIDED, every_config_of=("buried",))
        lost = [m for m in found if m.solver == "buried"]
        assert len(lost) == 3
        for m in lost:
            assert m.error is not None
            assert m.reason.startswith(f"error {m.error.l2:.1e} over the limit")
        assert planner().plan(SMALL, UNDIVIDED).solver == "fast"


def test_what_was_measured_until_an_interruption_is_kept(planner: Callable[[], Planner]) -> None:
    clock = Clock()

    class Interrupted(Simulated):
        def bind(self, p: ConvProblem, c: Config, *tensors: Any) -> Run:
            if c["tile"] == 4:
                raise KeyboardInterrupt
            return super().bind(p, c, *tensors)

    traits = vars(type(buried(clock)))
    kind: type[Solver] = type("Some", (Interrupted,), {k: v for k, v in traits.items() if not k.startswith("__")})
    with world(clock, simulated(clock, "fast", lambda p, c: 10.0), kind()):
        with pytest.raises(KeyboardInterrupt):
            planner().explain(SMALL, UNDIVIDED, every_config_of=("buried",))
        found = {m.config: m for m in planner().explain(SMALL, UNDIVIDED) if m.solver == "buried"}
        assert [found[Config(tile=n)].time_ms for n in (2, 3, 4)] == [2.0, 3.0, None]


def test_a_named_solver_keeps_the_limit(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    with world(clock, buried(clock, bytes=lambda p, c: 1 << (8 + int(str(c["tile"]))))):
        options = Options(workspace=1 << 11, batch_sizes="undivided")
        found = {m.config: m for m in planner().explain(SMALL, options, every_config_of=("buried",))}
        assert found[Config(tile=4)].reason == "needs 4.0 KiB of workspace, the limit is 2.0 KiB"
        assert found[Config(tile=3)].time_ms == 3.0


def test_torchs_own_choice_can_be_named(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    with world(clock, torchs_own(clock, lambda p, c: 40.0)):
        (own,) = (m for m in planner().explain(SMALL, UNDIVIDED, every_config_of=("aten",)) if m.solver == "aten")
        assert (own.time_ms, own.reason) == (40.0, "")
        assert own.error is not None


def test_by_estimate_alone_a_named_solver_is_measured(planner: Callable[[], Planner]) -> None:
    clock = Clock()
    with world(clock, simulated(clock, "fast", lambda p, c: 10.0, estimate=lambda p, c: 12.0), buried(clock)):
        options = Options(rigor="estimate", batch_sizes="undivided")
        found = {(m.solver, m.config): m for m in planner().explain(SMALL, options, every_config_of=["buried"])}
        assert found["buried", Config(tile=2)].time_ms == 2.0
        assert found["buried", Config(tile=2)].reason == ""


@pytest.mark.parametrize("names", ["buried", ("nonsense",), (3,), None])
def test_names_that_are_no_solvers_are_refused(planner: Callable[[], Planner], names: Any) -> None:
    with pytest.raises(ValueError, match="every_config_of") as raised:
        planner().explain(SMALL, every_config_of=names)
    assert "aten" in str(raised.value)


@pytest.mark.parametrize(("names", "options", "said"), [
    (("micro_batch",), Options(), "'micro_batch' cuts problems into parts"),
    (("fft",), Options(rigor="wisdom_only"), "'fft' cannot be measured"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    planner: Callable[[], Planner], names: tuple[str, ...], options: Options, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        planner().explain(SMALL, options, every_config_of=names)
