"""Convolution of planes with fewer products along a line, in one kernel on matrix units (``winograd_planes.cu``).

Winograd's F(4, r) (1980; Lavin and Gray 2016, section 4) in fp32 accuracy by three products of fp16 parts for one
(Ootomo and Yokota 2022, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tilewise.kernels.codelets import literal
from tilewise.kernels.cook_toom import POINTS, shift, transforms
from tilewise.kernels.cuda.launch import block_limits, read_source
from tilewise.kernels.cuda.operands import constants
from tilewise.kernels.cuda.warpgroup import multiply

__all__ = ["CHANNELS", "DEPTH", "OUTPUTS", "Planes", "Prepare"]

OUTPUTS = 4
"""Results of a tile."""
CHANNELS = 64
"""Channels of the result that one block computes."""
DEPTH = 16
"""Channels that are read at a time."""
MULTIPLIERS = 256
"""Threads of a block that multiply."""
READERS = 128
"""Threads of a block that load and transform operands."""
REGISTERS = (216, 72)
"""Registers of a thread that multiplies, and of one that loads."""
STAGED = 64
"""Results of a row that are staged before they are written."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """The kernel ``winograd_prepare``, for ``taps`` taps across lines and ``wide_taps`` along them.

    ``dense`` is 1 where an image's elements lie without gaps, 4 where they also start at multiples of 16 bytes, else 0.
    """

    taps: int
    wide_taps: int
    dense: int
    name: str = "winograd_prepare"
    threads: int = 256
    shared: int = 4 * 256

    def source(self) -> str:
        """The kernel as CUDA C++."""
        return _prepare_source(self)


@dataclass(frozen=True, slots=True)
class Planes:
    """The kernel ``winograd_planes``.

    A task has two times ``places`` tiles, ``tiles`` in each line. ``held`` pairs of the tiles' points and
    ``filters_held`` points of filters wait in shared memory. ``together`` pairs are computed from what is read at a
    time.
    """

    taps: int
    wide_taps: int
    tiles: int
    places: int
    held: int = 4
    filters_held: int = 4
    together: int = 1
    accumulate: bool = False
    bias: bool = False
    name: str = "winograd_planes"
    threads: int = MULTIPLIERS + READERS

    @property
    def points(self) -> int:
        """Points of a tile, each with one product per tap across lines."""
        return OUTPUTS + self.wide_taps - 1

    @property
    def rows(self) -> int:
        """Tiles whose inputs a block needs."""
        return 2 * self.places + (self.taps - 1) * self.tiles

    @property
    def lines(self) -> int:
        """Lines to which these tiles belong."""
        return (self.rows + self.tiles - 2) // self.tiles + 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        tables = _up(16 * (self.held + self.filters_held + 1) + 24 * self.lines)
        raw = _up(4 * DEPTH * self.lines * (self.tiles * OUTPUTS + 4))
        parts = self.held * _up(8 * DEPTH * self.rows)
        filters = self.filters_held * 4 * self.taps * DEPTH * CHANNELS
        staged = MULTIPLIERS // 32 * 8 * (STAGED + 4) * 4
        return tables + raw + parts + filters + staged

    def problems(self) -> list[str]:
        """Reasons why it cannot run; empty where it can."""
        reasons = block_limits(f"tiles={self.tiles}, places={self.places}, held={self.held}", self.threads, self.shared)
        if self.held < self.together or self.filters_held < 3:
            reasons.append(f"held={self.held}, filters_held={self.filters_held}: {self.together} and 3 would do")
        return reasons

    def source(self) -> str:
        """The kernel as CUDA C++."""
        return _planes_source(self)


def _up(count: int) -> int:
    """``count`` rounded up to a multiple of 128."""
    return -(-count // 128) * 128


def _groups(points: int) -> list[list[int]]:
    """Points that are computed together: zero and infinity, and each point with its negative."""
    values = POINTS[points - 1]
    groups, used = [[0, points - 1]], {0}
    for i, value in enumerate(values):
        if i not in used:
            partner = [k for k, negative in enumerate(values) if negative == -value and k != i]
            groups.append([i, *partner])
            used |= {i, *partner}
    return groups


@functools.lru_cache(maxsize=64)
def _prepare_source(p: Prepare) -> str:
    """The CUDA C++ of ``winograd_prepare``."""
    points = OUTPUTS + p.wide_taps - 1
    matrix = transforms(OUTPUTS, p.wide_taps).filter
    order = [i for group in _groups(points) for i in group]
    values = {
        "TAPS": p.taps, "WIDE_TAPS": p.wide_taps, "POINTS": points, "CHANNELS": CHANNELS, "DEPTH": DEPTH,
        "DENSE": p.dense, "FILTER_SHIFT": shift(matrix),
    }  # fmt: skip
    table = _table("FILTER_MATRIX", [matrix[i] for i in order])
    return "\n".join(("using i64 = long long;", constants(values), table, read_source("winograd_prepare.cu")))


@functools.lru_cache(maxsize=256)
def _planes_source(p: Planes) -> str:
    """The CUDA C++ of ``winograd_planes``."""
    matrices = transforms(OUTPUTS, p.wide_taps)
    pairs = _groups(p.points)
    groups = [pairs[i : i + p.together] for i in range(0, len(pairs), p.together)]
    values = {
        "TAPS": p.taps, "WIDE_TAPS": p.wide_taps, "POINTS": p.points, "GROUPS": len(groups), "OUTPUTS": OUTPUTS,
        "CHANNELS": CHANNELS, "DEPTH": DEPTH, "TILES": p.tiles, "PLACES": p.places, "HELD": p.held,
        "FILTERS_HELD": p.filters_held, "ACCUMULATE": p.accumulate, "BIAS": p.bias,
        "IMAGE_SHIFT": shift(matrices.input),
        "READERS": READERS, "READER_REGISTERS": REGISTERS[1], "MULTIPLIER_REGISTERS": REGISTERS[0], "STAGED": STAGED,
        "SHARED_BYTES": p.shared,
    }  # fmt: skip
    firsts = [POINTS[p.points - 1][pair[0]] for pair in pairs]
    factors = f"__constant__ float POINT_VALUES[] = {{{', '.join(literal(float(value)) for value in firsts)}}};"
    texts = [
        "using i64 = long long;", constants(values),
        read_source("barriers.cu"), read_source("matrix_units.cu"), multiply("multiply_add", p.places),
        factors, "template <int GROUP> struct Points;", *(_points(k, g, matrices.input) for k, g in enumerate(groups)),
        read_source("winograd_planes.cu"),
    ]  # fmt: skip
    return "\n".join(texts)


def _table(name: str, rows: Sequence[Sequence[Fraction]]) -> str:
    """A C++ table of fractions."""
    text = ", ".join("{" + ", ".join(literal(float(entry)) for entry in row) + "}" for row in rows)
    return f"__constant__ float {name}[{len(rows)}][{len(rows[0])}] = {{{text}}};"


def _points(number: int, group: Sequence[Sequence[int]], matrix: Sequence[Sequence[Fraction]]) -> str:
    """C++ that transforms a tile's inputs to the points of a group; a point and its negative share their terms."""
    lines, k = [], 0
    for pair in group:
        if len(pair) == 2 and (sign := _mirrored(matrix[pair[0]], matrix[pair[1]])):
            even, odd = (_terms(matrix[pair[0]], range(start, len(matrix), 2)) for start in (0, 1))
            mirrored = "even, scale, -odd" if sign > 0 else "-even, scale, odd"
            lines.append(f"{{ const float even = {even}, odd = ({odd}) * scale; "
                         f"v[{k}] = fmaf(even, scale, odd); v[{k + 1}] = fmaf({mirrored}); }}")  # fmt: skip
        else:
            lines += [f"v[{k + n}] = ({_terms(matrix[i], range(len(matrix)))}) * scale;" for n, i in enumerate(pair)]
        k += len(pair)
    body = "\n".join(f"    {line}" for line in lines)
    head = f"template <> struct Points<{number}> {{\n  static constexpr int COUNT = {k};"
    take = f"  static __device__ __forceinline__ void at(const float (&d)[8], float scale, float (&v)[{k}]) {{"
    return f"{head}\n{take}\n{body}\n  }}\n}};"


def _mirrored(row: Sequence[Fraction], other: Sequence[Fraction]) -> int:
    """1 or -1 where ``other`` is that many times ``row`` with every second entry negated; else 0."""
    for sign in (1, -1):
        if all(b == sign * (-1) ** i * a for i, (a, b) in enumerate(zip(row, other, strict=True))):
            return sign
    return 0


def _terms(row: Sequence[Fraction], places: Sequence[int]) -> str:
    """A C++ expression for the sum of a row's entries times inputs."""
    text = ""
    for i in places:
        if row[i]:
            factor = literal(float(row[i]))
            if text:
                text = f"d[{i}] + {text}" if row[i] == 1 else f"fmaf({factor}, d[{i}], {text})"
            else:
                text = f"d[{i}]" if row[i] == 1 else f"{factor} * d[{i}]"
    return text or "0.f"
