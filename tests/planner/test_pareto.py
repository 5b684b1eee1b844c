"""Fronts, and divisions against every partition there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.planner.every import Point, every_division

from tilewise.planner.fronts import MOST_POINTS, Division, divide, front, thin

points = st.tuples(st.integers(1, 30).map(float), st.integers(0, 12))


def dominates(p: Point, q: Point) -> bool:
    """As good as ``q`` in both and better in one."""
    return p != q and p[0] <= q[0] and p[1] <= q[1]


@given(st.lists(points, max_size=30))
def test_a_front_is_a_front(listed: list[Point]) -> None:
    kept = [listed[i] for i in front(listed)]
    assert kept == sorted(kept)
    assert all(p[0] < q[0] and p[1] > q[1] for p, q in itertools.pairwise(kept))
    assert not any(dominates(p, q) for p in listed for q in kept)
    assert all(p in kept or any(dominates(q, p) for q in kept) for p in listed)


@given(st.lists(points, max_size=30), st.integers(0, 12))
def test_a_front_holds_the_fastest_within_every_limit(listed: list[Point], limit: int) -> None:
    """mu-cuDNN III-C1: no solution is lost by keeping the desirable set alone."""
    fastest = min((ms for ms, ws in listed if ws <= limit), default=None)
    assert min((listed[i][0] for i in front(listed) if listed[i][1] <= limit), default=None) == fastest


@given(st.lists(st.integers(), max_size=200, unique=True), st.integers(2, 20))
def test_thinning_keeps_order_and_ends(indices: list[int], most: int) -> None:
    kept = thin(indices, most)
    assert len(kept) == min(len(indices), most)
    assert [i for i in indices if i in set(kept)] == kept
    if indices:
        assert kept[0] == indices[0]
        assert kept[-1] == indices[-1]


@st.composite
def fronts_of_sizes(draw: st.DrawFn) -> tuple[int, dict[int, list[Point]]]:
    whole = draw(st.integers(1, 7))
    sizes = draw(st.sets(st.integers(1, 8), max_size=4))
    return whole, {size: draw(st.lists(points, max_size=2)) for size in sizes}


@given(fronts_of_sizes(), st.none() | st.integers(0, 12))
def test_divisions_are_the_front_of_all_there_are(drawn: tuple[int, dict[int, list[Point]]], limit: int | None) -> None:
    whole, fronts = drawn
    everything = every_division(whole, fronts, limit)
    want = [everything[i] for i in front(everything)]
    found = divide(whole, fronts, limit)
    assert [(d.time_ms, d.workspace) for d in found] == want
    for d in found:
        check(d, whole, fronts, limit)


def check(d: Division, whole: int, fronts: Mapping[int, Sequence[Point]], limit: int | None) -> None:
    """A division is what it says it is."""
    chosen = [fronts[size][point] for size, point in zip(d.sizes, d.points, strict=True)]
    assert sum(d.sizes) == whole
    assert sum(ms for ms, _ in chosen) == pytest.approx(d.time_ms)
    assert max(ws for _, ws in chosen) == d.workspace
    assert limit is None or d.workspace <= limit


@settings(max_examples=20)
@given(st.integers(1, 200), st.data())
def test_large_batches_under_all_sizes(whole: int, data: st.DataObject) -> None:
    """As good as the best division into equal parts, with more points than a front may have."""
    sizes = range(1, whole + 1)
    numbers = data.draw(st.randoms(use_true_random=False))
    fronts = {s: [(numbers.uniform(1, 2) * s, numbers.randrange(10**6)) for _ in range(3)] for s in sizes}
    limit = numbers.randrange(10**6)
    found = divide(whole, fronts, limit)
    assert len(found) <= MOST_POINTS
    for d in found:
        check(d, whole, fronts, limit)
    for size in sizes:
        fitting = [ms for ms, ws in fronts[size] if ws <= limit]
        if whole % size == 0 and fitting:
            assert found[0].time_ms <= min(fitting) * (whole // size) * (1 + 1e-9)


@given(fronts_of_sizes())
def test_parts_start_at_multiples_of_the_power_of_two_in_their_size(drawn: tuple[int, dict[int, list[Point]]]) -> None:
    whole, fronts = drawn
    for d in divide(whole, fronts):
        for start, size in zip(itertools.accumulate(d.sizes, initial=0), d.sizes, strict=False):
            assert start % (size & -size) == 0


def test_equal_times_take_the_fewer_parts() -> None:
    assert divide(4, {1: [(1.0, 0)], 2: [(2.0, 0)]})[0].sizes == (2, 2)


def test_nothing_fits() -> None:
    assert divide(4, {}) == []
    assert divide(4, {3: [(1.0, 0)]}) == []
    assert divide(4, {2: [(1.0, 10)]}, 9) == []
