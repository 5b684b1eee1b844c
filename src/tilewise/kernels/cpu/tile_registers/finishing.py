"""Sums of tile registers are finished: a residual is added, an activation applied, and results are written."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import stored
from tilewise.kernels.cpu.channels_last.loops import advanced, constant, looped, variable
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.tile_registers.told import LANES, TILE
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of, named, transposed

__all__ = ["FINISH_WORDS", "finish", "finish_planes", "scatter_planes"]

FINISH_WORDS = 7
"""The number of integers that each of these functions takes."""
ROW = LANES * NUMBER
"""Bytes of a row of a tile."""


@functools.cache
def _finish(activation: str) -> Callable[..., None]:
    """Makes the instructions of :func:`finish`."""

    def emit(code: Code, arguments: Values) -> None:
        sums, rows, out, step, _, other, valid = arguments
        b = code.builder
        place, to, more = (variable(code, value) for value in (sums, out, other))
        with looped(code, rows):
            at = b.load(place)
            values = [functools.partial(code.load, code.at(at, i * TILE)) for i in range(2)]
            adds = b.icmp_signed("!=", other, constant(0))
            second = b.select(adds, b.load(more), b.load(to))  # no address is read from 0
            stored(code, activation, [(b.load(to), second, values)], other, valid)
            advanced(code, place, ROW)
            for counter in (to, more):
                b.store(b.add(b.load(counter), step), counter)

    return intrinsic_of(LANES, emit)


def finish(activation: str) -> Callable[..., None]:
    """Makes ``(sums, rows, out, step, channel, other, valid)``, which writes ``rows`` pixels of two tiles.

    Their channels are neighbours at ``out``, whatever ``channel`` is, and ``valid`` of them are written. The next pixel
    is ``step`` bytes further. What is added to them lies at ``other`` in the same way, unless that is 0.
    """
    block = _finish(activation)

    def run(sums, rows, out, step, channel, other, valid):
        block(sums, rows, out, step, channel, other, valid)

    return named(run, word_of(activation))


def _turned(code: Code, tile: ir.Value) -> None:
    """Transpose a tile in memory: its rows become those of channels."""
    rows = [code.load(code.at(tile, i * ROW)) for i in range(LANES)]
    for i, row in enumerate(transposed(code, rows)):
        code.store(row, code.at(tile, i * ROW))


def _each_channel(code: Code, arguments: Values, write: Callable[[ir.Value, ir.Value, ir.Value], None]) -> None:
    """Call ``write(values, out, other)`` with the places of each channel's row, of its results and what is added."""
    sums, _, out, _, channel, other, valid = arguments
    b = code.builder
    to, more, left = (variable(code, value) for value in (out, other, valid))
    for i in range(2):
        tile = code.at(sums, i * TILE)
        _turned(code, tile)
        place = variable(code, tile)
        full = b.icmp_signed("<", b.load(left), constant(LANES))
        with looped(code, b.select(full, b.load(left), constant(LANES))):
            write(b.load(place), b.load(to), b.load(more))
            advanced(code, place, ROW)
            for counter in (to, more):
                b.store(b.add(b.load(counter), channel), counter)
        advanced(code, left, -LANES)


@functools.cache
def _finish_planes(activation: str) -> Callable[..., None]:
    """Makes the instructions of :func:`finish_planes`."""

    def emit(code: Code, arguments: Values) -> None:
        _, rows, _, _, _, other, _ = arguments
        b = code.builder

        def write(values: ir.Value, out: ir.Value, more: ir.Value) -> None:
            second = b.select(b.icmp_signed("!=", other, constant(0)), more, out)
            stored(code, activation, [(out, second, [functools.partial(code.load, values)])], other, rows)

        _each_channel(code, arguments, write)

    return intrinsic_of(LANES, emit)


def finish_planes(activation: str) -> Callable[..., None]:
    """Makes ``(sums, rows, out, step, channel, other, valid)``, which writes ``rows`` pixels of two tiles to planes.

    Pixels are neighbours at ``out``, whatever ``step`` is, and ``valid`` channels are written, ``channel`` bytes apart.
    What is added to them lies at ``other`` in the same way, unless that is 0. The tiles are overwritten.
    """
    block = _finish_planes(activation)

    def run(sums, rows, out, step, channel, other, valid):
        block(sums, rows, out, step, channel, other, valid)

    return named(run, word_of(activation))


@functools.cache
def _scatter_planes() -> Callable[..., None]:
    """Makes the instructions of :func:`scatter_planes`."""

    def emit(code: Code, arguments: Values) -> None:
        _, rows, _, step, _, _, _ = arguments
        inside = masks.below(code, rows)
        _each_channel(
            code, arguments, lambda values, out, _: masks.scatter(code, code.load(values), out, step, inside)
        )  # fmt: skip

    return intrinsic_of(LANES, emit)


def scatter_planes(activation: str) -> Callable[..., None]:
    """Makes the function as :func:`finish_planes` does, for pixels ``step`` bytes apart and with nothing added.

    These are the gradients of a strided layer, which have no ``activation``.
    """
    block = _scatter_planes()

    def run(sums, rows, out, step, channel, other, valid):
        block(sums, rows, out, step, channel, other, valid)

    return named(run, word_of(activation))
