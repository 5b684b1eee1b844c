"""Watches the other ranks where waiting for them would hold up a GPU: NCCL's kernels do not wake when a rank is lost.

A thread of each rank writes into the store how many exchanges its program has begun, and reads the others' numbers. One
that fell behind and stands still for the time given is lost, as is one that wrote that it failed. Then the
communicators are aborted, so that the GPU goes on, and an error is raised in the main thread before it can use what was
computed. Only the host is asked: the GPU may be capturing a graph.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from tilewise.comm.link import Link

__all__ = ["Watch", "raise_in_main"]

POLLS = 20
"""Looks within the time given."""


class Watch(threading.Thread):
    """The watching thread of ``link``; it ends with the process, or when the link is broken."""

    def __init__(self, link: Link) -> None:
        super().__init__(name="tilewise-watch", daemon=True)
        self._link, self._interval = link, min(max(link.timeout / POLLS, 0.05), 1.0)
        self._stood: dict[int, tuple[int, float]] = {index: (-1, time.monotonic()) for index in link.others}

    def run(self) -> None:
        """Look until something is lost."""
        link = self._link
        try:
            store = distributed_c10d._get_default_store()
            while not link.broken:
                store.set(f"{link.key}/alive/{link.index}", json.dumps([link.progress, link.doing]))
                for index in link.others:
                    key = f"{link.key}/alive/{index}"
                    if store.check([f"{link.key}/{index}"]) or self._stands(
                        index, store.get(key) if store.check([key]) else b"[0, null]"
                    ):
                        link.give_up(index)
                        return
                time.sleep(self._interval)
        except RuntimeError:
            # The rank that kept the store ended, unless it is this process that ends.
            if not link.broken and threading.main_thread().is_alive():
                link.give_up(None)

    def _stands(self, index: int, said: bytes) -> bool:
        number, now = int(json.loads(said)[0]), time.monotonic()
        before, since = self._stood[index]
        if number != before or number >= self._link.progress:
            self._stood[index] = (number, now)
            return False
        return now - since > self._link.timeout


def raise_in_main(error: Exception) -> None:
    """Raise ``error`` in the main thread, as soon as it runs Python again."""
    kind = type(error)
    said = str(error)

    class Raised(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(said)

    Raised.__name__, Raised.__qualname__, Raised.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    main = threading.main_thread().ident
    assert main is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Raised))
