"""Winograd convolution on a CPU: how tiles go in blocks, and the run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.kernels.cpu.tiling import NUMBERS, Tiling
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import WIDEST
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import SolverUnavailable

__all__ = ["TILES", "Images", "forms", "tiling"]

TILES = (4, 6, 2)
"""Outputs of a tile along an axis."""
OCCUPIED = 0.6
"""Share of a core's cache that a block may fill: filters pass through the rest."""
OVERHEAD = 6
"""What a block costs beside its tiles' products, in tiles: filters come from memory that others share."""
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
    height, width = p.shape(p.result)[2:]
    return Tiling(
        m, p.axes[0].kernel, lanes, vectors, p.batch, p.groups, inputs, outputs, (height, width), *block, shares
    )


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each size of tiles the vectors and blocks that seem best."""
    lanes = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
    threads = torch.get_num_threads()
    for m in TILES:
        for vectors in _vectors(p, lanes):
            block, shares = _best(p, m, lanes, vectors, threads)
            base = Config(tile=m, block=block, lanes=lanes, vectors=vectors, shares=shares, threads=threads)
            if threads == 1:
                yield base
            else:
                yield from (Config(**base, team=team) for team in (("openmp", "own") if has_openmp() else ("own",)))


def _vectors(p: ConvProblem, lanes: int) -> list[int]:
    outputs = (p.in_channels if p.pass_ is Pass.DGRAD else p.out_channels) // p.groups
    inputs = (p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels) // p.groups
    whole = -(-outputs // lanes)
    most = 4 if inputs <= 192 else 2
    chunks = -(-whole // most)
    return [-(-whole // chunks)]


def _best(p: ConvProblem, m: int, lanes: int, vectors: int, threads: int) -> tuple[tuple[int, int], int]:
    """Rows and columns of blocks, and shares of outputs, for threads equally busy with blocks that fit a cache."""
    one = _tiling(p, m, lanes, vectors, (1, 1), 1)
    down, across = one.tiles
    each = one.n**2 * (one.tile_pitch + one.line)
    most = max(4, int(OCCUPIED * CPU_CACHE) // each)
    found = []
    for segments in range(-(-across // most), across + 1):
        columns = -(-across // segments)
        tallest = max(1, min(down, most // columns))
        for rows in range(tallest, 0, -1):
            blocks = -(-down // rows) * -(-across // columns) * p.groups
            for shares in range(1, min(threads, one.chunks) + 1):
                units = blocks * shares
                rounds = -(-units // threads) if units < MOST_UNITS * threads else units / threads
                tiles = rows * columns
                inside = -(-one.chunks // shares) / one.chunks
                time = rounds * (inside * (tiles + OVERHEAD) + 0.2 * tiles)
                found.append((time, shares, -tiles, (rows, columns)))
            if -(-down // rows) > 4 * threads and rows * columns * 2 < most:
                break
        if columns * 4 < most:
            break
    _, shares, _, block = min(found)
    return block, shares


class Images:
    """One kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run` of FPROP or DGRAD.

    :meth:`prepare` is a :data:`~tilewise.solvers.base.Prepare`.
    """

    __slots__ = ("_blocks", "_distances", "_filters", "_kept", "_openmp", "_run", "_threads")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` are bytes between each tensor's neighbours. Raises ``SolverUnavailable`` with Numba's reason."""
        t = tiling(p, c)
        self._kept, self._threads, self._openmp = p.constant_weight, integer(c, "threads"), c.get("team") == "openmp"
        self._distances = np.array(t.distances(), dtype=np.int64)
        products, self._run = _compiled(t)
        backward = p.pass_ is Pass.DGRAD
        image, lead = "y" if backward else "x", [a.kernel - 1 - a.before if backward else a.before for a in p.axes]
        outer, inner, row, column = apart["w"]
        if backward:
            lanes_apart, depth_apart, group = inner, outer, outer * t.inputs
        else:
            lanes_apart, depth_apart, group = outer, inner, outer * t.outputs
        numbers = (
            0, p.groups, t.inputs, t.outputs, t.tiles[0], t.tiles[0] // p.batch, t.tiles[1], t.rows, t.columns,
            -(-t.tiles[1] // t.columns), t.shares, t.chunks, t.vectors, *p.shape(image)[2:], *lead, *t.result,
            *apart[image], *apart[p.result], lanes_apart, depth_apart, row, column, group, products, t.block_rows,
            self._distances.ctypes.data, t.frequency_pitch, t.tile_pitch, t.sum_pitch, t.strip_pitch, t.sums, t.strip,
            int(backward), t.blocks,
        )  # fmt: skip
        assert len(numbers) == NUMBERS
        header = [0, 0, 0, p.groups * t.blocks * t.shares, HEADER + NUMBERS, t.scratch, 0, 0, 0, 0]
        self._blocks = np.array([*header, *numbers], dtype=np.int64)
        header[3] = p.groups * t.chunks
        self._filters = np.array([*header, 1, *numbers[1:]], dtype=np.int64)

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """``b`` is the filter, or where that is constant what :meth:`prepare` made of it."""
        assert out is not None
        assert workspace is not None
        filters = b.data_ptr()
        if not self._kept:
            filters = workspace.data_ptr() + int(self._blocks[5]) * self._threads
            self._start(self._filters, workspace, 0, b.data_ptr(), filters)
        self._start(self._blocks, workspace, a.data_ptr(), filters, out.data_ptr())
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


def _compiled(t: Tiling) -> tuple[int, int]:
    from tilewise.kernels.cpu.compiling import load_products, load_winograd

    try:
        return load_products(t.lanes, t.vectors, t.block_rows), load_winograd(t.lanes, t.m, t.r)
    except Exception as error:  # Numba and LLVM raise errors of their own
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error
