"""Convolution by tile registers: how its work is divided, its filters, and its kernel."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tilewise.kernels.cpu.channels_last.told import DEPTH, HALF, SPLIT, SPLIT_NUMBERS, TILE
from tilewise.kernels.cpu.channels_last.told import TILE_LANES as LANES
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.channels_last import even
from tilewise.solvers.common.cpu_run import (
    PAGE,
    FinishingRun,
    kernel_data,
    numba_reasons,
    numbers_array,
    with_teams,
)
from tilewise.solvers.common.tiles import integer

__all__ = ["Division", "Pixels", "division", "forms", "in_tiles", "may_use_tile_registers"]

WIDE = 2 * LANES
"""Output channels of a panel."""
PRODUCTS = {2: 3, 3: 6}
"""Products of parts, by their number."""
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
class Division:
    """How the work is divided: units of ``lines`` by ``columns`` results and of panels, tiles of ``rows`` pixels."""

    p: ConvProblem
    parts: int
    rows: int
    lines: int
    columns: int
    panel_parts: int

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The axes of height and width; all pixels of a pointwise layer are one line."""
        axes = (*[Axis(1, 1)] * (2 - self.p.dims), *self.p.axes)
        if is_flat(self.p):
            return Axis(1, 1), Axis(self.p.batch * math.prod(axis.size for axis in axes), 1)
        return axes[0], axes[1]

    @property
    def images(self) -> int:
        """Images, one where all pixels are one line."""
        return 1 if is_flat(self.p) else self.p.batch

    @property
    def blocks(self) -> int:
        """Blocks of channels that are summed at once."""
        return -(-self.p.in_channels // DEPTH)

    @property
    def panels(self) -> int:
        """Panels of output channels."""
        return -(-self.p.out_channels // WIDE)

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
        return self.images * self.line_parts * self.column_parts * self.panel_parts

    @property
    def pixels(self) -> int:
        """Pixels that a unit reads."""
        reach = [
            (count - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1
            for count, axis in zip((self.lines, self.columns), self.axes, strict=True)
        ]
        return math.prod(reach)

    @property
    def apart(self) -> int:
        """Bytes of one part of them; tiles may read beyond the last one."""
        return (self.pixels + LANES * self.axes[1].stride) * self.blocks * DEPTH * HALF

    @property
    def tiles(self) -> int:
        """Tiles of pixels of a unit."""
        return self.lines * -(-self.columns // self.rows)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel's filters."""
        return self.p.taps * self.blocks * self.parts * 2 * TILE

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in parts."""
        return self.panels * self.panel_bytes

    @property
    def flops(self) -> int:
        """Operations of all tiles, as if they were multiplied once in fp32."""
        pairs = self.tiles + self.tiles % 2
        each = pairs * self.rows * self.p.taps * self.blocks * DEPTH
        return 2 * each * WIDE * self.panels * self.units // self.panel_parts

    def places(self) -> dict[str, int]:
        """Where everything lies in a thread's scratch, behind the sizes of tile registers; and its ``size``."""
        found, place = {}, PAGE
        for name, size in (
            ("sums", 4 * TILE), ("biases", 4 * WIDE), ("table", 8 * self.p.taps), ("strip", self.parts * self.apart),
        ):  # fmt: skip
            found[name] = place
            place += -(-size // 64) * 64
        return {**found, "size": -(-place // PAGE) * PAGE}

    def time(self, threads: int) -> float:
        """Estimated time, in cycles of the busiest thread."""
        turns = -(-self.units // threads)
        across = -(-self.columns // self.rows)
        pairs = -(-self.lines * across // 2)
        steps = self.p.taps * self.blocks * -(-self.panels // self.panel_parts)
        loads = 8 * (self.parts + (2 if self.parts == 2 else 4)) + 8 * (self.parts + 1)
        product = max(4 * PRODUCTS[self.parts] * self.rows, loads) + 16
        from_far = self.filter_bytes > NEAR
        streamed = steps * 2 * TILE * self.parts / (FAR_RATE if from_far else NEAR_RATE)
        finished = 2 * self.rows * 10 * -(-self.panels // self.panel_parts)
        split = self.pixels * self.blocks * DEPTH * (0.4 + 0.1 * self.parts)
        return turns * (max(pairs * steps * product, streamed) + 2 * pairs * finished + split + 2000)


def is_flat(p: ConvProblem) -> bool:
    """Whether all pixels may be seen as one line: one tap and no strides, over dense images."""
    plain = all(axis.kernel == 1 and axis.stride == 1 and not axis.before and not axis.after for axis in p.axes)
    return plain and all(p.layout(role) == "channels_last" for role in ("x", "y"))


def division(p: ConvProblem, c: Config) -> Division:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    names = "parts", "rows", "lines", "columns", "panel_parts"
    divided = Division(p, *(integer(c, name) for name in names))
    integer(c, "threads")
    height, width = divided.axes
    if divided.parts not in PRODUCTS or divided.rows > LANES:
        raise ValueError(f"parts={divided.parts}, rows={divided.rows}: 2 or 3 parts, and up to {LANES} rows, would do")
    if divided.lines > height.out or divided.columns > width.out or divided.panel_parts > divided.panels:
        raise ValueError(
            f"lines={divided.lines}, columns={divided.columns}, panel_parts={divided.panel_parts}: up to {height.out}, "
            f"{width.out} and {divided.panels} would do"
        )
    return divided


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each number of parts the two divisions that should be fastest, on either team of threads."""
    threads = torch.get_num_threads()
    found = []
    for parts in PRODUCTS:
        ranked = sorted(_divisions(p, parts, threads), key=lambda divided: divided.time(threads))
        for divided in ranked[:2]:
            base = Config(
                parts=parts, rows=divided.rows, lines=divided.lines, columns=divided.columns,
                panel_parts=divided.panel_parts, threads=min(threads, divided.units),
            )  # fmt: skip
            found += [(divided.time(threads), c) for c in with_teams(base)[:1]]
    return [c for _, c in sorted(found, key=lambda entry: entry[0])]


def _divisions(p: ConvProblem, parts: int, threads: int) -> Iterator[Division]:
    """Divisions worth comparing: a few sizes of ranges, and panels in parts where there are few ranges."""
    whole = Division(p, parts, 1, 1, 1, 1)
    height, width = whole.axes
    if is_flat(p):
        sizes = {(1, even(width.out, n)) for n in (32, 64, 96, 128, 192, 256)}
    else:
        sizes = {(even(height.out, n), width.out) for n in range(1, min(height.out, 32) + 1)}
    for (lines, columns), panel_parts in itertools.product(sorted(sizes), range(1, min(whole.panels, 2 * threads) + 1)):
        divided = Division(p, parts, even(columns, LANES), lines, columns, panel_parts)
        if divided.parts * divided.apart <= STRIP or lines * columns <= 2 * LANES or lines == 1:
            yield divided


def _in_parts(weight: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The parts of a filter as int16, which hold the bits of bf16: rounded where there are two, cut where three."""
    found = []
    for _ in range(parts):
        part = (
            weight.bfloat16() if parts == 2 else (weight.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        )
        found.append(part.view(torch.int16))
        weight = torch.where(weight == part.float(), 0.0, weight - part.float())
    return found


def in_tiles(divided: Division, weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Write a filter to ``kept``, of uint8, in the order in which tile registers are loaded.

    That is: panel, tap, block of channels, part, vector of outputs, pair of channels, output, channel of the pair.
    """
    p = divided.p
    filters = torch.zeros(
        divided.panels * WIDE, divided.blocks * DEPTH, p.taps, dtype=torch.float32, device=weight.device
    )
    filters[: p.out_channels, : p.in_channels] = weight.detach().flatten(2)
    target = kept[: divided.filter_bytes].view(torch.int16).view(
        divided.panels, p.taps, divided.blocks, divided.parts, 2, LANES, LANES, 2
    )  # fmt: skip
    for i, part in enumerate(_in_parts(filters, divided.parts)):
        tiles = part.view(divided.panels, 2, LANES, divided.blocks, LANES, 2, p.taps)
        target[:, :, :, i] = tiles.permute(0, 6, 3, 1, 4, 2, 5)


class Pixels(FinishingRun):
    """The compiled kernel over all units of work, for tensors of fixed strides. It takes filters in tiles."""

    __slots__ = ("_zeros",)

    def __init__(self, p: ConvProblem, c: Config, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of x and y. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.channels_last.compiling import load_split_products

        divided = division(p, c)
        if not may_use_tile_registers():  # they are illegal instructions until the system is asked
            raise SolverUnavailable("this process may not use tile registers")
        super().__init__(c)
        self._added = [HEADER + SPLIT[name] for name in ("bias", "residual") if getattr(p, name)]
        self._zeros = np.zeros(WIDE, dtype=np.float32)
        with numba_reasons():
            self._kernel, splits, products, finishes = load_split_products(LANES, divided.parts, p.activation)
        places = divided.places()
        flat = is_flat(p)
        dense = p.in_channels % DEPTH == 0 and apart["x"][-1] == 4 * p.in_channels
        numbers = {
            "channels": p.in_channels, "blocks": divided.blocks, "outputs": p.out_channels, "panels": divided.panels,
            "panel_parts": divided.panel_parts, "lines": divided.lines, "columns": divided.columns,
            "line_parts": divided.line_parts, "column_parts": divided.column_parts, "rows": divided.rows,
            "zeros": self._zeros.ctypes.data, "panel_bytes": divided.panel_bytes, "apart": divided.apart,
            "strip": places["strip"], "table": places["table"], "sums": places["sums"], "biases": places["biases"],
            "splits": splits, "products": products, "finishes": finishes, "dense": int(dense),
        }  # fmt: skip
        told = {SPLIT[name]: value for name, value in numbers.items()}
        for name, field in (("sizes", "size"), ("outs", "out"), ("kernel", "kernel"), ("stride", "stride"),
                            ("dilation", "dilation"), ("before", "before")):  # fmt: skip
            told |= dict(enumerate((getattr(axis, field) for axis in divided.axes), SPLIT[name]))
        for name, channels in (("x", p.in_channels), ("y", p.out_channels)):
            image, _, *space = apart[name]
            strides = (0, 0, 4 * channels) if flat else (image, *[0] * (2 - p.dims), *space)
            told |= dict(enumerate(strides, SPLIT[name]))
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, SPLIT_NUMBERS))
