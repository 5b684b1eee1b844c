"""Means over pixels and gates of channels, by kernels of ours: what torch is slow at where channels lie innermost."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.channels_last.told import PIXELS as OF
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.nn.regions.slots import Place
from tilewise.nn.regions.units import Strides, Unit, formats, value_of
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cpu_run import ADDRESSES, kernel_data, numba_reasons, vector_lanes

__all__ = ["KERNELS", "Pixels", "pixel_ways"]

KERNELS = ("means", "scaled")
CHUNK = 4
"""Vectors of channels that a unit of the first kernel has at the most."""
MOST_PIXELS = 1 << 14
"""Pixels whose mean is taken at the most: longer sums would be less exact than torch's."""
SHARE = 1 << 13
"""Numbers for which a thread is worth its start."""
MEANS = (torch.ops.aten.mean.dim,)
PRODUCTS = (torch.ops.aten.mul.Tensor,)


@dataclass(frozen=True)
class Pixels:
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

    @property
    def threads(self) -> int:
        """How many threads are worth their start, of those that torch has."""
        return max(1, min(torch.get_num_threads(), math.prod(self.shape) // SHARE)) if has_openmp() else 1

    def words(self) -> tuple[int, np.ndarray, list[int]]:
        """The worker's address, the numbers of a call, and for each operand and the result which number is its address.

        Raises ``SolverUnavailable`` with Numba's reason.
        """
        worker, data, places = _words(self, self.threads)
        return worker, data.copy(), places  # threads count in it

    def __call__(self, *tensors: Tensor) -> None:
        """Compute into the last of ``tensors``."""
        worker, data, places = self.words()
        data[1] = threads = self.threads
        for place, tensor in zip(places, tensors, strict=True):
            data[place] = tensor.data_ptr()
        share_out(worker, data.ctypes.data, threads, openmp=True)


@functools.lru_cache(maxsize=1024)
def _words(call: Pixels, threads: int) -> tuple[int, np.ndarray, list[int]]:
    """What :meth:`Pixels.words` gives for so many threads."""
    from tilewise.kernels.cpu.compiling import load_pixels

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


def pixel_ways(unit: Unit) -> Iterator[tuple[Pixels, tuple[Strides, ...], Strides]]:
    """The call of ours that computes a part, if there is one, with the formats that it reads and the one it gives."""
    values = [value_of(node) for node in unit.inputs]
    if any(t.dtype is not torch.float32 or t.dim() != 4 or not t.numel() or t.device.type != "cpu" for t in values):
        return
    found = _call(unit, values)
    if found is None:
        return
    try:
        found.words()
    except SolverUnavailable:  # no Numba, or none of its kernels: torch computes it
        return
    *reads, gives = (formats(shape)[-1] for shape in found.shapes)
    yield found, tuple(reads), gives


def _call(unit: Unit, values: list[Tensor]) -> Pixels | None:
    """The call that computes a part."""
    result = tuple(unit.value.shape)
    if unit.overload in MEANS and unit.value.dim() == 4:
        shape, options = tuple(values[0].shape), dict(unit.keywords or {})
        arguments: list[Any] = list(unit.arguments)
        axes = sorted(axis % 4 for axis in arguments[1]) if len(arguments) > 1 and arguments[1] else []
        if axes == [2, 3] and result == (*shape[:2], 1, 1) and not any(options.values()):
            return Pixels("means", shape) if shape[2] * shape[3] <= MOST_PIXELS else None  # type: ignore[arg-type]
    elif unit.overload in PRODUCTS and unit.arguments == (Place(0), Place(1)):
        for image in (0, 1):
            shape, gate = tuple(values[image].shape), tuple(values[1 - image].shape)
            if shape == result and gate == (*shape[:2], 1, 1) and shape != gate:
                return Pixels("scaled", shape, image)  # type: ignore[arg-type]
    return None
