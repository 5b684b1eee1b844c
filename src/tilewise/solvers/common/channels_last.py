"""What solvers on a CPU for images whose channels lie innermost have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tilewise.kernels.cpu.channels_last.told import INDIRECT
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.cpu_run import byte_strides, numba_missing

__all__ = [
    "AWAY", "CACHE", "LONGEST", "RATES", "READ", "REGISTERS", "SHAPES", "Panels", "even", "innermost",
    "lines_in_panels", "reasons", "rows_of_line", "strides_of", "three_axes", "told_images",
]  # fmt: skip

SHAPES = {16: {4: 7, 2: 14, 3: 9, 1: 12}, 8: {2: 6, 4: 3, 3: 4, 1: 8}, 4: {2: 6, 4: 3, 3: 4, 1: 8}}
"""By the lanes of a vector: how many pixels a tile may have with so many vectors, so that registers hold all sums."""
REGISTERS = {16: 32, 8: 16, 4: 16}
"""Vector registers by the lanes of a vector."""
LONGEST = 15
"""Most taps of a line of a depthwise filter, which are unrolled."""
MOST_CODE = 512
"""Most products of a line that are unrolled."""
CACHE = 1 << 19
"""Bytes that a core's cache holds beside filters."""
AWAY = 0.25
"""By how much products take longer where the scratch of strips fills the cache: the less it is, the nearer."""
RATES = {1: 0.65, 2: 0.95, 3: 1.0, 4: 1.0}
"""Share of the peak that products of tiles with so many vectors reach, roughly."""
READ = 16
"""Bytes from a cache shared by cores that are read in the time of one product of vectors."""


class Panels:
    """Output channels in panels of ``vectors`` vectors of ``lanes`` channels each."""

    __slots__ = ()

    if TYPE_CHECKING:  # fields or properties of what divides the work

        @property
        def outputs(self) -> int: ...
        @property
        def lanes(self) -> int: ...
        @property
        def vectors(self) -> int: ...

    @property
    def chunks(self) -> int:
        """Vectors of output channels."""
        return -(-self.outputs // self.lanes)

    @property
    def width(self) -> int:
        """Output channels of a panel."""
        return self.vectors * self.lanes

    @property
    def panels(self) -> int:
        """Panels of output channels."""
        return -(-self.chunks // self.vectors)

    @property
    def last(self) -> int:
        """Vectors of the last panel."""
        return self.chunks - (self.panels - 1) * self.vectors


def innermost(p: ConvProblem, role: str) -> bool:
    """Whether the channels of a tensor are neighbours in memory, whatever its other strides are."""
    channels, *space = p.shape(role)[1:]
    layout = p.layout(role)
    return layout == "channels_last" or (layout == "contiguous" and (channels == 1 or math.prod(space) == 1))


def reasons(p: ConvProblem, roles: Sequence[str] = ("x", "y")) -> list[str]:
    """Why none of these solvers takes ``p``: Numba is not installed, channels are not innermost, 16-bit results.

    ``roles`` are the tensors whose channels must be innermost.
    """
    found = numba_missing()
    for role in roles:
        if not innermost(p, role):
            found.append(f"takes {role} with channels innermost, not {p.layout(role)}: channels_last would do")
    if p.out_dtype != "fp32":
        found.append(f"gives fp32, not {p.out_dtype}")
    return found


def even(pixels: int, most: int) -> int:
    """The pixels of a tile, up to ``most``, of which the last tile lacks fewest."""
    return -(-pixels // -(-pixels // most))


def rows_of_line(taps: int, lanes: int, vectors: int) -> int:
    """The pixels of a depthwise tile whose sums stay in registers beside the taps of a line; 0 where none do."""
    return max(0, min((REGISTERS[lanes] - 2) // vectors - taps, MOST_CODE // (taps * vectors)))


def strides_of(a: torch.Tensor, out: torch.Tensor) -> dict[str, list[int]]:
    """The byte strides of x and y."""
    return {"x": byte_strides(a), "y": byte_strides(out)}


def three_axes(p: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """Depth, height and width, of size 1 where ``p`` lacks them."""
    missing = (Axis(1, 1),) * (3 - p.dims)
    depth, height, width = (*missing, *p.axes)
    return depth, height, width


def told_images(axes: Sequence[Axis], apart: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Depth, height and width of images and how these lie, by their places in :data:`INDIRECT`.

    ``apart`` holds the byte strides of x and y. What is added lies as y does.
    """
    told: dict[int, int] = {}
    for name, field in (("sizes", "size"), ("outs", "out"), ("kernel", "kernel"), ("stride", "stride"),
                        ("dilation", "dilation"), ("before", "before")):  # fmt: skip
        told |= dict(enumerate((getattr(axis, field) for axis in axes), INDIRECT[name]))
    for name, role in (("x", "x"), ("y", "y"), ("added", "y")):
        image, _, *space = apart[role]
        told |= dict(enumerate((image, *[0] * (3 - len(space)), *space), INDIRECT[name]))
    return told


def lines_in_panels(lines: torch.Tensor, width: int, lanes: int, flat: torch.Tensor) -> None:
    """Write a filter of ``lines``, (products of a sum, channels), into ``flat`` in panels of ``width`` channels each.

    Channels that fill up the last panel's last vector are zeros: a panel has whole vectors of ``lanes`` channels.
    """
    flat.zero_()
    depth, channels = lines.shape
    for first in range(0, channels, width):
        count = min(width, channels - first)
        wide = -(-count // lanes) * lanes
        flat[first * depth : first * depth + depth * wide].view(depth, wide)[:, :count].copy_(
            lines[:, first : first + count]
        )
