"""Convolution with fewer products along one axis, in fp32 accuracy on fp16 matrix units."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, Solver, SolverUnavailable
from tilewise.solvers.common.split_products import Tile, refused
from tilewise.solvers.common.tiles import PROCESSORS, first_that, integer, splits_that_fill
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.common.views import View
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.winograd._gemm import MOST_TAPS, TilesLayout, launches, saving_axis

__all__ = ["WinogradGemm"]

MOST_ELEMENTS = 2**31 - 2**20
"""Most elements of a packed tensor: kernels count them in 32 bits."""
MOST_POINTS = 8
"""Most points of a tile: with ten fp32 is too inaccurate."""
NEAR = 8
"""How many numbers of blocks are compared, beginning with the fewest."""
LAUNCHING = 600 * 64 * 64
"""Time to launch one block's kernels one after the other, in products of a program."""
ADDING = 200
"""Time to add one number to a result in memory, in products."""
ALONE = 0.9
"""Time of a program alone on a multiprocessor, relative to one that shares it with another."""
OUTPUTS = (4, 2)
"""Results of a tile; all their sums are in registers."""
RATE = 2.4
"""Rate of full tiles relative to cuBLAS in fp32 on the same device, counting the products that are done."""

# channels x places x depth, warps, stages, and their rate beside the best, by results of a tile.
TILES = {
    4: ((Tile(64, 64, 64, 4, 3), 1.0), (Tile(64, 64, 32, 4, 4), 0.85), (Tile(32, 128, 32, 4, 3), 0.65)),
    2: (
        (Tile(64, 128, 32, 4, 3), 1.05), (Tile(128, 64, 32, 4, 3), 1.0), (Tile(64, 64, 64, 4, 3), 1.0),
        (Tile(32, 128, 32, 4, 3), 0.6),
    ),
}  # fmt: skip
GRADIENT_TILES = (
    (Tile(128, 64, 32, 4, 3), 1.0), (Tile(64, 64, 64, 4, 3), 0.95), (Tile(64, 128, 32, 4, 3), 0.95),
    (Tile(128, 128, 32, 8, 3), 0.95), (Tile(64, 64, 32, 4, 4), 0.9),
)  # fmt: skip
MOST_TILES = 4
"""How many pairs of outputs and tile are offered."""


class WinogradGemm(ConvSolver):
    """Winograd convolution F(m, r) along one axis, as implicit matrix products that end in registers.

    The axis is the last one with taps to save. ``outputs`` is m; each tile's n = m + r - 1 inputs are brought to n
    points once (Winograd 1980; Lavin and Gray 2016, section 4) and split into two fp16 planes (Ootomo and Yokota 2022,
    section 3), three products of which are summed in fp32. Sums at each point go into the m results within a kernel,
    so that only operands are transformed in memory: ``images`` of them and ``parts`` of their channels at a time.
    """

    name, version = "winograd_gemm", 3
    devices = frozenset({"cuda"})
    dtypes = frozenset({"fp32"})
    compiles = True
    adds_bias = True
    kin = "Winograd's transforms on matrix units"
    accumulates = True
    amounts = Solver.amounts | {"parts"}
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, many groups, TF32, no axis to save products on, too large for 32 bits."""
        reasons = triton_missing()
        reasons += refused(p)
        if saving_axis(p) is None:
            reasons.append(f"saves products along an axis of 2 to {MOST_TAPS} taps without stride or dilation")
        if reasons:
            return reasons
        if TilesLayout(p, OUTPUTS[-1], Tile(32, 32, 32, 4, 2), 1).largest > MOST_ELEMENTS:
            reasons.append(f"one image or the filter packs to more than {MOST_ELEMENTS} elements")
        if any(math.prod(p.shape(role)[1:]) > MOST_ELEMENTS for role in ROLES):
            reasons.append(f"one image has more than {MOST_ELEMENTS} elements")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Every tile that is not mostly empty, on as many images as 32 bits can count."""
        return [c for c, _ in _listed(p, None, fewer=False)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with as many images at a time as fit into ``ceiling``; without a ceiling also fewer."""
        if only is not None:
            return [(c, _layout(p, c).workspace) for c in only if _fits(p, c)]
        return list(_listed(p, ceiling, fewer=ceiling is None))

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of transformed operands, their exponents and partial sums."""
        return _layout(p, c).workspace

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products at the points, on tiles as they fill, and the transforms before them."""
        layout = _layout(p, c)
        taps = layout.axes[2].kernel
        flops = int(p.flops / taps * layout.points * layout.tiles / max(1, layout.written))
        rate = RATE * _tile_rate(p, c) * _filled(layout)
        packed = layout.workspace * layout.block_count * (1 if p.pass_ is Pass.WGRAD else len(layout.shares))
        added = 2 * (len(layout.shares) - 1) * p.nbytes(p.result)
        sweeps = math.prod(len(axis_sweeps) for axis_sweeps in layout.sweeps)
        kernels = p.groups * (3 + layout.block_count * len(layout.shares) * (1 + sweeps))
        return Cost(flops, 2 * p.bytes + packed + added, kernels, efficiency=rate, apart=packed + added)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(_layout(p, c), *map(View.of, (a, b, out))), a.device)


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    try:
        layout = _layout(p, c)
    except (KeyError, TypeError, ValueError):
        return False
    return layout.images <= p.batch and layout.largest <= MOST_ELEMENTS


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    sizes = c["tile"]
    if not isinstance(sizes, tuple) or len(sizes) != 3 or any(n not in (16, 32, 64, 128, 256) for n in sizes):
        raise ValueError(f"tile={sizes!r}: channels, places and depth, powers of two, would do")
    return Tile(*sizes, warps=integer(c, "warps"), stages=integer(c, "stages"))


@functools.lru_cache(maxsize=4096)
def _layout(p: ConvProblem, c: Config) -> TilesLayout:
    """The layout of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    outputs, gradient = integer(c, "outputs"), p.pass_ is Pass.WGRAD
    if outputs not in OUTPUTS:
        raise ValueError(f"outputs={outputs}: 2 or 4 would do")
    parts, splits = integer(c, "parts", 1), integer(c, "splits", 1)
    if (parts if gradient else splits) > 1:
        raise ValueError(f"parts={parts}, splits={splits}: a filter's gradient has splits, the others have parts")
    return TilesLayout(p, outputs, _tile(c), integer(c, "images", p.batch), parts, splits)


def _tiles(p: ConvProblem) -> list[tuple[int, Tile]]:
    """Pairs of outputs and tile that should be fastest, by their usual rate and the share of useful products."""
    rated = []
    for outputs in OUTPUTS:
        if outputs + p.axes[saving_axis(p) or 0].kernel - 1 > MOST_POINTS:
            continue
        for tile, rate in GRADIENT_TILES if p.pass_ is Pass.WGRAD else TILES[outputs]:
            layout = TilesLayout(p, outputs, tile, 1)
            rated.append((rate * _useful(layout) * layout.written / (layout.points * layout.tiles), outputs, tile))
    rated.sort(key=lambda entry: -entry[0])
    return [(outputs, tile) for score, outputs, tile in rated[:MOST_TILES] if score >= 0.65 * rated[0][0]]


def _tile_rate(p: ConvProblem, c: Config) -> float:
    """Rate of a config's tile relative to the best one."""
    tiles = GRADIENT_TILES if p.pass_ is Pass.WGRAD else TILES.get(integer(c, "outputs"), ())
    return next((rate for entry, rate in tiles if entry == _tile(c)), 0.5)


def _listed(p: ConvProblem, ceiling: int | None, *, fewer: bool) -> Iterator[tuple[Config, int]]:
    """Configs with their workspace, within ``ceiling`` bytes; with ``fewer`` also on fewer images at a time."""
    for outputs, tile in _tiles(p):
        base = Config(outputs=outputs, tile=(tile.channels, tile.columns, tile.depth), warps=tile.warps,
                      stages=tile.stages)  # fmt: skip
        for c in _blocks(p, base, ceiling, fewer=fewer):
            yield c, _layout(p, c).workspace


def _blocks(p: ConvProblem, c: Config, ceiling: int | None, *, fewer: bool) -> Iterator[Config]:
    """``c`` on all images, or in blocks of images that fit and fill the GPU. With ``fewer`` also on fewer images.

    Where blocks so small leave multiprocessors idle, it takes more images with fewer channels at a time.
    """
    best = _filling(p, c, 1, ceiling)
    if integer(best, "images", p.batch) < p.batch:
        sized_by_parts = (_filling(p, c, parts, ceiling) for parts in _parts(p, c))
        best = min(sized_by_parts, key=lambda sized: _waves(_layout(p, sized)))
    yield best
    if fewer and integer(best, "images", p.batch) > 1:
        yield from _blocks(p, c, _layout(p, best).workspace // 4, fewer=False)


def _parts(p: ConvProblem, c: Config) -> list[int]:
    """Numbers of parts that channels may be divided into, in whole steps unless each part has at least two."""
    if p.pass_ is Pass.WGRAD:
        return [1]
    read = (p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels) // p.groups
    depth = _tile(c).depth
    return [parts for parts in (1, 2, 3, 4) if parts == 1 or read % (parts * depth) == 0 or read >= 2 * parts * depth]


def _filling(p: ConvProblem, c: Config, parts: int, ceiling: int | None) -> Config:
    """``c`` in blocks of images whose programs run in the fewest waves, among those that fit into ``ceiling``.

    In blocks of one image where none fits.
    """

    def fits(images: int) -> bool:
        layout = _layout(p, _sized(p, c, images, parts))
        return layout.largest <= MOST_ELEMENTS and (ceiling is None or layout.workspace <= ceiling)

    choices = _equal_blocks(p.batch)
    first = min(first_that(fits, choices), len(choices) - 1)
    if p.pass_ is Pass.WGRAD:
        return _sized(p, c, choices[first], parts)  # what does not fill is split
    near = [_sized(p, c, images, parts) for images in choices[first : first + NEAR]]
    return min(near, key=lambda sized: _waves(_layout(p, sized)))


def _waves(layout: TilesLayout) -> float:
    """How many times the multiprocessors are filled, plus the time of launching and adding in the same unit."""
    p, tile, shares = layout.p, layout.tile, len(layout.shares)
    read = layout.outof if p.pass_ is Pass.DGRAD else layout.into
    products = read * layout.axes[0].kernel * layout.axes[1].kernel * layout.points
    adding = ADDING * layout.m * (shares - 1) / products
    launching = LAUNCHING * shares / (products * tile.channels * tile.columns)
    return layout.block_count * (_turns(_programs(layout), tile) * (1 + adding) + launching)


def _turns(programs: int, tile: Tile) -> float:
    """How many times ``programs`` fill the multiprocessors; a program alone on one is faster than beside another."""
    whole, rest = divmod(programs, at_once(tile) * PROCESSORS)
    return whole + (0 if rest == 0 else ALONE if at_once(tile) > 1 and rest <= PROCESSORS else 1)


def _busy(programs: int, tile: Tile) -> float:
    """Share of the multiprocessors that are busy."""
    return programs / (at_once(tile) * PROCESSORS * _turns(programs, tile))


def _sized(p: ConvProblem, c: Config, images: int, parts: int) -> Config:
    """``c`` for blocks of ``images`` images and channels in ``parts``, with the splits that suit them."""
    more = {"images": images} if images < p.batch else {}
    if p.pass_ is Pass.WGRAD:
        return Config(**{**c, **more, "splits": _splits(p, c, images)})
    return Config(**{**c, **more, **({"parts": parts} if parts > 1 else {})})


@functools.lru_cache(maxsize=256)
def _equal_blocks(batch: int) -> tuple[int, ...]:
    """Images of a block when a batch is divided as equally as possible into 1, 2, 3, ... blocks."""
    return tuple(dict.fromkeys(-(-batch // parts) for parts in range(1, batch + 1)))


def _splits(p: ConvProblem, c: Config, images: int) -> int:
    """How many partial sums of a weight gradient fill the multiprocessors in whole waves."""
    layout = _layout(p, Config(**{**c, "images": 1, "splits": 1}))
    places = images * math.prod(sweeps[0].count for sweeps in layout.sweeps) * layout.tiles
    programs = _programs(layout)
    most = max(1, min(16, places // (8 * layout.tile.depth), 4 * PROCESSORS * at_once(layout.tile) // programs))
    return splits_that_fill(most, places, lambda n: _busy(n * programs, layout.tile))


def at_once(tile: Tile) -> int:
    """Programs that a multiprocessor's registers hold at a time."""
    return max(1, 8 // tile.warps)


def _programs(layout: TilesLayout) -> int:
    """Programs of one block's products."""
    p, tile = layout.p, layout.tile
    if p.pass_ is Pass.WGRAD:
        across = -(-layout.columns // tile.columns)
        return -(-layout.outof // tile.channels) * across * layout.points * layout.splits
    counts = math.prod(max(sweep.count for sweep in sweeps) for sweeps in layout.sweeps)
    return -(-_results(layout) // tile.channels) * -(-layout.images * counts * layout.tiles // tile.columns)


def _results(layout: TilesLayout) -> int:
    """Channels of the result in one group."""
    return layout.into if layout.p.pass_ is Pass.DGRAD else layout.outof


def _useful(layout: TilesLayout) -> float:
    """Share of a full grid's products that the result needs."""
    p, tile = layout.p, layout.tile
    if p.pass_ is Pass.WGRAD:
        whole = -(-layout.columns // tile.columns) * tile.columns * -(-layout.outof // tile.channels) * tile.channels
        return layout.columns * layout.into / layout.source.channels * layout.outof / whole
    read = (layout.outof if p.pass_ is Pass.DGRAD else layout.into) / (layout.source.channels * len(layout.shares))
    return read * _results(layout) / (-(-_results(layout) // tile.channels) * tile.channels)


def _filled(layout: TilesLayout) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    return _useful(layout) * _busy(_programs(layout), layout.tile)
