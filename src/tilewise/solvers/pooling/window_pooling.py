"""Pooling on a CPU by a compiled kernel: one pass over memory forward, and one backward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.sizes import HEADER, LANES
from tilewise.plan import Config
from tilewise.problems.base import dense_strides
from tilewise.problems.pooling.problem import PoolingProblem
from tilewise.solvers.common.cpu_run import (
    kernel_data,
    lanes_and_threads,
    numba_missing,
    numba_reasons,
    start,
    vector_lanes,
    with_teams,
)
from tilewise.solvers.common.tiles import config_reasons
from tilewise.solvers.pooling._pooling import Pooler, PoolingSolver
from tilewise.solvers.pooling._tables import geometry_of, told_backward, told_forward

MOST_KEPT = 256
"""Elements of a window whose numbers fit into a byte."""
LONGEST = 2**20
"""Kernels take a first element and a count in one number: each is below this."""
ONE_THREAD = 2**16
"""Bytes that one thread moves in less time than it takes to start others."""
UNITS = 8
"""Units of work for each thread, so that none waits long for another."""


class WindowPooling(PoolingSolver):
    """Every result from its whole window at once, in vectors along the width or along contiguous channels.

    For the backward of a maximum a byte of each result says which element of its window it was, where torch keeps an
    index of 8 bytes. The input's gradient is gathered: each number is written once, and nothing is set to zero first.
    """

    name, version = "window_pooling", 1
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    kept_bytes = 1
    error_bound = {"ieee": 1e-6, "tf32": 1e-6}  # noqa: RUF012 - declared by the base class

    def unsupported(self, p: PoolingProblem) -> list[str]:
        """Reasons: no Numba, a window too large for a byte, or an axis too long for the kernel's numbers."""
        reasons = numba_missing()
        if p.op == "max" and p.task == "training" and p.window > MOST_KEPT:
            reasons.append(f"keeps a byte for each result: for windows of up to {MOST_KEPT} elements, not {p.window}")
        if max(*p.space, *p.kernel, *p.stride) >= LONGEST:
            reasons.append(f"is for sizes below {LONGEST}, not {max(*p.space, *p.kernel, *p.stride)}")
        return reasons

    def configs(self, p: PoolingProblem) -> Iterable[Config]:
        """The widest vectors that a row fills, and the next narrower ones, on torch's threads and on ours."""
        threads = torch.get_num_threads() if p.bytes > ONE_THREAD else 1
        extent = p.channels if p.layout_name == "channels_last" else p.pooled_space[-1]
        offered = [lanes for lanes in LANES if lanes <= vector_lanes()]
        filled = [lanes for lanes in offered if lanes <= max(extent, LANES[-1])]
        wider = [lanes for lanes in offered if lanes not in filled and lanes < 2 * extent][-1:]
        for lanes in (*wider, *filled[:1]):
            yield from with_teams(Config(lanes=lanes, threads=threads))

    def pooler(self, p: PoolingProblem, c: Config, device: torch.device) -> Pooler:
        """The compiled kernels. Raises ``SolverUnavailable`` with Numba's reason, or for a config that is none."""
        with config_reasons(p, c):
            lanes, threads = lanes_and_threads(c)
        return _Kernels(p, lanes, threads, c.get("team") == "openmp")


class _Kernels:
    """The compiled forward, and for training the backward."""

    __slots__ = ("_arrays", "_backward", "_forward", "_openmp", "_p", "_strides", "_threads")

    def __init__(self, p: PoolingProblem, lanes: int, threads: int, openmp: bool) -> None:
        from tilewise.kernels.cpu.compiling import load_pooling

        g = geometry_of(p)
        self._p, self._threads, self._openmp = p, threads, openmp
        step = 0 if g.along else min(g.stride[2], 3)
        training = p.task == "training"
        keep = training and p.op == "max"
        with numba_reasons():
            forward = load_pooling(lanes, p.op, step, False, keep)
            backward = load_pooling(lanes, p.op, step, True, False) if training else 0
        written = g.items * g.results[0] * g.results[1]
        told, self._arrays = told_forward(g, _share(written, threads))
        self._forward = forward, _data(told.lines, told.share, told.numbers())
        self._backward = backward, self._forward[1]
        if training:
            told, arrays = told_backward(g, _share(g.items * g.space[0] * g.space[1], threads))
            self._arrays += arrays
            self._backward = backward, _data(told.lines, told.share, told.numbers())
        self._strides = {role: dense_strides(p.shape(role), p.layout(role)) for role in p.roles}

    def forward(self, x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As :meth:`Pooler.forward`."""
        p = self._p
        y = torch.empty_strided(p.shape("y"), self._strides["y"], dtype=torch.float32, device="cpu")
        saved: tuple[Tensor, ...] = ()
        if p.op == "max" and p.task == "training":
            saved = (torch.empty(y.numel(), dtype=torch.uint8, device="cpu"),)
        self._start(self._forward, x, y, saved)
        return y, saved if keep else ()

    def backward(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """As :meth:`Pooler.backward`."""
        dx = torch.empty_strided(self._p.shape("dx"), self._strides["dx"], dtype=torch.float32, device="cpu")
        self._start(self._backward, dy, dx, saved)
        return dx

    def _start(self, kernel: tuple[int, np.ndarray], read: Tensor, written: Tensor, kept: tuple[Tensor, ...]) -> None:
        """Start a kernel with a copy of its description."""
        run, numbers = kernel
        data = numbers.copy()
        told = data.ctypes.data + 8 * HEADER
        bytes_at = kept[0].data_ptr() if kept else 0
        start(run, data, self._threads, self._openmp, read.data_ptr(), written.data_ptr(), bytes_at, told)


def _share(lines: int, threads: int) -> int:
    """Lines of a unit of work."""
    return lines if threads == 1 else max(1, -(-lines // (UNITS * threads)))


def _data(lines: int, share: int, numbers: np.ndarray) -> np.ndarray:
    """The array that describes a kernel's call."""
    return kernel_data(-(-lines // share), 0, numbers, header=HEADER)
