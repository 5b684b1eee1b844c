"""Writes down the launches of compiled workers while a plan runs, so that native code can repeat them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["WORDS", "Launched", "recorder"]

WORDS = 4
"""The place in a worker's words that says how many words there are."""


class Launched(NamedTuple):
    """A launch of the function at ``worker`` with the ``words`` at the address ``data``, as they were at its start."""

    worker: int
    data: int
    words: tuple[int, ...]
    threads: int


class _Recorder(threading.local):
    """What is written down in this thread: :attr:`events` in order, and what must stay in memory with them."""

    def __init__(self) -> None:
        self.events: list[Any] | None = None
        """``None`` while nothing is written down."""
        self.held: list[Any] = []

    def launched(self, worker: int, data: int, threads: int) -> None:
        """Write a launch down."""
        assert self.events is not None
        count = (ctypes.c_int64 * (WORDS + 1)).from_address(data)[WORDS]
        words = tuple((ctypes.c_int64 * count).from_address(data))
        self.events.append(Launched(worker, data, words, threads))

    def hold(self, thing: Any) -> None:
        """Keep ``thing``, to whose memory a launch may refer, together with what is written down."""
        if self.events is not None:
            self.held.append(thing)

    @contextmanager
    def recording(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Write down what this thread does meanwhile; gives the events and what is held."""
        before = self.events, self.held
        self.events, self.held = [], []
        try:
            yield self.events, self.held
        finally:
            self.events, self.held = before


recorder = _Recorder()
