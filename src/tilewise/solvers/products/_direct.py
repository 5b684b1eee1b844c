"""The launches of a matrix product that gathers its operand: sizes, runs of contiguous places, and the workspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena
from tilewise.solvers.common.packing import PeakSearch, chunks_of, find_peaks
from tilewise.solvers.common.split_products import ADD_BLOCK, LONGEST, UNIT
from tilewise.solvers.common.sweeps import Sweep, backward, forward
from tilewise.solvers.common.views import (
    OUT,
    A,
    B,
    View,
    at,
    counted,
    epilogue,
    group_views,
    launch,
    residual_like,
    within,
)

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Layout", "Tile", "launches"]

MOST_PROGRAMS, MOST_CHUNKS = 512, 64
"""About how many programs search for peaks, and at most how many search one image: every program of the product reads
the peaks of an image one by one."""
RUN, EVEN = 4, 16
"""Elements of the widest access, and what the numbers of places and channels must be multiples of for it. Elsewhere it
was faster that threads read single elements of neighbouring channels."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the result that one program computes: ``places`` by ``channels``, ``depth`` products at a time.

    In a weight gradient it is ``depth`` taps by ``channels``, and ``places`` are summed at a time.
    """

    places: int
    channels: int
    depth: int
    warps: int
    stages: int


class Layout:
    """Sizes and workspace of one pass over one group with a tile.

    A weight gradient is summed in ``splits`` partial sums.
    """

    def __init__(self, p: ConvProblem, tile: Tile, splits: int = 1) -> None:
        self.p, self.tile, self.splits = p, tile, splits
        self.axes: tuple[Axis, ...] = (*[UNIT] * (3 - p.dims), *p.axes)
        self.into, self.outof = p.in_channels // p.groups, p.out_channels // p.groups
        """Channels of a group: of ``x`` and of ``y``."""
        backwards, gradient = p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD
        self.read, self.written = (self.outof, self.into) if backwards else (self.into, self.outof)
        """Channels that are gathered, and those they are multiplied with."""
        self.sweeps = tuple(backward(axis) if backwards else forward(axis) for axis in self.axes)
        sizes = [axis.out if backwards else axis.size for axis in self.axes]
        arena = Arena()
        self.chunks = _chunks(p.batch, self.read * math.prod(sizes))
        self.peaks = arena.add([p.batch * self.chunks], torch.int32)
        most = self.read * math.prod(max(sweep.taps for sweep in sweeps) for sweeps in self.sweeps)
        if gradient:
            outs = math.prod(axis.out for axis in self.axes)
            self.other_chunks = _chunks(p.batch, self.outof * outs)
            self.other_peaks = arena.add([p.batch * self.other_chunks], torch.int32)
            self.partials = arena.add([splits, most, self.outof], torch.float32)
        else:
            self.parts = arena.add([2 * self.written * self.row(most)], torch.float16)
            self.exponents = arena.add([self.written], torch.int32)
        self.products = most
        self.workspace = arena.size

    def row(self, products: int) -> int:
        """Elements of a filter's row of ``products`` taps, padded to whole steps; zeros where there are no taps."""
        return max(1, -(-products // self.tile.depth)) * self.tile.depth

    @property
    def places(self) -> int:
        """Places of all images in the largest sweep."""
        return self.p.batch * math.prod(max(sweep.count for sweep in sweeps) for sweeps in self.sweeps)


def _chunks(images: int, elements: int) -> int:
    """Programs that search one image's ``elements`` for its peak."""
    return max(1, min(MOST_CHUNKS, MOST_PROGRAMS // images, chunks_of(images, elements)))


def launches(layout: Layout, a: View, b: View, out: View) -> list[Launch]:
    """Every launch of the pass, group by group. ``out`` is read where the problem accumulates.

    Raises ``SolverUnavailable`` where elements of an image or the filter are too far apart for 32-bit offsets.
    """
    gradient = layout.p.pass_ is Pass.WGRAD
    for view in (a.narrow(0, 0, 1), out if gradient else b):
        counted(view)
    launches_of = _gradient if gradient else _gather
    return [queued for group in group_views(layout.p, a, b, out) for queued in launches_of(layout, *group)]


class _Gathered:
    """The gathered operand of one sweep: ``source``, read at the places of the sweep along each axis.

    ``other`` is the tensor that has the same places: the result, or in a weight gradient the output gradient.
    """

    def __init__(
        self, p: ConvProblem, sweeps: Sequence[Sweep], source: View, other: View, roles: tuple[str, str]
    ) -> None:
        self.sweeps, self.channels = sweeps, source.sizes[1]
        self.products = self.channels * math.prod(sweep.taps for sweep in sweeps)
        self.counts, self.sizes = [sweep.count for sweep in sweeps], list(source.sizes[2:])
        self.places = source.sizes[0] * math.prod(self.counts)
        self.strides, self.others = list(source.strides), list(other.strides)
        self.others[2:] = [stride * sweep.stride for stride, sweep in zip(other.strides[2:], sweeps, strict=True)]
        self.wide = max(source.span, other.span) >= 2**31 - 2**20
        self.run = self.other_run = 1
        if self._as_it_lies():
            self._merge()
            self.run = _run(p, roles[0], self.counts[2], self.strides)
            self.other_run = _run(p, roles[1], self.counts[2], self.others)
        self.last = abs(self.strides[1]) < abs(self.strides[4])

    def _as_it_lies(self) -> bool:
        """Whether the places are exactly those of the source, so that nothing is skipped or padded."""
        axes = zip(self.sweeps, self.sizes, strict=True)
        return all((s.taps, s.step, s.start, s.count) == (1, 1, 0, size) for s, size in axes)

    def _merge(self) -> None:
        """Treat all axes as one where the strides of both tensors allow it."""
        along = [_merged(self.counts, strides[2:]) for strides in (self.strides, self.others)]
        if all(along):
            self.counts = self.sizes = [1, 1, math.prod(self.counts)]
            self.strides[2:], self.others[2:] = [0, 0, along[0]], [0, 0, along[1]]

    @property
    def steps(self) -> list[int]:
        """Source places from one result to the next along each axis."""
        return [sweep.step for sweep in self.sweeps]

    @property
    def taps(self) -> list[int]:
        """The gathering kernel's integers about taps and sizes, from the sizes on."""
        across = [sweep.tap_step for sweep in self.sweeps]
        between = [step * stride for step, stride in zip(across, self.strides[2:], strict=True)]
        starts = [sweep.start for sweep in self.sweeps]
        return [*self.sizes, *starts, *self.steps, *across, *self.strides, *between, *self.others]

    @property
    def order(self) -> dict[str, Any]:
        """Compile-time constants for the order in which taps and channels are counted."""
        d, h, w = (max(1, sweep.taps) for sweep in self.sweeps)
        return {"TAPS_D": d, "TAPS_H": h, "TAPS_W": w, "LAST": self.last}

    @property
    def bounds(self) -> dict[str, bool]:
        """Compile-time constants for the axes along which taps reach beyond the source."""
        outside = (s.reach[0] < 0 or s.reach[1] > n for s, n in zip(self.sweeps, self.sizes, strict=True))
        if self.run > 1:
            return dict.fromkeys(("BOUND_D", "BOUND_H", "BOUND_W"), False)
        return dict(zip(("BOUND_D", "BOUND_H", "BOUND_W"), outside, strict=True))

    @property
    def access(self) -> dict[str, Any]:
        """Compile-time constants for how memory is read.

        Where places are not contiguous, neighbouring threads read neighbouring taps.
        """
        first = self.last or self.run == 1
        return {"K_FIRST": first, "RUN": self.run, "RUN_OUT": self.other_run, "WIDE": self.wide}


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The stride of all axes taken as one; 0 where they cannot be merged."""
    merged = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if merged == 0:
            merged, expected = stride, stride * size
        elif stride != expected:
            return 0
        else:
            expected *= size
    return merged or 1


def _run(p: ConvProblem, role: str, count: int, strides: Sequence[int]) -> int:
    """How many places may be read in one access: 1, or more where they are contiguous and aligned."""
    if strides[4] != 1 or math.gcd(EVEN, count, *strides[:4]) < EVEN:
        return 1
    return math.gcd(RUN, p.alignment[ROLES.index(role)] // 4)


def _gather(layout: Layout, source: View, filters: View, out: View, bias: Any) -> Iterator[Launch]:
    """The launches of a forward pass or data gradient of one group."""
    from tilewise.kernels.triton import direct_gemm as kernels

    p, tile = layout.p, layout.tile
    search = PeakSearch(source, A, layout.peaks, layout.chunks)
    yield find_peaks(search, search, both=False)  # with the split in one launch it was slower by a tenth
    for sweeps in itertools.product(*layout.sweeps):
        results = out
        for dim, sweep in enumerate(sweeps, start=2):
            results = results.narrow(dim, sweep.first, sweep.count * sweep.stride)
        gathered = _Gathered(p, sweeps, source, results, (p.operands[0], p.result))
        if gathered.products == 0 and p.accumulate and not bias:
            continue
        row, target = layout.row(gathered.products), within(results, OUT)
        yield _split(layout, _taken(filters, sweeps), gathered, row)
        tiles = -(-layout.written // tile.channels) * -(-gathered.places // tile.places)
        yield launch(
            kernels.direct_gemm,
            [tiles],
            [within(source, A), at(layout.parts), at(layout.peaks), at(layout.exponents), target, bias or target,
             residual_like(p, target)],
            [gathered.places, layout.chunks, layout.written, gathered.channels, gathered.products, row,
             layout.written * row, *gathered.counts, *gathered.taps],
            warps=tile.warps, stages=tile.stages, **gathered.order, **gathered.bounds, **gathered.access,
            WHOLE=gathered.products % tile.depth == 0, ACCUMULATE=p.accumulate, BIAS=bool(bias), **epilogue(p),
            PROMOTE=LONGEST // tile.depth if gathered.products > LONGEST * 3 // 2 else 0,
            BLOCK_P=tile.places, BLOCK_O=tile.channels, BLOCK_K=tile.depth,
        )  # fmt: skip


def _taken(filters: View, sweeps: Sequence[Sweep]) -> View:
    """The view of the filter's taps that a sweep uses."""
    strides = list(filters.strides)
    for dim, sweep in enumerate(sweeps, start=2):
        if sweep.taps:
            filters = filters.narrow(dim, sweep.first_tap, 1)
        strides[dim] *= sweep.tap_stride
    return View((*filters.sizes[:2], *(sweep.taps for sweep in sweeps)), tuple(strides), filters.dtype, filters.offset)


def _split(layout: Layout, filters: View, gathered: _Gathered, row: int) -> Launch:
    """The launch that splits the filter into fp16 parts."""
    from tilewise.kernels.triton import direct_gemm as kernels

    block = min(1024, 1 << (row - 1).bit_length())
    return launch(
        kernels.split_filters,
        [layout.written],
        [within(filters, B), at(layout.parts), at(layout.exponents)],
        [gathered.channels, gathered.products, row, *filters.strides],
        **gathered.order, BLOCK=block,
    )  # fmt: skip


def _gradient(layout: Layout, source: View, gradients: View, out: View, _: None) -> Iterator[Launch]:
    """The launches of a weight gradient of one group."""
    from tilewise.kernels.triton import direct_gemm as kernels

    p, tile = layout.p, layout.tile
    yield find_peaks(
        PeakSearch(source, A, layout.peaks, layout.chunks),
        PeakSearch(gradients, B, layout.other_peaks, layout.other_chunks),
    )
    gathered = _Gathered(p, [axis_sweeps[0] for axis_sweeps in layout.sweeps], source, gradients, p.operands)
    share = -(-gathered.places // (tile.places * layout.splits)) * tile.places
    chunks = [slot.sizes[0] for slot in (layout.peaks, layout.other_peaks)]
    most = 1 << (max(chunks) - 1).bit_length()
    yield launch(
        kernels.direct_gradient,
        [-(-layout.outof // tile.channels) * -(-gathered.channels // tile.depth), layout.splits],
        [within(source, A), within(gradients, B), at(layout.peaks), at(layout.other_peaks), at(layout.partials)],
        [gathered.places, share, *chunks, layout.outof, gathered.channels, *gathered.counts, *gathered.steps,
         *gathered.strides, *gathered.others],
        warps=tile.warps, stages=tile.stages, **gathered.access, CHUNKS=most,
        WHOLE=gathered.channels % tile.depth == 0, PROMOTE=max(1, LONGEST // tile.places),
        BLOCK_P=tile.places, BLOCK_O=tile.channels, BLOCK_K=tile.depth,
    )  # fmt: skip
    total = gathered.channels * layout.outof
    yield launch(
        kernels.add_shares,
        [-(-total // ADD_BLOCK)],
        [at(layout.partials), at(layout.peaks), at(layout.other_peaks), within(out, OUT)],
        [layout.splits, *chunks, layout.outof, total, *out.strides[:2]],
        CHUNKS=most, ACCUMULATE=p.accumulate, BLOCK=ADD_BLOCK,
    )  # fmt: skip
