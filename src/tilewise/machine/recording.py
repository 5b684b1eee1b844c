"""What a device must be able to do so that what functions do on it can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

__all__ = ["Recorder", "recorder_of"]

T = TypeVar("T")


class Recorder(Protocol):
    """Records what functions do on one device, so that it can be done again without them.

    What one recording writes stays until it is replayed again, whatever else is replayed meanwhile. ``generator`` is
    the generator of random numbers on the device; each replay draws new ones from it.
    """

    device: torch.device
    generator: torch.Generator

    def warm_up(self, run: Callable[[], object]) -> None:
        """Call ``run()`` as it will be recorded, without recording it, and wait for the device."""
        ...

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record ``run()``; return what replays it, and its result. A replay writes into the tensors of that result.

        Raises what ``run`` raises, and ``RuntimeError`` for what cannot be recorded. The device works on after either.
        """
        ...

    def ordered(self) -> None:
        """Let what this thread does next on the device come after the last replay, whichever stream that was on."""
        ...

    def recording(self) -> bool:
        """Whether somebody records what this thread does on the device at the moment."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def bytes(self) -> int:
        """The bytes on the device that are set aside for the recordings."""
        ...


def recorder_of(device: torch.device) -> Recorder:
    """A new recorder on ``device``. Raises ``ValueError`` where there is none for such devices."""
    if device.type != "cuda":
        raise ValueError(f"the example is on {device}: CUDA graphs need tensors on a CUDA device")
    from tilewise.machine.cuda_recorder import CudaRecorder

    return CudaRecorder(device)
