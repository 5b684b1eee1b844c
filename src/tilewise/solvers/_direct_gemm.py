"""The launches of a matrix product that reads tensors as they lie: sizes, runs of places, and the workspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.axis import Axis
from tilewise.problem import ROLES, ConvProblem, Pass
from tilewise.solvers._buffers import Arena
from tilewise.solvers._implicit_gemm import ADD_BLOCK, LONGEST, UNIT
from tilewise.solvers._packing import Looked, chunks_of, look
from tilewise.solvers._sweeps import Sweep, backward, forward
from tilewise.solvers._views import OUT, A, B, View, at, counted, group_views, launch, within

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Layout", "Tile", "launches"]

MOST_PROGRAMS, MOST_CHUNKS = 512, 64
"""Programs that look for the largest exponents, about, and an image's: every program looks at those in turn."""
RUN, EVEN = 4, 16
"""Elements of the widest access, and what places and channels must be multiples of: elsewhere threads that take single
elements of neighbouring channels were faster."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: ``places`` by ``channels``, ``depth`` products at a time; of a filter's gradient
    ``depth`` taps by ``channels``, ``places`` at a time."""

    places: int
    channels: int
    depth: int
    warps: int
    stages: int


class Layout:
    """Sizes and the workspace of one pass of one group with a tile, a filter's gradient in ``splits`` sums."""

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
        """Elements of a filter's row: zeros where a result meets no taps."""
        return max(1, -(-products // self.tile.depth)) * self.tile.depth

    @property
    def places(self) -> int:
        """Places of all images, of the largest sweep."""
        return self.p.batch * math.prod(max(sweep.count for sweep in sweeps) for sweeps in self.sweeps)


def _chunks(images: int, elements: int) -> int:
    return max(1, min(MOST_CHUNKS, MOST_PROGRAMS // images, chunks_of(images, elements)))


def launches(layout: Layout, a: View, b: View, out: View) -> list[Launch]:
    """Every launch of the pass, group by group. ``out`` is read where the problem accumulates.

    Raises ``SolverUnavailable`` where an image or a filter lies too far apart.
    """
    gradient = layout.p.pass_ is Pass.WGRAD
    for view in (a.narrow(0, 0, 1), out if gradient else b):
        counted(view)
    launches_of = _gradient if gradient else _gather
    return [each for group in group_views(layout.p, a, b, out) for each in launches_of(layout, *group)]


class _Gathered:
    """A source, and what it is gathered for: places of a sweep along each axis, which lie in ``other`` too."""

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
        """Whether places are those of the source, one by one."""
        each = zip(self.sweeps, self.sizes, strict=True)
        return all((s.taps, s.step, s.start, s.count) == (1, 1, 0, size) for s, size in each)

    def _merge(self) -> None:
        """All axes as one, where memory allows it."""
        along = [_merged(self.counts, strides[2:]) for strides in (self.strides, self.others)]
        if all(along):
            self.counts = self.sizes = [1, 1, math.prod(self.counts)]
            self.strides[2:], self.others[2:] = [0, 0, along[0]], [0, 0, along[1]]

    @property
    def steps(self) -> list[int]:
        """Source places between results' along each axis."""
        return [sweep.step for sweep in self.sweeps]

    @property
    def taps(self) -> list[int]:
        """What the gathering kernel is told of taps, from the sizes on."""
        across = [sweep.tap_step for sweep in self.sweeps]
        between = [step * stride for step, stride in zip(across, self.strides[2:], strict=True)]
        starts = [sweep.start for sweep in self.sweeps]
        return [*self.sizes, *starts, *self.steps, *across, *self.strides, *between, *self.others]

    @property
    def order(self) -> dict[str, Any]:
        """Constants that say how taps and channels are counted."""
        d, h, w = (max(1, sweep.taps) for sweep in self.sweeps)
        return {"TAPS_D": d, "TAPS_H": h, "TAPS_W": w, "LAST": self.last}

    @property
    def bounds(self) -> dict[str, bool]:
        """Constants that say along which axes taps reach beyond the source."""
        outside = (s.reach[0] < 0 or s.reach[1] > n for s, n in zip(self.sweeps, self.sizes, strict=True))
        if self.run > 1:
            return dict.fromkeys(("BOUND_D", "BOUND_H", "BOUND_W"), False)
        return dict(zip(("BOUND_D", "BOUND_H", "BOUND_W"), outside, strict=True))

    @property
    def access(self) -> dict[str, Any]:
        """Constants that say how memory is read. Where places make no runs, neighbouring threads take taps."""
        first = self.last or self.run == 1
        return {"K_FIRST": first, "RUN": self.run, "RUN_OUT": self.other_run, "WIDE": self.wide}


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The stride of places along all axes as one; 0 where they are not."""
    found = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if found == 0:
            found, expected = stride, stride * size
        elif stride != expected:
            return 0
        else:
            expected *= size
    return found or 1


def _run(p: ConvProblem, role: str, count: int, strides: Sequence[int]) -> int:
    """Places that follow each other in memory, from aligned ones on: wherever a run may start is one."""
    if strides[4] != 1 or math.gcd(EVEN, count, *strides[:4]) < EVEN:
        return 1
    return math.gcd(RUN, p.alignment[ROLES.index(role)] // 4)


def _gather(layout: Layout, source: View, filters: View, out: View, bias: Any) -> Iterator[Launch]:
    from tilewise.kernels.triton import direct_gemm as kernels

    p, tile = layout.p, layout.tile
    looked = Looked(source, A, layout.peaks, layout.chunks)
    yield look(looked, looked, both=False)  # with the split in one launch it was slower by a tenth
    for sweeps in itertools.product(*layout.sweeps):
        results = out
        for dim, sweep in enumerate(sweeps, start=2):
            results = results.narrow(dim, sweep.first, sweep.count * sweep.stride)
        told = _Gathered(p, sweeps, source, results, (p.operands[0], p.result))
        if told.products == 0 and p.accumulate and not bias:
            continue
        row = layout.row(told.products)
        yield _split(layout, _taken(filters, sweeps), told, row)
        tiles = -(-layout.written // tile.channels) * -(-told.places // tile.places)
        yield launch(
            kernels.direct_gemm,
            [tiles],
            [within(source, A), at(layout.parts), at(layout.peaks), at(layout.exponents), within(results, OUT),
             bias or within(results, OUT)],
            [told.places, layout.chunks, layout.written, told.channels, told.products, row, layout.written * row,
             *told.counts, *told.taps],
            warps=tile.warps, stages=tile.stages, **told.order, **told.bounds, **told.access,
            WHOLE=told.products % tile.depth == 0, ACCUMULATE=p.accumulate, BIAS=bool(bias),
            PROMOTE=LONGEST // tile.depth if told.products > LONGEST * 3 // 2 else 0,
            BLOCK_P=tile.places, BLOCK_O=tile.channels, BLOCK_K=tile.depth,
        )  # fmt: skip


def _taken(filters: View, sweeps: Sequence[Sweep]) -> View:
    """The taps of a sweep."""
    strides = list(filters.strides)
    for dim, sweep in enumerate(sweeps, start=2):
        if sweep.taps:
            filters = filters.narrow(dim, sweep.first_tap, 1)
        strides[dim] *= sweep.tap_stride
    return View((*filters.sizes[:2], *(sweep.taps for sweep in sweeps)), tuple(strides), filters.dtype, filters.offset)


def _split(layout: Layout, filters: View, told: _Gathered, row: int) -> Launch:
    from tilewise.kernels.triton import direct_gemm as kernels

    block = min(1024, 1 << (row - 1).bit_length())
    return launch(
        kernels.split_filters,
        [layout.written],
        [within(filters, B), at(layout.parts), at(layout.exponents)],
        [told.channels, told.products, row, *filters.strides],
        **told.order, BLOCK=block,
    )  # fmt: skip


def _gradient(layout: Layout, source: View, gradients: View, out: View, _: None) -> Iterator[Launch]:
    from tilewise.kernels.triton import direct_gemm as kernels

    p, tile = layout.p, layout.tile
    yield look(
        Looked(source, A, layout.peaks, layout.chunks), Looked(gradients, B, layout.other_peaks, layout.other_chunks)
    )
    told = _Gathered(p, [each[0] for each in layout.sweeps], source, gradients, p.operands)
    share = -(-told.places // (tile.places * layout.splits)) * tile.places
    chunks = [slot.sizes[0] for slot in (layout.peaks, layout.other_peaks)]
    most = 1 << (max(chunks) - 1).bit_length()
    yield launch(
        kernels.direct_gradient,
        [-(-layout.outof // tile.channels) * -(-told.channels // tile.depth), layout.splits],
        [within(source, A), within(gradients, B), at(layout.peaks), at(layout.other_peaks), at(layout.partials)],
        [told.places, share, *chunks, layout.outof, told.channels, *told.counts, *told.steps, *told.strides,
         *told.others],
        warps=tile.warps, stages=tile.stages, **told.access, CHUNKS=most,
        WHOLE=told.channels % tile.depth == 0, PROMOTE=max(1, LONGEST // tile.places),
        BLOCK_P=tile.places, BLOCK_O=tile.channels, BLOCK_K=tile.depth,
    )  # fmt: skip
    total = told.channels * layout.outof
    yield launch(
        kernels.add_shares,
        [-(-total // ADD_BLOCK)],
        [at(layout.partials), at(layout.peaks), at(layout.other_peaks), within(out, OUT)],
        [layout.splits, *chunks, layout.outof, total, *out.strides[:2]],
        CHUNKS=most, ACCUMULATE=p.accumulate, BLOCK=ADD_BLOCK,
    )  # fmt: skip
