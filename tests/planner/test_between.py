"""Sizes between powers of two: which are measured, and that the best division is found among few of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import toys
from tests.planner.simulated import Clock, search, simulated, world

from tilewise.plan import Config
from tilewise.planner.search.divisions import MOST_BETWEEN
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Solver

Line = tuple[int, int, int]
"""Launch time and time an image in ms, workspace an image in KiB."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def solvers_of(clock: Clock, lines: list[Line]) -> list[Solver]:
    def one(index: int, line: Line) -> Solver:
        fixed, each, kib = line
        return simulated(
            clock,
            f"line{index}",
            lambda p, c: float(fixed + each * p.batch),
            bytes=lambda p, c: 1024 * kib * p.batch,
            accumulates=True,
        )

    return [one(index, line) for index, line in enumerate(lines)]


def planned(lines: list[Line], batch: int, kib: int, rigor: str) -> tuple[float, Clock]:
    clock = Clock()
    with world(clock, *solvers_of(clock, lines)):
        plan = search(
            toys.small(batch=batch, channels=1, size=3), rigor=rigor, workspace=1024 * kib, batch_sizes="all"
        ).best()
    return plan.time_ms, clock


@settings(max_examples=30)
@given(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)),
    st.integers(10, 40),
    st.integers(5, 60),
    st.integers(1, 300),
)
@example(fast=(9, 2, 1), slow=10, batch=31, kib=15)
@example(fast=(2, 9, 1), slow=10, batch=10, kib=9)
@example(fast=(1, 9, 3), slow=10, batch=6, kib=9)
@example(fast=(2, 9, 3), slow=10, batch=5, kib=9)
@example(fast=(7, 7, 3), slow=10, batch=5, kib=9)
def test_the_best_division_is_found_with_few_measurements(fast: Line, slow: int, batch: int, kib: int) -> None:
    """Where time and workspace grow in proportion, as they nearly do; a rest of an image may be better placed."""
    lines = [fast, (0, slow, 0)]
    exhaustive, _ = planned(lines, batch, kib, "patient")
    found, clock = planned(lines, batch, kib, "measure")
    assert exhaustive <= found * (1 + 1e-9)
    assert found <= 1.01 * exhaustive
    between = {size for name, size in clock.runs if name.startswith("line") and size & (size - 1) and size < batch}
    assert len(between) <= MOST_BETWEEN


def test_a_front_has_sizes_between(clock: Clock) -> None:
    with world(clock, *solvers_of(clock, [(10, 1, 1), (0, 20, 0)])):
        powers = search(toys.small(batch=48, channels=1, size=3), batch_sizes="powers_of_two").front()
        every = search(toys.small(batch=48, channels=1, size=3), batch_sizes="all").front()

    def within(plans: tuple[object, ...], kib: int) -> float:
        return min(p.time_ms for p in plans if p.workspace <= 1024 * kib)  # type: ignore[attr-defined]

    assert within(powers, 24) == 48 + 3 * 10  # 16 each
    assert within(every, 24) == 48 + 2 * 10  # 24 each
    assert all(within(every, kib) <= within(powers, kib) for kib in range(49))


def test_a_front_has_what_a_solver_offers_within_less(clock: Clock) -> None:
    """One that blocks its work to fit a limit offers no blocks where there is none."""

    def blocks(p: ConvProblem, limit: int | None) -> Iterator[tuple[Config, int]]:
        size = next(n for n in (64, 16, 4, 1) if limit is None or 1024 * 1024 * n <= limit)
        yield Config(block=size), 1024 * 1024 * size

    blocked = simulated(
        clock,
        "blocked",
        lambda p, c: 10.0 + 64 / int(c["block"]) if p.batch == 8 else 90.0,  # type: ignore[call-overload]
        bytes=lambda p, c: 1024 * 1024 * int(c["block"]),  # type: ignore[call-overload]
    )
    type(blocked).offers = lambda self, p, limit, only=None: blocks(p, limit)  # type: ignore[method-assign]
    with world(clock, blocked):
        points = search(toys.small(batch=8, channels=1, size=3), batch_sizes="undivided").front()
    assert [(plan.time_ms, plan.workspace >> 20) for plan in points[:4]] == [(11, 64), (14, 16), (26, 4), (74, 1)]


def test_a_front_measures_first_what_its_like_was_fastest_as(clock: Clock) -> None:
    """Under each lower limit two configs are measured: estimates alone would choose the two that are slow."""
    rates = {"slow": 3.0, "slower": 4.0, "fast": 1.0}

    def offered(p: ConvProblem, limit: int | None) -> Iterator[tuple[Config, int]]:
        size = next(n for n in (64, 16, 4, 1) if limit is None or 1024 * 1024 * n <= limit)
        yield from ((Config(kind=kind, block=size), 1024 * 1024 * size) for kind in rates)

    blocked = simulated(
        clock,
        "blocked",
        lambda p, c: rates[str(c["kind"])] * (10 + 64 / int(c["block"])),  # type: ignore[call-overload]
        estimate=lambda p, c: 10 + 64 / int(c["block"]) + list(rates).index(str(c["kind"])),  # type: ignore[call-overload]
        bytes=lambda p, c: 1024 * 1024 * int(c["block"]),  # type: ignore[call-overload]
    )
    type(blocked).offers = lambda self, p, limit, only=None: offered(p, limit)  # type: ignore[method-assign]
    with world(clock, blocked):
        points = search(toys.small(batch=1, channels=1, size=3), batch_sizes="undivided").front()
    assert [(plan.time_ms, plan.workspace >> 20) for plan in points[:4]] == [(11, 64), (14, 16), (26, 4), (74, 1)]
    assert all(plan.config["kind"] == "fast" for plan in points[:4])
