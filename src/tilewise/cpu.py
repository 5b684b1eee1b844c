"""Memory of a CPU's process that stays between steps.

glibc hands out large blocks as fresh mappings, and gives the end of its heap back to the system as soon as it is free.
A network's results are such blocks: each step maps them anew, and the kernel fills every page with zeros when it is
first touched, which takes longer than many layers. :func:`keep_memory` tells glibc to keep what was freed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass

from tilewise.heap import AllocatorError, glibc, hand_back, version

__all__ = ["KeptMemory", "keep_memory"]

PARAMETERS = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4}
"""Numbers by which ``mallopt`` knows them."""
NAMES = {"M_TRIM_THRESHOLD": "trim_threshold", "M_TOP_PAD": "top_pad", "M_MMAP_THRESHOLD": "mmap_threshold",
         "M_MMAP_MAX": "mmap_max"}  # fmt: skip
"""In the environment: ``MALLOC_TRIM_THRESHOLD_``, or ``glibc.malloc.trim_threshold`` in ``GLIBC_TUNABLES``."""
USUAL = {"M_TRIM_THRESHOLD": 2**26, "M_TOP_PAD": 2**17, "M_MMAP_THRESHOLD": 2**25, "M_MMAP_MAX": 65536}
"""glibc's own, the two thresholds as far as it raises them by itself once larger blocks were freed: after a first
``mallopt`` it no longer does, and cannot be told to."""
KEEPING = {"M_MMAP_MAX": 0, "M_TRIM_THRESHOLD": -1, "M_TOP_PAD": 2**26}
"""No mappings, nothing given back, and a heap that grows by 64 MiB at a time beyond what is asked for."""
MOST = 2**31 - 1
"""``mallopt`` takes an int."""

_lock = threading.Lock()
_set: dict[str, int] = {}
"""What this process has set, by parameter."""


@dataclass(frozen=True)
class KeptMemory:
    """What :func:`keep_memory` set, by the names of ``mallopt``'s parameters, and what it was ``before``.

    As a context manager it is undone at the end of the block.
    """

    settings: dict[str, int]
    before: dict[str, int]

    def release(self) -> None:
        """Hand memory that is free now back to the system. What is freed from then on is kept."""
        hand_back()

    def undo(self) -> None:
        """Set everything as it was, and hand free memory back to the system."""
        with _lock:
            _apply(self.before)
        self.release()

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"glibc {version()} takes large blocks from its heap and keeps what is freed: {listed}"


def keep_memory() -> KeptMemory:
    """Have this process's allocator keep memory that is freed, for all of torch's tensors on a CPU.

    The process then holds what its largest step took, until :meth:`KeptMemory.release` or :meth:`KeptMemory.undo`; what
    is allocated from then on is kept. Print what it returns to see what was set. It is a setting of the whole process
    and calls may nest. In threads other than the main one blocks beyond glibc's heaps of 64 MiB are fresh mappings
    still.

    Raises ``RuntimeError`` where the allocator is not glibc's, or does not take it.
    """
    with _lock:
        before = {name: _set.get(name, _initial(name)) for name in PARAMETERS}
        _apply(KEEPING)
    return KeptMemory(dict(KEEPING), before)


def _apply(settings: dict[str, int]) -> None:
    try:
        libc = glibc()
    except AllocatorError as error:
        raise RuntimeError(
            f"keep_memory() sets glibc's allocator, and {error}; the settings of the one in use would do"
        ) from None
    for name, value in settings.items():
        if libc.mallopt(PARAMETERS[name], min(value, MOST)) != 1:
            raise RuntimeError(f"mallopt({name}, {value}) was refused by glibc {version()}")
        _set[name] = value


def _initial(name: str) -> int:
    """A parameter as the process was started with it."""
    tunable = f"glibc.malloc.{NAMES[name]}"
    texts = [part.partition("=")[2] for part in os.environ.get("GLIBC_TUNABLES", "").split(":")
             if part.partition("=")[0] == tunable]  # fmt: skip
    texts.append(os.environ.get(f"MALLOC_{NAMES[name].upper()}_", ""))
    for text in texts:
        with contextlib.suppress(ValueError):
            return int(text, 0)
    return USUAL[name]
