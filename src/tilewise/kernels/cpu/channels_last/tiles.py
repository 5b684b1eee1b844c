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
from tilewise.kernels.cpu.channels_last.loops import PLACE, advanced, constant, looped, number, variable
from tilewise.kernels.cpu.channels_last.told import AHEAD, UNROLLED, word_of
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of, named

__all__ = ["WORDS", "tile", "written"]

WORDS = 9
"""The number of integers that :func:`tile` takes; with ``ahead`` two more."""
LINE = 64
"""Bytes of a line of a cache."""
PASSES = 64
"""Passes after which ``deep`` tiles add their sums to totals."""


@functools.cache
def _tile(
    lanes: int, rows: int, vectors: int, activation: str, groups: int, outputs: int, far: bool, ahead: bool, deep: bool
) -> Callable[..., None]:
    """Makes the instructions of :func:`tile`."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        pixels, taps, depth, filters, outs, others, shift, bias, valid, *following = arguments
        b = code.builder
        later = variable(code, following[0]) if ahead else None
        first = [code.load(code.at(bias, j * size)) for j in range(vectors)]
        if groups > 1:
            first = permuted(code, first, together(groups, outputs))
        sums = [[variable(code, value) for value in first] for _ in range(rows)]
        totals = [[variable(code, _zero(code)) for _ in first] for _ in range(rows)] if deep else []
        if far:
            _prefetched(code, rows, vectors, outs, shift)
        table, weight = variable(code, pixels), variable(code, filters)
        whole = b.udiv(depth, constant(UNROLLED))
        rest = b.sub(depth, b.mul(whole, constant(UNROLLED)))
        blocks = b.udiv(whole, constant(PASSES)) if deep else constant(0)
        with looped(code, taps):
            starts = [number(code, b.load(table), i) for i in range(rows)]
            place = variable(code, constant(0))

            def passes(count: ir.Value, steps: int) -> None:
                with looped(code, count):
                    if later is not None and steps == UNROLLED:
                        _prefetched_ahead(code, later, following[1])
                    _steps(code, starts, (b.load(place), b.load(weight)), steps, sums, groups)
                    advanced(code, place, steps * groups * NUMBER)
                    advanced(code, weight, steps * vectors * size)

            if deep:
                with looped(code, blocks):
                    passes(constant(PASSES), UNROLLED)
                    _moved(code, sums, totals)
            passes(b.sub(whole, b.mul(blocks, constant(PASSES))), UNROLLED)
            passes(rest, 1)
            advanced(code, table, rows * PLACE)
        if deep:
            _moved(code, totals, sums)
        if groups > 1:
            _by_groups(code, sums, groups, outputs)
        written(code, activation, sums, (outs, others, shift, valid))

    return intrinsic_of(lanes, emit)


def _zero(code: Code) -> ir.Value:
    """A vector of zeros."""
    return ir.Constant(code.vector, [0.0] * code.lanes)


def _moved(code: Code, sums: list[list[ir.Value]], to: list[list[ir.Value]]) -> None:
    """Add ``sums`` to others, and let them begin anew from zero."""
    b = code.builder
    for line, others in zip(sums, to, strict=True):
        for total, other in zip(line, others, strict=True):
            b.store(b.fadd(b.load(other), b.load(total)), other)
            b.store(_zero(code), total)


def _prefetched_ahead(code: Code, later: ir.Value, step: ir.Value) -> None:
    """Prefetch :data:`AHEAD` bytes from where ``later`` says, and let it grow by ``step``."""
    b = code.builder
    for offset in range(0, AHEAD, LINE):
        code.prefetch(code.at(b.load(later), offset))
    b.store(b.add(b.load(later), step), later)


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
    lanes: int,
    rows: int,
    vectors: int,
    activation: str,
    groups: int = 1,
    outputs: int = 0,
    far: bool = False,
    ahead: bool = False,
    deep: bool = False,
) -> Callable[..., None]:
    """Makes ``(pixels, taps, depth, filters, outs, others, shift, bias, valid)``, a tile of results.

    It computes ``vectors`` vectors of channels for ``rows`` pixels. ``pixels`` is a table with the addresses of the
    pixels that each tap reads, ``rows`` for each of ``taps`` taps, and ``depth`` is the number of channels from there
    on. ``filters`` has for each tap and channel a line of ``vectors`` vectors, ``bias`` has one such line. Result i is
    written ``shift`` bytes after the address that is number i of the table ``outs``. What is added to it lies as far
    after the address that is number i of ``others``, unless that is 0. Only the first ``valid`` channels are written.
    With ``far`` results are written to memory that is in no near cache.

    With ``ahead`` two integers follow, ``(..., valid, later, step)``: in each pass of the inner loop :data:`AHEAD`
    bytes are prefetched from ``later`` on, which then grows by ``step``. So what comes from memory next is read while
    the tile computes.

    With ``deep`` sums of :data:`PASSES` passes, 256 channels, are added to totals. Thousands of products of one sign,
    added one by one, would lose three digits.

    With ``groups`` above 1, a power of two, a tile has ``outputs`` channels of each of so many groups. The numbers of
    the groups take turns in pixels and filters, as :func:`~tilewise.kernels.cpu.channels_last.interleaving.interleave`
    writes them: ``depth`` is the number of channels of one group. Biases and results lie group by group.
    """
    block = _tile(lanes, rows, vectors, activation, groups, outputs, far, ahead, deep)

    def run(pixels, taps, depth, filters, outs, others, shift, bias, valid):
        block(pixels, taps, depth, filters, outs, others, shift, bias, valid)

    def run_ahead(pixels, taps, depth, filters, outs, others, shift, bias, valid, later, step):
        block(pixels, taps, depth, filters, outs, others, shift, bias, valid, later, step)

    words = lanes, rows, vectors, word_of(activation), groups, outputs, int(far), int(ahead), int(deep)
    return named(run_ahead if ahead else run, *words)
