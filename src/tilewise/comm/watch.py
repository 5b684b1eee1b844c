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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from tilewise.comm.link import Link

__all__ = ["Watch", "raise_in_main"]

POLLS = 20
"""Looks within the time given."""
JOIN_S = 5.0
"""How long the process's end waits for a thread that asks the store."""


class Watch(threading.Thread):
    """The watching thread of ``link``; it ends with the process, or when the link is broken."""

    def __init__(self, link: Link) -> None:
        super().__init__(name="tilewise-watch", daemon=True)
        self._link, self._interval = link, min(max(link.timeout / POLLS, 0.05), 1.0)
        now = time.monotonic()
        self._stood = {index: Standing(-1, -1, now, now) for index in link.others}
        self._beat, self._over, self._writing = 0, threading.Event(), threading.Lock()

    def run(self) -> None:
        """Look until something is lost."""
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
        """Say that this rank is there, unless it ended."""
        with self._writing:
            if not self._over.is_set():
                self._beat += 1
                store.set(f"{self._link.key}/alive/{self._link.index}", json.dumps([self._link.progress, self._beat]))
            return not self._over.is_set()

    def _ended(self, store: Any) -> None:
        """At the program's end: nobody need wait for this rank's next word, unless for an exchange."""
        with self._writing, contextlib.suppress(RuntimeError):
            self._over.set()
            store.set(f"{self._link.key}/alive/{self._link.index}", json.dumps([self._link.progress, None]))
        # A thread that comes back from the store once Python has ended takes the whole process down with SIGABRT.
        self.join(JOIN_S)

    def _lost(self, index: int, said: bytes) -> bool:
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
    """What a rank last said, and since when: its number of exchanges while others are ahead, and its beats."""

    number: int
    beat: int | None
    since: float
    beaten: float


def raise_in_main(error: Exception) -> None:
    """Raise ``error`` in the main thread, as soon as it runs Python again."""
    kind = type(error)
    said = vars(error)

    class Raised(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, *error.args)
            self.__dict__.update(said)

    Raised.__name__, Raised.__qualname__, Raised.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    main = threading.main_thread().ident
    assert main is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
