"""Work beside the current stream's: on a GPU on a stream of its own, on a CPU in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["Branch", "InOrder"]

A = TypeVar("A")
B = TypeVar("B")


class Branch:
    """What is begun here runs beside what the current stream is given meanwhile, until :meth:`join`.

    There is one stream for each device and ``name``; it waits for the current stream where it begins. So whatever the
    two have used of each other's memory by a ``join`` may be freed after it: neither allocates anew before the other is
    done. ``urgent`` work goes first where both could run. CUDA graphs capture it as a branch.
    """

    __slots__ = ("_device", "_stream")

    def __init__(self, device: torch.device, name: str, urgent: bool = False) -> None:
        self._device = device
        self._stream = _stream(device, name, urgent) if device.type == "cuda" else None

    def both(self, beside: Callable[[], A], here: Callable[[], B], beside_first: bool = False) -> tuple[A, B]:
        """What ``beside`` gives, run here, and ``here``, run on the current stream, after all that it was given before.

        On a GPU ``here`` is launched first, unless ``beside_first``: a CUDA graph starts its nodes in the order in
        which they were captured. On a CPU ``beside`` is first, and travels while ``here`` computes.
        """
        if self._stream is None:
            return beside(), here()
        now = torch.cuda.current_stream(self._device).record_event()
        if beside_first:
            with self.after(now):
                begun = beside()
            return begun, here()
        found = here()
        with self.after(now):
            return beside(), found

    def after(self, event: torch.cuda.Event) -> contextlib.AbstractContextManager[object]:
        """Work after ``event`` of the current stream."""
        assert self._stream is not None
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def more(self) -> contextlib.AbstractContextManager[object]:
        """Work after what was begun here, without waiting for the current stream again."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Have the current stream wait for all of it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class InOrder:
    """Has work on several streams of ``device`` go in the order of its calls, where it shares memory that counts."""

    __slots__ = ("_device", "_last")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, bool] | None = None

    def __call__(self) -> None:
        """Have the current stream wait for the last call's, where that is another; before each work."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        capturing = torch.cuda.is_current_stream_capturing()
        last = self._last
        self._last = stream, capturing
        if last is None or last[0] == stream or last[1] != capturing:
            return
        # What was captured before did not run, and a capture cannot wait for what is none of its own.
        if not capturing or _captures(last[0]):
            stream.wait_stream(last[0])


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _stream(device: torch.device, name: str, urgent: bool) -> torch.cuda.Stream:
    del name  # one stream for each
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
