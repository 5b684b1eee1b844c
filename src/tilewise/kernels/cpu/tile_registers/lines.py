"""Lines of images as parts of bf16 on a padded grid, for products whose depth is pixels.

The numbers of a channel follow each other as in the image, line after line, with zeros between lines. So two images on
grids of lines as long are multiplied for any distance between their pixels: one begins so many numbers later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import advanced, constant, either, looped, variable
from tilewise.kernels.cpu.tile_registers.splitting import parts_of
from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, intrinsic_of, named, transposed

__all__ = ["LINES_WORDS", "PAIRED_WORDS", "REPAIRED_WORDS", "lines", "paired", "pixels", "repaired"]

LINES_WORDS, PAIRED_WORDS, REPAIRED_WORDS = 13, 4, 3
"""The numbers of integers that :func:`lines` and :func:`pixels`, :func:`paired`, and :func:`repaired` take."""
ROW = LANES * NUMBER
"""Bytes of a vector."""


def _within(code: Code, first: ir.Value, last: ir.Value, vectors: int) -> list[ir.Value]:
    """The masks of the lanes from ``first`` on and below ``last``, of vectors that follow each other.

    They are made of bits: comparisons of vectors, and what they compare, would keep the unit of shuffles busy.
    """
    b, most = code.builder, constant(vectors * LANES)

    def shifted(count: ir.Value) -> ir.Value:
        some = b.select(b.icmp_signed(">", count, constant(0)), count, constant(0))
        return b.shl(constant(1), b.select(b.icmp_signed("<", some, most), some, most))

    bits = b.sub(shifted(last), shifted(first))  # of no lane where the second is larger: nobody asks for that
    kind, lanes = ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES)
    return [b.bitcast(b.trunc(b.lshr(bits, constant(i * LANES)), kind), lanes) for i in range(vectors)]


def _loaded(
    code: Code, step: int, vectors: int, at: ir.Value, pixel: ir.Value, ends: tuple[ir.Value, ir.Value]
) -> list[ir.Value | None]:
    """So many vectors of pixels from ``at`` on, ``step`` numbers apart, or ``pixel`` bytes where that is 0.

    Those below the first of ``ends`` and from the last one on are zeros.
    """
    b = code.builder
    if step == 1:
        masks_ = _within(code, *ends, vectors)
        return [masks.load(code, code.at(at, i * ROW), mask) for i, mask in enumerate(masks_)]
    found: list[ir.Value | None] = []
    for i in range(vectors):
        first, last = (b.sub(end, constant(i * LANES)) for end in ends)
        if not step:
            place = b.add(at, b.mul(pixel, constant(i * LANES)))
            found.append(masks.gather(code, place, pixel, masks.between(code, first, last)))
            continue
        pair = [
            masks.load(code, code.at(at, (i * step + part) * ROW), masks.between(code, first, last, part, step))
            for part in range(step)
        ]
        every = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [step * lane for lane in range(LANES)])
        found.append(b.shuffle_vector(*pair, every))
    return found


def _put(code: Code, parts: int, values: list[ir.Value | None], place: ir.Value, apart: ir.Value) -> None:
    """Write the parts of one or two vectors that follow each other; ``None`` are zeros."""
    b, kind = code.builder, ir.VectorType(ir.IntType(16), LANES * len(values))
    divided = [[None] * parts if value is None else parts_of(code, parts, value) for value in values]
    pairs = ir.VectorType(ir.IntType(16), 2 * LANES)
    odd = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [2 * i + 1 for i in range(2 * LANES)])
    for part in range(parts):
        bits = [vectors[part] for vectors in divided]
        if bits[0] is None:
            upper = ir.Constant(kind, [0] * kind.count)
        elif len(bits) == 1:
            upper = b.trunc(b.lshr(bits[0], code.whole(16)), kind)
        else:
            upper = b.shuffle_vector(*(b.bitcast(each, pairs) for each in bits), odd)
        b.store(upper, b.inttoptr(code.at(place, part, apart), kind.as_pointer()), align=HALF)


@functools.cache
def _lines(parts: int, step: int, vectors: int) -> Callable[..., None]:
    """Makes the instructions of :func:`lines`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart = arguments
        b = code.builder
        along = b.mul(pixel, constant(vectors * LANES)) if not step else constant(vectors * step * ROW)

        def write(given: bool) -> None:
            plane, base = variable(code, source), variable(code, target)
            with looped(code, channels):
                row, to = variable(code, b.load(plane)), variable(code, b.load(base))
                with looped(code, rows):
                    at, place = variable(code, b.load(row)), variable(code, b.load(to))
                    begin, end = variable(code, first), variable(code, last)
                    with looped(code, count):
                        values: list[ir.Value | None] = [None] * vectors
                        if given:
                            values = _loaded(code, step, vectors, b.load(at), pixel, (b.load(begin), b.load(end)))
                            b.store(b.add(b.load(at), along), at)
                            for counter in (begin, end):
                                advanced(code, counter, -vectors * LANES)
                        _put(code, parts, values, b.load(place), apart)
                        advanced(code, place, vectors * LANES * HALF)
                    b.store(b.add(b.load(row), line), row)
                    b.store(b.add(b.load(to), width), to)
                b.store(b.add(b.load(plane), channel), plane)
                b.store(b.add(b.load(base), pitch), base)

        # No address is made of lines that do not exist: an empty mask there would be slow.
        either(code, b.icmp_signed(">", last, first), write)

    return intrinsic_of(LANES, emit)


def lines(parts: int, step: int, vectors: int) -> Callable[..., None]:
    """Makes ``(source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart)``.

    It writes ``parts`` parts of ``rows`` lines of ``channels``. Number i of a line lies ``i * step`` numbers behind its
    beginning, or with a ``step`` of 0 ``i * pixel`` bytes. Those below ``first`` and from ``last`` on are zeros. A line
    has ``count`` times ``vectors`` vectors: what lies behind it is overwritten, so lines are written in their order.

    The first line is at ``source``, the next ``line`` bytes further, and that of the next channel ``channel`` bytes.
    They are written to ``target`` with ``width`` and ``pitch`` bytes between them, and part i ``i * apart`` bytes
    further.
    """
    block = _lines(parts, step, vectors)

    def run(source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart):
        block(source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart)

    return named(run, parts, step, vectors)


@functools.cache
def _pixels(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`pixels`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, channels, rows, count, first, last, _, line, pixel, pitch, width, apart = arguments
        b, nothing = code.builder, masks.none(code)

        def write(given: bool) -> None:
            plane, base, left = variable(code, source), variable(code, target), variable(code, channels)
            with looped(code, b.udiv(b.add(channels, constant(LANES - 1)), constant(LANES))):
                inside = masks.below(code, b.load(left))
                row, to = variable(code, b.load(plane)), variable(code, b.load(base))
                with looped(code, rows):
                    at, place = variable(code, b.load(row)), variable(code, b.load(to))
                    index = variable(code, constant(0))
                    with looped(code, count):
                        squares: list[ir.Value | None] = [None] * LANES
                        if given:
                            loaded = []
                            for i in range(LANES):
                                number = code.at(b.load(index), i)
                                exists = b.and_(
                                    b.icmp_signed(">=", number, first), b.icmp_signed("<", number, last)
                                )  # fmt: skip
                                mask = b.select(exists, inside, nothing)
                                # Of pixels that do not exist the address is that of one which does.
                                there = b.select(exists, number, first)
                                loaded.append(masks.load(code, b.add(b.load(at), b.mul(there, pixel)), mask))
                            squares = list(transposed(code, loaded))
                        for i, value in enumerate(squares):
                            _put(code, parts, [value], code.at(b.load(place), i, pitch), apart)
                        advanced(code, index, LANES)
                        advanced(code, place, LANES * HALF)
                    b.store(b.add(b.load(row), line), row)
                    b.store(b.add(b.load(to), width), to)
                advanced(code, plane, ROW)
                b.store(b.add(b.load(base), b.mul(pitch, constant(LANES))), base)
                advanced(code, left, -LANES)

        either(code, b.icmp_signed(">", last, first), write)

    return intrinsic_of(LANES, emit)


def pixels(parts: int) -> Callable[..., None]:
    """Makes what :func:`lines` makes, for channels that are neighbours in memory.

    Up to a multiple of :data:`LANES` channels are written, the last of them as zeros. A line has ``count`` vectors.
    """
    block = _pixels(parts)

    def run(source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart):
        block(source, target, channels, rows, count, first, last, channel, line, pixel, pitch, width, apart)

    return named(run, parts)


@functools.cache
def _paired() -> Callable[..., None]:
    """Makes the instructions of :func:`paired`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, blocks, pitch = arguments
        b = code.builder
        at, to = variable(code, source), variable(code, target)
        with looped(code, blocks):
            rows = [code.load(code.at(b.load(at), i, pitch)) for i in range(LANES)]
            for i, vector in enumerate(transposed(code, rows)):
                code.store(vector, code.at(b.load(to), i * ROW))
            advanced(code, at, DEPTH * HALF)
            advanced(code, to, TILE)

    return intrinsic_of(LANES, emit)


def paired() -> Callable[..., None]:
    """Makes ``(source, target, blocks, pitch)``, which turns one part of :data:`LANES` channels into tiles.

    A channel's numbers follow each other at ``source``, those of the next one ``pitch`` bytes further. A row of a tile
    has two neighbouring pixels of each channel, and ``blocks`` tiles follow each other at ``target``. So a tile may
    begin with any of their rows, which is a distance of an even number of pixels.
    """
    block = _paired()

    def run(source, target, blocks, pitch):
        block(source, target, blocks, pitch)

    return named(run)


@functools.cache
def _repaired() -> Callable[..., None]:
    """Makes the instructions of :func:`repaired`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, tiles = arguments
        b, kind = code.builder, ir.VectorType(ir.IntType(32), LANES)
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fshr.v{LANES}i32")
        at, to = variable(code, source), variable(code, target)
        with looped(code, tiles):
            rows = [b.bitcast(code.load(code.at(b.load(at), i * ROW)), kind) for i in range(LANES + 1)]
            for i in range(LANES):
                pair = b.call(function, [rows[i + 1], rows[i], code.whole(16)])
                code.store(b.bitcast(pair, code.vector), code.at(b.load(to), i * ROW))
            advanced(code, at, TILE)
            advanced(code, to, TILE)

    return intrinsic_of(LANES, emit)


def repaired() -> Callable[..., None]:
    """Makes ``(source, target, tiles)``, which pairs each pixel of tiles with its other neighbour.

    A row of them has the second pixel of a row at ``source``, and the first one of the next row. The very last pixel is
    read behind the tiles, whatever it is.
    """
    block = _repaired()

    def run(source, target, tiles):
        block(source, target, tiles)

    return named(run)
