"""The kernel launches of a direct depthwise convolution on a GPU: tiles, their windows, and alignment.

Along an axis a tile of ``edge`` places of the result reads a window of the source. Which of its places it reads with
which tap is the same for all tiles, so it is a table. An input gradient of stride s needs an edge that s divides: its
phases are then the same in every tile too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.activations import activation_kind, kernel_parameters
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = [
    "CHUNK",
    "HIGH",
    "LOW",
    "UNIT",
    "UNUSED",
    "Tile",
    "Window",
    "axes_of",
    "kernel_rows",
    "launches",
    "pack_filter",
    "promised",
    "strides_of",
    "tiles",
    "vectors",
    "window",
]

FIRST, SECOND, OUT, WORKSPACE, ADDED = range(5)
"""Numbers of the tensors that a launch's pointers refer to. A bias is the first that is added, then a residual."""
LOW, HIGH, UNUSED = 1, 2, 4
"""Bits of a window's checks, as the kernels know them: may lie before the source, may lie behind it, is never read."""
UNIT = Axis(1, 1)
MOST_SUMS = 112
"""Sums of taps that one thread keeps in registers."""
CHUNK = 16
PACK_BLOCK = 256
ADD_BLOCK = 32
ADD_SHARES = 64

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` x ``columns`` of the result for each lane; lanes are ``spatial`` tiles by ``channels``, powers of two.

    With one channel, lanes follow one another along space, else along channels.
    """

    rows: int
    columns: int
    spatial: int
    channels: int
    warps: int

    @property
    def lanes(self) -> int:
        """The number of lanes of one program, along space and channels."""
        return self.spatial * self.channels

    @property
    def width(self) -> int:
        """Lanes that one thread computes."""
        return max(1, self.lanes // (32 * self.warps))


@dataclass(frozen=True, slots=True)
class Window:
    """What tiles read of the source along an axis.

    There are ``tiles`` of them. The window of the first starts at place ``first`` of the source, that of each next one
    ``step`` places later. ``taps[o * kernel + k]`` is the place of the window that place ``o`` of a tile reads with tap
    ``k``, or -1 where that is never inside the source. ``checks[q]`` says what must be checked before place ``q`` is
    read: :data:`LOW`, :data:`HIGH` or :data:`UNUSED`.
    """

    tiles: int
    first: int
    step: int
    taps: tuple[int, ...]
    checks: tuple[int, ...]


def axes_of(p: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """Depth, height and width; axes that the problem lacks have one element."""
    depth, height, width = (*[UNIT] * (3 - p.dims), *p.axes)
    return depth, height, width


@functools.lru_cache(maxsize=4096)
def window(axis: Axis, edge: int, backward: bool, vector: int = 1, kernel: int = 0, kernels: int = 1) -> Window:
    """The window of tiles of ``edge`` outputs, or with ``backward`` of ``edge`` inputs of a data gradient.

    It starts and ends at multiples of ``vector``, which also divides ``step`` and the source's size. With ``kernel``
    the taps are taken in ``kernels`` parts of ``kernel`` taps each, and the window is that of the first part.
    """
    count = kernel or axis.kernel
    if backward:
        reads = {
            (o, k): divmod(o + axis.before - k * axis.dilation, axis.stride)
            for o in range(edge)
            for k in range(axis.kernel)
        }
        places = {key: place for key, (place, rest) in reads.items() if rest == 0}
        size, result, step = axis.out, axis.size, edge // axis.stride
    else:
        places = {(o, k): o * axis.stride - axis.before + k * axis.dilation for o in range(edge) for k in range(count)}
        size, result, step = axis.size, axis.out, edge * axis.stride
    tiles = -(-result // edge)
    last = (tiles - 1) * step + (kernels - 1) * count * axis.dilation
    inside = {key: place for key, place in places.items() if place + last >= 0 and place < size}
    if not inside:
        return Window(tiles, 0, step, (-1,) * (edge * count), (UNUSED,) * vector)
    first = min(inside.values()) // vector * vector
    taps = tuple(inside.get((o, k), first - 1) - first for o in range(edge) for k in range(count))
    length = -(-(max(taps) + 1) // vector) * vector
    checks: list[int] = []
    for start in range(0, length, vector):
        used = any(start <= q < start + vector for q in taps)
        low, high = first + start < 0, first + start + vector + last > size
        checks += [LOW * low + HIGH * high if used else UNUSED] * vector
    return Window(tiles, first, step, taps, tuple(checks))


def tiles(p: ConvProblem, tile: Tile) -> tuple[int, int, int]:
    """Planes along depth and tiles along height and width; of the output gradient in a weight gradient."""
    sizes = [axis.size if p.pass_ is Pass.DGRAD else axis.out for axis in axes_of(p)]
    return sizes[0], -(-sizes[1] // tile.rows), -(-sizes[2] // tile.columns)


def kernel_rows(p: ConvProblem, tile: Tile) -> int:
    """Rows of the kernel whose gradients one program sums."""
    _, height, width = axes_of(p)
    parts = -(-height.kernel * width.kernel * tile.width // MOST_SUMS)
    return -(-height.kernel // min(parts, height.kernel))


def launches(p: ConvProblem, tile: Tile, splits: int, a: torch.Tensor, b: torch.Tensor,
             out: torch.Tensor) -> list[Launch]:  # fmt: skip
    """The kernels of the pass in order; filters with channels innermost and partial sums lie in the workspace.

    A constant filter with channels innermost is the second operand.
    """
    if p.pass_ is Pass.WGRAD:
        return [_weight_gradient(p, tile, splits, a, b), _add_shares(p, tile, splits, out)]
    packs = tile.channels > 1 and not p.constant_weight
    return [*([pack_filter(p, b)] if packs else []), _gather(p, tile, a, b, out)]


def _gather(p: ConvProblem, tile: Tile, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of a forward pass or data gradient."""
    from tilewise.kernels.triton import depthwise as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    backward = p.pass_ is Pass.DGRAD
    depth, height, width = axes_of(p)
    vector = vectors(p, tile, p.operands[0], strides_of(a))
    out_vector = vectors(p, tile, p.result, strides_of(out))
    rows, columns = window(height, tile.rows, backward), window(width, tile.columns, backward, vector)
    shape = tiles(p, tile)
    multiplier = p.out_channels // p.groups
    channels = p.in_channels if backward else p.out_channels
    packed = tile.channels > 1
    filters = strides_of(b)[:1] + strides_of(b)[2:]
    if packed:
        area = width.kernel * p.out_channels
        filters = (1, height.kernel * area, area, p.out_channels)
    constants: dict[str, Any] = {
        "SOURCE": strides_of(a), "FILTERS": filters, "OUT": strides_of(out),
        "SIZES": _space(a), "OUTS": _space(out), "TILES": shape,
        "FIRST": (rows.first, columns.first), "STEP": (rows.step, columns.step),
        "ROWS": rows.taps, "ROW_CHECKS": rows.checks, "COLUMNS": columns.taps, "COLUMN_CHECKS": columns.checks,
        "PLANES": _planes(depth, backward), "FLAT": depth == UNIT, "KERNEL": _kernel(p),
        "SHARED": 1 if backward else multiplier, "SUMMED": multiplier if backward else 1, "ACCUMULATE": p.accumulate,
        "BIAS": p.bias, "RESIDUAL": p.residual, "ACTIVATION": activation_kind(p.activation),
        "PARAMETERS": kernel_parameters(p.activation),
        "VECTOR": vector, "OUT_VECTOR": out_vector, "RUN": promised(p, tile, p.operands[0], strides_of(a)),
        "OUT_RUN": promised(p, tile, p.result, strides_of(out)), "RUN_C": math.gcd(8, channels, tile.channels),
        "TILE_H": tile.rows, "TILE_W": tile.columns, "LANES": tile.lanes, "LANES_C": tile.channels,
    }  # fmt: skip
    count = p.batch * math.prod(shape)
    kept = packed and p.constant_weight
    weights = Pointer(WORKSPACE if packed and not kept else SECOND, 0, torch.float32 if packed else b.dtype)
    grid = (-(-channels // tile.channels) * -(-count // tile.spatial), 1, 1)
    pointers = (
        Pointer(FIRST, 0, a.dtype), weights, Pointer(OUT, 0, out.dtype),
        Pointer(ADDED if p.bias else OUT, 0, out.dtype),  # what is not added is not read
        Pointer(ADDED + p.bias if p.residual else OUT, 0, out.dtype),
    )  # fmt: skip
    return Launch(kernels.gather, grid, pointers, (count, channels), constants, tile.warps, 1)


def _weight_gradient(p: ConvProblem, tile: Tile, splits: int, a: torch.Tensor, b: torch.Tensor) -> Launch:
    """The launch that sums a weight gradient in ``splits`` shares."""
    from tilewise.kernels.triton import depthwise as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    depth, height, width = axes_of(p)
    vector, out_vector = vectors(p, tile, "x", strides_of(a)), vectors(p, tile, "y", strides_of(b))
    taps = kernel_rows(p, tile)
    parts = -(-height.kernel // taps)
    rows = window(height, tile.rows, False, 1, taps, parts)
    columns = window(width, tile.columns, False, vector)
    shape = tiles(p, tile)
    count = p.batch * math.prod(shape)
    total = p.out_channels * p.taps
    by_channel = tile.channels == 1
    constants: dict[str, Any] = {
        "IMAGES": strides_of(a), "GRADIENTS": strides_of(b),
        "PARTIALS": (total, p.taps, 1) if by_channel else (total, 1, p.out_channels),
        "SIZES": _space(a), "OUTS": _space(b), "TILES": shape,
        "FIRST": (rows.first, columns.first), "STEP": (rows.step, columns.step),
        "ROWS": rows.taps, "ROW_CHECKS": rows.checks, "COLUMNS": columns.taps, "COLUMN_CHECKS": columns.checks,
        "OUT_ROW_CHECKS": _overhang(height.out, tile.rows), "OUT_COLUMN_CHECKS": _overhang(width.out, tile.columns),
        "PLANES": _planes(depth, False), "FLAT": depth == UNIT, "KERNEL": _kernel(p), "KERNEL_STEP": height.dilation,
        "SHARED": p.out_channels // p.groups, "VECTOR": vector, "OUT_VECTOR": out_vector,
        "RUN": promised(p, tile, "x", strides_of(a)), "OUT_RUN": promised(p, tile, "y", strides_of(b)),
        "RUN_C": math.gcd(8, p.out_channels, tile.channels),
        "TAPS_H": taps, "TILE_H": tile.rows, "TILE_W": tile.columns,
        "LANES": tile.lanes, "LANES_C": tile.channels, "CHUNK": CHUNK,
    }  # fmt: skip
    blocks = -(-count // tile.spatial)
    grid = (-(-p.out_channels // tile.channels) * depth.kernel * parts, splits, 1)
    pointers = (Pointer(FIRST, 0, a.dtype), Pointer(SECOND, 0, b.dtype), Pointer(WORKSPACE, 0, torch.float32))
    scalars = (count, p.out_channels, -(-blocks // splits))
    return Launch(kernels.weight_gradient, grid, pointers, scalars, constants, tile.warps, 1)


def _add_shares(p: ConvProblem, tile: Tile, splits: int, out: torch.Tensor) -> Launch:
    """The launch that adds the shares of a weight gradient."""
    from tilewise.kernels.triton import depthwise as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    total = p.out_channels * p.taps
    constants: dict[str, Any] = {
        "FILTERS": strides_of(out)[:1] + strides_of(out)[2:], "KERNEL": _kernel(p), "TAPS_FIRST": tile.channels > 1,
        "ACCUMULATE": p.accumulate, "BLOCK": ADD_BLOCK, "BLOCK_S": ADD_SHARES,
    }  # fmt: skip
    pointers = (Pointer(WORKSPACE, 0, torch.float32), Pointer(OUT, 0, out.dtype))
    scalars = (splits, p.out_channels, total)
    return Launch(kernels.add_shares, (-(-total // ADD_BLOCK), 1, 1), pointers, scalars, constants)


def pack_filter(p: ConvProblem, w: torch.Tensor) -> Launch:
    """The launch that copies the filter, the second operand, into the workspace: channels innermost, in fp32."""
    from tilewise.kernels.triton import depthwise as kernels
    from tilewise.kernels.triton.launch import Launch, Pointer

    total = p.out_channels * p.taps
    constants: dict[str, Any] = {
        "FILTERS": strides_of(w)[:1] + strides_of(w)[2:], "KERNEL": _kernel(p), "BLOCK": PACK_BLOCK,
    }  # fmt: skip
    pointers = (Pointer(SECOND, 0, w.dtype), Pointer(WORKSPACE, 0, torch.float32))
    return Launch(kernels.pack_filter, (-(-total // PACK_BLOCK), 1, 1), pointers, (p.out_channels, total), constants)


def vectors(p: ConvProblem, tile: Tile, role: str, strides: Strides) -> int:
    """Columns that one access reads or writes: aligned, and either all inside the tensor or all outside."""
    axis = p.axes[-1]
    if tile.channels > 1 or strides[4] != 1 or p.alignment[ROLES.index(role)] < ALIGNMENT:
        return 1
    tiled = role == ("x" if p.pass_ is Pass.DGRAD else "y")
    step = tile.columns if tiled else window(axis, tile.columns, p.pass_ is Pass.DGRAD).step
    widest = ALIGNMENT // p.torch_dtype(role).itemsize
    return math.gcd(widest, step, p.shape(role)[-1], *_steps(p, role, strides, 4))


def promised(p: ConvProblem, tile: Tile, role: str, strides: Strides) -> int:
    """A power of two that divides the offset of every access, in elements, so that the compiler may use wide ones.

    1 where there is none.
    """
    if tile.channels == 1:
        return vectors(p, tile, role, strides)
    several = p.out_channels > p.groups  # outputs of a channel, which then share it or are added up
    if strides[1] != 1 or (several and role == {Pass.DGRAD: "y"}.get(p.pass_, "x")):
        return 1
    return math.gcd(8, tile.channels, p.shape(role)[1], *_steps(p, role, strides, 1))


def _steps(p: ConvProblem, role: str, strides: Strides, inner: int) -> list[int]:
    """Strides that offsets of a tensor are made of, without that of dimension ``inner``.

    Dimensions of size 1 among images and channels are left out. Spatial ones are not, as a window of one row may start
    before it.
    """
    single = [dim for dim in (0, 1) if p.shape(role)[dim] == 1]
    return [stride for dim, stride in enumerate(strides) if dim != inner and dim not in single]


def strides_of(tensor: torch.Tensor) -> Strides:
    """Strides of (image, channel, depth, height, width), in elements."""
    return (*tensor.stride()[:2], *[0] * (5 - tensor.dim()), *tensor.stride()[2:])


def _space(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sizes along depth, height and width."""
    return (*[1] * (5 - tensor.dim()), *tensor.shape[2:])


def _kernel(p: ConvProblem) -> tuple[int, ...]:
    """The kernel's sizes along depth, height and width."""
    return tuple(axis.kernel for axis in axes_of(p))


def _planes(depth: Axis, backward: bool) -> tuple[int, int, int, int]:
    """Numbers a, b, c and r: plane d of the result reads with tap k plane (a d + b + c k) / r of the source."""
    if backward:
        return 1, depth.before, -depth.dilation, depth.stride
    return depth.stride, -depth.before, depth.dilation, 1


def _overhang(size: int, edge: int) -> tuple[int, ...]:
    """Checks of the places of a tile itself: the last tile may reach beyond the axis."""
    last = (-(-size // edge) - 1) * edge
    return tuple(HIGH * (last + o >= size) for o in range(edge))
