"""Numbers of fp32 as sums of two or three numbers of bf16: those of images, and filters in the order of tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import PLACE, advanced, constant, either, looped, number, variable
from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named, transposed

__all__ = ["FILL_WORDS", "PLANES_WORDS", "SPLIT_WORDS", "filled", "parts_of", "split", "split_planes"]

SPLIT_WORDS, PLANES_WORDS, FILL_WORDS = 4, 7, 9
"""The numbers of integers that :func:`split`, :func:`split_planes` and :func:`filled` take."""
UPPER, ROUND, QUIET = 0xFFFF0000, 0x8000, 0x400000


def _bits(code: Code, value: ir.Value) -> ir.Value:
    """A vector of fp32 as integers."""
    return code.builder.bitcast(value, ir.VectorType(ir.IntType(32), code.lanes))


def _rest(code: Code, value: ir.Value, part: ir.Value) -> ir.Value:
    """What a part leaves of a number; of an infinite one nothing, and of NaN NaN."""
    b = code.builder
    return b.select(b.fcmp_unordered("!=", value, part), b.fsub(value, part), code.splat(0.0))


def _of_two(code: Code, value: ir.Value) -> list[ir.Value]:
    """Two vectors of integers whose upper halves are the parts of a number, both rounded to nearest."""
    b = code.builder
    first = b.and_(b.add(_bits(code, value), code.whole(ROUND)), code.whole(UPPER))
    rest = _rest(code, value, b.bitcast(first, code.vector))
    bits = _bits(code, rest)
    rounded = b.add(bits, code.whole(ROUND))
    second = b.select(b.fcmp_unordered("uno", rest, rest), b.or_(bits, code.whole(QUIET)), rounded)
    return [first, second]


def _of_three(code: Code, value: ir.Value) -> list[ir.Value]:
    """Three vectors of integers whose upper halves are the parts of a number, which is exactly their sum."""
    b, found = code.builder, []
    for _ in range(2):
        bits = _bits(code, value)
        found.append(bits)
        value = _rest(code, value, b.bitcast(b.and_(bits, code.whole(UPPER)), code.vector))
    return [*found, _bits(code, value)]


def parts_of(code: Code, parts: int, value: ir.Value) -> list[ir.Value]:
    """As many vectors of integers as there are parts, whose upper halves are the parts."""
    return (_of_two if parts == 2 else _of_three)(code, value)


@functools.cache
def _split(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`split`."""
    size = LANES * NUMBER
    odd = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), [2 * i + 1 for i in range(2 * LANES)])
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)

    def emit(code: Code, arguments: Values) -> None:
        source, target, count, apart = arguments
        b = code.builder

        def put(vectors: list[ir.Value], at: ir.Value) -> None:
            divided = [parts_of(code, parts, vector) for vector in vectors]
            for part in range(parts):
                low, high = (b.bitcast(vector[part], halves) for vector in divided)
                place = b.inttoptr(code.at(at, part, apart), halves.as_pointer())
                b.store(b.shuffle_vector(low, high, odd), place, align=HALF)

        def read(given: bool) -> None:
            place, to = variable(code, source), variable(code, target)
            with looped(code, b.udiv(count, constant(DEPTH))):
                at = b.load(place)
                put([code.load(code.at(at, i * size)) if given else code.splat(0.0) for i in range(2)], b.load(to))
                advanced(code, place, 2 * size if given else 0)
                advanced(code, to, DEPTH * HALF)
            rest = b.urem(count, constant(DEPTH))
            with looped(code, b.zext(b.icmp_signed(">", rest, constant(0)), INT)):
                at, vectors = b.load(place), []
                for i in range(2):
                    mask = masks.below(code, b.sub(rest, constant(i * LANES)))
                    vectors.append(masks.load(code, code.at(at, i * size), mask) if given else code.splat(0.0))
                put(vectors, b.load(to))

        either(code, b.icmp_signed("!=", source, constant(0)), read)

    return intrinsic_of(LANES, emit)


def split(parts: int) -> Callable[..., None]:
    """Makes ``(source, target, count, apart)``, which writes the parts of ``count`` fp32 numbers.

    Part i of all numbers lies ``i * apart`` bytes behind ``target``. Zeros follow up to a multiple of :data:`DEPTH`.
    Where ``source`` is 0 all are zeros.
    """
    block = _split(parts)

    def run(source, target, count, apart):
        block(source, target, count, apart)

    return named(run, parts)


@functools.cache
def _split_planes(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`split_planes`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, pixels, channels, apart, distance, pitch = arguments
        b, nothing = code.builder, masks.none(code)
        blocks = b.udiv(b.add(channels, constant(DEPTH - 1)), constant(DEPTH))
        plane, column, rest = variable(code, source), variable(code, target), variable(code, channels)

        def write(place: ir.Value, at: ir.Value, left: ir.Value, given: int, full: bool) -> None:
            """Write :data:`LANES` channels of as many pixels; those that do not exist are zeros."""
            if full:
                rows = [code.load(code.at(place, i, distance)) for i in range(LANES)]
            else:
                inside = masks.below(code, left)
                count = b.load(rest)
                exists = [b.icmp_signed(">", count, constant(given + i)) for i in range(LANES)]
                rows = [
                    masks.load(code, code.at(place, i, distance), b.select(exists[i], inside, nothing))
                    for i in range(LANES)
                ]
            for i, vector in enumerate(transposed(code, rows)):
                for part, bits in enumerate(parts_of(code, parts, vector)):
                    upper = b.trunc(b.lshr(bits, code.whole(16)), ir.VectorType(ir.IntType(16), LANES))
                    there = code.at(code.at(at, i, pitch), part, apart)
                    b.store(upper, b.inttoptr(there, upper.type.as_pointer()), align=HALF)

        # Along a plane first: memory that is read in order comes ahead of its use.
        with looped(code, blocks):
            place, at, left = variable(code, b.load(plane)), variable(code, b.load(column)), variable(code, pixels)
            with looped(code, b.udiv(b.add(pixels, constant(LANES - 1)), constant(LANES))):
                for half in range(2):
                    given = half * LANES
                    enough = b.icmp_signed(">=", b.load(rest), constant(given + LANES))
                    test = b.and_(enough, b.icmp_signed(">=", b.load(left), constant(LANES)))
                    start = code.at(b.load(place), given, distance)
                    end = code.at(b.load(at), given * HALF)
                    either(code, test, functools.partial(write, start, end, b.load(left), given))
                advanced(code, place, LANES * NUMBER)
                b.store(b.add(b.load(at), b.mul(pitch, constant(LANES))), at)
                advanced(code, left, -LANES)
            b.store(b.add(b.load(plane), b.mul(distance, constant(DEPTH))), plane)
            advanced(code, column, DEPTH * HALF)
            advanced(code, rest, -DEPTH)

    return intrinsic_of(LANES, emit)


def split_planes(parts: int) -> Callable[..., None]:
    """Makes ``(source, target, pixels, channels, apart, distance, pitch)``, which splits pixels of planes.

    The numbers of a channel are neighbours at ``source``, and those of the next channel ``distance`` bytes further. The
    channels of a pixel become neighbours at ``target``, ``pitch`` bytes from those of the next pixel; zeros follow up
    to a multiple of :data:`DEPTH`. Part i of all numbers lies ``i * apart`` bytes further. Up to a multiple of
    :data:`LANES` pixels are written, the last of them as zeros.
    """
    block = _split_planes(parts)

    def run(source, target, pixels, channels, apart, distance, pitch):
        block(source, target, pixels, channels, apart, distance, pitch)

    return named(run, parts)


@functools.cache
def _filled(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`filled`."""

    def emit(code: Code, arguments: Values) -> None:
        source, table, taps, target, pitch, outputs, channels, output, channel = arguments
        b, nothing = code.builder, masks.none(code)
        inside = masks.below(code, outputs)
        given = [b.select(b.icmp_signed(">", channels, constant(i)), inside, nothing) for i in range(2)]
        entry, to = variable(code, table), variable(code, target)
        with looped(code, taps):
            place = b.add(source, number(code, b.load(entry)))
            pair = [masks.gather(code, code.at(place, i, channel), output, given[i]) for i in range(2)]
            even, odd = (parts_of(code, parts, vector) for vector in pair)
            for part in range(parts):
                both = b.or_(b.lshr(even[part], code.whole(16)), b.and_(odd[part], code.whole(UPPER)))
                code.store(b.bitcast(both, code.vector), code.at(b.load(to), part * 2 * TILE))
            advanced(code, entry, PLACE)
            b.store(b.add(b.load(to), pitch), to)

    return intrinsic_of(LANES, emit)


def filled(parts: int) -> Callable[..., None]:
    """Makes ``(source, table, taps, target, pitch, outputs, channels, output, channel)``, which writes rows of tiles.

    A row holds two neighbouring input channels for each of :data:`LANES` output channels. Output channels are
    ``output`` bytes apart at ``source`` and input channels ``channel`` bytes. Only the first ``outputs`` and
    ``channels`` of them exist, all others are zeros. ``table`` has for each of ``taps`` taps its distance from
    ``source``. The row of the next tap is ``pitch`` bytes further at ``target``, that of the next of ``parts`` parts
    two tiles.
    """
    block = _filled(parts)

    def run(source, table, taps, target, pitch, outputs, channels, output, channel):
        block(source, table, taps, target, pitch, outputs, channels, output, channel)

    return named(run, parts)
