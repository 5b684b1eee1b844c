"""What blocks of steps keep for their backward, in the host's memory in place of the device's.

The copies run on a stream of their own, beside the steps of the next block. On the way back the block before is fetched
while one is computed. So two blocks are on the device at a time. Rhu et al. (2016, "vDNN: virtualized deep neural
networks for scalable, memory-efficient neural network design", section III) do the same with the layers of a network.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopies", "OnHost"]


class HostCopies:
    """Moves what blocks keep to pinned memory of the host, for a ``device`` that may be a CPU as well.

    Example::

        copies = HostCopies(x.device)
        stored = copies.put(saved, y)
        saved = stored.fetched()
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: tuple[list[Tensor], torch.cuda.Event] | None = None

    def put(self, value: Any, stays: Tensor) -> OnHost:
        """Begin to copy all tensors in ``value`` but those in the memory of ``stays``, and what was lent to them.

        The device's memory is free for other use once the next block has been put, or :meth:`settle` is called.
        """
        self.settle()
        leaving: list[Tensor] = []
        gone: dict[int, _Away] = {}  # by the tensor, which may be kept in two places
        address = stays.untyped_storage().data_ptr()

        def moved(t: Tensor) -> Any:
            if t.untyped_storage().data_ptr() == address or not t.numel():
                return t
            if id(t) not in gone:
                leaving.append(t)
                host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=self._stream is not None)
                host.copy_(t, non_blocking=True)
                gone[id(t)] = _Away(host, t.device)
            return gone[id(t)]

        if self._stream is None:
            return OnHost(_mapped(value, moved), None)
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            kept = _mapped(value, moved)
            self._leaving = leaving, self._stream.record_event()
        return OnHost(kept, self._stream)

    def settle(self) -> None:
        """Let the current stream wait for the copies of the last block, whose memory it may then use."""
        if self._leaving is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._leaving[1])
        self._leaving = None


class OnHost:
    """What a block keeps, on the host. It is fetched once."""

    def __init__(self, kept: Any, stream: torch.cuda.Stream | None) -> None:
        self._kept, self._stream = kept, stream
        self._coming: tuple[Any, torch.cuda.Event | None] | None = None

    def begin(self) -> None:
        """Begin to copy it back."""
        if self._coming is not None:
            return
        made: list[tuple[Tensor, Tensor]] = []
        back: dict[int, Tensor] = {}

        def target(away: _Away) -> Tensor:
            if id(away) not in back:
                back[id(away)] = torch.empty_like(away.host, device=away.device, pin_memory=False)
                made.append((back[id(away)], away.host))
            return back[id(away)]

        # The memory is the current stream's, on which it will be read and given back.
        value = _mapped(self._kept, lambda t: t, target)
        if self._stream is None:
            for t, host in made:
                t.copy_(host)
            self._coming = value, None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for t, host in made:
                t.copy_(host, non_blocking=True)
            self._coming = value, self._stream.record_event()

    def fetched(self) -> Any:
        """What was kept, on the device."""
        self.begin()
        assert self._coming is not None
        value, event = self._coming
        if event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)
        self._coming = None
        return value


@dataclasses.dataclass(frozen=True)
class _Away:
    """A tensor that is on the host, and the device that it came from."""

    host: Tensor
    device: torch.device


def _mapped(value: Any, tensor: Callable[[Tensor], Any], away: Callable[[_Away], Any] | None = None) -> Any:
    """A copy of a tuple, list or dataclass with a function of each tensor in it; anything else itself."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, _Away):
        return value if away is None else away(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, tensor, away) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, _mapped(getattr(value, field.name), tensor, away))
        return twin
    return value
