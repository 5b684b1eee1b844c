"""Patch embeddings and pointwise convolutions as one matrix product over the tensors as they lie."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.tiles import PROCESSORS, busy, integer, splits_that_fill
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._patch import Tile, counts, launches, sizes

__all__ = ["PatchGemm"]

MOST = 2**31 - 2**20
"""Most tokens, and most elements of the filter: kernels count them in 32 bits."""
MOST_CONFIGS = 8
FULL = 0.6
"""Rate of full tiles relative to cuBLAS's products in the problem's precision on the same device."""

# rows x columns x depth, warps, stages, and their rate beside the best.
TILES = {
    2: (
        (Tile(128, 256, 64, 8, 3), 1.0), (Tile(128, 256, 64, 8, 4), 0.99), (Tile(256, 128, 64, 8, 3), 0.97),
        (Tile(128, 128, 64, 4, 3), 0.92), (Tile(128, 128, 64, 8, 4), 0.9), (Tile(128, 128, 64, 4, 4), 0.88),
        (Tile(64, 256, 64, 4, 3), 0.85), (Tile(128, 128, 32, 4, 4), 0.8), (Tile(64, 128, 64, 4, 4), 0.75),
        (Tile(128, 64, 64, 4, 4), 0.75), (Tile(64, 128, 32, 4, 4), 0.65), (Tile(64, 64, 64, 4, 4), 0.55),
        (Tile(64, 64, 32, 4, 4), 0.5),
    ),
    4: (
        (Tile(128, 256, 32, 8, 3), 1.0), (Tile(128, 128, 32, 8, 4), 0.95), (Tile(128, 128, 32, 4, 3), 0.9),
        (Tile(256, 128, 32, 8, 3), 0.9), (Tile(64, 128, 32, 4, 4), 0.75), (Tile(128, 64, 32, 4, 4), 0.75),
        (Tile(64, 64, 32, 4, 4), 0.55),
    ),
}  # fmt: skip
"""Tiles by the bytes of an operand's element."""


class PatchGemm(ConvSolver):
    """One product that gathers its operands from the tensors and scatters its result, for kernels as large as strides.

    Patch embeddings (Dosovitskiy et al. 2021, equation 1), kernels as large as the image and pointwise ones of stride
    1: no input is read twice, so an element's address is the sum of one number for its row and one for its column, and
    the product reads images and writes them with no copy in between. Memory goes to the partial sums of filter
    gradients alone: ``splits`` shares of the tokens, summed in order. Sums are in fp32; fp32 operands are rounded to
    TF32.
    """

    name, version = "patch_gemm", 2
    devices = frozenset({"cuda"})
    compiles = True
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    accumulates = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Triton, several groups, fp32 precision, windows that overlap or leave gaps."""
        reasons = triton_missing()
        if p.groups > 1:
            reasons.append(f"takes one group, not {p.groups}")
        if p.dtype == "fp32" and p.precision != "tf32":
            reasons.append(f"multiplies fp32 values as TF32 alone, not with precision {p.precision}")
        for name, axis in zip(p.space, p.axes, strict=True):
            if not axis.side_by_side:
                reasons.append(
                    f"along {name} needs a stride equal to the kernel or one output, without dilation; this is kernel "
                    f"{axis.kernel}, stride {axis.stride}, dilation {axis.dilation}, {axis.out} outputs"
                )
            if axis.before or axis.after:
                reasons.append(f"along {name} takes no padding, not ({axis.before}, {axis.after})")
            if axis.out * axis.kernel != axis.size:
                reasons.append(
                    f"along {name} needs whole windows: {axis.out} of {axis.kernel} are not all of {axis.size}"
                )
        count = counts(p)
        for what, number in (("tokens", count["t"]), ("filter elements", count["m"] * count["k"])):
            if number > MOST:
                reasons.append(f"counts to {MOST}; there are {number} {what}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tiles that fill best, weighted by the rate that they usually reach."""
        rated = []
        for tile, rate in TILES[p.torch_dtype(p.operands[0]).itemsize]:
            splits = _splits(p, tile)
            rated.append((rate * _filled(p, tile, splits), tile, splits))
        rated.sort(key=lambda entry: -entry[0])
        return [_config(p, tile, splits) for _, tile, splits in rated[:MOST_CONFIGS]]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a weight gradient's partial sums where there is more than one."""
        splits = integer(c, "splits", 1)
        return splits * 4 * math.prod(p.shape("w")) if splits > 1 else 0

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The direct method's arithmetic at the rate of the matrix units, on tiles as they fill."""
        tile, splits = _tile(c), integer(c, "splits", 1)
        rate = next((rate for entry, rate in TILES[p.torch_dtype(p.operands[0]).itemsize] if entry == tile), 0.5)
        moved = p.bytes + 2 * self.workspace(p, c)
        return Cost(p.flops, moved, 1 + (splits > 1), efficiency=FULL * rate * _filled(p, tile, splits))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with Triton's reason."""
        assert out is not None
        if not _fits(p, c):
            raise SolverUnavailable(f"{c} is no config of {p.key}")
        steps = launches(p, _tile(c), integer(c, "splits", 1), a, b, out)
        return compiled(p, steps, a.device)


def _config(p: ConvProblem, tile: Tile, splits: int) -> Config:
    """The config of a tile."""
    base = Config(tile=(tile.rows, tile.columns, tile.depth), warps=tile.warps, stages=tile.stages)
    return Config(**base, splits=splits) if p.pass_ is Pass.WGRAD else base


def _fits(p: ConvProblem, c: Config) -> bool:
    """Whether ``c`` is a config of ``p``."""
    names = {"tile", "warps", "stages", *(["splits"] if p.pass_ is Pass.WGRAD else [])}
    try:
        return set(c) == names and integer(c, "splits", 1) <= sizes(p)[2] and _tile(c).warps in (1, 2, 4, 8, 16)
    except (KeyError, ValueError):
        return False


def _tile(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    edges = c["tile"]
    if not isinstance(edges, tuple) or len(edges) != 3 or any(n not in (16, 32, 64, 128, 256) for n in edges):
        raise ValueError(f"tile={edges!r}: powers of two from 16 to 256 for rows, columns and depth would do")
    return Tile(*edges, warps=integer(c, "warps"), stages=integer(c, "stages"))


def _filled(p: ConvProblem, tile: Tile, splits: int) -> float:
    """Share of the products in tiles that the result needs, times the share of busy multiprocessors."""
    share, tiles = 1.0, splits
    rows, columns, depth = sizes(p)
    for size, edge in ((rows, tile.rows), (columns, tile.columns)):
        tiles *= -(-size // edge)
        share *= size / (-(-size // edge) * edge)
    steps = -(-depth // tile.depth)
    share *= depth / (-(-steps // splits) * splits * tile.depth)
    return share * busy(tiles)


def _splits(p: ConvProblem, tile: Tile) -> int:
    """How many partial sums of a weight gradient fill the multiprocessors in whole waves."""
    if p.pass_ is not Pass.WGRAD:
        return 1
    rows, columns, tokens = sizes(p)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    most = max(1, min(64, tokens // (8 * tile.depth), 4 * PROCESSORS // tiles))
    return splits_that_fill(most, tokens, lambda n: _filled(p, tile, n))
