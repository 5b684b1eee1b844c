"""Products whose sums run over rows of the filter: how rows are read, their launches, and their workspace."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers.common.split_products import UNIT
from tilewise.solvers.common.views import BIAS, OUT, WORKSPACE, A, B, View, counted, epilogue, launch, residual_like

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = [
    "RowTile",
    "expected_rows",
    "expected_sums",
    "launches",
    "longest_sums",
    "shape_of",
    "tiles_of",
    "workspace_bytes",
]

WIDEST = 16
"""Bytes of the widest access."""
BLOCK = 256
"""Elements that one program packs."""
SUMMED, AT_ONCE = 64, 64
"""Elements that one program adds up of partial sums, and of how many shares at once."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """What one program computes: ``lines`` by ``columns`` places, or their sum, of ``channels`` by ``depth`` sums.

    A place is ``side`` outputs side by side, whose channels follow each other. A forward pass goes through its sums
    ``depth`` at a time. A gradient has all of ``depth + more``.
    """

    side: int
    lines: int
    columns: int
    channels: int
    depth: int
    more: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Rows:
    """How rows of windows lie in an image: read ``run`` elements at a time, ``lead`` of them before the window.

    ``length`` elements are read of each row, a multiple of ``depth``, which serve ``side`` outputs. ``per`` of them
    belong to one step along the line, whose steps lie ``step`` elements apart.
    """

    side: int
    run: int
    lead: int
    length: int
    per: int
    step: int

    @classmethod
    def of(cls, p: ConvProblem, x: View, side: int, depth: int) -> Rows:
        """The widest reads that strides and alignment of ``x`` allow."""
        axis, channels = p.axes[-1], p.in_channels
        shift = axis.stride * channels
        elements = axis.kernel * channels + (side - 1) * shift
        dense = (channels == 1 or x.strides[1] == 1) and x.strides[4] == channels
        run = 1
        if dense and (axis.dilation == 1 or axis.kernel == 1):
            widest = min(p.alignment[ROLES.index("x")], WIDEST) // p.torch_dtype("x").itemsize
            outer = [x.strides[dim] for dim in (0, 2, 3)]
            run = math.gcd(widest, side * shift, axis.size * channels, *outer)
        if run == 1:
            return cls(side, 1, 0, _up(elements, depth), channels, x.strides[4])
        lead = -axis.before * channels % run
        return cls(side, run, lead, _up(lead + elements, max(run, depth)), 1, 1)


def shape_of(p: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """The axes of depth, height and width; those that a problem lacks have one element."""
    d, h, w = (*[UNIT] * (3 - p.dims), *p.axes)
    return d, h, w


@functools.lru_cache(maxsize=1024)
def expected_rows(p: ConvProblem, side: int, depth: int) -> Rows:
    """How rows lie where pixels of the image lie side by side."""
    x = torch.empty_strided(p.shape("x"), dense_strides(p.shape("x"), "channels_last"), dtype=p.torch_dtype("x"),
                            device="meta")  # fmt: skip
    return Rows.of(p, _image(View.of(x)), side, depth)


def expected_sums(p: ConvProblem, side: int, depth: int) -> int:
    """Elements of a packed filter's sums where pixels of the image lie side by side, in steps of ``depth``."""
    return p.taps // p.axes[-1].kernel * expected_rows(p, side, depth).length


def longest_sums(p: ConvProblem, side: int, depth: int) -> int:
    """The same at most: in a view rows may start and end early or late by what the widest access reads."""
    if p.layout("x") != "view":
        return expected_sums(p, side, depth)
    axis = p.axes[-1]
    elements = (axis.kernel + (side - 1) * axis.stride) * p.in_channels
    return p.taps // axis.kernel * _up(elements + 2 * (WIDEST // 2 - 1), depth)


def tiles_of(p: ConvProblem, tile: RowTile) -> int:
    """Tiles of outputs, of all images."""
    d, h, w = shape_of(p)
    return p.batch * d.out * -(-h.out // tile.lines) * -(-w.out // (tile.columns * tile.side))


def workspace_bytes(p: ConvProblem, tile: RowTile, splits: int) -> int:
    """Bytes of the packed filter or of partial sums, however rows are read."""
    filters = p.out_channels * tile.side
    if p.pass_ is Pass.WGRAD:
        return splits * filters * longest_sums(p, tile.side, 1) * 4
    return _up(filters, tile.channels) * longest_sums(p, tile.side, tile.depth) * p.torch_dtype("w").itemsize


def launches(
    p: ConvProblem, tile: RowTile, splits: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> list[Launch]:
    """Packing the filter and the product; of a gradient the partial sums and their sum."""
    views = dict(zip((*p.operands, p.result), map(View.of, (a, b, out)), strict=True))
    x, w, y = (_image(views[role]) for role in ("x", "w", "y"))
    for view in (x, w, y):  # 32 bits count the elements of each image
        counted(View((1, *view.sizes[1:]), view.strides, view.dtype))
    rows = Rows.of(p, x, tile.side, 1 if p.pass_ is Pass.WGRAD else tile.depth)
    d, h, _ = shape_of(p)
    sums = d.kernel * h.kernel * rows.length
    if p.pass_ is Pass.WGRAD:
        return _gradient(p, tile, splits, rows, sums, x, w, y)
    return _forward(p, tile, rows, sums, x, w, y)


def _forward(p: ConvProblem, tile: RowTile, rows: Rows, sums: int, x: View, w: View, y: View) -> list[Launch]:
    """Packing the filter, and the product."""
    from tilewise.kernels.triton.channels_last import row_gemm as kernels

    d, h, axis = shape_of(p)
    filters = _up(p.out_channels * tile.side, tile.channels)
    total = sums * filters
    shift = axis.stride * p.in_channels
    scalars = (total, sums, p.out_channels, tile.side, shift, rows.lead, rows.length, p.in_channels, d.kernel,
               h.kernel, axis.kernel * p.in_channels, *_filter(w))  # fmt: skip
    filter_, target = _at(B, w.dtype), _at(WORKSPACE, w.dtype)
    packing = launch(kernels.pack_rows, (-(-total // BLOCK),), (filter_, target), scalars, BLOCK=BLOCK)
    tiles = tiles_of(p, tile) * (filters // tile.channels)
    result, bias = _at(OUT, y.dtype), _at(BIAS if p.bias else OUT, y.dtype)
    product = launch(
        kernels.row_product, (tiles,), (_at(A, x.dtype), target, result, bias, residual_like(p, result)),
        (p.out_channels, sums, *_geometry(p, tile, rows, x, y)), tile.warps, tile.stages,
        WHOLE=rows.length == tile.depth, BIAS=p.bias, **epilogue(p), ACCUMULATE=p.accumulate,
        **_constants(p, tile, rows, y),
    )  # fmt: skip
    return [packing, product]


def _gradient(
    p: ConvProblem, tile: RowTile, splits: int, rows: Rows, sums: int, x: View, w: View, y: View
) -> list[Launch]:
    """Partial sums, and their sum."""
    from tilewise.kernels.triton.channels_last import row_gemm as kernels

    _, h, axis = shape_of(p)
    tiles = tiles_of(p, tile)
    grid = (-(-p.out_channels * tile.side // tile.channels) * -(-sums // (tile.depth + tile.more)), splits)
    partials = _at(WORKSPACE, torch.float32)
    product = launch(
        kernels.row_gradient, grid, (_at(A, x.dtype), _at(B, y.dtype), partials),
        (tiles, -(-tiles // splits), p.out_channels, sums, *_geometry(p, tile, rows, x, y)), tile.warps, tile.stages,
        MORE_K=tile.more, **_constants(p, tile, rows, y),
    )  # fmt: skip
    elements = axis.kernel * p.in_channels
    columns = p.taps * p.in_channels
    total = p.out_channels * columns
    scalars = (total, splits, p.out_channels, tile.side, axis.stride * p.in_channels, sums, rows.lead, rows.length,
               p.in_channels, columns, h.kernel, elements, *_filter(w))  # fmt: skip
    adding = launch(
        kernels.sum_partials, (-(-total // SUMMED),), (partials, _at(OUT, w.dtype)), scalars, ACCUMULATE=p.accumulate,
        BLOCK=SUMMED, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return [product, adding]


def _geometry(p: ConvProblem, tile: RowTile, rows: Rows, x: View, y: View) -> tuple[int, ...]:
    """The numbers that both products take of windows, images and outputs, in their order."""
    d, h, w = shape_of(p)
    unit = p.in_channels if rows.run > 1 else 1  # elements, or columns, to a step
    x_n, x_c, x_d, x_h, _ = x.strides
    y_n, y_c, y_d, y_h, y_w = y.strides
    return (
        -(-w.out // (tile.columns * tile.side)), -(-h.out // tile.lines), d.out, h.out, w.out,
        d.size, h.size, w.size * unit,
        -d.before, -h.before, -w.before * unit - rows.lead, d.stride, h.stride, w.stride * unit * tile.side,
        rows.length, rows.per, h.kernel, d.dilation, h.dilation, w.dilation if w.kernel > 1 else 1,
        x_n, x_d, x_h, rows.step, x_c, y_n, y_c, y_d, y_h, y_w,
    )  # fmt: skip


def _constants(p: ConvProblem, tile: RowTile, rows: Rows, y: View) -> dict[str, Any]:
    """What both products are compiled for."""
    aligned = math.gcd(y.aligned, p.alignment[ROLES.index("y")] // y.dtype.itemsize) if y.aligned > 1 else 0
    return {
        "SIDE": tile.side, "RUN": rows.run, "ALIGNED": aligned if aligned > 1 else 0, "PRECISION": "ieee",
        "BLOCK_H": tile.lines, "BLOCK_W": tile.columns, "BLOCK_O": tile.channels, "BLOCK_K": tile.depth,
    }  # fmt: skip


def _image(view: View) -> View:
    """``view``, with stride 0 along what has one element."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(view.sizes, view.strides, strict=True))
    return View(view.sizes, strides, view.dtype, view.offset)


def _filter(w: View) -> tuple[int, int, int, int, int]:
    """Strides of filters, planes, lines, columns and channels."""
    w_o, w_c, w_d, w_h, w_s = w.strides
    return w_o, w_d, w_h, w_s, w_c


def _at(source: int, dtype: torch.dtype) -> Any:
    """The pointer to the first element of a tensor."""
    from tilewise.kernels.triton.launch import Pointer

    return Pointer(source, 0, dtype)


def _up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple
