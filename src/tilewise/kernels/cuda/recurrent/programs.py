"""All steps of one recurrent layer in one direction as one launch (``forward.cu``, ``backward.cu``).

The weights stay on the chip for all steps, in registers and shared memory (Diamos et al. 2016, "Persistent RNNs:
stashing recurrent weights on-chip", section 3). Blocks exchange states through the second cache. What has been written
is told from what has not by the words themselves, so there is neither a flag nor a barrier among all blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewise.kernels.cuda.launch import SHARED_LIMIT, block_limits, read_source
from tilewise.kernels.cuda.operands import REALS, constants
from tilewise.kernels.cuda.warpgroup import multiply
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["CELLS", "GATES", "RecurrentProgram", "cell_values"]

CELLS = {"rnn_tanh": 0, "rnn_relu": 1, "gru": 2, "lstm": 3}
"""Numbers of the cells in the C++ source."""
WARPS = 8
MOST_HELD = 112
"""Registers of a thread that hold weights, of 255: with more, others are kept in memory."""
MOST_READ = 8
"""Words of 16 bytes that a thread reads at a time for a warpgroup's products."""


@dataclass(frozen=True, slots=True)
class RecurrentProgram:
    """A kernel for one ``cell`` with ``hidden`` units, a multiple of the ``wide`` numbers in sixteen bytes.

    A block owns ``units`` of them, a multiple of 8, for ``tiles`` tiles of ``rows`` batch rows, a multiple of 16. The
    ``cluster`` blocks of a cluster divide the terms of their sums. Of a block's 8 warps, groups of ``columns`` compute
    different sums; the others add different terms. ``team``: warps that multiply together, 1, or for numbers of 16 bits
    the 4 of a warpgroup (compute capability 9.0); ``columns`` then counts warpgroups. ``backward``: the gradients.
    ``precise``: products of fp32 numbers as exact as in fp32, by three of their TF32 parts.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    units: int
    tiles: int
    cluster: int = 1
    columns: int = 1
    rows: int = 16
    team: int = 1
    backward: bool = False
    precise: bool = True

    @property
    def name(self) -> str:
        """The kernel's function."""
        return "recurrent_backward" if self.backward else "recurrent_forward"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def wide(self) -> int:
        """Numbers in sixteen bytes."""
        return 16 // self.dtype.itemsize

    @property
    def slices(self) -> int:
        """Blocks that share the units: whole clusters."""
        return -(-self.hidden // (self.units * self.cluster)) * self.cluster

    @property
    def depth(self) -> int:
        """Terms of a sum."""
        return self.hidden * (GATES[self.cell] if self.backward else 1)

    @property
    def sums(self) -> int:
        """Sums of a batch row that a block gets."""
        return self.units * (1 if self.backward else GATES[self.cell])

    @property
    def column_tiles(self) -> int:
        """Tiles of 8 columns of a block."""
        return -(-self.sums // 8)

    @property
    def chunks(self) -> int:
        """Chunks of the terms that a block reads, 64 bytes of each row."""
        return -(-self.depth // (4 * self.wide * self.cluster))

    @property
    def parts(self) -> int:
        """Groups of warps or warpgroups that add different terms."""
        return WARPS // self.team // self.columns

    @property
    def words(self) -> int:
        """Weights that a thread holds, in 16 bytes."""
        if self.team > 1:
            return self.matrix_tiles * 2 * self.chunks // self.parts
        return -(-self.cluster * self.column_tiles // self.columns) * -(-self.chunks // self.parts)

    @property
    def held(self) -> int:
        """Those that stay in registers."""
        return min(self.words, MOST_HELD // 4)

    @property
    def matrix_tiles(self) -> int:
        """Tiles of 64 columns that a warpgroup multiplies."""
        return -(-self.cluster * self.column_tiles // (8 * self.columns))

    @property
    def stride(self) -> int:
        """Floats of a tile of 8 columns of sums."""
        if self.team > 1:
            return 8 * self.rows
        return 8 * self.rows + (16 if self.units % 32 == 16 and self.sums != 4 * self.units else 8)

    @property
    def terms(self) -> int:
        """Words of 16 bytes for a tile's terms in shared memory."""
        if self.team > 1:
            return self.chunks * 4 * (self.rows + 2)
        return 0 if self.columns == 1 else self.chunks * 4 * self.rows

    @property
    def tile_sums(self) -> int:
        """Floats of a tile's sums in shared memory."""
        return self.cluster * self.parts * self.column_tiles * self.stride

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: two tiles' sums, a tile's terms, weights that registers do not hold."""
        barriers = 16 if self.cluster > 1 else 0
        return barriers + 8 * self.tile_sums + 16 * self.terms + (self.words - self.held) * self.threads * 16

    @property
    def excess(self) -> int:
        """Bytes of shared memory beyond what a block can have, 0 where it fits."""
        return max(0, self.shared - SHARED_LIMIT)

    def problems(self) -> list[str]:
        """Reasons why it cannot run; empty where it can."""
        reasons = []
        if self.hidden % self.wide:
            reasons.append(f"hidden={self.hidden}: not a multiple of {self.wide}, the numbers in 16 bytes")
        if self.team > 1 and self.dtype is torch.float32:
            reasons.append(f"dtype={self.dtype}: warpgroups multiply numbers of 16 bits")
        if self.excess:
            reasons.append(f"weights of {self.units} units are {self.excess} bytes more than a multiprocessor holds")
        return reasons or block_limits(f"units={self.units}", self.threads, self.shared)

    def source(self) -> str:
        """The CUDA C++; :func:`~tilewise.kernels.cuda.launch.compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


def cell_values(cell: str, dtype: torch.dtype, precise: bool) -> dict[str, int | bool]:
    """The constants by which the C++ source knows a cell, the type of its numbers and how exact products are."""
    return {
        "CELL": CELLS[cell], "TANH": 0, "RELU": 1, "GRU": 2, "LSTM": 3, "GATES": GATES[cell], "REAL": REALS[dtype],
        "PRECISE": precise,
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def _source(p: RecurrentProgram) -> str:
    """The CUDA C++ of a program."""
    values = {
        **cell_values(p.cell, p.dtype, p.precise), "HIDDEN": p.hidden, "UNITS": p.units, "TILES": p.tiles,
        "SLICES": p.slices, "CLUSTER": p.cluster, "WC": p.columns, "WK": p.parts, "DEPTH": p.depth,
        "COLUMNS": p.sums, "KEPT": p.held, "HIGH": p.rows // 16, "THREADS": p.threads, "TEAM": 32 * p.team,
        "SUMS": p.tile_sums, "TERMS": p.terms, "STRIDE": p.stride, "MOST_READ": MOST_READ,
    }  # fmt: skip
    clusters = f"__cluster_dims__({p.cluster}, 1, 1) " if p.cluster > 1 else ""
    texts = [
        constants(values), f"#define BOUNDS {clusters}__launch_bounds__({p.threads}, 1)",
        read_source("barriers.cu"), read_source("recurrent/units.cu"), read_source("recurrent/exchange.cu"),
        *(_of_warpgroups(p) if p.team > 1 else (read_source("recurrent/slices.cu"),)),
        read_source(f"recurrent/{'backward' if p.backward else 'forward'}.cu"),
    ]  # fmt: skip
    return "\n".join(texts)


def _of_warpgroups(p: RecurrentProgram) -> tuple[str, ...]:
    """Products by warpgroups, with the instructions that they need."""
    numbers = "bf16" if p.dtype is torch.bfloat16 else "f16"
    held, shared = (multiply(f"multiply_{name}", p.rows, numbers, name == "held") for name in ("held", "shared"))
    return read_source("matrix_units.cu"), held, shared, read_source("recurrent/warpgroups.cu")
