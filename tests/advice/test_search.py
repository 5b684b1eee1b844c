"""The search against exhaustive sweeps, of devices that are made up: tiles, cliffs and noise are known there."""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import some

from tilewise.advice.axes import Axis, alignment
from tilewise.advice.gauge import Gauge
from tilewise.advice.outlook import Outlook
from tilewise.advice.points import Part, Point
from tilewise.advice.search import LEVELS, Clock, Search
from tilewise.advice.sweep import Sizes, Sweep, product, recurrent_layer
from tilewise.machine.turns import pause
from tilewise.planner import Options
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.recurrent.problem import RecurrentProblem


@dataclass
class Tiled(Gauge):
    """A device whose kernels compute whole tiles and are launched in so many ms; times vary by ``noise`` of them.

    Time passes only as points are measured: ``cost_s`` seconds each.
    """

    tiles: tuple[int, ...] = ()
    launch_ms: float = 0.01
    noise: float = 0.0
    cost_s: float = 0.1
    clock: Clock = field(default_factory=lambda: Clock(1e9))
    seen: list[tuple[Sizes, str]] = field(default_factory=list)

    def true_ms(self, sizes: Sizes) -> float:
        """What the device takes, whatever is measured."""
        padded = [math.ceil(size / tile) * tile for size, tile in zip(sizes, self.tiles, strict=True)]
        flops = self.sweep.flops(sizes)
        return self.launch_ms + flops / 1e8 * math.prod(padded) / math.prod(sizes)

    def measure(self, sizes: Sizes, level: str) -> Point:
        pause()
        self.seen.append((sizes, level))
        self.clock.begun -= self.cost_s
        self.costs[level] = self.cost_s / self.sweep.flops(sizes)
        random = zlib.crc32(repr((sizes, level)).encode()) / 2**32
        ms = self.true_ms(sizes) * (1 + self.noise * random)
        problems = self.sweep.problems(sizes)
        parts = tuple(Part(problem, ms / len(problems), "tiled", "tiled", checked=True) for problem in problems)
        return Point(sizes, self.sweep.samples(sizes), parts)

    def in_turns(self, points: Sequence[Point]) -> list[Point]:
        """Times without noise."""
        return [point.timed((self.true_ms(point.sizes) / len(point.parts),) * len(point.parts)) for point in points]


def searched(sweep: Sweep, seconds: float = 30.0, **device: object) -> tuple[Search, Tiled]:
    clock = Clock(seconds)
    gauge = Tiled(sweep, None, Options(), clock=clock, **device)  # type: ignore[arg-type]
    search = Search(gauge, clock, lambda text: None)
    search.run()
    return search, gauge


def exhaustive(gauge: Tiled) -> dict[Sizes, float]:
    """The samples a second of every point."""
    grid = itertools.product(*(axis.values for axis in gauge.sweep.axes))
    return {sizes: gauge.sweep.samples(sizes) / gauge.true_ms(sizes) * 1e3 for sizes in grid}


SWEEPS = {
    "rnn": lambda a, b, c: recurrent_layer(RecurrentProblem("gru", 8, b, 32, a)),
    "square rnn": lambda a, b, c: recurrent_layer(RecurrentProblem("lstm", 8, b, a, a)),
    "gemm": lambda a, b, c: product([GemmProblem(b, a, c, op) for op in ("NN", "NT")]),
}


@settings(max_examples=some(60), deadline=None)
@given(
    st.sampled_from(sorted(SWEEPS)),
    st.integers(20, 400),
    st.integers(4, 80),
    st.integers(20, 200),
    st.tuples(*[st.sampled_from([1, 4, 8, 16, 32, 64])] * 3),
    st.sampled_from([0.001, 0.05, 1.0]),
)
def test_what_is_named_is_close_to_the_best_of_all(kind, width, batch, depth, tiles, launch_ms) -> None:
    sweep = SWEEPS[kind](width, batch, depth)
    search, gauge = searched(sweep, tiles=tiles[: len(sweep.axes)], launch_ms=launch_ms, noise=0.02)
    every = exhaustive(gauge)
    best = max(search.finals.values(), key=lambda point: point.samples_per_second)
    assert every[best.sizes] >= 0.95 * max(every.values())
    assert len(gauge.seen) < 0.2 * len(every) + 70


def test_nothing_is_measured_twice_and_all_is_within_reach() -> None:
    search, gauge = searched(SWEEPS["rnn"](100, 20, 0), tiles=(16, 8), noise=0.1)
    assert len(set(gauge.seen)) == len(gauge.seen)
    assert search.is_done
    for axis, sizes in zip(search.sweep.axes, zip(*search.compared, strict=True), strict=True):
        assert set(sizes) <= set(axis.values)
    assert search.sweep.asked in search.finals


def test_levels_follow_from_the_time() -> None:
    sweep = SWEEPS["square rnn"](100, 20, 0)
    assert searched(sweep, 30, tiles=(1, 1), cost_s=0.1)[0].level == "plans"
    search, gauge = searched(sweep, 30, tiles=(1, 1), cost_s=4.0)
    assert search.level == "torch"
    assert not search.is_done
    assert gauge.clock.passed < 34  # a point that has begun is finished
    assert {level for _, level in gauge.seen} == {LEVELS[0]}  # as more would take all the time for one point
    assert len(search.compared) >= 5


def test_a_search_without_time_ends_at_once() -> None:
    search, gauge = searched(SWEEPS["rnn"](100, 20, 0), 1e-9, tiles=(1, 1))
    assert not gauge.seen
    assert not search.is_done


def test_a_measurement_is_stopped_when_the_time_is_over() -> None:
    class Endless(Tiled):
        def measure(self, sizes: Sizes, level: str) -> Point:
            while level == "plans":
                time.sleep(0.01)
                pause()
            return super().measure(sizes, level)

    sweep = SWEEPS["rnn"](100, 20, 0)
    clock = Clock(0.3)
    gauge = Endless(sweep, None, Options(), tiles=(1, 1), cost_s=0.0)  # type: ignore[arg-type]
    search = Search(gauge, clock, lambda text: None)
    search.run()
    assert 0.1 < clock.passed < 3
    assert search.level == "candidates"
    assert sweep.asked in search.compared


@settings(max_examples=some(200))
@given(st.integers(1, 5000), st.floats(0, 0.9), st.integers(1, 12), st.integers(2, 30))
def test_promising_sizes_are_within_reach_and_begin_with_the_asked(asked, share, unit, most) -> None:
    axis = Axis("x", asked * unit, share, unit)
    values = axis.values
    assert asked * unit in values
    assert all(abs(value - asked * unit) <= share * asked * unit * 1.000001 for value in values)
    found = axis.promising(most)
    assert found[0] == asked * unit
    assert len(set(found)) == len(found) == min(most, len(values))
    assert set(found) <= set(values)
    assert all(size in values and size not in (found[0],) for size in axis.near(found[0], [found[0]]))


def test_multiples_of_large_powers_of_two_come_first() -> None:
    assert Axis("hidden", 1700, 0.1).promising(7)[1:5] == [1792, 1536, 1664, 1728]
    assert {1530, 1870} < set(Axis("hidden", 1700, 0.1).promising(7))
    assert [alignment(n) for n in (1, 6, 1700, 512, 2048)] == [1, 2, 4, 256, 256]


@pytest.mark.parametrize(
    ("words", "says"), [((10, 1.0), "below 1"), ((10, -0.1), "below 1"), ((7, 0.1, 2), "multiple of 2")]
)
def test_an_axis_that_cannot_be_is_refused(words, says) -> None:
    with pytest.raises(ValueError, match=says):
        Axis("x", *words)


def test_the_outlook_multiplies_what_each_axis_tells() -> None:
    axes = (Axis("a", 10, 0.2), Axis("b", 10, 0.2))

    def point(a: int, b: int, rate: float) -> Point:
        problem = GemmProblem(a, b, 10)
        return Point((a, b), a, (Part(problem, problem.flops / rate / 1e9),))

    measured = [point(10, 10, 1.0), point(12, 10, 2.0), point(10, 12, 3.0)]
    outlook = Outlook(axes, measured)
    assert outlook.rate((12, 12)) > outlook.rate((10, 12)) > outlook.rate((12, 10)) > outlook.rate((10, 10))
    assert outlook.rate((10, 10)) < outlook.rate((11, 10)) < outlook.rate((12, 10))
    assert outlook.rate((9, 10)) == outlook.rate((10, 10))
    assert set(outlook.unmeasured({p.sizes: p for p in measured})) == {(12, 12)}
