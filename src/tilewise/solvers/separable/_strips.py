"""Separable convolutions by strips of rows on a CPU: how the work is divided, filters in panels, and the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tilewise.kernels.cpu.channels_last.told import INDIRECT, NUMBERS, SEPARABLE, SEPARABLE_NUMBERS
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import parted
from tilewise.solvers.common.channels_last import (
    AWAY,
    CACHE,
    READ,
    SHAPES,
    Panels,
    even,
    lines_in_panels,
    rows_of_line,
)
from tilewise.solvers.common.cpu_run import (
    PAGE,
    kernel_data,
    numba_reasons,
    numbers_array,
    start,
    units_in_turn,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import integer

__all__ = ["Division", "Stage", "Strips", "division", "forms", "in_panels"]

NUMBER, PLACE, LINE = 4, 8, 64
"""Bytes of an fp32 number, of an address, and of a line of a cache."""
NAMES = ("expand", "filter", "project")
"""What a config calls the stages."""
MOST_SCRATCH = 1 << 22
"""Most bytes of a thread's scratch, unless one row of results takes more."""
BEGIN, ENTRY = 12, 2
"""Time to begin a tile, and to write an entry of a table, in products of vectors."""
DEPTHWISE_RATE = 0.45
"""Share of the peak that tiles of the depthwise stage reach."""
RATES = {1: 0.65, 2: 0.95, 3: 1.0, 4: 0.85}
"""Share of the peak that products of tiles with so many vectors reach, of the few channels that blocks have."""


@dataclass(frozen=True, slots=True)
class Stage(Panels):
    """One convolution of a division: channels, ``depth`` products in each sum, and ``rows`` and ``vectors`` of a tile.

    ``taps`` is the number of taps along a row, 0 for a pointwise convolution.
    """

    inputs: int
    outputs: int
    depth: int
    lanes: int
    vectors: int
    rows: int
    taps: int = 0

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of the filter."""
        return self.depth * self.width * NUMBER

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in panels."""
        return self.depth * self.chunks * self.lanes * NUMBER

    def time(self, tiles: int) -> float:
        """Estimated time of so many tiles, in products of vectors."""
        rate = DEPTHWISE_RATE if self.taps else RATES[self.vectors]
        return tiles * (self.rows * self.chunks * self.depth / rate + self.panels * (BEGIN + self.rows * self.vectors))


@dataclass(frozen=True, slots=True)
class Division:
    """How the work is divided: the tiles of each stage, ``strip`` rows of results at a time, ``pieces`` of an image."""

    p: SeparableProblem
    stages: tuple[Stage | None, Stage, Stage | None]
    strip: int
    pieces: int

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Height and width."""
        return self.p.axes

    @property
    def units(self) -> int:
        """Units of work."""
        return self.p.batch * self.pieces

    @property
    def columns(self) -> int:
        """Pixels of a row that a tile of the depthwise stage meets."""
        axis = self.axes[1]
        return (self.stages[1].rows - 1) * axis.stride + axis.reach

    @property
    def kept_rows(self) -> int:
        """Rows that a strip's windows meet, and that are kept at a time."""
        height = self.axes[0]
        return (self.strip - 1) * height.stride + height.reach

    def tiles(self, number: int, rows: int) -> int:
        """Tiles of stage ``number`` for ``rows`` rows of what it gives."""
        stage = self.stages[number]
        if stage is None:
            return 0
        width = self.axes[1]
        if number == 1:
            return rows * -(-width.out // stage.rows)
        return -(-rows * (width.out if number else width.size) // stage.rows)

    def entries(self, number: int) -> int:
        """Entries of the table of a tile of stage ``number``, without those of its results."""
        stage = self.stages[number]
        if stage is None:
            return 0
        return self.axes[0].kernel * self.columns if number == 1 else stage.rows

    @property
    def strip_tiles(self) -> tuple[int, int, int]:
        """Most tiles of each stage for one strip."""
        before, middle, behind = (self.tiles(n, rows) for n, rows in enumerate((self.kept_rows, *[self.strip] * 2)))
        return before, middle, behind

    def places(self) -> dict[str, int]:
        """Where in scratch tables end, and biases, the dummy of a result, the ring and the strip begin; its size."""
        tiles = self.strip_tiles
        table = max(count * self.entries(number) for number, count in enumerate(tiles)) * PLACE
        results = max(count * stage.rows for count, stage in zip(tiles, self.stages, strict=True) if stage) * PLACE
        biases = _aligned(table + 2 * results)
        widest = max(stage.width for stage in self.stages if stage)
        dummy = _aligned(biases + widest * NUMBER)
        ring = _aligned(dummy + (max(self.p.channels, self.p.out_channels) + widest) * NUMBER)
        middle = _aligned(ring + self.kept_rows * self.line * self.p.expands)
        end = middle + self.strip * self.middle_line * self.p.projects
        return {"table": table, "biases": biases, "dummy": dummy, "ring": ring, "middle": middle,
                "size": end + -end % PAGE}  # fmt: skip

    @property
    def line(self) -> int:
        """Bytes of a row of the ring."""
        return self.axes[1].size * self.p.channels * NUMBER

    @property
    def middle_line(self) -> int:
        """Bytes of a row that the depthwise stage gives."""
        return self.axes[1].out * self.p.channels * NUMBER

    def filter_places(self) -> tuple[list[int], list[int], int]:
        """Where each stage's filters and its bias begin in what is kept, and the bytes of all."""
        filters, biases, place = [], [], 0
        for stage in self.stages:
            filters.append(place)
            place = _aligned(place + (stage.filter_bytes if stage else 0))
            biases.append(place)
            place = _aligned(place + (stage.outputs * NUMBER if stage else 0))
        return filters, biases, place

    def time(self, threads: int) -> float:
        """Estimated time, in products of vectors."""
        rows = -(-self.axes[0].out // self.pieces)
        height = self.axes[0]
        read = min(height.size, (rows - 1) * height.stride + height.reach)
        total, entries = 0.0, 0
        for number, (stage, count) in enumerate(zip(self.stages, (read, rows, rows), strict=True)):
            if stage is not None:
                # Each strip has tiles of its own, of which the last one may not be full.
                strips = -(-rows // self.strip)
                tiles = max(self.tiles(number, count), strips)
                total += stage.time(tiles)
                entries += tiles * (self.entries(number) + 2 * stage.rows)
        filters = sum(stage.filter_bytes for stage in self.stages if stage)
        again = -(-rows // self.strip) if filters > CACHE else 1
        total *= 1 + AWAY * self.places()["size"] / CACHE
        return units_in_turn(self.units, threads) * (total + entries * ENTRY + again * filters / READ)


def _aligned(place: int) -> int:
    """The next multiple of a cache line."""
    return place + -place % LINE


def division(p: SeparableProblem, c: Config) -> Division:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    lanes, strip, pieces = (integer(c, name) for name in ("lanes", "strip", "pieces"))
    integer(c, "threads")
    stages: list[Stage | None] = []
    for name, there in zip(NAMES, (p.expands, True, p.projects), strict=True):
        stages.append(
            _stage(p, name, lanes, integer(c, f"{name}_vectors"), integer(c, f"{name}_rows")) if there else None
        )
    height = p.axes[0].out
    if strip > height or pieces > height:
        raise ValueError(f"strip={strip}, pieces={pieces}: up to {height} rows would do")
    before, middle, behind = stages
    assert middle is not None
    return Division(p, (before, middle, behind), strip, pieces)


def _stage(p: SeparableProblem, name: str, lanes: int, vectors: int, rows: int) -> Stage:
    """A stage with such tiles. Raises ``ValueError`` where registers cannot hold them."""
    if lanes not in SHAPES or vectors not in SHAPES[lanes]:
        raise ValueError(f"lanes={lanes}, {name}_vectors={vectors}: those of {SHAPES} would do")
    most = max(1, rows_of_line(p.axes[1].kernel, lanes, vectors)) if name == "filter" else SHAPES[lanes][vectors]
    if rows > most:
        raise ValueError(f"{name}_rows={rows}: up to {most} would do")
    if name == "filter":
        height, width = p.axes
        return Stage(p.channels, p.channels, height.kernel * width.kernel, lanes, vectors, rows, width.kernel)
    inputs, outputs = (p.in_channels, p.channels) if name == "expand" else (p.channels, p.out_channels)
    return Stage(inputs, outputs, inputs, lanes, vectors, rows)


def forms(p: SeparableProblem) -> Iterable[Config]:
    """Configs in the order in which they should be fast."""
    lanes, threads = vector_lanes(), torch.get_num_threads()
    rated = sorted(_divisions(p, lanes, threads), key=lambda divided: divided.time(threads))
    for divided in rated:
        words: dict[str, int] = {"lanes": lanes, "strip": divided.strip, "pieces": divided.pieces}
        for name, stage in zip(NAMES, divided.stages, strict=True):
            if stage is not None:
                words |= {f"{name}_vectors": stage.vectors, f"{name}_rows": stage.rows}
        yield from with_teams(Config(**words, threads=threads))


def _divisions(p: SeparableProblem, lanes: int, threads: int) -> Iterator[Division]:
    """Divisions worth comparing: short strips and long ones, as many pieces as threads need and more."""
    height, width = p.axes
    fewest = -(-threads // math.gcd(threads, p.batch))
    pieces = sorted({min(height.out, fewest * factor) for factor in (1, 2, 4)})
    for count in pieces:
        strips = sorted({min(strip, -(-height.out // count)) for strip in (1, 2, 4, 8, 16)})
        for strip, middle in itertools.product(strips, _depthwise(p, lanes)):
            # The rows of all strips but a piece's first.
            into = min(strip * height.stride, height.size) * width.size
            before = _pointwise(p, "expand", lanes, into) if p.expands else None
            behind = _pointwise(p, "project", lanes, strip * width.out) if p.projects else None
            divided = Division(p, (before, middle, behind), strip, count)
            if strip == 1 or divided.places()["size"] <= MOST_SCRATCH:
                yield divided


def _depthwise(p: SeparableProblem, lanes: int) -> Iterator[Stage]:
    """The tiles of the depthwise stage for each number of vectors."""
    chunks, found = -(-p.channels // lanes), False
    for vectors in SHAPES[lanes]:
        most = rows_of_line(p.axes[1].kernel, lanes, vectors)
        if vectors < 4 and most > 0 and -(-chunks // -(-chunks // vectors)) == vectors:
            found = True
            yield _stage(p, "filter", lanes, vectors, even(p.axes[1].out, most))
    if not found:
        yield _stage(p, "filter", lanes, 1, 1)


def _pointwise(p: SeparableProblem, name: str, lanes: int, pixels: int) -> Stage:
    """The tiles of a pointwise stage that should be fastest for so many pixels."""
    stages = [_stage(p, name, lanes, vectors, even(pixels, most)) for vectors, most in SHAPES[lanes].items()]
    stages = [stage for stage in stages if -(-stage.chunks // stage.panels) == stage.vectors]
    return min(stages, key=lambda stage: stage.time(-(-pixels // stage.rows)))


class Strips:
    """The compiled kernel over all units of work, for images of fixed strides. It takes filters in panels."""

    __slots__ = ("_biases", "_divided", "_kernel", "_numbers", "_openmp", "_residual", "_threads", "_zeros")

    def __init__(self, p: SeparableProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of x and y. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.channels_last.compiling import load_separable

        divided = self._divided = division(p, c)
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        widest = max(stage.panels * stage.width for stage in divided.stages if stage)
        self._zeros = np.zeros(max(p.in_channels, widest), dtype=np.float32)
        with numba_reasons():
            self._kernel = load_separable(divided.stages[1].lanes)
            tiles = [_kernels(divided, number) for number in range(3)]
        places, (filters, biases, _) = divided.places(), divided.filter_places()
        height = divided.axes[0]
        numbers = {
            "pieces": divided.pieces, "strip": divided.strip, "expands": int(p.expands), "projects": int(p.projects),
            "reach": height.reach, "kept_rows": divided.kept_rows if p.expands else height.size,
            "line": divided.line if p.expands else apart["x"][2],
            "pixel": p.channels * NUMBER if p.expands else apart["x"][3], "ring": places["ring"],
            "middle": places["middle"], "middle_line": divided.middle_line, "middle_pixel": p.channels * NUMBER,
        }  # fmt: skip
        told = {SEPARABLE[name]: value for name, value in numbers.items()}
        told |= {SEPARABLE["filters"] + number: place for number, place in enumerate(filters)}
        for number, stage in enumerate(divided.stages):
            first = SEPARABLE["stages"] + number * NUMBERS
            told |= {first + place: value for place, value in self._stage(stage, tiles[number], places, apart).items()}
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, SEPARABLE_NUMBERS))
        stages = HEADER + SEPARABLE["stages"]
        self._biases = [
            (stages + number * NUMBERS + INDIRECT["bias"], biases[number])
            for number, stage in enumerate(divided.stages)
            if stage is not None
        ]
        self._residual = stages + (1 + p.projects) * NUMBERS + INDIRECT["residual"] if p.residual else 0

    def _stage(
        self, stage: Stage | None, tiles: tuple[int, int], places: dict[str, int], apart: dict[str, list[int]]
    ) -> dict[int, int]:
        """The numbers of a stage. Those of the images are told to all."""
        told = {}
        if stage is not None:
            numbers = {
                "channels": stage.inputs, "outputs": stage.outputs, "panels": stage.panels, "rows": stage.rows,
                "width": stage.width, "zeros": self._zeros.ctypes.data, "panel_bytes": stage.panel_bytes,
                "table": places["table"], "dummy": places["dummy"], "biases": places["biases"],
                "kernels": tiles[0], "last_kernel": tiles[1],
            }  # fmt: skip
            told = {INDIRECT[name]: value for name, value in numbers.items()}
        axes = (Axis(1, 1), *self._divided.axes)
        for name, field in (("sizes", "size"), ("outs", "out"), ("kernel", "kernel"), ("stride", "stride"),
                            ("dilation", "dilation"), ("before", "before")):  # fmt: skip
            told |= dict(enumerate((getattr(axis, field) for axis in axes), INDIRECT[name]))
        for name, strides in (("x", apart["x"]), ("y", apart["y"]), ("added", apart["y"])):
            image, _, row, pixel = strides
            told |= dict(enumerate((image, 0, row, pixel), INDIRECT[name]))
        return told

    def run(
        self,
        x: torch.Tensor,
        kept: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *residual: torch.Tensor,
    ) -> torch.Tensor:
        """Run the kernel; ``kept`` is what was prepared from all filters and biases."""
        assert out is not None
        assert workspace is not None
        data, filters = self._numbers.copy(), kept.data_ptr()
        for place, offset in self._biases:
            data[place] = filters + offset
        if residual:
            data[self._residual] = residual[0].data_ptr()
        start(self._kernel, data, self._threads, self._openmp, workspace.data_ptr(), x.data_ptr(), filters,
              out.data_ptr())  # fmt: skip
        return out


def _kernels(divided: Division, number: int) -> tuple[int, int]:
    """The addresses of a stage's tiles, of all panels but the last and of that one."""
    from tilewise.kernels.cpu.channels_last.compiling import load_depthwise_last, load_indirect

    stage, p = divided.stages[number], divided.p
    if stage is None:
        return 0, 0
    function = p.functions[number if p.expands else number - 1]
    vectors = stage.vectors, stage.last
    if not stage.taps:
        return load_indirect(stage.lanes, stage.rows, vectors, function)[1:]
    axis = divided.axes[1]
    line = axis.kernel, axis.stride, axis.dilation
    ragged = stage.outputs % stage.lanes > 0
    return load_depthwise_last(stage.lanes, stage.rows, vectors, line, function, ragged)[1:]


def in_panels(divided: Division, weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Write the filters and biases of the operand ``weight`` to ``kept``, of uint8, as the kernel reads them."""
    p = divided.p
    filters, biases, size = divided.filter_places()
    kept[:size].zero_()
    given = parted(p, weight)
    for stage, first, second in zip(divided.stages, filters, biases, strict=True):
        if stage is None:
            continue
        source = next(given)
        flat = kept[first : first + stage.filter_bytes].view(torch.float32)
        lines_in_panels(source.weight.reshape(stage.outputs, -1).T, stage.width, stage.lanes, flat)
        kept[second : second + stage.outputs * NUMBER].view(torch.float32).copy_(source.bias)
