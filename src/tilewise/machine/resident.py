"""Resident memory of a process as Linux counts it: now, and at its peak.

Since version 6.2 Linux counts a process's pages in one counter per core, which it adds to the sum once it reaches a
batch. ``/proc/self/status`` adds all counters, but the peak is kept by the sum alone. Where a core freed what another
allocated, the peak is above what was ever resident, by up to a batch for each core.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

__all__ = ["flush_counters", "reset_peak", "resident"]

PAGE = mmap.PAGESIZE
TABLE = PAGE // 8
"""Pages of one page table. Pages that are unmapped within one table are counted at once."""
LEAST_BATCH = 32
"""Least pages of a batch; two for each core where that is more (``lib/percpu_counter.c``)."""


def resident() -> dict[str, int]:
    """Bytes of this process in memory: now (``VmRSS``), of files among them (``RssFile``), at the peak (``VmHWM``).

    Raises ``RuntimeError`` where the system does not tell.
    """
    sizes = {}
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssFile"):
                sizes[name] = int(value.split()[0]) * 1024
    if len(sizes) < 3:
        raise RuntimeError("/proc/self/status does not tell a CPU's memory")
    return sizes


def reset_peak() -> None:
    """Make what is resident now the peak. Raises ``RuntimeError`` where the system does not allow that."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError as error:
        raise RuntimeError("/proc/self/clear_refs cannot be written") from error


def flush_counters() -> None:
    """Add every core's counter to the sum, so that the next peak begins at what is resident.

    The calling thread visits each of its cores and frees more than a batch of pages there at once. Afterwards it may
    run on the same cores as before.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    pages = min(TABLE, 2 * max(LEAST_BATCH, 2 * (os.cpu_count() or 1)))
    try:
        for core in cores:
            with contextlib.suppress(OSError):  # a core that went offline has no share
                os.sched_setaffinity(0, {core})
                _take_and_free(pages)
    finally:
        os.sched_setaffinity(0, cores)


def _take_and_free(pages: int) -> None:
    """Touch ``pages`` pages of one page table, and unmap them."""
    with mmap.mmap(-1, (TABLE + pages) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_NOHUGEPAGE)
        byte = ctypes.c_char.from_buffer(mapping)
        first = -(ctypes.addressof(byte) // PAGE) % TABLE
        del byte  # a mapping with a view is not closed
        for page in range(first, first + pages):
            mapping[page * PAGE] = 1
