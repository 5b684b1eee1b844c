"""What the solvers with this package's transforms share: their configs, costs and limits."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import torch

from tilewise.kernels.cuda import fft1d, fft2d
from tilewise.kernels.cuda.irfft2_summed import MOST_SUMMED
from tilewise.kernels.cuda.launch import unavailable
from tilewise.kernels.cuda.operands import PARTS, known_spectra
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.costs import cached
from tilewise.solvers.common.matmul import library_scratch
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.common.triton_run import triton_missing
from tilewise.solvers.fourier._frequency_products import (
    BLOCKS,
    FUSED,
    IN_PARTS,
    PLANES,
    RATES,
    Block,
    arithmetic,
    factors,
    filled,
    fuses,
    part_blocks,
    products,
    shape,
)
from tilewise.solvers.fourier._own import OwnPlan
from tilewise.solvers.fourier._plane_products import few
from tilewise.solvers.fourier._windows import most, windows

__all__ = ["Place", "bind", "cost", "count", "fits", "hidden", "limits", "offered", "places", "plan_of"]

MOST_BYTES = 2**33
"""Larger workspaces are not offered."""
MOST_MATRIX = 2**30
"""Most numbers of one frequency's matrix, each part counted: kernels count them in 32 bits."""
MOST_GROUPS = 32
LIBRARY_GROUPS = 4
MOST_PIECES = 3
FUSED_CHANNELS = 4
"""Most channels of a fused sum. For more, writing a sum and reading it again is faster than reading its factors again.

On an H100 factors are 8 bytes times channels times (1 + 1/planes of a block) from the second cache, at 5.5 TB/s (5.5
ps for 3 channels and 4 planes); a sum is 16 bytes through memory at 2.9 TB/s (5.5 ps), but its kernel takes longer.
"""
WITHOUT_PIECES = ("library", FUSED, PLANES)
"""Products that are not taken in pieces of a chosen size."""
SCATTERED = {96: 1.5, 128: 2.0}
"""Time of transforms of so many points to frequency-first spectra, relative to others of as many bytes."""
SIZES = {1: fft1d.SIZES, 2: fft2d.SIZES}
"""Sizes of transforms, by the number of axes."""

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A basis and the size of the tiles in it, both along each axis."""


def limits(p: ConvProblem) -> list[str]:
    """Reasons: missing packages, strides, dilation, many groups, kernels too long for a transform or of one point."""
    reasons = triton_missing()
    if p.dims not in SIZES:
        return [f"has transforms of our own for 1-D and 2-D, not {p.dims}-D"]
    longest = SIZES[p.dims][-1] // 2
    for name, axis in zip(p.space, p.axes, strict=True):
        if axis.stride != 1 or axis.dilation != 1:
            reasons.append(
                f"along {name} needs stride 1 and dilation 1, not stride {axis.stride}, dilation {axis.dilation}"
            )
        elif axis.kernel > longest:
            reasons.append(f"along {name} takes kernels to {longest}, not {axis.kernel}")
    if p.taps == 1:
        reasons.append("a kernel of one point makes a matrix product already: transforms would save no multiplication")
    if p.groups > MOST_GROUPS:
        reasons.append(f"takes at most {MOST_GROUPS} groups, not {p.groups}")
    if p.accumulate:
        reasons.append("adds into no result")
    if not reasons and p.device_type == "cuda" and torch.cuda.is_available() and unavailable():
        reasons.append(unavailable())
    return reasons


@functools.lru_cache(maxsize=1024)
def places(p: ConvProblem) -> tuple[Place, ...]:
    """Bases with the largest tiles that they hold, sorted by how much they move."""
    sizes_by_axis = []
    for axis in p.axes:
        extent = axis.size if p.pass_ is Pass.DGRAD else axis.out
        sizes = [(n, _tile(p, axis, n, extent)) for n in SIZES[p.dims]]
        # Tiles of which the kernel's rim takes nearly all are of no use.
        sizes_by_axis.append([(n, size) for n, size in sizes if size >= min(n / 4, extent)])
    ranked = []
    for choice in itertools.product(*sizes_by_axis):
        basis, tile = tuple(n for n, _ in choice), tuple(size for _, size in choice)
        tiles = max(1, count(p, tile))
        numbers = p.batch * tiles * (p.in_channels + p.out_channels) + p.in_channels * p.out_channels // p.groups
        launches = tiles if p.dims > 1 else 1  # the tiles of signals share theirs
        ranked.append((_frequencies(basis) * numbers * (1 + 0.02 * launches), basis, tile))
    ranked.sort()
    return tuple((basis, tile) for _, basis, tile in ranked)


def _tile(p: ConvProblem, axis: Axis, n: int, extent: int) -> int:
    """The largest tile in a basis of ``n``.

    Tiles of signals are even, so that if one tile begins at a pair of elements, all do.
    """
    size = most(axis, p.pass_, n)
    odd = p.dims == 1 and size % 2 == 1 and 1 < size < extent
    return size - 1 if odd and windows(axis, p.pass_, size - 1)[1] <= n else size


def _frequencies(basis: tuple[int, ...]) -> int:
    """Frequencies of a real transform."""
    return math.prod(basis[:-1]) * (basis[-1] // 2 + 1)


@functools.lru_cache(maxsize=4096)
def count(p: ConvProblem, tile: tuple[int, ...]) -> int:
    """The number of tiles that one image is cut into."""
    return math.prod(len(windows(axis, p.pass_, n)[0]) for axis, n in zip(p.axes, tile, strict=True))


def offered(
    p: ConvProblem, candidates: Iterable[Place], ceiling: int | None, most_places: int, *, tiled: bool
) -> Iterator[tuple[Config, int]]:
    """Configs with their workspace, for the first ``most_places`` places that fit into ``ceiling`` bytes.

    Each takes as many images as fit. Without a ceiling also fewer, whose spectra may stay in cache.
    """
    limit = MOST_BYTES if ceiling is None else min(ceiling, MOST_BYTES)
    taken = 0
    for basis, tile in candidates:
        choices = [
            (form, special, *choice)
            for form, special in _forms(p, basis, tile)
            for choice in _in_flight(
                p, basis, tile, form, special, limit, fewer=ceiling is None and not special, tiled=tiled
            )
        ]
        taken += bool(choices)
        if taken > most_places:
            return
        for form, special, block, tiles in choices:
            for product, piece in [(special, None)] if special else _products(p, basis, tile, form, block, tiles):
                values: dict[str, object] = {"basis": basis}
                values |= {"tile": tile} if tiled else {"transform": "own"}
                values["product"] = product
                if form != "interleaved":
                    values["spectra"] = form
                if piece is not None:
                    gemm = (piece.rows, piece.columns, piece.depth)
                    values |= {"gemm": gemm, "warps": piece.warps, "stages": piece.stages}
                    if piece.multiplications != 3:
                        values["multiplications"] = piece.multiplications
                if block < p.batch:
                    values["block"] = block
                if tiles < count(p, tile):
                    values["tiles"] = tiles
                c = Config(**values)  # type: ignore[arg-type]
                yield c, plan_of(p, c).arena.size


@functools.lru_cache(maxsize=1024)
def plan_of(p: ConvProblem, c: Config) -> OwnPlan:
    """The plan of a config. Raises ``ValueError`` or ``KeyError`` for what is none."""
    basis, product = _sizes(p, c, "basis"), str(c["product"])
    extents = tuple(axis.size if p.pass_ is Pass.DGRAD else axis.out for axis in p.axes)
    tile = _sizes(p, c, "tile") if "tile" in c else extents
    if product not in RATES:
        raise ValueError(f"product={product!r}: one of {', '.join(RATES)} would do")
    if product == FUSED and not fuses(p):
        raise ValueError(f"product={product!r}: sums over at most {MOST_SUMMED} channels, and no gradient of a filter")
    piece = BLOCKS[0][0]
    if product not in WITHOUT_PIECES:
        edges = c["gemm"]
        if not isinstance(edges, tuple) or len(edges) != 3 or any(n not in (16, 32, 64, 128) for n in edges):
            raise ValueError(f"gemm={edges!r}: rows, columns and depth, powers of two from 16 to 128, would do")
        times = integer(c, "multiplications", 3)
        if times not in (3, 4):
            raise ValueError(f"multiplications={times}: a complex product takes 3 or 4")
        piece = Block(*edges, warps=integer(c, "warps"), stages=integer(c, "stages"), multiplications=times)
    form = known_spectra(str(c.get("spectra", "interleaved")))
    if PARTS[form] > 1 and p.dims == 1:
        raise ValueError(f"spectra={form!r}: those of signals are interleaved")
    if PARTS[form] > 1 and IN_PARTS.get(product) != form:
        takes = IN_PARTS.get(product, "interleaved")
        raise ValueError(f"spectra={form!r}: the product {product} takes spectra={takes!r} or interleaved ones")
    block, tiles = integer(c, "block", p.batch), integer(c, "tiles", max(1, count(p, tile)))
    return OwnPlan(p, basis, tile, product, piece, block, tiles, form)


def fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config whose basis holds its tiles."""
    try:
        plan = plan_of(p, c)
    except (KeyError, TypeError, ValueError):
        return False
    return all(
        n in SIZES[p.dims] and axis.kernel <= n and windows(axis, p.pass_, size)[1] <= n
        for axis, size, n in zip(p.axes, plan.tile, plan.basis, strict=True)
    )


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the reason."""
    if not fits(p, c):
        raise SolverUnavailable(f"{c} is no config of {p.key}")
    return plan_of(p, c).bind((a, b, out), a.device)


def hidden(p: ConvProblem, c: Config) -> int:
    """Bytes that products by the library allocate: conjugates, and the library's scratch."""
    if c["product"] != "library":
        return 0
    conjugate = {Pass.FPROP: "w", Pass.DGRAD: "", Pass.WGRAD: "y"}[p.pass_]
    return library_scratch(p, 1) + (plan_of(p, c).spectra[conjugate].bytes if conjugate else 0)


def cost(p: ConvProblem, c: Config) -> Cost:
    """The products' arithmetic and their traffic over spectra, and separately the transforms' traffic."""
    plan = plan_of(p, c)
    if plan.fused:
        return _fused_cost(p, plan)
    flops = sum(times * arithmetic(p, chunk.rows, plan.frequencies) for chunk, times in plan.kinds)
    product = str(c["product"])
    share = RATES[plan.form if plan.in_parts else product] / (
        1.0 if p.dtype == "fp32" and p.precision == "ieee" else 8.0
    )
    share *= filled(p, plan.rows, plan.frequencies, plan.block) if product not in WITHOUT_PIECES else 0.8
    rows = sum(times * chunk.rows for chunk, times in plan.kinds)
    images = {"x": p.in_channels, "y": p.out_channels}
    numbers = sum(plan.parts[role] * plan.spectra[role].dtype.itemsize * n for role, n in images.items())
    spectra = plan.frequencies * rows * numbers + plan.spectra["w"].bytes
    kernels = 3 + sum(times * (1 + plan.transforms(chunk)) for chunk, times in plan.kinds)
    apart = p.bytes + spectra if plan.plain else p.bytes + int(spectra * SCATTERED.get(max(plan.basis), 1.0))
    if plan.in_parts:  # operands are read once more, for their scale
        apart += sum(p.nbytes(role) for role in p.operands)
        kernels += 2
    return Cost(flops, spectra, kernels, max(share, 1e-3), apart)


def _fused_cost(p: ConvProblem, plan: OwnPlan) -> Cost:
    """The traffic of reading the factors of each number of the result's spectrum, and separately the transforms'.

    The filter's spectrum is read again for every image, so its size decides whether factors come from the second-level
    cache. An image's spectrum is read once for all planes of a block that belong to one group.
    """
    left, _, _ = factors(p.pass_)
    _, columns, depth = shape(p, 1)
    rows = sum(times * chunk.rows for chunk, times in plan.kinds)
    numbers = plan.frequencies * rows * columns * p.groups
    block = fft2d.default_config(plan.basis, "frequency_major", True, plan.images * columns * p.groups).planes
    read = int(8 * depth * (1 + 1 / min(block, columns)) * numbers * cached(p.device_type, plan.spectra["w"].bytes))
    spectra = 8 * plan.frequencies * rows * (p.in_channels if left == "x" else p.out_channels)
    spectra += plan.spectra["w"].bytes
    share = RATES[FUSED] / (1.0 if p.dtype == "fp32" and p.precision == "ieee" else 8.0)
    kernels = 1 + sum(2 * times * len(chunk.tiles) for chunk, times in plan.kinds)
    return Cost(arithmetic(p, rows, plan.frequencies), read, kernels, share, p.bytes + 2 * spectra)


def _forms(p: ConvProblem, basis: tuple[int, ...], tile: tuple[int, ...]) -> list[tuple[str, str]]:
    """How spectra of that size can be held, with the special product or ``""``, the most promising first."""
    parts = [IN_PARTS[product] for product in products(p) if product in IN_PARTS]
    held = p.dims > 1 and max(basis) <= fft2d.LARGEST_IN_PARTS
    special = [FUSED] if fuses(p) and shape(p, 1)[2] <= FUSED_CHANNELS else []
    if few(p, p.batch * count(p, tile)):
        special.append(PLANES)
    return [*(("interleaved", product) for product in special), *((form, "") for form in parts if held),
            ("interleaved", "")]  # fmt: skip


def _sizes(p: ConvProblem, c: Config, name: str) -> tuple[int, ...]:
    """The positive sizes called ``name`` in a config, one for each axis. Raises ``ValueError`` for anything else."""
    value = c[name]
    if not isinstance(value, tuple) or len(value) != p.dims or any(type(n) is not int or n < 1 for n in value):
        raise ValueError(f"{name}={value!r}: {'two positive integers' if p.dims > 1 else '(n,), n positive,'} would do")
    return value


def _in_flight(
    p: ConvProblem,
    basis: tuple[int, ...],
    tile: tuple[int, ...],
    form: str,
    special: str,
    limit: int,
    *,
    fewer: bool,
    tiled: bool,
) -> list[tuple[int, int]]:
    """How many images, and tiles of each, are computed at a time: as many as ``limit`` bytes hold.

    With ``fewer`` also an eighth of that. Empty where not even one tile fits.
    """
    every = max(1, count(p, tile))
    choices = [(images, every) for images in _halves(p.batch)]
    if tiled:
        choices += [(1, tiles) for tiles in _halves(every)[1:]]

    def held(choice: tuple[int, int]) -> bool:
        return OwnPlan(p, basis, tile, special or "library", BLOCKS[0][0], *choice, form).arena.size <= limit

    first = bisect.bisect_left(choices, True, key=held)  # each takes less than the one before
    if first == len(choices):
        return []
    fitting = [choices[first]]
    if fewer and first + 3 < len(choices):
        fitting.append(choices[first + 3])
    return fitting


def _halves(number: int) -> list[int]:
    """``number``, half of it, a quarter and so on down to 1, rounded up."""
    halves = [number]
    while halves[-1] > 1:
        halves.append(-(-halves[-1] // 2))
    return halves


def _products(
    p: ConvProblem, basis: tuple[int, ...], tile: tuple[int, ...], form: str, block: int, tiles: int
) -> list[tuple[str, Block | None]]:
    """Products with the pieces that fill best."""
    rows, frequencies = block * min(tiles, max(1, count(p, tile))), _frequencies(basis)
    forms: list[tuple[str, Block | None]] = []
    if max(shape(p, rows)) * max(p.in_channels, p.out_channels) * PARTS[form] > MOST_MATRIX:
        return []
    for product in products(p):
        if product == "library":
            if p.groups <= LIBRARY_GROUPS and form == "interleaved":
                forms.append((product, None))
            continue
        blocks = list(BLOCKS) if form == "interleaved" else part_blocks(p, rows, product)
        rated = sorted(blocks, key=lambda entry: -entry[1] * filled(p, rows, frequencies, entry[0]))
        forms += [(product, piece) for piece, _ in rated[:MOST_PIECES]]
    return forms
