"""Winograd's transforms of tiles whose channels lie innermost, for as many channels at once as a vector has lanes.

No number changes its lane: a transform takes sums of whole vectors (Lavin and Gray 2016, section 4.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir

from tilewise.kernels.cook_toom import Matrix
from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import stored
from tilewise.kernels.cpu.channels_last.loops import advanced, looped, number, variable
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of, named
from tilewise.kernels.cpu.winograd.sandwiches import multiplied

__all__ = ["BACK_WORDS", "TO_WORDS", "back", "to"]

TO_WORDS, BACK_WORDS = 5, 8
"""The numbers of integers that :func:`to` and :func:`back` take."""


@functools.cache
def _to(lanes: int, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes the instructions of :func:`to`."""
    high, wide = len(rows[0]), len(columns[0])

    def emit(code: Code, arguments: Values) -> None:
        table, channels, vectors, target, apart = arguments
        b, offset = code.builder, variable(code, ir.Constant(arguments[0].type, 0))
        left, to = variable(code, channels), variable(code, target)
        with looped(code, vectors):
            mask, place = masks.below(code, b.load(left)), b.load(offset)
            half = []
            for j in range(wide):
                pixels = [b.add(number(code, table, i * wide + j), place) for i in range(high)]
                half.append(multiplied(code, rows, [masks.load(code, pixel, mask) for pixel in pixels]))
            start = b.load(to)
            for i in range(len(rows)):
                for j, value in enumerate(multiplied(code, columns, [values[i] for values in half])):
                    code.store(value, code.at(start, i * len(columns) + j, apart))
            advanced(code, offset, lanes * NUMBER)
            advanced(code, to, lanes * NUMBER)
            advanced(code, left, -lanes)

    return intrinsic_of(lanes, emit)


def to(lanes: int, name: str, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes ``(table, channels, vectors, target, apart)``, which transforms all channels of a tile of the image.

    ``table`` has the address of every pixel of the tile, row by row. ``vectors`` vectors hold the ``channels``
    channels. The vectors of a point lie side by side, those of the next point ``apart`` bytes on. ``name`` tells the
    matrices from others.
    """
    block = _to(lanes, rows, columns)

    def run(table, channels, vectors, target, apart):
        block(table, channels, vectors, target, apart)

    return named(run, lanes, name)


@functools.cache
def _back(lanes: int, activation: str, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes the instructions of :func:`back`."""
    high, wide, size = len(rows[0]), len(columns[0]), NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        source, apart, outs, others, shift, bias, valid, vectors = arguments
        b = code.builder
        start, place, line, left = (variable(code, value) for value in (source, shift, bias, valid))
        seconds = b.select(b.icmp_signed("!=", others, ir.Constant(others.type, 0)), others, outs)
        with looped(code, vectors):
            at, more, first = b.load(start), b.load(place), code.load(b.load(line))
            half = []
            for j in range(wide):
                column = [code.load(code.at(at, i * wide + j, apart)) for i in range(high)]
                half.append(multiplied(code, rows, column))
            results: list[tuple[ir.Value, ir.Value, Sequence[Callable[[], ir.Value]]]] = []
            for i in range(len(rows)):
                for j, value in enumerate(multiplied(code, columns, [values[i] for values in half])):
                    total, index = b.fadd(value, first), i * len(columns) + j
                    there, other = (b.add(number(code, table, index), more) for table in (outs, seconds))
                    results.append((there, other, [functools.partial(_same, total)]))
            stored(code, activation, results, others, b.load(left))
            for counter in (start, place, line):
                advanced(code, counter, size)
            advanced(code, left, -lanes)

    return intrinsic_of(lanes, emit)


def _same(value: ir.Value) -> ir.Value:
    """``value``."""
    return value


def back(lanes: int, name: str, activation: str, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes ``(source, apart, outs, others, shift, bias, valid, vectors)``, which transforms sums of a tile back.

    ``source`` has ``vectors`` vectors for each point, points ``apart`` bytes from each other. A result is written
    ``shift`` bytes after its address in the table ``outs``, and ``others`` is as in
    :func:`tilewise.kernels.cpu.channels_last.tiles.tile`. ``bias`` has as many vectors. Of the channels the first
    ``valid`` are written.
    """
    block = _back(lanes, activation, rows, columns)

    def run(source, apart, outs, others, shift, bias, valid, vectors):
        block(source, apart, outs, others, shift, bias, valid, vectors)

    return named(run, lanes, name, word_of(activation))
