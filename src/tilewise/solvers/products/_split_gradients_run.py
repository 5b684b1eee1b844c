"""Gradients of filters by tile registers: the compiled kernels, for tensors of fixed strides."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from tilewise.kernels.cpu.tile_registers.told import (
    GRADIENT,
    GRADIENT_NUMBERS,
    LANES,
    REGION_NUMBERS,
    TILE,
    VARIANT_NUMBERS,
    WIDE,
)
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cpu_run import byte_strides, kernel_data, numba_reasons, numbers_array, start
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.products._split import NUMBER, image_strides, lies_in_planes, may_use_tile_registers
from tilewise.solvers.products._split_gradients import SUM_TILES, Division, division

__all__ = ["GradientRun"]

PAIR = 64
"""Bytes of a row of a tile, which has two pixels of each of 16 channels."""
SHIFTED = 2
"""The largest stride whose numbers are picked from whole vectors."""
OF_DIVISIONS = (
    "sources", "panels", "output_panels", "channel_parts", "shares", "strips", "images", "lines", "columns",
    "line_parts", "column_parts", "width", "image_lines", "reach", "parts", "x_apart", "y_apart",
)  # fmt: skip
"""The numbers of a kernel that are those of its division."""


def _vectors(width: int) -> int:
    """How many vectors of a line are written at once: two where that leaves little of the last ones empty."""
    return 2 if -(-width // (2 * LANES)) * 1.6 < -(-width // LANES) else 1


class GradientRun:
    """The compiled kernel over all units of work, and the sum of its shares. :meth:`run` runs it."""

    __slots__ = ("_add", "_data", "_kernel", "_openmp", "_partial", "_tables", "_threads")

    def __init__(self, p: ConvProblem, c: Config, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """For tensors with these strides. Raises ``SolverUnavailable`` with Numba's reason."""
        divided = division(p, c)
        if not may_use_tile_registers():  # they are illegal instructions until the system is asked
            raise SolverUnavailable("this process may not use tile registers")
        self._threads, self._openmp, self._add = integer(c, "threads"), c.get("team") == "openmp", p.accumulate
        self._partial = (divided.shares, *p.shape("w")) if divided.shares > 1 else None
        self._tables: list[np.ndarray] = []
        if self._partial is not None:
            out = torch.empty(self._partial[1:], dtype=torch.float32, device="meta")
        places, weight = divided.places(), byte_strides(out)
        told = {
            **{name: getattr(divided, name) for name in OF_DIVISIONS},
            **{name: places[name] for name in ("outputs_strip", "lines_strip", "tiles", "spare", "sums")},
            **self._functions(divided, weight), **self._axes(divided, byte_strides(x), byte_strides(y)),
            "channels": p.in_channels, "outputs": p.out_channels, "all_images": divided.grid.images,
            "taps": len(divided.grid.taps), "regions": len(divided.regions),
            "x_row": divided.parts * divided.x_apart, "y_row": divided.parts * divided.y_apart,
            "tile": divided.tile_bytes, "output": weight[0], "partial": p.nbytes("w") if self._partial else 0,
            "adds": int(p.accumulate and self._partial is None),
            "sum_step": divided.sums_bytes if divided.adds_strips else 0,
        }  # fmt: skip
        numbers: dict[int, int] = {}
        for name, value in told.items():
            values = value if isinstance(value, list) else [value]
            numbers |= {GRADIENT[name] + i: each for i, each in enumerate(values)}
        self._data = kernel_data(divided.units, places["size"], numbers_array(numbers, GRADIENT_NUMBERS))

    def _table(self, numbers: Iterable[int]) -> int:
        """The address of a table of integers, which stays as long as this does."""
        self._tables.append(np.array(list(numbers), dtype=np.int64))
        return int(self._tables[-1].ctypes.data)

    def _functions(self, divided: Division, weight: list[int]) -> dict[str, int]:
        """The addresses of the kernel's functions, and of the tables that say where sums are written."""
        from tilewise.kernels.cpu.tile_registers.compiling import load_split_gradients

        p, grid = divided.p, divided.grid
        down, along = [0] * (2 - p.dims) + weight[2:-1], weight[-1]
        down_step = down[0]
        places = [i % p.in_channels * weight[1] + i // p.in_channels * along for i in range(divided.sources)]
        places += places[-1:] * (-len(places) % WIDE)
        taps = [i * down_step + j * along for *_, i, j in grid.taps]
        order = sorted(range(len(taps)), key=taps.__getitem__)
        turned = len(taps) > 1 and [taps[i] for i in order] == [NUMBER * i for i in range(len(taps))]
        if turned and divided.line_taps == 1:
            lies = [SUM_TILES * TILE * i for i in order]
            written, writes = [len(lies), *lies, *lies[:1] * (-len(lies) % LANES)], "turned"
        else:
            near = weight[1] == NUMBER and divided.line_taps == 1
            written, writes = [len(taps), int(near), *taps], "scattered"
        stride, vectors = grid.width.stride, _vectors(divided.width)
        x = ("lines", (stride if stride <= SHIFTED else 0, vectors)) if lies_in_planes(p, "x") else ("pixels", ())
        y = ("lines", (1, vectors)) if lies_in_planes(p, "y") else ("pixels", ())
        with numba_reasons():
            self._kernel, *functions = load_split_gradients(divided.parts, x, y, writes)
        counts = {
            f"{role}_count": -(-divided.width // (LANES * (vectors if lies_in_planes(p, role) else 1)))
            for role in "xy"
        }  # fmt: skip
        names = "x_lines", "y_lines", "pairs", "other_pairs", "products", "additions", "writes"
        neighbours = divided.line_taps == 1 and weight[1] == NUMBER * len(taps) and (turned or len(taps) == 1)
        return {
            **dict(zip(names, functions, strict=True)), **counts, "places": self._table(places),
            "written": self._table(written), "span": NUMBER * len(taps) if neighbours else 0,
        }  # fmt: skip

    def _axes(self, divided: Division, x: list[int], y: list[int]) -> dict[str, int | list[int]]:
        """The grid's axes, and the tables of its taps, of its lines and of its columns."""
        p, grid = divided.p, divided.grid
        sides = grid.height, grid.width
        (x, x_channel), (y, y_channel) = (image_strides(p, *role, grid.flat) for role in (("x", x), ("y", y)))
        table = []
        for (region, *_), distance in zip(grid.taps, divided.distances, strict=True):
            place = divided.regions.index((region, distance % 2))
            table.append(place * divided.region_bytes + distance // 2 * PAIR)
        regions = []
        for region, odd in divided.regions:
            way, column = grid.regions[region]
            offset, begin, end = grid.height.ways[way]
            again = odd == 1 and (region, 0) in divided.regions
            regions.append((offset * x[1], begin, end, column, odd + again))
        variants = [(way[0] * x[2], *way[1:]) for way in grid.width.ways]
        assert all(len(each) == REGION_NUMBERS for each in regions)
        assert all(len(each) == VARIANT_NUMBERS for each in variants)
        return {
            "begin": [side.first for side in sides], "end": [side.last for side in sides],
            "ahead": [side.least for side in sides],
            "x": [x[0], x[1] * grid.height.stride, x[2] * grid.width.stride, x_channel],
            "y": [*y, y_channel],
            "table": self._table(table), "region_table": self._table(n for each in regions for n in each),
            "variants": self._table(n for each in variants for n in each),
        }  # fmt: skip

    def run(
        self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the kernel, and add the sums of its shares where there are several."""
        assert out is not None
        assert workspace is not None
        data, target = self._data.copy(), out
        if self._partial is not None:
            begin = int(data[5]) * self._threads
            size = NUMBER * math.prod(self._partial)
            target = workspace[begin : begin + size].view(torch.float32).view(self._partial)
        start(self._kernel, data, self._threads, self._openmp, workspace.data_ptr(), x.data_ptr(), y.data_ptr(),
              target.data_ptr())  # fmt: skip
        if self._partial is None:
            return out
        if not self._add:
            return torch.sum(target, 0, out=out)
        for share in target:
            out.add_(share)
        return out
