"""Work that proceeds in turns: where it may stop, and where nothing stops it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilewise.machine.turns import in_turns, pause, taking, wait_apart, whole


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
