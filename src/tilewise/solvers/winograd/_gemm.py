"""The launches of a Winograd convolution on matrix units: what is transformed, and where it is in the workspace."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tilewise.kernels.cook_toom import POINTS, Matrix, shift, transforms
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena
from tilewise.solvers.common.packing import Packing, PeakSearch, chunks_of, find_peaks, pack
from tilewise.solvers.common.split_products import ADD_BLOCK, LONGEST, UNIT, Tile
from tilewise.solvers.common.sweeps import Extent, Packed, Sweep, backward, extent, forward
from tilewise.solvers.common.views import OUT, A, B, View, at, group_views, launch, within

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["MOST_TAPS", "TilesLayout", "launches", "saving_axis"]

MOST_TAPS = 7
"""Most taps along the axis on which products are saved."""
PACK_CHANNELS = 64
"""Channels that one program transforms."""
FEW_STEPS, DEEP = 10, 64
"""With at most so many steps for a point, each at least so deep, sums are added to the results at every step, as a loop
that ends must wait for its loads anew."""


def saving_axis(p: ConvProblem, most: int = MOST_TAPS) -> int | None:
    """The axis along which products are saved: the last with 2 to ``most`` taps and no stride or dilation.

    ``None`` where there is none.
    """
    for index in reversed(range(p.dims)):
        axis = p.axes[index]
        if 2 <= axis.kernel <= most and (axis.stride, axis.dilation) == (1, 1):
            return index
    return None


class TilesLayout:
    """Sizes and workspace of one pass over one group.

    A tile has ``outputs`` results. ``images`` are transformed at a time, in ``parts`` of their channels. A weight
    gradient is summed in ``splits`` partial sums. Raises ``ValueError`` where no axis has taps to save.
    """

    def __init__(self, p: ConvProblem, outputs: int, tile: Tile, images: int, parts: int = 1, splits: int = 1) -> None:
        self.p, self.m, self.tile, self.images, self.splits = p, outputs, tile, images, splits
        index = saving_axis(p)
        if index is None:
            raise ValueError(f"no axis of {p.axes} has taps to save")
        self.order = (*(i for i in range(p.dims) if i != index), index)
        self.axes: tuple[Axis, ...] = (*[UNIT] * (3 - p.dims), *(p.axes[i] for i in self.order))
        transforms(outputs, self.axes[2].kernel)  # raises where there are none
        self.points = outputs + self.axes[2].kernel - 1
        self.into, self.outof = p.in_channels // p.groups, p.out_channels // p.groups
        gradient, backwards = p.pass_ is Pass.WGRAD, p.pass_ is Pass.DGRAD
        self.written = self.axes[2].size if backwards else self.axes[2].out
        """Results along the width; in a weight gradient places of the output gradient."""
        self.tiles = -(-self.written // outputs)
        grain = 16 if gradient else tile.depth
        read = self.outof if backwards else self.into
        share = -(-read // (parts * grain)) * grain
        self.shares = [(c, min(share, read - c)) for c in range(0, read, share)]
        """First channel and number of channels that are read at a time."""
        self.sweeps = tuple(backward(axis) if backwards else forward(axis) for axis in self.axes[:2])
        sizes = [axis.out if backwards else axis.size for axis in self.axes[:2]]
        self.source = self._packed([extent(n, s) for n, s in zip(sizes, self.sweeps, strict=True)], self.tiles, share)
        arena = Arena()
        searched = p.batch if gradient else images
        self.chunks = chunks_of(searched, read * math.prod(sizes) * self.axes[2].size)
        self.source_peaks = arena.add([searched * self.chunks], torch.int32)
        self.source_exponents = arena.add([p.batch], torch.int32)
        self.source_slot = arena.add([self.source.elements(images)], torch.float16)
        if gradient:
            outs = [axis.out for axis in self.axes]
            self.other = self._packed([extent(n, ()) for n in outs[:2]], self.tiles, -(-self.outof // 16) * 16)
            self.others, count = p.batch, images
            self.other_chunks = chunks_of(p.batch, self.outof * math.prod(outs))
        else:
            self.other = self._packed([extent(axis.kernel, ()) for axis in self.axes[:2]], 1, share)
            self.others, self.other_chunks = (self.into if backwards else self.outof), 1
            count = self.others
        self.other_slots = [arena.add([self.other.elements(count)], torch.float16) for _ in self.shares]
        self.other_peaks = arena.add([self.others * self.other_chunks], torch.int32)
        self.other_exponents = arena.add([self.others], torch.int32)
        if gradient:
            self.partials = arena.add([self.points, splits, self.outof, self.columns], torch.float32)
        arena.add([2 * (tile.channels + tile.columns)], torch.float32)  # channels beyond the last are read, not used
        self.workspace = arena.size

    def _packed(self, axes: Sequence[Extent], tiles: int, channels: int) -> Packed:
        """The packed form of a tensor: for every tile its points, each in two fp16 parts."""
        return Packed((axes[0], axes[1], Extent(0, tiles, 0, 0)), channels, 2 * self.points)

    @property
    def columns(self) -> int:
        """Columns of a weight gradient at one point: taps of the other axes times padded input channels."""
        return self.axes[0].kernel * self.axes[1].kernel * self.source.channels

    @property
    def largest(self) -> int:
        """Elements of the largest packed tensor."""
        return max(slot.sizes[0] for slot in (self.source_slot, *self.other_slots))

    @property
    def block_count(self) -> int:
        """Number of blocks of images."""
        return -(-self.p.batch // self.images)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First image and number of images of every block."""
        return [(n, min(self.images, self.p.batch - n)) for n in range(0, self.p.batch, self.images)]

    def constants(self, matrix: str) -> dict[str, Any]:
        """A kernel's compile-time constants for the ``filter``, ``input`` or ``output`` transform."""
        return _constants(self.m, self.axes[2].kernel, matrix)

    def turned(self, tensor: View) -> View:
        """``tensor`` with the axis last along which products are saved."""
        return tensor.reordered([0, 1, *range(2, 5 - self.p.dims), *(5 - self.p.dims + i for i in self.order)])


def launches(layout: TilesLayout, a: View, b: View, out: View) -> list[Launch]:
    """Every launch of the pass, group by group. ``out`` is read where the problem accumulates."""
    queued: list[Launch] = []
    for source, other, result, bias in group_views(layout.p, *map(layout.turned, (a, b, out))):
        if layout.p.pass_ is Pass.WGRAD:
            queued += _gradient(layout, source, other, result)
        else:
            # Taps in reverse: a gradient of the image then reads what it needs from left to right.
            filters = other.reversed(4) if layout.p.pass_ is Pass.DGRAD else other
            queued += _gather(layout, source, filters, result, bias)
    return queued


def _gather(layout: TilesLayout, source: View, filters: View, out: View, bias: Any) -> Iterator[Launch]:
    """The launches of a forward pass or data gradient of one group."""
    axis = layout.axes[2]
    begin = axis.before - axis.kernel + 1 if layout.p.pass_ is Pass.DGRAD else -axis.before
    weight = PeakSearch(filters, B, layout.other_peaks, 1)
    for first, count in layout.blocks:
        images, both = PeakSearch(source.narrow(0, first, count), A, layout.source_peaks, layout.chunks), first == 0
        yield find_peaks(images, weight, both=both)  # and then transform what caches may still hold
        for number, share in enumerate(layout.shares):
            block = _Transforming(
                layout.p, images, images.view.narrow(1, *share), layout.source, layout.source_slot,
                layout.source_exponents, first, layout=layout, matrix="input", begin=begin, step=layout.m,
            )  # fmt: skip
            other = _Transforming(
                layout.p, weight, filters.narrow(1, *share), layout.other, layout.other_slots[number],
                layout.other_exponents, layout=layout, matrix="filter", begin=0, step=1,
            )  # fmt: skip
            yield _transform(layout, block, other, both=both)
            adds, more = layout.p.accumulate or number > 0, None if number else bias
            for sweeps in itertools.product(*layout.sweeps):
                if all(sweep.taps for sweep in sweeps) or not adds or more:
                    yield _gemm(layout, sweeps, number, out.narrow(0, first, count), first, more, adds=adds)


def _gradient(layout: TilesLayout, source: View, gradients: View, out: View) -> Iterator[Launch]:
    """The launches of a weight gradient of one group."""
    images = PeakSearch(source, A, layout.source_peaks, layout.chunks)
    results = PeakSearch(gradients, B, layout.other_peaks, layout.other_chunks)
    yield find_peaks(images, results)
    for first, count in layout.blocks:
        block = _Transforming(
            layout.p, images, source.narrow(0, first, count), layout.source, layout.source_slot,
            layout.source_exponents, layout=layout, matrix="input", begin=-layout.axes[2].before, step=layout.m,
        )  # fmt: skip
        other = _Transforming(
            layout.p, results, gradients.narrow(0, first, count), layout.other, layout.other_slots[0],
            layout.other_exponents, layout=layout, matrix="output", begin=0, step=layout.m,
        )  # fmt: skip
        yield _transform(layout, block, other)
        yield _gradient_gemm(layout, count, again=first > 0)
    yield _add_points(layout, out)


@functools.cache
def _constants(outputs: int, taps: int, name: str) -> dict[str, Any]:
    """A kernel's compile-time constants for one of the transform matrices of F(outputs, taps)."""
    matrix: Matrix = getattr(transforms(outputs, taps), name)
    flat = tuple(float(entry) for row in matrix for entry in row)
    return {"MATRIX": flat, "INPUTS": len(matrix[0]), "SHIFT": shift(matrix)}


@dataclass(frozen=True, kw_only=True)
class _Transforming(Packing):
    """An operand that is transformed with ``matrix`` while it is packed.

    Tile t begins at place ``begin + t * step``.
    """

    PLACES: ClassVar[int] = 16

    layout: TilesLayout
    matrix: str
    begin: int
    step: int

    @property
    def inner(self) -> View:
        """The part of the view that is read; along the width the tiles say what that is."""
        depth, height, _ = self.packed.axes
        return self.view.narrow(2, depth.first, depth.size).narrow(3, height.first, height.size)

    @property
    def block_c(self) -> int:
        """Channels that one program transforms."""
        return PACK_CHANNELS

    @property
    def scalars(self) -> list[int]:
        """The kernel's integers: sizes, tiles, gaps and strides."""
        inner, head = self.inner, self.packed.head
        depth, height, tiles = self.packed.axes
        return [-1 if head else 0, self.blocks, self.known, *inner.sizes[1:], self.begin, self.step, tiles.size,
                depth.pitch, height.pitch, head, *inner.strides, self.packed.channels]  # fmt: skip

    def constants(self, name: str) -> dict[str, Any]:
        """As in :class:`Packing`, with the transform matrix."""
        matrix = {name + key: value for key, value in self.layout.constants(self.matrix).items()}
        return {**matrix, **super().constants(name)}


def _transform(layout: TilesLayout, a: Packing, b: Packing, *, both: bool = True) -> Launch:
    """The launch that transforms and packs ``a``, and with ``both`` also ``b``."""
    from tilewise.kernels.triton import winograd as kernels

    return pack(kernels.transform, a, b, both=both, POINTS=layout.points)


def _values(points: int) -> tuple[float, ...]:
    """The finite interpolation points in order."""
    return tuple(float(value) for value in POINTS[points - 1])


def _gemm(layout: TilesLayout, sweeps: Sequence[Sweep], share: int, out: View, first: int, bias: Any, *,
          adds: bool) -> Launch:  # fmt: skip
    """The launch of one sweep's products and their transform to results; with ``adds`` it adds to them."""
    from tilewise.kernels.triton import winograd as kernels

    tile, source, filters = layout.tile, layout.source, layout.other
    counts = [sweep.count for sweep in sweeps]
    places, channels = out.sizes[0] * math.prod(counts) * layout.tiles, out.sizes[1]
    for dim, sweep in enumerate(sweeps, start=2):
        out = out.narrow(dim, sweep.first, sweep.count)
    pitches = [stride * sweep.stride for stride, sweep in zip(out.strides[2:4], sweeps, strict=True)]
    taps = [sweep.taps for sweep in sweeps]
    steps = math.prod(taps) * source.channels // tile.depth
    return launch(
        kernels.tile_gemm,
        [-(-channels // tile.channels) * -(-places // tile.columns)],
        [at(layout.source_slot, source.offset([*(sweep.start for sweep in sweeps), 0])),
         at(layout.other_slots[share], filters.offset([*(sweep.first_tap for sweep in sweeps), 0])),
         at(layout.source_exponents, first), at(layout.other_exponents), within(out, OUT), bias or within(out, OUT)],
        [places, channels, *counts, layout.tiles, layout.written, source.image * source.row,
         *source.strides([*(sweep.step for sweep in sweeps), 1]),
         steps, taps[1],
         *source.strides([*(sweep.tap_step for sweep in sweeps), 1])[:2],
         filters.image * filters.row, *filters.strides([*(sweep.tap_stride for sweep in sweeps), 1])[:2],
         source.channels, *out.strides[:2], *pitches, out.strides[4]],
        warps=tile.warps, stages=tile.stages,
        VALUES=_values(layout.points), M=layout.m, ACCUMULATE=adds, BIAS=bool(bias), FLAT=counts[0] == 1,
        WIDE=out.span >= 2**31, ALIGNED=out.aligned, BLOCK_O=tile.channels, BLOCK_P=tile.columns, BLOCK_K=tile.depth,
        PROMOTE=1 if steps <= FEW_STEPS and tile.depth >= DEEP else LONGEST // tile.depth,
    )  # fmt: skip


def _gradient_gemm(layout: TilesLayout, images: int, *, again: bool) -> Launch:
    """The launch of a weight gradient's products; with ``again`` it adds to the partial sums."""
    from tilewise.kernels.triton import implicit_gemm as kernels

    tile, source, gradients = layout.tile, layout.source, layout.other
    sweeps = [axis_sweeps[0] for axis_sweeps in layout.sweeps]
    counts = [*(sweep.count for sweep in sweeps), layout.tiles]
    places = images * math.prod(counts)
    share = -(-places // (tile.depth * layout.splits)) * tile.depth
    tiles = -(-layout.outof // tile.channels) * -(-layout.columns // tile.columns)
    return launch(
        kernels.gradient_gemm,
        [tiles, layout.splits, layout.points],
        [at(layout.source_slot, source.offset([*(sweep.start for sweep in sweeps), 0])), at(layout.other_slots[0]),
         at(layout.partials)],
        [places, share, int(again), layout.outof, layout.columns, *counts, source.image * source.row,
         *source.strides([*(sweep.step for sweep in sweeps), 1]), sweeps[1].taps, 1,
         *source.strides([*(sweep.tap_step for sweep in sweeps), 1])[:2], 0, gradients.row, gradients.channels,
         source.channels, 2 * source.channels, 2 * gradients.channels],
        warps=tile.warps, stages=tile.stages,
        FLAT=counts[0] == 1, PLANES=2, BLOCK_O=tile.channels, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
        PROMOTE=LONGEST // tile.depth,
    )  # fmt: skip


def _add_points(layout: TilesLayout, out: View) -> Launch:
    """The launch that transforms a weight gradient's partial sums to taps and adds them into the result."""
    from tilewise.kernels.triton import winograd as kernels

    total = layout.outof * layout.columns
    return launch(
        kernels.add_points,
        [-(-total // ADD_BLOCK)],
        [at(layout.partials), at(layout.source_exponents), at(layout.other_exponents), within(out, OUT)],
        [layout.splits, layout.columns, layout.source.channels, layout.into, total, layout.axes[1].kernel,
         *out.strides],
        MATRIX=layout.constants("filter")["MATRIX"], POINTS=layout.points, TAPS=layout.axes[2].kernel,
        ACCUMULATE=layout.p.accumulate, BLOCK=ADD_BLOCK,
    )  # fmt: skip
