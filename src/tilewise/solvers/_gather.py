"""The lowered matrix: how it reads an operand, axis by axis, and the strided copy that fills it.

FPROP and WGRAD lower the image: places are outputs. DGRAD is a correlation of the output gradient, spread by the stride
and padded by the kernel's reach, with the taps reversed: places are inputs. Both are windows over a line, and so is an
axis that is left as it is, with one tap.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.axis import Axis
from tilewise.problem import ALIGNMENT, ROLES, ConvProblem, dense_strides
from tilewise.solvers._buffers import Arena, Strided, dense, fuse, fused
from tilewise.solvers._copies import Copy
from tilewise.solvers._matmul import as_matrix

__all__ = ["Block", "Blocking", "Gather", "Order", "Reading", "kept", "readings"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One axis: ``count`` elements from ``start`` on lie ``step`` apart in a line of ``length`` zeros, ``lead`` first.

    Place ``g`` of ``places`` reads at tap ``r`` of ``taps`` what lies at ``g * stride + r * dilation`` of the line.
    """

    start: int
    count: int
    step: int
    lead: int
    length: int
    taps: int
    dilation: int
    places: int
    stride: int

    @property
    def padded(self) -> bool:
        """Whether the line differs from the elements themselves."""
        return self.step > 1 or self.lead > 0 or self.count < self.length


def kept(size: int) -> Reading:
    """An axis that is not lowered."""
    return Reading(0, size, 1, 0, size, 1, 1, size, 1)


def of_image(axis: Axis) -> Reading:
    """Outputs over the padded image, for FPROP and WGRAD."""
    length = (axis.out - 1) * axis.stride + axis.reach
    start, stop = max(0, -axis.before), min(axis.size, length - axis.before)
    count = max(stop - start, 0)
    lead = start + axis.before if count else 0
    return Reading(start, count, 1, lead, length, axis.kernel, axis.dilation, axis.out, axis.stride)


def of_gradient(axis: Axis) -> Reading:
    """Inputs over the spread and padded output gradient, taps reversed, for DGRAD and for WGRAD's adjoint form."""
    length = axis.size + axis.reach - 1
    lead = axis.reach - 1 - axis.before
    start = max(0, -(lead // axis.stride))
    stop = min(axis.out, (length - 1 - lead) // axis.stride + 1)
    count = max(stop - start, 0)
    lead = lead + start * axis.stride if count else 0
    return Reading(start, count, axis.stride, lead, length, axis.kernel, axis.dilation, axis.size, 1)


class Order(enum.Enum):
    """How a matrix of (image, group, channel, tap, place) lies in memory, outermost first."""

    IMAGES = "images"
    """image, group, channel, tap, place: one matrix per image and group, as contiguous tensors have it."""
    PIXELS = "pixels"
    """image, place, group, tap, channel: one matrix of all pixels, as channels_last tensors have it."""
    PATCHES = "patches"
    """image, place, group, channel, tap: the same with a contiguous tensor's order inside a window."""
    TOKENS = "tokens"
    """The same for what has windows, and merged for what has none, where all images must be one product."""
    MERGED = "merged"
    """group, channel, tap, image, place: one matrix per group of all images' places."""

    @property
    def channel_last(self) -> bool:
        """Whether a window's channels lie next to each other."""
        return self is Order.PIXELS

    @property
    def flats(self) -> tuple[bool, ...]:
        """Whether images and places may be one dimension of the matrix, what is better first."""
        return {Order.IMAGES: (False,), Order.TOKENS: (True,), Order.MERGED: (True,)}.get(self, (True, False))

    @property
    def merges(self) -> bool:
        """Whether all this is for is to make one product of several images."""
        return self in (Order.MERGED, Order.TOKENS)

    @property
    def plain(self) -> Order:
        """The order of a matrix without windows beside one in this order: its copies move whole rows of places."""
        return Order.MERGED if self is Order.TOKENS else self

    def permute(self, dims: int) -> tuple[int, ...]:
        """Positions in (image, group, channel, taps, places) of the dimensions, outermost first."""
        taps, places = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        if self is Order.IMAGES:
            return (0, 1, 2, *taps, *places)
        if self is Order.PIXELS:
            return (0, *places, 1, *taps, 2)
        if self in (Order.PATCHES, Order.TOKENS):
            return (0, *places, 1, 2, *taps)
        return (1, 2, *taps, 0, *places)

    def matrix(self, dims: int, flat: bool) -> tuple[tuple[int, ...], ...]:
        """Groups of those dimensions that make (images, groups, rows, columns); ``flat``: images are columns too."""
        taps, places = tuple(range(3, 3 + dims)), tuple(range(3 + dims, 3 + 2 * dims))
        rows = (*taps, 2) if self.channel_last else (2, *taps)
        return ((), (1,), rows, (0, *places)) if flat else ((0,), (1,), rows, places)


@dataclass(frozen=True, slots=True)
class Block:
    """Images ``[image, image + images)`` and places ``[place, place + places)`` of the first axis."""

    image: int
    images: int
    place: int
    places: int


def readings(p: ConvProblem, role: str, lowered: Sequence[bool]) -> list[Reading]:
    """How a matrix reads the image (``x``) or the output gradient (``y``) along each axis."""
    if role == "x":
        return [of_image(a) if low else kept(a.size) for a, low in zip(p.axes, lowered, strict=True)]
    return [of_gradient(a) if low else kept(a.out) for a, low in zip(p.axes, lowered, strict=True)]


@dataclass(frozen=True, slots=True)
class Blocking:
    """``batch`` images of ``places`` along the first axis, in blocks of ``images`` and ``rows`` at most."""

    batch: int
    places: int
    images: int
    rows: int

    @classmethod
    def of(cls, batch: int, places: int, images: int, rows: int) -> Blocking:
        """``rows`` 0 means all."""
        return cls(batch, places, min(images, batch), min(rows, places) if rows else places)

    @property
    def count(self) -> int:
        """How many blocks."""
        return -(-self.batch // self.images) * -(-self.places // self.rows)

    @property
    def share(self) -> float:
        """All images and places in units of the largest block."""
        return self.batch / self.images * self.places / self.rows

    @property
    def largest(self) -> Block:
        """The first, than which none is larger."""
        return Block(0, self.images, 0, self.rows)

    def blocks(self) -> list[Block]:
        """Every block in order, places of an image before the next image."""
        return [
            Block(n, min(self.images, self.batch - n), row, min(self.rows, self.places - row))
            for n in range(0, self.batch, self.images)
            for row in range(0, self.places, self.rows)
        ]


class Gather:
    """An operand as (images, groups, rows, columns): rows are its channels and taps, columns its places.

    A view of the operand where its memory has that form and the type fits (pointwise kernels; a kernel as large as the
    image); otherwise one strided copy per block, through a zero-padded copy of the block's images where the windows
    reach over the edge.
    """

    def __init__(
        self,
        p: ConvProblem,
        role: str,
        readings: Sequence[Reading],
        order: Order,
        flat: bool,
        block: Block,
        dtype: torch.dtype,
        arena: Arena,
    ) -> None:
        """``block`` is the largest one; its buffers come from ``arena``."""
        self.readings, self.order, self.flat, self.dtype = tuple(readings), order, flat, dtype
        self.dtypes = p.torch_dtype(role), dtype
        self.alignment = p.alignment[ROLES.index(role)]
        self.groups, self.channels = p.groups, p.shape(role)[1] // p.groups
        self.padded = any(reading.padded for reading in readings)
        self.direct = False
        if not self.padded and p.layout(role) != "view" and p.torch_dtype(role) == dtype:
            strides = dense_strides(p.shape(role), p.layout(role))
            sizes, window = self._window(block, strides)
            self.direct = fuse(sizes, window, order.matrix(p.dims, flat)) is not None
        self._lines = None
        if self.padded:
            lengths = [reading.length for reading in readings]
            all_channels = p.shape(role)[1]
            last = order.channel_last
            shape = (block.images, *lengths, all_channels) if last else (block.images, all_channels, *lengths)
            self._lines = arena.add(shape, dtype)
        self._matrix = None
        if not self.direct:
            sizes, _ = self._window(block, (0,) * (2 + p.dims))
            self._matrix = arena.add((math.prod(sizes),), dtype)

    @property
    def elements(self) -> tuple[int, int]:
        """Elements of the padded copy and of the matrix for the largest block; 0 where there is none."""
        return (
            math.prod(self._lines.sizes) if self._lines else 0,
            self._matrix.sizes[0] if self._matrix else 0,
        )

    def _window(self, block: Block, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides over (image, group, channel, taps, places), given those of (image, channel, space)."""
        image, channel, *space = strides
        places = [reading.places for reading in self.readings]
        places[0] = block.places
        sizes = (block.images, self.groups, self.channels, *(r.taps for r in self.readings), *places)
        taps = (r.dilation * s for r, s in zip(self.readings, space, strict=True))
        steps = (r.stride * s for r, s in zip(self.readings, space, strict=True))
        return sizes, (image, self.channels * channel, channel, *taps, *steps)

    def bind(self, tensor: torch.Tensor, blocks: Sequence[Block]) -> list[Filling]:
        """What fills the matrix for each block of tensors with the strides of this one."""
        return [self._filling(tensor, block) for block in blocks]

    def clear(self, workspace: torch.Tensor | None) -> None:
        """Zero the padding, once per run: every block writes the same elements inside it."""
        if self._lines is not None:
            self._lines.of(workspace).zero_()

    def _filling(self, tensor: torch.Tensor, block: Block) -> Filling:
        dims, strides = len(self.readings), tensor.stride()
        first = block.image * strides[0]
        pad = None
        if self._lines is not None:
            line_strides = self._line_strides()
            # The buffer is the block's own: only the operand is read from its first image on.
            offset = block.place * self.readings[0].stride * line_strides[2]
            pad = self._padding(block, strides, line_strides) if block.place == 0 else None
            strides = line_strides
        else:
            starts = [r.start + (block.place * r.stride if i == 0 else 0) for i, r in enumerate(self.readings)]
            offset = first + sum(start * s for start, s in zip(starts, strides[2:], strict=True))
        sizes, window = self._window(block, strides)
        groups = self.order.matrix(dims, self.flat)
        if self.direct:
            matrix = fused(sizes, window, groups)
            return Filling(self, pad, None, Strided(matrix[0], as_matrix(*matrix), offset))
        permutation = self.order.permute(dims)
        in_order = tuple(sizes[i] for i in permutation)
        target = [0] * len(sizes)
        for position, stride in zip(permutation, dense(in_order), strict=True):
            target[position] = stride
        matrix = fused(sizes, target, groups)
        return Filling(
            self,
            pad,
            self._copy(
                Strided(in_order, tuple(window[i] for i in permutation), offset), Strided(in_order, dense(in_order))
            ),
            Strided(matrix[0], as_matrix(*matrix)),
        )

    def _copy(self, source: Strided, target: Strided) -> Copy:
        """From the operand, or from the padded lines, which have the matrix's type and start as aligned as can be."""
        if self._lines is None:
            return Copy.of(source, target, self.dtypes, self.alignment)
        return Copy.of(source, target, (self.dtype, self.dtype), ALIGNMENT)

    def _line_strides(self) -> tuple[int, ...]:
        assert self._lines is not None
        strides = dense(self._lines.sizes)
        return (strides[0], strides[-1], *strides[1:-1]) if self.order.channel_last else strides

    def _padding(self, block: Block, strides: Sequence[int], lines: Sequence[int]) -> Copy:
        """The elements that are kept, in the operand and in the padded lines."""
        all_channels = self.groups * self.channels
        sizes = [block.images, all_channels, *(r.count for r in self.readings)]
        start = sum(r.start * s for r, s in zip(self.readings, strides[2:], strict=True))
        lead = sum(r.lead * s for r, s in zip(self.readings, lines[2:], strict=True))
        steps = [*lines[:2], *(r.step * s for r, s in zip(self.readings, lines[2:], strict=True))]
        order = list(range(len(sizes)))
        if self.order.channel_last:
            order = [0, *order[2:], 1]
        in_order = tuple(sizes[i] for i in order)
        source = Strided(in_order, tuple(strides[i] for i in order), block.image * strides[0] + start)
        target = Strided(in_order, tuple(steps[i] for i in order), lead)
        return Copy.of(source, target, self.dtypes, self.alignment)


@dataclass(frozen=True, slots=True)
class Filling:
    """One block of a :class:`Gather`, for fixed strides."""

    gather: Gather
    pad: Copy | None
    copy: Copy | None
    matrix: Strided

    def fill(self, tensor: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """The block's matrix (images, groups, rows, columns)."""
        lines, matrix = self.gather._lines, self.gather._matrix
        if self.copy is None or matrix is None:
            return self.matrix.of(tensor)
        source = tensor if lines is None else lines.of(workspace).view(-1)
        if self.pad is not None:
            self.pad.run(tensor, source)
        buffer = matrix.of(workspace)
        self.copy.run(source, buffer)
        return self.matrix.of(buffer)
