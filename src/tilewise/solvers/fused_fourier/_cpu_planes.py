"""Depthwise convolutions of planes on a CPU: configs, workspace and the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import Planes, factors, order, packed, smooth, twiddles
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Prepare, Run
from tilewise.solvers.common.bases import least_whole, placement
from tilewise.solvers.common.cpu_run import byte_strides, lanes_for
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.fused_fourier import _cpu as cpu
from tilewise.solvers.fused_fourier._cpu import MOST_SCRATCH, Units, forms, scratch, sizes_of, worked_on

__all__ = ["bind", "configs", "constant", "prepare", "too_large", "transformed", "workspace"]

MOST_BASES = 2
NEAR = 1.1
"""A basis is still measured with this many times the work of the best."""


def too_large(p: ConvProblem) -> list[str]:
    """A reason where planes do not fit into a core's cache."""
    size = worked_on(p, Planes(*_bases(p)[0], lanes_for(p.in_channels)))
    return [f"works on {size} bytes in each thread, at most {MOST_SCRATCH}"] if size > MOST_SCRATCH else []


def _effort(basis: tuple[int, ...]) -> float:
    """Work of transforms of one basis: passes over all points, and the points."""
    return math.prod(basis) * (1 + sum(len(factors(n)) for n in basis)) * math.log2(math.prod(basis))


def _bases(p: ConvProblem) -> list[tuple[int, int]]:
    """The least sizes in which nothing wraps onto what is kept, the best first."""
    axes = []
    for axis in p.axes:
        sizes = (n for n in itertools.count(max(2, least_whole(axis, p.pass_))) if smooth(n))
        axes.append(list(itertools.islice(sizes, 2)))
    ranked = sorted(itertools.product(*axes), key=_effort)
    near = [basis for basis in ranked if _effort(basis) <= NEAR * _effort(ranked[0])]
    return [(basis[0], basis[1]) for basis in near[:MOST_BASES]]


def configs(p: ConvProblem) -> Iterable[Config]:
    """Configs with the best bases, each with its lanes, threads and shares of the batch."""
    return [Config(basis=basis, **c) for basis in _bases(p) for c in forms(p, p.batch)]


def _sizes(c: Config) -> Planes:
    """The kernel's sizes for a config."""
    return sizes_of(c, Planes, 2)


def workspace(p: ConvProblem, c: Config) -> int:
    """Bytes of every thread's spectra."""
    return integer(c, "threads") * scratch(p, _sizes(c))


def constant(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are kept."""
    return cpu.constant(p, _sizes(c))


def transformed(p: ConvProblem, c: Config) -> int:
    """Planes times points, over all forward and inverse transforms."""
    sizes = _sizes(c)
    return sizes.n1 * sizes.n2 * p.in_channels * (2 * p.batch + cpu.filter_transforms(p, c))


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``ValueError`` for a config that does not fit the problem."""
    tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
    return _units(p, c, {role: byte_strides(t) for role, t in tensors}).run


def prepare(p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
    """What transforms filters. Raises ``ValueError`` as :func:`bind` does."""
    return _units(p, c, {"x": [0] * 4, "w": byte_strides(weight), "y": [0] * 4}, prepares=True).prepare


def _units(p: ConvProblem, c: Config, apart: Mapping[str, list[int]], prepares: bool = False) -> Units:
    """The kernel for tensors with byte strides ``apart``."""
    sizes = _sizes(c)
    basis = sizes.n1, sizes.n2
    if any(n < least_whole(axis, p.pass_) for n, axis in zip(basis, p.axes, strict=True)):
        raise ValueError(f"basis={basis}: must be at least {tuple(least_whole(axis, p.pass_) for axis in p.axes)}")
    image, result = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
    # An image that is cropped begins later, which the place of the filter's first tap makes up for.
    places = [placement(axis, "x") for axis in p.axes]
    cropped = [0, 0] if p.pass_ is Pass.DGRAD else [place.start for place in places]
    leads = [axis.before for axis in p.axes] if p.pass_ is Pass.DGRAD else [place.lead for place in places]
    counts = {
        "x": p.shape("x")[2:] if p.pass_ is Pass.DGRAD else [place.count for place in places],
        "w": p.shape("w")[2:],
        "y": p.shape("y")[2:],
    }
    numbers = dict(enumerate((
        sizes.n1, sizes.n2, 8 * sizes.lanes * sizes.column, packed(sizes.n1), packed(sizes.n2),
    ), 8))  # fmt: skip
    numbers |= dict(enumerate((
        *apart[image], 0, *apart["w"][:1], *apart["w"][2:], *apart[result],
        *counts[image], *counts["w"], *counts[result],
        *((-lead) % n for lead, n in zip(leads, basis, strict=True)),
    ), 16))  # fmt: skip
    steps = [placement(axis, role).step for role in (image, "w", result) for axis in p.axes]
    numbers |= dict(enumerate(steps, 38))
    scale = np.array([1 / (4 * sizes.n1 * sizes.n2)], dtype=np.float32)
    tables = {13: twiddles(sizes.n1), 14: twiddles(sizes.n2), 15: scale}
    row = order(sizes.n2) * 8 * sizes.lanes
    offset = sum(start * stride for start, stride in zip(cropped, apart[image][2:], strict=True))
    return Units(p, c, sizes, numbers, tables, np.append(row, row[0]), offset, prepares)
