"""Gradients of filters: sums over pixels in tile registers, and how they are written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import PLACE, advanced, constant, either, looped, number, variable
from tilewise.kernels.cpu.tile_registers.products import SUMS, by_tiles, multiplied
from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named, transposed

__all__ = ["ADD_WORDS", "GRADIENT_WORDS", "WRITE_WORDS", "added", "gradient", "owned", "scattered", "turned"]

GRADIENT_WORDS, ADD_WORDS, WRITE_WORDS = 9, 3, 8
"""The numbers of integers that :func:`gradient`, :func:`added`, and :func:`turned` and :func:`scattered` take."""
ROW = LANES * NUMBER
"""Bytes of a row of a tile."""


@functools.cache
def _gradient(parts: int) -> Callable[..., None]:
    """Makes the instructions of :func:`gradient`."""

    def emit(code: Code, arguments: Values) -> None:
        outputs, inputs, table, taps, blocks, pitch, apart, tile, sums = arguments
        b = code.builder
        entry, total = variable(code, table), variable(code, sums)
        with looped(code, taps):
            for register in SUMS:
                by_tiles(code, "tilezero", register)
            first, second = variable(code, outputs), variable(code, b.add(inputs, number(code, b.load(entry))))
            with looped(code, blocks):
                pair = [code.at(b.load(first), i * LANES, pitch) for i in range(2)]
                multiplied(code, parts, pair, (pitch, apart), b.load(second), tile)
                advanced(code, first, DEPTH * HALF)
                advanced(code, second, TILE)
            for register in SUMS:
                place = code.at(b.load(total), register * TILE)
                by_tiles(code, "tilestored64", register, place, constant(ROW))
            advanced(code, entry, PLACE)
            advanced(code, total, len(SUMS) * TILE)

    return intrinsic_of(LANES, emit)


def gradient(parts: int) -> Callable[..., None]:
    """Makes ``(outputs, inputs, table, taps, blocks, pitch, apart, tile, sums)``, four tiles of sums for each tap.

    They are those of 32 channels of the output's gradient with 32 of the input, over ``blocks`` times :data:`DEPTH`
    pixels. Numbers of an output channel follow each other, those of the next one are ``pitch`` bytes further, the next
    of ``parts`` parts ``apart`` bytes. Inputs are tiles, one for each block of 16 channels, and these follow each other
    ``tile`` bytes apart: two for each part. ``table`` has for each of ``taps`` taps the distance of its first tile.
    ``sums`` has of each tap two tiles of the first 16 output channels, then two of the others.
    """
    block = _gradient(parts)

    def run(outputs, inputs, table, taps, blocks, pitch, apart, tile, sums):
        block(outputs, inputs, table, taps, blocks, pitch, apart, tile, sums)

    return named(run, parts)


@functools.cache
def _added() -> Callable[..., None]:
    """Makes the instructions of :func:`added`."""

    def emit(code: Code, arguments: Values) -> None:
        source, target, tiles = arguments
        b = code.builder
        at, to = variable(code, source), variable(code, target)
        with looped(code, tiles):
            for i in range(LANES):
                place = code.at(b.load(to), i * ROW)
                code.store(b.fadd(code.load(place), code.load(code.at(b.load(at), i * ROW))), place)
            advanced(code, at, TILE)
            advanced(code, to, TILE)

    return intrinsic_of(LANES, emit)


def added() -> Callable[..., None]:
    """Makes ``(source, target, tiles)``, which adds so many tiles of sums to others."""
    block = _added()

    def run(source, target, tiles):
        block(source, target, tiles)

    return named(run)


@functools.cache
def owned() -> Callable[..., None]:
    """Makes ``(place, rows, step, lines)``, which fetches lines of a cache that will be written.

    There are ``lines`` of each of so many ``rows``, which are ``step`` bytes apart. None of them need exist.
    """

    def emit(code: Code, arguments: Values) -> None:
        place, rows, step, lines = arguments
        b, whole = code.builder, ir.IntType(32)
        row = variable(code, place)
        with looped(code, rows):
            at = variable(code, b.load(row))
            with looped(code, lines):
                pointer = b.inttoptr(b.load(at), ir.IntType(8).as_pointer())
                kind = ir.FunctionType(ir.VoidType(), [pointer.type, whole, whole, whole])
                function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
                b.call(function, [pointer, *(ir.Constant(whole, i) for i in (1, 3, 1))])
                advanced(code, at, ROW)
            b.store(b.add(b.load(row), step), row)

    return intrinsic_of(LANES, emit)


def _each_row(
    code: Code, arguments: Sequence[ir.Value], write: Callable[[ir.Value, ir.Value, ir.Value, int], None]
) -> None:
    """Call ``write(row, out, left, half)`` for each output channel's row of sums, and each half of its inputs.

    ``row`` is the place of the first tap's sums, and ``left`` the number of inputs from this half on.
    """
    sums, out, outputs, inputs, step = arguments
    b = code.builder
    place, to, rest = variable(code, sums), variable(code, out), variable(code, outputs)
    with looped(code, constant(2)):
        some = b.icmp_signed("<", b.load(rest), constant(LANES))
        row = variable(code, b.load(place))
        with looped(code, b.select(some, b.load(rest), constant(LANES))):
            for half in range(2):
                write(code.at(b.load(row), half * TILE), b.load(to), code.at(inputs, -half * LANES), half)
            advanced(code, row, ROW)
            b.store(b.add(b.load(to), step), to)
        advanced(code, place, 2 * TILE)
        advanced(code, rest, -LANES)


@functools.cache
def _scattered() -> Callable[..., None]:
    """Makes the instructions of :func:`scattered`."""

    def emit(code: Code, arguments: Values) -> None:
        sums, out, outputs, inputs, places, table, step, adds = arguments
        b = code.builder
        taps, near = number(code, table), number(code, table, 1)
        kind = ir.VectorType(INT, LANES)
        lanes = [
            b.load(b.inttoptr(code.at(places, half * LANES * PLACE), kind.as_pointer()), align=PLACE)
            for half in range(2)
        ]
        adding = b.icmp_signed("!=", adds, constant(0))
        neighbours = b.icmp_signed("!=", near, constant(0))

        def spread(values: ir.Value, base: ir.Value, mask: ir.Value, half: int) -> None:
            first = b.insert_element(ir.Constant(kind, ir.Undefined), base, constant(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            every = b.add(b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros), lanes[half])
            pointers = b.inttoptr(every, ir.VectorType(ir.FloatType().as_pointer(), LANES))
            before = b.select(adding, mask, masks.none(code))
            name = f"gather.v{LANES}f32.v{LANES}p0"
            old = masks.called(code, name, code.vector, [pointers, masks.ALIGN, before, code.splat(0.0)])
            name = f"scatter.v{LANES}f32.v{LANES}p0"
            masks.called(code, name, ir.VoidType(), [b.fadd(values, old), pointers, masks.ALIGN, mask])

        def write(row: ir.Value, to: ir.Value, left: ir.Value, half: int) -> None:
            mask = masks.below(code, left)
            entry, place = variable(code, code.at(table, 2 * PLACE)), variable(code, row)
            with looped(code, b.select(b.icmp_signed(">", left, constant(0)), taps, constant(0))):
                base, values = b.add(to, number(code, b.load(entry))), code.load(b.load(place))

                def once(beside: bool) -> None:
                    if beside:
                        at = b.add(base, b.extract_element(lanes[half], constant(0)))
                        old = masks.load(code, at, b.select(adding, mask, masks.none(code)))
                        masks.store(code, b.fadd(values, old), at, mask)
                    else:
                        spread(values, base, mask, half)

                either(code, neighbours, once)
                advanced(code, entry, PLACE)
                advanced(code, place, len(SUMS) * TILE)

        _each_row(code, (sums, out, outputs, inputs, step), write)

    return intrinsic_of(LANES, emit)


def scattered() -> Callable[..., None]:
    """Makes ``(sums, out, outputs, inputs, places, table, step, adds)``, which writes sums anywhere.

    They are those of ``outputs`` by ``inputs`` channels. The next output channel is ``step`` bytes further at ``out``,
    and each input's place is in ``places``. ``table`` has the number of taps, whether inputs are neighbours in memory,
    and the place of each tap. What is there is added where ``adds`` is not 0.
    """
    block = _scattered()

    def run(sums, out, outputs, inputs, places, table, step, adds):
        block(sums, out, outputs, inputs, places, table, step, adds)

    return named(run)


@functools.cache
def _turned() -> Callable[..., None]:
    """Makes the instructions of :func:`turned`."""

    def emit(code: Code, arguments: Values) -> None:
        sums, out, outputs, inputs, places, table, step, adds = arguments
        b, nothing = code.builder, masks.none(code)
        taps = number(code, table)
        adding = b.icmp_signed("!=", adds, constant(0))

        def write(row: ir.Value, to: ir.Value, left: ir.Value, half: int) -> None:
            entry, rest = variable(code, code.at(table, PLACE)), variable(code, taps)
            base = variable(code, to)
            turns = b.udiv(b.add(taps, constant(LANES - 1)), constant(LANES))
            with looped(code, b.select(b.icmp_signed(">", left, constant(0)), turns, constant(0))):
                rows = [code.load(b.add(row, number(code, b.load(entry), i))) for i in range(LANES)]
                some, vectors = masks.below(code, b.load(rest)), list(transposed(code, rows))
                spots = []
                for i in range(LANES):
                    exists = b.icmp_signed(">", left, constant(i))
                    # Of inputs that do not exist the address is that of the first.
                    channel = b.select(exists, constant(half * LANES + i), constant(0))
                    at = b.add(b.load(base), number(code, b.add(places, b.mul(channel, constant(PLACE)))))
                    spots.append((at, b.select(exists, some, nothing)))

                def put(together: bool, vectors: list[ir.Value] = vectors, spots: list[Any] = spots) -> None:
                    # All are read before any is written: a vector read reaches over the next input's place.
                    if together:
                        vectors = [
                            b.fadd(vector, masks.load(code, *spot)) for vector, spot in zip(vectors, spots, strict=True)
                        ]
                    for vector, spot in zip(vectors, spots, strict=True):
                        masks.store(code, vector, *spot)

                either(code, adding, put)
                advanced(code, entry, LANES * PLACE)
                advanced(code, rest, -LANES)
                advanced(code, base, ROW)

        _each_row(code, (sums, out, outputs, inputs, step), write)

    return intrinsic_of(LANES, emit)


def turned() -> Callable[..., None]:
    """Makes ``(sums, out, outputs, inputs, places, table, step, adds)`` as :func:`scattered`, for neighbouring taps.

    ``table`` has the number of taps, and for each of them, in the order of memory, where its sums lie behind the first
    ones. Up to a multiple of :data:`LANES` any such places follow.
    """
    block = _turned()

    def run(sums, out, outputs, inputs, places, table, step, adds):
        block(sums, out, outputs, inputs, places, table, step, adds)

    return named(run)
