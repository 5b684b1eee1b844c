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

from tilewise.problems.base import ALIGNMENT, dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem
from tilewise.solvers.common.buffers import Arena, Strided, dense, fuse, fused
from tilewise.solvers.common.matmul import as_matrix
from tilewise.solvers.lowering._copies import Copy

__all__ = ["Block", "Blocking", "Gather", "Order", "Reading", "kept", "readings"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How one axis is read: ``places`` windows of ``taps`` taps over a line.

    The line has ``length`` elements. ``count`` elements of the operand, from ``start`` on, lie ``step`` apart in it,
    the first at ``lead``; the rest are zeros. Window ``g`` reads at tap ``r`` element ``g * stride + r * dilation`` of
    the line.
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
        """Whether the line holds zeros beside the operand's elements."""
        return self.step > 1 or self.lead > 0 or self.count < self.length


def kept(size: int) -> Reading:
    """The reading of an axis of ``size`` that is not lowered."""
    return Reading(0, size, 1, 0, size, 1, 1, size, 1)


def of_image(axis: Axis) -> Reading:
    """The reading of the padded image at the outputs, for FPROP and WGRAD."""
    length = (axis.out - 1) * axis.stride + axis.reach
    start, stop = max(0, -axis.before), min(axis.size, length - axis.before)
    count = max(stop - start, 0)
    lead = start + axis.before if count else 0
    return Reading(start, count, 1, lead, length, axis.kernel, axis.dilation, axis.out, axis.stride)


def of_gradient(axis: Axis) -> Reading:
    """The reading of the output gradient at the inputs, spread, padded and with taps reversed, for DGRAD and WGRAD."""
    length = axis.size + axis.reach - 1
    lead = axis.reach - 1 - axis.before
    start = max(0, -(lead // axis.stride))
    stop = min(axis.out, (length - 1 - lead) // axis.stride + 1)
    count = max(stop - start, 0)
    lead = lead + start * axis.stride if count else 0
    return Reading(start, count, axis.stride, lead, length, axis.kernel, axis.dilation, axis.size, 1)


class Order(enum.Enum):
    """How a matrix of (image, group, channel, tap, place) lies in memory."""

    IMAGES = "images"
    """image, group, channel, tap, place: one matrix per image and group, as contiguous tensors have it."""
    PIXELS = "pixels"
    """image, place, group, tap, channel: one matrix of all pixels, as channels_last tensors have it."""
    PATCHES = "patches"
    """image, place, group, channel, tap: the same with a contiguous tensor's order inside a window."""
    TOKENS = "tokens"
    """As PATCHES for a matrix with windows, and as MERGED for one without; used where all images must be one product.
    """
    MERGED = "merged"
    """group, channel, tap, image, place: one matrix per group of all images' places."""

    @property
    def channel_last(self) -> bool:
        """Whether a window's channels lie next to each other."""
        return self is Order.PIXELS

    @property
    def flats(self) -> tuple[bool, ...]:
        """Whether images and places may be one dimension of the matrix: the choices, the better one first."""
        return {Order.IMAGES: (False,), Order.TOKENS: (True,), Order.MERGED: (True,)}.get(self, (True, False))

    @property
    def merges(self) -> bool:
        """Whether the purpose of this order is to make one product of several images."""
        return self in (Order.MERGED, Order.TOKENS)

    @property
    def plain(self) -> Order:
        """The order of a matrix without windows that is multiplied with one in this order: whole rows are moved."""
        return Order.MERGED if self is Order.TOKENS else self

    def permute(self, dims: int) -> tuple[int, ...]:
        """Positions in (image, group, channel, taps, places) of the matrix's dimensions, outermost first."""
        taps, places = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        if self is Order.IMAGES:
            return (0, 1, 2, *taps, *places)
        if self is Order.PIXELS:
            return (0, *places, 1, *taps, 2)
        if self in (Order.PATCHES, Order.TOKENS):
            return (0, *places, 1, 2, *taps)
        return (1, 2, *taps, 0, *places)

    def matrix(self, dims: int, flat: bool) -> tuple[tuple[int, ...], ...]:
        """Groups of these dimensions that make up (images, groups, rows, columns).

        With ``flat`` images are part of the columns.
        """
        taps, places = tuple(range(3, 3 + dims)), tuple(range(3 + dims, 3 + 2 * dims))
        rows = (*taps, 2) if self.channel_last else (2, *taps)
        return ((), (1,), rows, (0, *places)) if flat else ((0,), (1,), rows, places)


@dataclass(frozen=True, slots=True)
class Block:
    """Images ``[image, image + images)`` and places ``[place, place + places)`` along the first axis."""

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
    """``batch`` images with ``places`` places along the first axis, in blocks of at most ``images`` and ``rows``."""

    batch: int
    places: int
    images: int
    rows: int

    @classmethod
    def of(cls, batch: int, places: int, images: int, rows: int) -> Blocking:
        """The blocking with at most ``images`` and ``rows`` in a block; ``rows`` 0 means all."""
        return cls(batch, places, min(images, batch), min(rows, places) if rows else places)

    @property
    def count(self) -> int:
        """The number of blocks that cover all images and places."""
        return -(-self.batch // self.images) * -(-self.places // self.rows)

    @property
    def size_in_blocks(self) -> float:
        """The whole problem's size in units of the largest block."""
        return self.batch / self.images * self.places / self.rows

    @property
    def largest(self) -> Block:
        """The first block, which is the largest."""
        return Block(0, self.images, 0, self.rows)

    def blocks(self) -> list[Block]:
        """Every block in order: all rows of an image before the next image."""
        return [
            Block(n, min(self.images, self.batch - n), row, min(self.rows, self.places - row))
            for n in range(0, self.batch, self.images)
            for row in range(0, self.places, self.rows)
        ]


class Gather:
    """An operand as a matrix (images, groups, rows, columns): rows are its channels and taps, columns its places.

    It is a view of the operand where strides and dtype allow it (pointwise kernels; a kernel as large as the image).
    Otherwise each block is one strided copy. Where windows reach over the edge, it copies from a zero-padded copy of
    the block's images.
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
        """``block`` is the largest block; buffers for it are reserved in ``arena``."""
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
        """For each block what fills its matrix, for tensors with the strides of this one."""
        return [self._filling(tensor, block) for block in blocks]

    def clear(self, workspace: torch.Tensor | None) -> None:
        """Zero the padding, once per run: every block overwrites the same elements inside it."""
        if self._lines is not None:
            self._lines.of(workspace).zero_()

    def _filling(self, tensor: torch.Tensor, block: Block) -> Filling:
        """What fills the matrix of one block."""
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
        """The copy from the operand, or from the padded lines, which have the matrix's dtype and full alignment."""
        if self._lines is None:
            return Copy.of(source, target, self.dtypes, self.alignment)
        return Copy.of(source, target, (self.dtype, self.dtype), ALIGNMENT)

    def _line_strides(self) -> tuple[int, ...]:
        """Strides of the padded lines as (image, channel, space)."""
        assert self._lines is not None
        strides = dense(self._lines.sizes)
        return (strides[0], strides[-1], *strides[1:-1]) if self.order.channel_last else strides

    def _padding(self, block: Block, strides: Sequence[int], lines: Sequence[int]) -> Copy:
        """The copy of the operand's elements into the padded lines."""
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
    """What fills the matrix of one block of a :class:`Gather`, for fixed strides."""

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
