"""What a thread computes beside a program: how much of the time, and when it need not rest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tilewise.nn.background.backwards import SHARE, Backwards
from tilewise.nn.background.baton import Baton
from tilewise.nn.background.slices import HOOKED, SLICE_S, SWITCH_S, Slices

COMPUTED_S = 0.02


def compute(seconds: float, look: Callable[[], None]) -> None:
    """Call functions for so many seconds of this thread's own time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(100))
        if not HOOKED:
            look()


def on_a_thread(slices: Slices) -> float:
    """How long a thread takes in real time to compute in slices."""
    took: list[float] = []

    def work() -> None:
        begin = time.perf_counter()
        with slices.cut():
            compute(COMPUTED_S, slices.look)
        took.append(time.perf_counter() - begin)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return took[0]


def test_a_thread_rests_for_the_rest_of_its_share() -> None:
    slices = Slices()
    slices.share, slices._step_s = 0.1, 3600.0
    # The last slices are not followed by a rest.
    assert on_a_thread(slices) > (COMPUTED_S - 4 * SLICE_S) / 0.1 * 0.7
    assert slices.spent_s >= COMPUTED_S


def test_nothing_is_rested_where_nobody_is_to_be_spared() -> None:
    slices = Slices()
    before = sys.getswitchinterval()
    slices.share = 1e-6
    slices.hurry()
    seen: list[float] = []
    waiting = threading.Thread(target=lambda: seen.append(on_a_thread(slices)))
    waiting.start()
    waiting.join(30)
    assert seen
    assert sys.getswitchinterval() == before


def test_nothing_is_rested_while_the_program_stands_still() -> None:
    """It may wait for a lock that the thread holds."""
    slices = Slices()
    slices.share = 1e-6
    slices.stepped()
    slices.stepped()  # so steps are short
    assert on_a_thread(slices) < 10


def test_the_thread_goes_on_while_the_program_is_elsewhere() -> None:
    """Within a moment there are no rests; at its end there are again."""
    slices = Slices()
    slices.share, slices.ahead = 1e-3, True
    slices._step_s = 3600.0
    stop = threading.Event()

    def tell() -> None:
        while not stop.is_set():
            slices.moment(0.5)
            time.sleep(0.01)

    teller = threading.Thread(target=tell)
    teller.start()
    took = on_a_thread(slices)  # with rests it would be 20 s
    stop.set()
    teller.join(10)
    assert took < 10


def test_python_switches_sooner_meanwhile_and_not_afterwards() -> None:
    before = sys.getswitchinterval()
    slices = Slices()
    with slices.cut():
        assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_S), rel=0.1)
        assert (sys.getprofile() is not None) is HOOKED
    assert sys.getswitchinterval() == before
    assert sys.getprofile() is None


def test_another_profiler_is_left_alone() -> None:
    def profiler(*rest: object) -> None:
        """Somebody else's."""

    sys.setprofile(profiler)
    try:
        with Slices().cut():
            assert sys.getprofile() is profiler
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_a_backward_is_foreseen_by_those_before_it() -> None:
    backwards, told = Backwards(), list[float]()
    weight = torch.ones(64, 64, dtype=torch.float32, requires_grad=True)
    for _ in range(3):
        loss = (weight @ weight).sum()
        assert loss.grad_fn is not None
        loss.grad_fn.register_prehook(lambda gradients: backwards.begin(told.append))
        loss.backward()
    assert told[0] == told[2] == told[4] == 0.0
    assert told[1] == SHARE * backwards._took[0]
    assert told[3] == SHARE * min(list(backwards._took)[:2])


def test_what_is_short_stays_in_the_turn_where_the_host_computes() -> None:
    baton = Baton()
    with baton.beside(short=True):
        assert not baton.is_apart
    baton.keeps_to_turns = True
    with baton.beside():
        assert not baton.is_apart
