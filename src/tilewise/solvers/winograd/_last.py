"""Winograd convolution on a CPU with channels innermost: the division of its work, the filters, and the run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewise.kernels.cpu.channels_last.told import WINOGRAD, WINOGRAD_NUMBERS
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import READ, SHAPES, Panels, even
from tilewise.solvers.common.cpu_run import (
    PAGE,
    PreparingRun,
    kernel_data,
    numba_reasons,
    numbers_array,
    units_in_turn,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.winograd._cpu import sizes

__all__ = ["Blocked", "LastTiles", "blocked", "forms"]

NUMBER, PLACE, LINE = 4, 8, 64
"""Bytes of an fp32 number, of an address and of a cache line."""
CACHE = 1 << 19
"""Bytes of transformed tiles that stay in a core's cache beside a panel of filters and sums."""
MOST_INPUTS = 1 << 22
"""Most bytes of transformed tiles of a block."""
TRANSFORM = 3.5
"""Time to transform a vector of a tile's channels, to or back, in products of vectors for each point."""
CHUNK = 1 << 20
"""Most bytes of the copy of a filter that is transformed at a time, unless one channel has more."""
FILTER = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)


@dataclass(frozen=True, slots=True)
class Blocked(Panels):
    """How the work is divided: tiles of ``m`` outputs, in ``blocks``, and panels of ``vectors`` in ``panel_parts``.

    The products of a block take ``rows`` tiles at a time.
    """

    p: ConvProblem
    lanes: int
    m: int
    vectors: int
    rows: int
    blocks: int
    panel_parts: int

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Height and width."""
        height, width = (*(Axis(1, 1),) * (2 - self.p.dims), *self.p.axes)
        return height, width

    @property
    def outs(self) -> tuple[int, int]:
        """Outputs of a tile along height and width: one along an axis with one tap."""
        height, width = (self.m if axis.kernel > 1 else 1 for axis in self.axes)
        return height, width

    @property
    def taps(self) -> tuple[int, int]:
        """Taps along height and width."""
        height, width = (axis.kernel for axis in self.axes)
        return height, width

    @property
    def points(self) -> tuple[int, int]:
        """Points of a tile along height and width."""
        height, width = (m + r - 1 for m, r in zip(self.outs, self.taps, strict=True))
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of an image along height and width."""
        height, width = (-(-axis.out // m) for axis, m in zip(self.axes, self.outs, strict=True))
        return height, width

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.p.batch * math.prod(self.grid)

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.p.in_channels // self.p.groups

    @property
    def outputs(self) -> int:
        """Output channels of a group."""
        return self.p.out_channels // self.p.groups

    @property
    def units(self) -> int:
        """Units of work."""
        return self.blocks * self.panel_parts * self.p.groups

    @property
    def most(self) -> int:
        """Most tiles of a block."""
        return -(-self.tiles // self.blocks)

    @property
    def padded(self) -> int:
        """Tiles of a block, filled up to whole products."""
        return -(-self.most // self.rows) * self.rows

    @property
    def input_row(self) -> int:
        """Bytes of a tile's channels at a point: an odd number of cache lines, as even ones would share cache sets."""
        return _odd(-(-self.channels // self.lanes) * self.lanes * NUMBER)

    @property
    def input_point(self) -> int:
        """Bytes of a block's transformed tiles at a point."""
        return _odd(self.most * self.input_row)

    @property
    def product_point(self) -> int:
        """Bytes of a block's sums of a panel at a point."""
        return _odd(self.padded * self.width * NUMBER)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel's transformed filters."""
        return math.prod(self.points) * self.channels * self.width * NUMBER

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's transformed filters."""
        return math.prod(self.points) * self.channels * self.chunks * self.lanes * NUMBER

    @property
    def channels_at_once(self) -> int:
        """Channels of a filter that are transformed at a time."""
        return max(1, min(self.channels, CHUNK // (math.prod(self.taps) * self.chunks * self.lanes * NUMBER)))

    @property
    def copied_filter(self) -> int:
        """Bytes of the copy of a filter that is transformed at a time."""
        return self.channels_at_once * math.prod(self.taps) * self.chunks * self.lanes * NUMBER

    def places(self) -> dict[str, int]:
        """Where in scratch each part begins, and its ``size`` in bytes."""
        points, outs = math.prod(self.points), math.prod(self.outs)
        parts = {
            "read": points * self.padded * PLACE, "sums": points * self.padded * PLACE,
            "written": self.most * outs * PLACE, "added": self.most * outs * PLACE, "biases": self.width * NUMBER,
            "dummy": (self.p.out_channels + self.width) * NUMBER, "inputs": points * self.input_point,
            "products": max(points * self.product_point, points * PLACE),
        }  # fmt: skip
        begins, place = {}, 0
        for name, size in parts.items():
            begins[name], place = place, place + size + -size % LINE
        return {**begins, "size": place + -place % PAGE}

    def time(self, threads: int) -> float:
        """Estimated time, in products of two vectors."""
        points, panels = math.prod(self.points), -(-self.panels // self.panel_parts)
        chunks = min(self.chunks, panels * self.vectors)
        products = points * self.padded * chunks * self.channels
        transforms = TRANSFORM * points * self.most * (-(-self.channels // self.lanes) + chunks)
        inputs = points * self.input_point
        read = points * self.channels * chunks * self.lanes * NUMBER + (panels * inputs if inputs > CACHE else 0)
        # Reading goes on beside products, as far as it takes no longer than these.
        return units_in_turn(self.units, threads) * (max(products, read / READ) + read / READ / 4 + transforms)


def _odd(size: int) -> int:
    """``size`` bytes, rounded up to an odd number of cache lines."""
    lines = -(-size // LINE)
    return (lines + 1 - lines % 2) * LINE


def blocked(p: ConvProblem, c: Config) -> Blocked:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    names = "lanes", "tile", "vectors", "rows", "blocks", "panel_parts"
    divided = Blocked(p, *(integer(c, name) for name in names))
    integer(c, "threads")
    shapes = SHAPES.get(divided.lanes, {})
    if divided.m not in sizes(p) or divided.rows > shapes.get(divided.vectors, 0):
        raise ValueError(f"tile={divided.m}, rows={divided.rows}: one of {sizes(p)}, rows up to {shapes} would do")
    if divided.blocks > divided.tiles or divided.panel_parts > divided.panels:
        raise ValueError(f"blocks={divided.blocks}, panel_parts={divided.panel_parts}: no more than there are would do")
    return divided


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each size of tiles the config that should be fastest, in the order in which they should be."""
    lanes, threads = vector_lanes(), torch.get_num_threads()
    rated = []
    for m in sizes(p):
        found = [(divided.time(threads), i, divided) for i, divided in enumerate(_divisions(p, lanes, m, threads))]
        rated.append(min(found))
    for _, _, best in sorted(rated, key=lambda entry: entry[0]):
        base = Config(
            lanes=lanes, tile=best.m, vectors=best.vectors, rows=best.rows, blocks=best.blocks,
            panel_parts=best.panel_parts, threads=threads,
        )  # fmt: skip
        yield from with_teams(base)


def _divisions(p: ConvProblem, lanes: int, m: int, threads: int) -> Iterable[Blocked]:
    """Divisions worth comparing."""
    for vectors, most in SHAPES[lanes].items():
        whole = Blocked(p, lanes, m, vectors, most, 1, 1)
        if -(-whole.chunks // whole.panels) != vectors:
            continue
        for tiles in sorted({min(whole.tiles, n) for n in (*range(1, 65), 80, 96, 112, 128)}, reverse=True):
            divided = replace(whole, blocks=-(-whole.tiles // tiles))
            divided = replace(divided, rows=even(divided.most, most))
            if math.prod(divided.points) * divided.input_point > MOST_INPUTS and tiles > 1:
                continue
            for parts in range(1, min(whole.panels, 2 * threads) + 1):
                yield replace(divided, panel_parts=parts)


class LastTiles(PreparingRun):
    """The compiled kernel over all units of work, for tensors of fixed strides. It takes transformed filters."""

    __slots__ = ("_blocked", "_filter", "_zeros")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of x and y. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.channels_last.compiling import load_winograd_last

        divided = self._blocked = blocked(p, c)
        super().__init__(p, c, WINOGRAD)
        self._zeros = np.zeros(max(divided.channels, divided.width) + divided.lanes, dtype=np.float32)
        shape = divided.lanes, divided.outs, divided.taps, divided.rows, (divided.vectors, divided.last)
        with numba_reasons():
            self._kernel, to, back, filters, *products = load_winograd_last(*shape, p.activation)
        self._filter = FILTER(filters)
        places = divided.places()
        numbers = {
            "channels": divided.channels, "outputs": divided.outputs, "blocks": divided.blocks,
            "panel_parts": divided.panel_parts, "panels": divided.panels, "tiles": divided.tiles,
            "down": divided.grid[0], "along": divided.grid[1], "rows": divided.rows, "width": divided.width,
            "padded": divided.padded, "points_down": divided.points[0], "points_along": divided.points[1],
            "outputs_down": divided.outs[0], "outputs_along": divided.outs[1], "zeros": self._zeros.ctypes.data,
            "panel_bytes": divided.panel_bytes, "group_bytes": divided.group_bytes, "input_row": divided.input_row,
            "input_point": divided.input_point, "product_point": divided.product_point, "to": to, "back": back,
            "kernels": products[0], "last_kernel": products[1],
            **{name: place for name, place in places.items() if name != "size"},
        }  # fmt: skip
        told = {WINOGRAD[name]: value for name, value in numbers.items()}
        for name, field in (("sizes", "size"), ("outs", "out"), ("before", "before")):
            told |= dict(enumerate((getattr(axis, field) for axis in divided.axes), WINOGRAD[name]))
        for name in ("x", "y"):
            image, _, *space = apart[name]
            told |= dict(enumerate((image, *[0] * (2 - p.dims), *space), WINOGRAD[name]))
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, WINOGRAD_NUMBERS))

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write the transformed filters into ``kept``: group, panel, point, channel, output channel."""
        assert workspace is not None
        divided = self._blocked
        outputs, (down, along) = divided.chunks * divided.lanes, divided.taps
        copy = workspace[: divided.copied_filter].view(torch.float32)
        copy = copy.view(divided.channels_at_once, down, along, outputs)
        copy[..., divided.outputs :].zero_()
        weight = weight.view(divided.p.out_channels, divided.channels, down, along)
        for group in range(divided.p.groups):
            source = weight[group * divided.outputs : (group + 1) * divided.outputs].permute(1, 2, 3, 0)
            for first in range(0, divided.channels, divided.channels_at_once):
                some = source[first : first + divided.channels_at_once]
                copy[: len(some), ..., : divided.outputs].copy_(some)
                self._transform(copy, kept.data_ptr() + group * divided.group_bytes, first, len(some))

    def _transform(self, copy: torch.Tensor, target: int, first: int, count: int) -> None:
        """Transform the filters of ``count`` channels from ``first`` on: rows of taps, with outputs side by side."""
        divided = self._blocked
        column, vector = divided.chunks * divided.lanes * NUMBER, divided.lanes * NUMBER
        width, panel_bytes = divided.width * NUMBER, divided.panel_bytes
        row, down = divided.taps[1] * column, divided.points[1]
        source, channel = copy.data_ptr(), math.prod(divided.taps) * column
        for panel in range(divided.panels):
            vectors = divided.last if panel == divided.panels - 1 else divided.vectors
            line = vectors * vector
            point = divided.channels * line
            here, there = source + panel * width, target + panel * panel_bytes + first * line
            for i in range(count):
                self._filter(
                    here + i * channel, row, column, vector, there + i * line, down * point, point, vector, vectors
                )

    def behind_scratch(self, workspace: torch.Tensor) -> torch.Tensor:
        """The workspace behind the scratch of all threads, and behind the copy of a filter that is in its place."""
        return workspace[-self._blocked.p.groups * self._blocked.group_bytes :]
