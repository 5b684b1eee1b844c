"""The environment a benchmark's process must be born with."""

from __future__ import annotations

import os
import sys

KEEP = str(1 << 34)
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": KEEP,
    "MALLOC_TRIM_THRESHOLD_": KEEP,
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""With glibc's defaults every large result is mapped and faulted in anew, which costs more than some convolutions do:
both sides of a comparison on a CPU get memory that stays. glibc reads these once, before ``main``."""


def ensure_malloc_keeps_memory() -> None:
    """Start this program again with :data:`MALLOC` in its environment, unless it is there or this is not Linux."""
    if sys.platform != "linux" or all(name in os.environ for name in MALLOC):
        return
    environment = {**MALLOC, **os.environ}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
