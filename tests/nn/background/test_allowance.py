"""Turns stay within their share of the time, whatever steps and turns take: by their accounting, on any clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewise.nn.background.allowance import LET_OFF_S, LONGEST_REST_S, MOST_S, Allowance

seconds = st.floats(1e-4, 30.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.floats(1e-3, 1.0), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=60))
def test_turns_take_their_share_and_what_the_last_one_took_too_much(
    share: float, steps: list[tuple[float, float]]
) -> None:
    clock = Clock()
    allowance = Allowance(share, clock)
    turns: list[tuple[float, float]] = []  # what the program ran before each turn, and what the turn took
    ran = 0.0
    for step, turn in steps:
        clock.now += step
        ran += step
        allowed = allowance.seconds()
        assert 0.0 <= allowed <= MOST_S
        if allowed > 0.0:
            clock.now += turn
            allowance.spend(turn)
            turns.append((ran, turn))
            ran = 0.0
    assert abs(allowance.spent_s - sum(turn for _, turn in turns)) < 1e-6
    # Over any stretch of turns: the share of what ran, one turn, and what is let off once.
    for first in range(len(turns)):
        for last in range(first, len(turns)):
            stretch = turns[first : last + 1]
            taken = sum(turn for _, turn in stretch[:-1])
            earned = share * sum(before for before, _ in stretch)
            assert taken <= earned + (turns[first - 1][1] if first else 0.0) + LET_OFF_S + 1e-6


def test_nothing_is_saved_up() -> None:
    clock = Clock()
    allowance = Allowance(0.02, clock)
    for _ in range(10):
        clock.now += 1.0
        assert abs(allowance.seconds() - 0.02) < 1e-9
    clock.now += 3600.0
    assert allowance.seconds() == MOST_S
    clock.now += 3600.0
    allowance.restart()
    assert allowance.seconds() == 0.0


def rest_after(allowance: Allowance, clock: Clock, turn: float) -> int:
    """Take a turn of so many seconds, and count the seconds until the next one may begin."""
    clock.now += turn
    allowance.spend(turn)
    for rest in range(1, 1000):
        clock.now += 1.0
        if allowance.seconds() > 0.0:
            return rest
    raise AssertionError("no turn may ever begin")


def test_a_long_turn_is_paid_back_once_enough_was_let_off() -> None:
    clock = Clock()
    allowance = Allowance(0.02, clock)
    clock.now += 1.0
    assert allowance.seconds() > 0.0
    let_off = 0.0
    while let_off + 0.9 < LET_OFF_S:
        assert rest_after(allowance, clock, 1.0) <= LONGEST_REST_S + 2
        let_off += 0.9
    rest_after(allowance, clock, 1.0)
    for _ in range(3):
        assert 48 <= rest_after(allowance, clock, 1.0) <= 50
    assert rest_after(allowance, clock, 0.1) <= 5
