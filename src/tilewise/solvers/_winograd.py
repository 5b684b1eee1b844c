"""Winograd convolution on a CPU: how tiles go in blocks, and the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewise.kernels.cpu import tiling as of
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.threads import has_openmp
from tilewise.kernels.cpu.tiling import ROWS, GradientTiling, Sizes, Tiling, rows_of
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import WIDEST, numba_reasons, start, strides
from tilewise.solvers._tiles import integer

__all__ = ["TAPS", "TILES", "Tiles", "forms", "sizes", "tiling"]

TILES = (4, 6, 2)
"""Outputs of a tile along each axis that has taps to save."""
TAPS = 7
"""The longest kernel."""
ROUNDING = {1: 1.0, 3: 1.4, 4: 1.5, 5: 2.1, 6: 2.6, 7: 4.5, 8: 5.5, 10: 15.0}
"""By what factor an axis of a tile of so many points multiplies an fp32 sum's rounding, roughly."""
MOST_ROUNDING = {Pass.FPROP: 40.0, Pass.DGRAD: 40.0, Pass.WGRAD: 15.0}
"""The most of all axes together: twice as much would miss an L2 error of 1e-5.

Where a gradient of outputs is one value everywhere, as a sum's is, its transform is far larger at some points than at
others, and a filter's gradient is what is left of large sums: up to 1.7 times the error for each axis.
"""
OCCUPIED = 0.6
"""Share of a core's cache that a block may fill: filters pass through the rest."""
LEAST_OCCUPIED = 0.33
"""The same where filters stay there too, at the least."""
BEYOND = 2.0
"""A core's caches that a block may fill where filters stay in none, so that products hide how they come by."""
SPILLED = 24
"""What it costs to have a number of a tile's inputs go through a cache that cores share, in products of it."""
OVERHEAD = 2
"""What a block costs beside its tiles' products, in tiles."""
STREAM = 24
"""How long filters that stay in no cache take to come by, which products hide: in tiles."""
BEGIN = 16
"""What it costs to begin a row of an image, in numbers of it."""
TRANSFORM = 20
"""What transforms of a tile's channel cost, in products at all frequencies."""
GRADIENT_OCCUPIED = 0.7
LEAST_TILES = 16
ACCESS = 8
"""What it costs to read and write the sums of a block, in products of them."""
ADD = 20
"""What it costs to write and add up one more filter's gradients, in products at all frequencies."""
MOST_UNITS = 8
"""Units to a thread from which on it matters little that some thread has one more."""


def sizes(p: ConvProblem) -> list[int]:
    """Those of :data:`TILES` whose rounding is small enough."""
    found = []
    for tile in TILES:
        points = [m + axis.kernel - 1 for m, axis in zip(_outputs(p, tile), p.axes, strict=True)]
        if all(n in ROUNDING for n in points) and math.prod(ROUNDING[n] for n in points) <= MOST_ROUNDING[p.pass_]:
            found.append(tile)
    return found


def _outputs(p: ConvProblem, tile: int) -> list[int]:
    """Outputs of a tile along each axis: an axis of one tap has nothing to save."""
    return [tile if axis.kernel > 1 else 1 for axis in p.axes]


def _three(values: Iterable[int], missing: int = 1) -> Sizes:
    """Sizes along depth, height and width."""
    found = tuple(values)
    depth, height, width = (missing,) * (3 - len(found)) + found
    return depth, height, width


def tiling(p: ConvProblem, c: Config) -> Tiling:
    """What the kernel of a config is made for. Raises ``KeyError`` or ``ValueError`` for what is none."""
    rows, columns = c["block"] if isinstance(c["block"], tuple) else (0, 0)
    m, lanes, vectors, shares = (integer(c, name) for name in ("tile", "lanes", "vectors", "shares"))
    if min(rows, columns) < 1:
        raise ValueError(f"block={c['block']!r}: two positive integers would do")
    if m not in sizes(p) or vectors > 4 or lanes not in (4, 8, 16):
        raise ValueError(f"tile={m}, vectors={vectors}, lanes={lanes}: a tile of {sizes(p)}, up to 4 vectors would do")
    found = replace(_tiling(p, m, lanes, vectors), rows=rows, columns=columns, shares=shares)
    parts = integer(c, "parts", 1)
    if parts > (found.blocks if p.pass_ is Pass.WGRAD else 1):
        raise ValueError(f"parts={parts}: up to {found.blocks} blocks of a filter's gradient, else one, would do")
    return replace(found, parts=parts)


def _tiling(p: ConvProblem, tile: int, lanes: int, vectors: int) -> Tiling:
    """In blocks of one tile."""
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.pass_ is Pass.DGRAD:
        inputs, outputs = outputs, inputs
    image = _three(p.shape("x" if p.pass_ is Pass.DGRAD else "y")[2:])
    m, r = _three(_outputs(p, tile)), _three(axis.kernel for axis in p.axes)
    kind = GradientTiling if p.pass_ is Pass.WGRAD else Tiling
    return kind(m, r, lanes, vectors, p.batch, p.groups, inputs, outputs, image, 1, 1)


def forms(p: ConvProblem, *, within: bool = False) -> Iterable[Config]:
    """For each size of tiles the vectors and blocks that seem best, ``within`` a core's cache if that is asked for."""
    lanes = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
    threads = torch.get_num_threads()
    teams = ("openmp", "own") if has_openmp() else ("own",)
    for m in sizes(p):
        ones = [_tiling(p, m, lanes, vectors) for vectors in _vectors(p, lanes)]
        _, best = min((_best(one, threads, within) for one in ones), key=lambda found: found[0])
        base = Config(tile=m, lanes=lanes, threads=threads, **best)
        yield from [base] if threads == 1 else (Config(**base, team=team) for team in teams)


def _vectors(p: ConvProblem, lanes: int) -> list[int]:
    """Vectors that are summed at a time: as many as there are registers for, and as even as there can be.

    One less may suit the rows of a small block better.
    """
    chunks = _tiling(p, TILES[0], lanes, 1).chunks
    most = -(-chunks // -(-chunks // max(ROWS)))
    return [most, most - 1] if most == max(ROWS) and p.pass_ is not Pass.WGRAD else [most]


def _best(one: Tiling, threads: int, within: bool) -> tuple[float, dict[str, Any]]:
    """The time that it should take, and the rest of the config."""
    if isinstance(one, GradientTiling):
        time, parts, shares, block = _gradient(one, threads)
        more = {} if parts == 1 else {"parts": parts}
    else:
        time, shares, _, block = _blocks(one, threads, within)
        more = {}
    return time, {"block": block, "shares": shares, "vectors": one.vectors, **more}


def _gradient(one: GradientTiling, threads: int) -> tuple[float, int, int, tuple[int, int]]:
    """Parts of the blocks, shares of outputs, and blocks whose sums and tiles fit a cache, behind their time."""
    found = []
    for shares, parts in itertools.product(range(1, -(-one.outputs // one.lanes) + 1), range(1, threads + 1)):
        t = replace(one, shares=shares)
        if t.shares > 1 and -(-t.outputs // t.share) < shares:
            continue
        room = int(GRADIENT_OCCUPIED * CPU_CACHE) - t.points * t.sum_frequency
        tiles = room // (t.points * (t.tile + t.other_tile))
        if tiles < LEAST_TILES and shares * t.lanes < one.outputs:
            continue
        block = _within(t, max(tiles, 4))
        t = replace(t, rows=block[0], columns=block[1], parts=parts)
        if parts > t.blocks:
            continue
        rounds = -(-t.units // threads) if t.units < MOST_UNITS * threads else t.units / threads
        inputs, outputs = t.vectors * t.lanes, t.share
        per_tile = outputs * inputs * (1 + ACCESS / (block[0] * block[1])) + TRANSFORM * (inputs + outputs)
        added = ADD * (parts > 1) * inputs * outputs
        found.append((rounds * (per_tile * -(-t.tiles[0] * t.tiles[1] // parts) + added), parts, shares, block))
    return min(found)


def _within(t: Tiling, most: int) -> tuple[int, int]:
    """A block of about so many tiles."""
    down, across = t.tiles
    columns = -(-across // -(-across // most))
    return max(1, min(down, most // columns)), columns


def _blocks(one: Tiling, threads: int, within: bool) -> tuple[float, int, int, tuple[int, int]]:
    """Rows and columns of blocks, for threads equally busy with blocks that fit a cache.

    Where many channels leave so few tiles in a block that products do not hide how filters come by, and it need not be
    ``within`` the cache, it may be larger. Behind their time, shares of outputs and, below zero, tiles of a block.
    """
    down, across = one.tiles
    _, high, wide = (r - 1 for r in one.r)
    filters = one.filters // one.groups
    stays = filters <= CPU_CACHE // 2
    room = OCCUPIED * CPU_CACHE - (filters if stays else 0)
    each = one.tile + one.sum_tile
    fitting = most = max(4, int(max(room, LEAST_OCCUPIED * CPU_CACHE)) // each)
    if not (stays or within):
        most = max(most, min(STREAM, int(BEYOND * CPU_CACHE) // each))
    found = []
    for segments in range(-(-across // most), min(across, 4 * -(-across // most)) + 1):
        columns = -(-across // segments)
        tallest = max(1, min(down, most // columns))
        for rows in range(tallest, tallest // 4, -1):
            tiles = rows * columns
            whole = rows_of(one.vectors, tiles)
            multiplied = OVERHEAD + max(-(-tiles // whole) * whole, 0 if stays else STREAM)
            blocks = -(-down // rows) * -(-across // columns) * one.groups
            for shares in range(1, min(threads, one.chunks) + 1):
                units = blocks * shares
                rounds = -(-units // threads) if units < MOST_UNITS * threads else units / threads
                outputs = -(-one.chunks // shares) * one.vectors * one.lanes
                short = 1 + (wide + BEGIN) / (columns * one.m[2])
                transforms = TRANSFORM * short * ((1 + high / (rows * one.m[1])) * one.inputs + outputs) * tiles
                transforms += SPILLED * one.inputs * tiles * (tiles > fitting)
                time = rounds * (one.inputs * outputs * multiplied + transforms)
                found.append((time, shares, -tiles, (rows, columns)))
    return min(found)


class Tiles:
    """One kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    :meth:`prepare` is a :data:`~tilewise.solvers.base.Prepare`.
    """

    __slots__ = ("_distances", "_filters", "_openmp", "_own_filters", "_parts", "_run", "_threads", "_units")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` are bytes between each tensor's neighbours. Raises ``SolverUnavailable`` with Numba's reason."""
        t = tiling(p, c)
        backward, gradient = p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD
        self._own_filters = not (p.constant_weight or gradient)
        self._parts = (t.parts, *p.shape("w")) if t.parts > 1 else None
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        self._distances = np.array(t.distances(), dtype=np.int64)  # as long as its address is in use
        self._run, *functions = _compiled(t, gradient)
        x, y = ("y", "x") if backward else ("x", "y")
        if self._parts is not None:
            apart = {**apart, "w": strides(torch.empty(self._parts[1:], dtype=torch.float32, device="meta"))}
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
        }  # fmt: skip
        found = np.zeros(HEADER + of.NUMBERS, dtype=np.int64)
        found[3:6] = t.units, len(found), t.scratch
        for index, value in numbers.items():
            found[HEADER + index] = value
        self._units, self._filters = found, found.copy()
        self._filters[3], self._filters[HEADER + of.KIND] = p.groups * t.chunks, 1

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        """``b`` is what the problem says, or in place of a constant filter what :meth:`prepare` made of it."""
        assert out is not None
        assert workspace is not None
        second = b.data_ptr()
        if self._own_filters:
            second = workspace.data_ptr() + int(self._units[5]) * self._threads
            self._start(self._filters, workspace, 0, b.data_ptr(), second)
        if self._parts is None:
            self._start(self._units, workspace, a.data_ptr(), second, out.data_ptr(), *bias)
            return out
        begin, size = int(self._units[5]) * self._threads, 4 * math.prod(self._parts)
        parts = workspace[begin : begin + size].view(torch.float32).view(self._parts)
        self._start(self._units, workspace, a.data_ptr(), second, parts.data_ptr())
        return torch.sum(parts, 0, out=out)

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """All transformed filters into ``kept``."""
        assert workspace is not None
        self._start(self._filters, workspace, 0, weight.data_ptr(), kept.data_ptr())

    def _start(
        self, numbers: np.ndarray, workspace: torch.Tensor, a: int, b: int, out: int, *bias: torch.Tensor
    ) -> None:
        data = numbers.copy()
        if bias:
            data[HEADER + of.BIAS] = bias[0].data_ptr()
        start(self._run, data, self._threads, self._openmp, workspace.data_ptr(), a, b, out)


def _taps(apart: Sequence[int], r: Sizes) -> Sizes:
    """Bytes between a filter's neighbours along depth, height and width, dense along axes that it does not have."""
    found = list(apart)
    while len(found) < 3:
        found.insert(0, r[3 - len(found)] * found[0])
    return _three(found)


def _compiled(t: Tiling, gradient: bool) -> tuple[int, ...]:
    from tilewise.kernels.cpu.compiling import load_winograd

    with numba_reasons():
        return load_winograd(t.lanes, t.m, t.r, t.vectors, t.block_rows, gradient)
