"""Typed tensors carved out of one uint8 workspace, and views written down as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewise.solvers.base import SolverUnavailable

__all__ = ["Arena", "Slot", "Strided", "dense", "fuse", "fused"]

ALIGNMENT = 256
"""Bytes: slots start at multiples of it, as the CUDA allocator's blocks do. Enough for every vector access."""


class Strided(NamedTuple):
    """A view of some tensor's memory: sizes, strides and offset in elements, the offset from the tensor's first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def transposed(self) -> Strided:
        """The view with its last two dimensions exchanged."""
        (*sizes, rows, columns), (*strides, row, column) = self.sizes, self.strides
        return Strided((*sizes, columns, rows), (*strides, column, row), self.offset)

    def expanded(self, images: int) -> Strided:
        """A view with a first dimension of size 1 repeated ``images`` times, at stride 0."""
        return Strided((images, *self.sizes[1:]), (0, *self.strides[1:]), self.offset)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view of ``tensor``'s memory, whatever sizes and strides ``tensor`` itself has."""
        if self.offset:
            return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)
        return tensor.as_strided(self.sizes, self.strides)


class Slot(NamedTuple):
    """A contiguous tensor inside the workspace, ``offset`` bytes from its start."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def example(self, device: torch.device) -> torch.Tensor:
        """A tensor like it to bind to. On a CPU it has no memory (device ``meta``); solvers ask which GPU it is."""
        return torch.empty(self.sizes, dtype=self.dtype, device="meta" if device.type == "cpu" else device)

    def of(self, workspace: torch.Tensor | None) -> torch.Tensor:
        """The tensor inside ``workspace``. Raises ``ValueError`` when there is none."""
        if workspace is None:
            raise ValueError(f"workspace=None: this config needs a buffer for {self.sizes} of {self.dtype}")
        return workspace.narrow(0, self.offset, self.bytes).view(self.dtype).view(self.sizes)


class Arena:
    """Lays out scratch tensors in one workspace, one after another.

    :attr:`size` is the number of bytes that the workspace needs for all slots added so far.
    """

    def __init__(self) -> None:
        self.size = 0

    def add(self, sizes: Sequence[int], dtype: torch.dtype) -> Slot:
        """Reserve a contiguous tensor of ``sizes`` and return its slot, aligned to :data:`ALIGNMENT` bytes."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        slot = Slot(tuple(sizes), dtype, offset)
        self.size = offset + slot.bytes
        return slot


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a contiguous tensor of ``sizes``, in elements."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def fused(
    sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As :func:`fuse`, for strides that the problem's layout promises to be mergeable.

    Raises :class:`SolverUnavailable` when they are not.
    """
    merged = fuse(sizes, strides, groups)
    if merged is None:
        raise SolverUnavailable(
            f"strides {tuple(strides)} of sizes {tuple(sizes)} are not those of the problem's layout"
        )
    return merged


def fuse(
    sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Merge each group of dimensions (outermost first) into one and return the new sizes and strides, in elements.

    Returns ``None`` where a group's strides do not allow it. Dimensions of size 1 are ignored, whatever their stride; a
    group that has only those gets stride 1.
    """
    out_sizes, out_strides = [], []
    for group in groups:
        size, stride = 1, 0
        for dim in reversed(group):
            if sizes[dim] == 1:
                continue
            if size == 1:
                stride = strides[dim]
            elif strides[dim] != stride * size:
                return None
            size *= sizes[dim]
        out_sizes.append(size)
        out_strides.append(stride if size > 1 else 1)
    return tuple(out_sizes), tuple(out_strides)
