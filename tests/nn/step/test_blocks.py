"""Blocks of steps by torch and by plans: their order, which steps count, and what is taken of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tilewise.nn.step.blocks import Blocks, between, counted_in_a_block
from tilewise.nn.step.lead import pairs_of


def run(blocks: Blocks, ways: list[str], most: int = 10_000) -> list[str]:
    """The way of every step until there are enough; step ``i`` takes one second from ``i`` on."""
    seen = []
    for index in range(most):
        seen.append(ways[-1])
        if blocks.passed((float(index), float(index + 1))):
            return seen
    raise AssertionError("never enough")


def blocks_of(wanted: int, counted: int = 2) -> tuple[Blocks, list[str]]:
    ways = ["plans"]
    switches = (lambda: ways.append("torch")), (lambda: ways.append("plans"))
    return Blocks(wanted, counted, switches, random.Random(5)), ways


def test_the_order_is_torch_plans_plans_torch() -> None:
    blocks, ways = blocks_of(6, counted=3)
    run(blocks, ways)
    assert ways == ["plans", *["torch", "plans"] * 3, "torch", "plans"][: len(ways)]
    assert [block.by_torch for block in blocks._taken] == [True, False, False, True] * 3
    assert ways[-1] == "plans"
    pairs = pairs_of(blocks.times())
    assert pairs.first_ms == pairs.second_ms == (1000.0,) * 6


def test_every_step_of_a_period_meets_both_ways() -> None:
    """Whatever a program does every ten steps, or every four."""
    blocks, ways = blocks_of(400)
    run(blocks, ways)
    for period in (4, 5, 10):
        met = {
            way: Counter(int(first) % period for block in blocks._taken if block.by_torch is way
                         for first, _ in block.steps if isinstance(first, float))
            for way in (True, False)
        }  # fmt: skip
        for residue in range(period):
            assert met[True][residue] > 40 / period * 4
            assert met[False][residue] > 40 / period * 4


def test_steps_that_are_not_alike_do_not_count_and_rest_begins_a_block_anew() -> None:
    blocks, ways = blocks_of(2)
    for _ in range(50):
        assert not blocks.passed(None)
    assert blocks.done == 0
    assert ways[-1] == "torch"
    blocks.passed((0.0, 9.0))
    blocks.rest()
    assert ways[-1] == "plans"
    run(blocks, ways)
    assert pairs_of(blocks.times()).first_ms == (1000.0, 1000.0)


@pytest.mark.parametrize(("ms", "count"), [([100.0], 2), ([1.0, 1.0, 50.0], 4), ([0.0], 8), ([0.01] * 5, 8)])
def test_short_steps_make_larger_blocks(ms: list[float], count: int) -> None:
    assert counted_in_a_block(ms) == count


def test_times_are_milliseconds() -> None:
    assert between(1.0, 1.5) == 500.0
