"""Direct depthwise convolutions on a CPU: tiles, the parameters of the kernel, and the run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tilewise.kernels.cpu.depthwise.windows import HEADER, MOST_COLUMNS, REGISTERS, Told
from tilewise.kernels.cpu.sizes import LANES
from tilewise.kernels.cpu.threads import share_out
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import (
    DTYPES,
    PAGE,
    balanced_parts,
    byte_strides,
    kernel_data,
    lanes_for,
    numba_missing,
    numba_reasons,
    start,
    with_teams,
)
from tilewise.solvers.common.tiles import config_reasons, integer

if TYPE_CHECKING:
    from tilewise.kernels.cpu.compiling import DirectKernel

__all__ = ["bind", "configs", "cost", "unsupported", "workspace"]

MOST_SCRATCH = 2**24
"""Bytes of scratch per thread above which this solver gains nothing: tiles then leave the core's own cache."""
FITTING = CPU_CACHE // 2
"""Bytes of a source tile that stay in a core's cache beside the results."""
BAND = 12 * 2**10
"""Bytes of the output gradient that stay in the first-level cache together with twice as many of the source."""
LEAST_TILE = 4
"""Least length of a tile's side, in kernels, where it is divided only to give threads work."""
EFFICIENCY = 0.9
"""Share of the processor's peak that the sums reach."""
MOVES = 12.0
"""Time to bring one number into a vector or out of it, in multiply-adds."""
Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Side:
    """One axis of all tiles of ``tile`` results each.

    The source is the tensor that is read through windows: ``x``, or ``y`` in a data gradient. Results are those of the
    pass, or in a weight gradient the output gradient.
    """

    axis: Axis
    pass_: Pass
    tile: int

    @property
    def count(self) -> int:
        """Places of the result along the axis; in a weight gradient places of the output gradient."""
        return self.axis.size if self.pass_ is Pass.DGRAD else self.axis.out

    @property
    def tiles(self) -> int:
        """Number of tiles along the axis."""
        return -(-self.count // self.tile)

    @property
    def phases(self) -> int:
        """Sets of results that use the same taps: one for each place modulo the stride in a data gradient, else 1."""
        return self.axis.stride if self.pass_ is Pass.DGRAD else 1

    @property
    def size(self) -> int:
        """Places of the source that may be read; what lies beyond is treated as zero."""
        axis = self.axis
        return axis.out if self.pass_ is Pass.DGRAD else min(axis.size, self._span(axis.out) - axis.before)

    @property
    def start(self) -> int:
        """Place of the source at which the first tile's window begins; negative where it reaches into padding."""
        axis = self.axis
        return -((axis.reach - 1 - axis.before) // axis.stride) if self.pass_ is Pass.DGRAD else -axis.before

    @property
    def advance(self) -> int:
        """Places of the source from one tile's window to the next."""
        return self.tile // self.axis.stride if self.pass_ is Pass.DGRAD else self.tile * self.axis.stride

    @property
    def extent(self) -> int:
        """Places of the source that one tile's window covers."""
        axis = self.axis
        if self.pass_ is not Pass.DGRAD:
            return self._span(self.tile)
        return (self.tile - 1 + axis.before) // axis.stride + 1 - self.start

    def _span(self, outputs: int) -> int:
        """Places that the windows of ``outputs`` neighbouring outputs cover."""
        return (outputs - 1) * self.axis.stride + self.axis.reach

    def reached(self, phase: int) -> list[tuple[int, int]]:
        """For a phase's first result, pairs of a tap and the place in the tile's source that it reads."""
        axis = self.axis
        if self.pass_ is not Pass.DGRAD:
            return [(k, k * axis.dilation) for k in range(axis.kernel)]
        ahead = ((k, phase + axis.before - k * axis.dilation) for k in range(axis.kernel))
        return [(k, place // axis.stride - self.start) for k, place in ahead if place % axis.stride == 0]

    @property
    def modulus(self) -> int:
        """Source columns between the numbers that neighbouring sums in a vector register read."""
        return {Pass.FPROP: self.axis.stride, Pass.DGRAD: 1, Pass.WGRAD: self.axis.dilation}[self.pass_]


@dataclass(frozen=True)
class Layout:
    """The tiles of a config and all sizes that follow from them. A vector holds ``lanes`` groups."""

    p: ConvProblem
    lanes: int
    tile: tuple[int, ...]

    @functools.cached_property
    def sides(self) -> tuple[Side, Side, Side]:
        """Depth, height and width; axes that the problem lacks have one element."""
        flat = [Side(Axis(1, 1), self.p.pass_, 1)] * (3 - self.p.dims)
        sides = [Side(axis, self.p.pass_, tile) for axis, tile in zip(self.p.axes, self.tile, strict=True)]
        d, h, w = (*flat, *sides)
        return d, h, w

    @property
    def vector(self) -> int:
        """Bytes of one vector of fp32 numbers."""
        return 4 * self.lanes

    @property
    def blocks(self) -> int:
        """Number of blocks of ``lanes`` groups."""
        return -(-self.p.groups // self.lanes)

    @property
    def slack(self) -> int:
        """Bytes beyond a buffer's end that vector accesses may touch."""
        return self.lanes * self.vector

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of one group: of the source, and of the other tensor."""
        into, out = self.p.in_channels // self.p.groups, self.p.out_channels // self.p.groups
        return (out, into) if self.p.pass_ is Pass.DGRAD else (into, out)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """A source tile in scratch: modulus, and bytes of a part (columns alike modulo it), a row and a plane."""
        _, h, w = self.sides
        part = -(-w.extent // w.modulus) * self.vector
        return w.modulus, part, w.modulus * part, h.extent * w.modulus * part

    @property
    def source_bytes(self) -> int:
        """Bytes of one source channel's tile in scratch."""
        return self.sides[0].extent * self.shape[3] + self.slack

    @property
    def taps_bytes(self) -> int:
        """Bytes of a block's filters in scratch."""
        return math.prod(self.channels) * self.p.taps * self.vector + self.slack

    @property
    def line_bytes(self) -> int:
        """Bytes of a buffer for one line of the source, of results or of taps."""
        *_, w = self.sides
        return max(w.extent, w.tile, self.p.taps) * self.vector + self.slack

    @property
    def rows(self) -> int:
        """Rows of results that are computed at once."""
        return 4

    @property
    def tiles(self) -> int:
        """The number of tiles of one image."""
        return math.prod(side.tiles for side in self.sides)

    @property
    def scratch(self) -> int:
        """Bytes of scratch for each thread, in whole pages."""
        size = self.taps_bytes + self.line_bytes + self.channels[0] * self.source_bytes
        if self.p.pass_ is Pass.WGRAD:
            size += math.prod(side.tile for side in self.sides) * self.vector + self.slack
        else:
            size += self.rows * self.line_bytes
        return -(-size // PAGE) * PAGE

    @property
    def band(self) -> int:
        """Rows of the output gradient that are summed before the next ones, to stay in the first-level cache."""
        return max(1, min(self.sides[1].tile, BAND // (self.sides[2].tile * self.vector)))

    def steps(self) -> tuple[int, int]:
        """Elements from one step of a line to the next: within a part of the source, and within the factors."""
        w = self.sides[2]
        if self.p.pass_ is Pass.DGRAD:
            every = w.axis.stride // math.gcd(w.axis.stride, w.axis.dilation)
            return -w.axis.dilation * every // w.axis.stride, every
        step = w.axis.stride if self.p.pass_ is Pass.WGRAD else w.axis.dilation
        every = w.modulus // math.gcd(w.modulus, step)
        return step * every // w.modulus, every

    def lines(self, reads: list[tuple[int, int]]) -> list[Triple]:
        """Lines of one row: triples of a byte offset into the source, a byte offset into the factors, and a count.

        ``reads`` are pairs of a factor's number and the column that it reads, in the order of factors.
        """
        modulus, part, *_ = self.shape
        every = self.steps()[1]
        lines: dict[int, list[int]] = {}
        for k, column in reads:
            first = lines.setdefault(k % every, [column % modulus * part + column // modulus * self.vector, k, 0])
            first[2] += 1
        return [(place, k * self.vector, count) for place, k, count in lines.values()]

    def tables(self) -> list[np.ndarray]:
        """Tables of lines for the kernel: one for each phase of the results.

        In a weight gradient there are two, for the bands of whole tiles and of the last tile in a row.
        """
        d, h, w = self.sides
        _, _, row, plane = self.shape
        if self.p.pass_ is Pass.WGRAD:
            lasts = (w.tile, w.count - (w.tiles - 1) * w.tile)
            whole = [self.lines([(j, j * w.axis.stride) for j in range(width)]) for width in lasts]
            pitch = w.tile * self.vector
            return [
                _table([(i * h.axis.stride * row + a, i * pitch + b, n) for i in range(self.band) for a, b, n in lines])
                for lines in whole
            ]
        kernel = [side.axis.kernel for side in self.sides]
        tables = []
        for phase_d in range(d.phases):
            for phase_h in range(h.phases):
                for phase_w in range(w.phases):
                    lines = self.lines(w.reached(phase_w))
                    tables.append(_table([
                        (
                            i * self.source_bytes + at_d * plane + at_h * row + a,
                            ((i * kernel[0] + k_d) * kernel[1] + k_h) * kernel[2] * self.vector + b, n,
                        )
                        for i in range(self.channels[0]) for k_d, at_d in d.reached(phase_d)
                        for k_h, at_h in h.reached(phase_h) for a, b, n in lines
                    ]))  # fmt: skip
        return tables


def _table(lines: list[Triple]) -> np.ndarray:
    """Lines as an int64 array of shape (lines, 3)."""
    return np.array(lines, dtype=np.int64).reshape(-1, 3)


def unsupported(p: ConvProblem) -> list[str]:
    """Reasons against it: Numba is not installed, or tiles are too large for a core's cache."""
    reasons = numba_missing()
    if not reasons and _scratch(p) > MOST_SCRATCH:
        reasons.append(f"works on {_scratch(p)} bytes in each thread, at most {MOST_SCRATCH}")
    return reasons


def _scratch(p: ConvProblem) -> int:
    """Bytes of scratch of one thread."""
    return _layout(p, 1).scratch


@functools.lru_cache(maxsize=1024)
def _layout(p: ConvProblem, threads: int) -> Layout:
    """The largest tile whose source stays in cache.

    It is divided further while there are too few units of work for ``threads`` threads.
    """
    step = [axis.stride if p.pass_ is Pass.DGRAD else 1 for axis in p.axes]
    tiles = [1] * p.dims
    while True:
        counts = [side.count for side in Layout(p, lanes_for(p.groups), (1,) * p.dims).sides[3 - p.dims :]]
        tile = [-(-count // n) for count, n in zip(counts, tiles, strict=True)]
        layout = Layout(p, lanes_for(p.groups), tuple(-(-n // s) * s for n, s in zip(tile, step, strict=True)))
        sides = layout.sides[3 - p.dims :]
        whole = layout.channels[0] * layout.source_bytes <= FITTING
        busy = p.pass_ is Pass.WGRAD or layout.blocks * p.batch * layout.tiles >= 2 * threads
        least = [1 if not whole else LEAST_TILE * side.axis.kernel for side in sides]
        open_ = [i for i, side in enumerate(sides) if side.tile // 2 >= max(least[i], step[i])]
        if (whole and busy) or not open_:
            return layout
        tiles[max(open_, key=lambda i: (sides[i].extent / sides[i].axis.reach, -i))] *= 2


def configs(p: ConvProblem) -> Iterable[Config]:
    """One tile, on torch's threads and on threads of our own.

    A weight gradient is summed in as many shares as keep all threads busy.
    """
    threads = torch.get_num_threads()
    layout = _layout(p, threads)
    units, extra = layout.blocks * p.batch * layout.tiles, {}
    if p.pass_ is Pass.WGRAD:
        shares = balanced_parts(layout.blocks, p.batch * layout.tiles, threads)
        units, extra = layout.blocks * shares, {"shares": shares}
    base = Config(tile=layout.tile, lanes=layout.lanes, threads=min(threads, units), **extra)
    return with_teams(base)


def _of(p: ConvProblem, c: Config) -> Layout:
    """The layout of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    tile, lanes = c["tile"], integer(c, "lanes")
    if not isinstance(tile, tuple) or len(tile) != p.dims or min(tile) < 1:
        raise ValueError(f"tile={tile!r}: {p.dims} positive sizes would do")
    if p.pass_ is Pass.DGRAD and any(n % axis.stride for n, axis in zip(tile, p.axes, strict=True)):
        raise ValueError(f"tile={tile!r}: multiples of the stride would do")
    if lanes not in LANES:
        raise ValueError(f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do")
    return Layout(p, lanes, tile)


def _partial(layout: Layout, c: Config) -> int:
    """Bytes of the shares' partial sums; 0 where there is one share."""
    shares = integer(c, "shares", 1)
    return 0 if shares == 1 else layout.blocks * shares * layout.taps_bytes


def workspace(p: ConvProblem, c: Config) -> int:
    """Bytes of every thread's scratch and of a weight gradient's partial sums."""
    layout = _of(p, c)
    return integer(c, "threads") * layout.scratch + _partial(layout, c)


def cost(p: ConvProblem, c: Config) -> Cost:
    """The direct method's arithmetic in full vectors, numbers moved into and out of them, and operands read once."""
    layout = _of(p, c)
    full = layout.blocks * layout.lanes / p.groups
    moved = sum(p.nbytes(role) // p.torch_dtype(role).itemsize for role in ("x", "y"))
    return Cost(int(full * (p.flops + 2 * MOVES * moved)), p.bytes, 1, EFFICIENCY)


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``SolverUnavailable`` with Numba's reason, or for a config that is none of the problem's."""
    with config_reasons(p, c):
        layout = _of(p, c)
        integer(c, "threads"), integer(c, "shares", 1)
    tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
    return Units(layout, c, {role: byte_strides(t) for role, t in tensors}).run


class Units:
    """The compiled kernel over all units of work; :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    A unit is one tile of a block of groups and an image, or in a weight gradient one share of a block.
    """

    __slots__ = ("_blocks", "_data", "_openmp", "_order", "_partial", "_run", "_tables", "_threads")

    def __init__(self, layout: Layout, c: Config, apart: dict[str, list[int]]) -> None:
        p, kernel, shares = layout.p, _compiled(layout.lanes), integer(c, "shares", 1)
        parameters = replace(_told(layout, apart, shares), calls=(kernel.rows, kernel.sums))
        self._run, self._threads, self._openmp = kernel.run, integer(c, "threads"), c.get("team") == "openmp"
        self._tables = layout.tables()
        tables = [number for table in self._tables for number in (table.ctypes.data, len(table))]
        self._blocks = layout.blocks if shares > 1 else 0
        units = layout.blocks * (shares if p.pass_ is Pass.WGRAD else p.batch * layout.tiles)
        numbers = parameters.numbers(), np.array(tables, dtype=np.int64)
        self._data = kernel_data(units, layout.scratch, *numbers, header=HEADER)
        self._partial = integer(c, "threads") * layout.scratch
        # Source, other and taps, by their places in operands and result.
        self._order = {Pass.FPROP: (0, 2, 1), Pass.DGRAD: (0, 2, 1), Pass.WGRAD: (0, 1, 2)}[p.pass_]

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the kernel; where partial sums are to be added, start it once more for that."""
        assert out is not None
        assert workspace is not None
        addresses = a.data_ptr(), b.data_ptr(), out.data_ptr()
        data, space = self._data.copy(), workspace.data_ptr()
        ordered = (addresses[i] for i in self._order)
        start(self._run, data, self._threads, self._openmp, space, *ordered, space + self._partial)
        if self._blocks:
            data[:4] = 0, 1, 0, self._blocks
            data[HEADER] = 2
            share_out(self._run, data.ctypes.data, 1, False)
        return out


def _told(layout: Layout, apart: dict[str, list[int]], shares: int) -> Told:
    """The kernel's parameters, but for the addresses of the functions that it calls."""
    p = layout.p
    d, h, w = layout.sides
    source, other = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
    sources, others = layout.channels
    _, _, row, plane = layout.shape
    kinds = {role: DTYPES.index(p.out_dtype if role == p.result else p.dtype) for role in ("x", "w", "y")}
    down = 1 if p.pass_ is Pass.DGRAD else 0
    a_step, b_step = layout.steps()
    taps, taps_counts = _flat(layout, apart["w"])

    def by_axis(name: str) -> Triple:
        return getattr(d, name), getattr(h, name), getattr(w, name)

    def of_image(role: str, channels: int) -> tuple[int, int, int, int, int, int]:
        batch, channel, *space = apart[role]
        s_d, s_h, s_w = (*[0] * (3 - p.dims), *space)
        return batch, channels * channel, channel, s_d, s_h, s_w

    return Told(
        kind=int(p.pass_ is Pass.WGRAD),
        groups=p.groups,
        batch=p.batch,
        shares=shares,
        dtypes=(kinds[source], kinds[other], kinds["w"]),
        add=int(p.accumulate),
        sources=sources,
        others=others,
        sizes=by_axis("size"),
        starts=by_axis("start"),
        advance=by_axis("advance"),
        extents=by_axis("extent"),
        counts=by_axis("count"),
        tile=by_axis("tile"),
        tiles=by_axis("tiles"),
        phases=by_axis("phases"),
        shape=layout.shape,
        source_bytes=layout.source_bytes,
        taps_bytes=layout.taps_bytes,
        line_bytes=layout.line_bytes,
        source=of_image(source, sources),
        other=of_image(other, others),
        taps=taps,
        taps_counts=taps_counts,
        kernel=(d.axis.kernel, h.axis.kernel, w.axis.kernel),
        down=(plane, row) if down else (d.axis.stride * plane, h.axis.stride * row),
        between=(d.axis.dilation * plane, h.axis.dilation * row),
        steps=(a_step * layout.vector, b_step * layout.vector),
        columns=min(MOST_COLUMNS, REGISTERS[layout.lanes]),
        rows=layout.rows,
        sums=REGISTERS[layout.lanes],
        band=layout.band,
        calls=(0, 0),
    )


def _flat(layout: Layout, apart: list[int]) -> tuple[tuple[int, int, int, int, int, int], Triple]:
    """The filter's byte strides and sizes, with neighbouring spatial axes merged where memory allows.

    The strides are those of a group, its channels in the other tensor and in the source, and three axes.
    """
    p = layout.p
    out, into, *space = apart
    group = out * (p.out_channels // p.groups)
    other, source = (into, out) if p.pass_ is Pass.DGRAD else (out, into)
    counts, steps = [1] * (3 - p.dims) + [axis.kernel for axis in p.axes], [0] * (3 - p.dims) + space
    for i in (1, 0):
        # An axis that goes on where the next one ends is one with it.
        if counts[i] == 1 or steps[i] == counts[2] * steps[2]:
            counts[2], counts[i] = counts[2] * counts[i], 1
        else:
            break
    return (group, other, source, steps[0], steps[1], steps[2]), (counts[0], counts[1], counts[2])


def _compiled(lanes: int) -> DirectKernel:
    """The kernel for vectors of ``lanes`` numbers. Raises ``SolverUnavailable`` with Numba's reason."""
    from tilewise.kernels.cpu.compiling import load_direct

    with numba_reasons():
        return load_direct(lanes)
