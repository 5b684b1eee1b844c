"""Separable convolutions by tiles of pixels on a GPU: which tiles there are, what each takes, filters, and the launch.

A program's lanes are pixels of the result, each of ``edge`` neighbours in a row. See the kernel, in
:mod:`tilewise.kernels.triton.channels_last.separable`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tilewise.plan import Config
from tilewise.problems.activations import activation_kind, kernel_parameters
from tilewise.problems.conv.axis import Axis
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import parted
from tilewise.solvers.common.tiles import PROCESSORS, busy, integer

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["Tile", "best_tiles", "config_of", "kept_places", "launch_of", "put_in_order", "seconds", "tile_of"]

OPERAND, FILTERS, RESULT, ADDED = 0, 1, 2, 4
"""Numbers of the tensors that a launch's pointers refer to: image, kept filters, result and residual."""
NUMBER, LINE = 4, 256
"""Bytes of an fp32 number, and between parts of what is kept."""
LEAST = 16
"""The least number of rows, columns and products of a matrix product: of lanes, outputs and channels in a step."""
LANES, EDGES, DEPTHS, WARPS = (16, 32, 64, 128), (1, 2, 4, 8), (16, 32, 64), (4, 8)
MOST_PARTS, MOST_PIXELS = 8, 256
VECTOR = 8
"""Channels that a thread filters of each pixel of a lane: those of one 16-byte access."""
WIDEST = 128
"""Outputs that are finished at a time: of more, a residual takes too many registers."""
OTHER_REGISTERS, MOST_REGISTERS = 40, 208
"""Registers of a thread for addresses and the like, and the most that a tile may take together."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes.

    ``lanes`` (images, rows, columns) and ``edge``, the pixels of each, are powers of two. ``width`` is the number of
    outputs of each pixel, a multiple of 16. ``depth`` channels are filtered in a step.
    """

    lanes: tuple[int, int, int]
    edge: int
    width: int
    depth: int
    warps: int

    @property
    def count(self) -> int:
        """The number of lanes."""
        return math.prod(self.lanes)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The outputs as a sum of powers of two up to :data:`WIDEST`, the largest first.

        >>> Tile((1, 4, 4), 4, 368, 32, 4).pieces
        (128, 128, 64, 32, 16)
        """
        rest = self.width % WIDEST
        small = (1 << bit for bit in range(rest.bit_length() - 1, 3, -1) if rest >> bit & 1)
        return (WIDEST,) * (self.width // WIDEST) + tuple(small)

    def registers(self, kernel: int, line: int) -> int:
        """Registers of a thread, about: sums of both convolutions, a line of the window and as many taps.

        ``line`` pixels of the line are read. What is given to matrix units counts once more, in 16 bits.
        """
        rows = self.count * self.edge
        totals = -(-rows * self.width // (32 * self.warps))
        channels = self.count * self.depth / (32 * self.warps)
        return round(totals + channels * (self.edge + line / 2) + VECTOR * kernel) + OTHER_REGISTERS


def _padded(p: SeparableProblem, tile: Tile) -> tuple[int, int]:
    """Channels and outputs, filled up to whole steps and parts."""
    return -(-p.channels // tile.depth) * tile.depth, parts_of(p, tile) * tile.width


def parts_of(p: SeparableProblem, tile: Tile) -> int:
    """Parts of the outputs. The depthwise convolution is computed anew for each."""
    return -(-p.out_channels // tile.width)


def _grid(p: SeparableProblem, tile: Tile) -> tuple[int, int, int]:
    """Tiles along images, rows and columns."""
    (height, width), (images, rows, columns) = p.axes, tile.lanes
    return -(-p.batch // images), -(-height.out // rows), -(-width.out // (columns * tile.edge))


def line_of(axis: Axis, edge: int) -> int:
    """Pixels of a line of a lane's window, with those between that are not read."""
    return (edge - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1


def _reads(axis: Axis, edge: int) -> set[int]:
    """The places of a lane's line that some tap reads."""
    return {e * axis.stride + k * axis.dilation for e in range(edge) for k in range(axis.kernel)}


def _checks(p: SeparableProblem, tile: Tile) -> tuple[str, ...]:
    """What the kernel has to ask before it reads each place of a line: ``beside``, ``inside``, or empty if never."""
    axis = p.axes[1]
    last = (_grid(p, tile)[2] * tile.lanes[2] - 1) * tile.edge * axis.stride - axis.before
    read = _reads(axis, tile.edge)
    return tuple(
        "" if q not in read else "beside" if q < axis.before or last + q >= axis.size else "inside"
        for q in range(line_of(axis, tile.edge))
    )


def _rows_checked(p: SeparableProblem, tile: Tile) -> bool:
    """Whether a window may have rows beside the image."""
    axis = p.axes[0]
    last = (_grid(p, tile)[1] * tile.lanes[1] - 1) * axis.stride - axis.before + (axis.kernel - 1) * axis.dilation
    return axis.before > 0 or last >= axis.size


# What tiles take


MATRIX, SMALL_MATRIX = 500e12, 200e12
"""Operations a second that matrix units reach in these products, with 64 lanes or more and with fewer."""
MEMORY, CACHE, NEAR_CACHE = 4.2e12, 5.0e12, 12e12
"""Bytes a second of an H200's memory, of its L2 cache, and of all multiprocessors' own caches."""
INSTRUCTIONS = 132 * 4 * 32 * 1.7e9 * 0.6
"""Instructions of a thread in a second, of all threads together."""
LATENCY = 0.35e-6
"""Seconds from a read to what is computed of it, where nothing else is done meanwhile: once for each row of taps."""
WORK = {"none": 0, "relu": 1, "relu6": 2, "clamp": 2, "leaky_relu": 3, "hardsigmoid": 4, "hardswish": 5}
LONG_WORK = 14
"""Instructions of a function between the convolutions, and of those that are not among them."""


def seconds(p: SeparableProblem, tile: Tile) -> float:
    """What a tile takes on an H200: the longest of what it waits for, and a part of the rest."""
    height, width = p.axes
    grid, parts = _grid(p, tile), parts_of(p, tile)
    programs, steps = parts * math.prod(grid), -(-p.channels // tile.depth)
    places = height.kernel * len(_reads(width, tile.edge))
    edge = tile.edge
    # Of each number of a window that is read: its conversion, and an eighth of the reading, checking and zeroing.
    filtered = places * 1.9 + edge * (height.kernel * width.kernel + WORK.get(activation_kind(p.inner[0]), LONG_WORK))
    every = programs * steps
    numbers = tile.count * tile.depth
    issued = every * (numbers * (filtered + 2 * edge) + 32 * tile.warps * (3 * height.kernel * width.kernel + 60))
    near = every * numbers * places * 2
    window = tile.lanes[0] * line_of(height, tile.lanes[1]) * line_of(width, tile.lanes[2] * edge)
    far = every * tile.depth * 2 * (window + tile.width)
    rate = MATRIX if tile.count * edge >= 64 else SMALL_MATRIX
    products = 2 * every * tile.count * edge * tile.depth * tile.width / rate
    registers = tile.registers(width.kernel, len(_reads(width, edge)))
    at_once = max(1, min(64 // tile.warps, 65536 // (registers * 32 * tile.warps)))
    waited = -(-programs // (PROCESSORS * at_once)) * steps * (1 + height.kernel) * LATENCY
    share = busy(programs)
    taken = (
        issued / INSTRUCTIONS / share, near / NEAR_CACHE / share, far / CACHE, products / share, waited,
        p.bytes / MEMORY,
    )  # fmt: skip
    return max(taken) + 0.25 * (sum(taken) - max(taken))


def best_tiles(p: SeparableProblem) -> list[Tile]:
    """Tiles in the order of what they should take, the best of each number of lanes, edge and parts."""
    found: dict[tuple[int, int, int], Tile] = {}
    for tile in sorted(_tiles(p), key=lambda tile: seconds(p, tile)):
        found.setdefault((tile.count, tile.edge, parts_of(p, tile)), tile)
    return list(found.values())


def _tiles(p: SeparableProblem) -> Iterator[Tile]:
    """All tiles that are worth a thought."""
    whole = -(-p.out_channels // LEAST)
    widths = sorted({-(-whole // parts) * LEAST for parts in range(1, min(whole, MOST_PARTS) + 1)})
    deepest = max(LEAST, 1 << (p.channels - 1).bit_length())
    longest = p.axes[1].out
    edges = [edge for edge in EDGES if edge == 1 or edge <= longest + longest // 4]
    for edge, count in itertools.product(edges, LANES):
        if not LEAST <= count * edge <= MOST_PIXELS:
            continue
        lanes, line = _divided(p, edge, count), len(_reads(p.axes[1], edge))
        for width, depth, warps in itertools.product(widths, DEPTHS, WARPS):
            tile = Tile(lanes, edge, width, depth, warps)
            whole_vectors = count * depth in (32 * warps * VECTOR, 64 * warps * VECTOR)
            if depth <= deepest and whole_vectors and tile.registers(p.axes[1].kernel, line) <= MOST_REGISTERS:
                yield tile


def _divided(p: SeparableProblem, edge: int, count: int) -> tuple[int, int, int]:
    """``count`` lanes as images, rows and columns, so that few of them lie beyond an edge and windows share most."""
    height, width = p.axes
    powers = [1 << bit for bit in range(count.bit_length())]

    def lost(lanes: tuple[int, int, int]) -> tuple[float, int, int]:
        tile = Tile(lanes, edge, LEAST, LEAST, 1)
        computed = math.prod(_grid(p, tile)) * count
        window = lanes[0] * line_of(height, lanes[1]) * line_of(width, lanes[2] * edge)
        return computed * (1 + 0.1 * window / (count * edge)), lanes[0], lanes[1]

    choices = [(n, h, count // (n * h)) for n in powers for h in powers if n * h <= count]
    return min(choices, key=lost)


# Configs, filters and launches


def config_of(tile: Tile) -> Config:
    """The config of a tile."""
    return Config(lanes=tile.lanes, edge=tile.edge, outputs=tile.width, depth=tile.depth, warps=tile.warps)


def tile_of(c: Config) -> Tile:
    """The tile of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    if set(c) != {"lanes", "edge", "outputs", "depth", "warps"}:
        raise ValueError(f"{sorted(c)}: lanes, edge, outputs, depth and warps would do")
    lanes, edge, width, depth, warps = c["lanes"], *(integer(c, name) for name in ("edge", "outputs", "depth", "warps"))
    if not isinstance(lanes, tuple) or len(lanes) != 3 or not all(_power(n, 1, MOST_PIXELS) for n in lanes):
        raise ValueError(f"lanes={lanes!r}: three powers of two up to {MOST_PIXELS} would do")
    tile = Tile(lanes, edge, width, depth, warps)
    if not _power(edge, 1, MOST_PIXELS) or not LEAST <= tile.count * edge <= 2 * MOST_PIXELS:
        raise ValueError(
            f"lanes={lanes}, edge={edge}: a power of two, and {LEAST} to {2 * MOST_PIXELS} pixels together, would do"
        )
    if width % LEAST or width > 1024 or not _power(depth, LEAST, 256) or not _power(warps, 1, 16):
        raise ValueError(
            f"outputs={width}, depth={depth}, warps={warps}: a multiple of {LEAST} up to 1024, a power of two from "
            f"{LEAST} to 256 and one up to 16 would do"
        )
    return tile


def _power(n: object, least: int, most: int) -> bool:
    """Whether ``n`` is a power of two between two others."""
    return type(n) is int and least <= n <= most and not n & (n - 1)


def kept_places(p: SeparableProblem, tile: Tile) -> tuple[int, int, int, int, int]:
    """Where kept filters begin, in bytes, and all of their size.

    These are the taps [tap, channel] and biases of the depthwise convolution in fp32, the filters [channel, output] of
    the pointwise one, and its biases in fp32.
    """
    channels, outputs = _padded(p, tile)
    taps = p.axes[0].kernel * p.axes[1].kernel
    sizes = (NUMBER * taps * channels, NUMBER * channels, p.torch_dtype("w").itemsize * channels * outputs)
    starts = [0]
    for size in (*sizes, NUMBER * outputs):
        starts.append(starts[-1] + -(-size // LINE) * LINE)
    first, second, third, fourth, end = starts
    return first, second, third, fourth, end


@torch.no_grad()
def put_in_order(p: SeparableProblem, tile: Tile, weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Write the operand ``weight`` to ``kept``, of uint8, as the kernel reads it; what is filled up is 0."""
    channels, outputs = _padded(p, tile)
    taps, shifts, filters, biases, end = kept_places(p, tile)
    depthwise, pointwise = parted(p, weight)
    count = p.axes[0].kernel * p.axes[1].kernel
    kept[:end].zero_()

    def part(start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return kept[start : start + size * dtype.itemsize].view(dtype)

    part(taps, count * channels, torch.float32).view(count, channels)[:, : p.channels] = depthwise.weight.reshape(
        p.channels, count
    ).T
    part(shifts, p.channels, torch.float32).copy_(depthwise.bias)
    part(filters, channels * outputs, weight.dtype).view(channels, outputs)[: p.channels, : p.out_channels] = (
        pointwise.weight.reshape(p.out_channels, p.channels).T
    )
    part(biases, p.out_channels, torch.float32).copy_(pointwise.bias)


def launch_of(p: SeparableProblem, tile: Tile, x: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch for images and results that lie as these do."""
    from tilewise.kernels.triton.channels_last.separable import separable
    from tilewise.kernels.triton.launch import Launch, Pointer

    height, width = p.axes
    dtype = p.torch_dtype("x")
    taps, shifts, filters, biases, _ = kept_places(p, tile)
    result = Pointer(RESULT, 0, dtype)
    pointers = (
        Pointer(OPERAND, 0, dtype), Pointer(FILTERS, taps, torch.float32), Pointer(FILTERS, shifts, torch.float32),
        Pointer(FILTERS, filters, dtype), Pointer(FILTERS, biases, torch.float32), result,
        Pointer(ADDED, 0, dtype) if p.residual else result,
    )  # fmt: skip

    constants = {
        "SOURCE": _steps_of(x), "TARGET": _steps_of(out), "SIZES": (height.size, width.size),
        "OUTS": (height.out, width.out), "CHANNELS": p.channels, "OUTPUTS": p.out_channels,
        "KERNEL": (height.kernel, width.kernel), "STRIDE": (height.stride, width.stride),
        "DILATION": (height.dilation, width.dilation), "BEFORE": (height.before, width.before),
        "COLUMNS": _checks(p, tile), "ROWS_CHECKED": _rows_checked(p, tile),
        "INNER": activation_kind(p.inner[0]), "INNER_PARAMETERS": kernel_parameters(p.inner[0]), "RESIDUAL": p.residual,
        "ACTIVATION": activation_kind(p.activation), "PARAMETERS": kernel_parameters(p.activation), "LANES": tile.lanes,
        "EDGE": tile.edge, "BLOCK_K": tile.depth, "PIECES": tile.pieces, "PARTS": parts_of(p, tile),
        "WIDTH": tile.width,
    }  # fmt: skip
    programs = parts_of(p, tile) * math.prod(_grid(p, tile))
    return Launch(separable, (programs, 1, 1), pointers, (p.batch,), constants, tile.warps, 1)


def _steps_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Elements from one image, row and column to the next one."""
    image, _, row, column = tensor.stride()
    return image, row, column
