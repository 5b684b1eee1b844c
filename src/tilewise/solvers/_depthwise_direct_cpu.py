"""Direct depthwise convolutions on a CPU: tiles, what the kernel is told, and the run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tilewise.axis import Axis
from tilewise.kernels.cpu.sizes import LANES
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.kernels.cpu.windows import COUNT, HEADER, MOST_COLUMNS, REGISTERS, Told
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import DTYPES, PAGE, UNITS, WIDEST, missing, numba_reasons, start, strides
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import Cost, Run, SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.cpu.compiling import DirectKernel

__all__ = ["bind", "configs", "cost", "unsupported", "workspace"]

MOST_SCRATCH = 2**24
"""Bytes of a thread from which on nothing is gained: they lie in no cache of its own."""
FITTING = CPU_CACHE // 2
"""Bytes of a source's tile that stay in a core's cache beside results."""
BAND = 12 * 2**10
"""Bytes of an output's gradient that stay in the first cache, with twice as many of the source."""
LEAST_TILE = 4
"""Kernels that a tile's side is long where it is cut for threads alone."""
EFFICIENCY = 0.9
"""Share of the processor's peak that the sums reach."""
MOVES = 12.0
"""Multiply-adds that could be done while a number goes into a vector or out of it."""
Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Side:
    """One axis of all tiles: the source's ``start`` in the first, its ``advance`` and ``extent``, results' phases."""

    axis: Axis
    pass_: Pass
    tile: int

    @property
    def count(self) -> int:
        """Of results, or of the output's gradient."""
        return self.axis.size if self.pass_ is Pass.DGRAD else self.axis.out

    @property
    def tiles(self) -> int:
        return -(-self.count // self.tile)

    @property
    def phases(self) -> int:
        """Sets of an input gradient's results, by the taps that reach them."""
        return self.axis.stride if self.pass_ is Pass.DGRAD else 1

    @property
    def size(self) -> int:
        """How far the source is read: what lies behind may be anything."""
        axis = self.axis
        return axis.out if self.pass_ is Pass.DGRAD else min(axis.size, self._span(axis.out) - axis.before)

    @property
    def start(self) -> int:
        axis = self.axis
        return -((axis.reach - 1 - axis.before) // axis.stride) if self.pass_ is Pass.DGRAD else -axis.before

    @property
    def advance(self) -> int:
        return self.tile // self.axis.stride if self.pass_ is Pass.DGRAD else self.tile * self.axis.stride

    @property
    def extent(self) -> int:
        axis = self.axis
        if self.pass_ is not Pass.DGRAD:
            return self._span(self.tile)
        return (self.tile - 1 + axis.before) // axis.stride + 1 - self.start

    def _span(self, outputs: int) -> int:
        return (outputs - 1) * self.axis.stride + self.axis.reach

    def reached(self, phase: int) -> list[tuple[int, int]]:
        """Taps of a phase's first result, and where in the tile's source they find it."""
        axis = self.axis
        if self.pass_ is not Pass.DGRAD:
            return [(k, k * axis.dilation) for k in range(axis.kernel)]
        ahead = ((k, phase + axis.before - k * axis.dilation) for k in range(axis.kernel))
        return [(k, place // axis.stride - self.start) for k, place in ahead if place % axis.stride == 0]

    @property
    def modulus(self) -> int:
        """Columns of the source from one sum in registers to the next."""
        return {Pass.FPROP: self.axis.stride, Pass.DGRAD: 1, Pass.WGRAD: self.axis.dilation}[self.pass_]


@dataclass(frozen=True)
class Layout:
    """Everything that a config fixes."""

    p: ConvProblem
    lanes: int
    tile: tuple[int, ...]

    @functools.cached_property
    def sides(self) -> tuple[Side, Side, Side]:
        flat = [Side(Axis(1, 1), self.p.pass_, 1)] * (3 - self.p.dims)
        d, h, w = (*flat, *(Side(*found) for found in zip(self.p.axes, [self.p.pass_] * 3, self.tile, strict=False)))
        return d, h, w

    @property
    def vector(self) -> int:
        return 4 * self.lanes

    @property
    def blocks(self) -> int:
        """Of ``lanes`` groups."""
        return -(-self.p.groups // self.lanes)

    @property
    def slack(self) -> int:
        """Bytes that are written or read behind what counts."""
        return self.lanes * self.vector

    @property
    def channels(self) -> tuple[int, int]:
        """Of a group: in the source, in the other."""
        into, out = self.p.in_channels // self.p.groups, self.p.out_channels // self.p.groups
        return (out, into) if self.p.pass_ is Pass.DGRAD else (into, out)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a source in scratch: modulus, and bytes of a part, a row and a plane."""
        _, h, w = self.sides
        part = -(-w.extent // w.modulus) * self.vector
        return w.modulus, part, w.modulus * part, h.extent * w.modulus * part

    @property
    def source_bytes(self) -> int:
        return self.sides[0].extent * self.shape[3] + self.slack

    @property
    def taps_bytes(self) -> int:
        return math.prod(self.channels) * self.p.taps * self.vector + self.slack

    @property
    def line_bytes(self) -> int:
        *_, w = self.sides
        return max(w.extent, w.tile, self.p.taps) * self.vector + self.slack

    @property
    def rows(self) -> int:
        """Of results at once."""
        return 4

    @property
    def tiles(self) -> int:
        return math.prod(side.tiles for side in self.sides)

    @property
    def scratch(self) -> int:
        """Bytes of a thread."""
        size = self.taps_bytes + self.line_bytes + self.channels[0] * self.source_bytes
        if self.p.pass_ is Pass.WGRAD:
            size += math.prod(side.tile for side in self.sides) * self.vector + self.slack
        else:
            size += self.rows * self.line_bytes
        return -(-size // PAGE) * PAGE

    @property
    def band(self) -> int:
        return max(1, min(self.sides[1].tile, BAND // (self.sides[2].tile * self.vector)))

    def steps(self) -> tuple[int, int]:
        """Elements from one step of a line to the next: in the source's part, and in the factors."""
        w = self.sides[2]
        if self.p.pass_ is Pass.DGRAD:
            every = w.axis.stride // math.gcd(w.axis.stride, w.axis.dilation)
            return -w.axis.dilation * every // w.axis.stride, every
        step = w.axis.stride if self.p.pass_ is Pass.WGRAD else w.axis.dilation
        every = w.modulus // math.gcd(w.modulus, step)
        return step * every // w.modulus, every

    def lines(self, found: list[tuple[int, int]]) -> list[Triple]:
        """Of one row: ``found`` factors and columns, in the order of factors, as places in bytes and steps."""
        modulus, part, *_ = self.shape
        every = self.steps()[1]
        lines: dict[int, list[int]] = {}
        for k, column in found:
            first = lines.setdefault(k % every, [column % modulus * part + column // modulus * self.vector, k, 0])
            first[2] += 1
        return [(place, k * self.vector, count) for place, k, count in lines.values()]

    def tables(self) -> list[np.ndarray]:
        """Lines of all phases of results; of a filter's gradient those of whole tiles' bands and of the last."""
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
        found = []
        for phase_d in range(d.phases):
            for phase_h in range(h.phases):
                for phase_w in range(w.phases):
                    lines = self.lines(w.reached(phase_w))
                    found.append(_table([
                        (
                            i * self.source_bytes + at_d * plane + at_h * row + a,
                            ((i * kernel[0] + k_d) * kernel[1] + k_h) * kernel[2] * self.vector + b, n,
                        )
                        for i in range(self.channels[0]) for k_d, at_d in d.reached(phase_d)
                        for k_h, at_h in h.reached(phase_h) for a, b, n in lines
                    ]))  # fmt: skip
        return found


def _table(lines: list[Triple]) -> np.ndarray:
    return np.array(lines, dtype=np.int64).reshape(-1, 3)


def unsupported(p: ConvProblem) -> list[str]:
    """Reasons against it: an absent Numba, tiles that lie in no cache."""
    reasons = missing()
    if not reasons and _scratch(p) > MOST_SCRATCH:
        reasons.append(f"works on {_scratch(p)} bytes in each thread, at most {MOST_SCRATCH}")
    return reasons


def _lanes(p: ConvProblem) -> int:
    """The machine's own vectors, or the shortest where groups would leave most of them empty."""
    widest = WIDEST.get(torch.backends.cpu.get_cpu_capability(), LANES[-1])
    return LANES[-1] if p.groups <= LANES[-1] else widest


def _scratch(p: ConvProblem) -> int:
    return _layout(p, 1).scratch


@functools.lru_cache(maxsize=1024)
def _layout(p: ConvProblem, threads: int) -> Layout:
    """The largest tile that stays in cache, cut further while threads would have too little to share."""
    step = [axis.stride if p.pass_ is Pass.DGRAD else 1 for axis in p.axes]
    tiles = [1] * p.dims
    while True:
        counts = [side.count for side in Layout(p, _lanes(p), (1,) * p.dims).sides[3 - p.dims :]]
        tile = [-(-count // n) for count, n in zip(counts, tiles, strict=True)]
        found = Layout(p, _lanes(p), tuple(-(-n // s) * s for n, s in zip(tile, step, strict=True)))
        sides = found.sides[3 - p.dims :]
        whole = found.channels[0] * found.source_bytes <= FITTING
        busy = p.pass_ is Pass.WGRAD or found.blocks * p.batch * found.tiles >= 2 * threads
        least = [1 if not whole else LEAST_TILE * side.axis.kernel for side in sides]
        open_ = [i for i, side in enumerate(sides) if side.tile // 2 >= max(least[i], step[i])]
        if (whole and busy) or not open_:
            return found
        tiles[max(open_, key=lambda i: (sides[i].extent / sides[i].axis.reach, -i))] *= 2


def configs(p: ConvProblem) -> Iterable[Config]:
    """One tile, on torch's threads or ours; shares of a filter's gradient that keep all threads busy."""
    threads = torch.get_num_threads()
    found = _layout(p, threads)
    units, extra = found.blocks * p.batch * found.tiles, {}
    if p.pass_ is Pass.WGRAD:
        shares = _shares(found.blocks, p.batch * found.tiles, threads)
        units, extra = found.blocks * shares, {"shares": shares}
    base = Config(tile=found.tile, lanes=found.lanes, threads=min(threads, units), **extra)
    if base["threads"] == 1:
        return [base]
    return [Config(**base, team=team) for team in (("openmp", "own") if has_openmp() else ("own",))]


def _shares(blocks: int, items: int, threads: int) -> int:
    """Into how many shares the ``items`` of a block go, for threads equally busy."""
    for n in range(1, items + 1):
        if blocks * n % threads == 0 or blocks * n >= UNITS * threads:
            return n
    return items


def _of(p: ConvProblem, c: Config) -> Layout:
    """Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    tile, lanes = c["tile"], integer(c, "lanes")
    if not isinstance(tile, tuple) or len(tile) != p.dims or min(tile) < 1:
        raise ValueError(f"tile={tile!r}: {p.dims} positive sizes would do")
    if p.pass_ is Pass.DGRAD and any(n % axis.stride for n, axis in zip(tile, p.axes, strict=True)):
        raise ValueError(f"tile={tile!r}: multiples of the stride would do")
    if lanes not in LANES:
        raise ValueError(f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do")
    return Layout(p, lanes, tile)


def _partial(found: Layout, c: Config) -> int:
    """Bytes of what shares add up to."""
    shares = integer(c, "shares", 1)
    return 0 if shares == 1 else found.blocks * shares * found.taps_bytes


def workspace(p: ConvProblem, c: Config) -> int:
    """Tiles of every thread, and what shares of a filter's gradient come to."""
    found = _of(p, c)
    return integer(c, "threads") * found.scratch + _partial(found, c)


def cost(p: ConvProblem, c: Config) -> Cost:
    """The direct method's arithmetic in full vectors, the ways in and out of them, and operands read once."""
    found = _of(p, c)
    full = found.blocks * found.lanes / p.groups
    moved = sum(p.nbytes(role) // p.torch_dtype(role).itemsize for role in ("x", "y"))
    return Cost(int(full * (p.flops + 2 * MOVES * moved)), p.bytes, 1, EFFICIENCY)


def bind(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
    """The run. Raises ``SolverUnavailable`` with Numba's reason, or for a config that is none of the problem's."""
    try:
        found = _of(p, c)
        integer(c, "threads"), integer(c, "shares", 1)
    except (KeyError, ValueError) as error:
        raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error
    tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
    return Units(found, c, {role: strides(t) for role, t in tensors}).run


class Units:
    """The kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run`."""

    __slots__ = ("_blocks", "_data", "_openmp", "_order", "_partial", "_run", "_tables", "_threads")

    def __init__(self, found: Layout, c: Config, apart: dict[str, list[int]]) -> None:
        p, kernel, shares = found.p, _compiled(found.lanes), integer(c, "shares", 1)
        told = replace(_told(found, apart, shares), calls=(kernel.rows, kernel.sums))
        self._run, self._threads, self._openmp = kernel.run, integer(c, "threads"), c.get("team") == "openmp"
        self._tables = found.tables()
        tables = [number for table in self._tables for number in (table.ctypes.data, len(table))]
        self._blocks = found.blocks if shares > 1 else 0
        header = np.zeros(HEADER, dtype=np.int64)
        units = found.blocks * (shares if p.pass_ is Pass.WGRAD else p.batch * found.tiles)
        header[3:6] = units, HEADER + COUNT + len(tables), found.scratch
        self._data = np.concatenate([header, told.numbers(), np.array(tables, dtype=np.int64)])
        self._partial = integer(c, "threads") * found.scratch
        # Source, other and taps, by their places in operands and result.
        self._order = {Pass.FPROP: (0, 2, 1), Pass.DGRAD: (0, 2, 1), Pass.WGRAD: (0, 1, 2)}[p.pass_]

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
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


def _told(found: Layout, apart: dict[str, list[int]], shares: int) -> Told:
    """What the kernel is told, but for the addresses that it calls."""
    p = found.p
    d, h, w = found.sides
    source, other = ("y", "x") if p.pass_ is Pass.DGRAD else ("x", "y")
    sources, others = found.channels
    _, _, row, plane = found.shape
    kinds = {role: DTYPES.index(p.out_dtype if role == p.result else p.dtype) for role in ("x", "w", "y")}
    down = 1 if p.pass_ is Pass.DGRAD else 0
    a_step, b_step = found.steps()
    taps, taps_counts = _flat(found, apart["w"])

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
        shape=found.shape,
        source_bytes=found.source_bytes,
        taps_bytes=found.taps_bytes,
        line_bytes=found.line_bytes,
        source=of_image(source, sources),
        other=of_image(other, others),
        taps=taps,
        taps_counts=taps_counts,
        kernel=(d.axis.kernel, h.axis.kernel, w.axis.kernel),
        down=(plane, row) if down else (d.axis.stride * plane, h.axis.stride * row),
        between=(d.axis.dilation * plane, h.axis.dilation * row),
        steps=(a_step * found.vector, b_step * found.vector),
        columns=min(MOST_COLUMNS, REGISTERS[found.lanes]),
        rows=found.rows,
        sums=REGISTERS[found.lanes],
        band=found.band,
        calls=(0, 0),
    )


def _flat(found: Layout, apart: list[int]) -> tuple[tuple[int, int, int, int, int, int], Triple]:
    """Strides of a filter by group and its channels in the other and the source, then as few axes as it has."""
    p = found.p
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
    from tilewise.kernels.cpu.compiling import load_direct

    with numba_reasons():
        return load_direct(lanes)
