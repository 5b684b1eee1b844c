"""Means over pixels and gates of channels, by kernels of ours: what torch is slow at where channels lie innermost."""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.channels_last.told import PIXELS as OF
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.solvers.common.cpu_run import ADDRESSES, kernel_data, numba_reasons, vector_lanes

__all__ = ["KERNELS", "MOST_PIXELS", "KernelCall", "Pixels"]

KERNELS = ("means", "scaled")
CHUNK = 4
"""Vectors of channels that a unit of the first kernel has at the most."""
MOST_PIXELS = 1 << 14
"""Pixels whose mean is taken at the most: longer sums would be less exact than torch's."""
SHARE = 1 << 13
"""Numbers for which a thread is worth its start."""


class KernelCall(abc.ABC):
    """A call of one kernel of ours on tensors of fixed shapes, from Python or as a launch in native code."""

    @property
    @abc.abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the operands in their order, and of the result. Images lie in channels_last."""

    @abc.abstractmethod
    def words(self) -> tuple[int, np.ndarray, list[int]]:
        """The worker's address, the numbers of a call, and for each operand and the result which number is its address.

        Raises ``SolverUnavailable`` with Numba's reason.
        """

    @property
    def threads(self) -> int:
        """How many threads are worth their start, of those that torch has."""
        return max(1, min(torch.get_num_threads(), self.numbers // SHARE)) if has_openmp() else 1

    @property
    def numbers(self) -> int:
        """How many numbers are read or written, whichever is more."""
        return max(map(math.prod, self.shapes))

    def __call__(self, *tensors: Tensor) -> None:
        """Compute into the last of ``tensors``."""
        worker, data, places = self.words()
        data[1] = threads = self.threads
        for place, tensor in zip(places, tensors, strict=True):
            data[place] = tensor.data_ptr()
        share_out(worker, data.ctypes.data, threads, openmp=True)


@dataclass(frozen=True)
class Pixels(KernelCall):
    """A call of the kernel ``name``, one of :data:`KERNELS`, on images of ``shape`` in channels_last and fp32.

    ``means`` gives the mean over all pixels of each channel. ``scaled`` multiplies all pixels by a factor for each
    channel. ``image`` is the place of the image among the two operands of that.
    """

    name: str
    shape: tuple[int, int, int, int]
    image: int = 0

    @property
    def gate(self) -> tuple[int, int, int, int]:
        """The shape of what has one number for each channel."""
        return (*self.shape[:2], 1, 1)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the operands in their order, and of the result. All lie in channels_last."""
        if self.name == "means":
            return self.shape, self.gate
        return (*((self.gate, self.shape) if self.image else (self.shape, self.gate)), self.shape)

    def words(self) -> tuple[int, np.ndarray, list[int]]:
        """As :meth:`KernelCall.words`."""
        worker, data, places = _words(self, self.threads)
        return worker, data.copy(), places  # threads count in it


@functools.lru_cache(maxsize=1024)
def _words(call: Pixels, threads: int) -> tuple[int, np.ndarray, list[int]]:
    """What :meth:`Pixels.words` gives for so many threads."""
    from tilewise.kernels.cpu.channels_last.compiling import load_pixels

    images, channels, height, width = call.shape
    lanes = vector_lanes()
    with numba_reasons():
        worker = load_pixels(lanes, call.name)
    numbers = np.zeros(len(OF), np.int64)
    chunks, parts = -(-channels // (CHUNK * lanes)), min(height * width, 2 * threads)
    told = {
        "channels": channels, "count": height * width, "chunks": chunks, "parts": parts,
        "image": 4 * channels * height * width,
    }  # fmt: skip
    for name, value in told.items():
        numbers[OF[name]] = value
    data = kernel_data(images * (chunks if call.name == "means" else parts), 0, numbers)
    x, w, y = (ADDRESSES + 1 + index for index in range(3))
    operands = [x] if call.name == "means" else [w, x] if call.image else [x, w]
    return worker, data, [*operands, y]
