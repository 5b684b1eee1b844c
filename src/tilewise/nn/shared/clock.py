"""How long a device worked on its part of a step, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Clock"]


class Clock:
    """Times spans of work on ``device``: on a GPU by events in the current stream, elsewhere by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        """Time what runs, or is queued, meanwhile."""
        if self._device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self._device)
            first.record(stream)
            yield
            last.record(stream)
            self._events.append((first, last))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def ready(self) -> bool:
        """Whether the device has finished all spans."""
        return all(last.query() for _, last in self._events)

    def seconds(self) -> float:
        """The length of all spans together, which are to be :meth:`ready`."""
        return self._seconds + sum(float(first.elapsed_time(last)) for first, last in self._events) / 1e3
