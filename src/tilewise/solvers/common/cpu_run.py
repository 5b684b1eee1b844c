"""What solvers with Numba kernels on a CPU have in common.

Whether Numba is installed, its errors, the division of work among threads, the description of a call, and its start.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from tilewise.kernels.cpu.recording import recorder
from tilewise.kernels.cpu.sizes import HEADER, LANES
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.tiles import integer

__all__ = [
    "DTYPES",
    "PAGE",
    "WIDEST",
    "FinishingRun",
    "PreparedFilters",
    "PreparingRun",
    "balanced_parts",
    "byte_strides",
    "finishing",
    "kernel_data",
    "lanes_and_threads",
    "lanes_for",
    "numba_missing",
    "numba_reasons",
    "numbers_array",
    "start",
    "units_in_turn",
    "vector_lanes",
    "with_teams",
]

PAGE = 4096
"""Bytes of a page of memory: each thread's scratch is a multiple of it, so that no two threads share one."""

DTYPES = ("fp32", "bf16", "fp16")
"""Types of data in the order in which kernels number them."""

ADDRESSES = 6
"""Place in a kernel's data array from which on it holds addresses."""

MOST_UNITS = 8
"""Units of work per thread from which on it hardly matters that some threads get one more."""

WIDEST = {"AVX512": 16, "AVX2": 8}
"""fp32 lanes of a vector, by the CPU capability that torch reports; others have fewer."""


def numba_missing() -> list[str]:
    """Why Numba kernels cannot run: the package is not installed. Empty when it is."""
    import importlib.util

    return [] if importlib.util.find_spec("numba") else ["needs the package numba: pip install 'tilewise[cpu]'"]


def vector_lanes() -> int:
    """fp32 lanes of the processor's vectors, as far as kernels use them."""
    return WIDEST.get(torch.backends.cpu.get_cpu_capability(), LANES[-1])


def lanes_for(channels: int) -> int:
    """Lanes of vectors of ``channels``: the processor's, or the fewest where channels would leave most of them empty.

    There are only these two, as kernels are compiled for each number of lanes.
    """
    return LANES[-1] if channels <= LANES[-1] else vector_lanes()


def lanes_and_threads(c: Config) -> tuple[int, int]:
    """The lanes of vectors and the threads of a config. Raises ``ValueError`` for lanes that no kernel has."""
    lanes = integer(c, "lanes")
    if lanes not in LANES:
        raise ValueError(f"lanes={lanes}: one of {', '.join(map(str, LANES))} would do")
    return lanes, integer(c, "threads")


def with_teams(base: Config) -> list[Config]:
    """``base`` on torch's threads, where it has OpenMP, and on threads of our own; ``base`` itself for one thread."""
    if base["threads"] == 1:
        return [base]
    return [Config(**base, team=team) for team in (("openmp", "own") if has_openmp() else ("own",))]


def balanced_parts(blocks: int, items: int, threads: int) -> int:
    """Into how many parts to divide the ``items`` of each of ``blocks``, so that all threads are equally busy.

    A part of a block is a unit of work. There are no more parts than are needed for that.
    """
    for parts in range(1, items + 1):
        if blocks * parts % threads == 0 or blocks * parts >= MOST_UNITS * threads:
            return parts
    return items


def units_in_turn(units: int, threads: int) -> float:
    """How many of ``units`` equal units of work the busiest of ``threads`` threads does, one after the other."""
    return -(-units // threads) if units < MOST_UNITS * threads else units / threads


def byte_strides(tensor: torch.Tensor) -> list[int]:
    """The tensor's strides in bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]


def finishing(p: ConvProblem) -> str | None:
    """The activation that a kernel is compiled with, ``none`` for a residual alone; ``None`` where there is neither."""
    return p.activation if p.residual or p.activation != "none" else None


def numbers_array(numbers: Mapping[int, int], count: int) -> np.ndarray:
    """An int64 array of ``count`` numbers: those of ``numbers`` at the places given there, all others 0."""
    array = np.zeros(count, dtype=np.int64)
    for place, number in numbers.items():
        array[place] = number
    return array


def kernel_data(units: int, scratch: int, *numbers: np.ndarray, header: int = HEADER) -> np.ndarray:
    """The int64 array that describes a kernel's call: ``header`` integers of its start, then the kernel's ``numbers``.

    The first ones say how many ``units`` of work there are and how many bytes of ``scratch`` a thread has.
    """
    data = np.concatenate([np.zeros(header, dtype=np.int64), *numbers])
    data[3:6] = units, len(data), scratch
    return data


def start(run: int, data: np.ndarray, threads: int, openmp: bool, *addresses: int) -> None:
    """Run a compiled kernel over all its units of work on at most ``threads`` threads, and on no more than torch has.

    ``run`` is the address of the kernel's machine code. ``data`` is the int64 array that describes the call: its
    threads count finished units in it, so each call needs its own copy. ``addresses`` are those of scratch, operands
    and result; they are written into ``data`` from place :data:`ADDRESSES` on. Further addresses in ``data`` may be
    those of a tensor of the call, of ``data`` itself, and of what the solver keeps as long as it is bound: native code
    writes all others anew at each call.
    """
    recorder.hold(data)
    data[1] = count = min(threads, torch.get_num_threads())
    data[ADDRESSES : ADDRESSES + len(addresses)] = addresses
    share_out(run, data.ctypes.data, count, openmp)


@contextlib.contextmanager
def numba_reasons() -> Iterator[None]:
    """Turn what Numba and LLVM raise, which have error types of their own, into ``SolverUnavailable``."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error


class FinishingRun:
    """A compiled kernel that computes with filters in a form of its own, and adds bias and residual as it writes.

    :meth:`run` is a :data:`~tilewise.solvers.base.Run`. Subclasses set ``_kernel``, the address of the machine code,
    and ``_numbers``, which describe the call. The workspace begins with the scratch of all threads.
    """

    __slots__ = ("_added", "_kernel", "_numbers", "_openmp", "_own_filters", "_threads")
    _kernel: int
    _numbers: np.ndarray

    def __init__(self, p: ConvProblem, c: Config, places: Mapping[str, int]) -> None:
        """``places`` says where the addresses of ``bias`` and ``residual`` are among the kernel's numbers."""
        self._threads, self._openmp = integer(c, "threads"), c.get("team") == "openmp"
        self._added = [HEADER + places[name] for name in ("bias", "residual") if getattr(p, name)]
        self._own_filters = "w" in p.operands and not p.constant_weight

    def filters(self, b: torch.Tensor, workspace: torch.Tensor) -> int:
        """The address of the second operand as the kernel takes it: ``b``, which for a constant filter was prepared."""
        return b.data_ptr()

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *added: torch.Tensor,
    ) -> torch.Tensor:
        """Run the kernel; ``b`` is the problem's operand, or for a constant filter what was prepared.

        ``added`` are the bias and the residual, as far as the problem has them.
        """
        assert out is not None
        assert workspace is not None
        filters = self.filters(b, workspace)
        data = self._numbers.copy()
        for place, tensor in zip(self._added, added, strict=True):
            data[place] = tensor.data_ptr()
        self.compute(data, a.data_ptr(), filters, out, workspace)
        return out

    def compute(self, data: np.ndarray, a: int, filters: int, out: torch.Tensor, workspace: torch.Tensor) -> None:
        """Write the result by the kernel's call that ``data`` describes."""
        self.start(data, workspace, a, filters, out.data_ptr())

    def start(self, data: np.ndarray, workspace: torch.Tensor, a: int, b: int, out: int) -> None:
        """Start the kernel with ``data``, which no other call may use, on operands and result at these addresses."""
        start(self._kernel, data, self._threads, self._openmp, workspace.data_ptr(), a, b, out)

    def behind_scratch(self, workspace: torch.Tensor) -> torch.Tensor:
        """The workspace behind the scratch of all threads."""
        return workspace[int(self._numbers[5]) * self._threads :]


class PreparingRun(FinishingRun, abc.ABC):
    """The same for a kernel whose filters are written behind the scratch by each run, unless they are constant."""

    __slots__ = ()

    @abc.abstractmethod
    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write all filters into ``kept`` in the kernel's form: a :data:`~tilewise.solvers.base.Prepare`."""

    def filters(self, b: torch.Tensor, workspace: torch.Tensor) -> int:
        """The address of the second operand as the kernel takes it: ``b``, or filters that are written now."""
        if not self._own_filters:
            return b.data_ptr()
        behind = self.behind_scratch(workspace)
        self.prepare(b, behind, workspace)
        return behind.data_ptr()


class PreparedFilters(PreparingRun):
    """The same for a kernel that writes its filters by a call of its own: ``_filters`` describe that call."""

    __slots__ = ("_filters",)

    def tell(self, kernel: int, numbers: np.ndarray, other: Mapping[int, int]) -> None:
        """Set the address of the kernel's machine code and the ``numbers`` that describe its calls.

        ``other`` holds the places and values that differ in the description of the call that writes filters.
        """
        self._kernel, self._numbers, self._filters = kernel, numbers, numbers.copy()
        for place, value in other.items():
            self._filters[place] = value

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """Write all filters into ``kept`` in the form that the kernel computes with."""
        assert workspace is not None
        self.start(self._filters.copy(), workspace, 0, weight.data_ptr(), kept.data_ptr())
