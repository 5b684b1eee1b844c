"""How operands of matrix products get ready: a look at their magnitudes, then a copy laid out for matrix units.

Both operands are looked at in one launch, and packed in one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._buffers import Slot
from tilewise.solvers._sweeps import Packed
from tilewise.solvers._views import View, at, launch, within

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Looked", "Packing", "chunks_of", "look", "pack"]

PEAKS = 1024
"""Programs that look for the largest value of a tensor, about."""
LOOK_BLOCK, LOOK_APART = 2048, 512
"""Elements that a look takes at a time, fewer where each has an address to be computed: registers hold those."""


def chunks_of(images: int, elements: int) -> int:
    """Programs that look for the largest of an image's ``elements``, where there are so many ``images`` at a time."""
    return max(1, min(PEAKS // images, elements // 4096))


@dataclass(frozen=True, slots=True)
class Looked:
    """What is looked at for the largest exponent of each of ``chunks`` shares of every image of ``view``."""

    view: View
    source: int
    peaks: Slot
    chunks: int

    @property
    def programs(self) -> int:
        """One for each share."""
        return self.view.sizes[0] * self.chunks

    @property
    def pointers(self) -> list[Any]:
        """What is read and where it is written."""
        return [within(self.view, self.source), at(self.peaks)]

    @property
    def scalars(self) -> list[int]:
        """Elements of an image, shares, sizes and strides."""
        return [math.prod(self.view.sizes[1:]), self.chunks, *self.view.sizes[2:], *self.view.strides]

    def constants(self, name: str) -> dict[str, Any]:
        """What the kernel is compiled for, of the operand whose constants' names begin with ``name``."""
        dense = self.view.dense
        return {f"{name}DENSE": dense, f"{name}BLOCK": LOOK_BLOCK if dense else LOOK_APART}


def look(a: Looked, b: Looked, *, both: bool = True) -> Launch:
    """Look at ``a``, and at ``b`` where it is for ``both``."""
    from tilewise.kernels.triton import layout as kernels

    return launch(
        kernels.peaks, [a.programs + (b.programs if both else 0)], [*a.pointers, *b.pointers],
        [a.programs, *a.scalars, *b.scalars], **a.constants("A_"), **b.constants("B_"),
    )  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """An operand, or a block of its images, that is packed at the scale that was found by ``looked``.

    ``slot`` is where it goes. Exponents go from ``first`` on; of what was looked at, ``skipped`` images come before it.
    """

    PLACES: ClassVar[int] = 64

    p: ConvProblem
    looked: Looked
    view: View
    packed: Packed
    slot: Slot
    exponents: Slot
    first: int = 0
    skipped: int = 0

    @property
    def per_image(self) -> bool:
        """Whether each image has an exponent, and not all together."""
        return self.p.pass_ is not Pass.WGRAD

    @property
    def known(self) -> int:
        """Shares that were looked at, of each image or of all."""
        return self.looked.chunks if self.per_image else self.looked.peaks.sizes[0]

    @property
    def inner(self) -> View:
        """What is read of the view."""
        inner = self.view
        for dim, axis in enumerate(self.packed.axes, start=2):
            inner = inner.narrow(dim, axis.first, axis.size)
        return inner

    @property
    def blocks(self) -> int:
        """Programs along an image's places."""
        return -(-self.packed.image // self.PLACES)

    @property
    def programs(self) -> int:
        """Along places, gaps before the first image included."""
        return (self.view.sizes[0] + (self.packed.head > 0)) * self.blocks

    @property
    def block_c(self) -> int:
        """Channels of a program."""
        return min(64, max(16, 1 << (self.packed.channels - 1).bit_length()))

    @property
    def channel_blocks(self) -> int:
        """Programs along channels."""
        return -(-self.packed.channels // self.block_c)

    @property
    def pointers(self) -> list[Any]:
        """What is read, exponents found before, where it goes, and its exponents."""
        return [within(self.inner, self.looked.source), at(self.looked.peaks, self.skipped * self.looked.chunks),
                at(self.slot), at(self.exponents, self.first)]  # fmt: skip

    @property
    def scalars(self) -> list[int]:
        """Sizes, gaps and strides."""
        inner, packed = self.inner, self.packed
        return [-1 if packed.head else 0, self.blocks, self.known, *inner.sizes[1:],
                *(axis.pitch for axis in packed.axes), packed.head, *inner.strides, packed.row,
                packed.channels]  # fmt: skip

    def constants(self, name: str) -> dict[str, Any]:
        """What the kernel is compiled for, of the operand whose constants' names begin with ``name``."""
        found = {"CHUNKS": 1 << (self.known - 1).bit_length(), "ALIGNED": self.inner.aligned, "BLOCK_C": self.block_c}
        return {name + key: value for key, value in found.items()}


def pack(kernel: Any, a: Packing, b: Packing, *, both: bool = True, **constants: Any) -> Launch:
    """Pack ``a``, and ``b`` where it is for ``both``, by a ``kernel`` such as ``layout.pack``."""
    told = [a, b] if both else [a]
    return launch(
        kernel,
        [sum(each.programs for each in told), max(each.channel_blocks for each in told)],
        [*a.pointers, *b.pointers], [a.programs, *a.scalars, *b.scalars],
        **a.constants("A_"), **b.constants("B_"), **constants, PER_IMAGE=a.per_image, BLOCK_P=a.PLACES,
    )  # fmt: skip
