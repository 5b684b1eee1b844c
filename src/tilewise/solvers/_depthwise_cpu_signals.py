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
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import _depthwise_cpu as cpu
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import MOST_SCRATCH, Units, forms, lanes, scratch, sizes_of, strides, worked_on
from tilewise.solvers._fft_sizes import placement
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import Prepare, Run

__all__ = ["bind", "configs", "constant", "prepare", "too_large", "transformed", "workspace"]

MOST_BASES = 3
MOST_TILES = 64
"""Tiles of a signal beyond which shorter ones gain nothing: there the kernel's length sets the basis."""
MOVES = 6.0
"""What the ways in and out and the product take beside each doubling of the transform."""
SPILLED = 1.5
"""How much longer it takes what does not stay in a core's cache."""


def too_large(p: ConvProblem) -> list[str]:
    """Reasons against kernels whose spectra do not fit a core's cache."""
    if _bases(p):
        return []
    (axis,) = p.axes
    return [f"takes kernels whose spectra fit {MOST_SCRATCH} bytes for each thread, not one that spans {axis.reach}"]


def _results(p: ConvProblem) -> int:
    """Elements that tiles cut: of the result, or for filter gradients of the output's gradient."""
    (axis,) = p.axes
    return axis.size if p.pass_ is Pass.DGRAD else axis.out


def _apart(p: ConvProblem) -> int:
    """Places from one of :func:`_results` to the next in the basis."""
    return 1 if p.pass_ is Pass.DGRAD else p.axes[0].stride


def _tiles(p: ConvProblem, n: int) -> int:
    """Tiles in a basis of n: what of a window is no kernel's rim."""
    return -(-_results(p) // ((n - p.axes[0].reach) // _apart(p) + 1))


@functools.lru_cache(maxsize=1024)
def _bases(p: ConvProblem) -> tuple[int, ...]:
    """Sizes with the least work: those that just hold a window of one tile of some number of equal ones."""
    (axis,) = p.axes
    found = set()
    for tiles in range(1, MOST_TILES + 1):
        window = (-(-_results(p) // tiles) - 1) * _apart(p) + axis.reach
        found.add(next(n for n in itertools.count(max(2, window)) if smooth(n)))
    touched = {n: worked_on(p, Signals(n, lanes(p))) for n in found}

    def effort(n: int) -> float:
        pairs = -(-_tiles(p, n) // 2)
        return pairs * n * (math.log2(n) + MOVES) * (SPILLED if touched[n] > CPU_CACHE else 1.0)

    fitting = [n for n in found if touched[n] <= MOST_SCRATCH]
    return tuple(sorted(fitting, key=effort)[:MOST_BASES])


def configs(p: ConvProblem) -> Iterable[Config]:
    """Bases, and lanes with threads and shares of all tiles."""
    return [Config(basis=(n,), **c) for n in _bases(p) for c in forms(p, p.batch * -(-_tiles(p, n) // 2))]


def _sizes(c: Config) -> Signals:
    return sizes_of(c, Signals, 1)


def workspace(p: ConvProblem, c: Config) -> int:
    """Spectra of every thread."""
    return integer(c, "threads") * scratch(p, _sizes(c))


def constant(p: ConvProblem, c: Config) -> int:
    """Spectra of filters that are kept."""
    return cpu.constant(p, _sizes(c))


def transformed(p: ConvProblem, c: Config) -> int:
    """Signals times points: of every transform, either way. Two tiles are one complex signal."""
    n = _sizes(c).n
    pairs = -(-_tiles(p, n) // 2)
    return 2 * n * p.in_channels * (2 * p.batch * pairs + cpu.filter_transforms(p, c))


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``ValueError`` for a config that is none of the problem's."""
    tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
    return _units(p, c, {role: strides(t) for role, t in tensors}).run


def prepare(p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
    """What transforms filters. Raises ``ValueError`` as :func:`bind` does."""
    return _units(p, c, {"x": [0] * 3, "w": strides(weight), "y": [0] * 3}, prepares=True).prepare


def _units(p: ConvProblem, c: Config, apart: Mapping[str, list[int]], prepares: bool = False) -> Units:
    """The kernel, with the bytes between each tensor's neighbours."""
    sizes, (axis,) = _sizes(c), p.axes
    n, reach = sizes.n, axis.reach
    if n < reach:
        raise ValueError(f"basis={n}: must be at least {reach}, better twice that")
    tiles = _tiles(p, n)
    image, other = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
    # A gradient's window begins where the last tap reads, so that results begin at 0 as in the other passes.
    begin, tap = (axis.before - reach + 1, (1 - reach) % n) if p.pass_ is Pass.DGRAD else (-axis.before, 0)
    read = placement(axis, image)  # no further: what no output reads may be NaN
    numbers = dict(enumerate((n, sizes.block, sizes.apart, packed(sizes.block)), 8))
    numbers |= dict(enumerate((
        tiles, -(-_results(p) // tiles), *apart[image], read.start + read.count, begin, apart["w"][0], apart["w"][2],
        axis.kernel, tap, *apart[other], p.shape(other)[2],
    ), 15))  # fmt: skip
    numbers |= dict(enumerate((placement(axis, role).step for role in (image, "w", other)), 38))
    tables = {
        12: between(sizes.radix, sizes.block),
        13: twiddles(sizes.block),
        14: np.array([1 / n], dtype=np.float32),
    }
    return Units(p, c, sizes, numbers, tables, np.zeros(1, np.int64), prepares=prepares)
