"""Images that are joined along channels, scaled, shifted and put through an activation, by one kernel of ours."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from tilewise.kernels.cpu.channels_last.told import JOINED as OF
from tilewise.kernels.cpu.channels_last.told import JOINED_NUMBERS
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.nn.programs.pixels import KernelCall
from tilewise.solvers.common.cpu_run import ADDRESSES, kernel_data, numba_reasons, vector_lanes

__all__ = ["Joined"]

UNIT_BYTES = 1 << 18
"""Bytes of the result that one unit of work writes, roughly: a part of what a core's own cache holds."""


@dataclass(frozen=True)
class Joined(KernelCall):
    """``activation(scale * x + shift)`` for each channel of ``x``, images in channels_last and fp32 joined together.

    There are ``images`` of ``height`` times ``width`` pixels, and as many inputs as there are numbers in ``channels``.
    """

    images: int
    channels: tuple[int, ...]
    height: int
    width: int
    activation: str

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs, of scale and shift, and of the result."""
        total = sum(self.channels)
        inputs = tuple((self.images, channels, self.height, self.width) for channels in self.channels)
        return (*inputs, (total,), (total,), (self.images, total, self.height, self.width))

    def words(self) -> tuple[int, np.ndarray, list[int]]:
        """As :meth:`KernelCall.words`."""
        worker, data, places = _words(self, self.threads)
        return worker, data.copy(), places  # threads count in it


@functools.lru_cache(maxsize=1024)
def _words(call: Joined, threads: int) -> tuple[int, np.ndarray, list[int]]:
    """What :meth:`Joined.words` gives for so many threads."""
    from tilewise.kernels.cpu.channels_last.compiling import load_joined

    lanes = vector_lanes()
    with numba_reasons():
        worker = load_joined(lanes, call.activation)
    pixels, channels = call.images * call.height * call.width, sum(call.channels)
    parts = min(pixels, max(2 * threads, math.ceil(4 * pixels * channels / UNIT_BYTES)))
    numbers = np.zeros(JOINED_NUMBERS + 2 * len(call.channels), np.int64)
    told = {"pixels": pixels, "channels": channels, "parts": parts, "inputs": len(call.channels)}
    for name, value in told.items():
        numbers[OF[name]] = value
    numbers[JOINED_NUMBERS::2] = call.channels
    first = HEADER + JOINED_NUMBERS + 1
    inputs = [first + 2 * index for index in range(len(call.channels))]
    data = kernel_data(parts, 0, numbers)
    return worker, data, [*inputs, HEADER + OF["scale"], HEADER + OF["shift"], ADDRESSES + 3]
