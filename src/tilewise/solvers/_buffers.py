"""Typed tensors carved out of one uint8 workspace, and views written down as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewise.solvers.base import SolverUnavailable

__all__ = ["Arena", "Slot", "Strided", "dense", "fuse", "fused"]

ALIGNMENT = 256
"""Bytes between starts of slots: what the CUDA allocator gives too, and enough for every vector access."""


class Strided(NamedTuple):
    """A view of some tensor's memory: sizes, strides and offset in elements, the offset from the tensor's first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def transposed(self) -> Strided:
        """Its last two dimensions exchanged."""
        (*sizes, rows, columns), (*strides, row, column) = self.sizes, self.strides
        return Strided((*sizes, columns, rows), (*strides, column, row), self.offset)

    def expanded(self, images: int) -> Strided:
        """A first dimension of size 1 as ``images`` times the same."""
        return Strided((images, *self.sizes[1:]), (0, *self.strides[1:]), self.offset)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor``, whose own sizes and strides do not matter."""
        if self.offset:
            return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)
        return tensor.as_strided(self.sizes, self.strides)


class Slot(NamedTuple):
    """A dense tensor inside the workspace; ``offset`` in bytes."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def of(self, workspace: torch.Tensor | None) -> torch.Tensor:
        """The tensor inside ``workspace``. Raises ``ValueError`` when there is none."""
        if workspace is None:
            raise ValueError(f"workspace=None: this config needs a buffer for {self.sizes} of {self.dtype}")
        return workspace.narrow(0, self.offset, self.bytes).view(self.dtype).view(self.sizes)


class Arena:
    """Hands out slots one after another; :attr:`size` is the workspace they need, in bytes."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, sizes: Sequence[int], dtype: torch.dtype) -> Slot:
        """A slot for a dense tensor of ``sizes``."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        slot = Slot(tuple(sizes), dtype, offset)
        self.size = offset + slot.bytes
        return slot


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def fused(
    sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """:func:`fuse`, for memory that the problem's layout says has this form.

    Raises :class:`SolverUnavailable` when it has not.
    """
    found = fuse(sizes, strides, groups)
    if found is None:
        raise SolverUnavailable(
            f"strides {tuple(strides)} of sizes {tuple(sizes)} are not those of the problem's layout"
        )
    return found


def fuse(
    sizes: Sequence[int], strides: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides with each group of dimensions (outermost first) as one; ``None`` where memory forbids it.

    Dimensions of size 1 have no stride that matters; a group of only those gets stride 1.
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
