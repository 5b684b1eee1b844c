"""What planning that takes long shows on stderr where nobody asked for progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tilewise
from tilewise.nn import progress
from tilewise.nn.progress import Late, TimeLeft


def planned(late: Late) -> None:
    with late.planning():
        late(0, 2, "first")
        with late.planning():
            late(1, 2, "second")
        late(2, 2, "")


def test_what_is_quick_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    planned(Late())
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    late = Late()
    late(0, 1, "outside of planning")
    planned(late)
    err = capsys.readouterr().err
    assert err == "tilewise: planning 2 problems, a few seconds left\ntilewise: planned 2 problems in 0 s\n"


def test_a_bar_on_a_terminal_ends_however_planning_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    late = Late()
    bars = []

    def interrupted() -> None:
        with late.planning():
            late(0, 3, "conv fprop")
            bars.append(late._bar)
            late(1, 3, "conv dgrad")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not bars[0].live.is_started
    assert late._bar is None
    err = capsys.readouterr().err
    assert "1/3" in err
    assert "left" in err


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    planned(Late())
    assert "tilewise: 1 of 2 problems planned, a few seconds left\n" in capsys.readouterr().err


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.0, 60.0)), min_size=2, max_size=20))
def test_the_time_left_counts_down_to_nothing(pieces: list[tuple[float, float]]) -> None:
    now = [0.0]
    left = TimeLeft({str(i): effort for i, (effort, _) in enumerate(pieces)}, lambda: now[0])
    for done, (_, seconds) in enumerate(pieces):
        left.begin(str(done), done, len(pieces))
        before = left.seconds()
        now[0] += seconds
        assert 0.0 <= left.seconds() <= before + 1e-6
    left.begin("", len(pieces), len(pieces))
    assert left.seconds() == 0.0


def test_the_time_left_follows_the_efforts() -> None:
    now = [0.0]
    efforts = {"a": 1.0, **{str(i): 1.0 for i in range(40)}, "z": 41.0}
    left = TimeLeft(efforts, lambda: now[0])
    for done, name in enumerate(efforts):
        left.begin(name, done, len(efforts))
        if name == "z":
            break
        now[0] += 1.0
    assert 30.0 < left.seconds() < 60.0  # as long again, not a forty-second part


@pytest.mark.parametrize("asked", [True, False])
def test_optimize_shows_its_progress_unless_told(
    asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    calls: list[tuple[int, int]] = []
    given = {"progress": lambda done, total, text: calls.append((done, total))} if asked else {}
    tilewise.optimize(nn.Conv2d(2, 3, 3), torch.randn(1, 2, 6, 6), rigor="estimate", **given)
    shown = capsys.readouterr().err
    assert bool(calls) is asked
    assert ("tilewise: planning 2 problems, " in shown) is not asked
