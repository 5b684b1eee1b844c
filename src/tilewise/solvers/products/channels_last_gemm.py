"""Half precision in channels_last: one implicit matrix product over tensors as they lie, in every pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.tiles import PROCESSORS, busy, integer, splits_that_fill
from tilewise.solvers.common.triton_run import compiled, has_triton
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._taps import TapTile, channels_of, launches, phases_of, pixels_of, workspace_bytes

__all__ = ["ChannelsLastGemm"]

MOST = 2**31 - 2**20
"""Most elements of a tensor, which kernels count in 32 bits."""
MOST_PIXELS = 2**30
"""Most pixels of all images, which kernels divide by multiplying."""
MOST_CONFIGS = 8
RATES = {Pass.FPROP: (0.65, 0.0085), Pass.DGRAD: (0.65, 0.0085), Pass.WGRAD: (0.4, 0.006)}
"""Rate of full tiles relative to cuBLAS's products at most, and for each operation per byte of tiles.

Tiles come from the second cache. An H100 was seen to reach 470 TFLOP/s, 290 in filters' gradients.
"""

# pixels x channels x depth, warps, stages, and their rate beside the best.
PRODUCT = (
    (TapTile(128, 256, 64, 8, 3), 1.0), (TapTile(256, 128, 64, 8, 3), 1.0), (TapTile(128, 128, 64, 4, 3), 0.95),
    (TapTile(128, 128, 64, 8, 3), 0.95), (TapTile(128, 128, 32, 4, 4), 0.9), (TapTile(256, 64, 64, 8, 3), 0.9),
    (TapTile(128, 64, 64, 4, 4), 0.9), (TapTile(64, 256, 64, 4, 3), 0.85), (TapTile(64, 128, 64, 4, 4), 0.85),
    (TapTile(128, 64, 32, 4, 4), 0.85), (TapTile(256, 64, 32, 4, 4), 0.85), (TapTile(64, 64, 64, 4, 4), 0.8),
    (TapTile(128, 32, 64, 4, 4), 0.8), (TapTile(128, 32, 32, 4, 4), 0.8), (TapTile(128, 16, 32, 4, 4), 0.7),
    (TapTile(128, 32, 16, 4, 4), 0.7), (TapTile(128, 128, 16, 4, 4), 0.6),
)  # fmt: skip
# columns x channels x depth (pixels), warps, stages, and their rate beside the best.
GRADIENT = (
    (TapTile(256, 128, 64, 8, 3), 1.0), (TapTile(128, 256, 64, 8, 3), 1.0), (TapTile(128, 128, 64, 8, 3), 0.95),
    (TapTile(128, 128, 64, 4, 3), 0.95), (TapTile(256, 64, 64, 4, 3), 0.95), (TapTile(256, 64, 64, 8, 3), 0.9),
    (TapTile(128, 128, 32, 4, 4), 0.9), (TapTile(128, 64, 64, 4, 4), 0.9), (TapTile(64, 128, 64, 4, 4), 0.85),
    (TapTile(64, 64, 64, 4, 4), 0.8), (TapTile(64, 64, 128, 4, 3), 0.8), (TapTile(32, 64, 64, 4, 4), 0.7),
)  # fmt: skip


class ChannelsLastGemm(ConvSolver):
    """One implicit product over tensors whose channels lie innermost (Chetlur et al. 2014, section 3), with no copy.

    A sum runs over taps and then channels, and each tap reads its pixels where they lie. An image's gradient with
    strides is computed by phases, pixels that meet the same taps, all in one launch. A filter's gradient is summed in
    ``splits`` shares of the pixels, which are added in a fixed order. Sums are in fp32.
    """

    name, version = "channels_last_gemm", 1
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16"})
    compiles = True
    most_configs = 2
    adds_bias = True
    accumulates = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, depthwise layers, channels that are not innermost, tensors too large for 32 bits."""
        reasons = []
        if not has_triton():
            reasons.append("needs the package triton")
        if p.depthwise:
            reasons.append(f"each of the {p.groups} groups has one input channel, which leaves little to sum")
        for role in ROLES:
            apart = p.layout(role) == "contiguous" and p.shape(role)[1] > 1 and math.prod(p.shape(role)[2:]) > 1
            if apart and role != p.result:
                reasons.append(f"reads channels of {role} side by side: its layout channels_last would do")
            if math.prod(p.shape(role)) > MOST:
                reasons.append(f"{role} has more than {MOST} elements")
        if pixels_of(p) > MOST_PIXELS:
            reasons.append(f"there are more than {MOST_PIXELS} pixels")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tiles that fill best, weighted by the rate that they usually reach."""
        rated = sorted(_rated(p), key=lambda entry: -entry[0])
        return [c for score, c in rated[:MOST_CONFIGS] if score >= 0.4 * rated[0][0]]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a filter gradient's partial sums where there is more than one share."""
        return workspace_bytes(p, integer(c, "splits", 1))

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic at the rate of the matrix units, on tiles as they fill."""
        tile, splits = _tile(c), integer(c, "splits", 1)
        rate = next((rate for entry, rate in (*PRODUCT, *GRADIENT) if entry == tile), 0.5)
        moved = p.bytes + 2 * self.workspace(p, c)
        return Cost(p.flops, moved, 1 + (splits > 1), efficiency=rate * _reached(p, tile, splits))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        return compiled(p, launches(p, _tile(c), integer(c, "splits", 1), a, b, out), a.device)


def _rated(p: ConvProblem) -> Iterator[tuple[float, Config]]:
    """Configs with what they may be expected to reach."""
    gradient = p.pass_ is Pass.WGRAD
    for tile, rate in GRADIENT if gradient else PRODUCT:
        splits = _splits(p, tile) if gradient else 1
        base = Config(tile=(tile.pixels, tile.channels, tile.depth), warps=tile.warps, stages=tile.stages)
        yield rate * _reached(p, tile, splits), Config(**base, splits=splits) if gradient else base


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    names = {"tile", "warps", "stages", *(["splits"] if p.pass_ is Pass.WGRAD else [])}
    try:
        return set(c) == names and integer(c, "splits", 1) <= pixels_of(p) and _tile(c).warps in (1, 2, 4, 8, 16)
    except (KeyError, ValueError):
        return False


def _tile(c: Config) -> TapTile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    edges = c["tile"]
    if not isinstance(edges, tuple) or len(edges) != 3 or any(n not in (16, 32, 64, 128, 256) for n in edges):
        raise ValueError(f"tile={edges!r}: powers of two from 16 to 256 for pixels, channels and depth would do")
    return TapTile(*edges, warps=integer(c, "warps"), stages=integer(c, "stages"))


def _sizes(p: ConvProblem) -> tuple[int, int, int]:
    """Pixels (of a filter's gradient: columns), channels and sums (there: pixels) of a group's product."""
    channels, summed = channels_of(p)
    if p.pass_ is Pass.WGRAD:
        return p.taps * summed, channels, pixels_of(p)
    return pixels_of(p), channels, summed


def _reached(p: ConvProblem, tile: TapTile, splits: int) -> float:
    """The rate of a tile's products, as tiles fill and as operands come from the second cache."""
    intensity = tile.pixels * tile.channels / (tile.pixels + tile.channels)
    full, traffic = RATES[p.pass_]
    return min(full, traffic * intensity) * _filled(p, tile, splits)


def _filled(p: ConvProblem, tile: TapTile, splits: int) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    share, programs = 1.0, splits * p.groups * phases_of(p)
    pixels, channels, depth = _sizes(p)
    for size, edge in ((pixels, tile.pixels), (channels, tile.channels)):
        programs *= -(-size // edge)
        share *= size / (-(-size // edge) * edge)
    steps = -(-depth // tile.depth)
    share *= depth / (-(-steps // splits) * splits * tile.depth)
    return share * busy(programs)


def _splits(p: ConvProblem, tile: TapTile) -> int:
    """How many partial sums of a filter's gradient fill the multiprocessors in whole waves."""
    columns, channels, pixels = _sizes(p)
    tiles = p.groups * -(-columns // tile.pixels) * -(-channels // tile.channels)
    most = max(1, min(256, pixels // (8 * tile.depth), 4 * PROCESSORS // tiles))
    return splits_that_fill(most, pixels, lambda n: _filled(p, tile, n))
