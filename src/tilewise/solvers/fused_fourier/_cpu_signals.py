"""Depthwise convolutions of signals on a CPU: configs, workspace and the run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import Signals, between, packed, smooth, twiddles
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Prepare, Run
from tilewise.solvers.common.bases import placement
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import byte_strides, lanes_for
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.fused_fourier import _cpu as cpu
from tilewise.solvers.fused_fourier._cpu import MOST_SCRATCH, Units, forms, scratch, sizes_of, worked_on

__all__ = ["bind", "configs", "constant", "prepare", "too_large", "transformed", "workspace"]

MOST_BASES = 3
MOST_TILES = 64
"""Most tiles of a signal; shorter ones gain nothing, as the kernel's length sets the basis."""
MOVES = 6.0
"""Time of reading, writing and multiplying, in doublings of the transform."""
SPILLED = 1.5
"""How much longer work takes that does not stay in a core's cache."""


def too_large(p: ConvProblem) -> list[str]:
    """A reason where the kernel's spectrum does not fit into a core's cache."""
    if _bases(p):
        return []
    (axis,) = p.axes
    return [f"takes kernels whose spectra fit {MOST_SCRATCH} bytes for each thread, not one that spans {axis.reach}"]


def _results(p: ConvProblem) -> int:
    """Elements that are divided into tiles: of the result, in a weight gradient of the output gradient."""
    (axis,) = p.axes
    return axis.size if p.pass_ is Pass.DGRAD else axis.out


def _apart(p: ConvProblem) -> int:
    """Places in the basis from one element of :func:`_results` to the next."""
    return 1 if p.pass_ is Pass.DGRAD else p.axes[0].stride


def _tiles(p: ConvProblem, n: int) -> int:
    """Tiles of a signal in a basis of ``n``."""
    return -(-_results(p) // ((n - p.axes[0].reach) // _apart(p) + 1))


@functools.lru_cache(maxsize=1024)
def _bases(p: ConvProblem) -> tuple[int, ...]:
    """The sizes with the least work: each just holds a window of one of some number of equal tiles."""
    (axis,) = p.axes
    sizes = set()
    for tiles in range(1, MOST_TILES + 1):
        window = (-(-_results(p) // tiles) - 1) * _apart(p) + axis.reach
        sizes.add(next(n for n in itertools.count(max(2, window)) if smooth(n)))
    touched = {n: worked_on(p, Signals(n, lanes_for(p.in_channels))) for n in sizes}

    def effort(n: int) -> float:
        pairs = -(-_tiles(p, n) // 2)
        return pairs * n * (math.log2(n) + MOVES) * (SPILLED if touched[n] > CPU_CACHE else 1.0)

    fitting = [n for n in sizes if touched[n] <= MOST_SCRATCH]
    return tuple(sorted(fitting, key=effort)[:MOST_BASES])


def configs(p: ConvProblem) -> Iterable[Config]:
    """Configs with the best bases, each with its lanes, threads and shares of all tiles."""
    return [Config(basis=(n,), **c) for n in _bases(p) for c in forms(p, p.batch * -(-_tiles(p, n) // 2))]


def _sizes(c: Config) -> Signals:
    """The kernel's sizes for a config."""
    return sizes_of(c, Signals, 1)


def workspace(p: ConvProblem, c: Config) -> int:
    """Bytes of every thread's spectra."""
    return integer(c, "threads") * scratch(p, _sizes(c))


def constant(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are kept."""
    return cpu.constant(p, _sizes(c))


def transformed(p: ConvProblem, c: Config) -> int:
    """Signals times points, over all forward and inverse transforms. Two tiles make one complex signal."""
    n = _sizes(c).n
    pairs = -(-_tiles(p, n) // 2)
    return 2 * n * p.in_channels * (2 * p.batch * pairs + cpu.filter_transforms(p, c))


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``ValueError`` for a config that does not fit the problem."""
    tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
    return _units(p, c, {role: byte_strides(t) for role, t in tensors}).run


def prepare(p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
    """What transforms filters. Raises ``ValueError`` as :func:`bind` does."""
    return _units(p, c, {"x": [0] * 3, "w": byte_strides(weight), "y": [0] * 3}, prepares=True).prepare


def _units(p: ConvProblem, c: Config, apart: Mapping[str, list[int]], prepares: bool = False) -> Units:
    """The kernel for tensors with byte strides ``apart``."""
    sizes, (axis,) = _sizes(c), p.axes
    n, reach = sizes.n, axis.reach
    if n < reach:
        raise ValueError(f"basis={n}: must be at least {reach}, better twice that")
    tiles = _tiles(p, n)
    image, result = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
    # A gradient's window begins where the last tap reads, so that results begin at 0 as in the other passes.
    begin, tap = (axis.before - reach + 1, (1 - reach) % n) if p.pass_ is Pass.DGRAD else (-axis.before, 0)
    read = placement(axis, image)  # no further: what no output reads may be NaN
    numbers = dict(enumerate((n, sizes.block, sizes.apart, packed(sizes.block)), 8))
    numbers |= dict(enumerate((
        tiles, -(-_results(p) // tiles), *apart[image], read.start + read.count, begin, apart["w"][0], apart["w"][2],
        axis.kernel, tap, *apart[result], p.shape(result)[2],
    ), 15))  # fmt: skip
    numbers |= dict(enumerate((placement(axis, role).step for role in (image, "w", result)), 38))
    tables = {
        12: between(sizes.radix, sizes.block),
        13: twiddles(sizes.block),
        14: np.array([1 / n], dtype=np.float32),
    }
    return Units(p, c, sizes, numbers, tables, np.zeros(1, np.int64), prepares=prepares)
