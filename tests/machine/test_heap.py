"""What is free in a heap goes back to the system, whichever thread and allocator: what a call takes is seen there."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest
from tests.test_cpu import another_allocator, linux, run

SIZES = (1, 5, 20)
SEEN = f"""
import threading
from tilewise.planner.measuring.times import check_peak_is_known, peak_bytes

def hold(size):
    return lambda: torch.zeros(size << 20, dtype=torch.uint8)

def seen():
    cpu = torch.device("cpu")
    torch.ones(30 << 20, dtype=torch.uint8)  # once freed, blocks of its size come from the heap, too
    for size in {SIZES}:
        for call in (hold(size), lambda: hold(size)().max(), hold(size)):
            found.append([size, peak_bytes(call, cpu) / 2**20])

found = []
"""


def check(found: list[tuple[int, float]], times: int = 1) -> None:
    assert len(found) == 3 * times * len(SIZES)
    for size, taken in found:
        assert abs(taken - size) < 0.5


@pytest.mark.slow
@linux
def test_what_a_call_takes_is_seen_in_any_thread_and_after_a_failure() -> None:
    text = """
seen()
with keep_memory():
    seen()
thread = threading.Thread(target=seen)
thread.start()
thread.join()
try:
    torch.empty(2**60, dtype=torch.uint8)
except RuntimeError:  # glibc has looked for another arena, and stays with it
    seen()
print(json.dumps(found))
"""
    check(run(SEEN + text), times=4)


@linux
@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc", "tcmalloc_minimal"])
def test_other_allocators_give_back_too(name: str) -> None:
    library = ctypes.util.find_library(name)
    if library is None:
        pytest.skip(f"{name} is not installed")
    check(run(f"{SEEN}seen()\nprint(json.dumps(found))", LD_PRELOAD=library))


@pytest.mark.slow
@linux
def test_where_nothing_is_seen_there_are_no_limits(tmp_path: Path) -> None:
    library = another_allocator(tmp_path)
    text = "try: check_peak_is_known(torch.device('cpu'))\nexcept RuntimeError as error: print(json.dumps(str(error)))"
    told = run(SEEN + text, LD_PRELOAD=library)
    assert library in told
    assert "workspace=None would do" in told
