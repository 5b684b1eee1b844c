"""Shapes of persistent kernels: which fit on the multiprocessors, and how long a step takes with each, roughly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.kernels.cuda.recurrent.programs import GATES, MOST_READ, RecurrentProgram
from tilewise.solvers.common.tiles import PROCESSORS
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


@dataclass(frozen=True, slots=True)
class Costs:
    """Cycles of what makes up a step, fitted to shapes that were measured on an H100. They rank shapes."""

    once: float
    cluster: float
    """What blocks of a cluster wait for each other."""
    gates: tuple[float, float]
    """For a gate of a thread's unit, in a forward and in a backward."""
    product: float
    """For a warp's products with a thread's sixteen bytes of weights, or a warpgroup's with 64 x 16 of them."""
    left: float
    """For sixteen bytes of a thread's weights that registers do not hold."""
    sent: float
    """For 128 bytes of sums that are sent to another block."""
    shared_load: float
    """For sixteen bytes that a thread reads from the second cache, where several warps need the same terms."""
    load: float = 0.0
    """The same where a thread multiplies them itself."""
    root_of_loads: float = 0.0
    shared: float = 0.0
    """For the way of terms through shared memory."""
    terms: float = 0.0
    """For 128 bytes of terms that warps read there."""
    next_tile: float = 0.0
    crowd: float = 0.0
    """For as many blocks as an H100 has multiprocessors, each with 16 rows."""
    product_row: float = 0.0
    """For each batch row of a warpgroup's product with weights in registers."""
    left_row: float = 0.0
    """The same with others: how much more or less."""
    sums: float = 0.0
    """For 128 bytes of sums that are read in shared memory."""
    second_round: float = 0.0
    """For terms that a thread can not ask for at once."""
    cache: float = 0.0
    """For a byte that all blocks read from the second cache."""
    narrow: float = 0.0
    """Where another block stores the other half of 32 bytes of the state, with 16 rows."""


# Of 459 shapes of 15 layers in bf16, within 8 % and 6 % in the median; the fastest of each kernel is among the first
# four or within 8 % of one of them. In fp32 of 1,373 shapes with tiles of 16 rows, before there were others.
BY_WARPS = Costs(
    753, 353, (135, 266), product=41.7, left=11.4, sent=11, shared_load=270, load=147, root_of_loads=27, terms=0.27,
    next_tile=22, crowd=843, sums=0.18, narrow=1000,
)  # fmt: skip
BY_WARPGROUPS = Costs(
    584, 349, (153, 258), product=28.4, left=8.6, sent=11.4, shared_load=225, crowd=1111, product_row=1.285,
    left_row=-0.836, second_round=764, narrow=700,
)  # fmt: skip
IN_FP32 = Costs(
    484, 722, (119, 198), product=13.2, left=43.8, sent=12, shared_load=248, load=26, root_of_loads=455, shared=791,
    next_tile=234, sums=2.82, cache=0.97 / 3100,
)  # fmt: skip


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


def step_cycles(p: RecurrentProgram, groups: int, batch: int) -> float:
    """Cycles of a step of ``batch`` rows with ``groups`` of blocks. They rank shapes; no promise is made of them."""
    costs = BY_WARPGROUPS if p.team > 1 else IN_FP32 if p.dtype is torch.float32 else BY_WARPS
    passes = (6 if p.precise else 2) if p.dtype is torch.float32 else 1
    high, left, blocks = p.rows // TILE, p.words - p.held, p.slices * groups
    if p.team > 1:
        products = p.words * (costs.product + p.rows * costs.product_row)
        products += left * (costs.left + p.rows * costs.left_row)
    else:
        products = p.words * passes * high * costs.product + left * costs.left
    of_a_block = p.parts * p.rows * 4 / 128
    sums = p.cluster * of_a_block * p.sums * costs.sums + (p.cluster - 1) * of_a_block * 8 * p.column_tiles * costs.sent
    full = min(batch, TILE) / TILE
    gates = -(-p.rows * p.units // p.threads) * GATES[p.cell] * costs.gates[p.backward]
    gates += costs.narrow * full if p.units * p.dtype.itemsize < 32 else 0
    once = costs.once + (costs.cluster if p.cluster > 1 else 0) + costs.next_tile * (p.tiles - 1)
    crowd = costs.crowd * blocks / PROCESSORS * full
    return once + p.tiles * (crowd + products + sums + _reads(p, costs, blocks) + gates)


def _reads(p: RecurrentProgram, costs: Costs, blocks: int) -> float:
    """Cycles of the reads of a tile's terms."""
    share = p.chunks * 64 * p.rows  # bytes of a block
    all_blocks = blocks * share * costs.cache
    if p.columns == 1 and p.team == 1:
        words = 2 * -(-p.chunks // p.parts) * p.rows // TILE
        return words * costs.load + math.sqrt(words) * costs.root_of_loads + all_blocks
    words = -(-share // (16 * p.threads))
    again = costs.second_round * (p.team > 1 and words > MOST_READ)
    return words * costs.shared_load + costs.shared + p.columns * share / 128 * costs.terms + again + all_blocks


@functools.lru_cache(maxsize=1024)
def shapes(asked: Asked) -> tuple[tuple[float, Shape], ...]:
    """Shapes that fit on the multiprocessors with the cycles of a step, the fastest first."""
    found = []
    for shape, p, groups in _offered(asked):
        room = asked.processors if p.cluster <= 2 else int(asked.processors * IN_CLUSTERS)
        if p.slices * groups <= room and p.words <= MOST_WORDS and not p.problems():
            found.append((step_cycles(p, groups, asked.batch), shape))
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
    for rows in ROWS if asked.dtype is not torch.float32 else ROWS[:1]:
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
