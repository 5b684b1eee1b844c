"""Convolution as one matrix product over tensors as they lie, in fp32 accuracy on fp16 matrix units."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.split_products import refused
from tilewise.solvers.common.tiles import PROCESSORS, busy, integer, splits_that_fill
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.common.views import View
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._direct import EVEN, Layout, Tile, launches

__all__ = ["DirectGemm"]

MOST = 2**31 - 2**20
"""Most places, and most elements of an image or the filter: kernels count them in 32 bits."""
MOST_SPLITS = 128
MOST_OFFERED = 2
NEAR = 0.85
"""Tiles whose rate relative to the best is lower are not offered."""
RATES = {"one": 0.9, "several": 1.8, "gradient": 0.2}
"""Rates of full tiles relative to cuBLAS's in fp32: with one tap, with several, and of a weight gradient."""
EVEN_GRADIENT = 0.6
"""The rate of a weight gradient whose places are read in contiguous runs."""
MOST_SUMS = 32
"""Most sums per thread where images are not contiguous planes or results are added to, for lack of registers."""
FEW = 16
"""Most channels of a group of which several taps are gathered; with more, solvers that pack operands are faster."""

# places x channels x depth, warps, stages, and their rate beside the best. Of filter gradients depth is channels of the
# image, and places are summed.
TILES = {
    "one": (
        (Tile(128, 128, 32, 4, 3), 1.0), (Tile(256, 128, 32, 8, 3), 0.95), (Tile(128, 64, 32, 4, 3), 0.75),
        (Tile(64, 64, 32, 4, 3), 0.6), (Tile(64, 32, 32, 4, 3), 0.4), (Tile(64, 16, 32, 4, 3), 0.25),
    ),
    "several": (
        (Tile(64, 64, 32, 4, 3), 1.0), (Tile(128, 64, 32, 4, 3), 0.8), (Tile(64, 32, 32, 4, 3), 0.55),
        (Tile(64, 16, 32, 4, 3), 0.3),
    ),
    "gradient": (
        (Tile(32, 128, 128, 8, 3), 1.0), (Tile(32, 64, 128, 8, 3), 1.0),
        (Tile(32, 64, 64, 4, 3), 0.9),
    ),
}  # fmt: skip


class DirectGemm(ConvSolver):
    """Implicit matrix product that packs nothing but the filter (Chetlur et al. 2014, section 3).

    Programs gather the numbers of their places and taps from the tensors, scale them by a power of two, split them into
    two fp16 parts each and sum three products of these in fp32 (Ootomo and Yokota 2022, section 3): as accurate as fp32
    arithmetic, values below 2^-17 of their image's largest (of a filter's gradient: their tensor's) keep an absolute
    error of 2^-39 of it. Meant for pointwise kernels, which read each number once, and for forward passes of few
    channels, which others pad. Memory goes to the filter's parts, or a filter gradient's sums in ``splits`` shares of
    the places.
    """

    name, version = "direct_gemm", 4
    devices = frozenset({"cuda"})
    dtypes = frozenset({"fp32"})
    compiles = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    accumulates = True
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, many groups, TF32, several taps of many channels, too many elements for 32 bits."""
        reasons = triton_missing()
        reasons += refused(p)
        read = (p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels) // p.groups
        if p.pass_ is Pass.WGRAD and (p.taps > 1 or any(axis.before or axis.after for axis in p.axes)):
            reasons.append("sums a filter's gradient of one tap without padding")
        elif p.taps > 1 and read > FEW:
            reasons.append(f"gathers several taps of at most {FEW} channels in a group, not {read}")
        places = p.batch * max(math.prod(axis.size for axis in p.axes), math.prod(axis.out for axis in p.axes))
        largest = max(math.prod(p.shape(role)[role != "w" :]) for role in ROLES)
        for what, number in (("places", places), ("elements in an image or the filter", largest)):
            if number > MOST:
                reasons.append(f"counts to {MOST}; there are {number} {what}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tiles that fill best, weighted by the rate that they usually reach."""
        rated = []
        for tile, rate in tiles(p):
            c = _config(p, tile, _splits(p, tile))
            rated.append((rate * _filled(_layout(p, c)), c))
        rated.sort(key=lambda entry: -entry[0])
        return [c for score, c in rated[:MOST_OFFERED] if score >= NEAR * rated[0][0]]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with a weight gradient in as many partial sums as fit into ``ceiling`` bytes."""
        if only is not None:
            return [(c, _layout(p, c).workspace) for c in only if _fits(p, c)]
        fitting = {_within(p, c, ceiling): None for c in self.configs(p)}
        return [(c, _layout(p, c).workspace) for c in fitting]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the filter's parts or of partial sums, and of exponents."""
        return _layout(p, c).workspace

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic on tiles as they fill, after a search for peaks over all operands."""
        layout = _layout(p, c)
        rate = next((rate for entry, rate in TILES[_kind(p)] if entry == layout.tile), 0.5) * _filled(layout)
        searched = sum(p.nbytes(role) for role in p.operands if role != "w")
        sweeps = math.prod(len(entry) for entry in layout.sweeps)
        kernels = p.groups * (4 if p.pass_ is Pass.WGRAD else 1 + 2 * sweeps)
        return Cost(p.flops, p.bytes + 2 * layout.workspace, kernels, efficiency=_rate(p) * rate, apart=searched)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(_layout(p, c), *map(View.of, (a, b, out))), a.device)


def tiles(p: ConvProblem) -> Iterator[tuple[Tile, float]]:
    """Tiles whose sums fit into registers, with their rates relative to the best."""
    gradient = p.pass_ is Pass.WGRAD
    reads = p.accumulate or p.residual  # results or what is added to them, which takes registers too
    free = p.layout(p.operands[0]) == "contiguous" and (gradient or not reads)
    for tile, rate in TILES[_kind(p)]:
        across = tile.depth if gradient else tile.places
        if free or across * tile.channels <= MOST_SUMS * 32 * tile.warps:
            yield tile, rate


def _kind(p: ConvProblem) -> str:
    """The key of ``p`` in :data:`TILES` and :data:`RATES`."""
    return "gradient" if p.pass_ is Pass.WGRAD else "one" if p.taps == 1 else "several"


def _rate(p: ConvProblem) -> float:
    """Rate of full tiles on ``p``, relative to cuBLAS's in fp32."""
    if _kind(p) != "gradient":
        return RATES[_kind(p)]
    even = math.prod(axis.out for axis in p.axes) % EVEN == 0 and all(axis.stride == 1 for axis in p.axes)
    return EVEN_GRADIENT if even and p.layouts == ("contiguous",) * 3 else RATES["gradient"]


def _config(p: ConvProblem, tile: Tile, splits: int) -> Config:
    """The config of a tile."""
    base = Config(tile=(tile.places, tile.channels, tile.depth), warps=tile.warps, stages=tile.stages)
    return Config(**base, splits=splits) if p.pass_ is Pass.WGRAD else base


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    names = {"tile", "warps", "stages", *(["splits"] if p.pass_ is Pass.WGRAD else [])}
    try:
        return set(c) == names and _layout(p, c).splits <= MOST_SPLITS
    except (KeyError, ValueError):
        return False


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    edges = c["tile"]
    if not isinstance(edges, tuple) or len(edges) != 3 or any(n not in (16, 32, 64, 128, 256) for n in edges):
        raise ValueError(f"tile={edges!r}: powers of two from 16 to 256 for places, channels and depth would do")
    return Tile(*edges, warps=integer(c, "warps"), stages=integer(c, "stages"))


@functools.lru_cache(maxsize=4096)
def _layout(p: ConvProblem, c: Config) -> Layout:
    """The layout of a config, which is worked out once."""
    return Layout(p, _tile(c), integer(c, "splits", 1))


def _within(p: ConvProblem, c: Config, ceiling: int | None) -> Config:
    """``c``, with fewer partial sums where those take more than ``ceiling`` bytes."""
    if ceiling is None or p.pass_ is not Pass.WGRAD:
        return c
    unsplit = _layout(p, Config(**{**c, "splits": 1}))
    sums = 4 * unsplit.products * unsplit.outof
    room = 1 + max(0, ceiling - unsplit.workspace) // sums
    return Config(**{**c, "splits": min(integer(c, "splits"), room)})


def _shape(layout: Layout) -> tuple[int, int]:
    """Rows and columns of the product. A weight gradient has no rows of places, which are summed."""
    rows = layout.products if layout.p.pass_ is Pass.WGRAD else layout.places
    return rows, layout.written


def _programs(layout: Layout) -> int:
    """Programs of the product, one for each tile."""
    rows, columns = _shape(layout)
    block = layout.tile.depth if layout.p.pass_ is Pass.WGRAD else layout.tile.places
    return -(-rows // block) * -(-columns // layout.tile.channels)


def _filled(layout: Layout) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    p, tile = layout.p, layout.tile
    rows, columns = _shape(layout)
    gradient = p.pass_ is Pass.WGRAD
    programs, block = _programs(layout), tile.depth if gradient else tile.places
    share = rows * columns / (programs * block * tile.channels)
    if not gradient:
        taps = math.prod(sum(sweep.taps for sweep in sweeps) / len(sweeps) for sweeps in layout.sweeps)
        share *= layout.read * taps / max(layout.row(math.ceil(layout.read * taps)), 1)
    return share * busy(programs * (layout.splits if gradient else 1))


def _splits(p: ConvProblem, tile: Tile) -> int:
    """How many partial sums of a weight gradient fill the multiprocessors in whole waves."""
    if p.pass_ is not Pass.WGRAD:
        return 1
    layout = Layout(p, tile)
    programs = _programs(layout)
    most = max(1, min(MOST_SPLITS, layout.places // (8 * tile.places), 4 * PROCESSORS // programs))
    return splits_that_fill(most, layout.places, lambda n: busy(n * programs))
