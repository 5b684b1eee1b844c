"""Runs of checks are kept while somebody asks for it: the same errors, drawn once, within a number of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tilewise.problems.conv import checks
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.checks import errors_of
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.kept_runs import KeptRuns, keeping_runs, kept_runs


@dataclasses.dataclass
class Sized:
    nbytes: int


def problem(batch: int = 2, pass_: Pass = Pass.FPROP) -> ConvProblem:
    return ConvProblem(pass_, batch, 4, 5, (Axis(9, 3, before=1, after=1), Axis(8, 3, before=1, after=1)))


def by_torch(p: ConvProblem, error: float = 0.0) -> Callable[..., torch.Tensor]:
    """What computes ``p`` in fp32, off by ``error`` of each result."""

    def compute(*tensors: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        result = tensors[-1]
        return result.copy_(p.reference(*tensors[:2]) * (1.0 + error))

    return compute


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of operands that are drawn."""
    seeds, draw = list[int](), checks.make_operands

    def noted(p: ConvProblem, seed: int, **options: bool) -> tuple[torch.Tensor, ...]:
        seeds.append(seed)
        return draw(p, seed, **options)

    monkeypatch.setattr(checks, "make_operands", noted)
    return seeds


@pytest.mark.parametrize("pass_", list(Pass))
def test_errors_are_the_same_and_operands_drawn_once(pass_: Pass, drawn: list[int]) -> None:
    p = problem(pass_=pass_)
    wanted = [errors_of(p, by_torch(p, error)) for error in (0.0, 1e-4, 0.0)]
    alone = len(drawn)
    drawn.clear()
    with keeping_runs(1 << 24):
        found = [errors_of(p, by_torch(p, error)) for error in (0.0, 1e-4, 0.0)]
    assert found == wanted
    assert wanted[1].l2 > 5e-5 > wanted[0].l2
    assert 3 * len(drawn) == alone
    drawn.clear()
    errors_of(p, by_torch(p))
    assert 3 * len(drawn) == alone  # nothing is kept behind the block


def test_another_problem_has_runs_of_its_own(drawn: list[int]) -> None:
    with keeping_runs(1 << 24):
        errors_of(problem(2), by_torch(problem(2)))
        once = len(drawn)
        errors_of(problem(3), by_torch(problem(3)))
    assert len(drawn) > once


def test_what_writes_over_its_operands_is_wrong() -> None:
    p = problem()

    def compute(*tensors: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        result = tensors[-1].copy_(p.reference(*tensors[:2]))
        tensors[0][0, 0, 0, 0] += 1.0
        return result

    with keeping_runs(1 << 24):
        errors_of(p, by_torch(p))
        assert errors_of(p, compute).l2 == float("inf")
        assert errors_of(p, by_torch(p)).l2 < 1e-5  # on operands as they were drawn


def test_the_oldest_go_when_there_is_no_room() -> None:
    kept, made = KeptRuns(10), []

    def make() -> Sized:
        made.append(Sized(4))
        return made[-1]

    for key in "aab":
        kept.keep(key, kept.find(key, make))
    assert len(made) == 2
    kept.find("a", make)
    kept.keep("c", kept.find("c", make))  # twelve bytes: b goes, which was asked for before a
    assert kept.find("a", make) is made[0]
    assert len(made) == 3
    kept.find("b", make)
    assert len(made) == 4


def test_what_is_larger_than_the_room_is_not_kept() -> None:
    kept = KeptRuns(10)
    kept.keep("a", Sized(11))
    found = kept.find("a", lambda: Sized(1))
    assert found.nbytes == 1


def test_a_block_within_another_keeps_in_the_outer_one() -> None:
    assert kept_runs() is None
    with keeping_runs(10):
        outer = kept_runs()
        with keeping_runs(20):
            assert kept_runs() is outer
        assert kept_runs() is outer
    assert kept_runs() is None


def test_nothing_is_kept_where_no_bytes_are_given() -> None:
    with keeping_runs(0):
        assert kept_runs() is None
