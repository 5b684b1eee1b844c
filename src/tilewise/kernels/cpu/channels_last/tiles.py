"""Products of pixels and filters whose sums stay in registers over all taps and channels.

The pixels of a tap are found by their addresses, so that a tile may hold any pixels: no lowered copy of an image is
made (Dukhan 2019, "The Indirect Convolution Algorithm", section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu.channels_last.finishing import stored
from tilewise.kernels.cpu.channels_last.interleaving import apart, permuted, repeated, together
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
LINE = 64
"""Bytes of a line of a cache."""
UNROLLED = 4
"""Channels that are multiplied in one pass of the inner loop."""


@functools.cache
def _tile(
    lanes: int, rows: int, vectors: int, activation: str, groups: int, outputs: int, far: bool
) -> Callable[..., None]:
    """Makes the instructions of :func:`tile`."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, taps, depth, filters, outs, others, shift, bias, valid = arguments
        b = code.builder
        first = [code.load(code.at(bias, j * size)) for j in range(vectors)]
        if groups > 1:
            first = permuted(code, first, together(groups, outputs))
        sums = [[variable(code, value) for value in first] for _ in range(rows)]
        if far:
            _prefetched(code, rows, vectors, outs, shift)
        table, weight = variable(code, pixels), variable(code, filters)
        whole = b.udiv(depth, constant(UNROLLED))
        rest = b.sub(depth, b.mul(whole, constant(UNROLLED)))
        with looped(code, taps):
            starts = [number(code, b.load(table), i) for i in range(rows)]
            place = variable(code, constant(0))
            for count, steps in ((whole, UNROLLED), (rest, 1)):
                with looped(code, count):
                    _steps(code, starts, (b.load(place), b.load(weight)), steps, sums, groups)
                    advanced(code, place, steps * groups * NUMBER)
                    advanced(code, weight, steps * vectors * size)
            advanced(code, table, rows * PLACE)
        if groups > 1:
            _by_groups(code, sums, groups, outputs)
        written(code, activation, sums, (outs, others, shift, valid))

    return intrinsic_of_any(lanes, emit)


def _by_groups(code: Code, sums: list[list[ir.Value]], groups: int, outputs: int) -> None:
    """Put sums of interleaved groups into the order of results."""
    for line in sums:
        values = permuted(code, [code.builder.load(total) for total in line], apart(groups, outputs))
        for total, value in zip(line, values, strict=True):
            code.builder.store(value, total)


def _prefetched(code: Code, rows: int, vectors: int, outs: ir.Value, shift: ir.Value) -> None:
    """Prefetch where results will be written.

    Pieces of the channels of pixels lie too far apart for the processor to see which ones follow.
    """
    for i in range(rows):
        place = code.builder.add(number(code, outs, i), shift)
        for offset in range(0, vectors * code.lanes * NUMBER, LINE):
            code.prefetch(code.at(place, offset))


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
    code: Code,
    starts: list[ir.Value],
    at: tuple[ir.Value, ir.Value],
    steps: int,
    sums: list[list[ir.Value]],
    groups: int,
) -> None:
    """Add the products of ``steps`` channels to the sums. ``at`` says how far from ``starts``, and where in filters."""
    b, vectors, size = code.builder, len(sums[0]), NUMBER * code.lanes
    place, weight = at
    places = [b.add(start, place) for start in starts]
    for k in range(steps):
        line = [code.load(code.at(weight, (k * vectors + j) * size)) for j in range(vectors)]
        for i, pixel in enumerate(places):
            factor = repeated(code, code.at(pixel, k * groups * NUMBER), groups)
            for j, value in enumerate(line):
                total = b.load(sums[i][j])
                b.store(b.call(code.fma, [factor, value, total]), sums[i][j])


def tile(
    lanes: int, rows: int, vectors: int, activation: str, groups: int = 1, outputs: int = 0, far: bool = False
) -> Callable[..., None]:
    """Makes ``(pixels, taps, depth, filters, outs, others, shift, bias, valid)``, a tile of results.

    It computes ``vectors`` vectors of channels for ``rows`` pixels. ``pixels`` is a table with the addresses of the
    pixels that each tap reads, ``rows`` for each of ``taps`` taps, and ``depth`` is the number of channels from there
    on. ``filters`` has for each tap and channel a line of ``vectors`` vectors, ``bias`` has one such line. Result i is
    written ``shift`` bytes after the address that is number i of the table ``outs``. What is added to it lies as far
    after the address that is number i of ``others``, unless that is 0. Only the first ``valid`` channels are written.
    With ``far`` results are written to memory that is in no near cache.

    With ``groups`` above 1, a power of two, a tile has ``outputs`` channels of each of so many groups. The numbers of
    the groups take turns in pixels and filters, as :func:`~tilewise.kernels.cpu.channels_last.interleaving.interleave`
    writes them: ``depth`` is the number of channels of one group. Biases and results lie group by group.
    """
    block = _tile(lanes, rows, vectors, activation, groups, outputs, far)

    def run(pixels, taps, depth, filters, outs, others, shift, bias, valid):
        block(pixels, taps, depth, filters, outs, others, shift, bias, valid)

    return named(run, lanes, rows, vectors, word_of(activation), groups, outputs, int(far))
