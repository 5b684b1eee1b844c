"""Shapes of clusters: which hold a layer's weights, and how long a step takes with each, roughly."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.kernels.cuda.recurrent.cluster_programs import ClusterProgram
from tilewise.problems.recurrent.tensors import GATES
from tilewise.solvers.recurrent._cluster_recurrence import ClusterShape, cluster_program
from tilewise.solvers.recurrent._grid_shapes import IN_CLUSTERS

__all__ = ["Wanted", "at_a_time", "cluster_excess", "cluster_shapes"]

CLUSTERS = (16, 8, 4, 2)
ROWS = (4, 8, 16, 32)
"""Batch rows of a cluster. Fewer are sent sooner, and more take fewer clusters, of which the device runs few at a time.

With more than 32 products and sums take longer than the exchange that a cluster saves.
"""
COLUMNS = (8, 4, 2)
MOST_WORDS = 72
"""Weights of a thread in 16 bytes: more do not fit into registers and shared memory."""
MOST_SUMS, MOST_OUTPUTS = 64, 4
"""Registers of a thread with sums, and units of batch rows whose gates it computes: more leave too few for weights."""
# Cycles of what makes up a step, by arithmetic and a hundred measured forward kernels on an H100.
ONCE = 800
"""Until states sent to another block are there, the gates' functions, and a barrier of the block."""
READ = 4
"""For 512 bytes that a warp reads in shared memory."""
SENT = 0.12
"""For a byte that a block sends: it sends some eight in a cycle, which bounds large layers and slices."""
PRODUCT = 13.2
"""For a warp's products with a thread's sixteen bytes of weights."""
LEFT = 1.37 / 128
"""For a byte of weights that registers do not hold."""
GATE = {False: 60, True: 100}
"""For a gate of a thread's unit, in a forward and in a backward."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What shapes are asked for: a kernel of a layer, and a GPU with so many multiprocessors.

    ``precise``: products of fp32 numbers as exact as in fp32.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    batch: int
    directions: int
    precise: bool
    backward: bool
    processors: int


def step_cycles(p: ClusterProgram, rows: int) -> float:
    """Cycles of a step with so many batch rows in a cluster. They rank shapes; no promise is made of them."""
    passes = (6 if p.precise else 2) if p.dtype is torch.float32 else 1
    tiles, size = p.filled // 8, p.dtype.itemsize
    cycles = ONCE + p.words * tiles * passes * PRODUCT / 2
    cycles += (p.words - p.held) * p.threads * 16 * LEFT
    cycles += p.columns * p.chunks * tiles * READ
    cycles += p.outputs * GATES[p.cell] * GATE[p.backward]
    if p.backward:
        sums = p.cluster * p.parts * rows * p.units * 4
        return cycles + sums * (SENT + 1 / 128)
    return cycles + 2 * p.floats * 4 / 128 + p.cluster * rows * p.units * size * SENT


@functools.lru_cache(maxsize=1024)
def cluster_shapes(wanted: Wanted) -> tuple[tuple[float, ClusterShape], ...]:
    """Shapes that hold the weights, with the cycles of a step, the fastest first.

    Clusters that do not fit on the device at a time follow each other, which counts as cycles of a step.
    """
    found = []
    for shape, p in _offered(wanted):
        if p.words <= MOST_WORDS and not p.problems():
            count = -(-wanted.batch // p.rows) * wanted.directions
            found.append(
                (
                    step_cycles(p, min(p.rows, wanted.batch)) * -(-count // at_a_time(p.cluster, wanted.processors)),
                    shape,
                )
            )
    return tuple(sorted(found))


def at_a_time(cluster: int, processors: int) -> int:
    """Clusters that run at a time, roughly: the driver tells of a kernel, when it is compiled."""
    return max(1, int(processors * IN_CLUSTERS) // cluster)


def cluster_excess(wanted: Wanted) -> int:
    """The fewest bytes of weights by which a block's share of them is too large, of all shapes; 0 where one fits."""
    over = [max((p.words - MOST_WORDS) * p.threads * 16, p.excess) for _, p in _offered(wanted)]
    return max(0, min(over, default=0))


def _offered(wanted: Wanted) -> Iterator[tuple[ClusterShape, ClusterProgram]]:
    """Every shape with its program: no larger cluster than has units for each block, no more rows than the batch."""
    for cluster in CLUSTERS:
        for rows in ROWS:
            if rows > ROWS[0] and rows >= 2 * wanted.batch:  # a smaller slice has as many rows that exist
                continue
            for columns in COLUMNS:
                shape = (cluster, rows, columns)
                p = cluster_program(
                    wanted.cell, wanted.hidden, wanted.dtype, shape, wanted.precise, wanted.backward
                )  # fmt: skip
                several = p.units * (cluster - 1) < p.hidden
                few = p.accumulators <= MOST_SUMS and p.outputs <= MOST_OUTPUTS
                if several and few and p.parts <= p.chunks:
                    yield shape, p
