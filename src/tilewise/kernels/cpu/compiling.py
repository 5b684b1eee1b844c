"""Kernels compiled for this machine and kept on disk.

Numba's own cache tells closures apart by their pickled contents, which differ from process to process. This one goes by
the kernel's name and the text of this package, and lies in tilewise's cache directory.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from numba.core import caching, types
from numba.core.ccallback import CFunc

from tilewise import cache
from tilewise.kernels.cpu.butterflies import passes
from tilewise.kernels.cpu.cook_toom import transforms, turned
from tilewise.kernels.cpu.correlations import correlations, gradients
from tilewise.kernels.cpu.direct import convolve_directly
from tilewise.kernels.cpu.fused_lowering import fused_lowering
from tilewise.kernels.cpu.kernel import convolve
from tilewise.kernels.cpu.moves import moves
from tilewise.kernels.cpu.pieces import pieces
from tilewise.kernels.cpu.products import products
from tilewise.kernels.cpu.rows import rows
from tilewise.kernels.cpu.sandwiches import sandwiches
from tilewise.kernels.cpu.sums import WORDS, sums
from tilewise.kernels.cpu.winograd import winograd

__all__ = ["DirectKernel", "Kernel", "load", "load_direct"]

LOCK = threading.Lock()


@functools.cache
def _stamp() -> str:
    """Of the text that kernels are made from."""
    here = Path(__file__).parent
    found = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), here.parent / "cuda" / "codelets.py"):
        found.update(path.read_bytes())
    return found.hexdigest()


class _Locator(caching._CacheLocator):
    """A kernel's place."""

    def get_cache_path(self) -> str:
        return str(cache.kernel_dir())

    def get_source_stamp(self) -> str:
        return _stamp()

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls()


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes: list[type[Any]] = [_Locator]  # noqa: RUF012


class _KernelCache(caching.FunctionCache):
    """Kernels by signature, machine and name."""

    _impl_class = _Impl

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return sig, codegen.magic_tuple(), self._py_func.__name__

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except NotADirectoryError:  # what is wrong with it is told when a kernel is to be kept
            return None
        except (OSError, EOFError, ValueError) as error:
            warnings.warn(
                f"{self.cache_path}: a compiled kernel cannot be read ({error})", RuntimeWarning, stacklevel=2
            )
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            text = f"{self.cache_path}: compiled kernels cannot be kept ({error}); TILEWISE_CACHE_DIR moves them"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class Kernel(NamedTuple):
    """Addresses: of the kernel, and of functions that it calls."""

    run: int
    passes: int
    moves: int


class DirectKernel(NamedTuple):
    """Addresses: of the kernel of direct convolutions, and of functions that it calls."""

    run: int
    rows: int
    sums: int


def _callback(function: Any, *arguments: Any) -> Any:
    found: Any = CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"})
    found._cache = _KernelCache(function)
    found.compile()
    return found


@functools.cache
def _winograd(lanes: int) -> Any:
    return _callback(winograd(lanes), types.CPointer(types.int64))


@functools.cache
def _sandwiches(lanes: int, name: str, rows: tuple[int, int], columns: tuple[int, int], back: bool) -> Any:
    left, right = (getattr(transforms(*axis), name) for axis in (rows, columns))
    words = "_".join(map(str, (name, *rows, *columns, "back" if back else "to")))
    return _callback(sandwiches(lanes, words, *((turned(left), turned(right)) if back else (left, right))),
                     *[types.int64] * 9)  # fmt: skip


@functools.cache
def _products(lanes: int, vectors: int, rows: int) -> Any:
    return _callback(products(lanes, vectors, rows), *[types.int64] * 8)


def load_winograd(
    lanes: int, m: tuple[int, int, int], r: tuple[int, int, int], vectors: int, rows: int, gradient: bool
) -> tuple[int, ...]:
    """Addresses of the worker and of the functions that it calls, as :func:`load` has it.

    Those are transforms of inputs, of filters (or of outputs' gradients) and of sums for tiles of ``m`` outputs of
    ``r`` taps along depth, height and width, each of planes; the same along the depth alone, 0 where tiles have none;
    and products.
    """
    there, back = ("output", "filter") if gradient else ("filter", "output")
    depth, height, width = zip(m, r, strict=True)
    kinds = (("input", False), (there, False), (back, True))
    with LOCK:
        found = [_winograd(lanes), *(_sandwiches(lanes, name, height, width, turn) for name, turn in kinds)]
        found += [_sandwiches(lanes, name, depth, (1, 1), turn) if depth != (1, 1) else None for name, turn in kinds]
        found.append(_products(lanes, vectors, rows))
        return tuple(0 if function is None else function.address for function in found)


@functools.cache
def _fused_lowering() -> Any:
    return _callback(fused_lowering(), types.CPointer(types.int64))


@functools.cache
def _pieces(lanes: int) -> Any:
    return _callback(pieces(lanes), *[types.int64] * 11)


@functools.cache
def _correlations(lanes: int, vectors: int, rows: int) -> Any:
    return _callback(correlations(lanes, vectors, rows), *[types.int64] * 8)


@functools.cache
def _gradients(lanes: int, vectors: int, rows: int) -> Any:
    return _callback(gradients(lanes, vectors, rows), *[types.int64] * 10)


def load_fused_lowering(lanes: int, vectors: int, rows: int, gradient: bool) -> tuple[int, int, int]:
    """Addresses of the worker, of the moves and of the products that it calls, as :func:`load` has it."""
    with LOCK:
        products_of = _gradients if gradient else _correlations
        found = _fused_lowering(), _pieces(lanes), products_of(lanes, vectors, rows)
        return found[0].address, found[1].address, found[2].address


@functools.cache
def _load(lanes: int) -> tuple[Any, ...]:
    """The compiled functions, which must live as long as their code is called."""
    return (
        _callback(convolve(lanes), types.CPointer(types.int64)),
        _callback(passes(lanes), *[types.int64] * 8),
        _callback(moves(lanes), *[types.int64] * 8),
    )


def load(lanes: int) -> Kernel:
    """The kernel for so many lanes, compiled, or read from disk where it was before. Raises what Numba raises."""
    with LOCK:
        return Kernel(*(function.address for function in _load(lanes)))


@functools.cache
def _load_direct(lanes: int) -> tuple[Any, ...]:
    return (
        _callback(convolve_directly(lanes), types.CPointer(types.int64)),
        _callback(rows(lanes), *[types.int64] * 8),
        _callback(sums(lanes), *[types.int64] * WORDS),
    )


def load_direct(lanes: int) -> DirectKernel:
    """The kernel of direct convolutions, as :func:`load` does."""
    with LOCK:
        return DirectKernel(*(function.address for function in _load_direct(lanes)))
