"""Strided copies between an operand and a buffer, in the widest elements that both sides allow.

A device's generic copy moves one element per step, so that 16-bit data in runs of a window's row or of its channels
take eight steps where one would do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.solvers.common.buffers import Strided

__all__ = ["Copy"]

WIDE = ((16, torch.complex128), (8, torch.int64), (4, torch.int32))
"""Sizes in bytes, and a dtype of each size that copies bits unchanged."""


class Copy(NamedTuple):
    """A copy ``target <- source`` between views of two tensors, which have the same sizes.

    ``wide`` is the dtype in which elements are copied, ``None`` for their own.
    """

    source: Strided
    target: Strided
    wide: torch.dtype | None = None
    per: int = 1
    """How many elements one wide element holds."""

    @classmethod
    def of(cls, source: Strided, target: Strided, dtypes: tuple[torch.dtype, torch.dtype], alignment: int) -> Copy:
        """A copy in the widest elements that both sides allow; tensors start at multiples of ``alignment`` bytes."""
        source, target = _joined(source, target)
        if dtypes[0] != dtypes[1]:
            return cls(source, target)
        size = dtypes[0].itemsize
        for nbytes, wide in WIDE:
            per = nbytes // size
            if per > 1 and alignment % nbytes == 0 and _divides(source, per) and _divides(target, per):
                return cls(source, target, wide, per)
        return cls(source, target)

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from ``source`` to ``target``."""
        per = self.per
        if self.wide is None or source.storage_offset() % per or target.storage_offset() % per:
            self.target.of(target).copy_(self.source.of(source))
        else:
            _widened(self.target, target, self.wide, per).copy_(_widened(self.source, source, self.wide, per))

    def add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Add ``source`` to ``target``."""
        self.target.of(target).add_(self.source.of(source))


def _joined(source: Strided, target: Strided) -> tuple[Strided, Strided]:
    """The same views, with last dimensions merged that follow one another in memory on both sides."""
    while len(source.sizes) > 1:
        *outer, rows, last = source.sizes
        if any(view.strides[-1] != 1 or view.strides[-2] != last for view in (source, target)):
            break
        source, target = (
            Strided((*outer, rows * last), (*view.strides[:-2], 1), view.offset) for view in (source, target)
        )
    return source, target


def _divides(view: Strided, per: int) -> bool:
    """Whether the last dimension is a whole number of wide elements and all strides and offsets are multiples."""
    if 0 in view.sizes:
        return False
    *outer, last = zip(view.sizes, view.strides, strict=True)
    if last[1] != 1 or last[0] % per or view.offset % per:
        return False
    return all(size == 1 or stride % per == 0 for size, stride in outer)


def _widened(view: Strided, tensor: torch.Tensor, wide: torch.dtype, per: int) -> torch.Tensor:
    """The view of ``tensor`` in elements of dtype ``wide``, each ``per`` elements of the tensor's own."""
    extent = sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True)) + 1
    flat = tensor.as_strided((extent,), (1,), tensor.storage_offset() + view.offset).view(wide)
    sizes = (*view.sizes[:-1], view.sizes[-1] // per)
    return flat.as_strided(sizes, (*(stride // per for stride in view.strides[:-1]), 1), flat.storage_offset())
