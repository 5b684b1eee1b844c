"""The launches of Winograd convolutions in one kernel on matrix units: blocks, workspace and pointers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch

from tilewise.kernels.cuda.winograd import CHANNELS, DEPTH, OUTPUTS, Planes, Prepare
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.cuda_run import BIAS, FIRST, OUT, SECOND, WORKSPACE, Step
from tilewise.solvers.common.packing import chunks_of
from tilewise.solvers.common.split_products import UNIT
from tilewise.solvers.common.tiles import PROCESSORS
from tilewise.solvers.common.views import View
from tilewise.solvers.winograd._gemm import saving_axis

__all__ = [
    "LARGEST", "MOST_ACROSS", "MOST_ALONG", "PLACES", "Layout", "along", "filters", "largest", "source_view", "steps",
    "too_far",
]  # fmt: skip

MOST_ALONG = 5
"""Most taps along the axis on which products are saved: at more than eight points fp32 is too inaccurate."""
MOST_ACROSS = 7
"""Most taps along the other axis."""
PLACES = (32, 48, 56, 64)
"""Numbers of tiles in each half of a block that are worth trying."""
LARGEST = 2**31 - 2**20
"""Most elements of an image, places of all images, and bytes between what a block reads: kernels count in 32 bits."""
OF_BLOCK = 8
"""Filters that one thread block prepares."""
MOST_SHARES = 64
"""Most blocks that search one image for its peak: all blocks of the convolution read the peaks they find."""


def along(p: ConvProblem) -> int | None:
    """The axis along which products are saved, or ``None`` where the kernels do not take the other axis either."""
    index = saving_axis(p, MOST_ALONG)
    if index is None or p.dims > 2:
        return None
    others = [axis for i, axis in enumerate(p.axes) if i != index]
    plain = all((axis.stride, axis.dilation) == (1, 1) and axis.kernel <= MOST_ACROSS for axis in others)
    return index if plain else None


class Layout:
    """Sizes and workspace of one pass.

    A thread block has two times ``places`` tiles. The result's channels of each group are computed in ``parts``, of
    which each needs only its own filters. Raises ``ValueError`` where no block fits shared memory or the channels
    cannot be divided into so many parts.
    """

    def __init__(self, p: ConvProblem, places: int, parts: int = 1) -> None:
        index = along(p)
        if index is None or p.pass_ is Pass.WGRAD:
            raise ValueError(f"{p.pass_.value} of {p.axes} saves no products here")
        if p.constant_weight and parts > 1:
            raise ValueError(f"parts={parts}: constant filters are kept whole")
        self.p = p
        others = [i for i in range(p.dims) if i != index]
        self.order: tuple[int, ...] = (0, 1, *range(2, 5 - p.dims), *(5 - p.dims + i for i in (*others, index)))
        across, wide = p.axes[others[0]] if others else UNIT, p.axes[index]
        backwards = p.pass_ is Pass.DGRAD
        self.into, self.outof = p.in_channels // p.groups, p.out_channels // p.groups
        self.read, self.made = (self.outof, self.into) if backwards else (self.into, self.outof)
        """Channels of one group: of the operand that is read, and of the result."""
        self.taps, self.wide_taps = across.kernel, wide.kernel
        (self.before, self.height, self.out_height), (before, self.width, self.out_width) = (
            _gathered(axis, backwards) for axis in (across, wide)
        )
        self.first_column = -before
        self.pitch = _pitch(self.height, self.out_height, self.taps, self.before)
        """Lines from one image's to the next one's."""
        self.places = places
        self.program = _block(self.taps, self.wide_taps, -(-self.out_width // OUTPUTS), p.batch * self.pitch, places,
                              p.accumulate, p.bias)  # fmt: skip
        self.segments = -(-self.out_width // (OUTPUTS * self.program.tiles))
        self.place_blocks = -(-p.batch * self.pitch * self.program.tiles // (2 * places))
        share = -(-self.channel_blocks // parts) * CHANNELS
        self.parts = [(c, min(share, self.made - c)) for c in range(0, self.made, share)]
        """First channel and number of channels of the result, for each part whose filters are prepared at a time."""
        if len(self.parts) != parts:
            raise ValueError(f"parts={parts}: {self.channel_blocks} times {CHANNELS} channels make {len(self.parts)}")
        self.shares = min(MOST_SHARES, chunks_of(p.batch, self.elements))
        """Parts of an image that are searched for their peak by one block each."""
        arena, kept = Arena(), Arena()
        self.peaks = arena.add([p.batch * self.shares], torch.int32)
        self.keeps = p.constant_weight
        held = [self._filters(kept, share) for _ in range(p.groups)] if self.keeps else []
        self.filters = held or [self._filters(arena, share)] * p.groups
        """Where each group's prepared filters and exponents lie: one place for all groups unless they are kept."""
        self.workspace, self.kept = arena.size, kept.size

    def _filters(self, arena: Arena, share: int) -> tuple[Slot, Slot]:
        """Room for the prepared filters of ``share`` channels and for their exponents."""
        count = share * -(-self.read // DEPTH) * DEPTH * self.taps * self.program.points
        return arena.add([2, count], torch.float16), arena.add([share], torch.int32)

    @property
    def channel_blocks(self) -> int:
        """Blocks of channels that one group's result takes."""
        return -(-self.made // CHANNELS)

    @property
    def elements(self) -> int:
        """Elements of one image's channels of one group."""
        return self.read * self.height * self.width

    @property
    def blocks(self) -> int:
        """Thread blocks of one group's convolution."""
        return self.channel_blocks * self.place_blocks * self.segments

    @property
    def at_once(self) -> int:
        """Most images that one thread block reads."""
        return min(self.p.batch, (self.program.lines - 2) // self.pitch + 2)


def _gathered(axis: Axis, backwards: bool) -> tuple[int, int, int]:
    """Places read before the first one, and sizes of what is read and of the result.

    A data gradient reads the output gradient with taps in reverse.
    """
    if backwards:
        return axis.kernel - 1 - axis.before, axis.out, axis.size
    return axis.before, axis.size, axis.out


def _pitch(height: int, out_height: int, taps: int, before: int) -> int:
    """Lines from one image to the next, so that the zeros after an image also serve as those before the next.

    ``out_height + taps - 1`` lines are read, the first ``before`` of them above the image.
    """
    read = out_height + taps - 1
    return max(read - max(0, before), min(height + before, read), out_height)


@functools.lru_cache(maxsize=4096)
def _block(taps: int, wide_taps: int, tiles: int, lines: int, places: int, accumulate: bool, bias: bool) -> Planes:
    """The kernel for blocks with two times ``places`` tiles, for ``lines`` lines of ``tiles`` tiles each.

    Lines are divided into equal segments. Raises ``ValueError`` where nothing fits shared memory.
    """
    if places < 8 or places > PLACES[-1] or places % 8:
        raise ValueError(f"places={places}: a multiple of 8 up to {PLACES[-1]} would do")
    best: tuple[int, Planes] | None = None
    for segment in dict.fromkeys(-(-tiles // -(-tiles // most)) for most in range(min(tiles, 2 * places), 0, -1)):
        program = _held(taps, wide_taps, segment, places, accumulate, bias)
        if program is None:
            continue
        blocks = -(-tiles // segment) * -(-lines * segment // (2 * places))
        # Products, transforms, and lines that are read.
        work = blocks * (4 * places + program.rows + program.lines * (segment + 9))
        if best is None or work < best[0]:
            best = work, program
    if best is None:
        raise ValueError(f"places={places}: no block with {taps} taps down the lines fits shared memory")
    return best[1]


def _held(taps: int, wide_taps: int, tiles: int, places: int, accumulate: bool, bias: bool) -> Planes | None:
    """The kernel that keeps as much waiting in shared memory as fits, or ``None`` where nothing fits."""
    pairs = (OUTPUTS + wide_taps) // 2
    for together in (3 if pairs == 3 else 2, 1):
        most = range(2 * together, together, -1)
        for held, filters_held in (*itertools.product(most, (5, 4)), *itertools.product(most, (3,))):
            program = Planes(taps, wide_taps, tiles, places, held, filters_held, together, accumulate, bias)
            if not program.problems():
                return program
    return None


def source_view(p: ConvProblem) -> View:
    """The operand that is read, with the strides of its layout; contiguous ones where it is a view."""
    role = p.operands[0]
    shape, layout = p.shape(role), p.layout(role)
    strides = dense_strides(shape, "contiguous" if layout == "view" else layout)
    missing = 5 - len(shape)
    return View((*shape[:2], *[1] * missing, *shape[2:]), (*strides[:2], *[0] * missing, *strides[2:]), torch.float32)


def too_far(layout: Layout, source: View) -> bool:
    """Whether what a block reads at a time lies too far apart for 32-bit offsets."""
    _, _, _, *space = layout.order
    counts = (layout.at_once, min(DEPTH, layout.read), *(source.sizes[dim] for dim in space))
    strides = (source.strides[dim] for dim in (0, 1, *space))
    return 4 * sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True)) > LARGEST


def steps(layout: Layout, a: View, b: View, out: View) -> list[Step]:
    """Every launch of the pass, group by group. Raises ``ValueError`` for operands too far apart in memory."""
    if too_far(layout, a):
        raise ValueError(f"strides {a.strides} of sizes {a.sizes} are too large to count in 32 bits")
    queued: list[Step] = []
    for g in range(layout.p.groups):
        source = a.reordered(layout.order).narrow(1, g * layout.read, layout.read)
        result = out.reordered(layout.order).narrow(1, g * layout.made, layout.made)
        queued += _group(layout, g, source, None if layout.keeps else _filters_of(layout, b, g), result)
    return queued


def filters(layout: Layout, weight: View) -> list[Step]:
    """The launches that prepare filters to be kept: the first tensor is the weight, the result what is kept."""
    queued = []
    for g, (parts, exponents) in enumerate(layout.filters):
        taps = _filters_of(layout, weight, g)
        pointers = ((FIRST, 0), (FIRST, 4 * taps.offset), (OUT, 0), (OUT, parts.offset), (OUT, exponents.offset))
        queued.append(_prepare(layout, None, taps, pointers, images=False))
    return queued


def _filters_of(layout: Layout, weight: View, group: int) -> View:
    """The filters of a group as (channels of the result, channels that are read, 1, height, width)."""
    taps = weight.reordered(layout.order).narrow(0, group * layout.outof, layout.outof)
    return taps.swapped().reversed(3).reversed(4) if layout.p.pass_ is Pass.DGRAD else taps


def _group(layout: Layout, group: int, source: View, taps: View | None, result: View) -> Iterator[Step]:
    """The launches of one group. ``taps`` is ``None`` where prepared filters come in place of the weight."""
    parts, exponents = layout.filters[group]
    kept = WORKSPACE if taps is not None else SECOND
    places = ((WORKSPACE, layout.peaks.offset), (kept, parts.offset), (kept, exponents.offset))
    for number, (first, count) in enumerate(layout.parts):
        part_taps = None if taps is None else taps.narrow(0, first, count)
        if part_taps is not None or number == 0:
            pointers = (
                (FIRST, 4 * source.offset),
                (SECOND, 4 * part_taps.offset if part_taps is not None else 0),
                *places,
            )
            yield _prepare(layout, source, part_taps, pointers, images=number == 0)
        bias = 4 * (group * layout.made + first)
        yield _convolve(layout, source, result.narrow(1, first, count), places, bias)


def _prepare(layout: Layout, source: View | None, taps: View | None, pointers: tuple[tuple[int, int], ...], *,
             images: bool) -> Step:  # fmt: skip
    """The launch that transforms filters and searches images for their peaks; either may be left out."""
    count = 0 if taps is None else taps.sizes[0]
    blocks = -(-count // CHANNELS) * CHANNELS // OF_BLOCK + (layout.p.batch * layout.shares if images else 0)
    program = Prepare(layout.taps, layout.wide_taps, 0 if source is None else _dense(layout, source))
    strides = (0,) * 4 if taps is None else (*taps.strides[:2], *taps.strides[3:])
    of_images = (0,) * 4 if source is None else _strides(source)
    scalars = (count, layout.read, *strides, layout.shares, layout.elements, layout.height, layout.width, *of_images)
    return Step(program, blocks, pointers, scalars)


def _dense(layout: Layout, source: View) -> int:
    """4 where an image's elements lie without gaps in whole 16 bytes, 1 where only without gaps, else 0."""
    if not source.dense:
        return 0
    starts = (source.offset, layout.elements, source.strides[0] if layout.p.batch > 1 else 0)
    aligned = layout.p.alignment[ROLES.index(layout.p.operands[0])] % 16 == 0
    return 4 if aligned and all(start % 4 == 0 for start in starts) else 1


def _strides(view: View) -> tuple[int, ...]:
    """Strides of images, channels, lines and columns; 0 along dimensions of size 1."""
    return tuple(0 if view.sizes[dim] == 1 else view.strides[dim] for dim in (0, 1, 3, 4))


def _convolve(layout: Layout, source: View, result: View, prepared: tuple[tuple[int, int], ...], bias: int) -> Step:
    """The launch of the convolution. ``bias`` is the offset in bytes of these channels' part of the bias."""
    count = result.sizes[1]
    grid = min(PROCESSORS, -(-count // CHANNELS) * layout.place_blocks * layout.segments)
    added = (BIAS, bias) if layout.p.bias else (OUT, 4 * result.offset)
    pointers = ((FIRST, 4 * source.offset), *prepared, (OUT, 4 * result.offset), added)
    scalars = (
        grid, layout.p.batch, layout.shares, layout.read, count, layout.height, layout.width, layout.pitch,
        layout.before, layout.first_column, layout.out_height, layout.out_width, layout.place_blocks, layout.segments,
        *_strides(source), *_strides(result),
    )  # fmt: skip
    return Step(layout.program, grid, pointers, scalars)


def largest(layout: Layout) -> int:
    """The largest number that kernels count in 32 bits: elements, places or blocks."""
    p = layout.p
    elements = max(math.prod(p.shape(role)[1:]) for role in ROLES)
    return max(elements, p.batch * layout.pitch * layout.program.tiles + 2 * layout.places, layout.blocks)
