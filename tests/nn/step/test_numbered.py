"""Blocks at fixed numbers of steps: how each step is computed depends on its number alone."""

from __future__ import annotations

import pytest

from tilewise.nn.step.lead import Trial, is_by_torch, pairs_of
from tilewise.nn.step.numbered import NumberedBlocks


class Rank:
    """A rank that counts its steps from ``number`` on."""

    def __init__(self, number: int = 0, *, pairs: int = 4, counted: int = 2) -> None:
        self.number, self.by_torch = number, False
        self.ways: dict[int, bool] = {}
        trial = Trial(frozenset(), pairs, counted, 0, pairs, begin=5, seed=1)
        switches = (lambda: setattr(self, "by_torch", True)), (lambda: setattr(self, "by_torch", False))
        self.blocks = NumberedBlocks(trial, switches, number)

    def step(self, *, counts: bool = True) -> bool:
        """One step: 4 s by torch and 1 s by plans."""
        self.ways[self.number] = self.by_torch
        self.number += 1
        return self.blocks.passed((0.0, 4.0 if self.by_torch else 1.0) if counts else None, self.number)

    def run(self) -> None:
        """To the end."""
        while not self.step():
            assert self.number < 100


def test_all_blocks_are_timed_and_plans_run_before_and_after() -> None:
    rank = Rank()
    rank.run()
    assert not any(rank.ways[number] for number in range(5))
    assert rank.ways[5]
    assert not rank.by_torch
    assert rank.blocks.done == 4
    assert rank.blocks.times() == [[4000.0 if is_by_torch(block) else 1000.0] * 2 for block in range(8)]


@pytest.mark.parametrize("late", [7, 12, 20])
def test_a_rank_that_comes_late_is_in_step_with_the_others_at_once(late: int) -> None:
    first, second = Rank(), Rank(late)
    first.run()
    second.run()
    assert second.ways == {number: first.ways[number] for number in range(late, first.number)}
    times = second.blocks.times()
    assert times[0] == [None, None]
    assert times[-1] == [4000.0, 4000.0]
    assert len(pairs_of(times).first_ms) < 4


def test_a_rank_that_comes_too_late_has_no_times() -> None:
    rank = Rank(90)
    assert rank.step()
    assert not any(rank.ways.values())
    assert pairs_of(rank.blocks.times()).first_ms == ()


def test_the_block_in_which_plans_ran_for_a_while_does_not_count() -> None:
    first, second = Rank(), Rank()
    first.run()
    while not second.blocks.done:
        second.step()
    second.step()
    second.blocks.rest()
    assert not second.by_torch
    second.run()
    differ = [number for number, way in first.ways.items() if second.ways[number] is not way]
    assert len(differ) <= 1
    times = second.blocks.times()
    assert times.count([None, None]) == 1
    assert times[:2] == [[4000.0] * 2, [1000.0] * 2]


def test_steps_that_do_not_count_leave_gaps() -> None:
    rank = Rank(counted=3)
    while not rank.step(counts=rank.number % 3 != 0):
        assert rank.number < 100
    times = rank.blocks.times()
    assert all(sum(ms is not None for ms in block) == 2 for block in times)
    assert len(pairs_of(times, 2).first_ms) == 4
    assert pairs_of(times, 3).first_ms == ()
