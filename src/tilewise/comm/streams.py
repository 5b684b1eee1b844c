"""Work beside that of the current stream: on a GPU on a stream of its own, on a CPU one after the other."""

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
    """Work that runs beside what the current stream gets meanwhile, until :meth:`join`.

    There is one stream for each device and ``name``, which waits for the current stream where it begins. So memory that
    the two streams used of each other before a ``join`` may be freed after it: neither allocates anew before the other
    is done. ``urgent`` work goes first where both could run. CUDA graphs capture it as a branch.
    """

    __slots__ = ("_device", "_stream")

    def __init__(self, device: torch.device, name: str, urgent: bool = False) -> None:
        self._device = device
        self._stream = _stream(device, name, urgent) if device.type == "cuda" else None

    def both(self, beside: Callable[[], A], here: Callable[[], B], beside_first: bool = False) -> tuple[A, B]:
        """Run ``beside`` on the branch and ``here`` on the current stream, and return both results.

        The branch starts after what the current stream had before. On a GPU ``here`` is launched first, unless
        ``beside_first``: a CUDA graph starts its nodes in the order in which they were captured. On a CPU ``beside`` is
        first, and travels while ``here`` computes.
        """
        if self._stream is None:
            return beside(), here()
        start = torch.cuda.current_stream(self._device).record_event()
        if beside_first:
            with self.after(start):
                beside_result = beside()
            return beside_result, here()
        here_result = here()
        with self.after(start):
            return beside(), here_result

    def after(self, event: torch.cuda.Event) -> contextlib.AbstractContextManager[object]:
        """A block whose work runs on the branch after ``event`` of the current stream."""
        assert self._stream is not None
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def more(self) -> contextlib.AbstractContextManager[object]:
        """A block whose work runs on the branch, without waiting for the current stream again."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for all work of the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class InOrder:
    """Keeps work on several streams of ``device`` in the order of its calls, where it shares counters in memory."""

    __slots__ = ("_device", "_last")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, bool] | None = None

    def __call__(self) -> None:
        """Let the current stream wait for that of the last call, if that is another. Called before each work."""
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
    """Whether ``stream`` is being captured."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _stream(device: torch.device, name: str, urgent: bool) -> torch.cuda.Stream:
    """The stream of ``device`` called ``name``."""
    del name  # one stream for each
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)
