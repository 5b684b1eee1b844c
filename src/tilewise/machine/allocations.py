"""What torch's allocator hands out on a CPU while a call runs, to the byte, as torch's profiler reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch._C import _autograd as autograd
from torch._C import _profiler as profiler

__all__ = ["BUSY", "countable", "most_alive", "recorded"]

BUSY = "a profiler is running, and a CPU's memory is counted by torch's: stop it first"
"""Error message where another profiler is running."""


def countable() -> bool:
    """Whether allocations can be recorded: not while another profiler runs in this thread."""
    return not autograd._profiler_enabled()


def recorded(call: Callable[[], object]) -> list[Any]:
    """Run ``call`` and return the profiler's events of this thread in order: allocations, operators and marks.

    Raises ``RuntimeError`` while another profiler runs. Allocations of other threads are not reported.
    """
    if not countable():
        raise RuntimeError(BUSY)
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, False, True, False, False, False, profiler._ExperimentalConfig()
    )
    autograd._enable_profiler_legacy(config)  # the newer one writes to stderr
    try:
        call()
    finally:
        threads = autograd._disable_profiler_legacy()
    return [event for events in threads for event in events]


def most_alive(events: Iterable[Any]) -> int:
    """The most bytes that were allocated at once during ``events``, beyond those allocated before."""
    now = most = 0
    for event in events:
        if event.kind() == "memory_alloc":
            now += event.cpu_memory_usage()
            most = max(most, now)
    return most
