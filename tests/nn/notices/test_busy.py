"""The line that is said before planning where other programs use the machine's cores."""

from __future__ import annotations

import logging

import pytest
from tests.nn.dividing import Dividing

from tilewise.machine import load
from tilewise.nn.notices.busy import BUSY, say_if_busy
from tilewise.notation import parse_layer
from tilewise.planner import Options, Planner
from tilewise.wisdom import Wisdom

PROBLEM = parse_layer("mb2ic3ih8oc4oh8kh3ph1")


@pytest.mark.parametrize(
    ("share", "options", "is_said"),
    [
        (0.9, Options(), True),
        (0.0, Options(), False),
        (None, Options(), False),
        (0.9, Options(rigor="estimate"), False),
    ],
)
def test_it_is_said_where_something_is_to_be_measured(
    share: float | None,
    options: Options,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "others_now", lambda: share)
    with caplog.at_level(logging.INFO, "tilewise"):
        say_if_busy(Planner(Wisdom(":memory:")), {PROBLEM: options}, shown=False)
    assert caplog.messages == ([BUSY] if is_said else [])


def test_nothing_is_said_of_what_wisdom_has(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "others_now", lambda: 0.9)
    planner = Planner(Wisdom(":memory:"))
    monkeypatch.setattr(planner, "remembered", lambda problem, options: Dividing().plan(problem))
    with caplog.at_level(logging.INFO, "tilewise"):
        say_if_busy(planner, {PROBLEM: Options()}, shown=False)
        say_if_busy(Dividing(), {PROBLEM: Options()}, shown=False)
    assert caplog.messages == []
