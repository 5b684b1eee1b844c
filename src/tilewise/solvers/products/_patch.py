"""A convolution that reads no input twice as one matrix product: where its rows, columns and sums lie in memory.

There are three indices: an output channel ``m``, a token ``t`` (image and window) and a tap ``k`` (input channel and
place in the window, in the filter's own order of memory). The filter is a matrix of m and k, the image of t and k, the
output of t and m, and each pass sums over the index that its result has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.views import BIAS, OUT, WORKSPACE, A, B, epilogue, residual_like

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Matrix", "Tile", "adds", "counts", "digits", "launches", "matrices", "sizes"]

Digits = tuple[int, ...]
"""A place in memory as mixed-radix digits, innermost first: stride, size, stride, size, ..., outermost stride."""

LONGEST_RUN = 16
"""Most contiguous elements that are worth knowing of: no access is wider than 16 bytes."""
GROUP = 16
"""Rows of tiles that programs walk together, so that their operands stay in cache."""
ADD_BLOCK = 512
INDICES = {Pass.FPROP: ("m", "t", "k"), Pass.DGRAD: ("k", "t", "m"), Pass.WGRAD: ("m", "k", "t")}
"""Rows, columns and depth of each pass's product; the second operand is its left factor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the product that one program computes: ``rows`` x ``columns``, summed ``depth`` at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as a matrix: the places of its elements along two indices, ``across`` and ``along``.

    With ``inner`` it is contiguous along ``along``, else along ``across``, in runs of ``run`` elements. A run starts at
    a multiple of ``run`` of that index, and at a multiple of ``run`` in memory.
    """

    across: Digits
    along: Digits
    inner: bool
    run: int

    @classmethod
    def of(cls, across: Digits, along: Digits, sizes: tuple[int, int]) -> Matrix:
        """The matrix whose places are sums of ``across`` and ``along``, with ``sizes`` of the two."""
        runs = _run(across, along, sizes[0]), _run(along, across, sizes[1])
        nearest = [place[0] or math.inf for place in (across, along)]
        inner = (runs[1], -nearest[1]) >= (runs[0], -nearest[0])
        return cls(across, along, inner, runs[inner])


def digits(sizes: Sequence[int], strides: Sequence[int]) -> Digits:
    """The places of dimensions (outermost first) that are counted as one.

    Dimensions that memory allows to merge become one digit.
    """
    places: list[int] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if places and stride == places[-2] * places[-1]:
            places[-1] *= size
        else:
            places += [stride, size]
    return tuple(places[:-1]) or (0,)


def adds(place: Digits, block: int) -> bool:
    """Whether places of ``block`` consecutive numbers are those of 0 to ``block - 1`` plus the place of the first.

    The first number is a multiple of ``block``. It holds where no digit that the block fills in part carries into the
    next.
    """
    rest = block
    for size in place[1::2]:
        if rest % size:
            return size % rest == 0
        rest //= size
    return True


def sizes(p: ConvProblem) -> tuple[int, int, int]:
    """Rows, columns and depth (what is summed) of the pass's product."""
    by_index = counts(p)
    rows, columns, depth = (by_index[index] for index in INDICES[p.pass_])
    return rows, columns, depth


def counts(p: ConvProblem) -> dict[str, int]:
    """How many output channels (``m``), tokens (``t``) and taps (``k``) there are."""
    return {
        "m": p.out_channels,
        "t": p.batch * math.prod(axis.out for axis in p.axes),
        "k": p.in_channels * p.taps,
    }


def matrices(p: ConvProblem, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Matrix, Matrix, Matrix]:
    """The left factor (rows, depth), the right factor (columns, depth) and the result (rows, columns)."""
    strides = dict(zip((*p.operands, p.result), (t.stride() for t in (a, b, out)), strict=True))
    x, w, y = strides["x"], strides["w"], strides["y"]
    windows = [p.batch, *(axis.out for axis in p.axes)]
    steps = [x[0], *(s * axis.stride for s, axis in zip(x[2:], p.axes, strict=True))]
    taps = _order(w)
    kernel = [p.shape("w")[dim] for dim in taps]
    places = {
        "xt": digits(windows, steps),
        "xk": digits(kernel, [x[dim] for dim in taps]),
        "wk": digits(kernel, [w[dim] for dim in taps]),
        "wm": digits([p.out_channels], [w[0]]),
        "ym": digits([p.out_channels], [y[1]]),
        "yt": digits(windows, [y[0], *y[2:]]),
    }
    count = counts(p)

    def matrix(role: str, across: str, along: str) -> Matrix:
        return Matrix.of(places[role + across], places[role + along], (count[across], count[along]))

    rows, columns, depth = INDICES[p.pass_]
    right, left = p.operands
    return matrix(left, rows, depth), matrix(right, columns, depth), matrix(p.result, rows, columns)


def launches(p: ConvProblem, tile: Tile, splits: int, a: torch.Tensor, b: torch.Tensor,
             out: torch.Tensor) -> list[Launch]:  # fmt: skip
    """The launch of the product, and with more than one split that of adding the partial sums in the workspace."""
    from tilewise.kernels.triton import patch_gemm as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    rows, columns, depth = sizes(p)
    left, right, result = matrices(p, a, b, out)
    whole = Pointer(OUT, 0, out.dtype)
    bias = Pointer(BIAS, 0, out.dtype) if p.bias else whole
    partial = Pointer(WORKSPACE, 0, torch.float32)
    written, packed = result, Matrix.of((columns,), (1,), (rows, columns))
    if splits > 1:
        result = packed
    wide = max(map(_span, (a, b, out))) >= 2**31
    share = -(-depth // (tile.depth * splits))
    constants: dict[str, Any] = {
        "A_ROWS": left.across, "A_DEPTH": left.along, "A_INNER": left.inner, "A_RUN": left.run,
        "A_ADDS": adds(left.along, tile.depth),
        "B_COLUMNS": right.across, "B_DEPTH": right.along, "B_INNER": right.inner, "B_RUN": right.run,
        "B_ADDS": adds(right.along, tile.depth),
        "OUT_ROWS": result.across, "OUT_COLUMNS": result.along, "OUT_INNER": result.inner, "OUT_RUN": result.run,
        "EVEN_R": rows % tile.rows == 0, "EVEN_C": columns % tile.columns == 0, "EVEN_D": depth % tile.depth == 0,
        "RUN_R": math.gcd(LONGEST_RUN, rows), "RUN_C": math.gcd(LONGEST_RUN, columns),
        "RUN_D": math.gcd(LONGEST_RUN, depth), "SPLIT": splits > 1, "ACCUMULATE": p.accumulate and splits == 1,
        "BIAS": p.bias, "BIAS_ROWS": _biased(p, b), **epilogue(p),
        "PRECISION": "tf32" if p.dtype == "fp32" else "ieee", "WIDE": wide,
        "GROUP": GROUP, "BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "BLOCK_D": tile.depth,
    }  # fmt: skip
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    queued = [
        Launch(
            kernels.gathered_gemm,
            (tiles, splits, 1),
            (
                Pointer(B, 0, b.dtype),
                Pointer(A, 0, a.dtype),
                partial if splits > 1 else whole,
                bias,
                residual_like(p, whole),
            ),
            (rows, columns, depth, share),
            constants,
            tile.warps,
            tile.stages,
        )
    ]
    if splits > 1:
        total = rows * columns
        constants = {
            "OUT_ROWS": written.across, "OUT_COLUMNS": written.along, "DENSE": written == packed,
            "ACCUMULATE": p.accumulate, "WIDE": wide, "BLOCK": ADD_BLOCK,
        }  # fmt: skip
        grid = (-(-total // ADD_BLOCK), 1, 1)
        queued.append(Launch(kernels.add_partials, grid, (partial, whole), (splits, columns, total), constants))
    return queued


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions of a filter's channels and places, outermost first, by its ``strides``."""
    return sorted(range(1, len(strides)), key=lambda dim: -strides[dim])


def _biased(p: ConvProblem, filters: torch.Tensor) -> Digits:
    """The places in a bias of the product's rows: those of a data gradient are taps of channels."""
    if p.pass_ is not Pass.DGRAD:
        return (1,)
    taps = _order(filters.stride())
    return digits([p.shape("w")[dim] for dim in taps], [int(dim == 1) for dim in taps])


def _run(inner: Digits, outer: Digits, size: int) -> int:
    """Length of contiguous runs along ``inner``, which has ``size`` elements: a power of two."""
    if inner[0] != 1:
        return 1
    return math.gcd(LONGEST_RUN, inner[1] if len(inner) > 1 else size, *inner[2::2], *outer[::2])


def _span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
