"""Convolution as one matrix product that gathers its operand, in fp32 accuracy on fp16 matrix units."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.split_products import LONGEST, MOST_GROUPS, Tile
from tilewise.solvers.common.tiles import PROCESSORS, busy, first_that, integer, splits_that_fill
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.common.views import View
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._implicit import PRODUCTS, Layout, launches, sum_length

__all__ = ["ImplicitGemm"]

MOST_SUMS = 64
"""Most sums of a thread (of 255 registers) where it keeps a second sum beside each."""
MOST_ELEMENTS = 2**31 - 2**20
"""Most elements of a packed tensor: kernels count them in 32 bits."""

FAST = {"fp16x3": 3.0, "tf32x3": 1.4, "fp16": 1.2, "native": 0.65}
"""Rate of full tiles relative to cuBLAS's products in the problem's precision on the same device."""

# channels x columns x depth, warps, stages, and their rate beside the best.
TILES = {
    "fp16x3": (
        (Tile(128, 256, 64, 8, 2), 1.0), (Tile(128, 256, 32, 8, 4), 0.95), (Tile(192, 128, 32, 8, 4), 0.95),
        (Tile(192, 128, 64, 8, 2), 0.95), (Tile(128, 128, 64, 8, 3), 0.9), (Tile(128, 128, 32, 4, 3), 0.85),
        (Tile(128, 128, 32, 8, 4), 0.85), (Tile(64, 256, 32, 4, 4), 0.8),
        (Tile(64, 128, 64, 4, 2), 0.7), (Tile(64, 128, 32, 4, 3), 0.7), (Tile(64, 64, 32, 4, 4), 0.5),
    ),
    "tf32x3": ((Tile(128, 128, 32, 8, 3), 1.0), (Tile(64, 128, 32, 4, 3), 0.85)),
    "fp16": (
        (Tile(128, 256, 64, 8, 3), 1.0), (Tile(192, 128, 64, 8, 3), 0.95), (Tile(128, 128, 64, 8, 4), 0.9),
        (Tile(128, 128, 32, 4, 4), 0.8), (Tile(64, 256, 64, 8, 4), 0.8), (Tile(64, 128, 64, 4, 4), 0.7),
        (Tile(64, 128, 32, 4, 4), 0.65), (Tile(64, 64, 32, 4, 5), 0.45),
    ),
}  # fmt: skip
TILES["native"] = TILES["fp16"]


class ImplicitGemm(ConvSolver):
    """Implicit matrix product over packed operands (Chetlur et al. 2014, section 3, without the padding branches).

    Operands are copied once with channels innermost and zeros around the images, so that a tap is a constant offset.
    ``product`` says how numbers are multiplied: ``fp16x3`` splits scaled fp32 values into two fp16 planes and sums
    three products in fp32 (error as of fp32 arithmetic; values below 2^-17 of their image's largest keep an absolute
    error of 2^-39 of it), ``tf32x3`` does the same in TF32 as it multiplies, ``fp16`` is one product of scaled values,
    as accurate as TF32, and ``native`` multiplies 16-bit operands as they are. Where an operand holds infinities,
    results that meet them may be NaN. ``images`` are packed at a time, all of them where it is absent.
    """

    name, version = "implicit_gemm", 4
    devices = frozenset({"cuda"})
    compiles = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    accumulates = True
    most_configs = 4
    error_bound = {"ieee": 5e-6, "tf32": 1e-3}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, many groups, or images too large to count in 32 bits."""
        reasons = triton_missing()
        if p.groups > MOST_GROUPS:
            reasons.append(f"launches each group by itself: at most {MOST_GROUPS} groups, not {p.groups}")
        if not reasons and self._smallest(p).largest > MOST_ELEMENTS:
            reasons.append(f"one image or the filter packs to more than {MOST_ELEMENTS} elements")
        if any(math.prod(p.shape(role)[1:]) > MOST_ELEMENTS for role in ROLES):
            reasons.append(f"one image has more than {MOST_ELEMENTS} elements")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """Every tile that is not mostly empty, on as many images as 32 bits can count."""
        return [c for c, _ in self._listed(p, None)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with as many images at a time as fit into ``ceiling``; without a ceiling also fewer."""
        if only is not None:
            fitting = [(c, _layout(p, c)) for c in only if self._fits(p, c)]
            return [(c, layout.workspace) for c, layout in fitting]
        return list(self._listed(p, ceiling, fewer=ceiling is None))

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of packed operands, their exponents and partial sums."""
        return _layout(p, c).workspace

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic at the rate of the matrix units, on tiles as they fill."""
        layout = _layout(p, c)
        rate = FAST[str(c["product"])] * _tile_rate(c) * _filled(layout)
        packed = layout.workspace * len(layout.blocks) if p.pass_ is not Pass.WGRAD else layout.workspace
        reads = 2 if layout.product.scaled else 1
        sweeps = math.prod(len(axis_sweeps) for axis_sweeps in layout.sweeps)
        kernels = p.groups * (4 + len(layout.blocks) * (1 + sweeps))
        return Cost(p.flops, reads * p.bytes + 2 * packed, kernels, efficiency=rate)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not self._fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(_layout(p, c), *map(View.of, (a, b, out))), a.device)

    def _fits(self, p: ConvProblem, c: Config) -> bool:
        """Whether ``c`` is a config of ``p``."""
        try:
            layout = _layout(p, c)
        except (KeyError, TypeError, ValueError):
            return False
        native = p.dtype != "fp32"
        product = native == (c["product"] == "native") and (p.precision == "tf32" or c["product"] != "fp16")
        return product and layout.images <= p.batch and layout.largest <= MOST_ELEMENTS

    def _smallest(self, p: ConvProblem) -> Layout:
        """The layout with the smallest tile, one image at a time."""
        product = "native" if p.dtype != "fp32" else "fp16x3"
        return Layout(p, PRODUCTS[product], Tile(64, 64, 32, 4, 2), 1)

    def _listed(self, p: ConvProblem, ceiling: int | None, *, fewer: bool = False) -> Iterator[tuple[Config, int]]:
        """Configs with their workspace, within ``ceiling`` bytes; with ``fewer`` also on fewer images at a time."""
        products = ["native"] if p.dtype != "fp32" else ["fp16"] if p.precision == "tf32" else ["fp16x3", "tf32x3"]
        for product in products:
            if product == "tf32x3" and p.pass_ is Pass.WGRAD:
                continue  # Triton's TF32 products want operands with the summed index innermost
            for tile in _tiles(p, product):
                c = Config(product=product, tile=(tile.channels, tile.columns, tile.depth), warps=tile.warps,
                           stages=tile.stages)  # fmt: skip
                for blocks in _blocks(p, c, ceiling, fewer=fewer):
                    yield blocks, _layout(p, blocks).workspace


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    sizes = c["tile"]
    if not isinstance(sizes, tuple) or len(sizes) != 3 or any(n < 16 or n > 256 or n % 16 for n in sizes):
        raise ValueError(f"tile={sizes!r}: channels, columns and depth would do")
    return Tile(*sizes, warps=integer(c, "warps"), stages=integer(c, "stages"))


@functools.lru_cache(maxsize=4096)
def _layout(p: ConvProblem, c: Config) -> Layout:
    """The layout of a config, which is worked out once."""
    return Layout(p, PRODUCTS[str(c["product"])], _tile(c), integer(c, "images", p.batch), integer(c, "splits", 1))


def _tiles(p: ConvProblem, product: str) -> list[Tile]:
    """The tiles that fill best, weighted by the rate that they usually reach."""
    channels = p.shape(p.result)[1 if p.pass_ is not Pass.WGRAD else 0] // p.groups
    read = (p.out_channels if p.pass_ is Pass.DGRAD else p.in_channels) // p.groups
    rated = []
    promotes = PRODUCTS[product].planes == 2 and sum_length(p) > LONGEST * 3 // 2
    for tile, rate in TILES[product]:
        if promotes and (tile.halves[1] or tile.channels * tile.columns > MOST_SUMS * 32 * tile.warps):
            continue  # two sums of each element must fit the registers
        if p.pass_ is Pass.WGRAD:
            if tile.halves[1]:
                continue
            columns = p.taps * -(-read // 16) * 16
            useful = columns / (-(-columns // tile.columns) * tile.columns)
        else:
            useful = read / (-(-read // tile.depth) * tile.depth)
        useful *= channels / (-(-channels // tile.channels) * tile.channels)
        rated.append((rate * useful, tile))
    rated.sort(key=lambda entry: -entry[0])
    return [tile for score, tile in rated if score >= 0.4 * rated[0][0]]


def _tile_rate(c: Config) -> float:
    """Rate of a config's tile relative to the best one."""
    tile = _tile(c)
    return next((rate for entry, rate in TILES[str(c["product"])] if entry == tile), 0.5)


def _blocks(p: ConvProblem, c: Config, ceiling: int | None, *, fewer: bool) -> Iterator[Config]:
    """``c`` on all images at once, or on the most that fit in equal blocks. With ``fewer`` also on fewer."""

    def fits(images: int) -> bool:
        layout = _layout(p, _sized(p, c, images))
        return layout.largest <= MOST_ELEMENTS and (ceiling is None or layout.workspace <= ceiling)

    choices = _equal_blocks(p.batch)
    images = choices[min(first_that(fits, choices), len(choices) - 1)]  # one where none fits
    sized = _sized(p, c, images)
    yield sized
    if fewer and images > 1:
        yield from _blocks(p, c, _layout(p, sized).workspace // 4, fewer=False)


def _sized(p: ConvProblem, c: Config, images: int) -> Config:
    """``c`` for blocks of ``images`` images, with the splits that suit them."""
    sized = Config(**{**c, **({"images": images} if images < p.batch else {})})
    return Config(**{**sized, "splits": _splits(p, _tile(c), images)}) if p.pass_ is Pass.WGRAD else sized


@functools.lru_cache(maxsize=256)
def _equal_blocks(batch: int) -> tuple[int, ...]:
    """Images of a block when a batch is divided as equally as possible into 1, 2, 3, ... blocks."""
    return tuple(dict.fromkeys(-(-batch // parts) for parts in range(1, batch + 1)))


def _splits(p: ConvProblem, tile: Tile, images: int) -> int:
    """How many partial sums of a weight gradient fill the multiprocessors in whole waves."""
    columns = p.taps * -(-p.in_channels // p.groups // 16) * 16
    tiles = -(-p.out_channels // p.groups // tile.channels) * -(-columns // tile.columns)
    pixels = images * math.prod(axis.out for axis in p.axes)
    most = max(1, min(64, pixels // (8 * tile.depth), 4 * PROCESSORS // tiles))
    return splits_that_fill(most, pixels, lambda n: busy(n * tiles))


def _filled(layout: Layout) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    p, tile = layout.p, layout.tile
    channels = layout.into if p.pass_ is Pass.DGRAD else layout.outof
    tiles = -(-channels // tile.channels)
    share = channels / (tiles * tile.channels)
    if p.pass_ is Pass.WGRAD:
        across = -(-layout.columns // tile.columns)
        share *= layout.into / layout.source.channels * layout.columns / (across * tile.columns)
        return share * busy(tiles * across * layout.splits)
    read = layout.outof if p.pass_ is Pass.DGRAD else layout.into
    pixels = layout.images * math.prod(axis.size if p.pass_ is Pass.DGRAD else axis.out for axis in p.axes)
    share *= read / layout.source.channels
    return share * busy(tiles * max(1, pixels // tile.columns)) * pixels / (-(-pixels // tile.columns) * tile.columns)
