"""All steps of one recurrent layer in all its directions, in clusters of blocks (``cluster_forward.cu`` and beside).

The weights stay on the chip for all steps, in registers and shared memory (Diamos et al. 2016, "Persistent RNNs:
stashing recurrent weights on-chip", section 3). Each direction and each slice of the batch has a cluster of its own,
whose blocks exchange states through their shared memory alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tilewise.kernels.cuda.launch import SHARED_LIMIT, block_limits, read_source
from tilewise.kernels.cuda.operands import constants
from tilewise.kernels.cuda.recurrent.programs import MOST_HELD, WARPS, cell_values
from tilewise.problems.recurrent.tensors import GATES

__all__ = ["ClusterProgram"]

FREE = 154
"""Registers of a thread, of 255, for weights, sums and a step's data. Parts of fp32 numbers take some of them."""


@dataclass(frozen=True, slots=True)
class ClusterProgram:
    """A kernel for one ``cell`` with ``hidden`` units, a multiple of the ``wide`` numbers in sixteen bytes.

    A cluster of ``cluster`` blocks, 2 or more, has all units for ``rows`` batch rows, 4 or a multiple of 8. Of the 8
    warps of a block ``columns`` groups compute different sums; the others add different terms. ``backward``: the
    gradients. ``precise``: products of fp32 numbers as exact as in fp32, by three of their TF32 parts. ``wave``: all
    layers at a time, in one direction.
    """

    cell: str
    hidden: int
    dtype: torch.dtype
    cluster: int
    rows: int
    columns: int = WARPS
    backward: bool = False
    precise: bool = True
    wave: bool = False

    @property
    def name(self) -> str:
        """The kernel's function."""
        if self.wave:
            return "cluster_wave_back" if self.backward else "cluster_wave"
        return "cluster_backward" if self.backward else "cluster_forward"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def wide(self) -> int:
        """Numbers in sixteen bytes."""
        return 16 // self.dtype.itemsize

    @property
    def units(self) -> int:
        """Units of a block, a multiple of 8."""
        return -(-self.hidden // (8 * self.cluster)) * 8

    @property
    def filled(self) -> int:
        """Batch rows with those that fill tiles of 8."""
        return -(-self.rows // 8) * 8

    @property
    def depth(self) -> int:
        """Terms of the sums that a block multiplies: all states, or the gradients of its own units' gates."""
        return GATES[self.cell] * self.units if self.backward else self.hidden

    @property
    def sums(self) -> int:
        """Sums of a batch row that a block computes: of its own units' gates, or terms of every unit's."""
        return self.cluster * self.units if self.backward else GATES[self.cell] * self.units

    @property
    def parts(self) -> int:
        """Groups of warps that add different terms."""
        return WARPS // self.columns

    @property
    def tiles(self) -> int:
        """Tiles of 16 sums of a warp."""
        return -(-self.sums // (16 * self.columns))

    @property
    def chunks(self) -> int:
        """Chunks of the terms, 64 bytes of each row."""
        return -(-self.depth // (4 * self.wide))

    @property
    def words(self) -> int:
        """Weights that a thread holds, in 16 bytes."""
        return 2 * self.tiles * -(-self.chunks // self.parts)

    @property
    def outputs(self) -> int:
        """Units of batch rows whose gates a thread computes."""
        return -(-self.rows * self.units // self.threads)

    @property
    def accumulators(self) -> int:
        """Registers of a thread with sums: several of a tile where few tiles would wait for each other."""
        tiles = self.tiles * self.filled // 8
        return 4 * tiles * (1 if tiles >= 4 else 2 if tiles >= 2 else 4)

    @property
    def held(self) -> int:
        """Weights that stay in registers: as many as the compiler finds room for beside all else."""
        exact = self.dtype is torch.float32
        of_outputs = self.outputs * (GATES[self.cell] * self.dtype.itemsize // 4 + (6 if self.backward else 4))
        room = (FREE - (16 if exact else 0)) - self.accumulators - of_outputs
        return max(0, min(self.words, room // 4, MOST_HELD // 4))

    @property
    def floats(self) -> int:
        """Numbers of sums in a block's shared memory: those of its groups of warps, or of all blocks in two turns."""
        if self.backward:
            return 2 * self.cluster * self.parts * self.filled * (self.units + 4)
        return self.parts * self.filled * (16 * -(-self.sums // 16) + 4)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: barriers, two turns' terms, sums, and what registers do not hold."""
        terms = 2 * self.chunks * self.filled * 64
        return 16 + terms + 4 * self.floats + (self.words - self.held) * self.threads * 16

    @property
    def excess(self) -> int:
        """Bytes of shared memory beyond what a block can have, 0 where it fits."""
        return max(0, self.shared - SHARED_LIMIT)

    def problems(self) -> list[str]:
        """Reasons why it cannot run; empty where it can."""
        reasons = []
        if self.hidden % self.wide:
            reasons.append(f"hidden={self.hidden}: not a multiple of {self.wide}, the numbers in 16 bytes")
        if self.units * (self.cluster - 1) >= self.hidden:
            reasons.append(f"cluster={self.cluster}: its last block has none of {self.hidden} units")
        if self.excess:
            reasons.append(f"weights of {self.units} units are {self.excess} bytes more than a multiprocessor holds")
        return reasons or block_limits(f"cluster={self.cluster}", self.threads, self.shared)

    def source(self) -> str:
        """The CUDA C++; :func:`~tilewise.kernels.cuda.launch.compile_cubin` puts ``ptx.cu`` before it."""
        return _source(self)


@functools.lru_cache(maxsize=256)
def _source(p: ClusterProgram) -> str:
    """The CUDA C++ of a program."""
    values = {
        **cell_values(p.cell, p.dtype, p.precise), "HIDDEN": p.hidden, "UNITS": p.units, "SLICE": p.rows,
        "CLUSTER": p.cluster, "WC": p.columns, "WK": p.parts, "DEPTH": p.depth, "COLUMNS": p.sums, "KEPT": p.held,
        "ROWS": p.filled, "SUMS": p.floats,
    }  # fmt: skip
    texts = [
        constants(values),
        f"#define BOUNDS __cluster_dims__({p.cluster}, 1, 1) __launch_bounds__({p.threads}, 1)",
        read_source("barriers.cu"), read_source("recurrent/units.cu"), read_source("recurrent/cluster.cu"),
        read_source(f"recurrent/{'cluster_back_steps' if p.backward else 'cluster_steps'}.cu"),
        read_source(f"recurrent/{p.name}.cu"),
    ]  # fmt: skip
    return "\n".join(texts)
