"""The kernel launches of an implicit matrix product: what is packed where in the workspace, and in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.axis import Axis
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._buffers import Arena, Slot
from tilewise.solvers._sweeps import Packed, Sweep, backward, extent, forward
from tilewise.solvers.base import SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = [
    "ADD_BLOCK", "LONGEST", "OUT", "PRODUCTS", "UNIT", "A", "B", "Layout", "Product", "Tile", "View", "at",
    "chunks_of", "counted", "group_views", "launch", "launches", "look", "sum_length", "within",
]  # fmt: skip

A, B, OUT, WORKSPACE, BIAS = range(5)
"""The tensors of a launch's pointers."""
UNIT = Axis(1, 1)
LONGEST = 1024
"""Products summed in the matrix units before a sum is added outside of them, where fp32's accuracy is asked for."""
PEAKS = 1024
"""Programs that look for the largest value of a tensor, about."""
PACK_PLACES = 64
ADD_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Product:
    """How one product of two numbers is done: packed elements, planes of them, whether they are scaled."""

    dtype: torch.dtype | None
    planes: int
    scaled: bool
    precision: str = "ieee"


PRODUCTS = {
    "fp16x3": Product(torch.float16, 2, True),
    "tf32x3": Product(torch.float32, 1, False, "tf32x3"),
    "fp16": Product(torch.float16, 1, True),
    "native": Product(None, 1, False),
}


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``channels`` of the result by ``columns`` (pixels, or of a filter gradient taps and
    channels), ``depth`` products at a time."""

    channels: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def halves(self) -> tuple[int, int]:
        """Channels as a power of two and another or none, which is what Triton can hold."""
        first = 1 << (self.channels.bit_length() - 1)
        return first, self.channels - first


@dataclass(frozen=True, slots=True)
class View:
    """A tensor with 3 spatial axes: sizes and strides (images, channels, depth, height, width), offset in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view of a tensor with 1, 2 or 3 spatial axes."""
        missing = 5 - tensor.dim()
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls((*sizes[:2], *[1] * missing, *sizes[2:]), (*strides[:2], *[0] * missing, *strides[2:]), tensor.dtype)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """``length`` places of one dimension."""
        sizes = (*self.sizes[:dim], length, *self.sizes[dim + 1 :])
        return View(sizes, self.strides, self.dtype, self.offset + start * self.strides[dim])

    def swapped(self) -> View:
        """Images and channels exchanged."""
        sizes, strides = ((t[1], t[0], *t[2:]) for t in (self.sizes, self.strides))
        return View(sizes, strides, self.dtype, self.offset)

    def reordered(self, order: Sequence[int]) -> View:
        """Its dimensions in another order."""
        sizes, strides = (tuple(t[i] for i in order) for t in (self.sizes, self.strides))
        return View(sizes, strides, self.dtype, self.offset)

    def reversed(self, dim: int) -> View:
        """The places of one dimension from the last to the first."""
        stride = self.strides[dim]
        strides = (*self.strides[:dim], -stride, *self.strides[dim + 1 :])
        return View(self.sizes, strides, self.dtype, self.offset + (self.sizes[dim] - 1) * stride)

    @property
    def dense(self) -> bool:
        """Whether each image's elements lie without gaps."""
        expected = 1
        for stride, size in sorted(zip(self.strides[1:], self.sizes[1:], strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def aligned(self) -> int:
        """0, or where channels are innermost a power of two that divides their number and all other strides."""
        if self.sizes[1] == 1 or self.strides[1] != 1:
            return 0
        others = [stride for dim, stride in enumerate(self.strides) if dim != 1 and self.sizes[dim] > 1]
        return math.gcd(8, self.sizes[1], *others)

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return sum((size - 1) * abs(stride) for size, stride in zip(self.sizes, self.strides, strict=True))


class Layout:
    """Sizes and the workspace of one pass of one group with a product, a tile and ``images`` at a time."""

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
        """Whether sums are so long that they are interrupted, which takes as many registers again."""
        return self.product.planes == 2 and sum_length(self.p) > LONGEST * 3 // 2

    @property
    def columns(self) -> int:
        """Columns of a filter gradient: taps by padded input channels."""
        return self.p.taps * self.source.channels

    @property
    def largest(self) -> int:
        """Elements of the largest packed tensor."""
        return max(self.source_slot.sizes[0], self.other_slot.sizes[0])

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First image and number of images of every block."""
        return [(n, min(self.images, self.p.batch - n)) for n in range(0, self.p.batch, self.images)]


def sum_length(p: ConvProblem) -> int:
    """Products in each element of the result; for a filter gradient more than are ever summed in one go."""
    if p.pass_ is Pass.WGRAD:
        return p.batch * math.prod(axis.out for axis in p.axes)
    read = p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels
    return read // p.groups * p.taps


def chunks_of(images: int, elements: int) -> int:
    """Programs that look for the largest of an image's ``elements``, where there are so many ``images`` at a time."""
    return max(1, min(PEAKS // images, elements // 4096))


def counted(view: View) -> View:
    """``view``, whose elements kernels count in 32 bits. Raises ``SolverUnavailable`` where they lie too far apart."""
    if view.span >= 2**31:
        raise SolverUnavailable(f"strides {view.strides} of sizes {view.sizes} are too large to count in 32 bits")
    return view


def group_views(p: ConvProblem, a: View, b: View, out: View) -> Iterator[tuple[View, View, View, Any]]:
    """Operands and result of each group: what is gathered first, then filters or gradients, then the result.

    Filters are turned so that what is gathered is their second dimension. Last the pointer to the vector that is added
    to the results, ``None`` without one.
    """
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    for g in range(p.groups):
        x_part, y_part = (g * into, into), (g * outof, outof)
        if p.pass_ is Pass.WGRAD:
            yield a.narrow(1, *x_part), b.narrow(1, *y_part), out.narrow(0, *y_part), None
        elif p.pass_ is Pass.DGRAD:
            yield a.narrow(1, *y_part), b.narrow(0, *y_part).swapped(), out.narrow(1, *x_part), _bias(p, g * into)
        else:
            yield a.narrow(1, *x_part), b.narrow(0, *y_part), out.narrow(1, *y_part), _bias(p, g * outof)


def launches(layout: Layout, a: View, b: View, out: View) -> list[Launch]:
    """Every launch of the pass, group by group. ``out`` is read where the problem accumulates."""
    launches_of = _gradient if layout.p.pass_ is Pass.WGRAD else _gather
    return [each for group in group_views(layout.p, a, b, out) for each in launches_of(layout, *group)]


def _gather(layout: Layout, source: View, filters: View, out: View, bias: Any) -> Iterator[Launch]:
    if layout.product.scaled:
        yield look(source, A, layout.source_peaks, layout.chunks)
        yield look(filters, B, layout.other_peaks, 1)
    yield _pack(layout, filters, B, layout.other, layout.other_slot, layout.other_peaks, 1, layout.other_exponents, 0)
    for first, count in layout.blocks:
        block = source.narrow(0, first, count)
        yield _pack(layout, block, A, layout.source, layout.source_slot, layout.source_peaks, layout.chunks,
                    layout.source_exponents, first)  # fmt: skip
        for sweeps in itertools.product(*layout.sweeps):
            if layout.p.accumulate and not bias and not all(sweep.taps for sweep in sweeps):
                continue
            yield _gather_gemm(layout, sweeps, out.narrow(0, first, count), first, bias)


def _gradient(layout: Layout, source: View, gradients: View, out: View, _: None) -> Iterator[Launch]:
    if layout.product.scaled:
        yield look(source, A, layout.source_peaks, layout.chunks)
        yield look(gradients, B, layout.other_peaks, layout.other_chunks)
    for first, count in layout.blocks:
        block = source.narrow(0, first, count)
        yield _pack(layout, block, A, layout.source, layout.source_slot, layout.source_peaks, layout.chunks,
                    layout.source_exponents, 0)  # fmt: skip
        block = gradients.narrow(0, first, count)
        yield _pack(layout, block, B, layout.other, layout.other_slot, layout.other_peaks, layout.other_chunks,
                    layout.other_exponents, 0)  # fmt: skip
        yield _gradient_gemm(layout, count, again=first > 0)
    yield _add_partials(layout, out)


def at(slot: Slot, elements: int = 0) -> Any:
    """The pointer to what is in the workspace, ``elements`` further on."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(WORKSPACE, slot.offset + elements * slot.dtype.itemsize, slot.dtype)


def within(view: View, source: int) -> Any:
    """The pointer to a view of an operand or of the result."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(source, view.offset * view.dtype.itemsize, view.dtype)


def _bias(p: ConvProblem, channel: int) -> Any:
    """The pointer to what is added to the result from ``channel`` on; ``None`` where nothing is."""
    from tilewise.kernels.triton.launch import Pointer

    dtype = p.torch_dtype(p.result)
    return Pointer(BIAS, channel * dtype.itemsize, dtype) if p.bias else None


def launch(kernel: Any, grid: Sequence[int], pointers: Sequence[Any], scalars: Sequence[int], warps: int = 4,
           stages: int = 2, **constants: Any) -> Launch:  # fmt: skip
    """One launch of ``kernel``; a ``grid`` has one to three sizes."""
    from tilewise.kernels.triton.launch import Launch

    x, y, z = (*grid, 1, 1)[:3]
    return Launch(kernel, (x, y, z), tuple(pointers), tuple(scalars), constants, warps, stages)


def look(view: View, source: int, peaks: Slot, chunks: int) -> Launch:
    """The largest exponent of each of ``chunks`` shares of every image of ``view``."""
    from tilewise.kernels.triton import layout as kernels

    images, *sizes = view.sizes
    elements = math.prod(sizes)
    block = min(2048, max(128, 1 << (elements // chunks).bit_length()))
    return launch(
        kernels.peak, [images * chunks], [within(view, source), at(peaks)],
        [elements, chunks, *sizes[1:], *view.strides], DENSE=view.dense, BLOCK=block,
    )  # fmt: skip


def _pack(layout: Layout, view: View, source: int, packed: Packed, slot: Slot, peaks: Slot, chunks: int,
          exponents: Slot, first: int) -> Launch:  # fmt: skip
    from tilewise.kernels.triton import layout as kernels

    product = layout.product
    per_image = layout.p.pass_ is not Pass.WGRAD
    known = chunks if per_image else peaks.sizes[0]
    head = packed.head
    images = view.sizes[0] + (head > 0)
    blocks = -(-packed.image // PACK_PLACES)
    block_c = min(64, max(16, 1 << (packed.channels - 1).bit_length()))
    inner = View(view.sizes, view.strides, view.dtype, view.offset)
    for dim, axis in enumerate(packed.axes, start=2):
        inner = inner.narrow(dim, axis.first, axis.size)
    return launch(
        kernels.pack,
        [images * blocks, -(-packed.channels // block_c)],
        [within(inner, source), at(peaks, first * chunks), at(slot), at(exponents, first)],
        [-1 if head else 0, blocks, known, *inner.sizes[1:], *(axis.pitch for axis in packed.axes), head,
         *inner.strides, packed.row, packed.channels],
        PLANES=packed.planes, SCALED=product.scaled, PER_IMAGE=per_image,
        CHUNKS=1 << (known - 1).bit_length(), ALIGNED=inner.aligned, BLOCK_P=PACK_PLACES, BLOCK_C=block_c,
    )  # fmt: skip


def _gather_gemm(layout: Layout, sweeps: Sequence[Sweep], out: View, first: int, bias: Any) -> Launch:
    from tilewise.kernels.triton import implicit_gemm as kernels

    tile, source, filters = layout.tile, layout.source, layout.other
    counts = [sweep.count for sweep in sweeps]
    pixels, channels = out.sizes[0] * math.prod(counts), out.sizes[1]
    for dim, sweep in enumerate(sweeps, start=2):
        out = out.narrow(dim, sweep.first, sweep.count)
    written = out
    steps = [stride * sweep.stride for stride, sweep in zip(out.strides[2:], sweeps, strict=True)]
    taps = [sweep.taps for sweep in sweeps]
    place = source.offset([sweep.start for sweep in sweeps])
    return launch(
        kernels.gather_gemm,
        [-(-channels // tile.channels) * -(-pixels // tile.columns)],
        [at(layout.source_slot, place),
         at(layout.other_slot, filters.offset([sweep.first_tap for sweep in sweeps])),
         at(layout.source_exponents, first), at(layout.other_exponents), within(out, OUT), bias or within(out, OUT)],
        [pixels, channels, *counts, source.image * source.row, *source.strides([sweep.step for sweep in sweeps]),
         math.prod(taps) * source.channels // tile.depth, *taps[1:],
         *source.strides([sweep.tap_step for sweep in sweeps]),
         filters.image * filters.row, *filters.strides([sweep.tap_stride for sweep in sweeps]),
         source.channels, *out.strides[:2], *steps],
        warps=tile.warps, stages=tile.stages,
        PLANES=source.planes, SCALED=layout.product.scaled,
        PRECISION=layout.product.precision, ACCUMULATE=layout.p.accumulate, BIAS=bool(bias), FLAT=counts[0] == 1,
        WIDE=out.span >= 2**31, ALIGNED=written.aligned,
        BLOCK_O=tile.halves[0], MORE_O=tile.halves[1], BLOCK_P=tile.columns, BLOCK_K=tile.depth,
        PROMOTE=LONGEST // tile.depth if layout.promotes else 0,
    )  # fmt: skip


def _gradient_gemm(layout: Layout, images: int, *, again: bool) -> Launch:
    from tilewise.kernels.triton import implicit_gemm as kernels

    tile, source, gradients = layout.tile, layout.source, layout.other
    sweeps = [each[0] for each in layout.sweeps]
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
