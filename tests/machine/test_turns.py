"""Work that proceeds in turns: where it may stop, and where nothing stops it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tilewise.machine.turns import OutOfTime, in_turns, pause, stopped_when, taking, wait_apart, whole


class Counted:
    """A turn that counts where it could end."""

    is_ending = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pause(self) -> None:
        self.seen.append("pause")

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        self.seen.append("apart")
        yield
        self.seen.append("back")


def test_a_thread_without_turns_never_stops() -> None:
    pause()
    assert not in_turns()
    assert wait_apart(lambda: True)


def test_pauses_are_offered_but_in_what_is_whole() -> None:
    turn = Counted()
    with taking(turn):
        assert in_turns()
        pause()
        with whole(), whole():
            pause()
            wait_apart(lambda: True)
        pause()
        wait_apart(lambda: True)
    pause()
    assert turn.seen == ["pause", "pause", "apart", "back"]


def test_waiting_ends_with_the_thread() -> None:
    turn = Counted()
    turn.is_ending = True
    with taking(turn):
        assert not wait_apart(lambda: False)
    assert turn.seen == ["apart", "back"]


def test_work_stops_where_it_may_when_its_time_is_over() -> None:
    over: list[str] = []
    done: list[str] = []

    def work() -> None:
        pause()
        over.append("over")
        with whole():
            pause()
            assert wait_apart(lambda: True)
        done.append("what is whole")
        with contextlib.suppress(Exception):  # as a search loses a candidate
            pause()
        done.append("more")

    with pytest.raises(OutOfTime), stopped_when(lambda: bool(over)):
        work()
    assert done == ["what is whole"]
    pause()


def test_waiting_stops_when_the_time_is_over() -> None:
    with pytest.raises(OutOfTime), stopped_when(lambda: True):
        wait_apart(lambda: False)


def test_an_inner_end_gives_way_to_the_outer_one() -> None:
    with stopped_when(lambda: False):
        with pytest.raises(OutOfTime), stopped_when(lambda: True):
            pause()
        pause()
