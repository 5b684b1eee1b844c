"""Local response normalization in one pass over memory for each direction, by kernels of our own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.lrn.told import Told, constants
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.plan import Config
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.cpu_run import (
    PAGE,
    balanced_parts,
    kernel_data,
    lanes_and_threads,
    numba_missing,
    numba_reasons,
    start,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.lrn._lrn import LrnSolver, is_dense, outside, quarters_of

__all__ = ["ChannelWindow"]

NUMBER = 4
"""Bytes of an fp32 number."""
FIRST_CACHE = 2**15
"""Bytes that the lines of a strip take together, in a core's first cache."""
BLOCK_BYTES = 2**13
"""Bytes of terms that are computed before windows of them are added up, where vectors lie along channels."""
ONE_THREAD = 2**15
"""Numbers that one thread computes in less time than it takes to start others."""
EFFICIENCY = 0.25
CPU = torch.device("cpu")


class ChannelWindow(LrnSolver):
    """Squares, window, power and product in one pass; the gradient in another (Krizhevsky et al. 2012, section 3.3).

    Threads take strips of pixels. A strip's channels of one window stay in the first cache, so each number is read from
    memory once. Powers are made of square roots where ``beta`` is a multiple of 1/4. The backward pass reads x alone
    and computes the powers again, so that nothing else is kept for it.
    """

    name, version = "channel_window", 1
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    error_bound = {"ieee": 3e-6, "tf32": 3e-6}  # noqa: RUF012

    def unsupported(self, p: LrnProblem) -> list[str]:
        """Reasons: no Numba, or numbers for which a denominator may be 0 or negative, or its power beyond fp32."""
        return numba_missing() + outside(p)

    def configs(self, p: LrnProblem) -> Iterable[Config]:
        """The processor's vectors, on torch's threads and on threads of our own."""
        threads = torch.get_num_threads() if p.batch * p.channels * p.pixels > ONE_THREAD else 1
        return with_teams(Config(lanes=vector_lanes(), threads=threads))

    def workspace(self, p: LrnProblem, c: Config) -> int:
        """Bytes of the terms of a strip's windows, for each thread."""
        return 0 if p.task == "inference" else _scratch(p, integer(c, "lanes")) * integer(c, "threads")

    def cost(self, p: LrnProblem, c: Config) -> Cost:
        """x is read, and y written, which reads it first; the backward reads x and dy and writes dx likewise."""
        return Cost(p.flops, p.nbytes("x") * (3 if p.task == "inference" else 7), 1, EFFICIENCY)

    def bind(self, p: LrnProblem, c: Config, *tensors: Any, **nothing: Any) -> Run:
        """The run. Raises ``SolverUnavailable`` with Numba's reason, or for a config or strides that do not fit."""
        for tensor in tensors:
            if tensor is not None and not is_dense(p, tensor):
                raise SolverUnavailable(f"takes dense tensors in the layout {p.layout_name}")
        passes = self.passes(p, c, CPU)

        def inference(x: Tensor, y: Tensor, workspace: Tensor | None) -> Tensor:
            return passes.forward(x, y)

        def training(x: Tensor, dy: Tensor, y: Tensor, dx: Tensor, workspace: Tensor | None) -> Any:
            return passes.forward(x, y), passes.backward(x, dy, dx, workspace)

        return inference if p.task == "inference" else training

    def passes(self, p: LrnProblem, c: Config, device: torch.device) -> Passes:
        """Forward and backward apart, as a module needs them. Raises ``SolverUnavailable`` as :meth:`bind`."""
        with config_reasons(p, c):
            lanes, threads = lanes_and_threads(c)
        return Passes(p, lanes, threads, openmp=c.get("team") == "openmp")


class Passes:
    """The compiled kernels of one normalization, forward and backward.

    It holds no tensor. It may be called by several threads at a time.
    """

    __slots__ = ("_back", "_numbers", "_openmp", "_scratch", "_threads", "_to")

    def __init__(self, p: LrnProblem, lanes: int, threads: int, *, openmp: bool) -> None:
        from tilewise.kernels.cpu.compiling import load_lrn

        quarters = quarters_of(p.beta)
        along = p.layout_name == "channels_last"
        self._threads, self._openmp = threads, openmp
        self._numbers = constants(p.alpha, p.size, p.beta, p.k)
        self._scratch = _scratch(p, lanes)
        with numba_reasons():
            runs = [load_lrn(lanes, quarters, along, back) for back in (False, p.task == "training")]
        made = [_data(p, lanes, threads, self._numbers.ctypes.data, back=back) for back in (False, True)]
        self._to, self._back = zip(runs, made, strict=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the result of ``x`` into ``y`` and return it. Both are dense in the problem's layout."""
        run, data = self._to
        start(run, data.copy(), self._threads, self._openmp, 0, x.data_ptr(), 0, y.data_ptr())
        return y

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor, workspace: Tensor | None = None) -> Tensor:
        """Write the gradient of ``x`` into ``dx`` and return it, by that of the result, ``dy``.

        Without a ``workspace`` one is made.
        """
        if workspace is None:
            workspace = torch.empty(self._scratch * self._threads, dtype=torch.uint8, device="cpu")
        run, data = self._back
        addresses = workspace.data_ptr(), x.data_ptr(), dy.data_ptr(), dx.data_ptr()
        start(run, data.copy(), self._threads, self._openmp, *addresses)
        return dx


def _strip(p: LrnProblem, lanes: int, *, back: bool) -> int:
    """The most pixels of a strip whose lines stay in the first cache, whole vectors of them."""
    window = p.before + p.after + 1
    lines = 2 * window + p.before + 1 if back else window + 1
    return max(1, FIRST_CACHE // (NUMBER * lanes * lines)) * lanes


def _line(p: LrnProblem, lanes: int) -> int:
    """Bytes of a line of scratch: of a strip's pixels, or of a pixel's channels with zeros on both sides."""
    if p.layout_name == "channels_last":
        return -(-(p.before + p.channels + p.after + lanes) // lanes) * lanes * NUMBER
    return min(_strip(p, lanes, back=True), -(-p.pixels // lanes) * lanes) * NUMBER


def _block(p: LrnProblem, lanes: int) -> int:
    """Pixels that are computed at a time where vectors lie along channels."""
    return max(1, BLOCK_BYTES // _line(p, lanes))


def _scratch(p: LrnProblem, lanes: int) -> int:
    """Bytes of a thread's scratch, whole pages."""
    lines = _block(p, lanes) if p.layout_name == "channels_last" else p.before + p.after + 1
    return -(-lines * _line(p, lanes) // PAGE) * PAGE


def _data(p: LrnProblem, lanes: int, threads: int, numbers: int, *, back: bool) -> np.ndarray:
    """The description of a call, whose strips keep all threads busy."""
    if p.layout_name == "channels_last":
        pixels = p.batch * p.pixels
        vectors = -(-pixels // lanes)
        strips = balanced_parts(1, vectors, threads)
        strip = -(-vectors // strips) * lanes
        units = -(-pixels // strip)
        strips = 1
    else:
        pixels, vectors = p.pixels, -(-p.pixels // lanes)
        needed = -(-vectors // (_strip(p, lanes, back=back) // lanes))
        strips = max(needed, balanced_parts(p.batch, vectors, threads))
        strip = -(-vectors // strips) * lanes
        strips = -(-pixels // strip)
        units = p.batch * strips
    told = Told(
        channels=p.channels,
        pixels=pixels,
        before=p.before,
        after=p.after,
        strip=strip,
        strips=strips,
        block=_block(p, lanes),
        line=_line(p, lanes),
        numbers=numbers,
    )
    return kernel_data(units, _scratch(p, lanes), told.array(), header=HEADER)
