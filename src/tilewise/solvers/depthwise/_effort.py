"""Which tiles of a direct depthwise convolution are worth trying, by the instructions and the memory traffic they take.

Everything is counted in issue slots of a warp, of which a multiprocessor has four a cycle. The weights are rules of
thumb, good for an order of candidates and for estimates alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.tiles import PROCESSORS, busy
from tilewise.solvers.depthwise._gpu import (
    CHUNK,
    UNIT,
    UNUSED,
    Tile,
    Window,
    axes_of,
    kernel_rows,
    tiles,
    vectors,
    window,
)

__all__ = ["candidates", "code_work", "effort", "partial_sums"]

EDGES = (1, 2, 4, 7, 8, 14, 16)
LONG_EDGES = (2, 4, 8, 16, 32)
"""Edges of one-dimensional tiles."""
THREADS = 128
MOST_TERMS = 2000
"""Most multiply-adds per lane that the code writes out."""
MOST_WORK = 100_000
"""Largest :func:`code_work`: some five seconds of compiling. Twice as much takes three times as long, and no tile of
EfficientNet-B0 is then estimated to gain more than a sixth, most of them a twentieth."""
MOST_REGISTERS = 230
OTHER_REGISTERS = 40
REGISTER_FILE = 1600
"""Registers of a multiprocessor per thread of a warp, less what compilers use beyond the values held."""
LOAD, STORE, START = 2.5, 2.0, 80.0
"""Issue slots of a load with its mask, of a store, and of starting a program."""
PARTIALS = 80.0
"""Issue slots for each lane of a warp while a partial sum goes to memory and back."""
SLOTS = 4
"""Issue slots of a multiprocessor per cycle, in which its memory pipe moves 128 bytes."""


def candidates(p: ConvProblem) -> Iterator[Tile]:
    """Tiles with few enough registers and short enough code, their lanes along memory that may be contiguous."""
    backward = p.pass_ is Pass.DGRAD
    _, height, width = axes_of(p)
    tall = (1,) if height == UNIT else _edges(height, backward, EDGES)
    wide = _edges(width, backward, LONG_EDGES if height == UNIT else EDGES)
    for (rows, columns), lanes in itertools.product(itertools.product(tall, wide), _lanes(p)):
        tile = Tile(rows, columns, *lanes)
        least = rows == tall[0] and columns == wide[0]
        if least or (
            _terms(p, tile) <= MOST_TERMS and code_work(p, tile) <= MOST_WORK and _registers(p, tile) <= MOST_REGISTERS
        ):
            yield tile


@functools.lru_cache(maxsize=4096)
def effort(p: ConvProblem, tile: Tile) -> float:
    """Issue slots per multiply-add of the problem. It is 1 for a program of nothing else on all multiprocessors."""
    _, height, width = axes_of(p)
    backward = p.pass_ is Pass.DGRAD
    source, result = _vector(p, tile, p.operands[0]), _vector(p, tile, "y" if p.pass_ is Pass.WGRAD else p.result)
    taps = kernel_rows(p, tile) if p.pass_ is Pass.WGRAD else height.kernel
    parts = -(-height.kernel // taps)
    lines = window(height, tile.rows, backward, 1, taps if p.pass_ is Pass.WGRAD else 0, parts)
    places = window(width, tile.columns, backward, source)
    read = _used(lines.checks) * _used(places.checks)
    written_out = tile.width * _terms_of(lines) * _terms_of(places)
    loads, written = read / source, tile.rows * tile.columns / result
    converted = tile.width * read if p.dtype != "fp32" else 0
    pipe = loads * _wavefronts(p, tile, places.step)
    if p.pass_ is Pass.WGRAD:
        loads += written
        pipe += written * _wavefronts(p, tile, tile.columns)
        sums = 10.0 * CHUNK * -(-taps * width.kernel // CHUNK) * tile.width
        issued = written_out + LOAD * loads + converted + (sums + START) / _steps(p, tile)
    else:
        weights = 2 * taps * width.kernel
        issued = written_out + LOAD * loads + converted + STORE * written + weights + START
    slots = [issued, SLOTS * pipe]
    wanted = tile.width * tile.rows * tile.columns * height.kernel * width.kernel
    slots_each = parts * (max(slots) + 0.25 * min(slots)) / (wanted * _filled(p, tile, parts))
    if p.pass_ is Pass.WGRAD:
        slots_each += PARTIALS * partial_sums(p, tile) / (p.batch * math.prod(axis.out for axis in p.axes))
    return slots_each


def partial_sums(p: ConvProblem, tile: Tile) -> int:
    """How many partial sums a weight gradient's tiles are added up in, so that every multiprocessor has some programs.

    1 in other passes.
    """
    if p.pass_ is not Pass.WGRAD:
        return 1
    blocks = _blocks(p, tile)
    depth, height, _ = axes_of(p)
    programs_each = -(-p.out_channels // tile.channels) * depth.kernel * -(-height.kernel // kernel_rows(p, tile))
    resident = max(1, REGISTER_FILE // _registers(p, tile) // tile.warps)
    most = max(1, min(blocks, 1024, resident * PROCESSORS // programs_each))
    return -(-blocks // -(-blocks // most))


def _steps(p: ConvProblem, tile: Tile) -> int:
    """Tiles over which one lane of a weight gradient sums."""
    return -(-_blocks(p, tile) // partial_sums(p, tile))


def _blocks(p: ConvProblem, tile: Tile) -> int:
    """Programs needed for all tiles, each program having ``tile.spatial`` of them."""
    return -(-p.batch * math.prod(tiles(p, tile)) // tile.spatial)


def _edges(axis: Axis, backward: bool, edges: tuple[int, ...]) -> list[int]:
    """Edges of tiles along an axis, rising, hardly longer than the axis.

    In a data gradient they are multiples of the stride.
    """
    size, unit = (axis.size, axis.stride) if backward else (axis.out, 1)
    multiples = sorted({-(-edge // unit) * unit for edge in edges})
    return [edge for edge in multiples if edge == multiples[0] or edge < size + size // 4 + 1]


def _lanes(p: ConvProblem) -> Iterator[tuple[int, int, int]]:
    """Triples of spatial lanes, channel lanes and warps, for memory that is contiguous along space or channels."""
    layouts = {p.layout(role) for role in ("x", "y")}
    channels = p.in_channels if p.pass_ is Pass.DGRAD else p.out_channels
    along = channels > 1 and bool(layouts & {"channels_last", "view"})
    if not along or layouts & {"contiguous", "view"}:
        yield from ((THREADS, 1, 4), (32, 1, 1))
    if along:
        widest = 1 << (channels - 1).bit_length()
        widths = (1,) if p.dtype == "fp32" else (2, 1)
        for width, lanes in itertools.product(
            widths, sorted({min(widest, n) for n in (16, 32, 64, 128)}, reverse=True)
        ):
            yield THREADS * width // lanes, lanes, 4


def code_work(p: ConvProblem, tile: Tile) -> int:
    """Relative time to compile a tile's code: Triton scans all of the code for each read and write."""
    return _terms(p, tile) * _accesses(p, tile)


def _terms(p: ConvProblem, tile: Tile) -> int:
    """Multiply-adds per lane that the code writes out."""
    _, height, width = axes_of(p)
    rows, parts = 0, 1
    if p.pass_ is Pass.WGRAD:
        rows = kernel_rows(p, tile)
        parts = -(-height.kernel // rows)
    lines = window(height, tile.rows, p.pass_ is Pass.DGRAD, 1, rows, parts)
    return _terms_of(lines) * _terms_of(window(width, tile.columns, p.pass_ is Pass.DGRAD))


def _accesses(p: ConvProblem, tile: Tile) -> int:
    """Reads and writes of tensors that the code writes out."""
    _, height, width = axes_of(p)
    backward, weights = p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD
    source, result = _vector(p, tile, p.operands[0]), _vector(p, tile, "y" if weights else p.result)
    lines = window(height, tile.rows, backward, 1, kernel_rows(p, tile) if weights else 0)
    reads = _used(lines.checks) * _used(window(width, tile.columns, backward, source).checks) // source
    taps = height.kernel * width.kernel if tile.channels > 1 and not weights else 0
    return reads + tile.rows * tile.columns // result + taps


def _terms_of(axis: Window) -> int:
    """Pairs of a tile's place and a tap along an axis that read inside the window."""
    return sum(tap >= 0 for tap in axis.taps)


def _registers(p: ConvProblem, tile: Tile) -> int:
    """About how many values a thread holds at once."""
    _, height, width = axes_of(p)
    taps = min(kernel_rows(p, tile) if p.pass_ is Pass.WGRAD else tile.rows, height.kernel) * width.kernel
    line = _used(window(width, tile.columns, p.pass_ is Pass.DGRAD).checks)
    return tile.width * (tile.rows * tile.columns + taps + line) + OTHER_REGISTERS


def _vector(p: ConvProblem, tile: Tile, role: str) -> int:
    """Columns that one access reads of a contiguous tensor; 1 for a view."""
    layout = p.layout(role)
    if layout == "view":
        return 1
    strides = dense_strides(p.shape(role), layout)
    return vectors(p, tile, role, (*strides[:2], *[0] * (3 - p.dims), *strides[2:]))


def _wavefronts(p: ConvProblem, tile: Tile, step: int) -> float:
    """Cycles of the memory pipe for one load of a warp, whose lanes lie ``step`` columns or one channel apart."""
    itemsize = p.torch_dtype(p.operands[0]).itemsize
    if tile.channels == 1:
        return min(32.0, max(1.0, step * itemsize / 4))
    return max(1.0, tile.width * itemsize / 4) * max(1.0, 64 / (tile.channels * itemsize))


def _used(checks: tuple[int, ...]) -> int:
    """Places of a window that some tap reads."""
    return sum(check != UNUSED for check in checks)


def _filled(p: ConvProblem, tile: Tile, parts: int) -> float:
    """Share of lanes with a place that exists, times the share of multiprocessors with enough warps."""
    backward = p.pass_ is Pass.DGRAD
    _, height, width = axes_of(p)
    channels = p.in_channels if backward else p.out_channels
    counts = tiles(p, tile)
    share = 1.0
    for axis, count, edge in ((height, counts[1], tile.rows), (width, counts[2], tile.columns)):
        share *= (axis.size if backward else axis.out) / (count * edge)
    share *= p.batch * math.prod(counts) / (_blocks(p, tile) * tile.spatial)
    blocks = -(-channels // tile.channels)
    share *= channels / (blocks * tile.channels)
    programs = blocks * parts * (partial_sums(p, tile) if p.pass_ is Pass.WGRAD else _blocks(p, tile))
    return share * busy(programs) * min(1.0, programs * tile.warps / (8 * PROCESSORS))
