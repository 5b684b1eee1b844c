"""A depthwise convolution and the pointwise one behind it in one kernel, in half precision on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.solvers.base import Cost, Prepare, Run, SolverUnavailable
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.common.triton_run import compiled, triton_missing
from tilewise.solvers.separable._separable import SeparableSolver
from tilewise.solvers.separable._tiles import (
    MATRIX,
    best_tiles,
    config_of,
    kept_places,
    launch_of,
    put_in_order,
    seconds,
    tile_of,
)

__all__ = ["SeparableTiles"]

MOST = 2**31 - 2**20
"""Most elements of an image and of a result, and most pixels: the kernel counts them in 32 bits."""
MOST_FILTERS = 2**26
"""Most elements of all filters, which are counted in 32 bits too. Filled up there are more of them."""
LONGEST = 15


class SeparableTiles(SeparableSolver):
    """Tile by tile of pixels, so that what lies between the two convolutions stays in registers.

    A program filters ``depth`` channels of its pixels, in fp32, adds the bias, applies the function, rounds as the
    layers by themselves do, and adds the products with these channels' filters to its sums: first depthwise, then
    pointwise (Howard et al. 2017, section 3.1). Then follow bias, residual and function, and the result is rounded and
    written once. ``lanes`` (images, rows, columns) are a program's, each of ``edge`` pixels in a row, which share what
    is read. Outputs that registers cannot hold are divided into parts of ``outputs``, for each of which the depthwise
    convolution is computed anew. Filters are kept with channels innermost.
    """

    name, version = "separable_tiles", 1
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16"})
    compiles = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    exact_memory = True
    most_compiled = 4

    def unsupported(self, p: SeparableProblem) -> list[str]:
        """Reasons: no Triton, a pointwise convolution in front or none behind, long kernels, large tensors."""
        reasons = triton_missing()
        if p.expands:
            reasons.append("takes no pointwise convolution in front, whose results each tap would compute anew")
        if not p.projects:
            reasons.append("takes a pointwise convolution behind the depthwise one")
        for name, axis in zip("hw", p.axes, strict=True):
            if axis.kernel > LONGEST:
                reasons.append(
                    f"unrolls lines of the filter: of at most {LONGEST} taps along {name}, not {axis.kernel}"
                )
        largest, filters = max(math.prod(p.shape(role)[1:]) for role in "xy"), p.shape("w")[0]
        for what, number, most in (
            ("elements in an image", largest, MOST),
            ("pixels", p.batch * p.pixels[1], MOST),
            ("elements of filters", filters, MOST_FILTERS),
        ):
            if number > most:
                reasons.append(f"counts to {most}; there are {number} {what}")
        return reasons

    def configs(self, p: SeparableProblem) -> Iterable[Config]:
        """Tiles in the order of what they should take."""
        return [config_of(tile) for tile in best_tiles(p)]

    def constant(self, p: SeparableProblem, c: Config) -> int:
        """Bytes of the filters with channels innermost, and of biases."""
        return kept_places(p, tile_of(c))[-1]

    def prepare(self, p: SeparableProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What puts channels of filters innermost."""
        tile = tile_of(c)

        def prepared(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            put_in_order(p, tile, weight, kept)

        return prepared

    def cost(self, p: SeparableProblem, c: Config) -> Cost:
        """The arithmetic of all parts at the rate that a tile reaches.

        Where memory decides, it takes ``p.bytes`` over the bandwidth: images and filters read once, results written
        once, and a residual read. The two layers by themselves also write and read what lies between them, and launch
        one more kernel. For example, 144 channels of 56x56 to 24, at batch 32 in bf16, move 34 MB instead of 92 MB. At
        the 4.2 TB/s that an H200 reaches these are 8 us instead of 22 us, and 2 to 3 us for the launch. The taps'
        instructions take at least as long. Each further part of outputs filters all channels once more, which counts
        here. So blocks of many outputs are estimated as slower than they would be whole, and measured later or not.
        """
        return Cost(p.flops, p.bytes, 1, efficiency=min(1.0, p.flops / (MATRIX * seconds(p, tile_of(c)))))

    def bind(self, p: SeparableProblem, c: Config, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernel for these strides. Raises ``SolverUnavailable`` with the reason."""
        assert out is not None
        with config_reasons(p, c):
            tile = tile_of(c)
        for role, tensor in (("x", x), ("y", out)):
            if tensor.shape[1] > 1 and tensor.stride(1) != 1:
                raise SolverUnavailable(f"{role} has strides {tensor.stride()}: channels side by side would do")
        return compiled(p, [launch_of(p, tile, x, out)], x.device)
