"""The baton between a program and the thread that plans: one of them runs at any time, and both can end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tilewise.machine.torch_state import BENCHMARK, setting
from tilewise.machine.turns import taking
from tilewise.nn.background.baton import Baton, Stopped


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Baton], None]], Baton]]:
    """Starts a thread that has a baton; all are ended after the test."""
    begun: list[tuple[Baton, threading.Thread]] = []

    def begin(work: Callable[[Baton], None]) -> Baton:
        baton = Baton()

        def run() -> None:
            try:
                with taking(baton):
                    baton.rest()
                    work(baton)
            except Stopped:
                pass
            finally:
                baton.end()

        thread = threading.Thread(target=run, daemon=True)
        begun.append((baton, thread))
        thread.start()
        return baton

    yield begin
    for baton, thread in begun:
        baton.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_a_turn_ends_at_the_first_pause_after_its_time(start: Any) -> None:
    ran: list[int] = []

    def work(baton: Baton) -> None:
        for number in range(1000):
            ran.append(number)
            baton.pause()

    baton = start(work)
    assert ran == []
    for count in range(1, 4):
        baton.lend(0.0)
        assert len(ran) == count
    baton.lend(60.0)
    assert len(ran) == 1000
    baton.lend(60.0)  # the thread has ended


def test_flags_of_the_thread_are_not_the_programs(start: Any) -> None:
    before = torch.backends.cudnn.benchmark
    seen: list[bool] = []

    def work(baton: Baton) -> None:
        with setting(BENCHMARK, not before):
            for _ in range(3):
                seen.append(torch.backends.cudnn.benchmark)
                baton.pause()
            with baton.apart():
                time.sleep(0.05)
            seen.append(torch.backends.cudnn.benchmark)

    baton = start(work)
    for _ in range(6):
        baton.lend(0.0)
        assert torch.backends.cudnn.benchmark is before
        baton.wait_while_apart(10)
    baton.lend(60.0)
    assert seen == [not before] * 4
    assert torch.backends.cudnn.benchmark is before


def test_the_program_goes_on_beside_a_thread_that_is_apart(start: Any) -> None:
    done, after = threading.Event(), threading.Event()

    def work(baton: Baton) -> None:
        with baton.apart():
            done.wait(10)
        after.set()

    baton = start(work)
    baton.lend(60.0)
    assert baton.is_apart
    baton.lend(60.0)  # nothing to do for it
    done.set()
    baton.wait_while_apart(10)
    assert not baton.is_apart
    assert not after.is_set()  # it waits for its turn
    baton.lend(60.0)
    assert after.is_set()


def test_control_c_stops_the_thread_at_its_next_pause(start: Any) -> None:
    running = threading.Event()
    ran = [0]

    def work(baton: Baton) -> None:
        while True:
            ran[0] += 1
            running.set()
            time.sleep(0.01)
            baton.pause()

    baton = start(work)

    def interrupt() -> None:
        running.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        baton.lend(3600.0)
    count = ran[0]
    time.sleep(0.05)
    assert ran[0] == count
    baton.lend(0.0)
    assert ran[0] == count + 1
