"""How operands of matrix products in fp16 parts are prepared: find their peak magnitudes, then copy them in packed
form.

The packed copy is scaled by the peaks and laid out for matrix units. One launch finds the peaks of both operands, and
one packs both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Slot
from tilewise.solvers.common.sweeps import Packed
from tilewise.solvers.common.views import View, at, launch, within

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Packing", "PeakSearch", "chunks_of", "find_peaks", "pack"]

PEAKS = 1024
"""About how many programs search a tensor for its largest value."""
SEARCH_BLOCK, SEARCH_APART = 2048, 512
"""Elements that a program searches at a time: contiguous ones, and those whose addresses must each be computed and held
in registers."""

ROOMS = (32, 1024)
"""Numbers of peaks that a kernel has room for where that is enough: loading a few beside them is free."""


def chunks_of(images: int, elements: int) -> int:
    """How many programs search an image of ``elements`` elements for its peak, with ``images`` searched at a time."""
    return max(1, min(PEAKS // images, elements // 4096))


@dataclass(frozen=True, slots=True)
class PeakSearch:
    """An operand whose peak magnitudes are searched: those of each of ``chunks`` shares of every image of ``view``.

    ``source`` is the operand's number among a launch's tensors; ``peaks`` is where in the workspace the peaks go.
    """

    view: View
    source: int
    peaks: Slot
    chunks: int

    @property
    def programs(self) -> int:
        """Programs of the search: one for each share of each image."""
        return self.view.sizes[0] * self.chunks

    @property
    def pointers(self) -> list[Any]:
        """The kernel's pointers: the operand, and where its peaks are written."""
        return [within(self.view, self.source), at(self.peaks)]

    @property
    def scalars(self) -> list[int]:
        """The kernel's integers: elements of an image, shares, spatial sizes, and all strides."""
        return [math.prod(self.view.sizes[1:]), self.chunks, *self.view.sizes[2:], *self.view.strides]

    def constants(self, name: str) -> dict[str, Any]:
        """The kernel's compile-time constants for this operand; their names begin with ``name``."""
        dense = self.view.dense
        return {f"{name}DENSE": dense, f"{name}BLOCK": SEARCH_BLOCK if dense else SEARCH_APART}


def find_peaks(a: PeakSearch, b: PeakSearch, *, both: bool = True) -> Launch:
    """The launch that finds the peaks of ``a``, and with ``both`` those of ``b`` too."""
    from tilewise.kernels.triton import layout as kernels

    return launch(
        kernels.peaks, [a.programs + (b.programs if both else 0)], [*a.pointers, *b.pointers],
        [a.programs, *a.scalars, *b.scalars], **a.constants("A_"), **b.constants("B_"),
    )  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """An operand, or a block of its images, to be packed at the scale that its peaks give.

    ``search`` says where the peaks are, ``slot`` where the packed copy goes and ``exponents`` where its scales go, from
    number ``first`` on. ``skipped`` is the number of searched images that come before the block.
    """

    PLACES: ClassVar[int] = 64

    p: ConvProblem
    search: PeakSearch
    view: View
    packed: Packed
    slot: Slot
    exponents: Slot
    first: int = 0
    skipped: int = 0

    @property
    def per_image(self) -> bool:
        """Whether each image has a scale of its own. In a weight gradient all images share one."""
        return self.p.pass_ is not Pass.WGRAD

    @property
    def known(self) -> int:
        """Number of shares whose peaks decide a scale: those of one image, or of all images."""
        return self.search.chunks if self.per_image else self.search.peaks.sizes[0]

    @property
    def inner(self) -> View:
        """The part of the view that any result reads."""
        inner = self.view
        for dim, axis in enumerate(self.packed.axes, start=2):
            inner = inner.narrow(dim, axis.first, axis.size)
        return inner

    @property
    def blocks(self) -> int:
        """Programs along the places of one image."""
        return -(-self.packed.image // self.PLACES)

    @property
    def programs(self) -> int:
        """Programs along places of all images, and for the zeros before the first image."""
        return (self.view.sizes[0] + (self.packed.head > 0)) * self.blocks

    @property
    def block_c(self) -> int:
        """Channels that one program packs."""
        return min(64, max(16, 1 << (self.packed.channels - 1).bit_length()))

    @property
    def channel_blocks(self) -> int:
        """The number of programs along channels."""
        return -(-self.packed.channels // self.block_c)

    @property
    def pointers(self) -> list[Any]:
        """The kernel's pointers: the operand, its peaks, the packed copy, and its exponents."""
        return [within(self.inner, self.search.source), at(self.search.peaks, self.skipped * self.search.chunks),
                at(self.slot), at(self.exponents, self.first)]  # fmt: skip

    @property
    def scalars(self) -> list[int]:
        """The kernel's integers: sizes, gaps and strides."""
        inner, packed = self.inner, self.packed
        return [-1 if packed.head else 0, self.blocks, self.known, *inner.sizes[1:],
                *(axis.pitch for axis in packed.axes), packed.head, *inner.strides, packed.row,
                packed.channels]  # fmt: skip

    def constants(self, name: str) -> dict[str, Any]:
        """The kernel's compile-time constants for this operand; their names begin with ``name``."""
        values = {"CHUNKS": _room(self.known), "ALIGNED": self.inner.aligned, "BLOCK_C": self.block_c}
        return {name + key: value for key, value in values.items()}


def _room(peaks: int) -> int:
    """A power of two that holds ``peaks``, one of few, so that many shapes share a kernel."""
    return next((room for room in ROOMS if room >= peaks), 1 << (peaks - 1).bit_length())


def pack(kernel: Any, a: Packing, b: Packing, *, both: bool = True, **constants: Any) -> Launch:
    """The launch of ``kernel`` (such as ``layout.pack``) that packs ``a``, and with ``both`` also ``b``."""
    packings = [a, b] if both else [a]
    constants |= {**a.constants("A_"), **b.constants("B_")}
    if not constants.get("SCALED", True):
        constants |= {"A_CHUNKS": 1, "B_CHUNKS": 1}  # nothing is scaled by peaks
    return launch(
        kernel,
        [sum(packing.programs for packing in packings), max(packing.channel_blocks for packing in packings)],
        [*a.pointers, *b.pointers], [a.programs, *a.scalars, *b.scalars],
        **constants, PER_IMAGE=a.per_image, BLOCK_P=a.PLACES,
    )  # fmt: skip
