"""Fused depthwise transforms on a CPU: operands as its kernels see them, and the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from tilewise.kernels.cpu.sizes import CALLED, HEADER, KEPT, LANES, NUMBERS, Planes, Signals
from tilewise.kernels.cpu.threads import has_openmp, share_out
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.cpu.compiling import Kernel

Sizes = TypeVar("Sizes", Planes, Signals)

__all__ = [
    "MOST_SCRATCH", "Units", "constant", "filter_transforms", "forms", "lanes", "missing", "numba_reasons", "scratch",
    "shares", "sizes_of", "strides", "worked_on",
]  # fmt: skip

MOST_SCRATCH = 2**24
"""Bytes of a thread from which on nothing is gained: they lie in no cache of its own."""
PAGE = 4096
DTYPES = ("fp32", "bf16", "fp16")
"""As kernels number them."""
ADDRESSES = 6
"""Where a kernel's data have addresses."""
UNITS = 8
"""Units to a thread from which on it matters little that some thread has one more."""
WIDEST = {"AVX512": 16, "AVX2": 8}
"""Lanes by what torch says that a processor can do; fewer elsewhere."""


def sizes_of(c: Config, kind: Callable[..., Sizes], dims: int) -> Sizes:
    """What the kernel of a config is made for. Raises ``KeyError`` or ``ValueError`` for what is none."""
    basis = c["basis"]
    if not isinstance(basis, tuple) or len(basis) != dims:
        raise ValueError(f"basis={basis!r}: {'one size' if dims == 1 else 'two sizes'} would do")
    sizes = kind(*basis, integer(c, "lanes"))
    if sizes.problems():
        raise ValueError(sizes.problems())
    return sizes


def missing() -> list[str]:
    """The absent Numba."""
    import importlib.util

    return [] if importlib.util.find_spec("numba") else ["needs the package numba: pip install 'tilewise[cpu]'"]


def lanes(p: ConvProblem) -> int:
    """The machine's own vectors, or the shortest where channels would leave most of them empty.

    No others, as kernels are compiled for each length.
    """
    widest = WIDEST.get(torch.backends.cpu.get_cpu_capability(), LANES[-1])
    return LANES[-1] if p.in_channels <= LANES[-1] else widest


def shares(p: ConvProblem, items: int, number: int, threads: int) -> int:
    """Into how many shares the ``items`` of ``number`` channels go, for threads equally busy.

    Each share transforms its filter, if none is kept.
    """
    blocks = -(-p.in_channels // number)
    for n in range(1, items + 1):
        if blocks * n % threads == 0 or blocks * n >= UNITS * threads:
            return n
    return items


def forms(p: ConvProblem, items: int) -> list[Config]:
    """Lanes, threads and shares for ``items`` to a channel, on torch's threads or ours.

    Shares of a filter's gradient would have to be added up.
    """
    number, threads = lanes(p), torch.get_num_threads()
    blocks = -(-p.in_channels // number)
    cut = 1 if p.pass_ is Pass.WGRAD else shares(p, items, number, threads)
    base = Config(lanes=number, threads=min(threads, blocks * cut), **({} if cut == 1 else {"shares": cut}))
    if base["threads"] == 1:
        return [base]
    return [Config(**base, team=team) for team in (("openmp", "own") if has_openmp() else ("own",))]


def filter_transforms(p: ConvProblem, c: Config) -> int:
    """How often each filter or its gradient is transformed in a call."""
    return 0 if p.constant_weight else integer(c, "shares", 1)


def worked_on(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes that one thread works on: spectra of a filter and an image, or of two images and their sum."""
    return _scratch(sizes, 3 if p.pass_ is Pass.WGRAD else 2)


def scratch(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Those of :func:`worked_on` that are a thread's own: all but a kept filter's spectrum."""
    return _scratch(sizes, 1) if p.constant_weight else worked_on(p, sizes)


def _scratch(sizes: Planes | Signals, spectra: int) -> int:
    size = 8 * sizes.lanes * (spectra * sizes.spectrum + sizes.scratch)
    return -(-size // PAGE) * PAGE


def _kept(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes of the spectrum that is kept for each block of channels."""
    return 8 * sizes.lanes * sizes.spectrum if p.constant_weight else 0


def constant(p: ConvProblem, sizes: Planes | Signals) -> int:
    """Bytes of the spectra of all filters, where they are kept."""
    return -(-p.in_channels // sizes.lanes) * _kept(p, sizes)


def strides(tensor: torch.Tensor) -> list[int]:
    """In bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]


def start(run: int, data: np.ndarray, threads: int, openmp: bool, *addresses: int) -> None:
    """Have the worker at ``run`` do all that ``data`` describes, on no more threads than torch has now.

    ``data`` is the call's own copy, as others count in theirs; ``addresses`` are of scratch, operands and result.
    """
    data[1] = count = min(threads, torch.get_num_threads())
    data[ADDRESSES : ADDRESSES + len(addresses)] = addresses
    share_out(run, data.ctypes.data, count, openmp)


class Units:
    """One kernel over all units: :meth:`run` is a :data:`~tilewise.solvers.base.Run`.

    Where it ``prepares``, :meth:`prepare` is a :data:`~tilewise.solvers.base.Prepare` instead, a unit for each block.
    """

    __slots__ = ("_data", "_offset", "_openmp", "_run", "_tables", "_threads")

    def __init__(
        self, p: ConvProblem, c: Config, sizes: Planes | Signals, numbers: Mapping[int, int],
        tables: Mapping[int, np.ndarray], places: np.ndarray, offset: int = 0, prepares: bool = False,
    ) -> None:  # fmt: skip
        """``numbers`` are the kernel's by index, ``tables`` fp32 whose addresses are among them, ``offset`` bytes from
        the image's first element to the first that counts. Raises ``SolverUnavailable`` with Numba's reason.
        """
        kernel = _compiled(sizes.lanes)
        shared = integer(c, "shares", 1)
        found = np.zeros(NUMBERS, dtype=np.int64)
        found[:7] = (
            4 + (p.dims == 1) if prepares else 2 * (p.dims == 1) + (p.pass_ is Pass.WGRAD), p.in_channels, p.batch,
            shared, p.pass_ is not Pass.DGRAD, DTYPES.index(p.dtype), DTYPES.index(p.out_dtype),
        )  # fmt: skip
        found[KEPT] = _kept(p, sizes)
        for index, value in numbers.items():
            found[index] = value
        for index, table in tables.items():
            found[index] = table.ctypes.data
        found[CALLED] = kernel.passes, kernel.moves
        self._run, self._offset, self._threads = kernel.run, offset, integer(c, "threads")
        self._openmp = c.get("team") == "openmp"
        self._tables = tuple(tables.values())  # as long as their addresses are in use
        units = -(-p.in_channels // sizes.lanes) * (1 if prepares else shared)
        header = np.zeros(HEADER, dtype=np.int64)
        header[3:6] = units, HEADER + NUMBERS + len(places), scratch(p, sizes)
        self._data = np.concatenate([header, found, places])

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
    ) -> torch.Tensor:
        """``b`` is the filter, or where that is constant what :meth:`prepare` made of it."""
        assert out is not None
        self._start(workspace, a.data_ptr() + self._offset, b.data_ptr(), out.data_ptr())
        return out

    def prepare(self, weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
        """The spectra of all blocks into ``kept``."""
        self._start(workspace, 0, weight.data_ptr(), kept.data_ptr())

    def _start(self, workspace: torch.Tensor | None, *addresses: int) -> None:
        assert workspace is not None
        start(self._run, self._data.copy(), self._threads, self._openmp, workspace.data_ptr(), *addresses)


def _compiled(lanes: int) -> Kernel:
    from tilewise.kernels.cpu.compiling import load

    with numba_reasons():
        return load(lanes)


@contextlib.contextmanager
def numba_reasons() -> Iterator[None]:
    """What Numba and LLVM raise, errors of their own, as ``SolverUnavailable`` with the reason."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error
