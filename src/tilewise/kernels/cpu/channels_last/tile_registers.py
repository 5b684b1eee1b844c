"""Products of fp32 numbers by tile registers that multiply bf16 (Intel's AMX).

An fp32 number is the sum of two or three numbers of bf16: what the first one leaves is rounded again. The products of
these parts are exact in fp32, which the tile registers add up in. So the six largest products of three parts give the
accuracy of fp32, and the three largest of two parts about 3e-6 (Henry et al. 2019, "Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations"). A tile register multiplies sixteen times as many
numbers as a vector register does in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.finishing import stored
from tilewise.kernels.cpu.channels_last.loops import (
    PLACE,
    advanced,
    constant,
    either,
    intrinsic_of_any,
    looped,
    number,
    variable,
)
from tilewise.kernels.cpu.channels_last.told import DEPTH, HALF, TILE, word_of
from tilewise.kernels.cpu.channels_last.told import TILE_LANES as LANES
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, named

__all__ = ["FINISH_WORDS", "PRODUCT_WORDS", "SPLIT_WORDS", "configured", "finish", "product", "released", "split"]

PRODUCT_WORDS, SPLIT_WORDS, FINISH_WORDS = 10, 4, 7
"""The numbers of integers that :func:`product`, :func:`split` and :func:`finish` take."""
ORDER = {2: ((1, 0), (0, 0), (0, 1)), 3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2))}
"""By the number of parts: which parts of pixels and of filters are multiplied. One of each pair stays in its tile."""
SUMS, PIXELS, FILTERS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Tile registers: those of sums, of two tiles of pixels, and of two tiles of filters."""
UPPER, ROUND, QUIET = 0xFFFF0000, 0x8000, 0x400000


def _called(code: Code, name: str, *arguments: ir.Value | int) -> None:
    """Call an intrinsic of the tile registers. Numbers are registers, integers with 64 bits are addresses or steps."""
    byte, values = ir.IntType(8), []
    for position, argument in enumerate(arguments):
        if isinstance(argument, int):
            values.append(ir.Constant(byte, argument))
        else:
            is_address = position == len(arguments) - 1 if name == "ldtilecfg" else position == 1
            values.append(code.builder.inttoptr(argument, byte.as_pointer()) if is_address else argument)
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    code.builder.call(cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.x86.{name}"), values)


@functools.cache
def configured() -> Callable[..., None]:
    """Makes ``(address)``, which sets the sizes of the tile registers to those of the 64 bytes there."""
    return intrinsic_of_any(LANES, lambda code, arguments: _called(code, "ldtilecfg", arguments[0]))


@functools.cache
def released() -> Callable[..., None]:
    """Makes ``()``, which says that the tile registers are of no more use."""
    return intrinsic_of_any(LANES, lambda code, arguments: _called(code, "tilerelease"))


@functools.cache
def _product(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`product`."""

    def emit(code: Code, arguments: Values) -> None:
        first, second, pitch, apart, table, taps, blocks, filters, bias, sums = arguments
        b = code.builder
        for register in SUMS:  # every row of a tile of sums begins with the bias
            _called(code, "tileloadd64", register, code.at(bias, register % 2 * LANES * NUMBER), constant(0))
        entry, weight = variable(code, table), variable(code, filters)
        with looped(code, taps):
            offset = number(code, b.load(entry))
            places = [variable(code, b.add(start, offset)) for start in (first, second)]
            with looped(code, blocks):
                _multiplied(code, parts, [b.load(place) for place in places], (pitch, apart), b.load(weight))
                for place in places:
                    advanced(code, place, DEPTH * HALF)
                advanced(code, weight, 2 * parts * TILE)
            advanced(code, entry, PLACE)
        for register in SUMS:
            _called(code, "tilestored64", register, code.at(sums, register * TILE), constant(LANES * NUMBER))

    return intrinsic_of_any(LANES, emit)


def _multiplied(code: Code, parts: int, pixels: list[ir.Value], steps: Sequence[ir.Value], weight: ir.Value) -> None:
    """Add the products of all pairs of parts, of one tap and :data:`DEPTH` channels."""
    pitch, apart = steps
    held: tuple[int, int] = (-1, -1)
    for mine, other in ORDER[parts]:
        if mine != held[0]:
            for register, place in zip(PIXELS, pixels, strict=True):
                _called(code, "tileloadd64", register, code.at(place, mine, apart), pitch)
        if other != held[1]:
            for i, register in enumerate(FILTERS):
                place = code.at(weight, (2 * other + i) * TILE)
                _called(code, "tileloadd64", register, place, constant(LANES * NUMBER))
        held = mine, other
        for register in SUMS:
            _called(code, "tdpbf16ps", register, PIXELS[register // 2], FILTERS[register % 2])


def product(parts: int) -> Callable[..., None]:
    """Makes ``(first, second, pitch, apart, table, taps, blocks, filters, bias, sums)``, four tiles of sums.

    They are those of two tiles of pixels, whose first numbers lie at ``first`` and ``second``, with 32 outputs. The
    next pixel is ``pitch`` bytes further, and the next of ``parts`` parts of all pixels ``apart``. ``table`` has for
    each of ``taps`` taps the distance of what it reads. A tap reads ``blocks`` times :data:`DEPTH` channels. For each
    of these ``filters`` has two tiles of each part. Sums begin with ``bias``, and are written to ``sums``: two tiles of
    the first pixels, then two of the second ones.
    """
    block = _product(parts)

    def run(first, second, pitch, apart, table, taps, blocks, filters, bias, sums):
        block(first, second, pitch, apart, table, taps, blocks, filters, bias, sums)

    return named(run, parts)


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
            divided = [(_of_two if parts == 2 else _of_three)(code, vector) for vector in vectors]
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

    return intrinsic_of_any(LANES, emit)


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
def _finish(activation: str) -> Callable[..., None]:
    """Makes the instructions of :func:`finish`."""
    size = LANES * NUMBER

    def emit(code: Code, arguments: Values) -> None:
        sums, rows, out, step, other, other_step, valid = arguments
        b = code.builder
        place, to, more = (variable(code, value) for value in (sums, out, other))
        with looped(code, rows):
            at = b.load(place)
            values = [functools.partial(code.load, code.at(at, i * TILE)) for i in range(2)]
            adds = b.icmp_signed("!=", other, constant(0))
            second = b.select(adds, b.load(more), b.load(to))  # no address is read from 0
            stored(code, activation, [(b.load(to), second, values)], other, valid)
            advanced(code, place, size)
            for counter, distance in ((to, step), (more, other_step)):
                b.store(b.add(b.load(counter), distance), counter)

    return intrinsic_of_any(LANES, emit)


def finish(activation: str) -> Callable[..., None]:
    """Makes ``(sums, rows, out, step, other, other_step, valid)``, which writes ``rows`` pixels of two tiles.

    Pixels are ``step`` bytes apart at ``out``, of which ``valid`` channels are written. What is added to them lies at
    ``other``, ``other_step`` bytes apart, unless that is 0.
    """
    block = _finish(activation)

    def run(sums, rows, out, step, other, other_step, valid):
        block(sums, rows, out, step, other, other_step, valid)

    return named(run, word_of(activation))
