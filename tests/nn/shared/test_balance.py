"""Shares follow measured rates: to balance, with hysteresis, and a bounded number of times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.nn.shared.balance import FEW, GAIN, MOST_CHANGES, SKIPPED, UNITS, Balance, divided

RATES = st.lists(st.floats(0, 1e6).filter(lambda r: r == 0 or r > 1e-3), min_size=1, max_size=6).filter(any)


@given(st.integers(1, 5000), RATES)
def test_a_batch_is_divided_as_a_whole_and_by_rates(batch: int, rates: list[float]) -> None:
    sizes = divided(batch, rates)
    unit = max(1, batch // UNITS)
    assert sum(sizes) == batch
    for size, rate in zip(sizes, rates, strict=True):
        assert abs(size - batch * rate / sum(rates)) < 2 * unit
        assert rate or not size


def stepped(balance: Balance, batch: int, speeds: list[float], overhead: float = 0.0, steps: int = 1) -> float:
    """Seconds of the last of ``steps`` steps, on devices of these speeds that take a time for any batch."""
    longest = 0.0
    for _ in range(steps):
        sizes = balance.sizes(batch)
        seconds = [overhead + size / speed if size else 0.0 for size, speed in zip(sizes, speeds, strict=True)]
        balance.note(sizes, seconds)
        longest = max(seconds)
    return longest


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1, 20), min_size=2, max_size=4), st.integers(128, 1024), st.floats(0, 0.2))
def test_shares_come_near_to_the_best_division(speeds: list[float], batch: int, part: float) -> None:
    overhead = part * batch / sum(speeds)
    balance = Balance([1.0] * len(speeds))
    took = stepped(balance, batch, speeds, overhead, steps=800)
    # No division is faster than all devices together, and one of whole units is slower by a unit at most.
    unit = max(1, batch // UNITS)
    best = overhead + batch / sum(speeds)
    assert took <= best / (1 - GAIN) + overhead + 2 * unit / min(speeds)
    assert balance.changes <= MOST_CHANGES


def test_a_device_that_slows_gets_less_and_more_again_when_it_is_free() -> None:
    balance = Balance([1.0, 1.0])
    stepped(balance, 256, [10, 10], steps=50)
    assert balance.sizes(256) == (128, 128)
    assert not balance.changes
    stepped(balance, 256, [10, 5], steps=100)
    first, second = balance.sizes(256)
    assert 168 <= first <= 172
    assert second == 256 - first
    stepped(balance, 256, [10, 10], steps=100)
    assert balance.sizes(256) == (128, 128)
    assert len(balance.reasons) == balance.changes == 2
    assert "128+128 to " in balance.reasons[0]


def test_a_first_guess_that_is_far_off_is_mended_after_a_few_steps() -> None:
    balance = Balance([1.0, 1.0])
    stepped(balance, 256, [10, 1], steps=SKIPPED + 2 * FEW - 1)
    assert balance.sizes(256) == (128, 128)
    stepped(balance, 256, [10, 1])
    first, second = balance.sizes(256)
    assert 228 <= first <= 236
    assert second == 256 - first
    assert balance.changes == 1


def test_small_differences_and_single_slow_steps_change_nothing() -> None:
    balance = Balance([1.0, 1.0])
    for step in range(200):
        slow = step % 9 == 0
        stepped(balance, 256, [10 * (0.2 if slow else 1), 10.2])
    assert not balance.changes


def test_a_device_that_keeps_changing_is_not_followed_for_ever() -> None:
    balance = Balance([1.0, 1.0])
    for turn in range(400):
        stepped(balance, 64, [10, 3 if turn % 2 else 10], steps=40)
    assert 0 < balance.changes <= MOST_CHANGES


def test_a_device_too_slow_for_one_unit_is_left_out_and_the_reason_says_so() -> None:
    balance = Balance([1.0, 1.0])
    stepped(balance, 64, [100, 0.01], steps=40)
    assert balance.sizes(64) == (64, 0)
    assert "number 1 is left out" in balance.reasons[-1]
    stepped(balance, 64, [100, 0.01], steps=400)
    assert balance.measured == pytest.approx((100, 0))


def test_given_shares_stay_and_rates_are_measured_all_the_same() -> None:
    balance = Balance([3, 1], fixed=True)
    stepped(balance, 64, [10, 10], steps=100)
    assert balance.sizes(64) == (48, 16)
    assert balance.measured == pytest.approx((10, 10))


def test_a_short_last_batch_of_an_epoch_does_not_count() -> None:
    balance = Balance([1.0, 1.0])
    for _ in range(40):
        stepped(balance, 64, [10, 10])
        stepped(balance, 2, [10, 1])
    assert balance.measured == pytest.approx((10, 10))
    assert not balance.changes
