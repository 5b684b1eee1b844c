"""How long a device worked on its part of a step, without waiting for it."""

from __future__ import annotations

import time

import torch

__all__ = ["Clock"]


class Clock:
    """Times spans of work on ``device``: on a GPU by events in the current stream, elsewhere by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | float | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @property
    def runs(self) -> bool:
        """Whether a span has begun and not ended."""
        return self._begun is not None

    def start(self) -> None:
        """Begin a span."""
        self._begun = self._event() if self._device.type == "cuda" else time.perf_counter()

    def stop(self) -> None:
        """End the span."""
        if isinstance(self._begun, float):
            self._seconds += time.perf_counter() - self._begun
        elif self._begun is not None:
            self._events.append((self._begun, self._event()))
        self._begun = None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ready(self) -> bool:
        """Whether the device has finished all spans."""
        return all(last.query() for _, last in self._events)

    def seconds(self) -> float:
        """The length of all spans together, which are to be :meth:`ready`."""
        return self._seconds + sum(float(first.elapsed_time(last)) for first, last in self._events) / 1e3
