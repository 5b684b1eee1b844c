"""Turns: work on a thread of its own that proceeds only now and then, between the steps of a program.

Long work marks with :func:`pause` where it may stop for a while. Where it has the process for itself the marks do
nothing. On a thread that works in turns (:func:`taking`) they let the program go on, and the work continues where it
stopped when its next turn comes. What must not be cut in two is inside :func:`whole`. For other processes it waits with
:func:`wait_apart`. What needs no quiet device (imports, reading a database, building candidates) is inside
:func:`beside`: the program goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

__all__ = ["OutOfTime", "Turn", "beside", "in_turns", "pause", "stopped_when", "taking", "wait_apart", "whole"]

LOOK_S = 0.05
"""Seconds between two looks whether what is waited for is done."""


class Turn(Protocol):
    """What decides when a thread's turn is over."""

    @property
    def is_ending(self) -> bool:
        """Whether the thread is to end."""
        ...

    def pause(self) -> None:
        """Return at once while the turn lasts; else let the program go on, and return in the next turn."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """A context in which the program goes on beside the thread, and whose end waits for the next turn."""
        ...

    def beside(self, *, short: bool) -> AbstractContextManager[None]:
        """As :meth:`apart`, for work in Python, which is done in slices. What is ``short`` may be done in the turn."""
        ...


class OutOfTime(BaseException):
    """Work is to end now, at a place where it may stop. As it is no ``Exception``, no candidate is lost for it."""


class _Here(threading.local):
    """The turn of each thread, how many blocks it is in that are not to be divided, and whether it is to stop."""

    turn: Turn | None = None
    undivided: int = 0
    is_over: Callable[[], bool] | None = None


_here = _Here()


@contextmanager
def taking(turn: Turn) -> Iterator[None]:
    """Let this thread work in turns within the block."""
    _here.turn = turn
    try:
        yield
    finally:
        _here.turn = None


def in_turns() -> bool:
    """Whether this thread works in turns, with a program beside it that goes on in between."""
    return _here.turn is not None


@contextmanager
def stopped_when(is_over: Callable[[], bool]) -> Iterator[None]:
    """Raise :class:`OutOfTime` within the block, in this thread, at the first place to stop where ``is_over()``.

    The caller catches it. What was measured until then is kept, as after Ctrl-C.
    """
    before = _here.is_over
    _here.is_over = is_over
    try:
        yield
    finally:
        _here.is_over = before


def pause() -> None:
    """Mark a place where work may stop for a while, or for good where its time is over.

    Nothing happens on a thread that has neither turns nor an end.
    """
    if _here.undivided:
        return
    if _here.is_over is not None and _here.is_over():
        raise OutOfTime("the time for this work is over")
    if _here.turn is not None:
        _here.turn.pause()


@contextmanager
def whole() -> Iterator[None]:
    """Make no pause within the block: what it watches, such as a peak of memory, must not hold the program's steps."""
    _here.undivided += 1
    try:
        yield
    finally:
        _here.undivided -= 1


@contextmanager
def beside(*, short: bool = False) -> Iterator[None]:
    """Do what is inside beside the program, where this thread works in turns, and wait for the next turn at its end.

    Nothing inside may be measured, set torch's flags or wait for a device. What is ``short`` is done within the turn
    where waiting for another would take longer.
    """
    turn = _here.turn
    with nullcontext() if turn is None or _here.undivided else turn.beside(short=short):
        yield


def wait_apart(is_done: Callable[[], bool]) -> bool:
    """Wait until ``is_done()``, while the program goes on. Returns whether it is; it is not where the thread is to end.

    ``is_done`` must not touch torch or a device.
    """
    turn = _here.turn
    with nullcontext() if turn is None or _here.undivided else turn.apart():
        while not is_done():
            if turn is not None and turn.is_ending:
                return False
            if _here.is_over is not None and not _here.undivided and _here.is_over():
                raise OutOfTime("the time for this work is over")
            time.sleep(LOOK_S)
    return True
