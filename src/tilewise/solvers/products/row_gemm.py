"""First layers in half precision and channels_last: one product whose sums run over whole rows of the filter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.tiles import PROCESSORS, busy, integer
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._rows import (
    RowTile,
    expected_rows,
    expected_sums,
    launches,
    longest_sums,
    shape_of,
    tiles_of,
    workspace_bytes,
)

__all__ = ["RowGemm"]

MOST = 2**31 - 2**20
"""Most elements of an image or of partial sums, which kernels count in 32 bits."""
MOST_CHANNELS = 16
MOST_CONFIGS = 8
SIDES = (1, 2, 4)
"""How many outputs side by side may be computed as one."""
PRODUCTS, LOADS, BYTES = 600e12, 0.7e12, 2.8e12
"""Operations, reads of gathered elements and bytes of memory a second that an H100 reaches here."""
PEAK = 750e12
"""Operations a second of its cuBLAS."""
OVERLAP = 0.3
"""Share of what takes less time that does not overlap with what takes the most."""

# places, depth, warps, stages, and their time beside the best.
FORWARD = (
    (128, 16, 4, 4, 1.0), (128, 16, 4, 3, 1.0), (64, 32, 4, 4, 1.01), (128, 32, 4, 4, 1.03), (128, 32, 4, 3, 1.05),
    (64, 32, 4, 3, 1.05), (128, 16, 8, 4, 1.1), (128, 32, 8, 3, 1.15),
)  # fmt: skip
# places, warps, stages, programs at once on a multiprocessor, and their time beside the best.
GRADIENT = (
    (128, 8, 4, 1, 1.0), (128, 8, 3, 1, 1.0), (64, 8, 3, 1, 1.02), (64, 8, 4, 1, 1.03), (128, 4, 3, 2, 1.1),
    (32, 4, 3, 2, 1.15), (32, 8, 3, 1, 1.15), (64, 4, 2, 2, 1.15),
)  # fmt: skip
LEAST_STAGES = 2
"""With one stage a gradient of two products at a time, four warps and 64 places was seen to read wild addresses."""
SHARED = 220 << 10
"""Bytes of operands that a program may hold in shared memory: an H100 has 227 KiB."""
MOST_SUMS = 128
"""Most sums that a thread keeps."""
WIDEST = 256
"""Most sums of a filter's gradient in one program."""


class RowGemm(ConvSolver):
    """One implicit product for layers of few channels that lie innermost (Chetlur et al. 2014, section 3).

    What a row of the filter meets of an image is then one run of memory. A sum runs over the rows and the elements of
    their runs, so that 3 channels cost no more than their data. The image is gathered as it lies, ``lines`` rows of a
    tile's outputs at a time. The filter is packed first. A filter's gradient is summed in ``splits`` shares of the
    outputs, which are added in a fixed order. Sums are in fp32. ``side`` outputs side by side may be computed as one
    with so many times the channels, which reads wider and less. Where the image holds infinities, results near those
    that read one may be NaN.
    """

    name, version = "row_gemm", 2
    passes = frozenset({Pass.FPROP, Pass.WGRAD})
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16"})
    compiles = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    accumulates = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, several groups, many channels, channels that are not innermost, large images."""
        reasons = triton_missing()
        if p.groups > 1:
            reasons.append(f"takes one group, not {p.groups}")
        if p.in_channels > MOST_CHANNELS:
            reasons.append(f"takes at most {MOST_CHANNELS} input channels, not {p.in_channels}")
        if p.layout("x") == "contiguous" and p.in_channels > 1:
            reasons.append("reads the image's channels side by side: its layout channels_last would do")
        if any(math.prod(p.shape(role)[1:]) > MOST for role in ("x", "y")):
            reasons.append(f"one image has more than {MOST} elements")
        if p.out_channels * longest_sums(p, SIDES[-1], 1) > MOST // 2048:
            reasons.append(f"the filter has more than {MOST // 2048} elements")
        if p.batch * math.prod(axis.out for axis in p.axes) > MOST:
            reasons.append(f"there are more than {MOST} outputs")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tiles that fill best, weighted by the rate that they usually reach."""
        rated = sorted(_rated(p), key=lambda entry: entry[0])
        return list(dict.fromkeys(c for _, c in rated))[:MOST_CONFIGS]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the packed filter or of a filter gradient's partial sums."""
        return workspace_bytes(p, _tile(c), integer(c, "splits", 1))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic at the rate that products, reads and memory allow together."""
        tile, splits = _tile(c), integer(c, "splits", 1)
        moved = p.bytes + 2 * self.workspace(p, c)
        return Cost(p.flops, moved, 2, efficiency=min(1.0, p.flops / (PEAK * _seconds(p, tile, splits))))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(p, _tile(c), integer(c, "splits", 1), a, b, out), a.device)


def _rated(p: ConvProblem) -> Iterator[tuple[float, Config]]:
    """Configs with the time that they may be expected to take."""
    for side in _sides(p):
        filters = _power(side * p.out_channels)
        if p.pass_ is Pass.WGRAD:
            depth, more = _covering(expected_sums(p, side, 1))
            for places, warps, stages, at_once, time in GRADIENT:
                channels = min(max(64, filters), MOST_SUMS * 32 * warps // _power(depth + more))
                if 2 * stages * places * (channels + depth + more) > SHARED:
                    continue
                for tile in _shaped(p, places, RowTile(side, 0, 0, channels, depth, more, warps, stages)):
                    splits = _splits(p, tile, at_once)
                    yield time * _seconds(p, tile, splits), _config(p, tile, splits)
            continue
        for places, depth, warps, stages, time in FORWARD:
            channels = min(256, max(16, filters), MOST_SUMS * 32 * warps // places)
            for tile in _shaped(p, places, RowTile(side, 0, 0, channels, depth, 0, warps, stages)):
                yield time * _seconds(p, tile, 1), _config(p, tile, 1)


def _sides(p: ConvProblem) -> list[int]:
    """How many outputs side by side are worth computing as one: more where that makes reads wider."""
    axis = p.axes[-1]
    if axis.dilation > 1 and axis.kernel > 1:
        return [1]
    return [side for side in SIDES if side <= axis.out and side * p.out_channels <= 512]


def _shaped(p: ConvProblem, places: int, tile: RowTile) -> list[RowTile]:
    """``tile`` with so many places: all in one line, whose borders take the least work, or as fills best."""
    shapes = [replace(tile, lines=n, columns=places // n) for n in (1, 2, 4, 8, 16) if places // n >= 8]
    best = max(shapes, key=lambda shape: (_place_share(p, shape), -shape.lines))
    alone = shapes[0]
    return [best] if best == alone or _place_share(p, alone) < 0.8 else [best, alone]


def _covering(sums: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that cover ``sums`` closely."""
    if sums > WIDEST:
        return WIDEST // 2, 0
    first = max(16, _power(sums + 1) // 2)
    rest = 0 if first >= sums else max(16, _power(sums - first))
    return (2 * first, 0) if rest >= first else (first, rest)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def _config(p: ConvProblem, tile: RowTile, splits: int) -> Config:
    """The config of a tile."""
    sizes = (tile.lines * tile.columns, tile.channels, tile.depth)
    base = Config(tile=sizes, side=tile.side, lines=tile.lines, warps=tile.warps, stages=tile.stages)
    if p.pass_ is not Pass.WGRAD:
        return base
    return Config(**base, splits=splits, **({"more": tile.more} if tile.more else {}))


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    names = {"tile", "side", "lines", "warps", "stages"}
    try:
        tile, splits = _tile(c), integer(c, "splits", 1)
    except (KeyError, ValueError):
        return False
    if tile.stages < LEAST_STAGES or (tile.side > 1 and tile.side not in _sides(p)):
        return False
    if p.pass_ is not Pass.WGRAD:
        return set(c) == names
    partial = splits * tile.side * p.out_channels * longest_sums(p, tile.side, 1)
    return set(c) - {"more"} == {*names, "splits"} and splits <= tiles_of(p, tile) and partial <= MOST


def _tile(c: Config) -> RowTile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    sizes, lines, more = c["tile"], integer(c, "lines"), integer(c, "more") if "more" in c else 0
    powers = tuple(1 << n for n in range(4, 9))
    if not isinstance(sizes, tuple) or len(sizes) != 3 or any(n not in powers for n in sizes):
        raise ValueError(f"tile={sizes!r}: powers of two from 16 to 256 for outputs, channels and depth would do")
    if sizes[0] % lines or lines & (lines - 1) or (more and more not in powers):
        raise ValueError(f"lines={lines}, more={more}: powers of two would do")
    warps = integer(c, "warps")
    if warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"warps={warps}: a power of two up to 16 would do")
    return RowTile(integer(c, "side"), lines, sizes[0] // lines, sizes[1], sizes[2], more, warps, integer(c, "stages"))


def _place_share(p: ConvProblem, tile: RowTile) -> float:
    """Share of the outputs in tiles that exist."""
    d, h, w = shape_of(p)
    return p.batch * d.out * h.out * w.out / (tiles_of(p, tile) * tile.lines * tile.columns * tile.side)


def _programs(p: ConvProblem, tile: RowTile) -> int:
    """Programs that gather the same places: one for each tile of channels and, of a gradient, of sums."""
    programs = -(-p.out_channels * tile.side // tile.channels)
    if p.pass_ is Pass.WGRAD:
        programs *= -(-expected_sums(p, tile.side, 1) // (tile.depth + tile.more))
    return programs


def _seconds(p: ConvProblem, tile: RowTile, splits: int) -> float:
    """What products, reads and memory take, mostly at the same time."""
    width = tile.depth + tile.more if p.pass_ is Pass.WGRAD else 1
    step = 1 if p.pass_ is Pass.WGRAD else tile.depth
    run = expected_rows(p, tile.side, step).run
    sums = -(-expected_sums(p, tile.side, step) // width) * width
    places = tiles_of(p, tile) * tile.lines * tile.columns
    channels = -(-p.out_channels * tile.side // tile.channels)
    share = busy(_programs(p, tile) * (splits if p.pass_ is Pass.WGRAD else tiles_of(p, tile)))
    times = sorted(
        (
            2 * places * channels * tile.channels * sums / PRODUCTS / share,
            places * channels * sums / run / LOADS / share,
            (p.bytes + 2 * workspace_bytes(p, tile, splits)) / BYTES,
        )
    )
    return times[2] + OVERLAP * (times[0] + times[1])


def _splits(p: ConvProblem, tile: RowTile, at_once: int) -> int:
    """Shares of the outputs that keep ``at_once`` programs on every multiprocessor, or as many as are worth it."""
    tiles = tiles_of(p, tile)
    most = max(1, MOST // (tile.side * p.out_channels * longest_sums(p, tile.side, 1)))
    splits = max(1, min(at_once * PROCESSORS // _programs(p, tile), tiles // 4, most))
    return -(-tiles // -(-tiles // splits))
