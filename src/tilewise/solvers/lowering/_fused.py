"""Fused lowering on a CPU: the choice of blocks, and the run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from tilewise.kernels.cpu.lowering import lowered as of
from tilewise.kernels.cpu.lowering.lowered import SHAPES, Block, Lowered, Side, side
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import (
    PreparedFilters,
    finishing,
    kernel_data,
    numba_reasons,
    numbers_array,
    units_in_turn,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import integer

__all__ = ["Units", "forms", "lowered", "smaller"]

STRIP = 0.25
"""Share of a core's cache that a lowered strip may fill."""
GRADIENT_STRIP = 0.4
"""The same for a weight gradient, including the output gradient's places."""
FILTERS = 0.25
"""Share of a core's cache for the filters that are multiplied with a strip before the next ones."""
GRADIENT = 0.4
"""Share of a core's cache for the sums of a weight gradient."""
SUMS = 0.3
"""Share of a core's cache for sums that wait for further channels."""
ACCESS = 6
"""Time to bring a sum into a register and back, in products."""
STREAM = 32
"""Time to fetch filters that stay in no cache, in products with so many places."""
MOVE = 2
"""Time to bring a number into a strip, in products."""
IDLE = 4
"""Loss where few sums are computed at a time: the time of so many sums at each step."""
BEGIN = 16
"""Time to begin a row of a strip, in numbers moved."""


def lowered(p: ConvProblem, c: Config) -> Lowered:
    """The kernel's description for a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    block, tile, lanes = c["block"], c["tile"], integer(c, "lanes")
    if not isinstance(block, tuple) or len(block) != 3 or min(block) < 1:
        raise ValueError(f"block={block!r}: three positive integers would do")
    if lanes not in SHAPES or tile not in SHAPES[lanes] or not isinstance(tile, tuple):
        raise ValueError(f"lanes={lanes}, tile={tile!r}: with {', '.join(map(str, SHAPES))} lanes, {SHAPES} would do")
    if c["type"] not in types(p):
        raise ValueError(f"type={c['type']!r}: one of {', '.join(map(str, types(p)))} would do")
    unblocked = _lowered(p, integer(c, "type"), (tile[0], tile[1]), lanes)
    images, rows, columns = block
    integer(c, "threads")
    blocked = replace(
        unblocked, block=Block(images, rows, columns), chunk=min(unblocked.sources, integer(c, "channels"))
    )
    return replace(blocked, shares=min(blocked.blocks, integer(c, "shares", 1)))


def types(p: ConvProblem) -> tuple[int, ...]:
    """The types of lowering that differ for ``p``; of the same ones the one that copies least."""
    wide = sum(axis.kernel > 1 for axis in p.axes[-2:])
    return {0: (1,), 1: (3, 1), 2: (3, 2, 1)}[wide]


def _sides(p: ConvProblem, kind: int) -> tuple[Side, Side, Side]:
    """Depth, height and width for lowering type ``kind``; depth is always lowered."""
    backward, axes = p.pass_ is Pass.DGRAD, p.axes
    last = max((i for i in range(p.dims) if axes[i].kernel > 1), default=0)
    sides = []
    for i in range(p.dims - 3, p.dims):
        axis = axes[i] if i >= 0 else Axis(1, 1)
        is_lowered = kind == 1 or i == p.dims - 3 or (kind == 2 and i == last)
        sides.append(side(axis, backward, is_lowered))
    return sides[0], sides[1], sides[2]


def _lowered(p: ConvProblem, kind: int, tile: tuple[int, int], lanes: int) -> Lowered:
    """The kernel's description in blocks of one place."""
    sources, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.pass_ is Pass.DGRAD:
        sources, outputs = outputs, sources
    gradient = p.pass_ is Pass.WGRAD
    return Lowered(
        _sides(p, kind), p.batch, p.groups, sources, outputs, Block(1, 1, 1), tile, lanes, gradient, sources
    )  # fmt: skip


def forms(p: ConvProblem) -> Iterable[Config]:
    """Configs with the tile and block that should be fastest, for each type of lowering."""
    lanes, threads = vector_lanes(), torch.get_num_threads()
    for kind in types(p):
        best = _best(_lowered(p, kind, _tile(p, lanes), lanes), threads)
        base = Config(
            type=kind, block=tuple(best.block), channels=best.chunk, tile=best.tile, lanes=lanes, threads=threads
        )  # fmt: skip
        if best.gradient:
            base = Config(**base, shares=best.shares)
        yield from with_teams(base)


def smaller(c: Config) -> Config | None:
    """``c`` with half as many images, rows, channels or columns, the first that has more than one; else ``None``."""
    block = c["block"]
    assert isinstance(block, tuple)
    images, rows, columns = block
    if images > 1:
        return Config(**{**c, "block": (-(-images // 2), rows, columns)})
    if rows > 1:
        return Config(**{**c, "block": (1, -(-rows // 2), columns)})
    channels = integer(c, "channels")
    if channels > 1:
        return Config(**{**c, "channels": -(-channels // 2)})
    return Config(**{**c, "block": (1, 1, -(-columns // 2))}) if columns > 1 else None


def _tile(p: ConvProblem, lanes: int) -> tuple[int, int]:
    """The tile that leaves the fewest rows or lanes without an output."""
    unblocked = _lowered(p, 1, SHAPES[lanes][0], lanes)

    def waste(tile: tuple[int, int]) -> tuple[float, int]:
        step = tile[0] * lanes if unblocked.gradient else tile[1]
        full = -(-unblocked.outputs // step) * step
        registers = tile[0] * tile[1]
        return full * (1 + IDLE / registers), SHAPES[lanes].index(tile)

    return min(SHAPES[lanes], key=waste)


def _best(unblocked: Lowered, threads: int) -> Lowered:
    """``unblocked`` with the block that should be fastest, and in a weight gradient with channels and shares."""
    if unblocked.gradient:
        return _gradient(unblocked, threads)
    candidates = []
    for n in sorted(
        {-(-unblocked.sources // -(-unblocked.sources // 2**e)) for e in range(unblocked.sources.bit_length())}
    ):
        part = replace(unblocked, chunk=-(-unblocked.sources // n))
        candidates += _blocks(part, int(STRIP * CPU_CACHE), threads)
    return min(candidates, key=lambda candidate: _time(candidate, threads))


def _blocks(unblocked: Lowered, room: int, threads: int) -> list[Lowered]:
    """Candidates whose strips fit ``room`` bytes: the largest blocks, and some that divide more equally."""
    height, width = unblocked.sides[1].count, unblocked.sides[2].count
    columns = width
    while columns > 1 and _near(replace(unblocked, block=Block(1, 1, columns))) > room:
        columns = -(-columns // 2)
    rows = _most(height, lambda n: _near(replace(unblocked, block=Block(1, n, columns))) <= room)
    blocks = [
        Block(1, -(-height // n), columns) for n in range(-(-height // rows), min(height, 4 * -(-height // rows)) + 1)
    ]
    if (rows, columns) == (height, width):
        images = _most(unblocked.batch, lambda n: _near(replace(unblocked, block=Block(n, rows, columns))) <= room)
        least = -(-unblocked.batch // images)
        blocks += [
            Block(-(-unblocked.batch // n), rows, columns)
            for n in range(least, min(unblocked.batch, 2 * threads * least) + 1)
        ]
    return [replace(unblocked, block=block) for block in dict.fromkeys(blocks)]


def _near(blocked: Lowered) -> int:
    """Bytes of a block that are read repeatedly."""
    return blocked.strip + (blocked.places if blocked.gradient else 0)


def _most(most: int, fits: object) -> int:
    """The largest number up to ``most`` for which ``fits`` is true, at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)  # type: ignore[operator]
    return low


def _time(blocked: Lowered, threads: int) -> float:
    """Estimated time, in products of a number with a vector."""
    rows, columns = blocked.stored
    width = blocked.tile[0] * blocked.lanes
    images = blocked.block.images
    plane = ((images - 1) * rows + blocked.block.rows - 1) * columns + blocked.block.columns
    outputs = blocked.output_blocks * blocked.tile[1]
    terms = blocked.chunk * blocked.taps
    if blocked.gradient:
        plane, outputs = math.prod(blocked.block), -(-blocked.outputs // width) * width
        parts = -(-plane // blocked.most_depth)
        products = float((plane + ACCESS * parts) * outputs * -(-terms // blocked.tile[1]) * blocked.tile[1])
        moved = blocked.chunk * blocked.variants * images * rows * (columns + BEGIN) + plane * outputs
    else:
        parts = -(-terms // (len(blocked.phases) * blocked.most_depth))
        stays = blocked.filters <= FILTERS * CPU_CACHE
        summed = blocked.tiles(blocked.output_chunk(int(FILTERS * CPU_CACHE))) * outputs * blocked.vector
        spilt = max(0.0, summed / (SUMS * CPU_CACHE) - 1)
        steps = blocked.chunks * (terms + ACCESS * len(blocked.phases) * parts * (1 + spilt))
        products = (-(-plane // width) * width + (0 if stays else STREAM)) * outputs * steps
        moved = blocked.chunks * blocked.chunk * blocked.variants * images * rows * (columns + BEGIN)
        moved += len(blocked.phases) * images * blocked.block.rows * (blocked.block.columns + BEGIN) * blocked.outputs
    rounds = units_in_turn(blocked.units, threads)
    blocks = -(-blocked.blocks // blocked.shares) if blocked.gradient else 1
    return rounds * blocks * (products / blocked.lanes + MOVE * moved / blocked.lanes * 4)


def _gradient(unblocked: Lowered, threads: int) -> Lowered:
    """A weight gradient with the channels whose sums fit in cache, and shares where units are too few."""
    room = int(GRADIENT * CPU_CACHE)
    most = _most(unblocked.sources, lambda n: replace(unblocked, chunk=n).sum_bytes <= room)
    candidates = []
    least = -(-unblocked.sources // most)
    for n in range(least, min(unblocked.sources, least + 2 * threads) + 1):
        chunk = -(-unblocked.sources // n)
        part = replace(unblocked, chunk=chunk)
        for block in _blocks(part, int(GRADIENT_STRIP * CPU_CACHE), threads):
            candidates += [replace(block, shares=n) for n in {1, min(threads, block.blocks)}]
    return min(candidates, key=lambda candidate: _time(candidate, threads))


class Units(PreparedFilters):
    """The compiled kernel over all units of work. It takes filters in the order of its products.

    With shares, a weight gradient's partial sums lie behind the threads' scratch, and the other call adds them up.
    """

    __slots__ = ("_adds_up", "_kept")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of each tensor. Raises ``SolverUnavailable`` with Numba's reason."""
        super().__init__(p, c, {"bias": of.BIAS, "residual": of.RESIDUAL})
        blocked = lowered(p, c)
        run, pieces, products, finish = _compiled(blocked, finishing(p))
        self._kept: list[np.ndarray] = []
        self._adds_up = blocked.partial > 0
        x, y = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
        blocks = blocked.output_chunk(int(FILTERS * CPU_CACHE))
        numbers = _numbers(blocked, blocks) | {of.PIECES: pieces, of.PRODUCTS: products, of.FINISH: finish}
        for place, role in ((of.X, x), (of.Y, y)):
            image, channel, *space = apart[role]
            numbers |= dict(enumerate((image, channel, *_three(space)), place))
        outer, inner, *space = apart["w"]
        group = outer * (p.out_channels // p.groups)
        output, source = (inner, outer) if p.pass_ is Pass.DGRAD else (outer, inner)
        numbers |= {of.W_GROUP: group, of.W_OUTPUT: output, of.W_INPUT: source}
        starts = [n for s in blocked.sides for n in s.starts]
        numbers |= {of.STARTS: self._address(starts)}
        numbers |= {of.PHASE_TABLE: self._address(self._phases(blocked, (source, *_three(space))))}
        units = kernel_data(blocked.units, blocked.scratch(blocks), numbers_array(numbers, of.NUMBERS))
        chunks = blocked.groups * blocked.chunks
        if blocked.gradient:
            other = {3: chunks, HEADER + of.KIND: 3}
        else:
            other = {3: chunks * len(blocked.phases) * blocked.output_blocks, HEADER + of.KIND: 1}
        self.tell(run, units, other)

    def _address(self, numbers: object) -> int:
        """The address of ``numbers`` as an array that lives as long as this object."""
        array = np.ascontiguousarray(numbers, dtype=np.int64)
        self._kept.append(array)
        return int(array.ctypes.data)

    def _phases(self, blocked: Lowered, apart: tuple[int, ...]) -> list[int]:
        """The numbers that describe each phase, for a full chunk of channels and for the last one."""
        table: list[int] = []
        place = 0
        last = blocked.sources - (blocked.chunks - 1) * blocked.chunk
        for phase, channels in [
            *((phase, blocked.chunk) for phase in blocked.phases),
            *((p, last) for p in blocked.phases),
        ]:
            if len(table) == len(blocked.phases) * of.PHASE_NUMBERS:
                place = 0
            lines, filters = blocked.terms(phase, apart, channels)
            runs = blocked.runs(filters)
            more = -len(lines) % blocked.tile[1] if blocked.gradient else 0
            starts, counts = ([getattr(part, name) for part in phase] for name in ("start", "count"))
            table += [*starts, *counts, len(lines), self._address(np.pad(lines, (0, more))), place]
            table += [self._address(runs), len(runs)]
            place += len(lines) * blocked.output_blocks * blocked.tile[1] * of.NUMBER
        return table

    def compute(self, data: np.ndarray, a: int, filters: int, out: torch.Tensor, workspace: torch.Tensor) -> None:
        """Write the result; with shares, sums of each share and then their sum."""
        if not self._adds_up:
            super().compute(data, a, filters, out, workspace)
            return
        adding, partial = self._filters.copy(), self.behind_scratch(workspace).data_ptr()
        data[HEADER + of.PARTIAL] = adding[HEADER + of.PARTIAL] = partial
        super().compute(data, a, filters, out, workspace)
        self.start(adding, workspace, 0, 0, out.data_ptr())


def _three(space: list[int]) -> tuple[int, ...]:
    """Strides along depth, height and width; 0 for axes that the problem lacks."""
    return (*[0] * (3 - len(space)), *space)


def _numbers(blocked: Lowered, blocks: int) -> dict[int, int]:
    """The kernel's integers by their places, for ``blocks`` blocks of outputs at a time."""
    _, depth, down, along = blocked.grid
    gradient = blocked.gradient
    stored_rows, stored_columns = blocked.stored
    numbers = {
        of.KIND: 2 * gradient, of.BATCH: blocked.batch, of.DEPTHS: depth, of.HEIGHT: blocked.sides[1].count,
        of.WIDTH: blocked.sides[2].count, of.IMAGES: blocked.block.images, of.ROWS: blocked.block.rows,
        of.COLUMNS: blocked.block.columns, of.DOWN: down, of.ALONG: along, of.BLOCKS: blocked.blocks,
        of.CHANNELS: blocked.chunk, of.SOURCES: blocked.sources, of.OUTPUTS: blocked.outputs,
        of.STORED_ROWS: stored_rows, of.STORED_COLUMNS: stored_columns,
        of.PLANE: stored_rows * stored_columns * of.NUMBER, of.LINE: blocked.line,
        of.CHANNEL_LINES: blocked.variants * blocked.line, of.PHASES: len(blocked.phases),
        of.ROW: blocked.tile[0] * blocked.lanes, of.TILE_ROWS: blocked.tile[1], of.OUTPUT_BLOCKS: blocked.output_blocks,
        of.CHUNK: blocks, of.FILTERS: blocked.filters, of.MOST_DEPTH: blocked.most_depth, of.SUMS: blocked.strip,
        of.CHUNKS: blocked.chunks, of.SHARES: blocked.shares, of.CHUNK_FILTERS: blocked.chunk_filters,
        of.TILE_BYTES: blocks * blocked.tile[1] * blocked.vector,
    }  # fmt: skip
    if gradient:
        numbers |= {
            of.SUMS: blocked.strip + blocked.places, of.OTHERS: blocked.strip, of.SUM_LINES: blocked.sum_lines,
            of.SUM_BYTES: blocked.sum_bytes,
        }  # fmt: skip
    for place, name in ((of.SIZES, "size"), (of.STEPS, "step"), (of.SPREADS, "spread"), (of.APART, "apart")):
        numbers |= dict(enumerate((getattr(s, name) for s in blocked.sides), place))
    return numbers | dict(enumerate((len(s.starts) for s in blocked.sides), of.VARIANTS))


def _compiled(blocked: Lowered, activation: str | None) -> tuple[int, int, int, int]:
    """Addresses of the compiled functions. Raises ``SolverUnavailable`` with Numba's reason."""
    from tilewise.kernels.cpu.compiling import load_fused_lowering

    with numba_reasons():
        return load_fused_lowering(blocked.lanes, *blocked.tile, blocked.gradient, activation)
