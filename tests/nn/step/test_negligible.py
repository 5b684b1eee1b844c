"""Passes that take almost nothing of a step are left to torch before they are planned, and the report says so."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.dividing import Dividing
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.step import negligible
from tilewise.nn.step.negligible import least_of
from tilewise.problems.base import Problem

REASON = "of all passes' time by torch"


@given(st.dictionaries(st.integers(), st.floats(0, 1e6), max_size=8), st.floats(0, 2e6))
def test_the_least_are_as_many_as_fit(took: Mapping[int, float], most: float) -> None:
    found = least_of(took, most)
    assert sum(took[name] for name in found) <= most
    others = [ms for name, ms in took.items() if name not in found]
    assert all(took[name] <= min(others, default=took[name]) for name in found)
    assert not others or sum(took[name] for name in found) + min(others) > most


def network() -> tuple[nn.Module, torch.Tensor]:
    """A large layer, and one of which a pass takes a thousandth of its time."""
    torch.manual_seed(0)
    large = nn.Conv2d(16, 32, 5, padding=2)
    return nn.Sequential(large, nn.AdaptiveAvgPool2d(2), nn.Conv2d(32, 2, 1)), torch.randn(8, 16, 96, 96)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few problems are many enough, and a third of the time is little."""
    monkeypatch.setattr(negligible, "SEVERAL", 2)
    monkeypatch.setattr(negligible, "SHARE", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_what_takes_little_is_not_planned_and_still_right() -> None:
    model, x = network()
    want = copy.deepcopy(model)
    tilewise.optimize(model, x)
    large, small = report(model).layers
    assert all(REASON in one.reason and not one.replaced for one in small.passes())
    assert len(list(small.passes())) == 3
    assert not any(REASON in one.reason for one in large.passes())
    assert REASON in str(report(model))
    torch.testing.assert_close(model(x), want(x), rtol=1e-3, atol=1e-3)
    tilewise.restore(model)
    # What is planned by itself, for a user who asks for it, is not left out.
    tilewise.optimize(model[2], torch.randn(8, 32, 2, 2))
    assert not any(REASON in one.reason for layer in report(model[2]).layers for one in layer.passes())


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "options", [{"goal": "passes"}, {"workspace": "1GiB"}, {"planner": Dividing()}, {"wait": False}]
)
def test_where_passes_are_what_counts_all_are_planned(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(tilewise.planner.Planner, "measure_torch", lambda self, problem, _: seen.append(problem))
    model, _ = network()
    tilewise.optimize(model[2], torch.randn(8, 32, 2, 2), **options)  # type: ignore[arg-type]
    tilewise.restore(model[2])
    assert not seen


def test_a_few_problems_are_all_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []
    monkeypatch.setattr(tilewise.planner.Planner, "measure_torch", lambda self, problem, _: seen.append(problem))
    model, _ = network()
    tilewise.optimize(model[2], torch.randn(8, 32, 2, 2))
    assert not seen
