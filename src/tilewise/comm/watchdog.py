"""Watches the other ranks where waiting for them would hold up a GPU: NCCL's kernels do not wake when a rank is lost.

A thread of each rank writes into the store how many exchanges its program has begun, and reads the others' numbers. One
that fell behind and stands still for the time given is lost, as is one that said that it failed, one whose process is
gone, and one whose thread writes nothing more though its program has not ended in order: replays of CUDA graphs begin
no exchanges. Then the communicators are aborted, so that the GPU goes on, and an error is raised in the main thread
before it can use what was computed. Only the host is asked: the GPU may be capturing a graph.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import distributed_c10d

__all__ = ["MonitoredLink", "Watchdog", "raise_in_main"]

POLLS = 20
"""Looks within the time given."""
JOIN_S = 5.0
"""How long the process's end waits for a thread that asks the store."""


class MonitoredLink(Protocol):
    """The part of :class:`tilewise.comm.link.Link` that a :class:`Watchdog` reads and calls.

    A rank is given by its ``index`` among those of the link. Everything is called from the watchdog's thread.
    """

    @property
    def timeout(self) -> float:
        """Seconds after which a rank that says nothing, or makes no progress, is lost."""
        ...

    @property
    def key(self) -> str:
        """The prefix of the names of this link's entries in the store."""
        ...

    @property
    def index(self) -> int:
        """The index of this rank."""
        ...

    @property
    def others(self) -> Sequence[int]:
        """The indices of the other ranks."""
        ...

    @property
    def progress(self) -> int:
        """The number of exchanges and sums that this rank's program has begun."""
        ...

    @property
    def broken(self) -> bool:
        """Whether a rank is lost already, so that nothing is left to watch."""
        ...

    def late(self) -> int | None:
        """A rank for which a kernel here waited in vain, if any. Only the host is asked."""
        ...

    def trouble(self) -> int | None:
        """A rank that said that it failed, or whose process is gone before its program ended, if any."""
        ...

    def give_up(self, index: int | None) -> None:
        """Give up because rank ``index`` is lost, or with ``None`` because the store is."""
        ...


class Watchdog(threading.Thread):
    """The thread that watches the ranks of ``link``. It ends with the process, or when the link is broken."""

    def __init__(self, link: MonitoredLink) -> None:
        super().__init__(name="tilewise-watchdog", daemon=True)
        self._link, self._interval = link, min(max(link.timeout / POLLS, 0.05), 1.0)
        now = time.monotonic()
        self._stood = {index: Standing(-1, -1, now, now) for index in link.others}
        self._beat, self._over, self._writing = 0, threading.Event(), threading.Lock()

    def run(self) -> None:
        """Watch until a rank or the store is lost."""
        link = self._link
        try:
            store = distributed_c10d._get_default_store()
            atexit.register(self._ended, store)
            while not link.broken:
                if not self._wrote(store):
                    return
                if (late := link.late()) is not None:
                    link.give_up(late)
                    return
                if (stopped := link.trouble()) is not None:
                    link.give_up(stopped)
                    return
                for index in link.others:
                    key = f"{link.key}/alive/{index}"
                    if self._lost(index, store.get(key) if store.check([key]) else b"[0, 0]"):
                        link.give_up(index)
                        return
                self._over.wait(self._interval)
        except RuntimeError:
            # The rank that kept the store ended, unless it is this process that ends.
            if not link.broken and threading.main_thread().is_alive():
                link.give_up(None)

    def _wrote(self, store: Any) -> bool:
        """Write that this rank is alive, and return whether its program still runs."""
        with self._writing:
            if not self._over.is_set():
                self._beat += 1
                store.set(f"{self._link.key}/alive/{self._link.index}", json.dumps([self._link.progress, self._beat]))
            return not self._over.is_set()

    def _ended(self, store: Any) -> None:
        """Write at the program's end that no further sign of life comes, and wait for the thread."""
        with self._writing, contextlib.suppress(RuntimeError):
            self._over.set()
            store.set(f"{self._link.key}/alive/{self._link.index}", json.dumps([self._link.progress, None]))
        # A thread that comes back from the store once Python has ended takes the whole process down with SIGABRT.
        self.join(JOIN_S)

    def _lost(self, index: int, said: bytes) -> bool:
        """Whether rank ``index`` is lost, judged by what it wrote last (``said``, JSON) and how long that stands."""
        number, beat = json.loads(said)
        stood, now = self._stood[index], time.monotonic()
        waited = number < self._link.progress
        if number != stood.number or not waited:
            stood.number, stood.since = number, now
        if beat != stood.beat or beat is None:
            stood.beat, stood.beaten = beat, now
        return now - min(stood.since, stood.beaten) > self._link.timeout


@dataclass(slots=True)
class Standing:
    """The last state that a rank wrote, and since when it stands.

    ``number`` counts its exchanges, whose time runs only while this rank is ahead; ``beat`` counts its signs of life.
    """

    number: int
    beat: int | None
    since: float
    beaten: float


def raise_in_main(error: Exception) -> None:
    """Raise ``error`` in the main thread, as soon as that runs Python code again."""
    kind = type(error)
    attributes = vars(error)

    class Raised(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, *error.args)
            self.__dict__.update(attributes)

    Raised.__name__, Raised.__qualname__, Raised.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    main = threading.main_thread().ident
    assert main is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
