"""Convolution by tile registers: the compiled kernels, for tensors of fixed strides."""

from __future__ import annotations

import numpy as np
import torch

from tilewise.kernels.cpu.tile_registers.told import DEPTH, FILTER, FILTER_NUMBERS, SPLIT, SPLIT_NUMBERS, WIDE
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.cpu_run import FinishingRun, byte_strides, kernel_data, numba_reasons, numbers_array, start
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.products._split import (
    Division,
    divisions,
    filter_bytes,
    image_strides,
    lies_in_planes,
    may_use_tile_registers,
)

__all__ = ["SplitFilters", "SplitRun"]

OF_DIVISIONS = (
    "channels", "blocks", "outputs", "panels", "panel_parts", "all_images", "images", "lines", "columns", "line_parts",
    "column_parts", "rows", "panel_bytes", "apart",
)  # fmt: skip
"""The numbers of a kernel that are those of its division."""


class SplitFilters:
    """What puts the filters of all divisions into tiles, one after the other."""

    __slots__ = ("_calls", "_openmp", "_run", "_threads")

    def __init__(self, c: Config, divided: list[Division], weight: torch.Tensor) -> None:
        """Compile it, for weights with the strides of ``weight``. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.tile_registers.compiling import load_fill_filters

        p = divided[0].p
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        with numba_reasons():
            self._run, fills = load_fill_filters(divided[0].parts)
        output, channel, *taps = byte_strides(weight)
        if p.result == "x":
            output, channel = channel, output
        self._calls, place = [], 0
        for each in divided:
            numbers = {
                "channels": each.channels, "blocks": each.blocks, "outputs": each.outputs, "parts": each.parts,
                "panel_bytes": each.panel_bytes, "output": output, "channel": channel, "fills": fills,
            }  # fmt: skip
            told = {FILTER[name]: value for name, value in numbers.items()}
            for name in ("taps", "first", "step"):
                told |= dict(enumerate((getattr(axis, name) for axis in each.axes), FILTER[name]))
            told |= dict(enumerate((*[0] * (2 - p.dims), *taps), FILTER["tap"]))
            data = kernel_data(each.panels, each.places()["size"], numbers_array(told, FILTER_NUMBERS))
            if each.taps:
                self._calls.append((place, data))
            place += each.filter_bytes

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write the filters into ``kept`` in the order in which tile registers are loaded."""
        assert workspace is not None
        for place, data in self._calls:
            start(self._run, data.copy(), self._threads, self._openmp, workspace.data_ptr(), weight.data_ptr(),
                  kept.data_ptr() + place, 0)  # fmt: skip


class _Pixels(FinishingRun):
    """The compiled kernel over all units of work of a division, whose filters begin at ``place``."""

    __slots__ = ("_place", "_zeros")

    def __init__(self, c: Config, divided: Division, place: int, apart: dict[str, list[int]]) -> None:
        """``apart`` holds the byte strides of x and y by role. Raises ``SolverUnavailable`` with Numba's reason."""
        from tilewise.kernels.cpu.tile_registers.compiling import load_split_products

        p = divided.p
        super().__init__(p, c, SPLIT)
        self._place = place
        self._zeros = np.zeros(WIDE, dtype=np.float32)
        read, written = p.operands[0], p.result
        finish = "finish"
        if lies_in_planes(p, written):
            finish = "finish_planes" if divided.axes[1].apart == 1 else "scatter_planes"
        with numba_reasons():
            self._kernel, splits, products, finishes, planes = load_split_products(
                divided.parts, lies_in_planes(p, read), finish, p.activation
            )
        places = divided.places()
        x, x_channel = image_strides(p, read, apart[read], divided.flat)
        y, y_channel = image_strides(p, written, apart[written], divided.flat)
        first = sum(axis.begin * step for axis, step in zip(divided.axes, y[1:], strict=True))
        y = [y[0], *(axis.apart * step for axis, step in zip(divided.axes, y[1:], strict=True))]
        numbers = {
            **{name: getattr(divided, name) for name in OF_DIVISIONS}, "x_channel": x_channel, "y_channel": y_channel,
            "first": first, "zeros": self._zeros.ctypes.data, "strip": places["strip"], "table": places["table"],
            "sums": places["sums"], "biases": places["biases"], "splits": splits, "planes": planes,
            "products": products, "finishes": finishes, "dense": int(divided.channels % DEPTH == 0),
        }  # fmt: skip
        told = {SPLIT[name]: value for name, value in numbers.items()}
        for name, field in (("sizes", "size"), ("outs", "out"), ("taps", "taps"), ("stride", "stride"),
                            ("dilation", "dilation"), ("before", "before")):  # fmt: skip
            told |= dict(enumerate((getattr(axis, field) for axis in divided.axes), SPLIT[name]))
        told |= dict(enumerate(x, SPLIT["x"])) | dict(enumerate(y, SPLIT["y"]))
        self._numbers = kernel_data(divided.units, places["size"], numbers_array(told, SPLIT_NUMBERS))

    def filters(self, b: torch.Tensor, workspace: torch.Tensor) -> int:
        """The address of this division's filters in tiles; those of all begin at ``b``."""
        return b.data_ptr() + self._place


class SplitRun:
    """The compiled kernels of all divisions, and of filters that may change. :meth:`run` runs them."""

    __slots__ = ("_filters", "_kept", "_stages")

    def __init__(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """For tensors with these strides. Raises ``SolverUnavailable`` with Numba's reason."""
        divided = divisions(p, c)
        if not may_use_tile_registers():  # they are illegal instructions until the system is asked
            raise SolverUnavailable("this process may not use tile registers")
        self._filters = None if p.constant_weight else SplitFilters(c, divided, b)
        self._kept = filter_bytes(divided)
        apart = {p.operands[0]: byte_strides(a), p.result: byte_strides(out)}
        self._stages, place = [], 0
        for each in divided:
            self._stages.append(_Pixels(c, each, place, apart))
            place += each.filter_bytes

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *added: torch.Tensor,
    ) -> torch.Tensor:
        """Run all kernels; ``b`` is the weight, or for a constant one what was prepared of it."""
        assert out is not None
        assert workspace is not None
        if self._filters is not None:
            kept = workspace[-self._kept :]
            self._filters.prepare(b, kept, workspace)
            b = kept
        for stage in self._stages:
            stage.run(a, b, out, workspace, *added)
        return out
