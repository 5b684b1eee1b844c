"""Convolution in tiles of small transforms of our own (Vasilache et al. 2014, sections 5 and 6)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator

import torch

from tilewise.kernels.cuda.fft2d import SIZES
from tilewise.kernels.cuda.launch import unavailable
from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers._fft_windows import most, windows
from tilewise.solvers._frequency_products import BLOCKS, RATES, Block, arithmetic, filled, products, shape
from tilewise.solvers._matmul import library_scratch
from tilewise.solvers._own_fft import OwnPlan
from tilewise.solvers._program_run import has_triton
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import Cost, Run, Solver

__all__ = ["TiledFFT"]

MOST_BASES = 4
MOST_BYTES = 2**33
"""Workspaces beyond this are not offered."""
MOST_MATRIX = 2**30
"""Numbers of a frequency's matrix, which a kernel counts in 32 bits."""
MOST_GROUPS = 32
LIBRARY_GROUPS = 4
TILED_PRODUCTS = 2


class TiledFFT(Solver):
    """Overlap-save: each tile of the result from the tile of the image that it reads, by transforms that fit it.

    ``basis`` is the transforms' size, ``tile`` that of a tile of the result (of the output gradient for WGRAD, which
    sums products over all tiles: section 6), ``product`` how frequencies are multiplied and ``block`` in what pieces.
    ``images`` and ``tiles`` of each are in flight at a time (absent: all). One tile may be the whole plane. Numbers
    that are not finite spread over their tile.
    """

    name, version = "tiled_fft", 1
    devices = frozenset({"cuda"})
    dims = frozenset({2})
    experimental = True
    blocks_itself = True
    most_configs = 8
    error_bound = {"ieee": 3e-6, "tf32": 3e-3}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Absent packages, strides, dilation, depthwise layers and kernels that no transform holds."""
        reasons = []
        if not has_triton():
            reasons.append("needs the package triton")
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.stride != 1 or axis.dilation != 1:
                reasons.append(
                    f"along {name} needs stride 1 and dilation 1, not stride {axis.stride}, dilation {axis.dilation}"
                )
            elif axis.kernel > SIZES[-1] // 2:
                reasons.append(f"along {name} takes kernels to {SIZES[-1] // 2}, not {axis.kernel}")
        if p.groups > MOST_GROUPS:
            reasons.append(f"takes at most {MOST_GROUPS} groups, not {p.groups}")
        if p.accumulate:
            reasons.append("adds into no result")
        if not reasons and p.device_type == "cuda" and torch.cuda.is_available() and unavailable():
            reasons.append(unavailable())
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The bases that move least, with the products and pieces that fill best, on all images or fewer."""
        return [c for c, _ in self._listed(p, None)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with as many images in flight as fit ``ceiling``, and then as many tiles of one."""
        if only is not None:
            return [(c, self.workspace(p, c)) for c in only if self._fits(p, c)]
        return list(self._listed(p, ceiling))

    def _listed(self, p: ConvProblem, ceiling: int | None) -> Iterator[tuple[Config, int]]:
        limit = MOST_BYTES if ceiling is None else min(ceiling, MOST_BYTES)
        found = [(each, _in_flight(p, *each, limit, fewer=ceiling is None)) for each in _bases(p)]
        fit = [(each, choices) for each, choices in found if choices]
        for (basis, tile), choices in fit[:MOST_BASES]:
            for images, tiles in choices:
                for product, block in _products(p, basis, tile, images, tiles):
                    c = _config(p, basis, tile, product, block, images, tiles)
                    yield c, self.workspace(p, c)

    def _fits(self, p: ConvProblem, c: Config) -> bool:
        try:
            plan = _plan(p, c)
            return all(windows(x, p.pass_, n)[1] <= b for x, n, b in zip(p.axes, plan.tile, plan.basis, strict=True))
        except (KeyError, TypeError, ValueError):
            return False

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """The spectra in flight and the filter's."""
        return _plan(p, c).arena.size

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Of the library's products alone: conjugates that it writes out, and its scratch."""
        if c["product"] != "library":
            return 0
        plan = _plan(p, c)
        role = "w" if p.pass_.value == "fprop" else "y"
        return library_scratch(p, 1) + (plan.spectra[role].bytes if p.pass_.value != "dgrad" else 0)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The products' arithmetic, and the passes over operands, spectra and result."""
        plan = _plan(p, c)
        flops = sum(arithmetic(p, chunk.rows, plan.frequencies) for chunk in plan.chunks)
        product = str(c["product"])
        share = RATES[product] / (1.0 if p.dtype == "fp32" and p.precision == "ieee" else 8.0)
        share *= filled(p, plan.rows, plan.frequencies, plan.block) if product != "library" else 0.8
        rows = sum(chunk.rows for chunk in plan.chunks)
        spectra = 2 * 8 * plan.frequencies * rows * (p.in_channels + p.out_channels)
        filters = 2 * plan.spectra["w"].bytes
        kernels = 3 + sum(1 + 2 * len(chunk.tiles) for chunk in plan.chunks)
        return Cost(flops, p.bytes + spectra + filters, kernels, max(share, 1e-3))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the reason."""
        if out is None:
            raise ValueError(f"out=None: {self.name} writes into a tensor of shape {p.shape(p.result)}")
        return _plan(p, c).bind((a, b, out), a.device)


def _config(
    p: ConvProblem, basis: tuple[int, int], tile: tuple[int, int], product: str, block: Block | None, images: int,
    tiles: int,
) -> Config:  # fmt: skip
    values: dict[str, object] = {"basis": basis, "tile": tile, "product": product}
    if block is not None:
        values |= {"block": (block.rows, block.columns, block.depth), "warps": block.warps, "stages": block.stages}
    if images < p.batch:
        values["images"] = images
    if tiles < _count(p, tile):
        values["tiles"] = tiles
    return Config(**values)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _plan(p: ConvProblem, c: Config) -> OwnPlan:
    basis, tile, product = _pair(c, "basis"), _pair(c, "tile"), str(c["product"])
    block = BLOCKS[0][0]
    if product != "library":
        edges = c["block"]
        if not isinstance(edges, tuple) or len(edges) != 3 or any(n not in (16, 32, 64, 128) for n in edges):
            raise ValueError(f"block={edges!r}: rows, columns and depth, powers of two from 16 to 128, would do")
        block = Block(*edges, warps=integer(c, "warps"), stages=integer(c, "stages"))
    if product not in RATES:
        raise ValueError(f"product={product!r}: one of {', '.join(RATES)} would do")
    images, tiles = integer(c, "images", p.batch), integer(c, "tiles", max(1, _count(p, tile)))
    return OwnPlan(p, basis, tile, product, block, images, tiles)


def _pair(c: Config, name: str) -> tuple[int, int]:
    value = c[name]
    if not isinstance(value, tuple) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        raise ValueError(f"{name}={value!r}: two positive integers would do")
    return value


@functools.lru_cache(maxsize=4096)
def _count(p: ConvProblem, tile: tuple[int, int]) -> int:
    """Tiles of an image."""
    down, across = (windows(axis, p.pass_, n)[0] for axis, n in zip(p.axes, tile, strict=True))
    return len(down) * len(across)


def _bases(p: ConvProblem) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Bases with the largest tiles that they hold, those that move least first."""
    each = []
    for axis in p.axes:
        sizes = [(n, most(axis, p.pass_, n)) for n in SIZES]
        # Tiles of which the kernel's rim takes nearly all are of no use.
        each.append([(n, size) for n, size in sizes if size >= min(n / 4, _extent(axis.out, axis.size, p))])
    ranked = []
    for (n1, m1), (n2, m2) in itertools.product(*each):
        count = max(1, _count(p, (m1, m2)))
        numbers = p.batch * count * (p.in_channels + p.out_channels) + p.in_channels * p.out_channels // p.groups
        ranked.append((n1 * (n2 // 2 + 1) * numbers * (1 + 0.02 * count), (n1, n2), (m1, m2)))
    ranked.sort()
    return [(basis, tile) for _, basis, tile in ranked]


def _extent(out: int, size: int, p: ConvProblem) -> int:
    return size if p.pass_.value == "dgrad" else out


def _in_flight(
    p: ConvProblem, basis: tuple[int, int], tile: tuple[int, int], limit: int, *, fewer: bool
) -> list[tuple[int, int]]:
    """Images and tiles of each at a time: as many as ``limit`` bytes hold, and ``fewer``: also an eighth of that.

    Empty where not even one tile fits.
    """
    count = max(1, _count(p, tile))
    choices = [(images, count) for images in _halves(p.batch)] + [(1, tiles) for tiles in _halves(count)[1:]]

    def needs(images: int, tiles: int) -> int:
        return OwnPlan(p, basis, tile, "library", BLOCKS[0][0], images, tiles).arena.size

    first = next((i for i, choice in enumerate(choices) if needs(*choice) <= limit), None)
    if first is None:
        return []
    found = [choices[first]]
    if fewer and first + 3 < len(choices):
        found.append(choices[first + 3])
    return found


def _halves(count: int) -> list[int]:
    """``count`` in 1, 2, 4, ... shares, rounded up."""
    found = [count]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def _products(
    p: ConvProblem, basis: tuple[int, int], tile: tuple[int, int], images: int, tiles: int
) -> list[tuple[str, Block | None]]:
    """Products with the pieces that fill best."""
    rows, frequencies = images * min(tiles, max(1, _count(p, tile))), basis[0] * (basis[1] // 2 + 1)
    found: list[tuple[str, Block | None]] = []
    if max(shape(p, rows)) * max(p.in_channels, p.out_channels) > MOST_MATRIX:
        return []
    for product in products(p):
        if product == "library":
            if p.groups <= LIBRARY_GROUPS:
                found.append((product, None))
            continue
        rated = sorted(BLOCKS, key=lambda entry: -entry[1] * filled(p, rows, frequencies, entry[0]))
        found += [(product, block) for block, _ in rated[:TILED_PRODUCTS]]
    return found
