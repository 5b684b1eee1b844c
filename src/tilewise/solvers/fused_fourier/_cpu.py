"""Fused depthwise transforms on a CPU: the kernel's parameters, and the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import CALLED, KEPT, NUMBERS, Planes, Signals
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.common.cpu_run import (
    DTYPES,
    PAGE,
    balanced_parts,
    kernel_data,
    lanes_for,
    numba_reasons,
    start,
    with_teams,
)
from tilewise.solvers.common.tiles import integer

if TYPE_CHECKING:
    from tilewise.kernels.cpu.compiling import Kernel

Sizes = TypeVar("Sizes", Planes, Signals)

__all__ = [
    "MOST_SCRATCH",
    "Units",
    "constant",
    "filter_transforms",
    "forms",
    "scratch",
    "sizes_of",
    "worked_on",
]

MOST_SCRATCH = 2**24
"""Bytes of scratch per thread above which this solver gains nothing: they leave the core's own cache."""


def sizes_of(c: Config, kind: Callable[..., Sizes], dims: int) -> Sizes:
    """The kernel's sizes for a config. Raises ``KeyError`` or ``ValueError`` for what is no config."""
    basis = c["basis"]
    if not isinstance(basis, tuple) or len(basis) != dims:
        raise ValueError(f"basis={basis!r}: {'one size' if dims == 1 else 'two sizes'} would do")
    sizes = kind(*basis, integer(c, "lanes"))
    if sizes.problems():
        raise ValueError(sizes.problems())
    return sizes


def forms(p: ConvProblem, items: int) -> list[Config]:
    """Lanes, threads and shares for ``items`` items per channel, on torch's threads and on threads of our own.

    Each share transforms its filter, unless the spectrum is kept. A weight gradient has one share, as shares would have
    to be added.
    """
    lanes, threads = lanes_for(p.in_channels), torch.get_num_threads()
    blocks = -(-p.in_channels // lanes)
    shares = 1 if p.pass_ is Pass.WGRAD else balanced_parts(blocks, items, threads)
    base = Config(lanes=lanes, threads=min(threads, blocks * shares), **({} if shares == 1 else {"shares": shares}))
    return with_teams(base)


def filter_transforms(p: ConvProblem, c: Config) -> int:
    """How many times a call transforms each filter or its gradient."""
    return 0 if p.constant_weight else integer(c, "shares", 1)


def worked_on(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes that one thread works on: spectra of a filter and an image, or of two images and their sum."""
    return _scratch(sizes, 3 if p.pass_ is Pass.WGRAD else 2)


def scratch(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes of one thread's scratch: :func:`worked_on` without a kept filter's spectrum."""
    return _scratch(sizes, 1) if p.constant_weight else worked_on(p, sizes)


def _scratch(sizes: Planes | Signals, spectra: int) -> int:
    """Bytes of ``spectra`` spectra and of scratch, in whole pages."""
    size = 8 * sizes.lanes * (spectra * sizes.spectrum + sizes.scratch)
    return -(-size // PAGE) * PAGE


def _kept(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes of the spectrum that is kept for each block of channels; 0 where none is."""
    return 8 * sizes.lanes * sizes.spectrum if p.constant_weight else 0


def constant(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes of all filters' spectra where they are kept."""
    return -(-p.in_channels // sizes.lanes) * _kept(p, sizes)


class Units:
    """The compiled kernel over all units of work: :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    With ``prepares`` it has a unit for each block of channels, and :meth:`prepare` is a
    :data:`~tilewise.solvers.base.Prepare` instead.
    """

    __slots__ = ("_data", "_offset", "_openmp", "_run", "_tables", "_threads")

    def __init__(
        self, p: ConvProblem, c: Config, sizes: Planes | Signals, numbers: Mapping[int, int],
        tables: Mapping[int, np.ndarray], places: np.ndarray, offset: int = 0, prepares: bool = False,
    ) -> None:  # fmt: skip
        """Fill in the kernel's parameters. Raises ``SolverUnavailable`` with Numba's reason.

        ``numbers`` are parameters by index, ``tables`` fp32 arrays by the index that holds their address. ``offset`` is
        the number of bytes from the image's first element to the first that is read.
        """
        kernel = _compiled(sizes.lanes)
        shared = integer(c, "shares", 1)
        parameters = np.zeros(NUMBERS, dtype=np.int64)
        parameters[:7] = (
            4 + (p.dims == 1) if prepares else 2 * (p.dims == 1) + (p.pass_ is Pass.WGRAD), p.in_channels, p.batch,
            shared, p.pass_ is not Pass.DGRAD, DTYPES.index(p.dtype), DTYPES.index(p.out_dtype),
        )  # fmt: skip
        parameters[KEPT] = _kept(p, sizes)
        for index, value in numbers.items():
            parameters[index] = value
        for index, table in tables.items():
            parameters[index] = table.ctypes.data
        parameters[CALLED] = kernel.passes, kernel.moves
        self._run, self._offset, self._threads = kernel.run, offset, integer(c, "threads")
        self._openmp = c.get("team") == "openmp"
        self._tables = tuple(tables.values())  # as long as their addresses are in use
        units = -(-p.in_channels // sizes.lanes) * (1 if prepares else shared)
        self._data = kernel_data(units, scratch(p, sizes), parameters, places)

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the kernel; ``b`` is the filter, or for a constant filter what :meth:`prepare` wrote."""
        assert out is not None
        self._start(workspace, a.data_ptr() + self._offset, b.data_ptr(), out.data_ptr())
        return out

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write the spectra of all blocks into ``kept``."""
        self._start(workspace, 0, weight.data_ptr(), kept.data_ptr())

    def _start(self, workspace: torch.Tensor | None, *addresses: int) -> None:
        """Start the kernel on a copy of its parameters."""
        assert workspace is not None
        start(self._run, self._data.copy(), self._threads, self._openmp, workspace.data_ptr(), *addresses)


def _compiled(lanes: int) -> Kernel:
    """The kernel for vectors of ``lanes`` numbers. Raises ``SolverUnavailable`` with Numba's reason."""
    from tilewise.kernels.cpu.compiling import load

    with numba_reasons():
        return load(lanes)
