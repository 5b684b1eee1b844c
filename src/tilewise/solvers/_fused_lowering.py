"""Fused lowering on a CPU: what goes in blocks, and the run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from tilewise.axis import Axis
from tilewise.kernels.cpu import lowered as of
from tilewise.kernels.cpu.lowered import SHAPES, Block, Lowered, Side, side
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.threads import has_openmp
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import WIDEST, numba_reasons, start
from tilewise.solvers._tiles import integer

__all__ = ["TYPES", "Units", "forms", "lowered", "smaller"]

TYPES = (3, 2, 1)
STRIP = 0.25
"""Share of a core's cache that a strip may fill."""
GRADIENT_STRIP = 0.4
"""The same of a filter's gradient, with the places that it is multiplied with."""
FILTERS = 0.25
"""And that filters may, which are multiplied with a strip before the next ones."""
GRADIENT = 0.4
"""And of a filter's gradient."""
SUMS = 0.3
"""And of sums that wait for further channels."""
ACCESS = 6
"""What it costs to bring sums to registers and back, in products."""
STREAM = 32
"""How long filters that stay in no cache take to come by, in products with so many places."""
MOST_UNITS = 8
"""Units to a thread from which on it matters little that some thread has one more."""
MOVE = 2
"""What it costs to bring a number into a strip, in products."""
IDLE = 4
"""What products lose by few sums at a time: so many sums' time a step."""
BEGIN = 16
"""What it costs to begin a row of it, in numbers."""


def lowered(p: ConvProblem, c: Config) -> Lowered:
    """What the kernel of a config computes. Raises ``KeyError`` or ``ValueError`` for what is none."""
    block, tile, lanes = c["block"], c["tile"], integer(c, "lanes")
    if not isinstance(block, tuple) or len(block) != 3 or min(block) < 1:
        raise ValueError(f"block={block!r}: three positive integers would do")
    if lanes not in SHAPES or tile not in SHAPES[lanes] or not isinstance(tile, tuple):
        raise ValueError(f"lanes={lanes}, tile={tile!r}: with {', '.join(map(str, SHAPES))} lanes, {SHAPES} would do")
    if c["type"] not in types(p):
        raise ValueError(f"type={c['type']!r}: one of {', '.join(map(str, types(p)))} would do")
    one = _lowered(p, integer(c, "type"), (tile[0], tile[1]), lanes)
    images, rows, columns = block
    integer(c, "threads")
    found = replace(one, block=Block(images, rows, columns), chunk=min(one.sources, integer(c, "channels")))
    return replace(found, shares=min(found.blocks, integer(c, "shares", 1)))


def types(p: ConvProblem) -> tuple[int, ...]:
    """Those that differ: the one that copies least of axes of several taps, the last two of them alone."""
    wide = sum(axis.kernel > 1 for axis in p.axes[-2:])
    return {0: (1,), 1: (3, 1), 2: (3, 2, 1)}[wide]


def _sides(p: ConvProblem, kind: int) -> tuple[Side, Side, Side]:
    """Depth, height and width, of which depth is always lowered."""
    backward, axes = p.pass_ is Pass.DGRAD, p.axes
    last = max((i for i in range(p.dims) if axes[i].kernel > 1), default=0)
    found = []
    for i in range(p.dims - 3, p.dims):
        axis = axes[i] if i >= 0 else Axis(1, 1)
        is_lowered = kind == 1 or i == p.dims - 3 or (kind == 2 and i == last)
        found.append(side(axis, backward, is_lowered))
    return found[0], found[1], found[2]


def _lowered(p: ConvProblem, kind: int, tile: tuple[int, int], lanes: int) -> Lowered:
    """In blocks of one place."""
    sources, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.pass_ is Pass.DGRAD:
        sources, outputs = outputs, sources
    gradient = p.pass_ is Pass.WGRAD
    return Lowered(
        _sides(p, kind), p.batch, p.groups, sources, outputs, Block(1, 1, 1), tile, lanes, gradient, sources
    )  # fmt: skip


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each type the tile and the block that seem best."""
    lanes = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
    threads = torch.get_num_threads()
    teams = ("openmp", "own") if has_openmp() else ("own",)
    for kind in types(p):
        found = _best(_lowered(p, kind, _tile(p, lanes), lanes), threads)
        base = Config(
            type=kind, block=tuple(found.block), channels=found.chunk, tile=found.tile, lanes=lanes, threads=threads
        )  # fmt: skip
        if found.gradient:
            base = Config(**base, shares=found.shares)
        yield from [base] if threads == 1 else (Config(**base, team=team) for team in teams)


def smaller(c: Config) -> Config | None:
    """With half as many images, rows, channels or columns, whichever there are first; ``None`` for one place of one."""
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
    one = _lowered(p, 1, SHAPES[lanes][0], lanes)

    def waste(tile: tuple[int, int]) -> tuple[float, int]:
        step = tile[0] * lanes if one.gradient else tile[1]
        full = -(-one.outputs // step) * step
        registers = tile[0] * tile[1]
        return full * (1 + IDLE / registers), SHAPES[lanes].index(tile)

    return min(SHAPES[lanes], key=waste)


def _best(one: Lowered, threads: int) -> Lowered:
    """The block, and of a filter's gradient channels and shares, for threads equally busy."""
    if one.gradient:
        return _gradient(one, threads)
    found = []
    for n in sorted({-(-one.sources // -(-one.sources // 2**e)) for e in range(one.sources.bit_length())}):
        part = replace(one, chunk=-(-one.sources // n))
        found += _blocks(part, int(STRIP * CPU_CACHE), threads)
    return min(found, key=lambda each: _time(each, threads))


def _blocks(one: Lowered, room: int, threads: int) -> list[Lowered]:
    """Blocks whose strips fit, the largest of each kind and some that go into more equal parts."""
    height, width = one.sides[1].count, one.sides[2].count
    columns = width
    while columns > 1 and _near(replace(one, block=Block(1, 1, columns))) > room:
        columns = -(-columns // 2)
    rows = _most(height, lambda n: _near(replace(one, block=Block(1, n, columns))) <= room)
    found = [
        Block(1, -(-height // n), columns) for n in range(-(-height // rows), min(height, 4 * -(-height // rows)) + 1)
    ]
    if (rows, columns) == (height, width):
        images = _most(one.batch, lambda n: _near(replace(one, block=Block(n, rows, columns))) <= room)
        least = -(-one.batch // images)
        found += [
            Block(-(-one.batch // n), rows, columns) for n in range(least, min(one.batch, 2 * threads * least) + 1)
        ]
    return [replace(one, block=block) for block in dict.fromkeys(found)]


def _near(found: Lowered) -> int:
    """Bytes of a block that are read again and again."""
    return found.strip + (found.places if found.gradient else 0)


def _most(most: int, fits: object) -> int:
    """The largest number up to ``most`` that fits, at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)  # type: ignore[operator]
    return low


def _time(found: Lowered, threads: int) -> float:
    """In products of one number with one vector."""
    rows, columns = found.stored
    width = found.tile[0] * found.lanes
    images = found.block.images
    plane = ((images - 1) * rows + found.block.rows - 1) * columns + found.block.columns
    outputs = found.output_blocks * found.tile[1]
    terms = found.chunk * found.taps
    if found.gradient:
        plane, outputs = math.prod(found.block), -(-found.outputs // width) * width
        parts = -(-plane // found.most_depth)
        products = float((plane + ACCESS * parts) * outputs * -(-terms // found.tile[1]) * found.tile[1])
        moved = found.chunk * found.variants * images * rows * (columns + BEGIN) + plane * outputs
    else:
        parts = -(-terms // (len(found.phases) * found.most_depth))
        stays = found.filters <= FILTERS * CPU_CACHE
        summed = found.tiles(found.output_chunk(int(FILTERS * CPU_CACHE))) * outputs * found.vector
        spilt = max(0.0, summed / (SUMS * CPU_CACHE) - 1)
        each = found.chunks * (terms + ACCESS * len(found.phases) * parts * (1 + spilt))
        products = (-(-plane // width) * width + (0 if stays else STREAM)) * outputs * each
        moved = found.chunks * found.chunk * found.variants * images * rows * (columns + BEGIN)
        moved += len(found.phases) * images * found.block.rows * (found.block.columns + BEGIN) * found.outputs
    units = found.units
    rounds = -(-units // threads) if units < MOST_UNITS * threads else units / threads
    blocks = -(-found.blocks // found.shares) if found.gradient else 1
    return rounds * blocks * (products / found.lanes + MOVE * moved / found.lanes * 4)


def _gradient(one: Lowered, threads: int) -> Lowered:
    """As many channels as there is room for sums of, and shares where these units are too few."""
    room = int(GRADIENT * CPU_CACHE)
    most = _most(one.sources, lambda n: replace(one, chunk=n).sum_bytes <= room)
    found = []
    least = -(-one.sources // most)
    for n in range(least, min(one.sources, least + 2 * threads) + 1):
        chunk = -(-one.sources // n)
        part = replace(one, chunk=chunk)
        for block in _blocks(part, int(GRADIENT_STRIP * CPU_CACHE), threads):
            found += [replace(block, shares=n) for n in {1, min(threads, block.blocks)}]
    return min(found, key=lambda each: _time(each, threads))


class Units:
    """One kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    :meth:`prepare` is a :data:`~tilewise.solvers.base.Prepare`.
    """

    __slots__ = ("_filters", "_kept", "_openmp", "_own_filters", "_partial", "_run", "_threads", "_units")

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` are bytes between each tensor's neighbours. Raises ``SolverUnavailable`` with Numba's reason."""
        found = lowered(p, c)
        self._own_filters = not (p.constant_weight or found.gradient)
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        self._run, pieces, products = _compiled(found)
        self._kept: list[np.ndarray] = []
        self._partial = found.partial
        x, y = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
        blocks = found.output_chunk(int(FILTERS * CPU_CACHE))
        numbers = _numbers(found, blocks) | {of.PIECES: pieces, of.PRODUCTS: products}
        for place, role in ((of.X, x), (of.Y, y)):
            image, channel, *space = apart[role]
            numbers |= dict(enumerate((image, channel, *_three(space)), place))
        outer, inner, *space = apart["w"]
        group = outer * (p.out_channels // p.groups)
        output, source = (inner, outer) if p.pass_ is Pass.DGRAD else (outer, inner)
        numbers |= {of.W_GROUP: group, of.W_OUTPUT: output, of.W_INPUT: source}
        starts = [n for s in found.sides for n in s.starts]
        numbers |= {of.STARTS: self._address(starts)}
        numbers |= {of.PHASE_TABLE: self._address(self._phases(found, (source, *_three(space))))}
        data = np.zeros(HEADER + of.NUMBERS, dtype=np.int64)
        data[3:6] = found.units, len(data), found.scratch(blocks)
        for index, value in numbers.items():
            data[HEADER + index] = value
        self._units, self._filters = data, data.copy()
        if found.gradient:
            self._filters[3], self._filters[HEADER + of.KIND] = found.groups * found.chunks, 3
        else:
            self._filters[3] = found.groups * found.chunks * len(found.phases) * found.output_blocks
            self._filters[HEADER + of.KIND] = 1

    def _address(self, numbers: object) -> int:
        """Of these, which live as long as this does."""
        found = np.ascontiguousarray(numbers, dtype=np.int64)
        self._kept.append(found)
        return int(found.ctypes.data)

    def _phases(self, found: Lowered, apart: tuple[int, ...]) -> list[int]:
        """Each phase's numbers, of a chunk of channels and of the last one."""
        table: list[int] = []
        place = 0
        last = found.sources - (found.chunks - 1) * found.chunk
        for phase, channels in [*((phase, found.chunk) for phase in found.phases), *((p, last) for p in found.phases)]:
            if len(table) == len(found.phases) * of.PHASE_NUMBERS:
                place = 0
            lines, filters = found.terms(phase, apart, channels)
            runs = found.runs(filters)
            more = -len(lines) % found.tile[1] if found.gradient else 0
            starts, counts = ([getattr(part, name) for part in phase] for name in ("start", "count"))
            table += [*starts, *counts, len(lines), self._address(np.pad(lines, (0, more))), place]
            table += [self._address(runs), len(runs)]
            place += len(lines) * found.output_blocks * found.tile[1] * of.NUMBER
        return table

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        """``b`` is what the problem says, or in place of a constant filter what :meth:`prepare` made of it."""
        assert out is not None
        assert workspace is not None
        second, behind = b.data_ptr(), workspace.data_ptr() + int(self._units[5]) * self._threads
        if self._own_filters:
            self._start(self._filters, workspace, 0, second, behind)
            second = behind
        self._start(self._units, workspace, a.data_ptr(), second, out.data_ptr(), *bias)
        if self._partial:
            self._start(self._filters, workspace, 0, 0, out.data_ptr())
        return out

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """All filters, in blocks, into ``kept``."""
        assert workspace is not None
        self._start(self._filters, workspace, 0, weight.data_ptr(), kept.data_ptr())

    def _start(
        self, numbers: np.ndarray, workspace: torch.Tensor, a: int, b: int, out: int, *bias: torch.Tensor
    ) -> None:
        data = numbers.copy()
        data[HEADER + of.PARTIAL] = workspace.data_ptr() + int(self._units[5]) * self._threads
        if bias:
            data[HEADER + of.BIAS] = bias[0].data_ptr()
        start(self._run, data, self._threads, self._openmp, workspace.data_ptr(), a, b, out)


def _three(space: list[int]) -> tuple[int, ...]:
    return (*[0] * (3 - len(space)), *space)


def _numbers(found: Lowered, blocks: int) -> dict[int, int]:
    """What the kernel takes of it, with so many blocks of outputs at a time."""
    _, depth, down, along = found.grid
    gradient = found.gradient
    stored_rows, stored_columns = found.stored
    numbers = {
        of.KIND: 2 * gradient, of.BATCH: found.batch, of.DEPTHS: depth, of.HEIGHT: found.sides[1].count,
        of.WIDTH: found.sides[2].count, of.IMAGES: found.block.images, of.ROWS: found.block.rows,
        of.COLUMNS: found.block.columns, of.DOWN: down, of.ALONG: along, of.BLOCKS: found.blocks,
        of.CHANNELS: found.chunk, of.SOURCES: found.sources, of.OUTPUTS: found.outputs,
        of.STORED_ROWS: stored_rows, of.STORED_COLUMNS: stored_columns,
        of.PLANE: stored_rows * stored_columns * of.NUMBER, of.LINE: found.line,
        of.CHANNEL_LINES: found.variants * found.line, of.PHASES: len(found.phases),
        of.ROW: found.tile[0] * found.lanes, of.TILE_ROWS: found.tile[1], of.OUTPUT_BLOCKS: found.output_blocks,
        of.CHUNK: blocks, of.FILTERS: found.filters, of.MOST_DEPTH: found.most_depth, of.SUMS: found.strip,
        of.CHUNKS: found.chunks, of.SHARES: found.shares, of.CHUNK_FILTERS: found.chunk_filters,
        of.TILE_BYTES: blocks * found.tile[1] * found.vector,
    }  # fmt: skip
    if gradient:
        numbers |= {
            of.SUMS: found.strip + found.places, of.OTHERS: found.strip, of.SUM_LINES: found.sum_lines,
            of.SUM_BYTES: found.sum_bytes,
        }  # fmt: skip
    for place, name in ((of.SIZES, "size"), (of.STEPS, "step"), (of.SPREADS, "spread"), (of.APART, "apart")):
        numbers |= dict(enumerate((getattr(s, name) for s in found.sides), place))
    return numbers | dict(enumerate((len(s.starts) for s in found.sides), of.VARIANTS))


def _compiled(found: Lowered) -> tuple[int, int, int]:
    from tilewise.kernels.cpu.compiling import load_fused_lowering

    with numba_reasons():
        return load_fused_lowering(found.lanes, *found.tile, found.gradient)
