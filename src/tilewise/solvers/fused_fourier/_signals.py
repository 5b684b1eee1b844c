"""Depthwise convolutions of long signals in fused kernels: configs, workspace and launches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.kernels.cuda import depthwise1d
from tilewise.kernels.cuda.depthwise1d import SIZES, Program
from tilewise.kernels.cuda.depthwise2d import Adder
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.bases import least_whole, whole_placement
from tilewise.solvers.common.cuda_run import FIRST, OUT, SECOND, WORKSPACE, Step
from tilewise.solvers.common.tiles import PROCESSORS, integer
from tilewise.solvers.fused_fourier._operands import Operand, correlates, operands

__all__ = ["configs", "constant", "filters", "steps", "too_large", "transformed", "workspace"]

THREADS = (128, 256)
"""Least and most threads of a block that are worth trying, where signals can be chosen."""
TURNS = 4.0
"""Time of separating, reordering and storing a number, in doublings of the transform."""
MOST_BASES = 3
SHARED = 233472
"""Bytes of shared memory of a multiprocessor; a block takes 1 KiB beside its own."""


def too_large(p: ConvProblem) -> list[str]:
    """A reason where a signal fits neither the largest basis nor tiles of which at least half is new."""
    (axis,) = p.axes
    largest = _sizes(p)[-1]
    if _fits(p, largest):
        return []
    return [
        f"needs a basis of {least_whole(axis, p.pass_)}, at most {largest}, or for tiles a kernel that reaches over at "
        f"most {largest // 2}, not {axis.reach}"
    ]


def _sizes(p: ConvProblem) -> list[int]:
    """Bases whose kernel fits the GPU."""
    return [n for n in SIZES if not _program(p, n, 1, 0).problems()]


def _fits(p: ConvProblem, n: int) -> bool:
    """Whether the basis holds the whole signal, or tiles of which at least half are results."""
    (axis,) = p.axes
    return least_whole(axis, p.pass_) <= n or (2 * axis.reach <= n and _tile(p, n) > 0)


def _apart(p: ConvProblem) -> dict[str, int]:
    """Places in the basis from one element of each tensor to the next."""
    return {role: whole_placement(p.axes[0], role, p.pass_).apart for role in "xwy"}


def _results(p: ConvProblem) -> int:
    """Elements that are divided into tiles: of the result, in a weight gradient of the output gradient."""
    (axis,) = p.axes
    return axis.size if p.pass_ is Pass.DGRAD else axis.out


def _tile(p: ConvProblem, n: int) -> int:
    """Results of one tile in a basis of ``n``: all where nothing wraps, else an even number whose window fits.

    Below 1 where the kernel is longer than the basis.
    """
    (axis,) = p.axes
    if least_whole(axis, p.pass_) <= n:
        return _results(p)
    apart = 1 if p.pass_ is Pass.DGRAD else axis.stride
    return ((n - axis.reach) // apart + 1) // 2 * 2


def _tiles(p: ConvProblem, n: int) -> int:
    """Tiles of a signal in a basis of ``n``."""
    return -(-_results(p) // _tile(p, n))


def _bases(p: ConvProblem) -> list[int]:
    """The bases with the least work."""
    fit = [n for n in _sizes(p) if _fits(p, n)]
    return sorted(fit, key=lambda n: _tiles(p, n) * n * (math.log2(n) + TURNS))[:MOST_BASES]


def configs(p: ConvProblem) -> Iterable[Config]:
    """Configs by basis, signals of a block, and in a weight gradient shares of the batch."""
    listed = []
    for n in _bases(p):
        single = _program(p, n, 1, 0)
        most = p.in_channels if p.pass_ is Pass.WGRAD else p.batch * p.in_channels * _tiles(p, n)
        wanted = {max(1, threads // single.threads) for threads in THREADS}
        for signals in sorted({min(count, most) for count in wanted}):
            program = _program(p, n, signals, 0)
            c = Config(basis=(n,), signals=signals)
            if not program.problems():
                listed += _variants(p, c, program)
    return listed


def _variants(p: ConvProblem, base: Config, program: Program) -> list[Config]:
    """Configs with bounds for registers, or of a weight gradient with shares for one and two waves."""
    fits = SHARED // (program.shared + 1024)
    resident = min(fits, 65536 // (128 * program.threads))
    if p.pass_ is not Pass.WGRAD:
        bounds = [n for n in (resident, resident + 1) if 1 < n <= min(fits, 8)]
        return [*(Config(**base, resident=n) for n in bounds), base]
    blocks = -(-p.in_channels // program.signals)
    count = p.batch * _tiles(p, program.n)
    wave = max(1, PROCESSORS * max(1, min(fits, 65536 // (128 * program.threads))) // blocks)
    return [Config(**base, shares=n) for n in sorted({min(count, wave), min(count, 2 * wave)})]


def _program(p: ConvProblem, n: int, signals: int, resident: int,
             paired: tuple[bool, bool, bool] = (False, False, False)) -> Program:  # fmt: skip
    """The kernel that computes the problem's pass by transforms of ``n`` points."""
    name = "depthwise1d_gradient" if p.pass_ is Pass.WGRAD else "depthwise1d_image"
    dtype, distances = p.torch_dtype(p.operands[0]), _apart(p)
    first, second, result = (distances[role] for role in _roles(p))
    return Program(
        name, n, dtype, signals, paired, resident, correlates(p), p.out_dtype == "fp32", (first, second, result)
    )


def _roles(p: ConvProblem) -> tuple[str, str, str]:
    """Both operands and the result in the kernels' order: images before filters."""
    return ("x", "y", "w") if p.pass_ is Pass.WGRAD else (p.operands[0], "w", p.result)


def _size(c: Config) -> int:
    """The basis of a config. Raises ``ValueError`` for what is none."""
    basis = c["basis"]
    if not isinstance(basis, tuple) or len(basis) != 1 or basis[0] not in SIZES:
        raise ValueError(f"basis={basis!r}: one of {', '.join(map(str, SIZES))} would do")
    return basis[0]


def workspace(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are not kept, or of a weight gradient's shares where there are several."""
    if p.pass_ is Pass.WGRAD:
        shares = integer(c, "shares")
        return 4 * shares * math.prod(p.shape("w")) if shares > 1 else 0
    return 0 if p.constant_weight else _spectra(p, c)


def constant(p: ConvProblem, c: Config) -> int:
    """Bytes of filters' spectra that are kept."""
    return _spectra(p, c) if p.constant_weight else 0


def _spectra(p: ConvProblem, c: Config) -> int:
    """Bytes of all filters' spectra."""
    return 8 * p.in_channels * depthwise1d.spectrum_length(_size(c))


def transformed(p: ConvProblem, c: Config) -> int:
    """Signals times points, over all forward and inverse transforms."""
    n = _size(c)
    return n * p.in_channels * (2 * p.batch * _tiles(p, n) + (not p.constant_weight))


def steps(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
    """The launches. Raises ``ValueError`` for a config that does not fit the problem."""
    tensors, n, (axis,) = operands(p, a, b, out), _size(c), p.axes
    tile = _tile(p, n)
    if tile < 1:
        raise ValueError(f"basis={n}: must be at least {axis.reach}, better twice that")
    whole = least_whole(axis, p.pass_) <= n
    x_first = -axis.before
    y_first = 0
    if p.pass_ is Pass.DGRAD:
        x_first, y_first = (0, -axis.before) if whole else (axis.before - axis.reach + 1, 1 - axis.reach)
    even = {p.operands[0]: x_first, p.result: y_first, "w": 0}
    # The last element of an odd length has no neighbour, whatever is cropped; tiles start at even elements.
    paired = [tensors[role].pairs and p.shape(role)[2] % 2 == 0 and even.get(role, 0) % 2 == 0 for role in _roles(p)]
    program = _program(p, n, integer(c, "signals"), integer(c, "resident") if "resident" in c else 0,
                       (paired[0], paired[1], paired[2]))  # fmt: skip
    if problems := program.problems():
        raise ValueError("; ".join(problems))
    cut = (_tiles(p, n), tile)
    if p.pass_ is Pass.WGRAD:
        return _gradient(p, c, program, tensors, cut)
    if p.constant_weight:
        return [_image(p, program, tensors, cut, (x_first, y_first), SECOND)]
    return [
        _filter(p, program, tensors["w"], (SECOND, WORKSPACE)),
        _image(p, program, tensors, cut, (x_first, y_first), WORKSPACE),
    ]


def filters(p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
    """The launch that transforms filters to be kept: the first tensor is the weight, the result what is kept."""
    return [_filter(p, _program(p, _size(c), integer(c, "signals"), 0), Operand.of(p, "w", weight), (FIRST, OUT))]


def _filter(p: ConvProblem, program: Program, w: Operand, tensors: tuple[int, int]) -> Step:
    """The filters' transform. ``tensors`` are the numbers of the weight and of its spectra, in the order of threads."""
    (taps,), channels = p.shape("w")[2:], p.in_channels
    source, target = tensors
    filters = replace(
        program, name="depthwise1d_filter", signals=min(program.signals, channels), resident=0,
        paired=(w.pairs and taps % 2 == 0, False, False), wide=False, correlate=False, apart=(program.apart[1], 1, 1),
    )  # fmt: skip
    return Step(
        filters, -(-channels // filters.signals), ((source, 0), (target, 0)),
        (channels, w.channel, *w.space, taps, 2.0 / program.n),
    )  # fmt: skip


def _image(
    p: ConvProblem, program: Program, tensors: dict[str, Operand], cut: tuple[int, int], first: tuple[int, int],
    spectra: int,
) -> Step:  # fmt: skip
    """The launch over all images; ``spectra`` is the number of the tensor with the filters' spectra."""
    x, y = tensors[p.operands[0]], tensors[p.result]
    tiles, tile = cut
    signals, length, result = p.batch * p.in_channels * tiles, p.shape(p.operands[0])[2], p.shape(p.result)[2]
    return Step(
        program, -(-signals // program.signals), ((FIRST, 0), (spectra, 0), (OUT, 0)),
        (
            signals, p.batch, tiles, tile, x.channel, x.image, *x.space, length, first[0], y.channel, y.image,
            *y.space, result, first[1],
        ),
    )  # fmt: skip


def _gradient(
    p: ConvProblem, c: Config, program: Program, tensors: dict[str, Operand], cut: tuple[int, int]
) -> list[Step]:
    """The launches of a weight gradient. Raises ``ValueError`` for more shares than images and tiles."""
    x, y, w = (tensors[role] for role in "xyw")
    (tiles, tile), (axis,), shares, channels = cut, p.axes, integer(c, "shares"), p.in_channels
    if shares > p.batch * tiles:
        raise ValueError(f"shares={shares}: at most one for each of {p.batch * tiles} images or tiles")
    operand = (
        channels, p.batch, tiles, shares, tile, x.channel, x.image, *x.space, axis.size, -axis.before, y.channel,
        y.image, *y.space, axis.out,
    )  # fmt: skip
    grid, scale = shares * -(-channels // program.signals), 2.0 / program.n
    if shares == 1:
        pointers = ((FIRST, 0), (SECOND, 0), (OUT, 0))
        return [Step(program, grid, pointers, (*operand, 0, w.channel, *w.space, axis.kernel, scale))]
    elements = channels * axis.kernel
    partial = replace(program, wide=True, paired=(*program.paired[:2], axis.kernel % 2 == 0))
    adder = Adder(program.dtype, program.wide)
    return [
        Step(
            partial, grid, ((FIRST, 0), (SECOND, 0), (WORKSPACE, 0)),
            (*operand, elements, axis.kernel, 1, axis.kernel, scale),
        ),
        Step(
            adder, -(-elements // adder.threads), ((WORKSPACE, 0), (OUT, 0)),
            (elements, shares, 1, axis.kernel, channels, 0, w.channel, 0, *w.space),
        ),
    ]  # fmt: skip
