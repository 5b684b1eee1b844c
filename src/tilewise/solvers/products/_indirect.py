"""Indirect convolution on a CPU: the division of its work, filters in panels, and the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewise.kernels.cpu.channels_last.told import AHEAD, FILTERS, FILTERS_NUMBERS, INDIRECT, NUMBERS, UNROLLED
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import (
    AWAY,
    CACHE,
    RATES,
    READ,
    SHAPES,
    Panels,
    even,
    innermost,
    three_axes,
    told_images,
)
from tilewise.solvers.common.cpu_run import (
    PAGE,
    PreparingRun,
    byte_strides,
    kernel_data,
    numba_reasons,
    numbers_array,
    start,
    units_in_turn,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.products import _interleaved

__all__ = ["Division", "Pixels", "division", "forms", "in_panels", "reads_planes"]

NUMBER, PLACE = 4, 8
"""Bytes of an fp32 number and of an address."""
FEW = 16
"""Up to so many channels, rows of the image are copied, so that taps side by side count as one."""
TABLES = 1 << 18
"""Most bytes of the tables of a unit."""
IMAGE, STRIP = 1 << 19, 1 << 18
"""Most bytes of the image that a unit reads, and of the rows that it copies, so that they stay in a core's cache."""
PANEL = 1 << 20
"""Bytes of a panel from which on it stays in no cache of one core."""
READ_AWAY = 2
"""Bytes of filters and images, from a cache that cores share, that are read in the time of one product of a vector.

What a core reads more than another decides between divisions: with filters of megabytes, panels are divided and not
pixels. Of 28 layers on a Xeon those that are chosen so take 4 % longer than the best of all divisions in the mean; with
16 bytes they took 9 %, and up to 2.4 times as long."""
FAR = 1 << 20
"""Bytes of results from which on they are no longer in a core's cache when they are written again."""
DEEP = 512
"""Channels from which on sums are made block by block."""
AHEAD_BYTES, AHEAD_TILES = 1 << 18, 16
"""The next panel is prefetched where a unit reads filters of so many bytes, for so many tiles at the most: with more
tiles there is less to wait for."""
ENTRY = 2
"""Time to write an entry of a table, in products of vectors."""
BEGIN = 12
"""Time to begin a tile, in products of vectors."""


@dataclass(frozen=True, slots=True)
class Division(Panels):
    """How the work is divided: ``rows`` pixels and ``vectors`` vectors in a tile, ``parts`` of pixels and of panels.

    With ``lines`` above 0 a unit has so many rows of results, and copies what they read. With ``interleaved`` above 1
    so many neighbouring groups are computed side by side and count as one group; the last ones may be fewer.
    """

    p: ConvProblem
    lanes: int
    vectors: int
    rows: int
    parts: int
    panel_parts: int
    lines: int
    interleaved: int = 1

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """Depth, height and width."""
        return three_axes(self.p)

    @property
    def groups(self) -> int:
        """Groups that are computed one by one."""
        return -(-self.p.groups // self.interleaved)

    @property
    def channels(self) -> int:
        """Input channels of a group, or of those side by side."""
        return self.p.in_channels // self.p.groups * self.interleaved

    @property
    def outputs(self) -> int:
        """Output channels of a group, or of those side by side."""
        return self.p.out_channels // self.p.groups * self.interleaved

    @property
    def depth(self) -> int:
        """Products in each sum."""
        return self.channels // self.interleaved * self.p.taps

    @property
    def pixels(self) -> int:
        """Pixels of all results."""
        return self.p.batch * math.prod(axis.out for axis in self.axes)

    @property
    def planes(self) -> int:
        """Planes of all results."""
        return self.p.batch * self.axes[0].out

    @property
    def tiles(self) -> int:
        """Tiles of all pixels, or with lines those of one unit."""
        return -(-(self.lines * self.axes[2].out if self.lines else self.pixels) // self.rows)

    @property
    def unit_tiles(self) -> int:
        """Most tiles of a unit."""
        return self.tiles if self.lines else -(-self.tiles // self.parts)

    @property
    def units(self) -> int:
        """Units of work."""
        return self.parts * self.panel_parts * self.groups

    @property
    def table_taps(self) -> int:
        """Entries of the table for each pixel."""
        return self.axes[1].kernel if self.lines else self.p.taps

    @property
    def table(self) -> int:
        """Bytes of the table of the pixels that taps read."""
        return self.unit_tiles * self.rows * PLACE * self.table_taps

    @property
    def line(self) -> int:
        """Bytes of a row that is copied."""
        axis = self.axes[2]
        return ((axis.out - 1) * axis.stride + axis.kernel) * self.channels * NUMBER

    @property
    def strip(self) -> int:
        """Bytes of the rows that a unit copies."""
        axis = self.axes[1]
        return self.line * ((self.lines - 1) * axis.stride + axis.reach) if self.lines else 0

    def places(self) -> dict[str, int]:
        """Where in scratch the places of results, biases, the dummy of a result and copied rows begin, and its size."""
        table = self.table
        biases = table + 2 * self.unit_tiles * self.rows * PLACE
        biases += -biases % 64
        dummy = biases + self.width * NUMBER
        strip = dummy + (self.p.out_channels + self.width) * NUMBER
        strip += -strip % 64
        end = strip + self.strip
        return {"table": table, "biases": biases, "dummy": dummy, "strip": strip, "size": end + -end % PAGE}

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of the filter."""
        return self.depth * self.width * NUMBER

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's filters in panels."""
        return self.depth * self.chunks * self.lanes * NUMBER

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in panels."""
        return self.groups * self.group_bytes

    @property
    def far(self) -> bool:
        """Whether the memory of results is in no near cache, or pieces of it are."""
        return self.interleaved > 1 or self.p.nbytes("y") >= FAR

    @property
    def ahead(self) -> int:
        """Bytes of the next panel that are prefetched in each pass of the inner loop; 0 where none are.

        All tiles of a panel prefetch the next one together, as far as these passes suffice.
        """
        own = self.panel_bytes * -(-self.panels // self.panel_parts)
        passes = self.unit_tiles * self.p.taps * (self.channels // UNROLLED)
        if self.lines or not passes or own < AHEAD_BYTES or self.unit_tiles > AHEAD_TILES:
            return 0
        return min(AHEAD, -(-self.panel_bytes // passes))

    @property
    def deep(self) -> bool:
        """Whether sums are made block by block, so that many products of one sign lose no digits."""
        return not self.lines and self.channels >= DEEP

    def time(self, threads: int) -> float:
        """Estimated time, in products of two vectors."""
        panels, tiles = -(-self.panels // self.panel_parts), self.unit_tiles
        chunks = min(self.chunks, panels * self.vectors)
        products = tiles * self.rows * chunks * self.depth / RATES[self.vectors]
        begin = tiles * panels * (BEGIN + self.rows * self.vectors)
        entries = tiles * self.rows * (self.table_taps + 2) * ENTRY
        again = tiles if self.panel_bytes > PANEL else 1
        read = again * chunks * self.lanes * self.depth * NUMBER + self.image
        spent = products + begin + entries + read / READ_AWAY + self.strip * 4 / READ
        away = 1 + AWAY * self.places()["size"] / CACHE if self.lines else 1.0
        return units_in_turn(self.units, threads) * spent * away

    @property
    def image(self) -> int:
        """Bytes of the image that a unit reads."""
        return self.p.nbytes("x") // self.groups // self.parts


def division(p: ConvProblem, c: Config) -> Division:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    names = "lanes", "vectors", "rows", "parts", "panel_parts"
    lanes, vectors, rows, parts, panel_parts = (integer(c, name) for name in names)
    interleaved = integer(c, "interleaved", 1)
    shapes = _interleaved.ROWS if interleaved > 1 else SHAPES
    if lanes not in shapes or vectors not in shapes[lanes] or rows > shapes[lanes][vectors]:
        raise ValueError(f"lanes={lanes}, vectors={vectors}, rows={rows}: up to {shapes} would do")
    integer(c, "threads")
    lines = integer(c, "lines", 0) if "lines" in c else 0
    divided = Division(p, lanes, vectors, rows, parts, panel_parts, lines, interleaved)
    if interleaved > 1:
        if reason := _interleaved.why_not(p, lanes, interleaved):
            raise ValueError(f"interleaved={interleaved}: {reason}")
        if not lines or divided.chunks != vectors:
            raise ValueError(f"lines={lines}, vectors={vectors}: some lines and vectors={divided.chunks} would do")
    allowed = interleaved > 1 or _few(p)
    if lines and (not allowed or lines > divided.axes[1].out or parts != _parts_of_lines(divided)):
        raise ValueError(f"lines={lines}, parts={parts}: no lines, or parts that fit them, would do")
    if panel_parts > divided.panels or (not lines and parts > divided.tiles):
        raise ValueError(f"parts={parts}, panel_parts={panel_parts}: no more than tiles and panels would do")
    return divided


def _parts_of_lines(divided: Division) -> int:
    """The parts of pixels where a unit has ``lines`` rows of results."""
    return divided.planes * -(-divided.axes[1].out // divided.lines)


def _few(p: ConvProblem) -> bool:
    """Whether rows of the image are copied, so that taps side by side count as one."""
    return p.dims < 3 and p.axes[-1].kernel > 1 and p.axes[-1].dilation == 1 and p.in_channels // p.groups <= FEW


def reads_planes(p: ConvProblem) -> bool:
    """Whether the image may lie channel by channel: its rows are copied, and the channels are all of one group."""
    return _few(p) and p.groups == 1 and p.layout("x") == "contiguous"


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each number of vectors the config that should be fastest, in the order in which they should be.

    The same for each number of groups that may be side by side.
    """
    lanes, threads = vector_lanes(), torch.get_num_threads()
    offered = []
    for vectors, most in SHAPES[lanes].items():
        chunks = -(-p.out_channels // p.groups // lanes)
        panels = -(-chunks // vectors)
        if -(-chunks // panels) != vectors:
            continue  # as many panels of fewer vectors are another form
        whole = Division(p, lanes, vectors, most, 1, 1, 0)
        offered.append(_by_lines(whole, threads) if _few(p) else _by_pixels(whole, threads))
    for count, vectors in _interleaved.counts(p, lanes).items():
        whole = Division(p, lanes, vectors, _interleaved.ROWS[lanes][vectors], 1, 1, 0, count)
        offered.append(_by_lines(whole, threads))

    def time(divided: Division) -> float:
        return divided.time(threads)

    for best in sorted((min(made, key=time) for made in offered), key=time):
        c = {"lanes": lanes, "vectors": best.vectors, "rows": best.rows, "parts": best.parts,
             "panel_parts": best.panel_parts, "threads": threads}  # fmt: skip
        if best.lines:
            c["lines"] = best.lines
        if best.interleaved > 1:
            c["interleaved"] = best.interleaved
        yield from with_teams(Config(**c))


def _by_lines(whole: Division, threads: int) -> Iterable[Division]:
    """Divisions worth comparing of images whose rows are copied: few units with small strips, up to many.

    ``whole`` has the most pixels in a tile.
    """
    height, width = (axis.out for axis in whole.axes[1:])
    for count in range(1, height + 1):
        lines = -(-height // count)
        divided = replace(whole, lines=lines)
        divided = replace(divided, parts=_parts_of_lines(divided), rows=even(lines * width, whole.rows))
        if lines == 1 or (divided.strip <= STRIP and divided.places()["biases"] <= TABLES):
            yield divided
        if divided.parts >= 16 * threads and divided.strip <= STRIP:
            return


def _by_pixels(whole: Division, threads: int) -> Iterable[Division]:
    """Divisions worth comparing of other images: the fewest parts whose images and tables stay in cache, up to many."""
    whole = replace(whole, rows=even(whole.pixels, whole.rows))
    tables = whole.tiles * whole.rows * PLACE * (whole.table_taps + 2)
    least = min(whole.tiles, max(-(-tables // TABLES), -(-whole.image // IMAGE)))
    steps = sorted({min(whole.tiles, least + extra) for extra in (*range(4 * threads), 6 * threads, 8 * threads)})
    for parts, panel_parts in itertools.product(steps, range(1, min(whole.panels, 4 * threads) + 1)):
        yield replace(whole, parts=parts, panel_parts=panel_parts)


class Pixels(PreparingRun):
    """The compiled kernel over all units of work, for tensors of fixed strides. It takes filters in panels."""

    __slots__ = ("_divided", "_filters", "_panelled", "_zeros")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]], weight: torch.Tensor) -> None:
        """``apart`` holds the byte strides of x and y, and ``weight`` is an example of the filter.

        Raises ``SolverUnavailable`` with Numba's reason.
        """
        divided = self._divided = division(p, c)
        super().__init__(p, c, INDIRECT)
        self._zeros = np.zeros(max(divided.channels, divided.width), dtype=np.float32)
        self._kernel, *functions = _kernels(divided)
        places = divided.places()
        numbers = {
            "channels": divided.channels, "outputs": divided.outputs, "groups": divided.groups,
            "planes": divided.planes, "parts": divided.parts, "panel_parts": divided.panel_parts,
            "panels": divided.panels, "tiles": divided.tiles, "pixels": divided.pixels, "rows": divided.rows,
            "width": divided.width, "zeros": self._zeros.ctypes.data, "panel_bytes": divided.panel_bytes,
            "group_bytes": divided.group_bytes,
            "table": places["table"], "strip": places["strip"] if divided.lines else 0, "dummy": places["dummy"],
            "biases": places["biases"], "strip_line": divided.line, "lines": divided.lines,
            "kernels": functions[0], "last_kernel": functions[1], "interleave": functions[2],
            "interleaved": divided.interleaved if divided.interleaved > 1 else 0, "all_channels": p.in_channels,
            "all_outputs": p.out_channels, "apart": 0 if innermost(p, "x") else apart["x"][1],
            "ahead": divided.ahead,
        }  # fmt: skip
        told = {INDIRECT[name]: value for name, value in numbers.items()}
        told |= told_images(divided.axes, apart)
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, NUMBERS))
        self._panelled = 0
        if self._own_filters and divided.interleaved == 1:
            self._panelled, self._filters = _filters(divided, weight)

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write all filters into ``kept`` in panels."""
        if not self._panelled:
            in_panels(self._divided, weight, kept)
            return
        data = self._filters.copy()
        addresses = (0, 0, weight.data_ptr(), kept.data_ptr())
        start(self._panelled, data, min(self._threads, int(data[3])), self._openmp, *addresses)


def _kernels(divided: Division) -> tuple[int, int, int, int]:
    """The addresses of the worker, of its tiles for all panels but the last and for that one, and of what interleaves.

    Raises ``SolverUnavailable`` with Numba's reason.
    """
    from tilewise.kernels.cpu.channels_last.compiling import load_grouped, load_indirect

    p, lanes, rows, vectors = divided.p, divided.lanes, divided.rows, divided.vectors
    with numba_reasons():
        if divided.interleaved == 1:
            forms = vectors, divided.last
            return *load_indirect(lanes, rows, forms, p.activation, divided.far, divided.ahead > 0, divided.deep), 0
        sizes = p.in_channels // p.groups, p.out_channels // p.groups
        worker, tile, interleave = load_grouped(lanes, rows, vectors, p.activation, divided.interleaved, sizes)
        return worker, tile, tile, interleave


def _filters(divided: Division, weight: torch.Tensor) -> tuple[int, np.ndarray]:
    """The address of what brings filters that lie as ``weight`` into panels, and the description of its call.

    Raises ``SolverUnavailable`` with Numba's reason.
    """
    from tilewise.kernels.cpu.channels_last.compiling import load_filters

    with numba_reasons():
        worker = load_filters(divided.lanes)
    output, channel, *taps = byte_strides(weight)
    told = {
        FILTERS[name]: value
        for name, value in {
            "channels": divided.channels, "outputs": divided.outputs, "panels": divided.panels,
            "width": divided.width, "output": output, "channel": channel, "panel_bytes": divided.panel_bytes,
            "group_bytes": divided.group_bytes,
        }.items()
    }  # fmt: skip
    told |= dict(enumerate((axis.kernel for axis in divided.axes), FILTERS["kernel"]))
    told |= dict(enumerate((*[0] * (3 - len(taps)), *taps), FILTERS["tap"]))
    return worker, kernel_data(divided.groups * divided.panels, 0, numbers_array(told, FILTERS_NUMBERS))


def in_panels(divided: Division, weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Write a filter to ``kept`` in the order in which tiles read it: group, panel, tap, channel, output channel.

    ``kept`` is of uint8. Output channels that fill up a group's last panel are zeros.
    """
    p = divided.p
    flat = kept[: divided.filter_bytes].view(torch.float32)
    flat.zero_()
    if divided.interleaved > 1:
        _interleaved.in_lanes(p, divided.interleaved, divided.width, weight, flat)
        return
    group, depth = divided.group_bytes // NUMBER, divided.depth
    taps = [axis.kernel for axis in p.axes]
    whole = divided.outputs // divided.width
    first = whole * divided.width
    strides = [1] * p.dims
    for count, begin, outputs, width in (
        (whole, 0, divided.width, divided.width),
        (1, first, divided.outputs - first, divided.last * divided.lanes),
    ):
        if count < 1 or outputs < 1:
            continue
        step = divided.channels * width
        for i in reversed(range(p.dims)):
            strides[i], step = step, step * taps[i]
        target = flat.as_strided(
            (p.groups, count, outputs, divided.channels, *taps), (group, depth * width, 1, width, *strides),
            flat.storage_offset() + begin * depth,
        )  # fmt: skip
        source = weight.unflatten(0, (p.groups, divided.outputs))[:, begin : begin + count * outputs]
        target.copy_(source.unflatten(1, (count, outputs)))
