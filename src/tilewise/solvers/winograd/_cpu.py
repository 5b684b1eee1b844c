"""Winograd convolution on a CPU: the choice of tiles and blocks, and the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.winograd import tiling as of
from tilewise.kernels.cpu.winograd.tiling import ROWS, GradientTiling, Sizes, Tiling, rows_of
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import (
    PreparedFilters,
    byte_strides,
    finishing,
    kernel_data,
    numba_reasons,
    numbers_array,
    units_in_turn,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import integer

__all__ = ["TAPS", "TILES", "Tiles", "forms", "sizes", "tiling"]

TILES = (4, 6, 2)
"""Outputs of a tile along each axis with more than one tap, the most promising first."""
TAPS = 7
"""Most taps of a kernel along an axis."""
ROUNDING = {1: 1.0, 3: 1.4, 4: 1.5, 5: 2.1, 6: 2.6, 7: 4.5, 8: 5.5, 10: 15.0}
"""Roughly by what factor an axis increases an fp32 sum's rounding error, by a tile's points along it."""
MOST_ROUNDING = {Pass.FPROP: 40.0, Pass.DGRAD: 40.0, Pass.WGRAD: 15.0}
"""Largest product of these factors over all axes: twice as much would miss an L2 error of 1e-5.

Where an output gradient has one value everywhere, as that of a sum has, its transform is far larger at some points than
at others, and a weight gradient is the small difference of large sums: up to 1.7 times the error for each axis.
"""
OCCUPIED = 0.6
"""Share of a core's cache that a block may fill while filters pass through the rest."""
LEAST_OCCUPIED = 0.33
"""Least share of a core's cache that a block gets where filters stay there too."""
BEYOND = 2.0
"""How many times a core's cache a block may fill where filters stay in no cache, so that products hide it."""
SPILLED = 24
"""Time for a number of a tile's inputs to go through a cache shared by cores, in products."""
OVERHEAD = 2
"""Time that a block takes beside its tiles' products, in tiles."""
STREAM = 24
"""Time to fetch filters that stay in no cache, in products of so many tiles, which hide it."""
BEGIN = 16
"""Time to begin a row of an image, in numbers of it."""
TRANSFORM = 20
"""Time to transform one channel of a tile, in products at all frequencies."""
GRADIENT_OCCUPIED = 0.7
"""Share of a core's cache that sums and tiles of a weight gradient may fill."""
LEAST_TILES = 16
"""Least tiles of a weight gradient's block, unless its outputs are already divided as far as possible."""
ACCESS = 8
"""Time to read and write the sums of a block, in products."""
ADD = 20
"""Time to write and add one more partial weight gradient, in products at all frequencies."""


def sizes(p: ConvProblem) -> list[int]:
    """Those of :data:`TILES` whose rounding error is small enough for ``p``."""
    accurate = []
    for tile in TILES:
        points = [m + axis.kernel - 1 for m, axis in zip(_outputs(p, tile), p.axes, strict=True)]
        if all(n in ROUNDING for n in points) and math.prod(ROUNDING[n] for n in points) <= MOST_ROUNDING[p.pass_]:
            accurate.append(tile)
    return accurate


def _outputs(p: ConvProblem, tile: int) -> list[int]:
    """Outputs of a tile along each axis: ``tile``, or 1 where the axis has one tap and nothing to save."""
    return [tile if axis.kernel > 1 else 1 for axis in p.axes]


def _three(values: Iterable[int], missing: int = 1) -> Sizes:
    """``values`` as sizes along depth, height and width, with ``missing`` for axes that the problem lacks."""
    given = tuple(values)
    depth, height, width = (missing,) * (3 - len(given)) + given
    return depth, height, width


def tiling(p: ConvProblem, c: Config) -> Tiling:
    """The kernel's tiling for a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    rows, columns = c["block"] if isinstance(c["block"], tuple) else (0, 0)
    m, lanes, vectors, shares = (integer(c, name) for name in ("tile", "lanes", "vectors", "shares"))
    if min(rows, columns) < 1:
        raise ValueError(f"block={c['block']!r}: two positive integers would do")
    if m not in sizes(p) or vectors > 4 or lanes not in (4, 8, 16):
        raise ValueError(f"tile={m}, vectors={vectors}, lanes={lanes}: a tile of {sizes(p)}, up to 4 vectors would do")
    chosen = replace(_tiling(p, m, lanes, vectors), rows=rows, columns=columns, shares=shares)
    parts = integer(c, "parts", 1)
    if parts > (chosen.blocks if p.pass_ is Pass.WGRAD else 1):
        raise ValueError(f"parts={parts}: up to {chosen.blocks} blocks of a filter's gradient, else one, would do")
    return replace(chosen, parts=parts)


def _tiling(p: ConvProblem, tile: int, lanes: int, vectors: int) -> Tiling:
    """The tiling in blocks of one tile."""
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.pass_ is Pass.DGRAD:
        inputs, outputs = outputs, inputs
    image = _three(p.shape("x" if p.pass_ is Pass.DGRAD else "y")[2:])
    m, r = _three(_outputs(p, tile)), _three(axis.kernel for axis in p.axes)
    kind = GradientTiling if p.pass_ is Pass.WGRAD else Tiling
    return kind(m, r, lanes, vectors, p.batch, p.groups, inputs, outputs, image, 1, 1)


def forms(p: ConvProblem, *, within: bool = False) -> Iterable[Config]:
    """For each size of tiles the config with the vectors and blocks that should be fastest.

    ``within`` keeps blocks within a core's cache.
    """
    lanes, threads = vector_lanes(), torch.get_num_threads()
    for m in sizes(p):
        tilings = [_tiling(p, m, lanes, vectors) for vectors in _vectors(p, lanes)]
        _, best = min((_best(unblocked, threads, within) for unblocked in tilings), key=lambda rated: rated[0])
        base = Config(tile=m, lanes=lanes, threads=threads, **best)
        yield from with_teams(base)


def _vectors(p: ConvProblem, lanes: int) -> list[int]:
    """Numbers of vectors to sum at a time: as many as registers hold, dividing the channels evenly.

    One vector less may suit the rows of a small block better.
    """
    chunks = _tiling(p, TILES[0], lanes, 1).chunks
    most = -(-chunks // -(-chunks // max(ROWS)))
    return [most, most - 1] if most == max(ROWS) and p.pass_ is not Pass.WGRAD else [most]


def _best(unblocked: Tiling, threads: int, within: bool) -> tuple[float, dict[str, Any]]:
    """The estimated time, and the rest of the config."""
    if isinstance(unblocked, GradientTiling):
        time, parts, shares, block = _gradient(unblocked, threads)
        more = {} if parts == 1 else {"parts": parts}
    else:
        time, shares, _, block = _blocks(unblocked, threads, within)
        more = {}
    return time, {"block": block, "shares": shares, "vectors": unblocked.vectors, **more}


def _gradient(unblocked: GradientTiling, threads: int) -> tuple[float, int, int, tuple[int, int]]:
    """The estimated time of a weight gradient, its parts of the blocks, its shares of outputs, and its block."""
    rated = []
    for shares, parts in itertools.product(
        range(1, -(-unblocked.outputs // unblocked.lanes) + 1), range(1, threads + 1)
    ):
        t = replace(unblocked, shares=shares)
        if t.shares > 1 and -(-t.outputs // t.share) < shares:
            continue
        room = int(GRADIENT_OCCUPIED * CPU_CACHE) - t.points * t.sum_frequency
        tiles = room // (t.points * (t.tile + t.other_tile))
        if tiles < LEAST_TILES and shares * t.lanes < unblocked.outputs:
            continue
        block = _within(t, max(tiles, 4))
        t = replace(t, rows=block[0], columns=block[1], parts=parts)
        if parts > t.blocks:
            continue
        rounds = units_in_turn(t.units, threads)
        inputs, outputs = t.vectors * t.lanes, t.share
        per_tile = outputs * inputs * (1 + ACCESS / (block[0] * block[1])) + TRANSFORM * (inputs + outputs)
        added = ADD * (parts > 1) * inputs * outputs
        rated.append((rounds * (per_tile * -(-t.tiles[0] * t.tiles[1] // parts) + added), parts, shares, block))
    return min(rated)


def _within(t: Tiling, most: int) -> tuple[int, int]:
    """Rows and columns of a block of about ``most`` tiles."""
    down, across = t.tiles
    columns = -(-across // -(-across // most))
    return max(1, min(down, most // columns)), columns


def _blocks(unblocked: Tiling, threads: int, within: bool) -> tuple[float, int, int, tuple[int, int]]:
    """The estimated time, the shares of outputs, the negated number of tiles of a block, and its rows and columns.

    Blocks fit into a core's cache and keep threads equally busy. Unless ``within``, a block may be larger than the
    cache where many channels leave it so few tiles that products would not hide the fetching of filters.
    """
    down, across = unblocked.tiles
    _, high, wide = (r - 1 for r in unblocked.r)
    filters = unblocked.filters // unblocked.groups
    stays = filters <= CPU_CACHE // 2
    room = OCCUPIED * CPU_CACHE - (filters if stays else 0)
    tile_bytes = unblocked.tile + unblocked.sum_tile
    fitting = most = max(4, int(max(room, LEAST_OCCUPIED * CPU_CACHE)) // tile_bytes)
    if not (stays or within):
        most = max(most, min(STREAM, int(BEYOND * CPU_CACHE) // tile_bytes))
    rated = []
    for segments in range(-(-across // most), min(across, 4 * -(-across // most)) + 1):
        columns = -(-across // segments)
        tallest = max(1, min(down, most // columns))
        for rows in range(tallest, tallest // 4, -1):
            tiles = rows * columns
            whole = rows_of(unblocked.vectors, tiles)
            multiplied = OVERHEAD + max(-(-tiles // whole) * whole, 0 if stays else STREAM)
            blocks = -(-down // rows) * -(-across // columns) * unblocked.groups
            for shares in range(1, min(threads, unblocked.chunks) + 1):
                rounds = units_in_turn(blocks * shares, threads)
                outputs = -(-unblocked.chunks // shares) * unblocked.vectors * unblocked.lanes
                short = 1 + (wide + BEGIN) / (columns * unblocked.m[2])
                transforms = (
                    TRANSFORM * short * ((1 + high / (rows * unblocked.m[1])) * unblocked.inputs + outputs) * tiles
                )
                transforms += SPILLED * unblocked.inputs * tiles * (tiles > fitting)
                time = rounds * (unblocked.inputs * outputs * multiplied + transforms)
                rated.append((time, shares, -tiles, (rows, columns)))
    return min(rated)


class Tiles(PreparedFilters):
    """The compiled kernel over all units of work. It takes transformed filters."""

    __slots__ = ("_distances", "_parts")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of each tensor. Raises ``SolverUnavailable`` with Numba's reason."""
        super().__init__(p, c, {"bias": of.BIAS, "residual": of.RESIDUAL})
        t = tiling(p, c)
        backward, gradient = p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD
        self._parts = (t.parts, *p.shape("w")) if t.parts > 1 else None
        self._distances = np.array(t.distances(), dtype=np.int64)  # as long as its address is in use
        run, *functions, finish = _compiled(t, gradient, finishing(p))
        x, y = ("y", "x") if backward else ("x", "y")
        if self._parts is not None:
            apart = {**apart, "w": byte_strides(torch.empty(self._parts[1:], dtype=torch.float32, device="meta"))}
        outer, inner, *between = apart["w"]
        taps = _taps(between, t.r)
        ahead = [a.kernel - 1 - a.before if backward else a.before for a in p.axes]
        numbers = dict(zip(range(of.X_DEPTH, of.W_PART), (
            *_three(p.shape(x)[2:]), *_three(ahead, 0), *apart[x][:2], *_three(apart[x][2:], 0),
            *_three(p.shape(y)[2:]), *apart[y][:2], *_three(apart[y][2:], 0),
            (t.inputs if backward else t.outputs) * outer,
            *((inner, outer) if backward else (outer, inner)), *taps, int(backward), *functions,
        ), strict=True))  # fmt: skip
        numbers |= t.numbers() | {
            of.KIND: 2 * gradient, of.DISTANCES: self._distances.ctypes.data, of.W_PART: p.nbytes("w"),
            of.FINISH: finish,
        }  # fmt: skip
        units = kernel_data(t.units, t.scratch, numbers_array(numbers, of.NUMBERS))
        self.tell(run, units, {3: p.groups * t.chunks, HEADER + of.KIND: 1})

    def compute(self, data: np.ndarray, a: int, filters: int, out: torch.Tensor, workspace: torch.Tensor) -> None:
        """Write the result; in parts, each part's sums and then their sum."""
        if self._parts is None:
            super().compute(data, a, filters, out, workspace)
            return
        behind = self.behind_scratch(workspace)[: 4 * math.prod(self._parts)]
        parts = behind.view(torch.float32).view(self._parts)
        super().compute(data, a, filters, parts, workspace)
        torch.sum(parts, 0, out=out)


def _taps(apart: Sequence[int], r: Sizes) -> Sizes:
    """A filter's byte strides along depth, height and width; contiguous ones for axes that it lacks."""
    strides = list(apart)
    while len(strides) < 3:
        strides.insert(0, r[3 - len(strides)] * strides[0])
    return _three(strides)


def _compiled(t: Tiling, gradient: bool, activation: str | None) -> tuple[int, ...]:
    """Addresses of the compiled functions. Raises ``SolverUnavailable`` with Numba's reason."""
    from tilewise.kernels.cpu.compiling import load_winograd

    with numba_reasons():
        return load_winograd(t.lanes, t.m, t.r, t.vectors, t.block_rows, gradient, activation)
