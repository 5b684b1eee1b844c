"""Products of pixels and filters whose sums stay in registers over all taps and channels.

The pixels of a tap are found by their addresses, so that a tile may hold any pixels: no lowered copy of an image is
made (Dukhan 2019, "The Indirect Convolution Algorithm", section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu.channels_last.finishing import stored
from tilewise.kernels.cpu.channels_last.loops import (
    PLACE,
    advanced,
    constant,
    intrinsic_of_any,
    looped,
    number,
    variable,
)
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, named

__all__ = ["WORDS", "tile", "written"]

WORDS = 9
"""The number of integers that :func:`tile` takes."""
UNROLLED = 4
"""Channels that are multiplied in one pass of the inner loop."""


@functools.cache
def _tile(lanes: int, rows: int, vectors: int, activation: str) -> Callable[..., None]:
    """Makes the instructions of :func:`tile`."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, taps, depth, filters, outs, others, shift, bias, valid = arguments
        b = code.builder
        first = [code.load(code.at(bias, j * size)) for j in range(vectors)]
        sums = [[variable(code, value) for value in first] for _ in range(rows)]
        table, weight = variable(code, pixels), variable(code, filters)
        whole = b.udiv(depth, constant(UNROLLED))
        rest = b.sub(depth, b.mul(whole, constant(UNROLLED)))
        with looped(code, taps):
            starts = [number(code, b.load(table), i) for i in range(rows)]
            place = variable(code, constant(0))
            for count, steps in ((whole, UNROLLED), (rest, 1)):
                with looped(code, count):
                    _steps(code, starts, b.load(place), b.load(weight), steps, sums)
                    advanced(code, place, steps * NUMBER)
                    advanced(code, weight, steps * vectors * size)
            advanced(code, table, rows * PLACE)
        written(code, activation, sums, (outs, others, shift, valid))

    return intrinsic_of_any(lanes, emit)


def written(
    code: Code, activation: str, sums: list[list[ir.Value]], to: tuple[ir.Value, ir.Value, ir.Value, ir.Value]
) -> None:
    """Write the sums of all pixels. ``to`` are the integers ``outs, others, shift, valid`` of :func:`tile`."""
    outs, others, shift, valid = to
    b = code.builder
    # Where nothing is added, the table of results stands for the other one, so that no address is read from 0.
    adding = b.icmp_signed("!=", others, constant(0))
    seconds = b.select(adding, others, outs)
    rows = [
        (
            b.add(number(code, outs, i), shift),
            b.add(number(code, seconds, i), shift),
            [functools.partial(b.load, total) for total in line],
        )
        for i, line in enumerate(sums)
    ]
    stored(code, activation, rows, others, valid)


def _steps(
    code: Code, starts: list[ir.Value], place: ir.Value, weight: ir.Value, steps: int, sums: list[list[ir.Value]]
) -> None:
    """Add the products of ``steps`` channels to the sums."""
    b, vectors, size = code.builder, len(sums[0]), NUMBER * code.lanes
    places = [b.add(start, place) for start in starts]
    for k in range(steps):
        line = [code.load(code.at(weight, (k * vectors + j) * size)) for j in range(vectors)]
        for i, at in enumerate(places):
            factor = code.broadcast(code.at(at, k * NUMBER))
            for j, value in enumerate(line):
                total = b.load(sums[i][j])
                b.store(b.call(code.fma, [factor, value, total]), sums[i][j])


def tile(lanes: int, rows: int, vectors: int, activation: str) -> Callable[..., None]:
    """Makes ``(pixels, taps, depth, filters, outs, others, shift, bias, valid)``, a tile of results.

    It computes ``vectors`` vectors of channels for ``rows`` pixels. ``pixels`` is a table with the addresses of the
    pixels that each tap reads, ``rows`` for each of ``taps`` taps, and ``depth`` is the number of channels from there
    on. ``filters`` has for each tap and channel a line of ``vectors`` vectors, ``bias`` has one such line. Result i is
    written ``shift`` bytes after the address that is number i of the table ``outs``. What is added to it lies as far
    after the address that is number i of ``others``, unless that is 0. Only the first ``valid`` channels are written.
    """
    block = _tile(lanes, rows, vectors, activation)

    def run(pixels, taps, depth, filters, outs, others, shift, bias, valid):
        block(pixels, taps, depth, filters, outs, others, shift, bias, valid)

    return named(run, lanes, rows, vectors, word_of(activation))
