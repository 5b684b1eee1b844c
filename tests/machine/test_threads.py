"""Work at once: every thread's bound on torch's, the caller's own settings, errors, callers at once, forks."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewise.machine import threads
from tilewise.machine.threads import at_once, bounds_threads, side_by_side, with_threads

pytestmark = pytest.mark.skipif(not bounds_threads(), reason="torch's threads cannot be bounded here")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["team", "own"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's team where it can be, and on threads of ours."""
    if request.param == "own":
        monkeypatch.setattr(threads, "_parallel", lambda: None)


def settings() -> tuple[int, int]:
    """OpenMP's and MKL's numbers of threads in this one."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    mkl = library.MKL_Get_Max_Threads() if torch.backends.mkl.is_available() else torch.get_num_threads()
    return torch.get_num_threads(), mkl


def watched(count: int, number: int) -> tuple[dict[int, tuple[int, int]], int]:
    """The settings of each job, and the most threads that the jobs at work together had."""
    seen: dict[int, tuple[int, int]] = {}
    running: dict[int, int] = {}
    most: list[int] = []

    def job(index: int) -> None:
        torch.ones(300, 300) @ torch.ones(300, 300)  # what torch sets first in a thread, it does here
        seen[index] = settings()
        running[index] = seen[index][0]
        most.append(sum(list(running.values())))
        time.sleep(0.005)
        del running[index]

    at_once(job, count, number)
    return seen, max(most)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize(
    ("count", "number", "shares"),
    [
        (1, 4, [4]),
        (2, 1, [1, 1]),
        (2, 2, [1, 1]),
        (2, 4, [2, 2]),
        (2, 5, [3, 2]),
        (3, 8, [3, 3, 2]),
        (4, 4, [1, 1, 1, 1]),
        (5, 2, [1, 1, 1, 1, 1]),
    ],
)
def test_each_has_its_share_and_the_caller_keeps_its_own(count: int, number: int, shares: list[int]) -> None:
    torch.set_num_threads(number)
    outside, here = settings(), threading.get_ident()
    for _ in range(2):
        seen, most = watched(count, number)
        assert [seen[index] for index in range(count)] == [(share, share) for share in shares]
        assert most <= number
    assert settings() == outside
    assert threading.get_ident() == here
    inside: list[tuple[int, int]] = []
    with_threads(lambda: inside.append(settings()), 3)
    assert inside == [(3, 3)]
    assert settings() == outside


@pytest.mark.usefixtures("_either")
def test_all_run_at_once() -> None:
    """None could pass the barrier alone."""
    barrier = threading.Barrier(3)
    at_once(lambda _: barrier.wait(20), 3, 3)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_an_error_reaches_the_caller_when_all_have_ended(number: int) -> None:
    ended: list[int] = []

    def job(index: int) -> None:
        if index:
            raise ValueError(f"job {index}")
        time.sleep(0.02)
        ended.append(index)

    torch.set_num_threads(number)
    with pytest.raises(ValueError, match="job 1"):
        at_once(job, 3, number)
    assert ended == [0]
    at_once(ended.append, 3, number)
    assert sorted(ended) == [0, 0, 1, 2]


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("number", [2, 4])
def test_ctrl_c_reaches_the_caller_when_all_at_work_have_ended(number: int) -> None:
    """Parts write into what the caller owns: none may still do so when the caller goes on."""
    working: set[int] = set()

    def job(index: int) -> None:
        working.add(index)
        try:
            for _ in range(20):
                time.sleep(0.01)
        finally:
            working.remove(index)

    torch.set_num_threads(number)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            at_once(job, 2, number)
        interrupt.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not working
    ended: list[int] = []
    at_once(ended.append, 3, number)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("number", [2, 4])
def test_the_callers_modes_hold_in_each(number: int) -> None:
    def job(index: int) -> None:
        seen[index] = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    for mode, want in ((torch.inference_mode(), (True, False)), (torch.no_grad(), (False, False))):
        seen: dict[int, tuple[bool, bool]] = {}
        with mode:
            at_once(job, 2, number)
        assert seen == {0: want, 1: want}


def nested() -> int:
    """Two at once, each of which has two at once add up ones."""
    found: list[int] = []

    def inner(index: int) -> None:
        found.append(int(torch.ones(99).sum()) + index)

    at_once(lambda _: at_once(inner, 2, torch.get_num_threads()), 2, torch.get_num_threads())
    return sum(found)


@pytest.mark.usefixtures("_either")
def test_many_callers_at_once_and_one_inside_another() -> None:
    sums, barrier = [0] * 6, threading.Barrier(6)

    def caller(number: int) -> None:
        torch.set_num_threads(2 + number % 3)
        barrier.wait(20)
        sums[number] = sum(nested() for _ in range(20))

    started = [threading.Thread(target=caller, args=(number,)) for number in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
    assert sums == [20 * (4 * 99 + 2)] * 6


def test_no_thread_is_made_anew() -> None:
    torch.set_num_threads(4)
    at_once(lambda _: torch.ones(400, 400) @ torch.ones(400, 400), 2, 4)
    before = threading.active_count()
    for _ in range(10):
        at_once(lambda _: None, 2, 4)
    assert threading.active_count() == before


@pytest.mark.usefixtures("_either")
def test_where_no_thread_can_be_started_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(count: int) -> threads._Worker:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_take", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        at_once(lambda _: None, 2, 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_forked_child_has_threads_of_its_own(number: int) -> None:
    torch.set_num_threads(number)
    at_once(lambda _: torch.ones(500, 500) @ torch.ones(500, 500), 2, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        found: list[float] = []
        at_once(lambda i: found.append(float((torch.ones(50, 50) @ torch.ones(50, 50)).sum()) + i), 2, number)
        os._exit(0 if sorted(found) == [125000.0, 125001.0] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_different_jobs_side_by_side_have_the_threads_that_are_named() -> None:
    """Also in calls that follow: each job finds the thread again that had its number before."""
    before = settings()
    places: list[set[int]] = []
    for _ in range(3):
        seen: dict[str, int] = {}
        where: dict[str, int] = {}

        def note(name: str, seen: dict[str, int] = seen, where: dict[str, int] = where) -> None:
            seen[name], where[name] = torch.get_num_threads(), threading.get_ident()

        names = ("wide", "narrow")
        side_by_side([functools.partial(note, name) for name in names], [3, 1])
        assert seen == {"wide": 3, "narrow": 1}
        places.append(set(where.values()))
        assert len(places[-1]) == 2
    assert places[1] == places[2]
    assert settings() == before


def test_the_first_of_different_jobs_that_fails_is_told_after_all_have_ended() -> None:
    ended: list[str] = []

    def slow() -> None:
        time.sleep(0.05)
        ended.append("slow")

    def wrong(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        side_by_side([slow, functools.partial(wrong, "first"), functools.partial(wrong, "second")], [1, 1, 1])
    assert ended == ["slow"]
