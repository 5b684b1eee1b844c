"""When the thread that plans computes on the host while the program does: in short slices, with rests between them."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["Slices"]

HOOKED = sys.version_info < (3, 12)
"""Whether Python's hook for profilers costs the thread alone that sets it; later, all threads pay for it."""
SLICE_S = 5e-4
"""Seconds that the thread computes before it looks whether it has to rest."""
MOST_REST_S = 0.05
"""Most seconds of one rest: the thread may hold a lock that the program wants."""
STILL_STEPS, STILL_S = 2.0, 0.2
"""A program that began no step for so many times the last one, and so many seconds, stands still."""
SWITCH_S = 1e-4
"""Seconds after which the thread hands Python's lock back that the program waits for. Python's own 5 ms are long beside
a step on a GPU."""


class Slices:
    """Cuts work in Python into slices, so that the program hardly notices it: both need Python's lock.

    After each slice the thread rests, so that it computes for ``share`` of the time. On a GPU it need not rest while
    the program is in C++, where it launches a backward (:meth:`moment`). One thread uses :meth:`cut` and :meth:`look`;
    the program may call the others.
    """

    def __init__(self) -> None:
        self.share = 1.0
        """The share of the time for which the thread may compute; 1 where nobody is to be spared."""
        self.ahead = False
        """Whether the device computes and the host is ahead of it, so that the host has time in the program's steps."""
        self.spent_s = 0.0
        """Seconds that the thread computed beside the program."""
        self.is_cutting = False
        self._stepped_at, self._step_s = time.perf_counter(), 1.0
        self._changed = threading.Condition()
        self._free_until = 0.0
        self._hurries = False
        self._look_at = self._from = self._owed = 0.0
        self._switch_s: float | None = None

    def moment(self, seconds: float) -> None:
        """Say that the program does without Python's lock for so long from now on; 0 ends that."""
        if not self.is_cutting:
            return
        with self._changed:
            self._free_until = time.perf_counter() + seconds
            self._changed.notify_all()

    def stepped(self) -> None:
        """Say that a step of the program begins."""
        now = time.perf_counter()
        self._step_s, self._stepped_at = now - self._stepped_at, now

    def hurry(self) -> None:
        """Have the thread rest no more: it is to end, or the program waits for it."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()

    def take_time(self) -> None:
        """Undo :meth:`hurry`."""
        self._hurries = False

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """On the thread: cut what is inside into slices.

        Calls of functions are where it looks, by Python's hook for profilers. Where somebody else profiles it, or the
        hook is not this thread's alone, only :meth:`look` is left.
        """
        self._from, self._look_at = time.thread_time(), 0.0
        hooks = HOOKED and sys.getprofile() is None
        self._switch_s = sys.getswitchinterval()
        self.is_cutting = True
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        if hooks:
            sys.setprofile(self._called)
        try:
            yield
        finally:
            if hooks:
                sys.setprofile(None)
            self.is_cutting = False
            self.put_back()
            self.spent_s += time.thread_time() - self._from

    def put_back(self) -> None:
        """Let threads switch as before :meth:`cut`; in a forked child, too, where the thread does not exist."""
        if self._switch_s is not None:
            sys.setswitchinterval(self._switch_s)
            self._switch_s = None

    def look(self) -> None:
        """On the thread: rest where its slice is over."""
        self._look_at = math.inf  # what is called here is no reason to look
        now = time.perf_counter()
        # The program may stand still because it waits for a lock that this thread holds, of an import say.
        still = now - self._stepped_at > STILL_STEPS * self._step_s + STILL_S
        if self._hurries or self.share >= 1.0 or still:
            self._begin(SLICE_S)
            return
        if self.ahead and now < self._free_until:
            self._begin(min(SLICE_S, self._free_until - now))
            return
        used = time.thread_time() - self._from
        if used < SLICE_S:
            self._look_at = now + SLICE_S - used
            return
        self._owed += used / self.share - used
        with self._changed:
            # Where a backward comes sooner or later, it is worth more to wait for it.
            self._changed.wait(MOST_REST_S if self.ahead else min(self._owed, MOST_REST_S))
        # What is still owed after one long call is paid by the next slices: a lock may be held.
        self._owed = max(0.0, self._owed - (time.perf_counter() - now))
        self._begin(SLICE_S)

    def _begin(self, seconds: float) -> None:
        """Begin a slice."""
        computed = time.thread_time()
        self.spent_s += computed - self._from
        self._from = computed
        self._look_at = time.perf_counter() + seconds

    def _called(self, frame: object, event: str, argument: object) -> None:
        """The hook: a function is called or returns."""
        if time.perf_counter() >= self._look_at:
            self.look()
