"""Depthwise convolution with channels innermost on a CPU: the division of its work, filters in panels, and the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewise.kernels.cpu.channels_last.told import INDIRECT, NUMBERS
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import (
    READ,
    REGISTERS,
    Panels,
    even,
    lines_in_panels,
    rows_of_line,
    three_axes,
    told_images,
)
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

__all__ = ["Division", "Lines", "division", "forms", "in_panels"]

NUMBER, PLACE = 4, 8
"""Bytes of an fp32 number and of an address."""
VECTORS = (1, 2, 3, 4)
TABLES = 1 << 17
"""Most bytes of the tables of a unit."""
IMAGE = 1 << 18
"""Most bytes of the image that a unit reads, so that they stay in a core's cache for all panels."""
ENTRY = 1.5
"""Time to write an entry of a table, in products of vectors."""
BEGIN = 12
"""Time to begin a tile, in products of vectors."""
LOAD = 0.5
"""Time of a vector that is loaded, in products of vectors."""


@dataclass(frozen=True, slots=True)
class Division(Panels):
    """How the work is divided: ``rows`` neighbouring pixels and ``vectors`` vectors in a tile, and parts of both."""

    p: ConvProblem
    lanes: int
    vectors: int
    rows: int
    parts: int
    panel_parts: int

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """Depth, height and width."""
        return three_axes(self.p)

    @property
    def line(self) -> tuple[int, int, int]:
        """Taps of a line of the filter, their stride and their dilation."""
        width = self.axes[2]
        return width.kernel, width.stride, width.dilation

    @property
    def lines(self) -> int:
        """Lines of the filter."""
        return self.p.taps // self.axes[2].kernel

    @property
    def columns(self) -> int:
        """Pixels of a line of the image that a tile meets."""
        taps, stride, dilation = self.line
        return (self.rows - 1) * stride + (taps - 1) * dilation + 1

    @property
    def outputs(self) -> int:
        """Channels, each with one filter."""
        return self.p.out_channels

    @property
    def ragged(self) -> bool:
        """Whether the last vector of channels is not whole."""
        return self.p.out_channels % self.lanes > 0

    @property
    def tiles(self) -> int:
        """Tiles of all pixels."""
        depth, height, width = self.axes
        return self.p.batch * depth.out * height.out * -(-width.out // self.rows)

    @property
    def unit_tiles(self) -> int:
        """Most tiles of a unit."""
        return -(-self.tiles // self.parts)

    @property
    def units(self) -> int:
        """Units of work."""
        return self.parts * self.panel_parts

    @property
    def entries(self) -> int:
        """Entries of the table of a tile, with those of its results."""
        return self.lines * self.columns + 2 * self.rows

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of the filter."""
        return self.p.taps * self.width * NUMBER

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in panels."""
        return self.p.taps * self.chunks * self.lanes * NUMBER

    @property
    def image(self) -> int:
        """Bytes of the image that a unit reads."""
        return self.p.nbytes("x") // self.parts

    def places(self) -> dict[str, int]:
        """Where in scratch the places of results, biases and the dummy of a result begin, and its size."""
        table = self.unit_tiles * self.lines * self.columns * PLACE
        biases = table + 2 * self.unit_tiles * self.rows * PLACE
        biases += -biases % 64
        dummy = biases + self.width * NUMBER
        end = dummy + self.panels * self.width * NUMBER
        return {"table": table, "biases": biases, "dummy": dummy, "size": end + -end % PAGE}

    def time(self, threads: int) -> float:
        """Estimated time, in products of two vectors."""
        panels = -(-self.panels // self.panel_parts)
        chunks = min(self.chunks, panels * self.vectors)
        products = self.rows * self.p.taps + LOAD * (self.lines * self.columns + self.p.taps)
        of_tiles = self.unit_tiles * (chunks * products + panels * (BEGIN + self.rows) + ENTRY * self.entries)
        return units_in_turn(self.units, threads) * (of_tiles + (self.image + self.filter_bytes) / READ)


def division(p: ConvProblem, c: Config) -> Division:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    names = "lanes", "vectors", "rows", "parts", "panel_parts"
    lanes, vectors, rows, parts, panel_parts = (integer(c, name) for name in names)
    integer(c, "threads")
    if (
        lanes not in REGISTERS
        or vectors not in VECTORS
        or rows > max(1, rows_of_line(p.axes[-1].kernel, lanes, vectors))
    ):
        raise ValueError(f"lanes={lanes}, vectors={vectors}, rows={rows}: fewer, so that registers hold them, would do")
    divided = Division(p, lanes, vectors, rows, parts, panel_parts)
    if panel_parts > divided.panels or parts > divided.tiles:
        raise ValueError(f"parts={parts}, panel_parts={panel_parts}: no more than tiles and panels would do")
    return divided


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each number of vectors the config that should be fastest, in the order in which they should be."""
    lanes, threads = vector_lanes(), torch.get_num_threads()
    rated = []
    for vectors in VECTORS:
        chunks, most = -(-p.out_channels // lanes), rows_of_line(p.axes[-1].kernel, lanes, vectors)
        if -(-chunks // -(-chunks // vectors)) != vectors or (most < 1 and vectors > 1):
            continue  # as many panels of fewer vectors are another form
        whole = Division(p, lanes, vectors, even(p.axes[-1].out, max(1, most)), 1, 1)
        best = min(_divided(whole, threads), key=lambda divided: divided.time(threads))
        rated.append((best.time(threads), best))
    for _, best in sorted(rated, key=lambda entry: entry[0]):
        base = Config(lanes=lanes, vectors=best.vectors, rows=best.rows, parts=best.parts,
                      panel_parts=best.panel_parts, threads=threads)  # fmt: skip
        yield from with_teams(base)


def _divided(whole: Division, threads: int) -> Iterable[Division]:
    """Divisions worth comparing: the fewest parts whose images and tables stay in cache, up to many small ones."""
    tables = whole.tiles * whole.entries * PLACE
    least = min(whole.tiles, max(-(-tables // TABLES), -(-whole.image // IMAGE)))
    steps = sorted({min(whole.tiles, least + extra) for extra in (*range(4 * threads), 6 * threads, 8 * threads)})
    for parts, panel_parts in itertools.product(steps, range(1, min(whole.panels, 4 * threads) + 1)):
        yield replace(whole, parts=parts, panel_parts=panel_parts)


class Lines(PreparingRun):
    """The compiled kernel over all units of work, for tensors of fixed strides. It takes filters in panels."""

    __slots__ = ("_divided", "_zeros")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of x and y. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.channels_last.compiling import load_depthwise_last

        divided = self._divided = division(p, c)
        super().__init__(p, c, INDIRECT)
        self._zeros = np.zeros(divided.panels * divided.width, dtype=np.float32)
        with numba_reasons():
            self._kernel, *tiles = load_depthwise_last(
                divided.lanes, divided.rows, (divided.vectors, divided.last), divided.line, p.activation, divided.ragged
            )
        places = divided.places()
        numbers = {
            "outputs": p.out_channels, "parts": divided.parts, "panel_parts": divided.panel_parts,
            "panels": divided.panels, "tiles": divided.tiles, "rows": divided.rows, "width": divided.width,
            "zeros": self._zeros.ctypes.data, "panel_bytes": divided.panel_bytes, "table": places["table"],
            "dummy": places["dummy"], "biases": places["biases"], "kernels": tiles[0], "last_kernel": tiles[1],
        }  # fmt: skip
        told = {INDIRECT[name]: value for name, value in numbers.items()}
        told |= told_images(divided.axes, apart)
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, NUMBERS))

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write all filters into ``kept`` in panels."""
        in_panels(self._divided, weight, kept)


def in_panels(divided: Division, weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Write a filter to ``kept``, of uint8, in the order in which tiles read it: panel, tap, channel."""
    flat = kept[: divided.filter_bytes].view(torch.float32)
    lines_in_panels(weight.reshape(weight.shape[0], -1).T, divided.width, divided.lanes, flat)
