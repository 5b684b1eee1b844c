"""Shapes of persistent kernels: which fit on the multiprocessors, and how long a step takes with each, roughly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.kernels.cuda.recurrent.programs import GATES, RecurrentProgram
from tilewise.solvers.recurrent._grid_recurrence import TILE, Shape, program

__all__ = ["Asked", "shapes", "smallest_excess", "step_cycles"]

UNITS = (8, 16, 24, 32, 48, 64)
CLUSTERS = (1, 2, 4, 8)
COLUMNS = (1, 4, 8)
ROWS = (16, 32, 64)
WARPGROUP = 4
"""Warps of a warpgroup."""
MOST_TILES = 8
MOST_SUMS = 12
"""Tiles of 16 x 8 sums of a warp at a time."""
MOST_GROUP_SUMS = 96
"""Rows of all tiles of 64 columns of a warpgroup: a thread has half as many sums."""
MOST_WORDS = 72
"""Weights of a thread in 16 bytes, beyond which registers run out."""
IN_CLUSTERS = 0.85
"""Share of the multiprocessors that clusters of four blocks and more find: these lie in one group of them."""
# Cycles of what makes up a step, fitted to 1,373 measured shapes of both kernels on an H100, which it predicts within
# 6 % in the median. Of 48 kernels the fastest shape is always among the first four.
ONCE = 484
WITH_CLUSTER = 722
"""What blocks of a cluster wait for each other."""
NEXT_TILE = 234
PRODUCT = 13.2
"""For a warp's products with a thread's sixteen bytes of weights."""
SUMS, SENT, LEFT = 2.82 / 128, 12 / 128, 1.37 / 128
"""For a byte of sums that is read in shared memory, that is sent to another block, and of weights in shared memory."""
LOAD, LOADS = 26, 455
"""For sixteen bytes that a thread reads from the second cache and multiplies, and for the root of their number."""
SHARED_LOAD, SHARED = 248, 791
"""The same where several warps need the same terms, and what their way through shared memory takes."""
CACHE = 0.97 / 3100
"""For a byte that all blocks read from the second cache."""
GATE = {False: 119, True: 198}
"""For a gate of a thread's unit, in a forward and in a backward."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What shapes are asked for: a kernel of a layer, and a GPU with so many multiprocessors, with ``clusters`` or not.

    ``precise``: products of fp32 numbers as exact as in fp32.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    batch: int
    precise: bool
    backward: bool
    processors: int
    clusters: bool


def step_cycles(p: RecurrentProgram, groups: int) -> float:
    """Cycles of a step. They rank shapes; no promise is made of them."""
    passes = (6 if p.precise else 2) if p.dtype is torch.float32 else 1
    high = p.rows // TILE
    products = p.words * p.rows if p.team > 1 else p.words * passes * PRODUCT * high
    of_a_block = p.parts * p.rows * 4
    sums = p.cluster * of_a_block * p.sums * SUMS + (p.cluster - 1) * of_a_block * 8 * p.column_tiles * SENT
    left = 0 if p.team > 1 else (p.words - p.held) * p.threads * 16 * LEFT
    if p.columns == 1 and p.team == 1:
        words = 2 * -(-p.chunks // p.parts) * high
        reads = words * LOAD + math.sqrt(words) * LOADS
    else:
        reads = -(-64 * p.chunks * high // p.threads) * SHARED_LOAD + SHARED
    reads += p.slices * groups * p.chunks * 64 * p.rows * CACHE
    gates = -(-p.rows * p.units // p.threads) * GATES[p.cell] * GATE[p.backward]
    once = ONCE + (WITH_CLUSTER if p.cluster > 1 else 0) + NEXT_TILE * (p.tiles - 1)
    return once + p.tiles * (products + sums + left + reads + gates)


@functools.lru_cache(maxsize=1024)
def shapes(asked: Asked) -> tuple[tuple[float, Shape], ...]:
    """Shapes that fit on the multiprocessors with the cycles of a step, the fastest first."""
    found = []
    for shape, p, groups in _offered(asked):
        room = asked.processors if p.cluster <= 2 else int(asked.processors * IN_CLUSTERS)
        if p.slices * groups <= room and p.words <= MOST_WORDS and not p.problems():
            found.append((step_cycles(p, groups), shape))
    return tuple(sorted(found))


def smallest_excess(asked: Asked) -> int:
    """The fewest bytes of weights by which a multiprocessor's share of them is too large, of all shapes."""
    weights = -(-(asked.hidden**2) * asked.dtype.itemsize // asked.processors)
    least = None
    for _, p, groups in _offered(asked):
        if p.slices * groups <= asked.processors:
            over = max((p.words - MOST_WORDS) * p.threads * 16, p.excess)
            least = over if least is None else min(least, over)
    return weights if least is None else max(least, 1)


def _offered(asked: Asked) -> Iterator[tuple[Shape, RecurrentProgram, int]]:
    """Every shape with its program and its groups of batch rows."""
    for rows in ROWS:
        of_all = -(-asked.batch // rows)
        if rows > TILE and asked.batch <= rows // 2:
            continue
        divided = sorted({-(-of_all // groups) for groups in (1, 2, 4, 8, 16)} - set(range(MOST_TILES + 1, of_all + 1)))
        clusters = CLUSTERS if asked.clusters else (1,)
        ways = [(columns, 1) for columns in COLUMNS]
        if asked.clusters and asked.dtype is not torch.float32:
            ways += [(columns, WARPGROUP) for columns in (1, 2)]
        for tiles, units, cluster, (columns, team) in itertools.product(divided, UNITS, clusters, ways):
            shape = (units, tiles, cluster, columns, rows, team)
            p = program(asked.cell, asked.hidden, asked.dtype, shape, asked.precise, asked.backward)
            if _divided(p):
                yield shape, p, -(-of_all // tiles)


def _divided(p: RecurrentProgram) -> bool:
    """Whether all groups have columns, and their sums have room in registers."""
    if p.team > 1:
        of_all = -(-p.cluster * p.column_tiles // 8)
        return p.columns <= of_all and p.matrix_tiles * p.rows <= MOST_GROUP_SUMS
    of_all = p.cluster * p.column_tiles
    return p.columns <= of_all and of_all * p.rows // (p.columns * TILE) <= MOST_SUMS
