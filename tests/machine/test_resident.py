"""Peaks start at what is resident, whichever cores allocated and freed."""

from __future__ import annotations

import os

import pytest
from tests.test_cpu import linux, run

from tilewise.machine.resident import flush_counters, reset_peak, resident

FREED_ELSEWHERE = """
import mmap, os
from tilewise.planner.measuring import times as measure
from tilewise.machine.resident import flush_counters

def freed_elsewhere():
    "Fewer pages than a batch are freed on each core: shares that are not added yet."
    cores = sorted(os.sched_getaffinity(0))
    mapping = mmap.mmap(-1, 32 * len(cores) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    mapping.write(bytes(len(mapping)))
    flush_counters()
    for index, core in enumerate(cores):
        os.sched_setaffinity(0, {core})
        mapping.madvise(mmap.MADV_DONTNEED, 32 * index * mmap.PAGESIZE, 31 * mmap.PAGESIZE)
    os.sched_setaffinity(0, cores)
    return mapping

measure.NOISE = 0
for _ in range(12):
    mapping = freed_elsewhere()
    found.append(measure.peak_bytes(lambda: None, torch.device("cpu")))
"""


@pytest.mark.slow
@linux
def test_pages_freed_on_other_cores_are_not_taken_for_a_workspace() -> None:
    assert max(run(f"found = []\n{FREED_ELSEWHERE}\nprint(json.dumps(found))")) <= 48 << 10


@linux
def test_a_settled_peak_is_what_is_resident() -> None:
    cores = os.sched_getaffinity(0)
    flush_counters()
    reset_peak()
    seen = resident()
    assert os.sched_getaffinity(0) == cores
    assert 0 <= seen["VmHWM"] - seen["VmRSS"] <= 256 << 10  # other threads of the process may touch memory meanwhile
    assert 0 < seen["RssFile"] < seen["VmRSS"]


@linux
def test_cores_are_the_callers_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pages: int) -> None:
        raise MemoryError("no page left")

    cores = os.sched_getaffinity(0)
    monkeypatch.setattr("tilewise.machine.resident._take_and_free", fails)
    with pytest.raises(MemoryError):
        flush_counters()
    assert os.sched_getaffinity(0) == cores
