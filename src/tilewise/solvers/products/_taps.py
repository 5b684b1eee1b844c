"""Products over taps and channels of tensors as they lie: their launches and their workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.common.split_products import UNIT
from tilewise.solvers.common.views import BIAS, OUT, WORKSPACE, A, B, View, counted, launch

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["TapTile", "channels_of", "launches", "phases_of", "pixels_of", "shape_of", "workspace_bytes"]

SUMMED = 4096
"""Partial sums that one program adds up at once: shares times elements."""
MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TapTile:
    """What one program computes: ``pixels`` by ``channels``, ``depth`` sums at a time.

    Of a filter's gradient ``channels`` by ``columns``, ``depth`` pixels at a time: ``pixels`` are its columns then.
    """

    pixels: int
    channels: int
    depth: int
    warps: int
    stages: int


def shape_of(p: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """The axes of depth, height and width; those that a problem lacks have one element."""
    d, h, w = (*[UNIT] * (3 - p.dims), *p.axes)
    return d, h, w


def channels_of(p: ConvProblem) -> tuple[int, int]:
    """Channels of a group: of the result and of the sums (of a filter's gradient: its outputs and its inputs)."""
    into, outof = p.in_channels // p.groups, p.out_channels // p.groups
    return (into, outof) if p.pass_ is Pass.DGRAD else (outof, into)


def phases_of(p: ConvProblem) -> int:
    """Phases that an image's gradient falls into; 1 of other passes."""
    return math.prod(axis.stride for axis in p.axes) if p.pass_ is Pass.DGRAD else 1


def pixels_of(p: ConvProblem) -> int:
    """Pixels of a phase of the result at most, of all images; of a filter's gradient those that it sums over."""
    if p.pass_ is Pass.DGRAD:
        return p.batch * math.prod(-(-axis.size // axis.stride) for axis in p.axes)
    return p.batch * math.prod(axis.out for axis in p.axes)


def workspace_bytes(p: ConvProblem, splits: int) -> int:
    """Bytes of the partial sums of a filter's gradient, where there is more than one share."""
    return splits * 4 * math.prod(p.shape("w")) if splits > 1 else 0


def launches(
    p: ConvProblem, tile: TapTile, splits: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    """The product, and of a gradient in several shares their sum."""
    views = dict(zip((*p.operands, p.result), map(View.of, (a, b, out)), strict=True))
    for view in views.values():
        counted(view)
    if p.pass_ is Pass.WGRAD:
        return _gradient(p, tile, splits, views["x"], views["w"], views["y"])
    return [_product(p, tile, *(views[role] for role in (p.operands[0], "w", p.result)))]


def _product(p: ConvProblem, tile: TapTile, source: View, w: View, out: View) -> Launch:
    """The product of a forward pass or of an image's gradient."""
    from tilewise.kernels.triton.channels_last import tap_gemm as kernels

    back = p.pass_ is Pass.DGRAD
    channels, summed = channels_of(p)
    axes = shape_of(p)
    w_o, w_c, *w_taps = w.strides
    f_n, f_c = (w_c, w_o) if back else (w_o, w_c)
    inner = f_c == 1 or (f_n != 1 and not back)
    f_run = _run(p, "w", (summed if inner else channels), (f_c, f_n) if inner else (f_n, f_c), w_taps)
    results = [axis.size if back else axis.out for axis in axes]
    scalars = (
        p.batch * math.prod(results), channels, summed, -(-summed // tile.depth), *source.sizes[2:], *results,
        *(axis.before for axis in axes), *(axis.stride for axis in axes), *(axis.dilation for axis in axes),
        *(axis.kernel for axis in axes), *(axis.stride // math.gcd(axis.stride, axis.dilation) for axis in axes),
        *source.strides, f_n, f_c, *w_taps, w_o * (p.out_channels // p.groups), *out.strides,
    )  # fmt: skip
    tiles = -(-channels // tile.channels) * -(-pixels_of(p) // tile.pixels) * phases_of(p)
    pointers = (_at(A, source.dtype), _at(B, w.dtype), _at(OUT, out.dtype), _at(BIAS if p.bias else OUT, out.dtype))
    return launch(
        kernels.tap_product, (tiles, p.groups), pointers, scalars, tile.warps, tile.stages,
        BACK=back, X_RUN=_image_run(p, p.operands[0], source, summed), F_RUN=f_run, F_INNER=inner,
        Y_RUN=_image_run(p, p.result, out, channels), EVEN=summed % tile.depth == 0, BIAS=p.bias,
        ACCUMULATE=p.accumulate, BLOCK_P=tile.pixels, BLOCK_N=tile.channels, BLOCK_K=tile.depth,
    )  # fmt: skip


def _gradient(p: ConvProblem, tile: TapTile, splits: int, x: View, w: View, y: View) -> list[Launch]:
    """The product of a filter's gradient, and the sum of its shares."""
    from tilewise.kernels.triton.channels_last import tap_gemm as kernels
    from tilewise.kernels.triton.channels_last.row_gemm import sum_partials

    axes, pixels = shape_of(p), pixels_of(p)
    channels, summed = channels_of(p)
    columns = p.taps * summed
    w_o, w_c, *w_taps = w.strides
    magic, shifts = zip(*(_divider(axis.out) for axis in axes), strict=True)
    share = -(-pixels // (splits * tile.depth)) * tile.depth
    scalars = (
        pixels, share, channels, summed, columns, *x.sizes[2:], *y.sizes[2:], *magic, *shifts,
        *(axis.before for axis in axes), *(axis.stride for axis in axes), *(axis.dilation for axis in axes),
        axes[1].kernel, axes[2].kernel, *x.strides, *y.strides, w_o, w_c, *w_taps,
    )  # fmt: skip
    grid = (-(-channels // tile.channels) * -(-columns // tile.pixels), splits, p.groups)
    whole, partials = _at(OUT, w.dtype), _at(WORKSPACE, torch.float32)
    queued = [
        launch(
            kernels.tap_gradient, grid, (_at(A, x.dtype), _at(B, y.dtype), partials if splits > 1 else whole), scalars,
            tile.warps, tile.stages, X_RUN=_image_run(p, "x", x, summed), Y_RUN=_image_run(p, "y", y, channels),
            SPLIT=splits > 1, ACCUMULATE=p.accumulate and splits == 1, BLOCK_O=tile.channels, BLOCK_N=tile.pixels,
            BLOCK_P=tile.depth,
        )
    ]  # fmt: skip
    if splits > 1:
        total, row = p.out_channels * columns, axes[2].kernel * summed
        at_once = min(MOST_AT_ONCE, 1 << (splits - 1).bit_length())
        block = SUMMED // at_once if at_once > 4 else 512
        scalars = (total, splits, p.out_channels, 1, 0, columns, 0, row, summed, columns, axes[1].kernel, row, w_o,
                   *w_taps, w_c)  # fmt: skip
        queued.append(launch(sum_partials, (-(-total // block),), (partials, whole), scalars, ACCUMULATE=p.accumulate,
                             BLOCK=block, AT_ONCE=at_once))  # fmt: skip
    return queued


def _image_run(p: ConvProblem, role: str, view: View, channels: int) -> int:
    """What divides a group's channels, all other strides and the alignment of an image; 1 where they lie apart."""
    strides = (view.strides[1], view.strides[0] if view.sizes[0] > 1 else 0)
    places = [stride for size, stride in zip(view.sizes[2:], view.strides[2:], strict=True) if size > 1]
    return _run(p, role, channels, strides, places)


def _run(p: ConvProblem, role: str, channels: int, strides: tuple[int, int], places: list[int]) -> int:
    """The same of ``channels`` with the first of ``strides``, beside all other ones."""
    if strides[0] != 1:
        return 1
    itemsize = p.torch_dtype(role).itemsize
    return math.gcd(max(1, 16 // itemsize), p.alignment[ROLES.index(role)] // itemsize, channels, strides[1], *places)


def _divider(divisor: int) -> tuple[int, int]:
    """Numbers m and s with i // divisor == (4 * i * m >> 32) >> s for 0 <= i < 2^30 (Granlund and Montgomery 1994)."""
    bits = (divisor - 1).bit_length()
    return -(-(1 << (30 + bits)) // divisor), bits


def _at(source: int, dtype: torch.dtype) -> Any:
    """The pointer to the first element of a tensor."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(source, 0, dtype)
