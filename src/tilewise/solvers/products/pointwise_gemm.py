"""Pointwise convolutions in half precision and channels_last, with bias, residual and activation added in registers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.tiles import busy, config_reasons, integer
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.common.views import BIAS, OUT, A, B, View, epilogue, launch, residual_like
from tilewise.solvers.conv import ConvSolver

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["PointwiseGemm"]

MOST = 2**31 - 2**20
"""Most pixels, and most elements of an image or of the filter: kernels count them in 32 bits."""
EDGES = (16, 32, 64, 128, 256)
MOST_STAGES = 8
LONGEST = 64
"""Most products of a sum in one step."""
MATRIX, MEMORY = 800e12, 2.8e12
"""Operations a second of an H100's matrix units, and bytes a second of its memory, that kernels reach at best."""


@dataclass(frozen=True, slots=True)
class Tile:
    """``pixels`` by ``outputs`` of the result for each program, whose sums go on ``depth`` products at a time."""

    pixels: int
    outputs: int
    depth: int
    warps: int
    stages: int


RATES = {
    (128, 256, 8, 3): 0.6, (256, 128, 8, 3): 0.65, (128, 128, 8, 3): 0.7, (128, 128, 4, 4): 0.6, (64, 256, 8, 3): 0.55,
    (256, 64, 8, 3): 0.55, (64, 128, 4, 4): 0.7, (128, 64, 4, 4): 0.68, (64, 64, 4, 4): 0.65, (128, 32, 4, 4): 0.4,
    (64, 32, 4, 5): 0.35, (32, 64, 4, 5): 0.25,
}  # fmt: skip
"""Share of the matrix units' rate that long sums reach, by pixels, outputs, warps and stages of a tile."""


class PointwiseGemm(ConvSolver):
    """One product of pixels and filters (Chetlur et al. 2014, section 3), which is a convolution of one tap.

    Sums, in fp32, stay in registers until bias, residual and activation have been added, so that the result is rounded
    and written once. A program computes ``tile`` pixels by outputs, and sums the tile's third number of products in a
    step. Strides are read as they lie.
    """

    name, version = "pointwise_gemm", 1
    passes = frozenset({Pass.FPROP})
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16"})
    compiles = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    most_compiled = 5

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, several taps or groups, padding, channels that are not innermost, large tensors."""
        reasons = triton_missing()
        if p.groups > 1:
            reasons.append(f"takes one group, not {p.groups}")
        if p.taps > 1 or any(axis.before or axis.after for axis in p.axes):
            reasons.append("takes filters of one tap without padding")
        if any(p.layout(role) != "channels_last" for role in p.roles):
            reasons.append("reads and writes channels side by side: channels_last for all tensors would do")
        if p.out_dtype != p.dtype:
            reasons.append(f"gives {p.dtype}, not {p.out_dtype}")
        largest = max(math.prod(p.shape(role)[role != "w" :]) for role in p.roles)
        for what, number in (("pixels", _pixels(p)), ("elements in an image or the filter", largest)):
            if number > MOST:
                reasons.append(f"counts to {MOST}; there are {number} {what}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tiles that should be fastest by their products, by memory, and by how they fill the multiprocessors."""
        return [_config(tile) for tile in sorted(_tiles(p), key=lambda tile: _seconds(p, tile))]

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic at the rate that a tile reaches."""
        return Cost(p.flops, p.bytes, 1, efficiency=min(1.0, p.flops / (MATRIX * _seconds(p, _tile(c)))))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernel for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        with config_reasons(p, c):
            tile = _tile(c)
        return compiled(p, [_launch(p, tile, View.of(a))], a.device)


def _pixels(p: ConvProblem) -> int:
    """Pixels of all results."""
    return p.batch * math.prod(axis.out for axis in p.axes)


def _tiles(p: ConvProblem) -> list[Tile]:
    """All tiles, with sums in steps that divide them where those are not too short."""
    whole = [n for n in EDGES if n <= LONGEST and p.in_channels % n == 0]
    depth = max(whole, default=min(LONGEST, max(EDGES[0], 1 << (p.in_channels - 1).bit_length())))
    return [Tile(pixels, outputs, depth, warps, stages) for pixels, outputs, warps, stages in RATES]


def _seconds(p: ConvProblem, tile: Tile) -> float:
    """What a tile's products or memory take, whichever is longer, and a part of the other."""
    down, across = -(-_pixels(p) // tile.pixels), -(-p.out_channels // tile.outputs)
    steps = -(-p.in_channels // tile.depth)
    rate = RATES.get((tile.pixels, tile.outputs, tile.warps, tile.stages), 0.5) * MATRIX
    share = busy(down * across)
    # The pipeline of a short sum is filled and emptied as often as that of a long one.
    products = 2 * down * across * tile.pixels * tile.outputs * (steps + 1) * tile.depth / rate / share
    moved = p.bytes / MEMORY / share
    return max(products, moved) + 0.3 * min(products, moved)


def _config(tile: Tile) -> Config:
    """The config of a tile."""
    return Config(tile=(tile.pixels, tile.outputs, tile.depth), warps=tile.warps, stages=tile.stages)


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    sizes, warps, stages = c["tile"], integer(c, "warps"), integer(c, "stages")
    if not isinstance(sizes, tuple) or len(sizes) != 3 or any(n not in EDGES for n in sizes):
        raise ValueError(f"tile={sizes!r}: powers of two from 16 to 256 for pixels, outputs and depth would do")
    if set(c) != {"tile", "warps", "stages"} or warps not in (1, 2, 4, 8, 16) or stages > MOST_STAGES:
        raise ValueError(f"warps={warps}, stages={stages}: a power of two up to 16, and up to {MOST_STAGES}, would do")
    return Tile(*sizes, warps=warps, stages=stages)


def _launch(p: ConvProblem, tile: Tile, x: View) -> Launch:
    """The launch for an image that lies as ``x`` does."""
    from tilewise.kernels.triton.channels_last.pointwise import pointwise
    from tilewise.kernels.triton.launch import Pointer

    dtype = p.torch_dtype("x")
    steps = (*[1] * (3 - p.dims), *(axis.stride for axis in p.axes))
    out = (*[1] * (3 - p.dims), *(axis.out for axis in p.axes))
    strides = (x.strides[0], *(stride * step for stride, step in zip(x.strides[2:], steps, strict=True)))
    result = Pointer(OUT, 0, dtype)
    pointers = (
        Pointer(A, 0, dtype), Pointer(B, 0, dtype), result, Pointer(BIAS, 0, dtype) if p.bias else result,
        residual_like(p, result),
    )  # fmt: skip
    count = _pixels(p)
    programs = -(-count // tile.pixels) * -(-p.out_channels // tile.outputs)
    return launch(
        pointwise, (programs,), pointers, (count, p.in_channels, p.out_channels, *out, *strides),
        tile.warps, tile.stages, STRIDED=max(steps) > 1, WHOLE=p.in_channels % tile.depth == 0, BIAS=p.bias,
        **epilogue(p), BLOCK_P=tile.pixels, BLOCK_O=tile.outputs, BLOCK_K=tile.depth,
    )  # fmt: skip
