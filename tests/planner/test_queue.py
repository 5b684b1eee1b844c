"""The model of a step as a queue, and the choice of options by it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.planner.budget.queue import Change, Launch, choose_options, device_waits, queue_ms


def simulated(queue: Sequence[Launch], chosen: Collection[int]) -> float:
    """The time of a step, event by event: a host that launches, and a device that takes what lies first."""
    now = device_busy_until = 0.0
    lying: deque[tuple[float, float]] = deque()

    def drain() -> float:
        nonlocal device_busy_until
        while lying:
            launched, ms = lying.popleft()
            device_busy_until = max(device_busy_until, launched) + ms
        return device_busy_until

    for launch in queue:
        host = launch.host_ms + sum(c.host_ms for c in launch.changes if c.option in chosen)
        device = launch.device_ms + sum(c.device_ms for c in launch.changes if c.option in chosen)
        if launch.waits:
            now = max(now, drain())
        now += host
        if device > 0:
            lying.append((now, device))
    return max(now, drain())


# Sixteenths of a millisecond, so that sums are exact.
MS = st.integers(0, 64).map(lambda n: n / 16)


@st.composite
def queues(draw: st.DrawFn, most_options: int = 6) -> list[Launch]:
    """Queues in which an option adds no more than there is to take away."""
    queue = []
    for _ in range(draw(st.integers(1, 14))):
        host, device = draw(MS), draw(MS)
        options = draw(st.lists(st.integers(0, most_options - 1), unique=True, max_size=2))
        changes = [
            Change(option, draw(MS) - host / len(options), draw(MS) - device / len(options)) for option in options
        ]
        queue.append(Launch(host, device, draw(st.integers(0, 7)) == 0, tuple(changes)))
    return queue


def options_of(queue: Sequence[Launch]) -> set[int]:
    return {change.option for launch in queue for change in launch.changes}


@given(queues(), st.sets(st.integers(0, 5)))
def test_the_model_is_a_simulation_of_its_events(queue: list[Launch], chosen: set[int]) -> None:
    assert queue_ms(queue, chosen) == pytest.approx(simulated(queue, chosen), rel=1e-12)


@given(queues(4))
def test_the_choice_is_as_fast_as_the_best_of_all(queue: list[Launch]) -> None:
    options = sorted(options_of(queue))
    every = [set(some) for n in range(len(options) + 1) for some in itertools.combinations(options, n)]
    best = min(simulated(queue, some) for some in every)
    found = choose_options(queue)
    assert found.step_ms == pytest.approx(simulated(queue, found.options), rel=1e-12)
    assert found.step_ms <= best + 1e-5
    for option in found.options:  # each of them is needed
        assert simulated(queue, found.options - {option}) > found.step_ms


def test_where_the_host_is_ahead_all_that_gain_are_chosen() -> None:
    queue = [Launch(0.1, 2.0, changes=(Change(i, 0.3, -0.5),)) for i in range(5)]
    found = choose_options([*queue, Launch(0.1, 9.0)])
    assert found.options == frozenset(range(5))
    assert not device_waits(queue, found.options)


def test_where_the_host_is_waited_for_nothing_is_chosen() -> None:
    queue = [Launch(1.0, 0.4, changes=(Change(i, 0.2, -0.2),)) for i in range(5)]
    assert choose_options(queue).options == frozenset()


def test_one_part_of_a_step_may_wait_and_another_not() -> None:
    """Small operators come first, for which the host is late; then large ones, for which it is ahead."""
    late = [Launch(1.0, 0.2, changes=(Change(i, 0.1, -0.1),)) for i in range(4)]
    ahead = [Launch(0.1, 5.0, changes=(Change(4 + i, 0.1, -2.0),)) for i in range(4)]
    found = choose_options([*late, *ahead])
    assert found.options == frozenset(range(4, 8))


def test_an_option_in_many_places_counts_in_all_of_them() -> None:
    """It gains where the device is busy, and loses more where it waits."""
    everywhere = [Launch(1.0, 0.2, changes=(Change(0, 0.5, -0.1),)) for _ in range(6)]
    queue = [*everywhere, Launch(0.1, 3.0, changes=(Change(0, 0.5, -1.0),))]
    assert queue_ms(queue, {0}) > queue_ms(queue)
    assert choose_options(queue).options == frozenset()


def test_a_wait_brings_host_and_device_together() -> None:
    queue = [Launch(1.0, 5.0), Launch(1.0, 0.0, waits=True), Launch(1.0, 1.0)]
    assert queue_ms(queue) == 1 + 5 + 1 + 1 + 1


def test_without_time_for_a_proof_the_best_known_choice_counts() -> None:
    queue = [Launch(1.0, 0.4, changes=(Change(i, 0.2, -0.2),)) for i in range(5)]
    assert queue_ms(queue, choose_options(queue, time_limit_s=0.0).options) <= queue_ms(queue)


def test_nothing_to_choose() -> None:
    assert choose_options([]).options == choose_options([Launch(1.0, 1.0)]).options == frozenset()
