"""The kernel launches of an implicit matrix product over packed operands, and their workspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena
from tilewise.solvers.common.packing import Packing, PeakSearch, chunks_of, find_peaks, pack
from tilewise.solvers.common.split_products import ADD_BLOCK, LONGEST, UNIT, Tile
from tilewise.solvers.common.sweeps import Packed, Sweep, backward, extent, forward
from tilewise.solvers.common.views import OUT, A, B, View, at, epilogue, group_views, launch, residual_like, within

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["PRODUCTS", "Layout", "Product", "launches", "sum_length"]


@dataclass(frozen=True, slots=True)
class Product:
    """How two numbers are multiplied.

    ``dtype`` is that of packed elements (``None``: the operands' own), ``planes`` the number of parts of a number.
    ``scaled`` says whether numbers are scaled by powers of two, ``precision`` is Triton's.
    """

    dtype: torch.dtype | None
    planes: int
    scaled: bool
    precision: str = "ieee"


UNIT_DEPTH = 16
"""16-bit products that a matrix unit adds up at once."""
PRODUCTS = {
    "fp16x3": Product(torch.float16, 2, True),
    "tf32x3": Product(torch.float32, 1, False, "tf32x3"),
    "fp16": Product(torch.float16, 1, True),
    "native": Product(None, 1, False),
}
"""Kinds of products by their names in configs."""


class Layout:
    """Sizes and workspace of one pass over one group, with a kind of product and a tile.

    ``images`` are packed at a time. A weight gradient is summed in ``splits`` partial sums.
    """

    def __init__(self, p: ConvProblem, product: Product, tile: Tile, images: int, splits: int = 1) -> None:
        self.p, self.product, self.tile, self.images, self.splits = p, product, tile, images, splits
        self.axes: tuple[Axis, ...] = (*[UNIT] * (3 - p.dims), *p.axes)
        self.dtype = product.dtype or (torch.bfloat16 if p.dtype == "bf16" else torch.float16)
        self.into, self.outof = p.in_channels // p.groups, p.out_channels // p.groups
        """Channels of a group: of ``x`` and of ``y``."""
        gradient = p.pass_ is Pass.DGRAD
        sizes = [axis.out if gradient else axis.size for axis in self.axes]
        self.sweeps = tuple(backward(axis) if gradient else forward(axis) for axis in self.axes)
        extents = [extent(size, sweeps) for size, sweeps in zip(sizes, self.sweeps, strict=True)]
        grain = 16 if p.pass_ is Pass.WGRAD else tile.depth
        read = self.outof if gradient else self.into
        self.source = Packed((extents[0], extents[1], extents[2]), -(-read // grain) * grain, product.planes)
        arena = Arena()
        self.chunks = chunks_of(p.batch, read * math.prod(sizes))
        self.source_peaks = arena.add([p.batch * self.chunks], torch.int32)
        self.source_exponents = arena.add([p.batch], torch.int32)
        self.source_slot = arena.add([self.source.elements(images)], self.dtype)
        if p.pass_ is Pass.WGRAD:
            outs = [extent(axis.out, ()) for axis in self.axes]
            self.other = Packed((outs[0], outs[1], outs[2]), -(-self.outof // 16) * 16, product.planes)
            self.others = p.batch
            self.other_chunks = chunks_of(p.batch, self.outof * math.prod(axis.out for axis in self.axes))
            self.other_slot = arena.add([self.other.elements(images)], self.dtype)
        else:
            taps = [extent(axis.kernel, ()) for axis in self.axes]
            self.other = Packed((taps[0], taps[1], taps[2]), self.source.channels, product.planes)
            self.others, self.other_chunks = (self.into if gradient else self.outof), 1
            self.other_slot = arena.add([self.other.elements(self.others)], self.dtype)
        self.other_peaks = arena.add([self.others * self.other_chunks], torch.int32)
        self.other_exponents = arena.add([self.others], torch.int32)
        if p.pass_ is Pass.WGRAD:
            self.partials = arena.add([splits, self.outof, self.columns], torch.float32)
        arena.add([2 * (tile.channels + tile.columns)], torch.float32)  # channels beyond the last are read, not used
        self.workspace = arena.size

    @property
    def promotes(self) -> bool:
        """Whether sums are so long that they are interrupted for accuracy, which takes twice the registers."""
        return self.product.planes == 2 and sum_length(self.p) > LONGEST * 3 // 2

    @property
    def columns(self) -> int:
        """Columns of a weight gradient: taps times padded input channels."""
        return self.p.taps * self.source.channels

    @property
    def largest(self) -> int:
        """Elements of the largest packed tensor."""
        return max(self.source_slot.sizes[0], self.other_slot.sizes[0])

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """For every block of images its first image and their number."""
        return [(n, min(self.images, self.p.batch - n)) for n in range(0, self.p.batch, self.images)]


def sum_length(p: ConvProblem) -> int:
    """How many products matrix units add up for each element of the result.

    They take :data:`UNIT_DEPTH` channels of a tap at a time and round once for these, however few there are.
    """
    if p.pass_ is Pass.WGRAD:
        return p.batch * math.prod(axis.out for axis in p.axes)
    read = p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels
    return -(-(read // p.groups) // UNIT_DEPTH) * UNIT_DEPTH * p.taps


def launches(layout: Layout, a: View, b: View, out: View) -> list[Launch]:
    """Every launch of the pass, group by group. ``out`` is read where the problem accumulates."""
    launches_of = _gradient if layout.p.pass_ is Pass.WGRAD else _gather
    return [queued for group in group_views(layout.p, a, b, out) for queued in launches_of(layout, *group)]


def _gather(layout: Layout, source: View, filters: View, out: View, bias: Any) -> Iterator[Launch]:
    """The launches of a forward pass or data gradient of one group."""
    p = layout.p
    images = PeakSearch(source, A, layout.source_peaks, layout.chunks)
    weight = PeakSearch(filters, B, layout.other_peaks, 1)
    if layout.product.scaled:
        yield find_peaks(images, weight)
    other = Packing(p, weight, filters, layout.other, layout.other_slot, layout.other_exponents)
    for first, count in layout.blocks:
        block = source.narrow(0, first, count)
        packed_block = Packing(
            p, images, block, layout.source, layout.source_slot, layout.source_exponents, first, first
        )
        yield _pack(layout, packed_block, other, both=first == 0)
        for sweeps in itertools.product(*layout.sweeps):
            if p.accumulate and not bias and not all(sweep.taps for sweep in sweeps):
                continue
            yield _gather_gemm(layout, sweeps, out.narrow(0, first, count), first, bias)


def _gradient(layout: Layout, source: View, gradients: View, out: View, _: None) -> Iterator[Launch]:
    """The launches of a weight gradient of one group."""
    p = layout.p
    images = PeakSearch(source, A, layout.source_peaks, layout.chunks)
    results = PeakSearch(gradients, B, layout.other_peaks, layout.other_chunks)
    if layout.product.scaled:
        yield find_peaks(images, results)
    for first, count in layout.blocks:
        block = source.narrow(0, first, count)
        packed_block = Packing(p, images, block, layout.source, layout.source_slot, layout.source_exponents)
        block = gradients.narrow(0, first, count)
        other = Packing(p, results, block, layout.other, layout.other_slot, layout.other_exponents)
        yield _pack(layout, packed_block, other)
        yield _gradient_gemm(layout, count, again=first > 0)
    yield _add_partials(layout, out)


def _pack(layout: Layout, a: Packing, b: Packing, *, both: bool = True) -> Launch:
    """The launch that packs ``a``, and with ``both`` also ``b``."""
    from tilewise.kernels.triton import layout as kernels

    return pack(kernels.pack, a, b, both=both, PLANES=layout.source.planes, SCALED=layout.product.scaled)


def _gather_gemm(layout: Layout, sweeps: Sequence[Sweep], out: View, first: int, bias: Any) -> Launch:
    """The launch of one sweep's product over packed operands."""
    from tilewise.kernels.triton import implicit_gemm as kernels

    p, tile, source, filters = layout.p, layout.tile, layout.source, layout.other
    counts = [sweep.count for sweep in sweeps]
    pixels, channels = out.sizes[0] * math.prod(counts), out.sizes[1]
    for dim, sweep in enumerate(sweeps, start=2):
        out = out.narrow(dim, sweep.first, sweep.count)
    written = out
    steps = [stride * sweep.stride for stride, sweep in zip(out.strides[2:], sweeps, strict=True)]
    taps = [sweep.taps for sweep in sweeps]
    place = source.offset([sweep.start for sweep in sweeps])
    target = replace(within(out, OUT), anywhere=not written.aligned)  # of other strides nothing is known
    return launch(
        kernels.gather_gemm,
        [-(-channels // tile.channels) * -(-pixels // tile.columns)],
        [at(layout.source_slot, place),
         at(layout.other_slot, filters.offset([sweep.first_tap for sweep in sweeps])),
         at(layout.source_exponents, first), at(layout.other_exponents), target,
         replace(bias or target, anywhere=True), residual_like(p, target)],
        [pixels, channels, *counts, source.image * source.row, *source.strides([sweep.step for sweep in sweeps]),
         math.prod(taps) * source.channels // tile.depth, *taps[1:],
         *source.strides([sweep.tap_step for sweep in sweeps]),
         filters.image * filters.row, *filters.strides([sweep.tap_stride for sweep in sweeps]),
         source.channels, *out.strides[:2], *steps],
        warps=tile.warps, stages=tile.stages,
        PLANES=source.planes, SCALED=layout.product.scaled,
        PRECISION=layout.product.precision, ACCUMULATE=p.accumulate, BIAS=bool(bias), **epilogue(p),
        FLAT=counts[0] == 1, WIDE=out.span >= 2**31, ALIGNED=written.aligned,
        BLOCK_O=tile.halves[0], MORE_O=tile.halves[1], BLOCK_P=tile.columns, BLOCK_K=tile.depth,
        PROMOTE=LONGEST // tile.depth if layout.promotes else 0,
    )  # fmt: skip


def _gradient_gemm(layout: Layout, images: int, *, again: bool) -> Launch:
    """The launch of a weight gradient's product; with ``again`` it adds to the partial sums."""
    from tilewise.kernels.triton import implicit_gemm as kernels

    tile, source, gradients = layout.tile, layout.source, layout.other
    sweeps = [axis_sweeps[0] for axis_sweeps in layout.sweeps]
    counts = [sweep.count for sweep in sweeps]
    pixels = images * math.prod(counts)
    steps = -(-pixels // tile.depth)
    share = -(-steps // layout.splits) * tile.depth
    tiles = -(-layout.outof // tile.channels) * -(-layout.columns // tile.columns)
    return launch(
        kernels.gradient_gemm,
        [tiles, layout.splits],
        [at(layout.source_slot, source.offset([sweep.start for sweep in sweeps])), at(layout.other_slot),
         at(layout.partials)],
        [pixels, share, int(again), layout.outof, layout.columns, *counts, source.image * source.row,
         *source.strides([sweep.step for sweep in sweeps]), *(sweep.taps for sweep in sweeps[1:]),
         *source.strides([sweep.tap_step for sweep in sweeps]), gradients.row, gradients.channels, source.channels,
         0, 0],
        warps=tile.warps, stages=tile.stages,
        FLAT=counts[0] == 1, PLANES=source.planes, BLOCK_O=tile.channels, BLOCK_N=tile.columns,
        BLOCK_K=tile.depth, PROMOTE=LONGEST // tile.depth if layout.promotes else 2**20 // tile.depth,
    )  # fmt: skip


def _add_partials(layout: Layout, out: View) -> Launch:
    """The launch that adds the partial sums of a weight gradient into the result."""
    from tilewise.kernels.triton import implicit_gemm as kernels

    total = layout.outof * layout.columns
    taps = [axis.kernel for axis in layout.axes]
    return launch(
        kernels.add_partials,
        [-(-total // ADD_BLOCK)],
        [at(layout.partials), at(layout.source_exponents), at(layout.other_exponents), within(out, OUT)],
        [layout.splits, layout.columns, layout.source.channels, layout.into, total, *taps[1:], *out.strides],
        SCALED=layout.product.scaled, ACCUMULATE=layout.p.accumulate, BLOCK=ADD_BLOCK,
    )  # fmt: skip
