"""How much of the host other processes use: as the system counts it, over spans of any length."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewise.machine import load

CORES = os.cpu_count() or 1
SYSTEM = Path("/proc/stat")
BUSY_LOOP = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


@pytest.fixture(autouse=True)
def _no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_spans", deque(maxlen=512))


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own counts."""
    if not SYSTEM.exists():
        pytest.skip("Linux alone tells")
    monkeypatch.setattr(load, "SYSTEM", SYSTEM)


@pytest.fixture
def others() -> Iterator[list[int]]:
    """Ids of processes that keep all cores busy."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(CORES)]
    time.sleep(0.3)
    yield [process.pid for process in running]
    for process in running:
        process.kill()
        process.wait()


class Host:
    """A host of four cores whose clock, idle cores and own time are set by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = load.Moment(100.0, 0.0, 0.0)
        self.slept: list[float] = []
        patch.setattr(load, "begin", lambda: self.now)
        patch.setattr(load, "cpu_count", lambda: 4)
        patch.setattr(load.time, "monotonic", lambda: self.now.at)
        patch.setattr(load.time, "sleep", self.sleep)

    def passes(self, seconds: float, *, own: float, others: float) -> None:
        """Let time pass in which this process and others use so many cores."""
        now = self.now
        idle = now.idle + seconds * (4 - own - others)
        self.now = load.Moment(now.at + seconds, idle, now.own + seconds * own)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.passes(seconds, own=0.0, others=1.0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(
    ("own", "others", "share"), [(4.0, 0.0, 0.0), (2.0, 2.0, 0.5), (0.0, 3.0, 0.75), (5.0, 0.0, 0.0)]
)
def test_what_this_process_uses_is_no_load(host: Host, own: float, others: float, share: float) -> None:
    """Nor may rounding of the counts make it negative."""
    begun = load.begin()
    host.passes(1.0, own=own, others=others)
    assert load.others_since(begun) == pytest.approx(share)
    assert host.slept == []


def test_short_spans_are_taken_together_and_waited_for_once(host: Host) -> None:
    shares = []
    for _ in range(30):
        begun = load.begin()
        host.passes(0.02, own=2.0, others=2.0)
        shares.append(load.others_since(begun))
        host.passes(0.1, own=0.0, others=0.0)  # in which nothing was measured
    assert host.slept == [pytest.approx(load.LEAST_S - 0.02, abs=1e-3)]
    assert shares[0] == pytest.approx((0.02 * 2 + 0.23 * 1) / (4 * 0.25), abs=1e-3)
    assert shares[-1] == pytest.approx(0.5)


def test_where_nothing_is_waited_for_short_spans_are_unknown_or_rough(host: Host) -> None:
    shares = []
    with load.not_waiting():
        assert load.others_now() is None
        for _ in range(4):
            begun = load.begin()
            host.passes(0.02, own=2.0, others=2.0)
            shares.append(load.others_since(begun))
    assert shares == [None, None, pytest.approx(0.5), pytest.approx(0.5)]
    assert host.slept == []
    load.others_since(load.begin())
    assert host.slept != []


def test_what_was_seen_long_ago_is_not_now(host: Host) -> None:
    begun = load.begin()
    host.passes(1.0, own=0.0, others=4.0)
    assert load.others_since(begun) == load.others_now() == 1.0
    assert host.slept == []
    host.passes(load.FRESH_S + 1, own=0.0, others=0.0)
    assert load.others_now() == pytest.approx(0.25)  # of one core of four, while it looked
    assert len(host.slept) == 1


@pytest.mark.parametrize("content", [None, "", "cpu 1 2\n", "cpu a b c d e f\n", "ÿ", "intr 1 2 3 4 5 6\n"])
def test_where_the_system_does_not_tell_the_load_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    """Unknown, not none."""
    monkeypatch.setattr(load, "SYSTEM", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content, encoding="utf-8")
    begun = load.begin()
    assert begun is None
    assert load.others_since(begun) is None
    assert load.others_now() is None


def test_a_system_that_ceases_to_tell(system: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = load.begin()
    assert begun is not None
    monkeypatch.setattr(load, "SYSTEM", tmp_path / "gone")
    assert load.others_since(begun) is None


def test_the_system_tells_of_other_processes(system: None, others: list[int]) -> None:
    share = load.others_now()
    assert share is not None
    assert share > 0.8


@pytest.fixture
def one_core() -> Iterator[int]:
    """One of several cores, on which alone this process may run."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core is all there is")
    core = max(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def test_what_runs_on_cores_of_others_is_no_load(
    one_core: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counts of a system in which every other core is busy all the time."""
    system, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(load, "SYSTEM", system)

    def write(idle_s: float) -> None:
        lines = [f"cpu{core} 9 9 9 {round(idle_s * ticks) if core == one_core else 7} 0 0" for core in range(CORES)]
        system.write_text("\n".join(["cpu 9 9 9 7 0 0", *lines, "intr 5"]), encoding="utf-8")

    write(5.0)
    begun = load.begin()
    assert begun is not None
    assert begun.idle == 5.0
    time.sleep(load.LEAST_S)
    write(5.0 + time.monotonic() - begun.at)
    assert load.others_since(begun) == pytest.approx(0.0, abs=0.1)
    system.write_text("cpu 9 9 9 7 0 0\n", encoding="utf-8")  # a system that does not tell of single cores
    assert load.begin() is None


def test_processes_that_help_count_as_this_one(system: None, others: list[int]) -> None:
    with load.helped_by(lambda: [*others, 2**30]):
        begun = now = load.begin()
        assert begun is not None
        assert now is not None
        while now.own - begun.own < 0.2 * CORES:  # however busy the host is
            assert now.at - begun.at < 60.0
            time.sleep(0.5)
            now = load.begin()
            assert now is not None
        share = load.others_since(begun)
    assert share is not None
    assert share <= 1 - (now.own - begun.own) / (CORES * (now.at - begun.at)) + 0.1
    after = load.begin()
    assert after is not None
    assert after.own < now.own


def test_the_systems_counts_hold_what_this_process_computes(system: None) -> None:
    """What this process computes counts as its own: with what others do it is at most all there is."""
    begun = load.begin()
    assert begun is not None
    while time.process_time() < begun.own + 0.4:
        pass
    now = load.begin()
    assert now is not None
    share = load.others_since(begun)
    assert share is not None
    assert share <= 1 - (now.own - begun.own) / (CORES * (now.at - begun.at)) + 0.1
