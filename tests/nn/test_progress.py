"""What planning that takes long shows on stderr where nobody asked for progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tilewise
from tilewise.nn import progress
from tilewise.nn.progress import Late


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
    assert capsys.readouterr().err == "tilewise: planning 2 problems\ntilewise: planned 2 problems in 0 s\n"


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
    assert "1/3" in capsys.readouterr().err


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
    assert ("tilewise: planning 2 problems\n" in shown) is not asked
