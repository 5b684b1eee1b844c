"""How the data of a part get to the device that computes it and back, beside what is computed meanwhile.

A link moves data through slots: a part's operands come into one slot, while the part before is computed from the other
one and the result of the one before that goes back. There is one class for each pair of kinds of devices:

- from the host's memory to a GPU through pinned buffers, on three streams of the GPU;
- from a GPU to another, on streams of both;
- from a GPU to pinned memory of the host, where the CPU computes;
- within the host's memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["SHARED", "Link", "link_between"]

SHARED = -1
"""The slot of operands that all parts use."""
Moves = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a tensor that is written and the one it is copied from, equal in shape."""


class Link:
    """Within the host's memory: copies are made at once, by the thread that asks.

    ``ahead`` says whether a part's operands are moved before the part before it is computed, as is needed where the
    computing takes the thread. A link is for one call. :meth:`close` must be called at its end, also after an error.
    """

    ahead = False

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised vector on the device that computes."""
        return torch.empty(count, dtype=dtype, device="cpu")

    def move_in(self, slot: int, moves: Moves) -> None:
        """Begin to copy operands into ``slot``, once nothing reads it any more."""
        for there, here in moves:
            there.copy_(here)

    @contextlib.contextmanager
    def computing(self, slot: int) -> Iterator[None]:
        """What runs inside finds the operands of ``slot`` in place, and may write its results."""
        yield

    def move_out(self, slot: int, moves: Moves, *, add: bool) -> None:
        """Begin to copy results back out of ``slot``, or with ``add`` to add them, once they are computed."""
        for here, there in moves:
            _put(here, there, add)

    def settle(self, slot: int) -> None:
        """Finish what of :meth:`move_out` the host has to do."""

    def close(self) -> None:
        """Let later work of the devices wait for what is still being copied."""


class _OnGpu(Link):
    """A GPU computes, on a stream of its own beside one for operands and one for results."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        self._in, self._compute, self._out, *_ = _streams.of(gpu)
        self._came: dict[int, torch.cuda.Event] = {}
        self._computed: dict[int, torch.cuda.Event] = {}
        self._went: dict[int, torch.cuda.Event] = {}
        self._in.wait_stream(self._compute)  # memory that a call before has given back

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._compute):
            return torch.empty(count, dtype=dtype, device=self._gpu)

    @contextlib.contextmanager
    def computing(self, slot: int) -> Iterator[None]:
        with torch.cuda.stream(self._compute):
            for events, place in ((self._came, SHARED), (self._came, slot), (self._went, slot)):
                if place in events:
                    self._compute.wait_event(events[place])
            yield
            self._computed[slot] = _recorded(self._compute)

    def close(self) -> None:
        self._compute.wait_stream(self._in)
        self._compute.wait_stream(self._out)


class _FromHostToGpu(_OnGpu):
    """Data lie in the host's memory, and a GPU computes.

    Other memory than pinned goes by way of pinned buffers, as a copy of it would hold the host until it is done.
    """

    def __init__(self, gpu: torch.device) -> None:
        super().__init__(gpu)
        self._pinned: dict[tuple[int, str, int], Tensor] = {}
        self._pending: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}

    def move_in(self, slot: int, moves: Moves) -> None:
        if slot in self._came:
            self._came[slot].synchronize()  # else the pinned buffer would change under a copy
        sources = [self._staged_in(slot, index, there, here) for index, (there, here) in enumerate(moves)]
        with torch.cuda.stream(self._in):
            if slot in self._computed:
                self._in.wait_event(self._computed[slot])
            for (there, _), source in zip(moves, sources, strict=True):
                there.copy_(source, non_blocking=True)
            self._came[slot] = _recorded(self._in)

    def _staged_in(self, slot: int, index: int, there: Tensor, here: Tensor) -> Tensor:
        """``here`` in pinned memory, laid out as ``there``."""
        if here.stride() == there.stride() and here.is_pinned():
            return here
        return self._pinned_like(slot, "in", index, there).copy_(here)

    def _pinned_like(self, slot: int, way: str, index: int, like: Tensor) -> Tensor:
        """A pinned tensor of the shape and strides of ``like``, which is dense, in a buffer that the slot keeps."""
        buffer = self._pinned.get((slot, way, index))
        if buffer is None or buffer.numel() < like.numel():
            buffer = torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
            self._pinned[slot, way, index] = buffer
        return buffer.as_strided(like.shape, like.stride())

    def move_out(self, slot: int, moves: Moves, *, add: bool) -> None:
        self.settle(slot)  # its pinned buffers hold results of an earlier part
        pending = []
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._computed[slot])
            for index, (here, there) in enumerate(moves):
                direct = not add and here.stride() == there.stride() and here.is_pinned()
                target = here if direct else self._pinned_like(slot, "out", index, there)
                target.copy_(there, non_blocking=True)
                if not direct:
                    pending.append((here, target, add))
            self._went[slot] = _recorded(self._out)
        self._pending[slot] = pending

    def settle(self, slot: int) -> None:
        if slot not in self._pending:
            return
        self._went[slot].synchronize()
        for here, pinned, add in self._pending.pop(slot):
            _put(here, pinned, add)


class _FromGpuToGpu(_OnGpu):
    """Data lie on the GPU ``home``, and another one computes. The host waits for nothing."""

    def __init__(self, home: torch.device, gpu: torch.device) -> None:
        super().__init__(gpu)
        self._current = torch.cuda.current_stream(home)
        *_, self._home_in, self._home_out = _streams.of(home)
        for stream in (self._home_in, self._home_out, self._in, self._out):
            stream.wait_stream(self._current)

    def move_in(self, slot: int, moves: Moves) -> None:
        # A copy between GPUs runs on the current stream of the one that is read, which waits for that of the other.
        with torch.cuda.stream(self._home_in), torch.cuda.stream(self._in):
            if slot in self._computed:
                self._in.wait_event(self._computed[slot])
            for there, here in moves:
                there.copy_(here, non_blocking=True)
            self._came[slot] = _recorded(self._in)

    def move_out(self, slot: int, moves: Moves, *, add: bool) -> None:
        with torch.cuda.stream(self._out), torch.cuda.stream(self._home_out):
            self._out.wait_event(self._computed[slot])
            self._home_out.wait_event(self._computed[slot])
            for here, there in moves:
                _put(here, there, add, non_blocking=True)
        self._out.wait_stream(self._home_out)  # an addition reads what was copied
        self._went[slot] = _recorded(self._out)

    def close(self) -> None:
        for stream in (self._home_in, self._home_out, self._in, self._out):
            self._current.wait_stream(stream)
        super().close()


class _FromGpuToHost(Link):
    """Data lie on the GPU ``home``, and the CPU computes in pinned memory."""

    ahead = True

    def __init__(self, home: torch.device) -> None:
        self._current = torch.cuda.current_stream(home)
        *_, self._in, self._out = _streams.of(home)
        self._came: dict[int, torch.cuda.Event] = {}
        self._went: dict[int, torch.cuda.Event] = {}
        for stream in (self._in, self._out):
            stream.wait_stream(self._current)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)

    def move_in(self, slot: int, moves: Moves) -> None:
        with torch.cuda.stream(self._in):
            for there, here in moves:
                there.copy_(here, non_blocking=True)
            self._came[slot] = _recorded(self._in)

    @contextlib.contextmanager
    def computing(self, slot: int) -> Iterator[None]:
        for events, place in ((self._came, SHARED), (self._came, slot), (self._went, slot)):
            if place in events:
                events[place].synchronize()
        yield

    def move_out(self, slot: int, moves: Moves, *, add: bool) -> None:
        with torch.cuda.stream(self._out):
            for here, there in moves:
                _put(here, there, add, non_blocking=True)
            self._went[slot] = _recorded(self._out)

    def close(self) -> None:
        for stream in (self._in, self._out):
            self._current.wait_stream(stream)


class _Streams(threading.local):
    """Streams of each GPU for this thread: two threads that call plans do not wait for one another."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, tuple[torch.cuda.Stream, ...]] = {}

    def of(self, gpu: torch.device) -> tuple[torch.cuda.Stream, ...]:
        """Streams for operands, computing and results as a part's device, then for operands and results as a home."""
        if gpu not in self._by_device:
            self._by_device[gpu] = tuple(torch.cuda.Stream(gpu) for _ in range(5))
        return self._by_device[gpu]


_streams = _Streams()


def link_between(home: torch.device, there: torch.device) -> Link:
    """A link for one call, between where data lie and the device that computes."""
    if there.type == "cuda":
        return _FromHostToGpu(there) if home.type == "cpu" else _FromGpuToGpu(home, there)
    return Link() if home.type == "cpu" else _FromGpuToHost(home)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what is queued on ``stream`` now."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _put(here: Tensor, there: Tensor, add: bool, *, non_blocking: bool = False) -> None:
    """Copy ``there`` into ``here``, or with ``add`` add it."""
    if add:
        here.add_(there.to(here.device, non_blocking=non_blocking))
    else:
        here.copy_(there, non_blocking=non_blocking)
