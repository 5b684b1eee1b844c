"""Every algorithm that cuBLASLt's heuristic knows for a matrix product, not its first alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from tilewise.machine.device import torch_device
from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.gemm import _lt_library as lt
from tilewise.solvers.gemm._lt_call import (
    Call,
    Descriptors,
    Found,
    call_of,
    checked,
    config_of,
    for_any_bias,
    found,
    rebuilt,
)
from tilewise.solvers.gemm._lt_run import LtRun
from tilewise.solvers.gemm._product import ProductSolver, product_cost

__all__ = ["CublasLtGemm"]

LIMITS = (32 * 2**20, 4 * 2**20, 0)
"""Bytes of workspace for which the heuristic is asked. The most is what torch gives cuBLAS on compute capability 9."""
TILES = (16, 32, 64, 128)
"""Sizes whose multiples a larger neighbour has, whose algorithms are tried too."""
BORROWED = 4
"""Algorithms that are taken from each larger neighbour."""
STEP = 1024
"""Bytes by which the estimate of an algorithm is above that of the one before it."""


class CublasLtGemm(ProductSolver):
    """One algorithm of cuBLASLt, called directly. torch and cuBLAS take the first that the heuristic returns.

    A config has the library's own numbers: ``algo``, ``tile``, ``stages``, ``splits`` of the sums with their
    ``reduction``, ``swizzle``, ``custom``, and the shapes ``inner`` and ``cluster``; what is 0 is left out. Of several
    algorithms with equal numbers the later ones are told apart by ``twin``. The numbers mean the same in one version of
    the library: another one says so, and the config is lost.

    An activation is the library's epilogue where it has it: ReLU, and GELU by tanh.

    The heuristic is asked for 200 algorithms, with workspace and without, and for the sizes of larger neighbours, whose
    algorithms can compute sizes at which it has worse ideas of its own.

    Source: cuBLAS manual, ``cublasLtMatmulAlgoGetHeuristic``, ``cublasLtMatmulAlgoCheck``, ``cublasLtMatmul``.
    """

    name, version = "cublaslt_gemm", 1
    devices = frozenset({"cuda"})
    adds_bias = True
    activations = frozenset(lt.EPILOGUES)
    accumulates = True
    most_configs = 12
    while_it_pays = True

    def unsupported(self, p: GemmProblem) -> list[str]:
        """Reasons: no library or no such GPU here, or a type of the result that the library does not give."""
        reason = lt.missing()
        if reason:
            return [reason]
        if p.out_dtype not in (p.dtype, "fp32"):
            return [f"gives results of the operands' type or fp32, not {p.out_dtype} of {p.dtype}"]
        try:
            _index(p)
        except ValueError as error:
            return [str(error)]
        return []

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """What the heuristic returns, in its order."""
        return list(_listing(_summed(p), _index(p)))

    def offers(
        self, p: GemmProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Algorithms with their workspace. Those of ``only`` may be others that this version of the library has."""
        if only is None:
            return [(c, one.workspace) for c, one in _listing(_summed(p), _index(p)).items()]
        found = []
        for c in only:
            with contextlib.suppress(SolverUnavailable):  # it is no algorithm for this product
                found.append((c, self.workspace(p, c)))
        return found

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes that the library asks for. Raises ``SolverUnavailable`` for a config that it does not have."""
        return _algorithm(_summed(p), c, _index(p)).workspace

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The product's arithmetic and traffic, and a little for each algorithm that the heuristic puts first."""
        listing = list(_listing(_summed(p), _index(p)))
        rank = listing.index(c) if c in listing else len(listing)
        return product_cost(p, apart=STEP * rank)

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Make the descriptors for these strides.

        Raises ``SolverUnavailable`` where this version of the library has no such algorithm, or where it cannot
        compute these matrices in the workspace of the problem.
        """
        library, reason = lt.load()
        if library is None or a.device.type != "cuda" or out is None:
            raise SolverUnavailable(reason or f"a is on {a.device}: cuBLASLt runs on CUDA devices")
        device = torch.cuda.current_device() if a.device.index is None else a.device.index
        handle, known = lt.handle_for(device), _algorithm(_summed(p), c, device)
        call = call_of(p, (a.stride(), b.stride(), out.stride()))
        needed = checked(library, handle, Descriptors(library, call), known.algorithm).workspace
        if needed > known.workspace:
            raise SolverUnavailable(f"{c} needs {needed} bytes for these strides, {known.workspace} for the problem's")
        algorithms = known.algorithm, for_any_bias(library, handle, call, known)
        return LtRun(library, handle, call, algorithms, known.workspace, p.accumulate, device)


def _index(p: GemmProblem) -> int:
    """The number of the problem's GPU. Raises ``ValueError`` where there is none."""
    return torch_device(p.device).index or 0


def _summed(p: GemmProblem) -> GemmProblem:
    """The problem without what the heuristic is not told of: whether a result is added to, and other activations."""
    return replace(p, accumulate=False, activation=p.activation if p.activation in lt.EPILOGUES else "none")


def _library() -> lt.Library:
    """The library. Raises ``SolverUnavailable`` where there is none."""
    library, reason = lt.load()
    if library is None:
        raise SolverUnavailable(reason)
    return library


def _examples(p: GemmProblem) -> Call:
    """The call for the strides that the problem names."""
    return call_of(p, (p.strides("a"), p.strides("b"), p.strides("c")))


@functools.lru_cache(maxsize=1024)
def _listing(p: GemmProblem, device: int) -> dict[Config, Found]:
    """All algorithms that are offered, the most promising first."""
    library, handle = _library(), lt.handle_for(device)
    listing: dict[Config, Found] = {}
    call = _examples(p)
    for limit in LIMITS:
        for one in found(library, handle, call, limit):
            _add(listing, config_of(library, one.algorithm), one)
    descriptors = Descriptors(library, call)
    for neighbour in _neighbours(p):
        for one in found(library, handle, _examples(neighbour), LIMITS[0])[:BORROWED]:
            try:
                here = checked(library, handle, descriptors, one.algorithm)
            except SolverUnavailable:  # an algorithm for sizes that these are not
                continue
            if here.workspace <= LIMITS[0]:
                _add(listing, config_of(library, one.algorithm), here)
    return listing


def _add(listing: dict[Config, Found], c: Config, one: Found) -> None:
    """Add an algorithm under its config, or as a twin of others with this config, unless it is one of them."""
    name, count = c, 0
    while name in listing:
        if listing[name].algorithm == one.algorithm:
            return
        count += 1
        name = Config(**c, twin=count)
    listing[name] = one


def _neighbours(p: GemmProblem) -> list[GemmProblem]:
    """Dense products with rows or columns rounded up to whole tiles."""
    sizes = dict.fromkeys(
        sizes for tile in TILES for sizes in ((p.m, -(-p.n // tile) * tile), (-(-p.m // tile) * tile, p.n))
    )
    return [replace(p, m=m, n=n, leading=(0, 0, 0), alignment=(16, 16, 16)) for m, n in sizes if (m, n) != (p.m, p.n)]


@functools.lru_cache(maxsize=1024)
def _algorithm(p: GemmProblem, c: Config, device: int) -> Found:
    """The algorithm of a config: of those that are offered, or rebuilt from its numbers.

    Raises ``SolverUnavailable`` where this version of the library has none.
    """
    listing = _listing(p, device)
    if c in listing:
        return listing[c]
    if "twin" in c:
        raise SolverUnavailable(f"{c}: this version of cuBLASLt returns no such algorithm for {p.key}")
    library, handle, call = _library(), lt.handle_for(device), _examples(p)
    one = checked(library, handle, Descriptors(library, call), rebuilt(library, handle, call, c))
    if one.workspace > LIMITS[0]:
        raise SolverUnavailable(f"{c} needs {one.workspace} bytes of workspace: at most {LIMITS[0]} would do")
    return one
