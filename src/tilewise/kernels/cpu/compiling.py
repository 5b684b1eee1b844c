"""Loads kernels: Numba compiles them for this machine, or they are read from disk where that was done before.

The makers of kernels are imported only where a kernel is compiled, because they need Numba.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.kernels.building.elsewhere import compiled_elsewhere
from tilewise.kernels.building.objects import Code, address, undefined
from tilewise.kernels.cpu.channels_last.told import word_of

__all__ = [
    "LOCK", "DirectKernel", "Kernel", "Made", "address_of", "load", "load_custom", "load_direct", "load_fused_lowering",
    "load_lrn", "load_pooling", "load_recurrent", "load_thin", "load_winograd", "sandwiches_of", "words_of",
]  # fmt: skip

LOCK = threading.Lock()
"""Held while kernels are compiled."""


class Kernel(NamedTuple):
    """The addresses of the Fourier kernel ``run`` and of the functions that it calls."""

    run: int
    passes: int
    moves: int


class DirectKernel(NamedTuple):
    """The addresses of the kernel of direct convolutions, ``run``, and of the functions that it calls."""

    run: int
    rows: int
    sums: int


Made = tuple[Any, int]
"""A function for Numba and the number of its integer arguments; 0 where its argument is an address of integers."""


def address_of(name: str, make: Callable[[], Made]) -> int:
    """The address of the compiled function that ``make`` returns; ``name`` tells it from others in the cache."""

    def code() -> Code:
        from numba.core import types

        from tilewise.kernels.cpu.emitting import emitted

        function, words = make()
        machine_code, entry = emitted(function, (types.int64,) * words if words else (types.CPointer(types.int64),))
        return Code(machine_code, entry, undefined(machine_code))

    return address(name, code)


def words_of(*arguments: Any) -> str:
    """The name of a function that was made with ``arguments``."""
    return "_".join(map(str, arguments))


@functools.cache
def _winograd(lanes: int, finishes: bool) -> int:
    """The address of the Winograd worker, of one that ``finishes`` results or of one that at most adds a bias."""

    def make() -> Made:
        from tilewise.kernels.cpu.winograd.winograd import winograd

        return winograd(lanes, finishes), 0

    return address_of(words_of("winograd", lanes, *["finishing"] * finishes), make)


@functools.cache
def _finished_out(lanes: int, activation: str) -> int:
    """The address of what writes finished results from vectors of channels."""

    def make() -> Made:
        from tilewise.kernels.cpu.winograd.strips import finished_out

        return finished_out(lanes, activation), 9

    return address_of(words_of("finished_out", lanes, word_of(activation)), make)


@functools.cache
def sandwiches_of(lanes: int, name: str, rows: tuple[int, int], columns: tuple[int, int], back: bool) -> int:
    """The address of the transform ``name`` of planes; with ``back`` by the transposed matrices."""
    words = words_of(name, *rows, *columns, "back" if back else "to")

    def make() -> Made:
        from tilewise.kernels.cook_toom import transforms, turned
        from tilewise.kernels.cpu.winograd.sandwiches import sandwiches

        left, right = (getattr(transforms(*axis), name) for axis in (rows, columns))
        return sandwiches(lanes, words, *((turned(left), turned(right)) if back else (left, right))), 9

    return address_of(words_of("sandwiches", lanes, words), make)


@functools.cache
def _products(lanes: int, vectors: int, rows: int) -> int:
    """The address of the products of transformed tiles."""

    def make() -> Made:
        from tilewise.kernels.cpu.winograd.products import products

        return products(lanes, vectors, rows), 8

    return address_of(words_of("products", lanes, vectors, rows), make)


@compiled_elsewhere
def load_winograd(
    lanes: int,
    m: tuple[int, int, int],
    r: tuple[int, int, int],
    vectors: int,
    rows: int,
    gradient: bool,
    activation: str | None = None,
) -> tuple[int, ...]:
    """The addresses of the Winograd worker and of the functions that it calls, compiled as in :func:`load`.

    Tiles have ``m`` outputs and filters ``r`` taps along depth, height and width. The functions are the transforms of
    planes of inputs, of filters (or, for the filter's ``gradient``, of the outputs' gradient) and of sums; then the
    same transforms along the depth, 0 for tiles without depth; then the products; then what writes finished results, 0
    where no ``activation`` is given. One called ``none`` lets the worker add a residual alone.
    """
    there, back = ("output", "filter") if gradient else ("filter", "output")
    depth, height, width = zip(m, r, strict=True)
    kinds = (("input", False), (there, False), (back, True))
    with LOCK:
        addresses = [_winograd(lanes, activation is not None)]
        addresses += (sandwiches_of(lanes, name, height, width, turn) for name, turn in kinds)
        addresses += [sandwiches_of(lanes, name, depth, (1, 1), turn) if depth != (1, 1) else 0 for name, turn in kinds]
        finish = 0 if activation is None else _finished_out(lanes, activation)
        return *addresses, _products(lanes, vectors, rows), finish


@functools.cache
def _fused_lowering(finishes: bool) -> int:
    """The address of the worker of fused lowering, as for :func:`_winograd`."""

    def make() -> Made:
        from tilewise.kernels.cpu.lowering.fused_lowering import fused_lowering

        return fused_lowering(finishes), 0

    return address_of(words_of("fused_lowering", *["finishing"] * finishes), make)


@functools.cache
def _finished_pieces(lanes: int, activation: str) -> int:
    """The address of the function that writes pieces of finished planes."""

    def make() -> Made:
        from tilewise.kernels.cpu.lowering.pieces import finished_pieces

        return finished_pieces(lanes, activation), 10

    return address_of(words_of("finished_pieces", lanes, word_of(activation)), make)


@functools.cache
def _pieces(lanes: int) -> int:
    """The address of the function that moves pieces of planes."""

    def make() -> Made:
        from tilewise.kernels.cpu.lowering.pieces import pieces

        return pieces(lanes), 11

    return address_of(words_of("pieces", lanes), make)


@functools.cache
def _sums_of_products(lanes: int, vectors: int, rows: int, gradient: bool) -> int:
    """The address of the products with lowered windows, or with ``gradient`` of those of a filter's gradient."""

    def make() -> Made:
        from tilewise.kernels.cpu.lowering import correlations

        if gradient:
            return correlations.gradients(lanes, vectors, rows), 10
        return correlations.correlations(lanes, vectors, rows), 8

    return address_of(words_of("gradients" if gradient else "correlations", lanes, vectors, rows), make)


@compiled_elsewhere
def load_fused_lowering(
    lanes: int, vectors: int, rows: int, gradient: bool, activation: str | None = None
) -> tuple[int, int, int, int]:
    """The addresses of the worker of fused lowering, and of the moves and products that it calls.

    The last is that of what writes finished results, as for :func:`load_winograd`.
    """
    with LOCK:
        finish = 0 if activation is None else _finished_pieces(lanes, activation)
        products = _sums_of_products(lanes, vectors, rows, gradient)
        return _fused_lowering(activation is not None), _pieces(lanes), products, finish


@functools.cache
def _thin(lanes: int, dots: bool) -> int:
    """The address of the worker of thin products, along whose columns or with ``dots`` along whose sums vectors lie."""

    def make() -> Made:
        from tilewise.kernels.cpu.gemm import thin

        return (thin.thin_dots if dots else thin.thin_outer)(lanes), 0

    return address_of(words_of("thin", lanes, "dots" if dots else "outer"), make)


@functools.cache
def _thin_block(lanes: int, rows: int, others: int, dots: bool) -> int:
    """The address of a block of a thin product: of ``rows`` rows and ``others`` vectors, or with ``dots`` rows."""

    def make() -> Made:
        from tilewise.kernels.cpu.gemm import dots as by_dots
        from tilewise.kernels.cpu.gemm import outer as by_outer

        if dots:
            return by_dots.dots(lanes, rows, others), by_dots.WORDS
        return by_outer.outer(lanes, rows, others), by_outer.WORDS

    return address_of(words_of("dots" if dots else "outer", lanes, rows, others), make)


@compiled_elsewhere
def load_thin(lanes: int, blocks: tuple[tuple[int, int], ...], dots: bool) -> tuple[int, ...]:
    """The addresses of the worker of thin products and of its ``blocks`` of these sizes, loaded as in :func:`load`."""
    with LOCK:
        return _thin(lanes, dots), *(_thin_block(lanes, rows, others, dots) for rows, others in blocks)


@functools.cache
def _lrn(lanes: int, quarters: int, along: bool, back: bool) -> int:
    """The address of the worker of local response normalization, or with ``back`` of its gradient."""

    def make() -> Made:
        from tilewise.kernels.cpu.lrn.workers import worker

        return worker(lanes, quarters, along, back), 0

    words = "any" if quarters < 0 else quarters, "along" if along else "across", "back" if back else "to"
    return address_of(words_of("lrn", lanes, *words), make)


@compiled_elsewhere
def load_lrn(lanes: int, quarters: int, along: bool, back: bool) -> int:
    """The address of the worker of local response normalization or of its gradient, loaded as in :func:`load`.

    ``quarters`` are four times beta where that is whole, else -1. ``along``: vectors lie along channels.
    """
    with LOCK:
        return _lrn(lanes, quarters, along, back)


@functools.cache
def _pooling(lanes: int, op: str, step: int, back: bool, keep: bool) -> int:
    """The address of the worker of pooling, forward or backward."""

    def make() -> Made:
        from tilewise.kernels.cpu.pooling import backward, forward

        return (backward.backward(lanes, op, step) if back else forward.forward(lanes, op, keep, step)), 0

    return address_of(words_of("pooling", lanes, op, step, "back" if back else "keep" if keep else "to"), make)


@compiled_elsewhere
def load_pooling(lanes: int, op: str, step: int, back: bool, keep: bool) -> int:
    """The address of the worker of pooling, loaded as in :func:`load`.

    ``step`` is the distance between neighbouring windows, or 0 for vectors along channels, see
    :func:`tilewise.kernels.cpu.pooling.forward.forward`.
    """
    with LOCK:
        return _pooling(lanes, op, step, back, keep)


@functools.cache
def _recurrent(lanes: int, cell: str, back: bool) -> int:
    """The address of the worker of a recurrent layer's forward or backward pass."""

    def make() -> Made:
        from tilewise.kernels.cpu.recurrent import steps

        return (steps.backward if back else steps.forward)(lanes, cell), 0

    return address_of(words_of("recurrent", lanes, cell, "back" if back else "to"), make)


@functools.cache
def _recurrent_block(lanes: int, rows: int, vectors: int, add: bool) -> int:
    """The address of a block of a step's product, which is added to the sums or replaces them."""

    def make() -> Made:
        from tilewise.kernels.cpu.recurrent import products

        return products.products(lanes, rows, vectors, add), products.WORDS

    return address_of(words_of("recurrent_block", lanes, rows, vectors, "add" if add else "set"), make)


@compiled_elsewhere
def load_recurrent(lanes: int, cell: str, back: bool, blocks: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The addresses of the worker of a recurrent layer's steps and of its ``blocks``, loaded as in :func:`load`.

    First come all blocks that replace sums, then those that add to them.
    """
    with LOCK:
        parts = [_recurrent_block(lanes, *block, add) for add in (False, True) for block in blocks]
        return _recurrent(lanes, cell, back), *parts


def load_custom(lanes: int, cell: Any, back: bool, blocks: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """As :func:`load_recurrent`, for a :class:`~tilewise.kernels.cpu.recurrent.expressions.Cell` that a user states."""

    def make() -> Made:
        from tilewise.kernels.cpu.recurrent import custom, row_wise

        module = row_wise if cell.means else custom
        return (module.backward if back else module.forward)(lanes, cell), 0

    with LOCK:
        parts = [_recurrent_block(lanes, *block, add) for add in (False, True) for block in blocks]
        return address_of(words_of("recurrent_custom", lanes, cell.name, "back" if back else "to"), make), *parts


@functools.cache
def _load(lanes: int) -> Kernel:
    """:func:`load` without its lock."""

    def kernel() -> Made:
        from tilewise.kernels.cpu.fused_fourier.kernel import convolve

        return convolve(lanes), 0

    def passes() -> Made:
        from tilewise.kernels.cpu.fused_fourier import butterflies

        return butterflies.passes(lanes), 8

    def moves() -> Made:
        from tilewise.kernels.cpu import moves

        return moves.moves(lanes), 8

    return Kernel(
        address_of(words_of("kernel", lanes), kernel),
        address_of(words_of("passes", lanes), passes),
        address_of(words_of("moves", lanes), moves),
    )


@compiled_elsewhere
def load(lanes: int) -> Kernel:
    """The Fourier kernel for ``lanes`` lanes, compiled, or read from disk where it was compiled before.

    Raises what Numba raises.
    """
    with LOCK:
        return _load(lanes)


@functools.cache
def _load_direct(lanes: int) -> DirectKernel:
    """:func:`load_direct` without its lock."""

    def direct() -> Made:
        from tilewise.kernels.cpu.depthwise.direct import convolve_directly

        return convolve_directly(lanes), 0

    def rows() -> Made:
        from tilewise.kernels.cpu import rows

        return rows.rows(lanes), 8

    def sums() -> Made:
        from tilewise.kernels.cpu.depthwise import sums

        return sums.sums(lanes), sums.WORDS

    return DirectKernel(
        address_of(words_of("direct", lanes), direct),
        address_of(words_of("rows", lanes), rows),
        address_of(words_of("sums", lanes), sums),
    )


@compiled_elsewhere
def load_direct(lanes: int) -> DirectKernel:
    """The kernel of direct convolutions, loaded as in :func:`load`."""
    with LOCK:
        return _load_direct(lanes)
