"""A baton that a program lends to one other thread: of the two, only the one that holds it runs."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

from tilewise.machine.torch_state import put_aside
from tilewise.nn.background.slices import Slices

__all__ = ["Baton", "Stopped"]

PATIENCE_S = 10.0
"""Seconds after Ctrl-C for the other thread to reach the next place where it stops."""

LOOK_S = 0.5
"""Seconds between two looks whether the baton is back, should its sign be missed."""

Clock = Callable[[], float]


class Stopped(BaseException):
    """The thread is to end. It is no ``Exception``: code that takes a failure as a reason must not catch it."""


class Baton:
    """Hands the process over between the program, which calls :meth:`lend`, and the thread that plans.

    The thread calls :meth:`rest` where it has nothing to do, and :meth:`pause` where it may stop in the middle of
    something. Flags of torch's that it has set are put back between its turns. Only one thread of the program lends.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._lent = self._apart = self._stopping = False
        self._back = threading.Lock()
        """Open once the thread has handed the baton back."""
        self._back.acquire()
        self._until = 0.0
        self.slices = Slices()
        """When the thread computes while the program does."""
        self.keeps_to_turns = False
        """Whether the thread must not touch a GPU beside the program."""

    @property
    def is_apart(self) -> bool:
        """Whether the thread waits for other processes, so that it has no use for a turn."""
        return self._apart

    @property
    def is_ending(self) -> bool:
        """Whether the thread is to end."""
        return self._stopping

    def lend(self, seconds: float) -> None:
        """Let the thread run until it rests, or until its first pause after ``seconds``. Returns when it has stopped.

        Nothing happens while it is apart. On Ctrl-C the thread stops at its next pause, then ``KeyboardInterrupt`` is
        raised.
        """
        if self._lent:  # a Ctrl-C did not wait for its end
            self._until = 0.0
            self._wait_until_back()
        with self._changed:
            if self._apart or self._stopping:
                return
            self._until, self._lent = self._clock() + seconds, True
            self._changed.notify_all()
        try:
            self._wait_until_back()
        except BaseException:
            self._until = 0.0
            self._wait_until_back(PATIENCE_S)
            raise

    def _wait_until_back(self, most_s: float = math.inf) -> None:
        """Wait until the thread has handed the baton back, so many seconds at the most.

        Not by the condition: a Ctrl-C within its ``wait`` may find its lock given away and not taken again.
        """
        until = time.perf_counter() + most_s
        while self._lent and time.perf_counter() < until:
            self._back.acquire(timeout=LOOK_S)

    def _hand_back(self) -> None:
        """Let the program go on. :attr:`_changed` is held."""
        self._lent = False
        self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # it is open already
            self._back.release()

    def wait_while_apart(self, seconds: float) -> None:
        """Wait until the thread has use for a turn again, ``seconds`` at the most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._apart, seconds)

    def stop(self) -> None:
        """Have the thread end at its next pause. It is for the caller to wait until it has."""
        with self._changed:
            self._stopping, self._until, self._lent = True, 0.0, True
            self._changed.notify_all()
        self.slices.hurry()

    def rest(self) -> None:
        """On the thread: hand the baton back and wait for the next turn. Raises :class:`Stopped` when it is to end."""
        with self._changed:
            self._hand_back()
            self._changed.wait_for(lambda: self._lent)
            if self._stopping:
                raise Stopped

    def pause(self) -> None:
        """On the thread: go on while its turn lasts, else :meth:`rest` with torch's flags as the program has them.

        Beside the program it rests between its slices. Raises :class:`Stopped` when the thread is to end.
        """
        if self._apart:
            if self._stopping:
                raise Stopped
            self.slices.look()
        elif self._clock() >= self._until or self._stopping:
            with put_aside():
                self.rest()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """On the thread: let the program run beside this block, and wait for the next turn at its end."""
        if self._apart:
            yield
            return
        with put_aside():
            with self._changed:
                if self._stopping:
                    raise Stopped
                self._apart = True
                self._hand_back()
            try:
                yield
            finally:
                with self._changed:
                    self._apart = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._lent)
                    if self._stopping:
                        raise Stopped

    @contextlib.contextmanager
    def beside(self, *, short: bool = False) -> Iterator[None]:
        """On the thread: as :meth:`apart`, for work that computes on the host, in :attr:`slices`.

        What is ``short`` is done within the turn on a CPU, whose steps are long, and where the host is what computes.
        """
        if self._apart or self.keeps_to_turns or (short and not self.slices.ahead):
            yield
            return
        with self.apart(), self.slices.cut():
            yield

    def end(self) -> None:
        """On the thread, as its last act: no turn is waited for any more."""
        with self._changed:
            self._stopping, self._apart = True, False
            self._hand_back()
