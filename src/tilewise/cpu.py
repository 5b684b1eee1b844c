"""Keeping freed memory in a CPU's process between training steps.

glibc hands out large blocks as fresh mappings, and gives the end of its heap back to the system as soon as it is free.
A network's results are such blocks: each step maps them anew, and the kernel fills every page with zeros when it is
first touched, which takes longer than many layers. :func:`keep_memory` tells glibc to keep what was freed.

>>> import tilewise.cpu
>>> with tilewise.cpu.keep_memory():
...     y = torch.nn.Conv2d(3, 8, 3)(torch.randn(2, 3, 16, 16))
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass

from tilewise.machine.heap import AllocatorError, glibc, hand_back, version

__all__ = ["KeptMemory", "keep_memory"]

PARAMETERS = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4}
"""Numbers of ``mallopt``'s parameters."""
NAMES = {"M_TRIM_THRESHOLD": "trim_threshold", "M_TOP_PAD": "top_pad", "M_MMAP_THRESHOLD": "mmap_threshold",
         "M_MMAP_MAX": "mmap_max"}  # fmt: skip
"""Names in the environment: ``MALLOC_TRIM_THRESHOLD_``, or ``glibc.malloc.trim_threshold`` in ``GLIBC_TUNABLES``."""
USUAL = {"M_TRIM_THRESHOLD": 2**26, "M_TOP_PAD": 2**17, "M_MMAP_THRESHOLD": 2**25, "M_MMAP_MAX": 65536}
"""glibc's defaults. The two thresholds are the highest that glibc raises them to by itself, once larger blocks were
freed: after a first ``mallopt`` it no longer does that, and cannot be told to."""
KEEPING = {"M_MMAP_MAX": 0, "M_TRIM_THRESHOLD": -1, "M_TOP_PAD": 2**26}
"""Settings that keep memory: no mappings, nothing given back, and a heap that grows by 64 MiB beyond what is asked."""
MOST = 2**31 - 1
"""The largest value of a parameter, which is a C int."""

_lock = threading.Lock()
_set: dict[str, int] = {}
"""What this process has set, by parameter."""


@dataclass(frozen=True)
class KeptMemory:
    """What :func:`keep_memory` has set, and how to undo it.

    ``settings`` holds the values set, ``before`` those from before, by the names of ``mallopt``'s parameters. As a
    context manager it is undone at the end of the block. Printed, it says what was set.

    >>> kept = keep_memory()
    >>> kept.settings["M_MMAP_MAX"]
    0
    >>> kept.undo()
    """

    settings: dict[str, int]
    before: dict[str, int]

    def release(self) -> None:
        """Give memory that is free now back to the system. Memory that is freed later is kept again."""
        hand_back()

    def undo(self) -> None:
        """Restore the settings from before and give free memory back to the system.

        Raises ``RuntimeError`` where the allocator refuses a setting.
        """
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

    The process then holds as much as its largest step took, until :meth:`KeptMemory.release` or
    :meth:`KeptMemory.undo`. It applies to what is allocated from then on. It is a setting of the whole process, and
    calls may nest. In threads other than the main one, blocks beyond glibc's heaps of 64 MiB are still fresh mappings.

    Returns a :class:`KeptMemory`. Raises ``RuntimeError`` where the allocator is not glibc's, or refuses a setting.

    >>> with keep_memory() as kept:
    ...     sorted(kept.settings)
    ['M_MMAP_MAX', 'M_TOP_PAD', 'M_TRIM_THRESHOLD']
    """
    with _lock:
        before = {name: _set.get(name, _initial(name)) for name in PARAMETERS}
        _apply(KEEPING)
    return KeptMemory(dict(KEEPING), before)


def _apply(settings: dict[str, int]) -> None:
    """Set glibc's parameters. Raises ``RuntimeError`` where it is not in use or refuses."""
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
    """The value of a parameter with which the process was started."""
    tunable = f"glibc.malloc.{NAMES[name]}"
    texts = [part.partition("=")[2] for part in os.environ.get("GLIBC_TUNABLES", "").split(":")
             if part.partition("=")[0] == tunable]  # fmt: skip
    texts.append(os.environ.get(f"MALLOC_{NAMES[name].upper()}_", ""))
    for text in texts:
        with contextlib.suppress(ValueError):
            return int(text, 0)
    return USUAL[name]
