"""What one run takes, on the device and on the host."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Took"]


class Took(NamedTuple):
    """Milliseconds of one run: on the device that computes, and on the host to launch it."""

    device_ms: float
    host_ms: float

    @property
    def ms(self) -> float:
        """The longer of both: what the run takes by itself, with nothing queued before it."""
        return max(self)

    def replayed(self) -> Took:
        """The times of a replay from a CUDA graph, which takes nothing to launch."""
        return self._replace(host_ms=0.0)

    def with_host(self, factor: float) -> float:
        """Milliseconds if the host were ``factor`` times slower, as a busy one may be."""
        return max(self.device_ms, factor * self.host_ms)
