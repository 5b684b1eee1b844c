"""Progress of commands where stderr is no terminal: lines after a while, also within one long piece of work."""

from __future__ import annotations

import re
import threading
import time

import pytest

from tilewise.report import progress
from tilewise.report.progress import progress_bar, time_bar

PATIENCE_S = 30.0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines at once, and every hundredth of a second."""
    monkeypatch.setattr(progress, "LATE_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


def lines_until(capsys: pytest.CaptureFixture[str], pattern: str) -> list[str]:
    """The lines on stderr until one matches ``pattern``."""
    lines: list[str] = []
    end = time.monotonic() + PATIENCE_S
    while not any(re.fullmatch(pattern, line) for line in lines):
        assert time.monotonic() < end, lines
        time.sleep(0.01)
        out, err = capsys.readouterr()
        assert out == ""
        lines += err.splitlines()
    return lines


@pytest.mark.usefixtures("soon")
def test_one_long_piece_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("planning", 14) as step:
        lines_until(capsys, "tilewise: planning: 0 of 14 done, beginning, .* left")
        step("conv1 fprop")
        lines_until(capsys, "tilewise: planning: 0 of 14 done, now conv1 fprop, .* left")
        step("conv1 wgrad")
        lines_until(capsys, "tilewise: planning: 1 of 14 done, now conv1 wgrad, .* left")
    assert not [thread for thread in threading.enumerate() if thread.name == "tilewise progress"]
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_work_of_unknown_and_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("planning a step", None) as step:
        step("net")
        lines_until(capsys, r"tilewise: planning a step: now net, \d+ s so far")
    with time_bar("trying", 20.0) as step:
        step("16x32")
        lines_until(capsys, r"tilewise: trying: 16x32, at most \d+ s left")


def test_what_is_quick_tells_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATE_S", PATIENCE_S)
    with progress_bar("planning", 1) as step:
        step("conv1 fprop")
    assert capsys.readouterr() == ("", "")


def test_the_lines_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATE_S", PATIENCE_S)
    with pytest.raises(KeyboardInterrupt), progress_bar("planning", 1):
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name == "tilewise progress"]
