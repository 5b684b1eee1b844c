"""Winograd convolution on a CPU: how tiles go in blocks, and the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from tilewise.kernels.cpu import tiling as of
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.kernels.cpu.tiling import ROWS, GradientTiling, Tiling, rows_of
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import WIDEST, numba_reasons
from tilewise.solvers._tiles import integer

__all__ = ["TILES", "Tiles", "forms", "tiling"]

TILES = (4, 6, 2)
"""Outputs of a tile along an axis."""
OCCUPIED = 0.6
"""Share of a core's cache that a block may fill: filters pass through the rest."""
LEAST_OCCUPIED = 0.33
"""The same where filters stay there too, at the least."""
OVERHEAD = 2
"""What a block costs beside its tiles' products, in tiles."""
STREAM = 20
"""How long filters that stay in no cache take to come by, which products hide: in tiles."""
BEGIN = 16
"""What it costs to begin a row of an image, in numbers of it."""
TRANSFORM = 20
"""What transforms of a tile's channel cost, in products at all frequencies."""
GRADIENT_OCCUPIED = 0.8
LEAST_TILES = 16
ACCESS = 8
"""What it costs to read and write the sums of a block, in products of them."""
MOST_UNITS = 8
"""Units to a thread from which on it matters little that some thread has one more."""


def tiling(p: ConvProblem, c: Config) -> Tiling:
    """What the kernel of a config is made for. Raises ``KeyError`` or ``ValueError`` for what is none."""
    rows, columns = c["block"] if isinstance(c["block"], tuple) else (0, 0)
    m, lanes, vectors, shares = (integer(c, name) for name in ("tile", "lanes", "vectors", "shares"))
    if min(rows, columns) < 1:
        raise ValueError(f"block={c['block']!r}: two positive integers would do")
    if m not in TILES or vectors > 4 or lanes not in (4, 8, 16):
        raise ValueError(f"tile={m}, vectors={vectors}, lanes={lanes}: a tile of {TILES}, up to 4 vectors would do")
    return _tiling(p, m, lanes, vectors, (rows, columns), shares)


def _tiling(p: ConvProblem, m: int, lanes: int, vectors: int, block: tuple[int, int], shares: int) -> Tiling:
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.pass_ is Pass.DGRAD:
        inputs, outputs = outputs, inputs
    height, width = p.shape("x" if p.pass_ is Pass.DGRAD else "y")[2:]
    kind = GradientTiling if p.pass_ is Pass.WGRAD else Tiling
    return kind(
        m, p.axes[0].kernel, lanes, vectors, p.batch, p.groups, inputs, outputs, (height, width), *block, shares
    )


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each size of tiles the vectors and blocks that seem best."""
    lanes = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
    threads = torch.get_num_threads()
    teams = ("openmp", "own") if has_openmp() else ("own",)
    for m in TILES:
        vectors = _vectors(p, lanes)
        one = _tiling(p, m, lanes, vectors, (1, 1), 1)
        block, shares = _gradient(one, threads) if isinstance(one, GradientTiling) else _best(one, threads)
        base = Config(tile=m, block=block, lanes=lanes, vectors=vectors, shares=shares, threads=threads)
        yield from [base] if threads == 1 else (Config(**base, team=team) for team in teams)


def _vectors(p: ConvProblem, lanes: int) -> int:
    """Vectors that are summed at a time: as many as there are registers for, and as even as there can be."""
    one = _tiling(p, TILES[0], lanes, 1, (1, 1), 1)
    return -(-one.chunks // -(-one.chunks // max(ROWS)))


def _gradient(one: GradientTiling, threads: int) -> tuple[tuple[int, int], int]:
    """Blocks and shares of outputs whose sums and tiles fit a cache."""
    found = []
    for shares in range(1, -(-one.outputs // one.lanes) + 1):
        t = replace(one, shares=shares)
        if t.shares > 1 and -(-t.outputs // t.share) < shares:
            continue
        room = int(GRADIENT_OCCUPIED * CPU_CACHE) - t.n**2 * t.sum_frequency
        tiles = room // (t.n**2 * (t.tile + t.other_tile))
        if tiles < LEAST_TILES and shares * t.lanes < one.outputs:
            continue
        block = _within(t, max(tiles, 4))
        rounds = -(-t.units // threads) if t.units < MOST_UNITS * threads else t.units / threads
        inputs, outputs = t.vectors * t.lanes, t.share
        per_tile = outputs * inputs * (1 + ACCESS / (block[0] * block[1])) + TRANSFORM * (inputs + outputs)
        found.append((rounds * per_tile, shares, block))
    _, shares, block = min(found)
    return block, shares


def _within(t: Tiling, most: int) -> tuple[int, int]:
    """A block of about so many tiles."""
    down, across = t.tiles
    columns = -(-across // -(-across // most))
    return max(1, min(down, most // columns)), columns


def _best(one: Tiling, threads: int) -> tuple[tuple[int, int], int]:
    """Rows and columns of blocks, and shares of outputs, for threads equally busy with blocks that fit a cache."""
    down, across = one.tiles
    filters = one.filters // one.groups
    stays = filters <= CPU_CACHE // 2
    room = OCCUPIED * CPU_CACHE - (filters if stays else 0)
    most = max(4, int(max(room, LEAST_OCCUPIED * CPU_CACHE)) // (one.tile + one.sum_tile))
    found = []
    for segments in range(-(-across // most), min(across, 4 * -(-across // most)) + 1):
        columns = -(-across // segments)
        tallest = max(1, min(down, most // columns))
        for rows in range(tallest, tallest // 4, -1):
            tiles = rows * columns
            high = rows_of(one.vectors, tiles)
            multiplied = OVERHEAD + max(-(-tiles // high) * high, 0 if stays else STREAM)
            blocks = -(-down // rows) * -(-across // columns) * one.groups
            for shares in range(1, min(threads, one.chunks) + 1):
                units = blocks * shares
                rounds = -(-units // threads) if units < MOST_UNITS * threads else units / threads
                outputs = -(-one.chunks // shares) * one.vectors * one.lanes
                over = one.r - 1
                short = 1 + (over + BEGIN) / (columns * one.m)
                transforms = TRANSFORM * short * ((1 + over / (rows * one.m)) * one.inputs + outputs) * tiles
                time = rounds * (one.inputs * outputs * multiplied + transforms)
                found.append((time, shares, -tiles, (rows, columns)))
    _, shares, _, block = min(found)
    return block, shares


class Tiles:
    """One kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    :meth:`prepare` is a :data:`~tilewise.solvers.base.Prepare`.
    """

    __slots__ = ("_distances", "_filters", "_openmp", "_own_filters", "_run", "_threads", "_units")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` are bytes between each tensor's neighbours. Raises ``SolverUnavailable`` with Numba's reason."""
        t = tiling(p, c)
        backward, gradient = p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD
        self._own_filters = not (p.constant_weight or gradient)
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        self._distances = np.array(t.distances(), dtype=np.int64)  # as long as its address is in use
        self._run, *functions = _compiled(t, gradient)
        x, y = ("y", "x") if backward else ("x", "y")
        outer, inner, row, column = apart["w"]
        ahead = [a.kernel - 1 - a.before if backward else a.before for a in p.axes]
        numbers = dict(zip(range(of.X_HEIGHT, of.PRODUCTS + 1), (
            *p.shape(x)[2:], *ahead, *apart[x], *p.shape(y)[2:], *apart[y],
            (t.inputs if backward else t.outputs) * outer, *((inner, outer) if backward else (outer, inner)),
            row, column, int(backward), *functions,
        ), strict=True))  # fmt: skip
        numbers |= t.numbers() | {of.KIND: 2 * gradient, of.DISTANCES: self._distances.ctypes.data}
        found = np.zeros(HEADER + of.NUMBERS, dtype=np.int64)
        found[3:6] = t.units, len(found), t.scratch
        for index, value in numbers.items():
            found[HEADER + index] = value
        self._units, self._filters = found, found.copy()
        self._filters[3], self._filters[HEADER + of.KIND] = p.groups * t.chunks, 1

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """``b`` is what the problem says, or in place of a constant filter what :meth:`prepare` made of it."""
        assert out is not None
        assert workspace is not None
        second = b.data_ptr()
        if self._own_filters:
            second = workspace.data_ptr() + int(self._units[5]) * self._threads
            self._start(self._filters, workspace, 0, b.data_ptr(), second)
        self._start(self._units, workspace, a.data_ptr(), second, out.data_ptr())
        return out

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """All transformed filters into ``kept``."""
        assert workspace is not None
        self._start(self._filters, workspace, 0, weight.data_ptr(), kept.data_ptr())

    def _start(self, numbers: np.ndarray, workspace: torch.Tensor, *addresses: int) -> None:
        threads = min(self._threads, torch.get_num_threads())
        data = numbers.copy()  # other callers count in theirs
        data[1] = threads
        data[6:HEADER] = workspace.data_ptr(), *addresses
        share_out(self._run, data.ctypes.data, threads, self._openmp)


def _compiled(t: Tiling, gradient: bool) -> tuple[int, ...]:
    from tilewise.kernels.cpu.compiling import load_winograd

    with numba_reasons():
        return load_winograd(t.lanes, t.m, t.r, t.vectors, t.block_rows, gradient)
