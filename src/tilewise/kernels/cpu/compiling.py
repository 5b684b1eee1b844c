"""Kernels compiled for this machine, by Numba, or read from disk where that was done before.

What makes a kernel is imported where it is compiled: all of it needs Numba.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.kernels.cpu.objects import Code, address, undefined

__all__ = ["DirectKernel", "Kernel", "load", "load_direct", "load_fused_lowering", "load_winograd"]

LOCK = threading.Lock()


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


Made = tuple[Any, int]
"""A function for Numba, and how many integers it takes; 0: one address of some."""


def _compiled(name: str, make: Callable[[], Made]) -> int:
    """The address of what ``make`` has."""

    def code() -> Code:
        from numba.core import types

        from tilewise.kernels.cpu.emitting import emitted

        function, words = make()
        machine_code, entry = emitted(function, (types.int64,) * words if words else (types.CPointer(types.int64),))
        return Code(machine_code, entry, undefined(machine_code))

    return address(name, code)


def _words(*arguments: Any) -> str:
    return "_".join(map(str, arguments))


@functools.cache
def _winograd(lanes: int) -> int:
    def make() -> Made:
        from tilewise.kernels.cpu.winograd import winograd

        return winograd(lanes), 0

    return _compiled(_words("winograd", lanes), make)


@functools.cache
def _sandwiches(lanes: int, name: str, rows: tuple[int, int], columns: tuple[int, int], back: bool) -> int:
    words = _words(name, *rows, *columns, "back" if back else "to")

    def make() -> Made:
        from tilewise.kernels.cook_toom import transforms, turned
        from tilewise.kernels.cpu.sandwiches import sandwiches

        left, right = (getattr(transforms(*axis), name) for axis in (rows, columns))
        return sandwiches(lanes, words, *((turned(left), turned(right)) if back else (left, right))), 9

    return _compiled(_words("sandwiches", lanes, words), make)


@functools.cache
def _products(lanes: int, vectors: int, rows: int) -> int:
    def make() -> Made:
        from tilewise.kernels.cpu.products import products

        return products(lanes, vectors, rows), 8

    return _compiled(_words("products", lanes, vectors, rows), make)


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
        found += [_sandwiches(lanes, name, depth, (1, 1), turn) if depth != (1, 1) else 0 for name, turn in kinds]
        return *found, _products(lanes, vectors, rows)


@functools.cache
def _fused_lowering() -> int:
    def make() -> Made:
        from tilewise.kernels.cpu.fused_lowering import fused_lowering

        return fused_lowering(), 0

    return _compiled("fused_lowering", make)


@functools.cache
def _pieces(lanes: int) -> int:
    def make() -> Made:
        from tilewise.kernels.cpu.pieces import pieces

        return pieces(lanes), 11

    return _compiled(_words("pieces", lanes), make)


@functools.cache
def _sums_of_products(lanes: int, vectors: int, rows: int, gradient: bool) -> int:
    def make() -> Made:
        from tilewise.kernels.cpu import correlations

        if gradient:
            return correlations.gradients(lanes, vectors, rows), 10
        return correlations.correlations(lanes, vectors, rows), 8

    return _compiled(_words("gradients" if gradient else "correlations", lanes, vectors, rows), make)


def load_fused_lowering(lanes: int, vectors: int, rows: int, gradient: bool) -> tuple[int, int, int]:
    """Addresses of the worker, of the moves and of the products that it calls, as :func:`load` has it."""
    with LOCK:
        return _fused_lowering(), _pieces(lanes), _sums_of_products(lanes, vectors, rows, gradient)


@functools.cache
def _load(lanes: int) -> Kernel:
    def kernel() -> Made:
        from tilewise.kernels.cpu.kernel import convolve

        return convolve(lanes), 0

    def passes() -> Made:
        from tilewise.kernels.cpu import butterflies

        return butterflies.passes(lanes), 8

    def moves() -> Made:
        from tilewise.kernels.cpu import moves

        return moves.moves(lanes), 8

    return Kernel(
        _compiled(_words("kernel", lanes), kernel),
        _compiled(_words("passes", lanes), passes),
        _compiled(_words("moves", lanes), moves),
    )


def load(lanes: int) -> Kernel:
    """The kernel for so many lanes, compiled, or read from disk where it was before. Raises what Numba raises."""
    with LOCK:
        return _load(lanes)


@functools.cache
def _load_direct(lanes: int) -> DirectKernel:
    def direct() -> Made:
        from tilewise.kernels.cpu.direct import convolve_directly

        return convolve_directly(lanes), 0

    def rows() -> Made:
        from tilewise.kernels.cpu import rows

        return rows.rows(lanes), 8

    def sums() -> Made:
        from tilewise.kernels.cpu import sums

        return sums.sums(lanes), sums.WORDS

    return DirectKernel(
        _compiled(_words("direct", lanes), direct),
        _compiled(_words("rows", lanes), rows),
        _compiled(_words("sums", lanes), sums),
    )


def load_direct(lanes: int) -> DirectKernel:
    """The kernel of direct convolutions, as :func:`load` does."""
    with LOCK:
        return _load_direct(lanes)
