"""Convolution by tile registers: how its work is divided."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE, WIDE
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import even, innermost
from tilewise.solvers.common.cpu_run import PAGE, numba_missing, with_teams
from tilewise.solvers.common.tiles import integer

__all__ = [
    "FAR_RATE", "NEAR", "NEAR_RATE", "NUMBER", "PRODUCTS", "RATE", "Division", "Reach", "divisions", "filter_bytes",
    "forms", "image_strides", "lies_in_planes", "may_use_tile_registers", "refused",
]  # fmt: skip

PRODUCTS = {2: 3, 3: 6}
"""Products of parts, by their number."""
NUMBER = 4
"""Bytes of a number of fp32."""
RATE = {2: 2.4, 3: 1.6}
"""What products of two and three parts reach, relative to the peak of vector registers."""
STRIP = 1 << 20
"""Bytes of pixels in parts that a unit has at the most where it can have fewer: a half of a core's cache."""
NEAR = 3 << 19
"""Bytes of filters that stay in a core's cache."""
NEAR_RATE, FAR_RATE = 48, 10
"""Bytes in a cycle that come from a core's own cache, and from one that cores share or from memory."""
FLAGS = ("amx_tile", "amx_bf16", "avx512bw")
"""What the system says of processors that have them."""
REQUEST, TILE_DATA = 0x1023, 18
"""Numbers by which Linux is asked to let a process use tile registers."""
PERMISSION = 158
"""The system call, of x86-64."""


@functools.cache
def may_use_tile_registers() -> bool:
    """Whether processor and system let this process multiply by tile registers. Asks the system the first time."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("flags")[2]
    except OSError:
        return False
    if not set(FLAGS) <= set(flags.partition("\n")[0].split()):
        return False
    return ctypes.CDLL(None).syscall(PERMISSION, REQUEST, TILE_DATA) == 0


@dataclass(frozen=True)
class Reach:
    """What results along an axis read: number ``i`` reads ``i * stride + t * dilation - before``, of ``size``.

    ``t`` counts ``taps`` taps, of which the filter's are ``first``, ``first + step`` and so on. The results are ``out``
    of those along the axis: from number ``begin`` on, ``apart`` from each other.
    """

    size: int
    out: int
    taps: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    first: int = 0
    step: int = 1
    begin: int = 0
    apart: int = 1


WHOLE = Reach(1, 1, 1)
"""An axis that a layer does not have."""


def _reaches(axis: Axis, gradient: bool) -> list[Reach]:
    """What results along an axis read. Of a ``gradient`` those alike modulo the stride read by the same taps."""
    if not gradient:
        return [Reach(axis.size, axis.out, axis.kernel, axis.stride, axis.dilation, axis.before)]
    found, s, d = [], axis.stride, axis.dilation
    for begin in range(min(s, axis.size)):
        # Input i = begin + s q was read by output q + (begin + before - k d) / s with tap k, where that divides.
        taps = [k for k in range(axis.kernel) if (begin + axis.before - k * d) % s == 0]
        common = math.gcd(s, d)
        before = (taps[-1] * d - begin - axis.before) // s if taps else 0
        first = taps[-1] if taps else 0
        out = -(-(axis.size - begin) // s)
        found.append(Reach(axis.out, out, len(taps), 1, d // common, before, first, -(s // common), begin, s))
    return found


def _layers(p: ConvProblem) -> list[tuple[int, tuple[Reach, Reach]]]:
    """Images, and what results read along height and width; several times for the gradient of a strided layer.

    All pixels that follow each other in memory are one line where there is one tap and no stride.
    """
    plain = all(axis.kernel == 1 and axis.stride == 1 and not axis.before and not axis.after for axis in p.axes)
    pixels = math.prod(axis.size for axis in p.axes)
    if plain and all(innermost(p, role) for role in "xy"):
        return [(1, (WHOLE, Reach(p.batch * pixels, p.batch * pixels, 1)))]
    if plain and all(lies_in_planes(p, role) for role in "xy"):
        return [(p.batch, (WHOLE, Reach(pixels, pixels, 1)))]
    width = _reaches(p.axes[-1], p.result == "x")
    height = _reaches(p.axes[0], p.result == "x") if p.dims == 2 else [WHOLE]
    return [(p.batch, axes) for axes in itertools.product(height, width)]


def lies_in_planes(p: ConvProblem, role: str) -> bool:
    """Whether each channel's numbers follow each other, and channels are no neighbours in memory."""
    return p.layout(role) == "contiguous" and not innermost(p, role)


def image_strides(p: ConvProblem, role: str, given: list[int], flat: bool) -> tuple[list[int], int]:
    """The byte strides of images, lines and columns of x or y, and that of its channels. ``flat``: lines are one.

    ``given`` are the tensor's own, of which those of axes with one element say nothing.
    """
    planes = lies_in_planes(p, role)
    pixel = NUMBER if planes else NUMBER * p.shape(role)[1]
    line = 0 if flat or p.dims == 1 else given[2]
    return [given[0], line, pixel], given[1] if planes else NUMBER


@dataclass(frozen=True)
class Division:
    """How the work is divided: units of ``lines`` by ``columns`` results and of panels, tiles of ``rows`` pixels.

    ``axes`` say what the results of each of ``all_images`` read along height and width. A unit has those of ``images``.
    """

    p: ConvProblem
    all_images: int
    axes: tuple[Reach, Reach]
    parts: int
    rows: int
    images: int
    lines: int
    columns: int
    panel_parts: int

    @property
    def flat(self) -> bool:
        """Whether all lines of an image are one."""
        return self.axes[0] is WHOLE

    @property
    def channels(self) -> int:
        """Channels that are read."""
        return self.p.in_channels if self.p.result == "y" else self.p.out_channels

    @property
    def outputs(self) -> int:
        """Channels that are written."""
        return self.p.out_channels if self.p.result == "y" else self.p.in_channels

    @property
    def taps(self) -> int:
        """Taps that each result is the sum of."""
        return self.axes[0].taps * self.axes[1].taps

    @property
    def blocks(self) -> int:
        """Blocks of channels that are summed at once."""
        return -(-self.channels // DEPTH)

    @property
    def panels(self) -> int:
        """Panels of output channels."""
        return -(-self.outputs // WIDE)

    @property
    def line_parts(self) -> int:
        """Ranges of lines of an image."""
        return -(-self.axes[0].out // self.lines)

    @property
    def column_parts(self) -> int:
        """Ranges of columns of a line."""
        return -(-self.axes[1].out // self.columns)

    @property
    def units(self) -> int:
        """Units of work."""
        groups = -(-self.all_images // self.images)
        return groups * self.line_parts * self.column_parts * self.panel_parts

    @property
    def pixels(self) -> int:
        """Pixels that a unit reads."""
        reach = [
            (count - 1) * axis.stride + max(0, axis.taps - 1) * axis.dilation + 1
            for count, axis in zip((self.lines, self.columns), self.axes, strict=True)
        ]
        return self.images * math.prod(reach)

    @property
    def apart(self) -> int:
        """Bytes of one part of them; tiles may read beyond the last one."""
        return (self.pixels + LANES * self.axes[1].stride) * self.blocks * DEPTH * HALF

    @property
    def tiles(self) -> int:
        """Tiles of pixels of a unit."""
        return self.images * self.lines * -(-self.columns // self.rows)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel's filters."""
        return self.taps * self.blocks * self.parts * 2 * TILE

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in parts."""
        return self.panels * self.panel_bytes

    @property
    def flops(self) -> int:
        """Operations of all tiles, as if they were multiplied once in fp32."""
        pairs = self.tiles + self.tiles % 2
        each = pairs * self.rows * self.taps * self.blocks * DEPTH
        return 2 * each * WIDE * self.panels * self.units // self.panel_parts

    def places(self) -> dict[str, int]:
        """Where everything lies in a thread's scratch, behind the sizes of tile registers; and its ``size``."""
        found, place = {}, PAGE
        for name, size in (
            ("sums", 4 * TILE), ("biases", 4 * WIDE), ("table", 8 * self.taps), ("strip", self.parts * self.apart),
        ):  # fmt: skip
            found[name] = place
            place += -(-size // 64) * 64
        return {**found, "size": -(-place // PAGE) * PAGE}

    def time(self, threads: int) -> float:
        """Estimated time, in cycles of the busiest thread."""
        turns = -(-self.units // threads)
        across = -(-self.columns // self.rows)
        pairs = -(-self.images * self.lines * across // 2)
        steps = self.taps * self.blocks * -(-self.panels // self.panel_parts)
        loads = 8 * (self.parts + (2 if self.parts == 2 else 4)) + 8 * (self.parts + 1)
        product = max(4 * PRODUCTS[self.parts] * self.rows, loads) + 16
        from_far = self.filter_bytes > NEAR
        streamed = steps * 2 * TILE * self.parts / (FAR_RATE if from_far else NEAR_RATE)
        finished = 2 * self.rows * 10 * -(-self.panels // self.panel_parts)
        split = self.pixels * self.blocks * DEPTH * (0.4 + 0.1 * self.parts)
        return turns * (max(pairs * steps * product, streamed) + 2 * pairs * finished + split + 2000)


def refused(p: ConvProblem) -> list[str]:
    """Why tile registers cannot compute ``p``: no Numba, none of them, views, groups, 16-bit results."""
    found = numba_missing()
    for role in "xy":
        if not innermost(p, role) and not lies_in_planes(p, role):
            found.append(f"takes {role} contiguous or channels_last, not as {p.layout(role)}")
    if p.out_dtype != "fp32":
        found.append(f"gives fp32, not {p.out_dtype}")
    if p.groups > 1:
        found.append(f"takes one group, not {p.groups}")
    if not found and not may_use_tile_registers():
        found.append("needs tile registers of bf16 (Intel's AMX), which this processor or its system lacks")
    return found


def divisions(p: ConvProblem, c: Config) -> list[Division]:
    """The divisions of a config: several for the gradient of a strided layer.

    Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``.
    """
    names = "parts", "rows", "images", "lines", "columns", "panel_parts"
    found = [Division(p, *layer, *(integer(c, name) for name in names)) for layer in _layers(p)]
    integer(c, "threads")
    divided = found[0]
    height, width = divided.axes
    if divided.parts not in PRODUCTS or divided.rows > LANES:
        raise ValueError(f"parts={divided.parts}, rows={divided.rows}: 2 or 3 parts, and up to {LANES} rows, would do")
    for name, most in (
        ("images", divided.all_images), ("lines", height.out), ("columns", width.out), ("panel_parts", divided.panels),
    ):  # fmt: skip
        if getattr(divided, name) > most:
            raise ValueError(f"{name}={getattr(divided, name)}: up to {most} would do")
    return found


def filter_bytes(divided: Iterable[Division]) -> int:
    """Bytes of all filters in parts."""
    return sum(each.filter_bytes for each in divided)


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each number of parts the two divisions that should be fastest, on either team of threads."""
    threads = torch.get_num_threads()
    found = []
    for parts in PRODUCTS:
        ranked = sorted(_divisions(p, parts, threads), key=lambda divided: divided.time(threads))
        for divided in ranked[:2]:
            base = Config(
                parts=parts, rows=divided.rows, images=divided.images, lines=divided.lines, columns=divided.columns,
                panel_parts=divided.panel_parts, threads=min(threads, divided.units),
            )  # fmt: skip
            found += [(divided.time(threads), c) for c in with_teams(base)[:1]]
    return [c for _, c in sorted(found, key=lambda entry: entry[0])]


def _divisions(p: ConvProblem, parts: int, threads: int) -> Iterator[Division]:
    """Divisions worth comparing, of the results with most taps: a few sizes of ranges, and panels in parts."""
    images, (height, width) = max(_layers(p), key=lambda layer: layer[1][0].taps * layer[1][1].taps)
    whole = Division(p, images, (height, width), parts, 1, 1, 1, 1, 1)
    if whole.flat and width.taps == 1 and width.stride == 1:
        to = LANES if lies_in_planes(p, p.result) else 1  # whole vectors of results
        lengths = {-(-even(width.out, n) // to) * to for n in (32, 64, 96, 128, 192, 256)}
        sizes = {(1, 1, min(width.out, length)) for length in lengths}
    else:
        sizes = {(1, even(height.out, n), width.out) for n in range(1, min(height.out, 32) + 1)}
        # Several small images: their filters are read once, and tiles have a neighbour.
        sizes |= {(n, height.out, width.out) for n in (2, 4, 8) if n <= images and height.out <= 16}
    for (count, lines, columns), panel_parts in itertools.product(
        sorted(sizes), range(1, min(whole.panels, 2 * threads) + 1)
    ):
        divided = replace(
            whole, rows=even(columns, LANES), images=count, lines=lines, columns=columns, panel_parts=panel_parts
        )  # fmt: skip
        if divided.parts * divided.apart <= STRIP or (count == 1 and (lines == 1 or columns * lines <= 2 * LANES)):
            yield divided
